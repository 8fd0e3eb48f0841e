-- The life of a job, in order. Every write of a worker names its fence and finds no row once the
-- lease is lost. `moves:` lines are compared with states.py by a test.

-- name: claim
-- moves: job queued -> processing, media queued -> processing
-- Claims those of the given jobs that are claimable; the others are dropped. One attempt, one fence.
WITH claimed AS (
    UPDATE jobs AS j
    SET state = 'processing', attempt = j.attempt + 1, fence = j.fence + 1, worker = $3,
        lease_until = now() + $4::interval, stage = NULL, progress = 0, error = NULL,
        started_at = now(), version = j.version + 1
    FROM unnest($1::text[], $2::uuid[], $5::text[]) AS ticket (tenant_id, id, queue)
    WHERE j.tenant_id = ticket.tenant_id AND j.id = ticket.id AND j.queue = ticket.queue
      AND j.state = 'queued' AND j.run_at <= now()
    RETURNING j.*
), followed AS (
    UPDATE media AS m
    SET state = 'processing', state_at = now(), version = m.version + 1
    FROM claimed AS c
    WHERE c.role = 'main' AND m.tenant_id = c.tenant_id AND m.id = c.media_id
      AND m.generation = c.generation AND m.state = 'queued'
    RETURNING m.tenant_id, m.id, c.id AS job_id, c.attempt, c.fence
), attempted AS (
    INSERT INTO attempts (tenant_id, job_id, fence, attempt, worker)
    SELECT tenant_id, id, fence, attempt, $3 FROM claimed
), logged AS (
    INSERT INTO transitions
        (tenant_id, subject, media_id, job_id, from_state, to_state, attempt, fence, worker)
    SELECT tenant_id, 'job', media_id, id, 'queued', 'processing', attempt, fence, $3 FROM claimed
    UNION ALL
    SELECT tenant_id, 'media', id, job_id, 'queued', 'processing', attempt, fence, $3 FROM followed
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'job.processing', media_id, id,
           jsonb_build_object('state', 'processing', 'attempt', attempt) FROM claimed
    UNION ALL
    SELECT tenant_id, 'media.processing', id, job_id, jsonb_build_object('state', 'processing')
    FROM followed
)
SELECT c.tenant_id, c.id, c.kind, c.queue, c.role, c.schema_version, c.media_id, c.recipe,
       c.recipe_version, c.generation, c.payload, c.attempt, c.max_attempts, c.crashes,
       c.resource_failures, c.fence, c.priority, c.queued_at, c.started_at
FROM claimed AS c

-- name: renew
-- Renews the leases of one process in one statement. Jobs that do not come back are lost.
UPDATE jobs AS j SET lease_until = now() + $4::interval
FROM unnest($1::text[], $2::uuid[], $3::bigint[]) AS mine (tenant_id, id, fence)
WHERE j.tenant_id = mine.tenant_id AND j.id = mine.id AND j.fence = mine.fence
  AND j.state = 'processing'
RETURNING j.id, j.fence, j.cancel_requested

-- name: advance
-- Progress inside an attempt, never falling. Also marks the media as changed.
WITH advanced AS (
    UPDATE jobs
    SET stage = $4, progress = greatest(coalesce(progress, 0), $5::real), version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND state = 'processing'
    RETURNING tenant_id, media_id, generation, role
), touched AS (
    UPDATE media AS m SET version = m.version + 1
    FROM advanced AS a
    WHERE a.role = 'main' AND m.tenant_id = a.tenant_id AND m.id = a.media_id
      AND m.generation = a.generation
)
SELECT 1 FROM advanced

-- name: enter_stage
-- A new stage begins: logged, since the timeline is made of it.
WITH advanced AS (
    UPDATE jobs SET stage = $4, version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND state = 'processing'
    RETURNING tenant_id, id, media_id, generation, role, attempt, fence, worker
), touched AS (
    UPDATE media AS m SET version = m.version + 1
    FROM advanced AS a
    WHERE a.role = 'main' AND m.tenant_id = a.tenant_id AND m.id = a.media_id
      AND m.generation = a.generation
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, from_state, to_state, stage,
                             attempt, fence, worker)
    SELECT tenant_id, 'job', media_id, id, 'processing', 'processing', $4, attempt, fence, worker
    FROM advanced
)
SELECT 1 FROM advanced

-- name: complete
-- moves: job processing -> completed
WITH done AS (
    UPDATE jobs
    SET state = 'completed', result = $4, error = NULL, stage = NULL, progress = 100,
        lease_until = NULL, finished_at = now(), expires_at = now() + $5::interval,
        version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND state = 'processing'
    RETURNING *
), attempted AS (
    UPDATE attempts AS a
    SET finished_at = now(), outcome = 'completed', log_tail = $6, commands = $7
    FROM done AS d
    WHERE a.tenant_id = d.tenant_id AND a.job_id = d.id AND a.fence = d.fence
), logged AS (
    INSERT INTO transitions
        (tenant_id, subject, media_id, job_id, from_state, to_state, attempt, fence, worker)
    SELECT tenant_id, 'job', media_id, id, 'processing', 'completed', attempt, fence, worker
    FROM done
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'job.completed', media_id, id, jsonb_build_object('state', 'completed')
    FROM done
)
SELECT 1 FROM done

