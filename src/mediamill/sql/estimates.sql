-- What similar work really took here.

-- name: recent
-- Run time of the last finished jobs of this kind and recipe, in seconds.
SELECT count(*) AS jobs,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) AS p50,
       percentile_cont(0.9) WITHIN GROUP (ORDER BY seconds) AS p90
FROM (
    SELECT extract(epoch FROM finished_at - started_at)::float8 AS seconds
    FROM jobs
    WHERE kind = $1 AND recipe IS NOT DISTINCT FROM $2 AND state = 'completed'
    ORDER BY finished_at DESC
    LIMIT 50
) AS lately
