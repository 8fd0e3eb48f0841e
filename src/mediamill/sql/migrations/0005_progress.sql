-- How far each output of a running job is.

ALTER TABLE jobs
    ADD COLUMN detail jsonb;                 -- written with progress, at most once a second
