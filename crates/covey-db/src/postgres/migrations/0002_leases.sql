-- Several servers share the database: `instance` has a row for each that lives, `session.owner` says whose driver has the
-- epoch, and is null while nobody drives. The version before writes neither and holds its lock alone.

-- Where a runner's links stand. A server's row takes its links with it.
CREATE TABLE runner_link (
    org TEXT COLLATE "C" NOT NULL,
    runner TEXT COLLATE "C" NOT NULL,
    instance BIGINT NOT NULL REFERENCES instance(id) ON DELETE CASCADE,
    PRIMARY KEY (runner, instance),
    FOREIGN KEY (org, runner) REFERENCES runner(org, id) ON DELETE CASCADE
);
CREATE INDEX runner_link_instance ON runner_link(instance);

-- What the transaction of a mark answered, so that an append in one statement can be answered after its answer was lost.
ALTER TABLE commit_mark ADD COLUMN head BIGINT;

-- Sessions that wait for a client are few among those that rest.
CREATE INDEX session_waits ON session(waits_since) WHERE waits_since IS NOT NULL;
