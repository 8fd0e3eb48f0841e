-- What similar work really took here, and how good the forecasts were.

-- name: recent
-- Run time of the last finished jobs of this kind and recipe, in seconds, and how much each was.
SELECT extract(epoch FROM j.finished_at - j.started_at)::float8 AS seconds,
       m.size, m.width, m.height, m.duration_seconds
FROM jobs AS j LEFT JOIN media AS m ON m.tenant_id = j.tenant_id AND m.id = j.media_id
WHERE j.kind = $1 AND j.recipe IS NOT DISTINCT FROM $2 AND j.state = 'completed'
ORDER BY j.finished_at DESC
LIMIT 50

-- name: job_seconds
-- What the last jobs of each queue took on average.
SELECT q.queue, lately.seconds
FROM (VALUES ('image'), ('video'), ('audio'), ('default'), ('webhook'), ('maintenance')) AS q (queue)
CROSS JOIN LATERAL (
    SELECT avg(extract(epoch FROM j.finished_at - j.started_at))::float8 AS seconds
    FROM (SELECT finished_at, started_at FROM jobs
          WHERE queue = q.queue AND state = 'completed'
          ORDER BY finished_at DESC LIMIT 50) AS j
) AS lately
WHERE lately.seconds IS NOT NULL

-- name: keep
INSERT INTO forecasts (tenant_id, job_id, queue, kind, recipe, depth, raw_seconds, p50_seconds,
                       p90_seconds)
SELECT tenant_id, id, queue, kind, recipe, $3, $4, $5, $6 FROM jobs
WHERE tenant_id = $1 AND id = $2
ON CONFLICT DO NOTHING

-- name: errors
-- By which factor the last forecasts of this queue and depth were off. $3 keeps tiny ones from
-- dominating. A job that is late already counts as it stands: without those the slow ones would be
-- missing just when things get slower. The quantile for p90 lies above 0.9, as that of a sample must
-- to hold for the next one: (n + 1) / n of it, and room for what drifts.
SELECT count(*) AS jobs,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY factor) AS p50,
       percentile_cont(0.92) WITHIN GROUP (ORDER BY factor) AS p90
FROM (
    SELECT (extract(epoch FROM coalesce(j.finished_at, now()) - f.made_at) + $3::float8)
               / (f.raw_seconds + $3::float8) AS factor
    FROM forecasts AS f JOIN jobs AS j ON j.tenant_id = f.tenant_id AND j.id = f.job_id
    WHERE f.queue = $1 AND f.depth = $2
      AND (j.state = 'completed'
           OR (j.state IN ('queued', 'processing')
               AND f.made_at < now() - make_interval(secs => f.p90_seconds)))
    ORDER BY f.made_at DESC
    LIMIT 100
) AS lately

-- name: record
-- How often p90 held and how far p50 was off, over $1 days.
SELECT f.kind, f.recipe, count(*) AS jobs,
       avg((took.seconds <= f.p90_seconds)::int)::float8 AS held,
       percentile_cont(0.5) WITHIN GROUP (
           ORDER BY abs(took.seconds - f.p50_seconds) / greatest(took.seconds, 0.001))::float8
           AS median_error,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY took.seconds)::float8 AS median_seconds
FROM forecasts AS f
JOIN jobs AS j ON j.tenant_id = f.tenant_id AND j.id = f.job_id AND j.state = 'completed'
CROSS JOIN LATERAL (SELECT extract(epoch FROM j.finished_at - f.made_at)::float8 AS seconds) AS took
WHERE f.made_at > now() - make_interval(secs => $1::float8 * 86400)
GROUP BY f.kind, f.recipe
ORDER BY f.kind, f.recipe
