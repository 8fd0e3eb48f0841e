-- The life of a media, in order, as far as its jobs do not move it (see jobs.sql).

-- name: open
-- moves: media -> awaiting_upload
WITH opened AS (
    INSERT INTO media (tenant_id, id, state, kind, filename, content_type, size, sha256, upload_key,
                       upload_expires_at, recipe, recipe_version, metadata, expires_at, max_size)
    VALUES ($1, $2, 'awaiting_upload', $3, $4, $5, $6, $7, $8, now() + $9::interval, $10, $11, $12,
            now() + $13::interval, $14)
    RETURNING tenant_id, id
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, to_state)
    SELECT tenant_id, 'media', id, 'awaiting_upload' FROM opened
)
SELECT 1 FROM opened

-- name: accept
-- moves: media awaiting_upload -> uploaded, media uploaded -> queued, job -> queued
-- The original is pinned and its jobs are born, in one statement; no row when another call was first.
-- $5.. are parallel arrays of the jobs: ids, kinds, queues, roles, priorities. $11 is when the object
-- was stored, or NULL; $12 its size, or NULL where the row has it.
WITH accepted AS (
    UPDATE media
    SET state = 'queued', object_version = $3, uploaded_at = now(), generation = 1, kind = $4,
        size = coalesce($12, size), state_at = now(), version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND state = 'awaiting_upload' AND deleted_at IS NULL
    RETURNING *
), born AS (
    INSERT INTO jobs (tenant_id, id, state, kind, queue, role, media_id, recipe, recipe_version,
                      generation, priority, max_attempts, turn)
    SELECT a.tenant_id, j.id, 'queued', j.kind, j.queue, j.role, a.id, a.recipe, a.recipe_version,
           a.generation, j.priority, $10, mediamill_turn(j.queue, j.priority, a.tenant_id)
    FROM accepted AS a,
         unnest($5::uuid[], $6::text[], $7::text[], $8::text[], $9::int[])
             AS j (id, kind, queue, role, priority)
    RETURNING tenant_id, id, media_id, role, turn
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, from_state, to_state, details)
    SELECT tenant_id, 'media', id, NULL::uuid, 'awaiting_upload', 'uploaded',
           jsonb_build_object('stored_at', $11::timestamptz)
    FROM accepted
    UNION ALL
    SELECT tenant_id, 'media', id, NULL, 'uploaded', 'queued', NULL FROM accepted
    UNION ALL
    SELECT tenant_id, 'job', media_id, id, NULL, 'queued', NULL FROM born
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'media.uploaded', id, NULL::uuid, jsonb_build_object('state', 'uploaded')
    FROM accepted
    UNION ALL
    SELECT tenant_id, 'media.queued', id, NULL, jsonb_build_object('state', 'queued') FROM accepted
    UNION ALL
    SELECT tenant_id, 'job.queued', media_id, id, jsonb_build_object('state', 'queued') FROM born
)
SELECT (SELECT jsonb_object_agg(id, turn) FROM born) AS turns FROM accepted

-- name: add_jobs
-- moves: job -> queued
-- More jobs for a media that is already accepted (the preview of a video that came as an image).
WITH born AS (
    INSERT INTO jobs (tenant_id, id, state, kind, queue, role, media_id, recipe, recipe_version,
                      generation, priority, max_attempts, turn)
    SELECT m.tenant_id, $3, 'queued', $4, $5, $6, m.id, m.recipe, m.recipe_version, m.generation,
           $7, $8, mediamill_turn($5, $7, m.tenant_id)
    FROM media AS m
    WHERE m.tenant_id = $1 AND m.id = $2 AND m.deleted_at IS NULL
    RETURNING tenant_id, id, media_id, turn
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, to_state)
    SELECT tenant_id, 'job', media_id, id, 'queued' FROM born
)
SELECT turn FROM born

-- name: expire
-- moves: media awaiting_upload -> expired
WITH expired AS (
    UPDATE media SET state = 'expired', state_at = now(), version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND state = 'awaiting_upload' AND deleted_at IS NULL
    RETURNING tenant_id, id
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, from_state, to_state)
    SELECT tenant_id, 'media', id, 'awaiting_upload', 'expired' FROM expired
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, data)
    SELECT tenant_id, 'media.expired', id, jsonb_build_object('state', 'expired') FROM expired
), condemned AS (
    INSERT INTO erasures (tenant_id, media_id) SELECT tenant_id, id FROM expired
    ON CONFLICT DO NOTHING
), unread AS (
    DELETE FROM sidecars AS c USING expired AS x WHERE c.tenant_id = x.tenant_id AND c.media_id = x.id
)
SELECT 1 FROM expired

