-- The log of events: following it without missing any, and telling what one says.

-- name: written
-- Events above a number, in order, of all tenants.
SELECT tenant_id, id, type, media_id, job_id FROM events WHERE id > $1 ORDER BY id LIMIT $2

-- name: newest
-- The highest number that was given out, also if its event is not there, any more or yet.
SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM events_id_seq

-- name: writers
-- Transactions that may have taken a number and not committed yet: whoever writes events holds this
-- lock from before it takes its first number until after its rows can be seen.
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = 'events'::regclass AND mode = 'RowExclusiveLock'
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())

-- name: oldest
-- The lowest number that is still kept; with an empty log, the next one.
SELECT coalesce((SELECT id FROM events ORDER BY id LIMIT 1),
                (SELECT last_value + is_called::int FROM events_id_seq))

-- name: told
-- These events with what there is to say about their media.
SELECT e.tenant_id, e.id, e.event_id, e.type, e.media_id, e.job_id, e.data, e.at,
       m.state AS media_state, m.kind, m.metadata, m.size, m.width, m.height, m.duration_seconds,
       manifest.recipe AS set_recipe, manifest.recipe_version AS set_recipe_version,
       manifest.variants
FROM unnest($1::bigint[]) AS wanted (id)
JOIN events AS e ON e.id = wanted.id
LEFT JOIN media AS m ON m.tenant_id = e.tenant_id AND m.id = e.media_id AND m.deleted_at IS NULL
LEFT JOIN LATERAL (
    SELECT jsonb_agg(jsonb_build_object(
               'name', v.name, 'content_type', v.content_type, 'bytes', v.bytes,
               'sha256', v.sha256, 'width', v.width, 'height', v.height,
               'duration_seconds', v.duration_seconds) ORDER BY v.position) AS variants,
           min(v.recipe) AS recipe, min(v.recipe_version) AS recipe_version
    FROM variants AS v
    WHERE e.type IN ('media.ready', 'variant.ready')
      AND v.tenant_id = m.tenant_id AND v.media_id = m.id AND v.set_id = e.data ->> 'set'
) AS manifest ON true
ORDER BY e.id

-- name: of_media
-- Events of a media after one number and up to another.
SELECT id FROM events
WHERE tenant_id = $1 AND media_id = $2 AND id > $3 AND id <= $4 ORDER BY id LIMIT $5

-- name: of_job
SELECT id FROM events
WHERE tenant_id = $1 AND job_id = $2 AND type LIKE 'job.%' AND id > $3 AND id <= $4 ORDER BY id LIMIT $5

-- name: of_tenant
SELECT id FROM events
WHERE tenant_id = $1 AND id > $2 AND id <= $3 ORDER BY id LIMIT $4

-- name: progress
-- What runs now, over all tenants: as many rows as the fleet has slots.
SELECT tenant_id, id, media_id, role, stage, progress, attempt, detail -> 'outputs' AS outputs FROM jobs
WHERE state = 'processing' AND role IN ('main', 'job')
