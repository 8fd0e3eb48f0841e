-- Generic jobs, children, dead letters, queue controls and fair turns.

ALTER TABLE jobs
    ADD COLUMN turn bigint NOT NULL DEFAULT 0,      -- virtual time: whose turn it is among equals
    ADD COLUMN dedup_key text,
    ADD COLUMN child_key text,                      -- names a child within its parent
    ADD COLUMN superseded boolean NOT NULL DEFAULT false,  -- a canceled child that was replaced
    ADD COLUMN weight real NOT NULL DEFAULT 1 CHECK (weight > 0),
    ADD COLUMN timeout_seconds double precision CHECK (timeout_seconds > 0),
    ADD COLUMN discarded_at timestamptz;

DROP INDEX jobs_waiting;
CREATE INDEX jobs_waiting ON jobs (queue, priority DESC, turn, id) WHERE state = 'queued';
CREATE INDEX jobs_turns ON jobs (queue, priority, tenant_id, turn) WHERE state = 'queued';
CREATE UNIQUE INDEX jobs_dedup ON jobs (tenant_id, kind, dedup_key)
    WHERE dedup_key IS NOT NULL AND state IN ('queued', 'processing');
CREATE UNIQUE INDEX jobs_children ON jobs (tenant_id, parent_id, child_key)
    WHERE parent_id IS NOT NULL AND NOT superseded;
CREATE INDEX jobs_live_children ON jobs (tenant_id, parent_id)
    WHERE parent_id IS NOT NULL AND state IN ('queued', 'processing');

-- The turn of a job that joins a queue now. Start-time fair queueing with one unit a job: a tenant's
-- next turn follows its own last waiting one, and is never before the one that is next for anybody.
-- A burst of one tenant therefore spreads out behind the turns of the others, and a tenant that
-- waited for nothing owes nothing. Its transactions that are under way do not see each other's jobs:
-- each holds a number until it commits, and stands that far behind, or a burst over many connections
-- would be so many jobs at every turn. STABLE, so that it does not see what its own statement inserts.
CREATE FUNCTION mediamill_turn(q text, p int, t text) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT 1 + coalesce(
        (SELECT n FROM generate_series(0, 31) AS n
         WHERE pg_try_advisory_xact_lock(hashtext(q || p || t), n) LIMIT 1), 32)
    + greatest(
        coalesce((SELECT turn FROM jobs
                  WHERE queue = q AND priority = p AND tenant_id = t AND state = 'queued'
                  ORDER BY turn DESC LIMIT 1), 0),
        coalesce((SELECT turn FROM jobs
                  WHERE queue = q AND priority = p AND state = 'queued'
                  ORDER BY turn LIMIT 1), 0))
$$;

CREATE TABLE effects (                       -- what a job has done outside its own row, once
    tenant_id text NOT NULL,
    job_id    uuid NOT NULL,
    key       text NOT NULL,
    result    jsonb,
    fence     bigint NOT NULL,
    at        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, job_id, key),
    FOREIGN KEY (tenant_id, job_id) REFERENCES jobs ON DELETE CASCADE
);

CREATE TABLE queues (                        -- installation-wide: what an operator set, by queue
    queue       text PRIMARY KEY,
    paused      boolean NOT NULL DEFAULT false,
    concurrency int CHECK (concurrency > 0), -- jobs at once over all workers; NULL: their slots
    changed_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE kinds (                         -- installation-wide: what workers have offered to do
    kind            text NOT NULL,
    version         int NOT NULL,
    queue           text NOT NULL,
    max_attempts    int NOT NULL,
    timeout_seconds double precision,
    concurrency     int,
    seen_at         timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (kind, version)
);

ALTER TABLE workers
    ADD COLUMN drain_requested boolean NOT NULL DEFAULT false;

ALTER TABLE attempts DROP CONSTRAINT attempts_outcome_check;
ALTER TABLE attempts ADD CONSTRAINT attempts_outcome_check CHECK (outcome IN (
    'completed', 'failed', 'retried', 'lost', 'released', 'rerouted', 'canceled', 'waiting'));