-- name: reprocess
-- moves: media ready -> queued, media failed -> queued, job -> queued
-- A new generation with a job of its own; the published set stays served until it is replaced.
WITH again AS (
    UPDATE media AS m
    SET state = 'queued', state_at = now(), generation = m.generation + 1, error = NULL,
        recipe = $4, recipe_version = $5, version = m.version + 1
    FROM (SELECT tenant_id, id, state FROM media WHERE tenant_id = $1 AND id = $2 FOR UPDATE) AS was
    WHERE m.tenant_id = was.tenant_id AND m.id = was.id
      AND m.state IN ('ready', 'failed') AND m.deleted_at IS NULL
    RETURNING m.*, was.state AS was_state
), born AS (
    INSERT INTO jobs (tenant_id, id, state, kind, queue, role, media_id, recipe, recipe_version,
                      generation, priority, max_attempts, turn)
    SELECT tenant_id, $3, 'queued', $6, $7, 'main', id, recipe, recipe_version, generation, 0, $8,
           mediamill_turn($7, 0, tenant_id)
    FROM again
    RETURNING tenant_id, id, media_id, turn
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, from_state, to_state, code)
    SELECT tenant_id, 'media', id, NULL::uuid, was_state, 'queued', 'reprocess' FROM again
    UNION ALL
    SELECT tenant_id, 'job', media_id, id, NULL, 'queued', 'reprocess' FROM born
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'media.queued', id, NULL::uuid,
           jsonb_build_object('state', 'queued', 'reason', 'reprocess')
    FROM again
    UNION ALL
    SELECT tenant_id, 'job.queued', media_id, id, jsonb_build_object('state', 'queued') FROM born
)
SELECT generation, (SELECT turn FROM born) AS turn FROM again

-- name: replayed
-- moves: media failed -> queued
-- The media of a replayed main job goes with it into a new generation.
WITH again AS (
    UPDATE media
    SET state = 'queued', state_at = now(), generation = generation + 1, error = NULL,
        version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND state = 'failed' AND deleted_at IS NULL
      AND generation = $3
    RETURNING tenant_id, id, generation
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, from_state, to_state, code)
    SELECT tenant_id, 'media', id, $4, 'failed', 'queued', 'replayed' FROM again
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'media.queued', id, $4::uuid,
           jsonb_build_object('state', 'queued', 'reason', 'replayed')
    FROM again
)
SELECT generation FROM again

-- name: describe
-- What the probe found, written as soon as it is known by a worker that holds the job ($3 its id, $4 its
-- fence). Shown in the status while the work goes on.
WITH holder AS (
    SELECT tenant_id, media_id FROM jobs
    WHERE tenant_id = $1 AND id = $3 AND fence = $4 AND state = 'processing' AND media_id = $2
    FOR SHARE
), described AS (
    UPDATE media AS m
    SET kind = coalesce($5, m.kind), detected_type = coalesce($6, m.detected_type),
        width = coalesce($7, m.width), height = coalesce($8, m.height),
        duration_seconds = coalesce($9, m.duration_seconds), info = coalesce($10, m.info),
        sha256 = coalesce($11, m.sha256), version = m.version + 1
    FROM holder AS h
    WHERE m.tenant_id = h.tenant_id AND m.id = h.media_id AND m.deleted_at IS NULL
    RETURNING m.id
)
SELECT 1 FROM described

-- name: preview
-- The placeholder, under the same guard; told as media.preview.
WITH holder AS (
    SELECT tenant_id, media_id, id FROM jobs
    WHERE tenant_id = $1 AND id = $3 AND fence = $4 AND state = 'processing' AND media_id = $2
    FOR SHARE
), shown AS (
    UPDATE media AS m
    SET preview = $5, width = coalesce(m.width, $6), height = coalesce(m.height, $7),
        duration_seconds = coalesce(m.duration_seconds, $8), version = m.version + 1
    FROM holder AS h
    WHERE m.tenant_id = h.tenant_id AND m.id = h.media_id AND m.deleted_at IS NULL
    RETURNING m.tenant_id, m.id, h.id AS job_id
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'media.preview', id, job_id, jsonb_build_object('preview', $5::jsonb)
    FROM shown
)
SELECT 1 FROM shown

-- name: publish
-- moves: media processing -> ready
-- The new set becomes the one that readers see. Run after jobs.complete, in the same transaction.
WITH ready AS (
    UPDATE media
    SET state = 'ready', set_id = $4, error = NULL, state_at = now(), version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND generation = $3 AND state = 'processing'
      AND deleted_at IS NULL
    RETURNING *
), superseded AS (
    UPDATE sets AS s
    SET superseded_at = now(), expires_at = now() + $6::interval
    FROM ready AS r
    WHERE s.tenant_id = r.tenant_id AND s.media_id = r.id AND s.superseded_at IS NULL
      AND (s.recipe, s.recipe_version, s.set_id) <> (r.recipe, r.recipe_version, r.set_id)
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, from_state, to_state)
    SELECT tenant_id, 'media', id, $5, 'processing', 'ready' FROM ready
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'media.ready', id, $5::uuid,
           jsonb_build_object('state', 'ready', 'set', set_id)
    FROM ready
)
SELECT 1 FROM ready

