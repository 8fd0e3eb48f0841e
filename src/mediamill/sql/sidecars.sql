-- Subtitles beside a film: one for each language of a media, as text, until the media is deleted.

-- name: put
-- No row for a media that is deleted, expired or not there, or that has as many as it may ($9).
WITH held AS (
    SELECT tenant_id, id FROM media
    WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL AND state <> 'expired'
    FOR UPDATE
)
INSERT INTO sidecars AS s (tenant_id, media_id, language, label, format, charset, cues, body)
SELECT tenant_id, id, $3, $4, $5, $6, $7, $8 FROM held
WHERE $9 > (SELECT count(*) FROM sidecars AS o
            WHERE o.tenant_id = $1 AND o.media_id = $2 AND o.language <> $3)
ON CONFLICT (tenant_id, media_id, language) DO UPDATE
SET label = excluded.label, format = excluded.format, charset = excluded.charset,
    cues = excluded.cues, body = excluded.body, created_at = now()
RETURNING created_at

-- name: list
SELECT language, label, format, charset, cues, octet_length(body) AS bytes, created_at
FROM sidecars WHERE tenant_id = $1 AND media_id = $2 ORDER BY language

-- name: texts
SELECT language, label, format, body
FROM sidecars WHERE tenant_id = $1 AND media_id = $2 ORDER BY language

-- name: remove
DELETE FROM sidecars WHERE tenant_id = $1 AND media_id = $2 AND language = $3 RETURNING 1
