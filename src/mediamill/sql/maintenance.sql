-- The periodic duties. Each is safe to run twice and from several processes.

-- name: lock
-- One process at a time per duty, for the length of the transaction.
SELECT pg_try_advisory_xact_lock($1)

-- name: expired_leases
-- Held until the caller has settled them, so that a late beat waits and then finds the job gone. A
-- transaction of an effect that a frozen worker holds open (KEY SHARE) does not keep its job from us.
SELECT tenant_id, id, kind, queue, role, schema_version, media_id, recipe, recipe_version, generation,
       payload, attempt, max_attempts, crashes, resource_failures, fence, priority, turn, queued_at,
       started_at, parent_id, timeout_seconds, worker, cancel_requested
FROM jobs
WHERE state = 'processing' AND lease_until < now()
ORDER BY lease_until
LIMIT $1
FOR NO KEY UPDATE SKIP LOCKED

-- name: server_age
SELECT extract(epoch FROM now() - pg_postmaster_start_time())::float8

-- name: end_stalled
-- Sessions of our processes that stand still in the middle of a statement: the client has sent a part
-- of it and owes the rest. The server's own limit on silent transactions does not see these.
SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user
  AND application_name LIKE 'mediamill%' AND pid <> pg_backend_pid()
  AND state = 'active' AND wait_event_type = 'Client' AND query NOT ILIKE 'copy %'
  AND state_change < now() - $1::interval

-- name: orphans
-- Due jobs that should long have been claimed and have no waiting ticket. Only the head of each queue
-- is looked at: whoever is further back has not been passed over.
SELECT j.tenant_id, j.id, j.queue, j.priority, j.turn
FROM unnest($1::text[]) AS q (queue)
CROSS JOIN LATERAL (
    SELECT tenant_id, id, queue, priority, turn FROM jobs
    WHERE queue = q.queue AND state = 'queued'
      AND run_at < now() - $2::interval AND queued_at < now() - $2::interval
      AND turn < mediamill_later()
    ORDER BY priority DESC, turn, id
    LIMIT $3
) AS j
WHERE NOT EXISTS (
    SELECT 1 FROM mediamill_tickets AS t
    WHERE t.status = 'queued' AND t.payload = convert_to(j.tenant_id || '/' || j.id, 'UTF8')
)

-- name: closed_slots
-- Slots past their time. Each is looked up in storage before it is given up.
SELECT tenant_id, id, kind, upload_key, size, max_size, content_type
FROM media
WHERE state = 'awaiting_upload' AND deleted_at IS NULL AND upload_expires_at < now() - $1::interval
ORDER BY upload_expires_at
LIMIT $2

-- name: expired_media
SELECT tenant_id, id FROM media
WHERE expires_at < now() AND deleted_at IS NULL
ORDER BY expires_at
LIMIT $1

-- name: erasable
-- Media whose bytes may go now: nothing works on them any more.
SELECT e.tenant_id, e.media_id, m.upload_key
FROM erasures AS e
JOIN media AS m ON m.tenant_id = e.tenant_id AND m.id = e.media_id
WHERE NOT EXISTS (
    SELECT 1 FROM jobs AS j
    WHERE j.tenant_id = e.tenant_id AND j.media_id = e.media_id AND j.state IN ('queued', 'processing'))
ORDER BY e.requested_at
LIMIT $1

-- name: erased
WITH done AS (
    DELETE FROM erasures WHERE tenant_id = $1 AND media_id = $2 RETURNING tenant_id, media_id
), forgotten AS (
    DELETE FROM sets AS s USING done AS d
    WHERE s.tenant_id = d.tenant_id AND s.media_id = d.media_id
), hushed AS (
    UPDATE events AS e SET data = jsonb_build_object('state', e.data -> 'state')
    FROM done AS d
    WHERE e.tenant_id = d.tenant_id AND e.media_id = d.media_id AND e.type = 'media.preview'
), unsaid AS (
    UPDATE deliveries AS w SET body = NULL
    FROM done AS d
    WHERE w.tenant_id = d.tenant_id AND w.media_id = d.media_id AND w.body IS NOT NULL
), uncalled AS (
    DELETE FROM callbacks AS c USING done AS d
    WHERE c.tenant_id = d.tenant_id AND c.subject_id = d.media_id
)
SELECT 1 FROM done

