-- Endpoints and what is delivered to them.

-- name: add_endpoint
WITH made AS (
    INSERT INTO endpoints (tenant_id, id, url, origin, description, types, payload, payload_version,
                           signing, state)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'enabled')
    RETURNING *
), secret AS (
    INSERT INTO endpoint_secrets (tenant_id, endpoint_id, version, value)
    SELECT tenant_id, id, 1, $10 FROM made
)
SELECT * FROM made

-- name: endpoints
-- Newest first, below the cursor $2; $3 rows.
SELECT * FROM endpoints
WHERE tenant_id = $1 AND state <> 'deleted' AND ($2::uuid IS NULL OR id < $2)
ORDER BY id DESC LIMIT $3

-- name: endpoint_count
SELECT count(*) FROM endpoints WHERE tenant_id = $1 AND state <> 'deleted'

-- name: endpoint
SELECT * FROM endpoints WHERE tenant_id = $1 AND id = $2 AND state <> 'deleted'

-- name: endpoint_for_change
SELECT * FROM endpoints WHERE tenant_id = $1 AND id = $2 AND state <> 'deleted' FOR UPDATE

-- name: change_endpoint
UPDATE endpoints
SET url = $3, origin = $4, description = $5, types = $6, payload = $7, payload_version = $8,
    state = $9, reason = $10,
    failures = CASE WHEN $9 = 'enabled' AND state <> 'enabled' THEN 0 ELSE failures END,
    failing_since = CASE WHEN $9 = 'enabled' AND state <> 'enabled' THEN NULL ELSE failing_since END,
    open_until = CASE WHEN $9 = 'enabled' AND state <> 'enabled' THEN NULL ELSE open_until END,
    changed_at = now(), version = version + 1
WHERE tenant_id = $1 AND id = $2
RETURNING *

-- name: end_pending
-- What an endpoint that leaves, or is switched off, still had before it.
UPDATE deliveries
SET state = $3, reason = $4, finished_at = now(), leased_until = NULL
WHERE tenant_id = $1 AND endpoint_id = $2 AND state = 'pending'

-- name: secrets
-- Those that sign now, the newest first.
SELECT version, value, retires_at FROM endpoint_secrets
WHERE tenant_id = $1 AND endpoint_id = $2 AND (retires_at IS NULL OR retires_at > now())
ORDER BY version DESC

-- name: rotate
WITH newest AS (
    SELECT max(version) AS version FROM endpoint_secrets WHERE tenant_id = $1 AND endpoint_id = $2
), retired AS (
    UPDATE endpoint_secrets
    SET retires_at = least(coalesce(retires_at, 'infinity'), now() + $4::interval)
    WHERE tenant_id = $1 AND endpoint_id = $2
)
INSERT INTO endpoint_secrets (tenant_id, endpoint_id, version, value)
SELECT $1, $2, version + 1, $3 FROM newest
RETURNING version

-- name: callback_endpoint
-- The endpoint of this origin, the oldest one.
SELECT id FROM endpoints
WHERE tenant_id = $1 AND origin = $2 AND state = 'enabled' ORDER BY id LIMIT 1

-- name: add_callback
INSERT INTO callbacks (tenant_id, subject_id, endpoint_id, url) VALUES ($1, $2, $3, $4)
ON CONFLICT (tenant_id, subject_id) DO UPDATE
SET endpoint_id = excluded.endpoint_id, url = excluded.url

-- name: test_event
-- An event of its own for one endpoint, whatever its filter says.
WITH said AS (
    INSERT INTO events (tenant_id, type, data)
    VALUES ($1, 'webhook.test', jsonb_build_object('endpoint', $3::text))
    RETURNING *
)
INSERT INTO deliveries (tenant_id, endpoint_id, event, event_id, type)
SELECT tenant_id, $2, id, event_id, type FROM said
RETURNING id

-- name: announce_disabled
INSERT INTO events (tenant_id, type, data)
VALUES ($1, 'endpoint.disabled', jsonb_build_object('endpoint', $2::text, 'reason', $3::text))

-- name: any_due
SELECT EXISTS (SELECT 1 FROM deliveries WHERE state = 'pending' AND due_at <= now())

-- name: lazily
-- A crash of the server may forget the last moments of this: then a delivery is sent again, as it may
-- be anyhow, and nobody waits for the disk.
SET LOCAL synchronous_commit = off

-- name: lock_claims
-- One claims at a time in the fleet, so that what is in flight is counted right.
SELECT pg_advisory_xact_lock(hashtext('mediamill webhooks'))

