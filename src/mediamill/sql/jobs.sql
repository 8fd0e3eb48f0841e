-- The life of a job, in order. Every write of a worker names its fence and finds no row once the
-- lease is lost. `moves:` lines are compared with states.py by a test.

-- name: enqueue
-- moves: job -> queued
-- New jobs of one tenant, as parallel arrays; payloads as text, since an application's connection
-- has whatever JSON codec it likes. One that is already there by its dedup key, or as this
-- child of its parent, is left as it is and does not come back.
WITH wanted AS (
    SELECT * FROM unnest($2::uuid[], $3::text[], $4::int[], $5::text[], $6::text[], $7::int[],
                         $8::interval[], $9::int[], $10::float8[], $11::text[], $12::text[],
                         $13::real[])
        WITH ORDINALITY AS w (id, kind, schema_version, queue, payload, priority, delay,
                              max_attempts, timeout_seconds, dedup_key, child_key, weight, position)
), born AS (
    INSERT INTO jobs (tenant_id, id, state, kind, queue, role, schema_version, payload, priority,
                      run_at, max_attempts, timeout_seconds, dedup_key, parent_id, child_key, weight,
                      turn, media_id, recipe, recipe_version, generation)
    SELECT $1, w.id, 'queued', w.kind, w.queue, 'job', w.schema_version, w.payload::jsonb, w.priority,
           now() + w.delay, w.max_attempts, w.timeout_seconds, w.dedup_key, $14::uuid, w.child_key,
           w.weight,
           mediamill_hold(
               mediamill_turn(w.queue, w.priority, $1)
                   + row_number() OVER (PARTITION BY w.queue, w.priority ORDER BY w.position) - 1,
               w.delay),
           p.media_id, p.recipe, p.recipe_version, p.generation
    FROM wanted AS w LEFT JOIN jobs AS p ON p.tenant_id = $1 AND p.id = $14
    ON CONFLICT DO NOTHING
    RETURNING tenant_id, id, queue, priority, turn, run_at, media_id
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, to_state)
    SELECT tenant_id, 'job', media_id, id, 'queued' FROM born
), announced AS (
    INSERT INTO events (tenant_id, type, media_id, job_id, data)
    SELECT tenant_id, 'job.queued', media_id, id, jsonb_build_object('state', 'queued') FROM born
)
SELECT id, queue, priority, turn FROM born

-- name: line_up
-- Jobs of these queues that held back and are due, up to $2 of each, join the line: one that ran
-- before with the turn that it had, another at the end of its tenant's. The caller publishes tickets.
WITH due AS MATERIALIZED (
    SELECT j.* FROM unnest($1::text[]) AS q (queue)
    CROSS JOIN LATERAL (
        SELECT tenant_id, id, attempt, run_at FROM jobs
        WHERE queue = q.queue AND state = 'queued' AND turn >= mediamill_later() AND run_at <= now()
        ORDER BY run_at
        LIMIT $2
        FOR UPDATE SKIP LOCKED
    ) AS j
), placed AS (
    SELECT tenant_id, id, attempt,
           row_number() OVER (PARTITION BY tenant_id, attempt = 0 ORDER BY run_at, id) - 1 AS place
    FROM due
)
UPDATE jobs AS j
SET turn = CASE WHEN p.attempt > 0 THEN mediamill_hold(j.turn, '0')
                ELSE mediamill_turn(j.queue, j.priority, j.tenant_id) + p.place END
FROM placed AS p
WHERE j.tenant_id = p.tenant_id AND j.id = p.id
RETURNING j.tenant_id, j.id, j.queue, j.priority, j.turn

-- name: duplicate
-- The live job that holds a dedup key.
SELECT id FROM jobs
WHERE tenant_id = $1 AND kind = $2 AND dedup_key = $3 AND state IN ('queued', 'processing')

