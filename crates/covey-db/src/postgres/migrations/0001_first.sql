-- The same by meaning as SQLite's schema 3. Ids are stored in their printed form and compared byte by byte (COLLATE "C":
-- lists are in the order of ids, whatever the database's locale), times as milliseconds since 1970 UTC by the server's
-- clock. Documents are text and not jsonb: they are given back as they came, with the order of their keys, and jsonb
-- cannot hold the character U+0000. The org is part of every key: no query can cross a tenant's border by forgetting a
-- condition.

CREATE TABLE org (
    id TEXT COLLATE "C" PRIMARY KEY,
    name TEXT COLLATE "C" NOT NULL UNIQUE,
    created_at BIGINT NOT NULL,
    -- A rule that is null here is the default: docs/data-model.md.
    keep_newest BIGINT CHECK (keep_newest >= 0),
    keep_for_s BIGINT CHECK (keep_for_s >= 0),
    home_bytes_max BIGINT CHECK (home_bytes_max >= 0),
    home_files_max BIGINT CHECK (home_files_max >= 0),
    bytes_max BIGINT CHECK (bytes_max >= 0),          -- of all its homes together
    collect_floor BIGINT NOT NULL DEFAULT 0,          -- publishes of earlier epochs are refused
    collected_at BIGINT,                              -- when the last collection ended
    collect_report TEXT                               -- what it did, JSON
);

CREATE TABLE token (
    org TEXT COLLATE "C" NOT NULL REFERENCES org(id),
    id TEXT COLLATE "C" NOT NULL,
    name TEXT NOT NULL,
    hash BYTEA NOT NULL UNIQUE,         -- BLAKE3-256 of the secret; the secret itself is stored nowhere
    created_at BIGINT NOT NULL,
    last_used_at BIGINT,
    revoked_at BIGINT,
    PRIMARY KEY (org, id)
);

CREATE TABLE home (
    org TEXT COLLATE "C" NOT NULL REFERENCES org(id),
    id TEXT COLLATE "C" NOT NULL,
    agent TEXT COLLATE "C" NOT NULL,
    generation BIGINT NOT NULL DEFAULT 0,
    root TEXT COLLATE "C",              -- null exactly when generation is 0
    lease_token BIGINT NOT NULL DEFAULT 0,
    lease_session TEXT COLLATE "C",     -- the last holder; its journal gets the publishes
    lease_held BOOLEAN NOT NULL DEFAULT FALSE,
    lease_runner TEXT COLLATE "C",      -- the runner that the last token was given to
    lease_floor BIGINT NOT NULL DEFAULT 0,       -- the first token since the home came to that runner
    floor_generation BIGINT NOT NULL DEFAULT 0,  -- the generation it came there with
    created_at BIGINT NOT NULL,
    keep_newest BIGINT CHECK (keep_newest >= 0),      -- a rule that is null is the org's
    keep_for_s BIGINT CHECK (keep_for_s >= 0),
    bytes_max BIGINT CHECK (bytes_max >= 0),
    files_max BIGINT CHECK (files_max >= 0),
    unsecured_at BIGINT,                -- null while the last secure was published
    unsecured_reason TEXT,
    PRIMARY KEY (org, id),
    CHECK ((root IS NULL) = (generation = 0))
) WITH (fillfactor = 70);
-- Messages of a runner name only the home.
CREATE UNIQUE INDEX home_id ON home(id);
CREATE INDEX home_lease ON home(org, lease_session) WHERE lease_session IS NOT NULL;

CREATE TABLE snapshot (
    org TEXT COLLATE "C" NOT NULL,
    home TEXT COLLATE "C" NOT NULL,
    generation BIGINT NOT NULL,
    root TEXT COLLATE "C" NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('quiesced', 'frozen')),
    session TEXT COLLATE "C",
    step TEXT COLLATE "C",
    files BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    published_at BIGINT NOT NULL,
    origin TEXT NOT NULL CHECK (origin IN ('secured', 'imported', 'restored', 'forked')),
    from_generation BIGINT,
    from_home TEXT COLLATE "C",
    PRIMARY KEY (org, home, generation),
    FOREIGN KEY (org, home) REFERENCES home(org, id)
);

-- Homes that were deleted with their agents, so that runners which still have a working copy drop it. A home that is only
-- unknown proves nothing: the database may have been put back from a backup.
CREATE TABLE deleted_home (
    org TEXT COLLATE "C" NOT NULL REFERENCES org(id),
    home TEXT COLLATE "C" NOT NULL,
    deleted_at BIGINT NOT NULL,
    PRIMARY KEY (org, home)
);

CREATE TABLE agent (
    org TEXT COLLATE "C" NOT NULL REFERENCES org(id),
    id TEXT COLLATE "C" NOT NULL,
    home TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL,
    name TEXT NOT NULL,
    config TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    archived_at BIGINT,
    PRIMARY KEY (org, id),
    FOREIGN KEY (org, home) REFERENCES home(org, id)
);

CREATE TABLE agent_version (
    org TEXT COLLATE "C" NOT NULL,
    agent TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL,
    name TEXT NOT NULL,
    config TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (org, agent, version),
    FOREIGN KEY (org, agent) REFERENCES agent(org, id)
);