-- name: claim
-- Due deliveries for $1 free slots: at most $2 in flight per endpoint, the endpoint that waited longest
-- first. One whose breaker has tripped ($4 failures) gets a single probe, and failing endpoints share
-- $5 slots, so that they never hold those of the others. $6 and $7 are what each tenant has on its way
-- here: the one with the least comes first, and none gets more than $8, so that endpoints that are new
-- and hang leave room to the other tenants.
WITH busy AS (
    SELECT d.tenant_id, d.endpoint_id, count(*) AS flying
    FROM deliveries AS d
    WHERE d.state = 'pending' AND d.leased_until > now()
    GROUP BY d.tenant_id, d.endpoint_id
), standing AS (
    SELECT coalesce(sum(b.flying), 0) AS failing_flying
    FROM busy AS b JOIN endpoints AS e ON e.tenant_id = b.tenant_id AND e.id = b.endpoint_id
    WHERE e.failures > 0
), candidates AS (
    SELECT e.tenant_id, e.id AS endpoint_id, d.id, e.failures > 0 AS failing, e.served_at, d.due_at
    FROM endpoints AS e
    LEFT JOIN busy AS b ON b.tenant_id = e.tenant_id AND b.endpoint_id = e.id
    CROSS JOIN LATERAL (
        SELECT w.id, w.due_at FROM deliveries AS w
        WHERE w.tenant_id = e.tenant_id AND w.endpoint_id = e.id AND w.state = 'pending'
          AND w.due_at <= now() AND (w.leased_until IS NULL OR w.leased_until <= now())
        ORDER BY w.due_at
        LIMIT greatest(0, CASE WHEN e.failures >= $4 THEN 1 ELSE $2 END - coalesce(b.flying, 0))
    ) AS d
    WHERE e.state = 'enabled' AND (e.open_until IS NULL OR e.open_until <= now())
), ordered AS (
    SELECT c.*, row_number() OVER (PARTITION BY c.failing
                                   ORDER BY c.served_at NULLS FIRST, c.due_at) AS place
    FROM candidates AS c
), shared AS (
    SELECT o.*, coalesce(h.flying, 0)
                + row_number() OVER (PARTITION BY o.tenant_id
                                     ORDER BY o.served_at NULLS FIRST, o.due_at) AS share
    FROM ordered AS o
    CROSS JOIN standing AS s
    LEFT JOIN unnest($6::text[], $7::int[]) AS h (tenant_id, flying) ON h.tenant_id = o.tenant_id
    WHERE NOT o.failing OR o.place <= greatest(0, $5 - s.failing_flying)
), chosen AS (
    SELECT tenant_id, id, endpoint_id FROM shared
    WHERE share <= $8
    ORDER BY share, served_at NULLS FIRST, due_at
    LIMIT $1
), taken AS (
    UPDATE deliveries AS d
    SET attempt = d.attempt + 1, leased_until = now() + $3::interval
    FROM chosen AS c
    WHERE d.tenant_id = c.tenant_id AND d.id = c.id AND d.state = 'pending'
    RETURNING d.*
), served AS (
    UPDATE endpoints AS e SET served_at = now()
    FROM (SELECT DISTINCT tenant_id, endpoint_id FROM taken) AS t
    WHERE e.tenant_id = t.tenant_id AND e.id = t.endpoint_id
)
SELECT t.tenant_id, t.id, t.endpoint_id, t.event, t.event_id, t.attempt,
       t.attempt - t.attempt_base AS tried, t.body, coalesce(t.url, e.url) AS url, e.payload,
       e.payload_version, e.signing,
       (SELECT array_agg(s.value ORDER BY s.version DESC) FROM endpoint_secrets AS s
        WHERE s.tenant_id = t.tenant_id AND s.endpoint_id = t.endpoint_id
          AND (s.retires_at IS NULL OR s.retires_at > now())) AS secrets
FROM taken AS t JOIN endpoints AS e ON e.tenant_id = t.tenant_id AND e.id = t.endpoint_id

-- name: keep_body
UPDATE deliveries AS d SET body = b.body
FROM unnest($1::text[], $2::uuid[], $3::bytea[]) AS b (tenant_id, id, body)
WHERE d.tenant_id = b.tenant_id AND d.id = b.id