-- name: claim
-- moves: job queued -> processing, media queued -> processing
-- Claims those of the given jobs that are claimable and of a kind and version ($6, $7) that this
-- worker knows; the others are left as they are. One attempt, one fence.
WITH claimed AS (
    UPDATE jobs AS j
    SET state = 'processing', attempt = j.attempt + 1, fence = j.fence + 1, worker = $3,
        lease_until = now() + $4::interval, stage = NULL, progress = coalesce(j.progress, 0),
        detail = NULL, error = NULL, turn = mediamill_hold(j.turn, '0'),
        started_at = now(), version = j.version + 1
    FROM unnest($1::text[], $2::uuid[], $5::text[]) AS ticket (tenant_id, id, queue)
    WHERE j.tenant_id = ticket.tenant_id AND j.id = ticket.id AND j.queue = ticket.queue
      AND j.state = 'queued' AND j.run_at <= now()
      AND (j.kind, j.schema_version) IN (SELECT * FROM unnest($6::text[], $7::int[]))
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
       c.resource_failures, c.fence, c.priority, c.turn, c.queued_at, c.started_at, c.parent_id,
       c.timeout_seconds
FROM claimed AS c

-- name: unclaimed
-- Those of the given jobs that wait and are due, but that this worker left alone.
SELECT j.tenant_id, j.id, j.queue, j.priority, j.turn, j.kind, j.schema_version
FROM jobs AS j
JOIN unnest($1::text[], $2::uuid[], $3::text[]) AS ticket (tenant_id, id, queue)
  ON j.tenant_id = ticket.tenant_id AND j.id = ticket.id AND j.queue = ticket.queue
WHERE j.state = 'queued' AND j.run_at <= now()

-- name: kinds_of
SELECT j.tenant_id, j.id, j.kind
FROM jobs AS j
JOIN unnest($1::text[], $2::uuid[]) AS ticket (tenant_id, id)
  ON j.tenant_id = ticket.tenant_id AND j.id = ticket.id
WHERE j.state = 'queued'

-- name: running
-- Jobs that hold a slot somewhere, by queue and kind; those that wait for children hold none.
SELECT queue, kind, count(*)::int AS jobs FROM jobs
WHERE state = 'processing' AND lease_until IS NOT NULL
  AND (queue = ANY($1::text[]) OR kind = ANY($2::text[]))
GROUP BY queue, kind

-- name: lock_cap
-- Claims against a cap of the whole fleet take turns.
SELECT pg_advisory_xact_lock(hashtextextended($1, 0))

-- name: renew
-- Renews the leases of one process in one statement. Jobs that do not come back are lost. It waits for
-- no lock, so that a row that somebody holds costs the others nothing: that one comes back unrenewed.
WITH held AS MATERIALIZED (
    SELECT j.tenant_id, j.id, j.fence, j.cancel_requested
    FROM unnest($1::text[], $2::uuid[], $3::bigint[]) AS h (tenant_id, id, fence)
    JOIN jobs AS j ON j.tenant_id = h.tenant_id AND j.id = h.id AND j.fence = h.fence
    WHERE j.state = 'processing'
), free AS MATERIALIZED (
    SELECT j.tenant_id, j.id, j.fence
    FROM unnest($1::text[], $2::uuid[], $3::bigint[]) AS h (tenant_id, id, fence)
    JOIN jobs AS j ON j.tenant_id = h.tenant_id AND j.id = h.id AND j.fence = h.fence
    WHERE j.state = 'processing'
    FOR NO KEY UPDATE OF j SKIP LOCKED
), renewed AS (
    UPDATE jobs AS j SET lease_until = now() + $4::interval
    FROM free
    WHERE j.tenant_id = free.tenant_id AND j.id = free.id AND j.fence = free.fence
      AND j.state = 'processing'
    RETURNING j.tenant_id, j.id, j.cancel_requested
)
SELECT h.id, h.fence, r.id IS NOT NULL AS renewed,
       coalesce(r.cancel_requested, h.cancel_requested) AS cancel_requested
FROM held AS h LEFT JOIN renewed AS r USING (tenant_id, id)

-- name: advance
-- Progress inside an attempt, never falling. Also marks the media as changed.
WITH advanced AS (
    UPDATE jobs
    SET stage = $4, progress = greatest(coalesce(progress, 0), $5::real),
        detail = coalesce($6, detail), version = version + 1
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
SELECT CASE WHEN NOT superseded THEN parent_id END AS parent_id FROM done

-- name: complete_many
-- moves: job processing -> completed
-- The same for many jobs of one worker, without parent or media, as parallel arrays. One that is not
-- ours any more, or that somebody has locked, does not come back: the caller asks for it alone.
WITH ended AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::jsonb[], $6::text[], $7::jsonb[])
        AS e (tenant_id, id, fence, result, log_tail, commands)
), mine AS MATERIALIZED (
    SELECT e.*
    FROM ended AS e
    JOIN jobs AS j ON j.tenant_id = e.tenant_id AND j.id = e.id AND j.fence = e.fence
    WHERE j.state = 'processing'
    FOR NO KEY UPDATE OF j SKIP LOCKED
), done AS (
    UPDATE jobs AS j
    SET state = 'completed', result = m.result, error = NULL, stage = NULL, progress = 100,
        lease_until = NULL, finished_at = now(), expires_at = now() + $5::interval,
        version = j.version + 1
    FROM mine AS m
    WHERE j.tenant_id = m.tenant_id AND j.id = m.id AND j.fence = m.fence
      AND j.state = 'processing'
    RETURNING j.tenant_id, j.id, j.attempt, j.fence, j.worker, m.log_tail, m.commands
), attempted AS (
    UPDATE attempts AS a
    SET finished_at = now(), outcome = 'completed', log_tail = d.log_tail, commands = d.commands
    FROM done AS d
    WHERE a.tenant_id = d.tenant_id AND a.job_id = d.id AND a.fence = d.fence
), logged AS (
    INSERT INTO transitions (tenant_id, subject, job_id, from_state, to_state, attempt, fence, worker)
    SELECT tenant_id, 'job', id, 'processing', 'completed', attempt, fence, worker FROM done
), announced AS (
    INSERT INTO events (tenant_id, type, job_id, data)
    SELECT tenant_id, 'job.completed', id, jsonb_build_object('state', 'completed') FROM done
)
SELECT id, fence FROM done

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
SELECT CASE WHEN NOT superseded THEN parent_id END AS parent_id FROM ended

