-- What an operator set by queue, and what the workers offer. Installation-wide.

-- name: controls
SELECT queue, paused, concurrency FROM queues

-- name: set_paused
INSERT INTO queues (queue, paused) VALUES ($1, $2)
ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused, changed_at = now()

-- name: set_concurrency
INSERT INTO queues (queue, concurrency) VALUES ($1, $2)
ON CONFLICT (queue) DO UPDATE SET concurrency = excluded.concurrency, changed_at = now()

-- name: offer
-- What a worker can do, as parallel arrays; the latest worker's word counts.
INSERT INTO kinds (kind, version, queue, max_attempts, timeout_seconds, concurrency)
SELECT * FROM unnest($1::text[], $2::int[], $3::text[], $4::int[], $5::float8[], $6::int[])
ON CONFLICT (kind, version) DO UPDATE
SET queue = excluded.queue, max_attempts = excluded.max_attempts,
    timeout_seconds = excluded.timeout_seconds, concurrency = excluded.concurrency,
    seen_at = now()

-- name: offered
SELECT kind, version, queue, max_attempts, timeout_seconds, concurrency FROM kinds
WHERE kind = $1 ORDER BY version DESC

-- name: offered_kinds
SELECT DISTINCT kind FROM kinds ORDER BY kind

-- name: limits
-- What a worker follows: every queue that anything was set for, and every kind with a cap, as its
-- newest version has it among those that workers offer now.
SELECT queue, NULL AS kind, paused, concurrency FROM queues
UNION ALL
SELECT NULL, kind, false, concurrency FROM (
    SELECT DISTINCT ON (kind) kind, concurrency FROM kinds
    WHERE seen_at > now() - $1::interval ORDER BY kind, version DESC
) AS newest WHERE concurrency IS NOT NULL

-- name: forget_kinds
-- Kinds that no worker has offered for so long.
DELETE FROM kinds WHERE seen_at < now() - $1::interval
