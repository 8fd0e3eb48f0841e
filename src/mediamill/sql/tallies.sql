-- Counters of the whole installation.

-- name: add
-- In the order of the key, so that two that count at once never wait for each other in a circle.
INSERT INTO tallies (name, what, outcome, count)
SELECT $1, what, outcome, count
FROM unnest($2::text[], $3::text[], $4::bigint[]) AS t (what, outcome, count)
ORDER BY what, outcome
ON CONFLICT (name, what, outcome) DO UPDATE SET count = tallies.count + excluded.count

-- name: read
SELECT what, outcome, count FROM tallies WHERE name = $1 ORDER BY what, outcome
