-- Which store an org's blocks are in, so that another one in its place is noticed before anything relies on it.
CREATE TABLE store (
    org TEXT PRIMARY KEY REFERENCES org(id),
    identity TEXT NOT NULL,
    noted_at INTEGER NOT NULL
) STRICT;
