-- What is kept of a home, how large it may be, and what a collection needs to know.
-- A rule that is null is the org's; one that is null there, too, is the default: docs/data-model.md.

ALTER TABLE org ADD COLUMN keep_newest INTEGER CHECK (keep_newest >= 0);
ALTER TABLE org ADD COLUMN keep_for_s INTEGER CHECK (keep_for_s >= 0);
ALTER TABLE org ADD COLUMN home_bytes_max INTEGER CHECK (home_bytes_max >= 0);
ALTER TABLE org ADD COLUMN home_files_max INTEGER CHECK (home_files_max >= 0);
ALTER TABLE org ADD COLUMN bytes_max INTEGER CHECK (bytes_max >= 0);    -- of all its homes together
ALTER TABLE org ADD COLUMN collect_floor INTEGER NOT NULL DEFAULT 0;    -- publishes of earlier epochs are refused
ALTER TABLE org ADD COLUMN collected_at INTEGER;                        -- when the last collection ended
ALTER TABLE org ADD COLUMN collect_report TEXT;                         -- what it did, JSON

ALTER TABLE home ADD COLUMN keep_newest INTEGER CHECK (keep_newest >= 0);
ALTER TABLE home ADD COLUMN keep_for_s INTEGER CHECK (keep_for_s >= 0);
ALTER TABLE home ADD COLUMN bytes_max INTEGER CHECK (bytes_max >= 0);
ALTER TABLE home ADD COLUMN files_max INTEGER CHECK (files_max >= 0);
ALTER TABLE home ADD COLUMN unsecured_at INTEGER;                       -- null while the last secure was published
ALTER TABLE home ADD COLUMN unsecured_reason TEXT;

ALTER TABLE snapshot ADD COLUMN origin TEXT NOT NULL DEFAULT 'secured'
    CHECK (origin IN ('secured', 'imported', 'restored', 'forked'));
ALTER TABLE snapshot ADD COLUMN from_generation INTEGER;
ALTER TABLE snapshot ADD COLUMN from_home TEXT;
UPDATE snapshot SET origin = 'imported' WHERE session IS NULL;

ALTER TABLE session ADD COLUMN home_base INTEGER;   -- the generation with which it first got the home
