-- Statements on the queue engine's own table, which PgQueuer creates and owns. {queue} is its name.

-- name: take_function
-- Tickets of some lanes ($1 the queue of each, $2 its name for the engine, $3 its room), the best of
-- each queue ($4) up to its room ($5). They are used up in the transaction that takes them, so a crash
-- gives them back. The engine's own statement marks them first, to delete them later, and takes one
-- number for all queues. Only workers of an older version publish tickets that are not due. The
-- settings leave the planner one way, down the index (entrypoint, priority
-- DESC, id): a plan made for a short queue would read all of a long one.
CREATE OR REPLACE FUNCTION mediamill_take(
    owners text[], lanes text[], lane_rooms int[], queues text[], rooms int[]
)
RETURNS TABLE (entrypoint text, payload bytea, priority int, id bigint)
LANGUAGE plpgsql
SET enable_sort = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    DELETE FROM {queue} AS t
    WHERE t.id = ANY (ARRAY (
        SELECT best.id
        FROM (
            SELECT due.id, l.owner, row_number() OVER (PARTITION BY l.owner
                                                       ORDER BY due.priority DESC, due.id) AS place
            FROM unnest(owners, lanes, lane_rooms) AS l (owner, lane, room)
            CROSS JOIN LATERAL (
                SELECT w.id, w.priority FROM {queue} AS w
                WHERE w.entrypoint = l.lane AND w.status = 'queued' AND w.execute_after <= now()
                ORDER BY w.priority DESC, w.id
                LIMIT l.room
                FOR UPDATE SKIP LOCKED
            ) AS due
        ) AS best
        JOIN unnest(queues, rooms) AS q (queue, room) ON q.queue = best.owner
        WHERE best.place <= q.room
    ))
    RETURNING t.entrypoint, t.payload, t.priority, t.id;
END
$$

-- name: take
SELECT entrypoint, payload, priority, id FROM mediamill_take($1, $2, $3, $4, $5)

-- name: used_lanes
SELECT queue, lane FROM unnest($1::text[], $2::text[]) AS l (queue, lane)
WHERE EXISTS (SELECT 1 FROM {queue} AS w
              WHERE w.entrypoint = l.queue || '/' || l.lane AND w.status = 'queued')

-- name: waiting
-- Tickets that wait, by lane.
SELECT entrypoint, count(*) AS tickets
FROM {queue} WHERE status = 'queued' GROUP BY entrypoint

-- name: index_payload
-- The sweep asks "has this job a waiting ticket?" for many jobs.
CREATE INDEX IF NOT EXISTS mediamill_ticket_payload ON {queue} (payload) WHERE status = 'queued'

-- name: ring_for_new
-- The engine notifies of every change; workers need to hear of new tickets only, and a notification
-- makes commits wait for each other.
CREATE OR REPLACE TRIGGER {trigger} AFTER INSERT ON {queue}
FOR EACH STATEMENT EXECUTE FUNCTION {trigger}()

-- name: log_nothing
-- The engine logs each ticket in a table with five indexes; our own transitions say more.
CREATE OR REPLACE FUNCTION mediamill_ticket_unlogged() RETURNS trigger LANGUAGE plpgsql
AS 'BEGIN RETURN NULL; END'

-- name: log_nothing_at_insert
CREATE OR REPLACE TRIGGER mediamill_ticket_unlogged BEFORE INSERT ON {log}
FOR EACH ROW EXECUTE FUNCTION mediamill_ticket_unlogged()

-- name: vacuum_often
-- Tickets come and go: a hundredth of a large backlog is already much that is dead.
ALTER TABLE {queue} SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
                         autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)
