-- What belongs to the installation and not to a tenant: identity, secrets, workers, API keys' lookup.

-- name: identify
-- The installation's id, made at the first call.
WITH made AS (
    INSERT INTO instance (id) VALUES ($1) ON CONFLICT DO NOTHING RETURNING id
)
SELECT id FROM made UNION ALL SELECT id FROM instance LIMIT 1

-- name: holds_objects
-- Whether any original was ever accepted and is not deleted: then the storage cannot be a new one.
SELECT EXISTS (SELECT 1 FROM media WHERE object_version IS NOT NULL AND deleted_at IS NULL)

-- name: secrets
-- Newest first; the first one signs, all of them verify.
SELECT version, value FROM secrets
WHERE purpose = $1 AND (retires_at IS NULL OR retires_at > now())
ORDER BY version DESC

-- name: add_secret
-- A newer secret; the older ones go on verifying for the overlap.
WITH older AS (
    UPDATE secrets SET retires_at = now() + $3::interval
    WHERE purpose = $1 AND retires_at IS NULL
)
INSERT INTO secrets (purpose, version, value)
SELECT $1, coalesce(max(version), 0) + 1, $2 FROM secrets WHERE purpose = $1

-- name: add_first_secret
INSERT INTO secrets (purpose, version, value) VALUES ($1, 1, $2) ON CONFLICT DO NOTHING

-- name: register_worker
INSERT INTO workers (id, host, pid, version, slots, sandbox) VALUES ($1, $2, $3, $4, $5, $6)

-- name: see_worker
UPDATE workers SET seen_at = now(), stopping = $2 WHERE id = $1

-- name: forget_worker
DELETE FROM workers WHERE id = $1 OR seen_at < now() - interval '1 hour'

-- name: worker_pids
SELECT pid FROM workers
WHERE host = $1 AND seen_at > now() - interval '15 seconds' AND NOT stopping

-- name: slots
-- Slots per queue of the workers seen lately.
SELECT s.key AS queue, sum(s.value::int)::int AS slots
FROM workers AS w, jsonb_each_text(w.slots) AS s
WHERE w.seen_at > now() - interval '15 seconds' AND NOT w.stopping
GROUP BY s.key

-- name: add_tenant
INSERT INTO tenants (tenant_id) VALUES ($1) ON CONFLICT DO NOTHING

-- name: add_key
INSERT INTO api_keys (tenant_id, id, name, digest, last4, scopes, expires_at)
VALUES ($1, $2, $3, $4, $5, $6, now() + $7::interval)

-- name: find_key
SELECT tenant_id, digest, scopes FROM api_keys
WHERE id = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())

-- name: get_key
SELECT id, name, last4, scopes, created_at, expires_at, revoked_at, last_used_at
FROM api_keys WHERE tenant_id = $1 AND id = $2

-- name: list_keys
SELECT id, name, last4, scopes, created_at, expires_at, revoked_at, last_used_at
FROM api_keys WHERE tenant_id = $1 ORDER BY created_at, id

-- name: revoke_key
UPDATE api_keys SET revoked_at = now() WHERE tenant_id = $1 AND id = $2 AND revoked_at IS NULL
RETURNING 1

-- name: use_key
UPDATE api_keys SET last_used_at = now()
WHERE id = $1 AND (last_used_at IS NULL OR last_used_at < now() - interval '1 minute')

-- name: drain_requested
SELECT drain_requested FROM workers WHERE id = $1

-- name: request_drain
UPDATE workers SET drain_requested = true WHERE id = $1 RETURNING 1

-- name: workers
SELECT id, host, pid, version, slots, sandbox, started_at, seen_at, stopping, drain_requested
FROM workers WHERE seen_at > now() - interval '15 seconds' ORDER BY started_at
