-- Bytes that come in by parts, over many requests: tus, signed multipart, and what we fetch ourselves.

CREATE TABLE transfers (
    tenant_id    text NOT NULL REFERENCES tenants,
    id           uuid NOT NULL,               -- also the id of the media that comes of it
    protocol     text NOT NULL CHECK (protocol IN ('tus', 'multipart', 'fetch')),
    role         text NOT NULL DEFAULT 'whole' CHECK (role IN ('whole', 'partial', 'final')),
    key          text NOT NULL,               -- the object that it becomes
    parts        text NOT NULL,               -- the storage's name for the object in parts
    size         bigint CHECK (size > 0),     -- NULL: the client does not know it yet
    received     bigint NOT NULL DEFAULT 0 CHECK (received BETWEEN 0 AND size),
    tail_key     text,                        -- the last bytes received, too few for a part
    tail_bytes   bigint NOT NULL DEFAULT 0,
    next_part    int NOT NULL DEFAULT 1,
    part_bytes   bigint NOT NULL,             -- size of every part but the last, as planned
    fence        bigint NOT NULL DEFAULT 0,   -- grows with every writer
    writing      boolean NOT NULL DEFAULT false,  -- a writer has not said that it is done
    wanted       jsonb NOT NULL,              -- what the client said about the file
    metadata     text,                        -- Upload-Metadata as it was sent
    joins        text,                        -- of a final upload: the partial ones
    version      text,                        -- the storage's version of the complete object
    source       text,                        -- where we fetch it from
    due_at       timestamptz,                 -- when that is tried next; a fetcher at work moves it on
    tries        int NOT NULL DEFAULT 0,
    created_at   timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz NOT NULL,
    completed_at timestamptz,
    swept_at     timestamptz,
    PRIMARY KEY (tenant_id, id)
);
CREATE UNIQUE INDEX transfers_joins ON transfers (tenant_id, joins) WHERE joins IS NOT NULL;
CREATE INDEX transfers_open ON transfers (expires_at) WHERE swept_at IS NULL;

CREATE INDEX transfers_due ON transfers (due_at)
    WHERE source IS NOT NULL AND completed_at IS NULL AND swept_at IS NULL;

CREATE TABLE transfer_parts (
    tenant_id   text NOT NULL,
    transfer_id uuid NOT NULL,
    number      int NOT NULL,
    size        bigint NOT NULL,
    etag        text NOT NULL,
    PRIMARY KEY (tenant_id, transfer_id, number),
    FOREIGN KEY (tenant_id, transfer_id) REFERENCES transfers ON DELETE CASCADE
);
