-- The first schema. Everything that belongs to a customer carries tenant_id and is keyed by it, so a
-- row can never refer to another tenant's row. Installation-wide tables (instance, secrets, workers)
-- have no tenant and say so.

-- UUIDv7 (RFC 9562) for servers before 18: 48 bits of Unix milliseconds, version, variant, random.
CREATE FUNCTION mediamill_uuid7() RETURNS uuid LANGUAGE sql VOLATILE AS $$
    SELECT encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                    PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint)
                                      FROM 3)
                    FROM 1 FOR 6),
            52, 1), 53, 1),
        'hex')::uuid
$$;

CREATE TABLE instance (                      -- installation-wide: one row
    only_one    boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    id          uuid NOT NULL,               -- also written into the storage root as its marker
    created_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE secrets (                       -- installation-wide: signing keys and peppers
    purpose     text NOT NULL,
    version     int  NOT NULL,
    value       bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    retires_at  timestamptz,                 -- still verifies until then; the newest one signs
    PRIMARY KEY (purpose, version)
);

CREATE TABLE workers (                       -- installation-wide: one row per process start
    id          text PRIMARY KEY,
    host        text NOT NULL,
    pid         int NOT NULL,
    version     text NOT NULL,
    slots       jsonb NOT NULL,
    sandbox     text NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    seen_at     timestamptz NOT NULL DEFAULT now(),
    stopping    boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);

CREATE TABLE tenants (
    tenant_id   text PRIMARY KEY CHECK (tenant_id ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
    created_at  timestamptz NOT NULL DEFAULT now()
);
INSERT INTO tenants (tenant_id) VALUES ('default');

CREATE TABLE api_keys (
    tenant_id    text NOT NULL REFERENCES tenants,
    id           text NOT NULL,
    name         text NOT NULL,
    digest       bytea NOT NULL,             -- HMAC-SHA256 of the secret part; the key itself is not kept
    last4        text NOT NULL,
    scopes       text[] NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz,
    revoked_at   timestamptz,
    last_used_at timestamptz,
    PRIMARY KEY (tenant_id, id)
);
CREATE UNIQUE INDEX api_keys_id ON api_keys (id);

CREATE TABLE media (
    tenant_id         text NOT NULL REFERENCES tenants,
    id                uuid NOT NULL,
    state             text NOT NULL CHECK (state IN (
                          'awaiting_upload', 'uploaded', 'queued', 'processing', 'ready', 'failed',
                          'expired')),
    kind              text CHECK (kind IN ('image', 'video', 'audio')),
    filename          text,
    content_type      text NOT NULL,         -- as announced; the truth is detected_type
    size              bigint NOT NULL CHECK (size >= 0),
    sha256            text,                  -- announced, else as seen by the worker
    upload_key        text NOT NULL,
    upload_expires_at timestamptz NOT NULL,
    object_version    text,                  -- the storage's version of the accepted original
    detected_type     text,
    width             int,                   -- as shown, after orientation and pixel shape
    height            int,
    duration_seconds  double precision,
    info              jsonb,
    preview           jsonb,
    recipe            text NOT NULL,
    recipe_version    int NOT NULL,
    generation        int NOT NULL DEFAULT 0,
    set_id            text,                  -- the published set of the recipe version above
    metadata          jsonb NOT NULL DEFAULT '{}',
    error             jsonb,
    version           bigint NOT NULL DEFAULT 1,   -- grows with every change that a client can see
    created_at        timestamptz NOT NULL DEFAULT now(),
    uploaded_at       timestamptz,
    state_at          timestamptz NOT NULL DEFAULT now(),
    expires_at        timestamptz,
    deleted_at        timestamptz,
    PRIMARY KEY (tenant_id, id),
    CHECK (generation > 0 OR state IN ('awaiting_upload', 'expired'))
) WITH (fillfactor = 80);
CREATE INDEX media_open_slots ON media (upload_expires_at)
    WHERE state = 'awaiting_upload' AND deleted_at IS NULL;
CREATE INDEX media_expiring ON media (expires_at) WHERE expires_at IS NOT NULL AND deleted_at IS NULL;

CREATE TABLE jobs (
    tenant_id         text NOT NULL REFERENCES tenants,
    id                uuid NOT NULL,
    state             text NOT NULL CHECK (state IN (
                          'queued', 'processing', 'completed', 'failed', 'canceled')),
    kind              text NOT NULL,
    queue             text NOT NULL,
    role              text NOT NULL CHECK (role IN ('main', 'preview', 'job')),
    schema_version    int NOT NULL DEFAULT 1,
    media_id          uuid,
    recipe            text,
    recipe_version    int,
    generation        int,
    payload           jsonb NOT NULL DEFAULT '{}',
    result            jsonb,
    error             jsonb,
    priority          int NOT NULL DEFAULT 0,
    run_at            timestamptz NOT NULL DEFAULT now(),
    attempt           int NOT NULL DEFAULT 0,
    max_attempts      int NOT NULL CHECK (max_attempts > 0),
    crashes           int NOT NULL DEFAULT 0,
    resource_failures int NOT NULL DEFAULT 0,
    fence             bigint NOT NULL DEFAULT 0,
    lease_until       timestamptz,           -- never indexed, so that a beat stays a HOT update
    worker            text,
    stage             text,
    progress          real,
    cancel_requested  boolean NOT NULL DEFAULT false,
    dead_letter       boolean NOT NULL DEFAULT false,
    parent_id         uuid,
    pending_children  int NOT NULL DEFAULT 0,
    version           bigint NOT NULL DEFAULT 1,
    created_at        timestamptz NOT NULL DEFAULT now(),
    queued_at         timestamptz NOT NULL DEFAULT now(),
    started_at        timestamptz,           -- of the current attempt
    finished_at       timestamptz,
    expires_at        timestamptz,
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, media_id) REFERENCES media,
    FOREIGN KEY (tenant_id, parent_id) REFERENCES jobs,
    CHECK ((finished_at IS NOT NULL) = (state IN ('completed', 'failed', 'canceled'))),
    CHECK (attempt <= max_attempts),
    CHECK (role = 'job' OR media_id IS NOT NULL)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX jobs_one_main ON jobs (tenant_id, media_id, recipe, recipe_version, generation)
    WHERE role = 'main';
CREATE INDEX jobs_of_media ON jobs (tenant_id, media_id) WHERE media_id IS NOT NULL;
CREATE INDEX jobs_waiting ON jobs (queue, priority DESC, queued_at, id) WHERE state = 'queued';
CREATE INDEX jobs_running ON jobs (queue) WHERE state = 'processing';
CREATE INDEX jobs_dead ON jobs (tenant_id, finished_at) WHERE state = 'failed' AND dead_letter;
CREATE INDEX jobs_finished ON jobs (kind, recipe, finished_at DESC) WHERE state = 'completed';
CREATE INDEX jobs_expiring ON jobs (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE attempts (
    tenant_id   text NOT NULL,
    job_id      uuid NOT NULL,
    fence       bigint NOT NULL,
    attempt     int NOT NULL,
    worker      text NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    outcome     text CHECK (outcome IN (
                    'completed', 'failed', 'retried', 'lost', 'released', 'rerouted', 'canceled')),
    error       jsonb,
    log_tail    text,
    commands    jsonb,
    PRIMARY KEY (tenant_id, job_id, fence),
    FOREIGN KEY (tenant_id, job_id) REFERENCES jobs ON DELETE CASCADE
);

CREATE TABLE transitions (                   -- append-only: how everything came to be as it is
    tenant_id   text NOT NULL,
    id          bigint GENERATED ALWAYS AS IDENTITY,
    subject     text NOT NULL CHECK (subject IN ('media', 'job')),
    media_id    uuid,
    job_id      uuid,
    from_state  text,                        -- NULL: it came into being; equal to to_state: a stage
    to_state    text NOT NULL,
    stage       text,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempt     int,
    fence       bigint,
    worker      text,
    code        text,                        -- why: a failure code or a word such as 'released'
    details     jsonb,
    PRIMARY KEY (tenant_id, id)
);
CREATE INDEX transitions_of_media ON transitions (tenant_id, media_id, id) WHERE media_id IS NOT NULL;
CREATE INDEX transitions_of_job ON transitions (tenant_id, job_id, id) WHERE job_id IS NOT NULL;

CREATE TABLE events (                        -- the log that SSE and webhooks read
    tenant_id      text NOT NULL,
    id             bigint GENERATED ALWAYS AS IDENTITY,
    event_id       uuid NOT NULL DEFAULT mediamill_uuid7(),
    type           text NOT NULL,
    schema_version int NOT NULL DEFAULT 1,
    media_id       uuid,
    job_id         uuid,
    data           jsonb NOT NULL DEFAULT '{}',
    at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, id)
);
CREATE INDEX events_of_media ON events (tenant_id, media_id, id) WHERE media_id IS NOT NULL;
CREATE INDEX events_at ON events (at);

CREATE TABLE sets (                          -- a complete, verified set of variants
    tenant_id      text NOT NULL,
    media_id       uuid NOT NULL,
    recipe         text NOT NULL,
    recipe_version int NOT NULL,
    set_id         text NOT NULL,            -- digest of the outputs' names and hashes
    published_at   timestamptz NOT NULL DEFAULT now(),
    superseded_at  timestamptz,
    expires_at     timestamptz,              -- its objects are swept after this
    PRIMARY KEY (tenant_id, media_id, recipe, recipe_version, set_id),
    FOREIGN KEY (tenant_id, media_id) REFERENCES media ON DELETE CASCADE
);
CREATE INDEX sets_expiring ON sets (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE variants (                      -- the manifest: what readers may see
    tenant_id        text NOT NULL,
    id               uuid NOT NULL,
    media_id         uuid NOT NULL,
    recipe           text NOT NULL,
    recipe_version   int NOT NULL,
    set_id           text NOT NULL,
    name             text NOT NULL,          -- w640.avif
    key              text NOT NULL,
    content_type     text NOT NULL,
    bytes            bigint NOT NULL CHECK (bytes > 0),
    sha256           text NOT NULL,
    width            int,
    height           int,
    duration_seconds double precision,
    seconds          double precision,       -- what making it took
    position         int NOT NULL,
    PRIMARY KEY (tenant_id, id),
    UNIQUE (tenant_id, media_id, recipe, recipe_version, set_id, name),
    FOREIGN KEY (tenant_id, media_id, recipe, recipe_version, set_id) REFERENCES sets ON DELETE CASCADE
);

CREATE TABLE erasures (                      -- bytes that must go; a row stays until they are gone
    tenant_id    text NOT NULL,
    media_id     uuid NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, media_id),
    FOREIGN KEY (tenant_id, media_id) REFERENCES media ON DELETE CASCADE
);

CREATE TABLE idempotency (
    tenant_id   text NOT NULL,
    method      text NOT NULL,
    route       text NOT NULL,
    key         text NOT NULL,
    fingerprint bytea NOT NULL,
    status      int,
    body        text,
    location    text,
    about       uuid,                        -- what was made; its deletion empties the answer
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, method, route, key)
);
CREATE INDEX idempotency_about ON idempotency (tenant_id, about) WHERE about IS NOT NULL;
CREATE INDEX idempotency_expiring ON idempotency (expires_at);
