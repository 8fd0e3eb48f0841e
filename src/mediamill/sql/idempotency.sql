-- Idempotency-Key rows live in the transaction of what they guard.

-- name: claim
-- Waits for a concurrent request with the same key (bounded by lock_timeout), then sees its row.
INSERT INTO idempotency (tenant_id, method, route, key, fingerprint, expires_at)
VALUES ($1, $2, $3, $4, $5, now() + $6::interval)
ON CONFLICT (tenant_id, method, route, key) DO NOTHING
RETURNING 1

-- name: get
SELECT fingerprint, status, body, location, about FROM idempotency
WHERE tenant_id = $1 AND method = $2 AND route = $3 AND key = $4

-- name: renew_expired
-- A key past its retention counts as never used.
DELETE FROM idempotency
WHERE tenant_id = $1 AND method = $2 AND route = $3 AND key = $4 AND expires_at < now()

-- name: store
UPDATE idempotency SET status = $5, body = $6, location = $7, about = $8
WHERE tenant_id = $1 AND method = $2 AND route = $3 AND key = $4
