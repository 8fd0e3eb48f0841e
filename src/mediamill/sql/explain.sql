-- Why something took as long as it did, for an operator.

-- name: ahead
-- Jobs of the same queue that ended while this one waited in it, by kind and by whose they were.
SELECT o.kind, o.tenant_id = $1 AS own, count(*) AS jobs
FROM jobs AS mine JOIN jobs AS o ON o.queue = mine.queue AND o.state = 'completed'
 AND o.finished_at > $3 AND o.finished_at <= $4 AND o.id <> mine.id
WHERE mine.tenant_id = $1 AND mine.id = $2
GROUP BY o.kind, own
ORDER BY jobs DESC

-- name: forecast
SELECT f.p50_seconds, f.p90_seconds,
       extract(epoch FROM j.finished_at - f.made_at)::float8 AS seconds
FROM forecasts AS f JOIN jobs AS j ON j.tenant_id = f.tenant_id AND j.id = f.job_id
WHERE f.tenant_id = $1 AND f.job_id = $2

-- name: first_delivery
-- The last event of a media or job that reached an endpoint, and how soon.
SELECT d.type, extract(epoch FROM d.finished_at - e.at)::float8 AS seconds
FROM events AS e
JOIN deliveries AS d ON d.tenant_id = e.tenant_id AND d.event = e.id AND d.state = 'delivered'
WHERE e.tenant_id = $1 AND (e.media_id = $2 OR e.job_id = $2)
  AND e.type IN ('media.ready', 'media.failed', 'job.completed', 'job.failed')
ORDER BY e.id DESC, d.finished_at
LIMIT 1
