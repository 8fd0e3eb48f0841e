-- Statements on the queue engine's own table, which PgQueuer creates and owns. {queue} is its name.

-- name: consume
-- The tickets are used up; in the transaction that takes them, so a crash in between gives them back.
DELETE FROM {queue} WHERE id = ANY($1::bigint[])

-- name: waiting
-- Tickets that wait, by queue.
SELECT entrypoint AS queue, count(*) AS tickets
FROM {queue} WHERE status = 'queued' GROUP BY entrypoint

-- name: index_payload
-- The sweep asks "has this job a waiting ticket?" for many jobs.
CREATE INDEX IF NOT EXISTS mediamill_ticket_payload ON {queue} (payload) WHERE status = 'queued'

-- name: prune_log
-- The engine logs each ticket; our own transitions say more, so its log is kept short.
DELETE FROM {log} WHERE created < now() - interval '10 minutes'
