-- Homes that were deleted with their agents, so that runners which still have a working copy drop it. A home that is only
-- unknown proves nothing: the database may have been put back from a backup.
CREATE TABLE deleted_home (
    org TEXT NOT NULL REFERENCES org(id),
    home TEXT NOT NULL,
    deleted_at INTEGER NOT NULL,
    PRIMARY KEY (org, home)
) STRICT, WITHOUT ROWID;
