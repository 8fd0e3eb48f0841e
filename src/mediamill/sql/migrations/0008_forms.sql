-- Slots whose size is not known yet, but for what it may be at most.

ALTER TABLE media
    ADD COLUMN max_size bigint CHECK (max_size > 0);   -- NULL: size is exact
