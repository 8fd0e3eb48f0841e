-- Jobs that hold back until a time stand behind everybody: no ticket, no turn that counts, and
-- nothing passes over them to find what is due. However many they are, they cost nothing.

-- One bit of a job's turn says that it holds back; below it stays the turn that it had, so a retry
-- goes on from its old place. As the highest turn it sorts last wherever jobs are in line.
CREATE FUNCTION mediamill_later() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT 4611686018427387904 $$;

CREATE FUNCTION mediamill_hold(turn bigint, delay interval) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN delay > interval '0' THEN turn | mediamill_later()
                ELSE turn & ~mediamill_later() END
$$;

CREATE INDEX jobs_later ON jobs (queue, run_at)
    WHERE state = 'queued' AND turn >= mediamill_later();

-- The turn of a job that joins the line. As before, but of those that are in line only: one that holds
-- back neither keeps the virtual time where it was, which would let a newcomer pass everybody, nor
-- counts as its tenant's last. And a newcomer's turn is that of the job which is next, not the one
-- after: it has had nothing yet, and the older goes first among equals anyway.
CREATE OR REPLACE FUNCTION mediamill_turn(q text, p int, t text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce(
        (SELECT n FROM generate_series(0, 31) AS n
         WHERE pg_try_advisory_xact_lock(hashtext(q || p || t), n) LIMIT 1), 32)
    + greatest(
        1 + coalesce((SELECT turn FROM jobs
                      WHERE queue = q AND priority = p AND tenant_id = t AND state = 'queued'
                        AND turn < mediamill_later()
                      ORDER BY turn DESC LIMIT 1), 0),
        coalesce((SELECT turn FROM jobs
                  WHERE queue = q AND priority = p AND state = 'queued'
                    AND turn < mediamill_later()
                  ORDER BY turn LIMIT 1), 0))
$$;
