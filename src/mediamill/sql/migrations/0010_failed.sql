-- What failed lately, for the figures of a tenant: completed jobs have an index of their own.

CREATE INDEX jobs_failed ON jobs (tenant_id, finished_at DESC) WHERE state = 'failed';
