-- Since when a session rests in the middle of a turn, because calls of its tools wait for a client; null when it does not.
ALTER TABLE session ADD COLUMN waits_since INTEGER;
CREATE INDEX session_waits ON session(waits_since) WHERE waits_since IS NOT NULL;
