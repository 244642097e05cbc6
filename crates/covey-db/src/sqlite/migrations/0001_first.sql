-- Ids are stored in their printed form, times as milliseconds since 1970 UTC, documents as JSON text.
-- The org is part of every key: no query can cross a tenant's border by forgetting a condition.

CREATE TABLE org (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE token (
    org TEXT NOT NULL REFERENCES org(id),
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    hash BLOB NOT NULL UNIQUE,          -- BLAKE3-256 of the secret; the secret itself is stored nowhere
    created_at INTEGER NOT NULL,
    last_used_at INTEGER,
    revoked_at INTEGER,
    PRIMARY KEY (org, id)
) STRICT;

CREATE TABLE home (
    org TEXT NOT NULL REFERENCES org(id),
    id TEXT NOT NULL,
    agent TEXT NOT NULL,
    generation INTEGER NOT NULL DEFAULT 0,
    root TEXT,                          -- null exactly when generation is 0
    lease_token INTEGER NOT NULL DEFAULT 0,
    lease_session TEXT,                 -- the last holder; its journal gets the publishes
    lease_held INTEGER NOT NULL DEFAULT 0 CHECK (lease_held IN (0, 1)),
    lease_runner TEXT,                  -- the runner that the last token was given to
    lease_floor INTEGER NOT NULL DEFAULT 0,       -- the first token since the home came to that runner
    floor_generation INTEGER NOT NULL DEFAULT 0,  -- the generation it came there with
    created_at INTEGER NOT NULL,
    PRIMARY KEY (org, id),
    CHECK ((root IS NULL) = (generation = 0))
) STRICT;

CREATE TABLE snapshot (
    org TEXT NOT NULL,
    home TEXT NOT NULL,
    generation INTEGER NOT NULL,
    root TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('quiesced', 'frozen')),
    session TEXT,
    step TEXT,
    files INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    published_at INTEGER NOT NULL,
    PRIMARY KEY (org, home, generation),
    FOREIGN KEY (org, home) REFERENCES home(org, id)
) STRICT;

CREATE TABLE agent (
    org TEXT NOT NULL REFERENCES org(id),
    id TEXT NOT NULL,
    home TEXT NOT NULL,
    version INTEGER NOT NULL,
    name TEXT NOT NULL,
    config TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    archived_at INTEGER,
    PRIMARY KEY (org, id),
    FOREIGN KEY (org, home) REFERENCES home(org, id)
) STRICT;

CREATE TABLE agent_version (
    org TEXT NOT NULL,
    agent TEXT NOT NULL,
    version INTEGER NOT NULL,
    name TEXT NOT NULL,
    config TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (org, agent, version),
    FOREIGN KEY (org, agent) REFERENCES agent(org, id)
) STRICT;

CREATE TABLE environment (
    org TEXT NOT NULL REFERENCES org(id),
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    config TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    archived_at INTEGER,
    PRIMARY KEY (org, id)
) STRICT;

CREATE TABLE session (
    org TEXT NOT NULL REFERENCES org(id),
    id TEXT NOT NULL,
    agent TEXT NOT NULL,
    agent_version INTEGER NOT NULL,
    agent_snapshot TEXT NOT NULL,
    environment TEXT NOT NULL,
    home TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT 'idle' CHECK (status IN ('idle', 'running', 'rescheduling', 'terminated')),
    epoch INTEGER NOT NULL DEFAULT 0,   -- fencing token of the driver; never goes down
    head INTEGER NOT NULL DEFAULT 0,    -- last position of the journal
    title TEXT,
    metadata TEXT NOT NULL DEFAULT '{}',
    extra TEXT NOT NULL DEFAULT '{}',   -- fields of the API that Covey keeps but does not read
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cache_read_input_tokens INTEGER NOT NULL DEFAULT 0,
    cache_creation_input_tokens INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    archived_at INTEGER,
    PRIMARY KEY (org, id),
    FOREIGN KEY (org, agent) REFERENCES agent(org, id),
    FOREIGN KEY (org, environment) REFERENCES environment(org, id),
    FOREIGN KEY (org, home) REFERENCES home(org, id)
) STRICT;
CREATE UNIQUE INDEX session_id ON session(id);
CREATE INDEX session_open ON session(id) WHERE status IN ('running', 'rescheduling');
CREATE INDEX session_agent ON session(org, agent, id);

CREATE TABLE journal (
    org TEXT NOT NULL,
    session TEXT NOT NULL,
    seq INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    kind TEXT NOT NULL,
    event TEXT,                         -- public id; null for private records
    step TEXT,
    dedup TEXT,                         -- given by the client
    body TEXT NOT NULL,
    at INTEGER NOT NULL,
    processed_at INTEGER,
    PRIMARY KEY (org, session, seq),
    FOREIGN KEY (org, session) REFERENCES session(org, id)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX journal_event ON journal(org, session, event) WHERE event IS NOT NULL;
CREATE UNIQUE INDEX journal_dedup ON journal(org, session, dedup) WHERE dedup IS NOT NULL;
CREATE INDEX journal_waiting ON journal(session, seq) WHERE processed_at IS NULL;
-- One intention and one result per tool step, whoever appends: the database itself refuses a second one (I4).
CREATE UNIQUE INDEX journal_call ON journal(session, step) WHERE kind = 'agent.tool_use';
CREATE UNIQUE INDEX journal_result ON journal(session, step) WHERE kind = 'agent.tool_result';

CREATE TABLE runner (
    org TEXT NOT NULL REFERENCES org(id),
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    first_seen_at INTEGER NOT NULL,
    last_seen_at INTEGER NOT NULL,
    connected INTEGER NOT NULL DEFAULT 0 CHECK (connected IN (0, 1)),
    PRIMARY KEY (org, id),
    UNIQUE (org, name)
) STRICT;
