-- Telling clients: endpoints, deliveries, callbacks, forecasts, and one log of events to follow.

-- The log is followed and forgotten in the order of its numbers, over all tenants.
CREATE UNIQUE INDEX events_in_order ON events (id);
DROP INDEX events_at;
CREATE INDEX events_of_job ON events (tenant_id, job_id, id) WHERE job_id IS NOT NULL;

CREATE TABLE endpoints (                     -- where a tenant wants to be told
    tenant_id       text NOT NULL REFERENCES tenants,
    id              uuid NOT NULL,
    url             text NOT NULL,
    origin          text NOT NULL,           -- scheme://host:port, for callbacks
    description     text,
    types           text[],                  -- NULL: every type; 'media.*' stands for all of media
    payload         text NOT NULL CHECK (payload IN ('full', 'thin')),
    payload_version int NOT NULL,            -- pinned when it was made
    signing         text NOT NULL CHECK (signing IN ('hmac', 'ed25519')),
    state           text NOT NULL CHECK (state IN ('enabled', 'disabled', 'deleted')),
    reason          text,                    -- why it is disabled
    failures        int NOT NULL DEFAULT 0,  -- in a row; those that say "later" do not count
    failing_since   timestamptz,
    open_until      timestamptz,             -- the breaker: nothing is sent before
    served_at       timestamptz,
    version         bigint NOT NULL DEFAULT 1,
    created_at      timestamptz NOT NULL DEFAULT now(),
    changed_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, id)
) WITH (fillfactor = 70);

CREATE TABLE endpoint_secrets (
    tenant_id   text NOT NULL,
    endpoint_id uuid NOT NULL,
    version     int NOT NULL,
    value       bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    retires_at  timestamptz,                 -- signs beside the newest one until then
    PRIMARY KEY (tenant_id, endpoint_id, version),
    FOREIGN KEY (tenant_id, endpoint_id) REFERENCES endpoints ON DELETE CASCADE
);

CREATE TABLE deliveries (                    -- one event for one endpoint
    tenant_id    text NOT NULL,
    id           uuid NOT NULL DEFAULT mediamill_uuid7(),
    endpoint_id  uuid NOT NULL,
    event        bigint NOT NULL,
    event_id     uuid NOT NULL,
    type         text NOT NULL,
    media_id     uuid,
    url          text,                       -- of a callback; NULL: the endpoint's
    state        text NOT NULL DEFAULT 'pending' CHECK (state IN (
                     'pending', 'delivered', 'exhausted', 'canceled')),
    reason       text,                       -- why it is exhausted or canceled
    attempt      int NOT NULL DEFAULT 0,
    attempt_base int NOT NULL DEFAULT 0,     -- attempts before it was asked for again
    due_at       timestamptz NOT NULL DEFAULT now(),
    leased_until timestamptz,
    body         bytea,                      -- what was signed and sent; repeats send the same
    status       int,                        -- of the last answer
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at  timestamptz,
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, endpoint_id) REFERENCES endpoints ON DELETE CASCADE
) WITH (fillfactor = 70);
CREATE INDEX deliveries_due ON deliveries (tenant_id, endpoint_id, due_at) WHERE state = 'pending';
CREATE INDEX deliveries_any_due ON deliveries (due_at) WHERE state = 'pending';
CREATE INDEX deliveries_leased ON deliveries (tenant_id, endpoint_id)
    WHERE state = 'pending' AND leased_until IS NOT NULL;
CREATE UNIQUE INDEX deliveries_once ON deliveries (tenant_id, event, endpoint_id) WHERE url IS NULL;
CREATE INDEX deliveries_listed ON deliveries (tenant_id, endpoint_id, id);
CREATE INDEX deliveries_of_media ON deliveries (tenant_id, media_id)
    WHERE media_id IS NOT NULL AND body IS NOT NULL;

CREATE TABLE delivery_attempts (
    tenant_id   text NOT NULL,
    delivery_id uuid NOT NULL,
    attempt     int NOT NULL,
    at          timestamptz NOT NULL,
    worker      text NOT NULL,
    duration_ms double precision NOT NULL,
    timings     jsonb NOT NULL DEFAULT '{}', -- dns, connect, tls, first byte; the address called
    status      int,
    response    bytea,                       -- its first bytes
    failure     text,                        -- why there was no good answer
    PRIMARY KEY (tenant_id, delivery_id, attempt),
    FOREIGN KEY (tenant_id, delivery_id) REFERENCES deliveries ON DELETE CASCADE
);

CREATE TABLE callbacks (                     -- an address for one media or job, of a known origin
    tenant_id   text NOT NULL,
    subject_id  uuid NOT NULL,
    endpoint_id uuid NOT NULL,               -- signs and counts
    url         text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, subject_id),
    FOREIGN KEY (tenant_id, endpoint_id) REFERENCES endpoints ON DELETE CASCADE
);

-- A delivery for each endpoint that wants an event, in the statement that writes it, so that no
-- event can be written without. A test event has its one delivery already.
CREATE FUNCTION mediamill_tell() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO deliveries (tenant_id, endpoint_id, event, event_id, type, media_id, url)
    SELECT n.tenant_id, e.id, n.id, n.event_id, n.type, n.media_id, NULL
    FROM told AS n
    JOIN endpoints AS e ON e.tenant_id = n.tenant_id AND e.state = 'enabled'
    WHERE n.type <> 'webhook.test'
      AND (e.types IS NULL OR n.type = ANY (e.types)
           OR split_part(n.type, '.', 1) || '.*' = ANY (e.types))
    UNION ALL
    SELECT n.tenant_id, c.endpoint_id, n.id, n.event_id, n.type, n.media_id, c.url
    FROM told AS n
    JOIN callbacks AS c ON c.tenant_id = n.tenant_id
     AND c.subject_id = CASE WHEN n.type LIKE 'job.%' THEN n.job_id ELSE n.media_id END
    JOIN endpoints AS e ON e.tenant_id = c.tenant_id AND e.id = c.endpoint_id
     AND e.state = 'enabled';
    RETURN NULL;
END
$$;
CREATE TRIGGER mediamill_tell AFTER INSERT ON events
    REFERENCING NEW TABLE AS told FOR EACH STATEMENT EXECUTE FUNCTION mediamill_tell();

CREATE TABLE forecasts (                     -- what was said at first, to be held against what came
    tenant_id   text NOT NULL,
    job_id      uuid NOT NULL,
    queue       text NOT NULL,
    kind        text NOT NULL,
    recipe      text,
    depth       int NOT NULL,                -- how much was ahead of it, roughly
    raw_seconds double precision NOT NULL,   -- before it was corrected by earlier errors
    p50_seconds double precision NOT NULL,
    p90_seconds double precision NOT NULL,
    made_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, job_id),
    FOREIGN KEY (tenant_id, job_id) REFERENCES jobs ON DELETE CASCADE
);
CREATE INDEX forecasts_made ON forecasts (made_at);
CREATE INDEX forecasts_lately ON forecasts (queue, depth, made_at DESC);
CREATE INDEX jobs_done ON jobs (queue, finished_at DESC) WHERE state = 'completed';