-- name: requeue
-- moves: job processing -> queued, media processing -> queued
-- $4 error or NULL, $5 delay, $6 crashes, $7 resource failures, $8 attempts to give back (0 or 1),
-- $9 new queue or NULL, $10 new kind or NULL, $11 reason, $12 outcome. The caller publishes the ticket
-- of one that does not hold back; that one keeps its turn for later.
WITH back AS (
    UPDATE jobs
    SET state = 'queued', error = $4, run_at = now() + $5::interval, queued_at = now(),
        turn = mediamill_hold(turn, $5),
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
SELECT queue, priority, turn FROM back

-- name: wait
-- Suspends a job for its children: it stays `processing`, without lease, worker or slot. $4 children
-- are still to end; with none the caller queues it at once. The new fence ends the say of the worker
-- that ran it: a late beat must not give a lease to a job that nobody runs.
WITH waiting AS (
    UPDATE jobs
    SET stage = 'waiting', lease_until = NULL, worker = NULL, pending_children = $4,
        fence = fence + 1, version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND state = 'processing'
    RETURNING tenant_id, id, attempt, fence - 1 AS fence, media_id
), attempted AS (
    UPDATE attempts AS a
    SET finished_at = now(), outcome = 'waiting', log_tail = $5, commands = $6
    FROM waiting AS w
    WHERE a.tenant_id = w.tenant_id AND a.job_id = w.id AND a.fence = w.fence
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, from_state, to_state, stage,
                             attempt, fence)
    SELECT tenant_id, 'job', media_id, id, 'processing', 'processing', 'waiting', attempt, fence
    FROM waiting
)
SELECT 1 FROM waiting

-- name: child_ended
-- A child reached its end: counted down under the parent's row lock.
-- Of a media it shows how far that is; there they are few enough to be counted.
UPDATE jobs
SET pending_children = pending_children - 1, version = version + 1,
    progress = CASE WHEN media_id IS NULL THEN progress ELSE
        greatest(coalesce(progress, 0), 5 + 80 * (1 - (pending_children - 1)::real / (
            SELECT greatest(count(*), 1) FROM jobs AS c
            WHERE c.tenant_id = $1 AND c.parent_id = $2 AND NOT c.superseded)))
    END