-- name: expired_sets
SELECT tenant_id, media_id, recipe, recipe_version, set_id FROM sets
WHERE expires_at < now()
ORDER BY expires_at
LIMIT $1

-- name: forget_set
DELETE FROM sets
WHERE tenant_id = $1 AND media_id = $2 AND recipe = $3 AND recipe_version = $4 AND set_id = $5
  AND expires_at < now()
RETURNING 1

-- name: staging_holders
-- Which of these attempts are still at work: their staged objects stay.
SELECT j.id, j.fence
FROM unnest($1::text[], $2::uuid[], $3::bigint[]) AS staged (tenant_id, id, fence)
JOIN jobs AS j ON j.tenant_id = staged.tenant_id AND j.id = staged.id AND j.fence = staged.fence
WHERE j.state = 'processing'

-- name: forget_jobs
-- Ended jobs past their retention that no media shows any more.
DELETE FROM jobs AS j
WHERE (j.tenant_id, j.id) IN (
    SELECT tenant_id, id FROM jobs AS old
    WHERE old.expires_at < now() AND old.state IN ('completed', 'failed', 'canceled')
      AND (old.media_id IS NULL OR EXISTS (
          SELECT 1 FROM media AS m
          WHERE m.tenant_id = old.tenant_id AND m.id = old.media_id AND m.deleted_at IS NOT NULL))
    LIMIT $1)

-- name: forget_events
DELETE FROM events
WHERE (tenant_id, id) IN (
    SELECT tenant_id, id FROM (SELECT tenant_id, id, at FROM events ORDER BY id LIMIT $2) AS first
    WHERE at < now() - $1::interval)

-- name: forget_deliveries
DELETE FROM deliveries
WHERE (tenant_id, id) IN (
    SELECT tenant_id, id FROM deliveries
    WHERE state <> 'pending' AND finished_at < now() - $1::interval LIMIT $2)

-- name: forget_endpoints
-- Endpoints that were deleted and whose deliveries are forgotten.
DELETE FROM endpoints
WHERE (tenant_id, id) IN (
    SELECT tenant_id, id FROM endpoints AS e
    WHERE e.state = 'deleted' AND e.changed_at < now() - $1::interval
      AND NOT EXISTS (SELECT 1 FROM deliveries AS d
                      WHERE d.tenant_id = e.tenant_id AND d.endpoint_id = e.id)
    LIMIT $2)

-- name: forget_keys
DELETE FROM idempotency
WHERE (tenant_id, method, route, key) IN (
    SELECT tenant_id, method, route, key FROM idempotency WHERE expires_at < now() LIMIT $1)

-- name: queue_figures
-- Depth, age of the oldest due job, and running jobs, by queue.
SELECT queue,
       count(*) FILTER (WHERE state = 'queued') AS queued,
       count(*) FILTER (WHERE state = 'processing') AS processing,
       coalesce(extract(epoch FROM now() - min(run_at) FILTER (WHERE state = 'queued'
                                                                AND run_at <= now())), 0)::float8
           AS oldest_seconds
FROM jobs WHERE state IN ('queued', 'processing') GROUP BY queue

-- name: queue_rates
-- Jobs a minute that each queue completed in the last five, from its last 10,000 at most.
SELECT q.queue, (60 * count(lately.finished_at)
                 / extract(epoch FROM now() - CASE WHEN count(lately.finished_at) < 10000
                                                   THEN now() - interval '5 min'
                                                   ELSE min(lately.finished_at) END))::float8 AS rate
FROM unnest($1::text[]) AS q (queue)
LEFT JOIN LATERAL (
    SELECT finished_at FROM jobs
    WHERE queue = q.queue AND state = 'completed' AND finished_at > now() - interval '5 min'
      AND finished_at < now()
    ORDER BY finished_at DESC
    LIMIT 10000
) AS lately ON true
GROUP BY q.queue

-- name: dead_letters
SELECT count(*) AS jobs,
       coalesce(extract(epoch FROM now() - min(finished_at)), 0)::float8 AS oldest_seconds
FROM jobs WHERE state = 'failed' AND dead_letter

-- name: wanted_uploads
-- Which of these media still want their uploaded bytes.
SELECT id FROM media
WHERE tenant_id = $1 AND id = ANY($2::uuid[]) AND deleted_at IS NULL AND state <> 'expired'
UNION
SELECT id FROM transfers
WHERE tenant_id = $1 AND id = ANY($2::uuid[]) AND swept_at IS NULL AND expires_at > now()