-- name: fail
-- moves: job processing -> failed, media processing -> failed
WITH ended AS (
    UPDATE jobs
    SET state = 'failed', error = $4, dead_letter = $5, crashes = crashes + $6,
        resource_failures = resource_failures + $7, stage = NULL, lease_until = NULL,
        finished_at = now(), expires_at = now() + $8::interval, version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND state = 'processing'
    RETURNING *
), followed AS (
    UPDATE media AS m
    SET state = 'failed', error = $4, state_at = now(), version = m.version + 1
    FROM ended AS e
    WHERE e.role = 'main' AND m.tenant_id = e.tenant_id AND m.id = e.media_id
      AND m.generation = e.generation AND m.state = 'processing'
    RETURNING m.tenant_id, m.id, e.id AS job_id, e.attempt, e.fence, e.worker
), attempted AS (
    UPDATE attempts AS a
    SET finished_at = now(), outcome = $9, error = $4, log_tail = $10, commands = $11
    FROM ended AS e
    WHERE a.tenant_id = e.tenant_id AND a.job_id = e.id AND a.fence = e.fence
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, from_state, to_state, attempt,
                             fence, worker, code, details)
    SELECT tenant_id, 'job', media_id, id, 'processing', 'failed', attempt, fence, worker,
           $4 ->> 'code', jsonb_build_object('dead_letter', dead_letter)
    FROM ended
    UNION ALL
    SELECT tenant_id, 'media', id, job_id, 'processing', 'failed', attempt, fence, worker,
           $4 ->> 'code', NULL
    FROM followed
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'job.failed', media_id, id,
           jsonb_build_object('state', 'failed', 'error', $4::jsonb)
    FROM ended
    UNION ALL
    SELECT tenant_id, 'job.dead_lettered', media_id, id,
           jsonb_build_object('state', 'failed', 'error', $4::jsonb)
    FROM ended WHERE dead_letter
    UNION ALL
    SELECT tenant_id, 'media.failed', id, job_id,
           jsonb_build_object('state', 'failed', 'error', $4::jsonb)
    FROM followed
)
SELECT 1 FROM ended

-- name: requeue
-- moves: job processing -> queued, media processing -> queued
-- $4 error or NULL, $5 delay, $6 crashes, $7 resource failures, $8 attempts to give back (0 or 1),
-- $9 new queue or NULL, $10 new kind or NULL, $11 reason, $12 outcome. The caller publishes the ticket.
WITH back AS (
    UPDATE jobs
    SET state = 'queued', error = $4, run_at = now() + $5::interval, queued_at = now(),
        crashes = crashes + $6, resource_failures = resource_failures + $7,
        attempt = attempt - $8, queue = coalesce($9, queue), kind = coalesce($10, kind),
        stage = NULL, progress = NULL, lease_until = NULL, version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND state = 'processing'
    RETURNING *
), followed AS (
    UPDATE media AS m
    SET state = 'queued', state_at = now(), version = m.version + 1
    FROM back AS b
    WHERE b.role = 'main' AND m.tenant_id = b.tenant_id AND m.id = b.media_id
      AND m.generation = b.generation AND m.state = 'processing'
    RETURNING m.tenant_id, m.id, b.id AS job_id, b.attempt, b.fence, b.worker
), attempted AS (
    UPDATE attempts AS a
    SET finished_at = now(), outcome = $12, error = $4, log_tail = $13, commands = $14
    FROM back AS b
    WHERE a.tenant_id = b.tenant_id AND a.job_id = b.id AND a.fence = b.fence
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, from_state, to_state, attempt,
                             fence, worker, code, details)
    SELECT tenant_id, 'job', media_id, id, 'processing', 'queued', attempt, fence, worker, $11,
           jsonb_build_object('run_at', run_at, 'queue', queue)
    FROM back
    UNION ALL
    SELECT tenant_id, 'media', id, job_id, 'processing', 'queued', attempt, fence, worker, $11, NULL
    FROM followed
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'job.queued', media_id, id,
           jsonb_build_object('state', 'queued', 'reason', $11::text)
    FROM back
    UNION ALL
    SELECT tenant_id, 'media.queued', id, job_id,
           jsonb_build_object('state', 'queued', 'reason', $11::text)
    FROM followed
)
SELECT queue, priority FROM back