WHERE tenant_id = $1 AND id = $2 AND state = 'processing' AND pending_children > 0
RETURNING pending_children, fence

-- name: join
-- moves: job processing -> queued
-- The last child ended: the parent is queued to join them, under the same attempt.
WITH back AS (
    UPDATE jobs
    SET state = 'queued', stage = NULL, run_at = now(), queued_at = now(),
        attempt = attempt - 1, version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND state = 'processing' AND lease_until IS NULL
      AND pending_children = 0
    RETURNING *
), followed AS (
    -- The media stays as it is: it is at work.
    UPDATE media AS m SET version = m.version + 1
    FROM back AS b
    WHERE b.role = 'main' AND m.tenant_id = b.tenant_id AND m.id = b.media_id
), logged AS (
    INSERT INTO transitions
        (tenant_id, subject, media_id, job_id, from_state, to_state, attempt, fence, code)
    SELECT tenant_id, 'job', media_id, id, 'processing', 'queued', attempt, fence, 'children_done'
    FROM back
)
SELECT queue, priority, turn FROM back

-- name: children
-- The children of a job, in the order in which they were asked for.
SELECT id, kind, child_key, state, result, error, weight, progress
FROM jobs WHERE tenant_id = $1 AND parent_id = $2 AND NOT superseded ORDER BY id

-- name: lock_children
-- The same for a parent that is about to wait for them. Children lock themselves before their parent.
SELECT id, child_key, state,
       state = 'canceled' OR (state IN ('queued', 'processing') AND cancel_requested) AS canceled
FROM jobs WHERE tenant_id = $1 AND parent_id = $2 AND NOT superseded ORDER BY id
FOR UPDATE

-- name: supersede_child
-- A child that no longer counts: its end tells its parent nothing, and its name is free for a new one.
UPDATE jobs SET superseded = true, version = version + 1
WHERE tenant_id = $1 AND id = $2

-- name: waiting_parent
-- A parent that waits, for its child's failure or its own cancel: there is no worker to ask.
SELECT fence, CASE WHEN NOT superseded THEN parent_id END AS parent_id FROM jobs
WHERE tenant_id = $1 AND id = $2 AND state = 'processing' AND lease_until IS NULL
FOR UPDATE

-- name: orphaned_children
-- Children that live on although their parent has ended, or waits for others in their place.
SELECT c.tenant_id, c.id
FROM jobs AS p JOIN jobs AS c ON c.tenant_id = p.tenant_id AND c.parent_id = p.id
WHERE c.parent_id IS NOT NULL AND c.state IN ('queued', 'processing') AND NOT c.cancel_requested
  AND (c.superseded OR p.state IN ('completed', 'failed', 'canceled'))
LIMIT $1

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
SELECT CASE WHEN NOT superseded THEN parent_id END AS parent_id FROM ended

-- name: request_cancel
-- The worker that holds the job reads this with its next beat and stops.
UPDATE jobs SET cancel_requested = true, version = version + 1
WHERE tenant_id = $1 AND id = $2 AND state = 'processing' AND lease_until IS NOT NULL
RETURNING 1

-- name: cancel_requested
-- Asked once more when the work is over but the job would go on: nobody would tell the next worker.
SELECT cancel_requested FROM jobs
WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND state = 'processing'
FOR UPDATE

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
SELECT CASE WHEN NOT superseded THEN parent_id END AS parent_id FROM ended

-- name: cancel_of_media
-- The live jobs of a media, for the caller to cancel one by one. Locked together and before the media:
-- a worker locks its job first and then the media, and the other way round would be a deadlock. For the
-- same reason children come before their parents.
SELECT id, parent_id FROM jobs
WHERE tenant_id = $1 AND media_id = $2 AND state IN ('queued', 'processing')
ORDER BY parent_id NULLS LAST, id
FOR UPDATE