-- name: record
-- The end of one attempt: $4 the new state of the delivery, due again after $5. $13 is 'good', 'bad'
-- or 'later', for the endpoint's own record; $14 shuts it for a while.
WITH settled AS (
    UPDATE deliveries
    SET state = $4, due_at = now() + $5::interval, leased_until = NULL, status = $10, reason = $6,
        finished_at = CASE WHEN $4 <> 'pending' THEN now() END
    WHERE tenant_id = $1 AND id = $2 AND attempt = $3 AND state = 'pending'
    RETURNING tenant_id, id, endpoint_id
), logged AS (
    INSERT INTO delivery_attempts (tenant_id, delivery_id, attempt, at, worker, duration_ms, timings,
                                   status, response, failure)
    SELECT $1, $2, $3, now() - make_interval(secs => $8::float8 / 1000), $7, $8, $9, $10, $11, $12
    ON CONFLICT DO NOTHING
)
UPDATE endpoints AS e
SET failures = CASE $13 WHEN 'good' THEN 0 WHEN 'bad' THEN e.failures + 1 ELSE e.failures END,
    failing_since = CASE $13 WHEN 'good' THEN NULL WHEN 'bad' THEN coalesce(e.failing_since, now())
                             ELSE e.failing_since END,
    open_until = CASE WHEN $13 = 'good' THEN NULL
                      WHEN $14::interval IS NOT NULL
                          THEN greatest(e.open_until, now() + $14::interval)
                      WHEN $13 = 'bad' AND e.failures + 1 >= $15
                          THEN now() + least($16::interval * power(2, least(e.failures + 1 - $15, 20)),
                                             $17::interval)
                      ELSE e.open_until END
FROM settled AS s
WHERE e.tenant_id = s.tenant_id AND e.id = s.endpoint_id
RETURNING e.failures, e.failing_since, e.state, e.id,
          (e.failing_since <= now() - $18::interval AND e.failures >= $19) AS worn_out

-- name: disable
UPDATE endpoints
SET state = 'disabled', reason = $3, changed_at = now(), version = version + 1
WHERE tenant_id = $1 AND id = $2 AND state = 'enabled'
RETURNING 1

-- name: deliveries
-- Of one endpoint, newest first, below the cursor $3; $4 states or NULL; $5 rows.
SELECT * FROM deliveries
WHERE tenant_id = $1 AND endpoint_id = $2 AND ($3::uuid IS NULL OR id < $3)
  AND ($4::text[] IS NULL OR state = ANY($4))
ORDER BY id DESC LIMIT $5

-- name: delivery
SELECT d.*, coalesce(d.url, e.url) AS called, e.state AS endpoint_state
FROM deliveries AS d JOIN endpoints AS e ON e.tenant_id = d.tenant_id AND e.id = d.endpoint_id
WHERE d.tenant_id = $1 AND d.id = $2

-- name: delivery_attempts
SELECT * FROM delivery_attempts WHERE tenant_id = $1 AND delivery_id = $2 ORDER BY attempt

-- name: redeliver
-- Once more from the beginning of the schedule, under the same event id.
UPDATE deliveries AS d
SET state = 'pending', reason = NULL, due_at = now(), leased_until = NULL, attempt_base = d.attempt,
    finished_at = NULL
FROM endpoints AS e
WHERE d.tenant_id = $1 AND d.id = $2 AND e.tenant_id = d.tenant_id AND e.id = d.endpoint_id
  AND e.state = 'enabled' AND (d.state <> 'pending' OR d.leased_until IS NULL)
RETURNING d.id

-- name: recover_old
-- Deliveries since a moment that did not arrive.
UPDATE deliveries
SET state = 'pending', reason = NULL, due_at = now(), attempt_base = attempt, finished_at = NULL
WHERE tenant_id = $1 AND endpoint_id = $2 AND created_at >= $3 AND state = 'exhausted'
RETURNING 1

-- name: recover_missed
-- Events since a moment that were not even noted, because the endpoint was off.
INSERT INTO deliveries (tenant_id, endpoint_id, event, event_id, type, media_id)
SELECT n.tenant_id, e.id, n.id, n.event_id, n.type, n.media_id
FROM events AS n JOIN endpoints AS e ON e.tenant_id = n.tenant_id
WHERE e.tenant_id = $1 AND e.id = $2 AND n.at >= $3 AND n.type <> 'webhook.test'
  AND (e.types IS NULL OR n.type = ANY (e.types)
       OR split_part(n.type, '.', 1) || '.*' = ANY (e.types))
ORDER BY n.id
ON CONFLICT DO NOTHING
RETURNING 1

-- name: figures
-- For the metrics.
SELECT (SELECT count(*) FROM deliveries WHERE state = 'pending') AS pending,
       coalesce((SELECT extract(epoch FROM now() - min(created_at)) FROM deliveries
                 WHERE state = 'pending'), 0)::float8 AS oldest_seconds,
       (SELECT count(*) FROM endpoints WHERE state = 'enabled') AS enabled,
       (SELECT count(*) FROM endpoints WHERE state = 'disabled') AS disabled