-- name: cancel_queued
-- moves: job queued -> canceled, media queued -> failed
WITH ended AS (
    UPDATE jobs
    SET state = 'canceled', error = $3, finished_at = now(), expires_at = now() + $4::interval,
        version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND state = 'queued'
    RETURNING *
), followed AS (
    UPDATE media AS m
    SET state = 'failed', error = $3, state_at = now(), version = m.version + 1
    FROM ended AS e
    WHERE e.role = 'main' AND m.tenant_id = e.tenant_id AND m.id = e.media_id
      AND m.generation = e.generation AND m.state = 'queued'
    RETURNING m.tenant_id, m.id, e.id AS job_id
), logged AS (
    INSERT INTO transitions
        (tenant_id, subject, media_id, job_id, from_state, to_state, attempt, fence, code)
    SELECT tenant_id, 'job', media_id, id, 'queued', 'canceled', attempt, fence, 'canceled'
    FROM ended
    UNION ALL
    SELECT tenant_id, 'media', id, job_id, 'queued', 'failed', NULL, NULL, 'canceled'
    FROM followed
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'job.canceled', media_id, id, jsonb_build_object('state', 'canceled')
    FROM ended
    UNION ALL
    SELECT tenant_id, 'media.failed', id, job_id,
           jsonb_build_object('state', 'failed', 'error', $3::jsonb)
    FROM followed
)
SELECT 1 FROM ended

-- name: request_cancel
-- The worker that holds the job reads this with its next beat and stops.
UPDATE jobs SET cancel_requested = true, version = version + 1
WHERE tenant_id = $1 AND id = $2 AND state = 'processing'
RETURNING 1

-- name: cancel_processing
-- moves: job processing -> canceled, media processing -> failed
WITH ended AS (
    UPDATE jobs
    SET state = 'canceled', error = $4, stage = NULL, lease_until = NULL, finished_at = now(),
        expires_at = now() + $5::interval, version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND state = 'processing'
    RETURNING *
), followed AS (
    UPDATE media AS m
    SET state = 'failed', error = $4, state_at = now(), version = m.version + 1
    FROM ended AS e
    WHERE e.role = 'main' AND m.tenant_id = e.tenant_id AND m.id = e.media_id
      AND m.generation = e.generation AND m.state = 'processing'
    RETURNING m.tenant_id, m.id, e.id AS job_id, e.attempt, e.fence, e.worker
), attempted AS (
    UPDATE attempts AS a
    SET finished_at = now(), outcome = 'canceled', log_tail = $6, commands = $7
    FROM ended AS e
    WHERE a.tenant_id = e.tenant_id AND a.job_id = e.id AND a.fence = e.fence
), logged AS (
    INSERT INTO transitions
        (tenant_id, subject, media_id, job_id, from_state, to_state, attempt, fence, worker, code)
    SELECT tenant_id, 'job', media_id, id, 'processing', 'canceled', attempt, fence, worker,
           'canceled'
    FROM ended
    UNION ALL
    SELECT tenant_id, 'media', id, job_id, 'processing', 'failed', attempt, fence, worker,
           'canceled'
    FROM followed
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'job.canceled', media_id, id, jsonb_build_object('state', 'canceled')
    FROM ended
    UNION ALL
    SELECT tenant_id, 'media.failed', id, job_id,
           jsonb_build_object('state', 'failed', 'error', $4::jsonb)
    FROM followed
)
SELECT 1 FROM ended

-- name: cancel_of_media
-- The live jobs of a media, for the caller to cancel one by one. Locked together and before the media:
-- a worker locks its job first and then the media, and the other way round would be a deadlock.
SELECT id FROM jobs
WHERE tenant_id = $1 AND media_id = $2 AND state IN ('queued', 'processing')
ORDER BY id
FOR UPDATE

-- name: replay
-- moves: job failed -> queued
-- A failed job starts anew with its history kept; attempts count from zero again.
WITH back AS (
    UPDATE jobs
    SET state = 'queued', attempt = 0, crashes = 0, resource_failures = 0, dead_letter = false,
        error = NULL, run_at = now(), queued_at = now(), finished_at = NULL, expires_at = NULL,
        progress = NULL, cancel_requested = false, generation = $3, version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND state = 'failed'
    RETURNING *
), logged AS (
    INSERT INTO transitions
        (tenant_id, subject, media_id, job_id, from_state, to_state, attempt, fence, code)
    SELECT tenant_id, 'job', media_id, id, 'failed', 'queued', attempt, fence, 'replayed' FROM back
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'job.queued', media_id, id,
           jsonb_build_object('state', 'queued', 'reason', 'replayed')
    FROM back
)
SELECT queue, priority FROM back

-- name: get
SELECT j.*, m.filename, m.deleted_at AS media_deleted_at
FROM jobs AS j
LEFT JOIN media AS m ON m.tenant_id = j.tenant_id AND m.id = j.media_id
WHERE j.tenant_id = $1 AND j.id = $2

-- name: attempts
SELECT attempt, fence, worker, started_at, finished_at, outcome, error
FROM attempts WHERE tenant_id = $1 AND job_id = $2 ORDER BY fence

-- name: position
-- How many jobs of its queue come before this one, counted up to $3.
SELECT count(*) FROM (
    SELECT 1 FROM jobs AS ahead, jobs AS mine
    WHERE mine.tenant_id = $1 AND mine.id = $2
      AND ahead.queue = mine.queue AND ahead.state = 'queued'
      AND (ahead.priority > mine.priority
           OR (ahead.priority = mine.priority
               AND (ahead.queued_at, ahead.id) < (mine.queued_at, mine.id)))
    LIMIT $3
) AS counted