-- name: replay
-- moves: job failed -> queued
-- A failed job starts anew with its history kept; attempts count from zero again.
WITH back AS (
    UPDATE jobs
    SET state = 'queued', attempt = 0, crashes = 0, resource_failures = 0, dead_letter = false,
        error = NULL, queued_at = now(), finished_at = NULL, expires_at = NULL,
        progress = NULL, cancel_requested = false, generation = $3, discarded_at = NULL,
        run_at = now() + $4::interval,
        turn = mediamill_hold(mediamill_turn(queue, priority, tenant_id), $4),
        version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND state = 'failed'
      AND NOT EXISTS (SELECT 1 FROM jobs AS live
                      WHERE live.tenant_id = $1 AND live.kind = jobs.kind
                        AND live.dedup_key = jobs.dedup_key
                        AND live.state IN ('queued', 'processing'))
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
SELECT queue, priority, turn FROM back

-- name: get
-- A job; one that waits shows the weighted progress of its children, and their changes as its own.
SELECT j.*, m.deleted_at AS media_deleted_at, below.progress AS children_progress,
       coalesce(below.versions, 0)::bigint AS children_versions
FROM jobs AS j
LEFT JOIN media AS m ON m.tenant_id = j.tenant_id AND m.id = j.media_id
LEFT JOIN LATERAL (
    SELECT (sum(c.weight * CASE WHEN c.state = 'completed' THEN 100
                                ELSE coalesce(c.progress, 0) END) / sum(c.weight))::real AS progress,
           sum(c.version) AS versions
    FROM jobs AS c
    WHERE c.tenant_id = j.tenant_id AND c.parent_id = j.id AND NOT c.superseded
      AND j.pending_children > 0
) AS below ON true
WHERE j.tenant_id = $1 AND j.id = $2

-- name: version
-- What a client that polls is asked for: one row by its key. A parent's version is that of its
-- children too: it is not told here.
SELECT version, state, queue, kind, recipe, pending_children FROM jobs
WHERE tenant_id = $1 AND id = $2

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
               AND (ahead.turn, ahead.id) < (mine.turn, mine.id)))
    LIMIT $3
) AS counted

-- name: effect
SELECT result FROM effects WHERE tenant_id = $1 AND job_id = $2 AND key = $3

-- name: record_effect
-- Under the fence. The lock lets the lease be renewed however long the transaction is; whether the
-- job is still ours at its end is for `still_hold`.
INSERT INTO effects (tenant_id, job_id, key, result, fence)
SELECT tenant_id, id, $4, $5, fence FROM jobs
WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND state = 'processing'
FOR KEY SHARE
ON CONFLICT (tenant_id, job_id, key) DO NOTHING
RETURNING 1

-- name: still_hold
-- The last word before a commit: nobody can move the job in between.
SELECT 1 FROM jobs
WHERE tenant_id = $1 AND id = $2 AND fence = $3 AND state = 'processing'
FOR SHARE

-- name: list
-- Newest first, from the id $2 down to $10; filters that are NULL do not count.
SELECT * FROM jobs
WHERE tenant_id = $1
  AND id BETWEEN $10 AND $2
  AND ($3::text[] IS NULL OR state = ANY($3))
  AND ($4::text IS NULL OR kind = $4)
  AND ($5::text IS NULL OR queue = $5)
  AND ($6::text IS NULL OR error ->> 'code' = $6)
  AND ($7::timestamptz IS NULL OR created_at >= $7)
  AND ($8::timestamptz IS NULL OR created_at < $8)
ORDER BY id DESC
LIMIT $9

-- name: dead_letters
-- Newest first, below the cursor $2; filters that are NULL do not count.
SELECT j.*, m.deleted_at AS media_deleted_at
FROM jobs AS j
LEFT JOIN media AS m ON m.tenant_id = j.tenant_id AND m.id = j.media_id
WHERE j.tenant_id = $1 AND j.state = 'failed' AND j.dead_letter
  AND ($2::uuid IS NULL OR j.id < $2)
  AND ($3::text IS NULL OR j.error ->> 'code' = $3)
  AND ($4::text IS NULL OR j.kind = $4)
  AND ($5::text IS NULL OR j.queue = $5)
  AND ($6::timestamptz IS NULL OR j.finished_at >= $6)
  AND ($7::timestamptz IS NULL OR j.finished_at < $7)