CREATE TABLE environment (
    org TEXT COLLATE "C" NOT NULL REFERENCES org(id),
    id TEXT COLLATE "C" NOT NULL,
    name TEXT NOT NULL,
    config TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    archived_at BIGINT,
    PRIMARY KEY (org, id)
);

-- Servers that work on this database; only its own clock is compared. Not used yet: one server at a time is enforced by
-- an advisory lock, and `session.owner` stays null.
CREATE TABLE instance (
    id BIGINT PRIMARY KEY,              -- random, new at every start, never used again
    address TEXT,
    version TEXT NOT NULL,
    draining BOOLEAN NOT NULL DEFAULT FALSE,
    started_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    expires_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE session (
    org TEXT COLLATE "C" NOT NULL REFERENCES org(id),
    id TEXT COLLATE "C" NOT NULL,
    agent TEXT COLLATE "C" NOT NULL,
    agent_version BIGINT NOT NULL,
    agent_snapshot TEXT NOT NULL,
    environment TEXT COLLATE "C" NOT NULL,
    home TEXT COLLATE "C" NOT NULL,
    home_base BIGINT,                   -- the generation with which it first got the home
    status TEXT NOT NULL DEFAULT 'idle' CHECK (status IN ('idle', 'running', 'rescheduling', 'terminated')),
    epoch BIGINT NOT NULL DEFAULT 0,    -- fencing token of the driver; never goes down
    head BIGINT NOT NULL DEFAULT 0,     -- last position of the journal
    owner BIGINT,                       -- the instance whose driver has the epoch
    waits_since BIGINT,                 -- since when calls wait for a client, in the middle of a turn
    title TEXT,
    metadata TEXT NOT NULL DEFAULT '{}',
    extra TEXT NOT NULL DEFAULT '{}',   -- fields of the API that Covey keeps but does not read
    input_tokens BIGINT NOT NULL DEFAULT 0,
    output_tokens BIGINT NOT NULL DEFAULT 0,
    cache_read_input_tokens BIGINT NOT NULL DEFAULT 0,
    cache_creation_input_tokens BIGINT NOT NULL DEFAULT 0,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    archived_at BIGINT,
    PRIMARY KEY (org, id),
    FOREIGN KEY (org, agent) REFERENCES agent(org, id),
    FOREIGN KEY (org, environment) REFERENCES environment(org, id),
    FOREIGN KEY (org, home) REFERENCES home(org, id)
) WITH (fillfactor = 50);               -- each append updates the row; room beside it keeps the indices untouched
CREATE UNIQUE INDEX session_id ON session(id);
CREATE INDEX session_open ON session(id) WHERE status IN ('running', 'rescheduling');
CREATE INDEX session_agent ON session(org, agent, id);
CREATE INDEX session_home ON session(org, home, id);
CREATE INDEX session_owner ON session(owner) WHERE owner IS NOT NULL;

-- No foreign key to the session: the append has just updated its row, and a check for each record would lock it again.
CREATE TABLE journal (
    org TEXT COLLATE "C" NOT NULL,
    session TEXT COLLATE "C" NOT NULL,
    seq BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    kind TEXT NOT NULL,
    event TEXT COLLATE "C",             -- public id; null for private records
    step TEXT COLLATE "C",
    dedup TEXT COLLATE "C",             -- given by the client
    body TEXT NOT NULL,
    at BIGINT NOT NULL,
    processed_at BIGINT,
    PRIMARY KEY (org, session, seq)
);
CREATE UNIQUE INDEX journal_event ON journal(org, session, event) WHERE event IS NOT NULL;
CREATE UNIQUE INDEX journal_dedup ON journal(org, session, dedup) WHERE dedup IS NOT NULL;
CREATE INDEX journal_waiting ON journal(session, seq) WHERE processed_at IS NULL;
-- One intention and one result per tool step, whoever appends: the database itself refuses a second one (I4).
CREATE UNIQUE INDEX journal_call ON journal(session, step) WHERE kind = 'agent.tool_use';
CREATE UNIQUE INDEX journal_result ON journal(session, step) WHERE kind = 'agent.tool_result';
-- Half the processor time of pglz for the same texts; a server that was built without it keeps its default.
DO $$
BEGIN
    ALTER TABLE journal ALTER COLUMN body SET COMPRESSION lz4;
EXCEPTION WHEN feature_not_supported OR invalid_parameter_value THEN
    NULL;
END
$$;

CREATE TABLE runner (
    org TEXT COLLATE "C" NOT NULL REFERENCES org(id),
    id TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    first_seen_at BIGINT NOT NULL,
    last_seen_at BIGINT NOT NULL,
    connected BOOLEAN NOT NULL DEFAULT FALSE,
    PRIMARY KEY (org, id),
    UNIQUE (org, name)
);

-- Which store an org's blocks are in, so that another one in its place is noticed before anything relies on it.
CREATE TABLE store (
    org TEXT COLLATE "C" PRIMARY KEY REFERENCES org(id),
    identity TEXT NOT NULL,
    noted_at BIGINT NOT NULL
);

-- Each writing transaction raises the number of its mark, so that what became of a commit whose answer was lost can be
-- read. At most as many rows in use as there are connections.
CREATE TABLE commit_mark (
    id TEXT COLLATE "C" PRIMARY KEY,
    number BIGINT NOT NULL,
    at TIMESTAMPTZ NOT NULL DEFAULT now()
) WITH (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
