-- Bytes that come in by parts. A writer holds a fence; only the newest one is written for.

-- name: open
INSERT INTO transfers (tenant_id, id, protocol, role, key, parts, size, part_bytes, wanted, metadata,
                       joins, expires_at, source, due_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, now() + $12::interval, $13,
        CASE WHEN $13::text IS NOT NULL THEN now() END)
ON CONFLICT (tenant_id, joins) WHERE joins IS NOT NULL DO NOTHING
RETURNING *

-- name: get
-- With what has become of its media, which is NULL while there is none.
SELECT t.*, t.expires_at <= now() AS expired, m.state AS media_state, m.deleted_at
FROM transfers AS t
LEFT JOIN media AS m ON m.tenant_id = t.tenant_id AND m.id = t.id
WHERE t.tenant_id = $1 AND t.id = $2

-- name: joined
-- The final upload that was made of these partial ones.
SELECT id FROM transfers WHERE tenant_id = $1 AND joins = $2

-- name: take
-- The caller is the writer from now on, at the offset that it believes in. A part of the writer
-- before it may still be on its way under the next number, so that number is not used again.
UPDATE transfers
SET fence = fence + 1, next_part = next_part + CASE WHEN writing THEN 1 ELSE 0 END, writing = true
WHERE tenant_id = $1 AND id = $2 AND received = $3 AND completed_at IS NULL AND expires_at > now()
RETURNING *

-- name: evict
-- Whoever writes now will find that it no longer may.
UPDATE transfers SET fence = fence + 1
WHERE tenant_id = $1 AND id = $2 AND writing AND completed_at IS NULL

-- name: settle_size
UPDATE transfers SET size = $3
WHERE tenant_id = $1 AND id = $2 AND size IS NULL AND received <= $3 RETURNING 1

-- name: advance
-- Parts are durable ($6.. their numbers, sizes, ETags): the offset follows, and the time to live begins
-- anew. No row when another writer has taken over.
WITH advanced AS (
    UPDATE transfers
    SET received = $4, tail_key = $9, tail_bytes = $10, next_part = $5, writing = NOT $11,
        expires_at = CASE WHEN received < $4 THEN greatest(expires_at, now() + $12::interval)
                     ELSE expires_at END
    WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND completed_at IS NULL
    RETURNING tenant_id, id, expires_at
), noted AS (
    INSERT INTO transfer_parts (tenant_id, transfer_id, number, size, etag)
    SELECT a.tenant_id, a.id, p.number, p.size, p.etag
    FROM advanced AS a, unnest($6::int[], $7::bigint[], $8::text[]) AS p (number, size, etag)
), prolonged AS (
    UPDATE media AS m SET upload_expires_at = a.expires_at
    FROM advanced AS a
    WHERE m.tenant_id = a.tenant_id AND m.id = a.id AND m.state = 'awaiting_upload'
)
SELECT expires_at FROM advanced

-- name: parts
SELECT number, size, etag FROM transfer_parts
WHERE tenant_id = $1 AND transfer_id = $2 ORDER BY number

-- name: complete
UPDATE transfers SET completed_at = now(), version = $3, received = size, writing = false,
                     tail_key = NULL, tail_bytes = 0
WHERE tenant_id = $1 AND id = $2 AND completed_at IS NULL
RETURNING 1

-- name: unfinished
-- All bytes are there, but whoever was to make them an object has not.
SELECT * FROM transfers
WHERE protocol = 'tus' AND received = size AND NOT writing AND completed_at IS NULL
  AND swept_at IS NULL AND expires_at > now()
ORDER BY expires_at
LIMIT $1

-- name: expired
-- Past their time with bytes that nobody wants: unfinished ones, and pieces that were to be joined.
SELECT tenant_id, id, protocol, key, parts, completed_at IS NULL OR role = 'partial' AS unwanted
FROM transfers
WHERE swept_at IS NULL AND expires_at < now() - $1::interval
ORDER BY expires_at
LIMIT $2

-- name: swept
UPDATE transfers SET swept_at = now() WHERE tenant_id = $1 AND id = $2

-- name: open_parts
SELECT parts FROM transfers WHERE swept_at IS NULL AND completed_at IS NULL

-- name: of_media
-- What is left in parts of a media that is erased.
SELECT key, parts FROM transfers WHERE tenant_id = $1 AND id = $2 AND completed_at IS NULL

-- name: end
-- Its client gave it up.
UPDATE transfers SET expires_at = now() - interval '1 day', fence = fence + 1
WHERE tenant_id = $1 AND id = $2 AND completed_at IS NULL
RETURNING 1

-- name: forget
DELETE FROM transfers
WHERE (tenant_id, id) IN (
    SELECT tenant_id, id FROM transfers
    WHERE swept_at < now() - interval '1 day' LIMIT $1)

-- name: claim_sources
-- What is to be fetched now. Whoever claims it has it for $2, and may ask for more; should two be at
-- it all the same, the fence tells them apart.
UPDATE transfers SET due_at = now() + $2::interval, tries = tries + 1
WHERE (tenant_id, id) IN (
    SELECT tenant_id, id FROM transfers
    WHERE source IS NOT NULL AND completed_at IS NULL AND swept_at IS NULL
      AND due_at <= now() AND expires_at > now()
    ORDER BY due_at LIMIT $1
    FOR UPDATE SKIP LOCKED)
RETURNING *

-- name: put_off
UPDATE transfers SET due_at = now() + $3::interval
WHERE tenant_id = $1 AND id = $2 AND completed_at IS NULL

-- name: size_known
-- The media of a file that is fetched learns its size, and its type if nobody had said one.
UPDATE media SET size = $3, content_type = $4, kind = $5, version = version + 1
WHERE tenant_id = $1 AND id = $2 AND state = 'awaiting_upload' AND deleted_at IS NULL

-- name: blame
-- Why the media of this upload will never come.
UPDATE media SET error = $3, version = version + 1
WHERE tenant_id = $1 AND id = $2 AND state = 'awaiting_upload' AND deleted_at IS NULL