ORDER BY j.id DESC
LIMIT $8

-- name: dead_groups
-- Dead letters by code: how many, since when, and the newest of them.
SELECT error ->> 'code' AS code, count(*) AS jobs, min(finished_at) AS first_at,
       max(finished_at) AS last_at, (array_agg(id ORDER BY finished_at DESC))[1] AS newest
FROM jobs
WHERE tenant_id = $1 AND state = 'failed' AND dead_letter
GROUP BY code
ORDER BY jobs DESC, code
LIMIT 100

-- name: figures
-- What ended in the last $2, in $5 equal steps. At most $4 rows of each queue ($3), and as many failed
-- ones, are looked at; where there are more, the steps begin with the oldest that was seen of those.
WITH asked AS (
    SELECT now() AS until, now() - $2::interval AS since
), done AS (
    SELECT q.queue, d.*
    FROM unnest($3::text[]) AS q (queue) CROSS JOIN asked CROSS JOIN LATERAL (
        SELECT j.tenant_id, j.finished_at, j.created_at FROM jobs AS j
        WHERE j.queue = q.queue AND j.state = 'completed' AND j.finished_at >= asked.since
        ORDER BY j.finished_at DESC
        LIMIT $4
    ) AS d
), failed AS (
    SELECT j.finished_at FROM asked CROSS JOIN LATERAL (
        SELECT finished_at FROM jobs
        WHERE tenant_id = $1 AND state = 'failed' AND finished_at >= asked.since
        ORDER BY finished_at DESC
        LIMIT $4
    ) AS j
), seen AS (
    SELECT min(finished_at) AS oldest FROM done GROUP BY queue HAVING count(*) >= $4
    UNION ALL
    SELECT min(finished_at) FROM failed HAVING count(*) >= $4
), span AS (
    SELECT greatest(since, (SELECT max(oldest) FROM seen)) AS since, until FROM asked
), ended AS (
    SELECT finished_at, extract(epoch FROM finished_at - created_at)::float8 AS seconds
    FROM done WHERE tenant_id = $1
    UNION ALL
    SELECT finished_at, NULL FROM failed
), stepped AS (
    SELECT e.seconds,
           least(floor(extract(epoch FROM e.finished_at - s.since) * $5::int
                       / extract(epoch FROM s.until - s.since)), $5 - 1)::int AS step
    FROM ended AS e CROSS JOIN span AS s
    WHERE e.finished_at >= s.since AND s.until > s.since
)
SELECT s.since + (s.until - s.since) * g.step / $5 AS at, s.since, s.until,
       count(p.seconds) AS completed,
       count(p.step) - count(p.seconds) AS failed,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY p.seconds) AS p50_seconds,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY p.seconds) AS p95_seconds
FROM span AS s
CROSS JOIN generate_series(0, $5 - 1) AS g (step)
LEFT JOIN stepped AS p ON p.step = g.step
GROUP BY g.step, s.since, s.until
ORDER BY g.step

-- name: discard
-- A dead letter that nobody will replay: it stays failed and leaves the list.
WITH gone AS (
    UPDATE jobs SET dead_letter = false, discarded_at = now(), version = version + 1
    WHERE tenant_id = $1 AND id = $2 AND state = 'failed' AND dead_letter
    RETURNING tenant_id, id, media_id, attempt, fence
), logged AS (
    INSERT INTO transitions (tenant_id, subject, media_id, job_id, from_state, to_state, stage,
                             attempt, fence, code)
    SELECT tenant_id, 'job', media_id, id, 'failed', 'failed', 'discarded', attempt, fence,
           'discarded'
    FROM gone
)
SELECT 1 FROM gone

-- name: attempts_in_full
SELECT attempt, fence, worker, started_at, finished_at, outcome, error, log_tail, commands
FROM attempts WHERE tenant_id = $1 AND job_id = $2 ORDER BY fence

-- name: timeline
SELECT subject, job_id, from_state, to_state, stage, at, attempt, fence, worker, code, details
FROM transitions WHERE tenant_id = $1 AND job_id = $2 AND subject = 'job' ORDER BY id