-- name: publish_early
-- A first set for readers while the work goes on, unless there is a complete one. The caller writes the
-- manifest in the same transaction.
WITH shown AS (
    UPDATE media
    SET version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND generation = $3 AND state = 'processing'
      AND set_id IS NULL AND deleted_at IS NULL
    RETURNING *
), superseded AS (
    UPDATE sets AS s
    SET superseded_at = now(), expires_at = now() + $6::interval
    FROM shown AS m
    WHERE s.tenant_id = m.tenant_id AND s.media_id = m.id AND s.superseded_at IS NULL
      AND s.set_id <> $4
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'variant.ready', id, $5::uuid,
           jsonb_build_object('state', 'processing', 'set', $4::text, 'variants', $7::text[])
    FROM shown
)
SELECT 1 FROM shown

-- name: get
-- Everything that the status shows, in one read: the media, its main job, and its manifest.
SELECT m.*,
       j.id AS job_id, j.state AS job_state, j.queue, j.stage, j.progress, j.detail, j.attempt,
       j.max_attempts, j.run_at, j.started_at, j.queued_at, j.error AS job_error,
       coalesce(manifest.variants, '[]') AS variants
FROM media AS m
LEFT JOIN jobs AS j
       ON j.tenant_id = m.tenant_id AND j.media_id = m.id AND j.role = 'main'
      AND j.recipe = m.recipe AND j.recipe_version = m.recipe_version
      AND j.generation = m.generation
LEFT JOIN LATERAL (
    SELECT jsonb_agg(jsonb_build_object(
               'id', v.id, 'name', v.name, 'key', v.key, 'content_type', v.content_type,
               'bytes', v.bytes, 'sha256', v.sha256, 'width', v.width, 'height', v.height,
               'duration_seconds', v.duration_seconds, 'seconds', v.seconds)
               ORDER BY v.position) AS variants
    FROM sets AS s
    JOIN variants AS v USING (tenant_id, media_id, recipe, recipe_version, set_id)
    WHERE s.tenant_id = m.tenant_id AND s.media_id = m.id AND s.superseded_at IS NULL
) AS manifest ON true
WHERE m.tenant_id = $1 AND m.id = $2

-- name: version
-- What a client that polls is asked for: one row by its key.
SELECT version, set_id, state, kind, recipe, deleted_at FROM media
WHERE tenant_id = $1 AND id = $2

-- name: for_work
-- What an attempt needs to know of its media.
SELECT id, kind, filename, content_type, size, sha256, upload_key, object_version, detected_type,
       recipe, recipe_version, generation, preview, deleted_at, state, metadata, set_id, max_size
FROM media WHERE tenant_id = $1 AND id = $2

-- name: list
-- Newest first (ids sort by time), from the id $2 down to $10; filters that are NULL do not count.
SELECT id, state, kind, filename, content_type, size, detected_type, width, height,
       duration_seconds, recipe, recipe_version, generation, error, created_at, state_at, expires_at,
       preview, version
FROM media
WHERE tenant_id = $1 AND deleted_at IS NULL
  AND id BETWEEN $10 AND $2
  AND ($3::text[] IS NULL OR state = ANY($3))
  AND ($4::text IS NULL OR kind = $4)
  AND ($5::text IS NULL OR recipe = $5)
  AND ($6::text IS NULL OR error ->> 'code' = $6)
  AND ($7::timestamptz IS NULL OR created_at >= $7)
  AND ($8::timestamptz IS NULL OR created_at < $8)
ORDER BY id DESC
LIMIT $9

-- name: delete
-- A tombstone at once; the bytes go with the erasure. What could name a person is forgotten.
WITH gone AS (
    UPDATE media
    SET deleted_at = now(), filename = NULL, metadata = '{}', preview = NULL, info = NULL,
        sha256 = NULL, version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL
    RETURNING tenant_id, id
), condemned AS (
    INSERT INTO erasures (tenant_id, media_id) SELECT tenant_id, id FROM gone
    ON CONFLICT DO NOTHING
), unread AS (
    DELETE FROM sidecars AS c USING gone AS g WHERE c.tenant_id = g.tenant_id AND c.media_id = g.id
), forgotten AS (
    UPDATE idempotency AS i SET body = NULL, location = NULL
    FROM gone AS g
    WHERE i.tenant_id = g.tenant_id AND i.about = g.id
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, data)
    SELECT tenant_id, 'media.deleted', id, jsonb_build_object('reason', $3::text) FROM gone
)
SELECT 1 FROM gone

-- name: timeline
SELECT subject, job_id, from_state, to_state, stage, at, attempt, fence, worker, code, details
FROM transitions WHERE tenant_id = $1 AND media_id = $2 ORDER BY id

-- name: main_jobs
SELECT id FROM jobs WHERE tenant_id = $1 AND media_id = $2 AND role = 'main'
