//! Sessions: one row per conversation. The row's status and head are changed by `journal` only, in the
//! transaction that appends; the epoch by [`claim`] only.

use covey_harness::record::ModelUsage;
use covey_harness::session::ANSWER_WAIT_MAX_MS;
use covey_types::{AgentId, EnvironmentId, Generation, HomeId, OrgId, SessionId, SessionStatus, Timestamp};
use rusqlite::Row;
use serde_json::Value;

use super::homes::Unsecured;
use super::{DbError, Page, Read, Result, Tx, agents, environments, parsed, parsed_json, to_json};

/// A session.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// Its agent.
    pub agent: AgentId,
    /// The agent's version at creation.
    pub agent_version: u64,
    /// The agent's document at creation: `id`, `version`, `name` and what its configuration holds.
    pub agent_snapshot: Value,
    /// Its environment.
    pub environment: EnvironmentId,
    /// The home it acts on.
    pub home: HomeId,
    /// What it is doing.
    pub status: SessionStatus,
    /// The driver's fencing token.
    pub epoch: u64,
    /// Last position of its journal; 0 when empty.
    pub head: u64,
    /// For people.
    pub title: Option<String>,
    /// The client's own pairs (JSON object).
    pub metadata: Value,
    /// Fields of the API that Covey keeps but does not read (JSON object).
    pub extra: Value,
    /// Tokens of all its model calls.
    pub usage: ModelUsage,
    /// When it was created.
    pub created_at: Timestamp,
    /// When its row or journal last changed.
    pub updated_at: Timestamp,
    /// When it was archived.
    pub archived_at: Option<Timestamp>,
    /// Set while it holds its home's lease, or held it last, and what was done there last could not be published.
    pub unsecured: Option<Unsecured>,
}

/// What a new session is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct NewSession {
    /// Its agent; must not be archived.
    pub agent: AgentId,
    /// The agent's version; none for the current one.
    pub agent_version: Option<u64>,
    /// The agent's document as the session keeps it; none to make it from the version's configuration
    /// (`config` with `id`, `version`, `name` and `type` laid over it).
    pub agent_snapshot: Option<Value>,
    /// Its environment; must not be archived.
    pub environment: EnvironmentId,
    /// For people.
    pub title: Option<String>,
    /// JSON object.
    pub metadata: Value,
    /// JSON object.
    pub extra: Value,
}

/// Which sessions a list shows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SessionFilter {
    /// Only this agent's.
    pub agent: Option<AgentId>,
    /// Only this version's.
    pub agent_version: Option<u64>,
    /// Only these states; empty: all.
    pub statuses: Vec<SessionStatus>,
    /// Only those created at or after.
    pub created_from: Option<Timestamp>,
    /// Only those created at or before.
    pub created_until: Option<Timestamp>,
    /// Archived ones as well.
    pub include_archived: bool,
}

const COLUMNS: &str =
    "id, agent, agent_version, agent_snapshot, environment, home, status, epoch, head, title,
     metadata, extra, input_tokens, output_tokens, cache_read_input_tokens, cache_creation_input_tokens,
     created_at, updated_at, archived_at,
     (SELECT unsecured_at FROM home WHERE home.org = session.org AND home.id = session.home
                                          AND home.lease_session = session.id),
     (SELECT unsecured_reason FROM home WHERE home.org = session.org AND home.id = session.home
                                              AND home.lease_session = session.id)";

fn status_of(text: &str) -> Result<SessionStatus> {
    SessionStatus::ALL
        .into_iter()
        .find(|s| s.as_str() == text)
        .ok_or_else(|| DbError::Corrupt { what: "session status", detail: format!("`{text}` is none") })
}

fn session_of(row: &Row<'_>) -> Result<Session> {
    Ok(Session {
        id: parsed("session", &row.get::<_, String>(0)?)?,
        agent: parsed("session's agent", &row.get::<_, String>(1)?)?,
        agent_version: row.get::<_, i64>(2)? as u64,
        agent_snapshot: parsed_json("agent snapshot", &row.get::<_, String>(3)?)?,
        environment: parsed("session's environment", &row.get::<_, String>(4)?)?,
        home: parsed("session's home", &row.get::<_, String>(5)?)?,
        status: status_of(&row.get::<_, String>(6)?)?,
        epoch: row.get::<_, i64>(7)? as u64,
        head: row.get::<_, i64>(8)? as u64,
        title: row.get(9)?,
        metadata: parsed_json("session metadata", &row.get::<_, String>(10)?)?,
        extra: parsed_json("session fields", &row.get::<_, String>(11)?)?,
        usage: ModelUsage {
            input_tokens: row.get::<_, i64>(12)? as u64,
            output_tokens: row.get::<_, i64>(13)? as u64,
            cache_read_input_tokens: row.get::<_, i64>(14)? as u64,
            cache_creation_input_tokens: row.get::<_, i64>(15)? as u64,
        },
        created_at: Timestamp::from_unix_ms(row.get(16)?),
        updated_at: Timestamp::from_unix_ms(row.get(17)?),
        archived_at: row.get::<_, Option<i64>>(18)?.map(Timestamp::from_unix_ms),
        unsecured: Unsecured::of(row.get(19)?, row.get(20)?),
    })
}

/// Creates an idle session with an empty journal.
///
/// # Errors
/// [`DbError::NotFound`] for agent, version or environment; [`DbError::Conflict`] when one is archived.
pub fn insert(tx: &Tx<'_>, org: OrgId, new: &NewSession) -> Result<Session> {
    let agent = agents::get(tx, org, new.agent)?;
    let environment = environments::get(tx, org, new.environment)?;
    if agent.archived_at.is_some() || environment.archived_at.is_some() {
        return Err(DbError::Conflict(format!(
            "agent {} or environment {} is archived; new sessions need live ones",
            agent.id, environment.id
        )));
    }
    let version = agents::version(tx, org, new.agent, new.agent_version.unwrap_or(agent.version))?;
    let snapshot = new.agent_snapshot.clone().unwrap_or_else(|| {
        let mut document = version.config.as_object().cloned().unwrap_or_default();
        document.insert("type".into(), "agent".into());
        document.insert("id".into(), agent.id.to_string().into());
        document.insert("version".into(), version.version.into());
        document.insert("name".into(), version.name.clone().into());
        Value::Object(document)
    });
    let id = SessionId::from_uuid(tx.fresh_uuid());
    tx.conn
        .prepare_cached(
            "INSERT INTO session (org, id, agent, agent_version, agent_snapshot, environment, home, title,
                                  metadata, extra, created_at, updated_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?11)",
        )?
        .execute((
            org.to_string(),
            id.to_string(),
            agent.id.to_string(),
            version.version as i64,
            to_json(&snapshot)?,
            environment.id.to_string(),
            agent.home.to_string(),
            &new.title,
            to_json(&new.metadata)?,
            to_json(&new.extra)?,
            tx.now().unix_ms(),
        ))?;
    get(tx, org, id)
}

/// Reads one session.
///
/// # Errors
/// [`DbError::NotFound`].
pub fn get(read: &Read<'_>, org: OrgId, id: SessionId) -> Result<Session> {
    let sql = format!("SELECT {COLUMNS} FROM session WHERE org = ?1 AND id = ?2");
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    rows.next()?.map_or_else(|| Err(DbError::not_found("session", id)), session_of)
}

/// Lists sessions.
///
/// # Errors
/// When the database refuses.
pub fn list(
    read: &Read<'_>,
    org: OrgId,
    filter: &SessionFilter,
    page: &Page<SessionId>,
) -> Result<Vec<Session>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM session
         WHERE org = ?1 AND (?2 IS NULL OR id {} ?2) AND (?3 OR archived_at IS NULL)
           AND (?4 IS NULL OR agent = ?4) AND (?5 IS NULL OR agent_version = ?5)
           AND (?6 = '' OR instr(?6, ',' || status || ',') > 0)
           AND (?7 IS NULL OR created_at >= ?7) AND (?8 IS NULL OR created_at <= ?8)
         ORDER BY id {} LIMIT ?9",
        page.order.beyond(),
        page.order.sql()
    );
    let statuses: String = match filter.statuses.as_slice() {
        [] => String::new(),
        some => some.iter().fold(",".to_owned(), |list, s| list + s.as_str() + ","),
    };
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((
        org.to_string(),
        page.after_sql(),
        filter.include_archived,
        filter.agent.map(|a| a.to_string()),
        filter.agent_version.map(|v| v as i64),
        statuses,
        filter.created_from.map(Timestamp::unix_ms),
        filter.created_until.map(Timestamp::unix_ms),
        page.limit_sql(),
    ))?;
    let mut sessions = Vec::new();
    while let Some(row) = rows.next()? {
        sessions.push(session_of(row)?);
    }
    Ok(sessions)
}

/// Changes title and metadata.
///
/// # Errors
/// [`DbError::NotFound`].
pub fn update(
    tx: &Tx<'_>,
    org: OrgId,
    id: SessionId,
    title: Option<&str>,
    metadata: &Value,
) -> Result<Session> {
    tx.conn
        .prepare_cached(
            "UPDATE session SET title = ?3, metadata = ?4, updated_at = ?5 WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string(), title, to_json(metadata)?, tx.now().unix_ms()))?;
    get(tx, org, id)
}

fn refuse_if_open(session: &Session, verb: &str) -> Result<()> {
    if matches!(session.status, SessionStatus::Running | SessionStatus::Rescheduling) {
        return Err(DbError::Conflict(format!(
            "session {} is {}; interrupt it and wait until it is idle, then {verb} it",
            session.id,
            session.status.as_str()
        )));
    }
    Ok(())
}

/// Archives a session: it takes no more events; again is no error.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] while a turn is open.
pub fn archive(tx: &Tx<'_>, org: OrgId, id: SessionId) -> Result<Session> {
    refuse_if_open(&get(tx, org, id)?, "archive")?;
    tx.conn
        .prepare_cached(
            "UPDATE session SET archived_at = coalesce(archived_at, ?3) WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string(), tx.now().unix_ms()))?;
    // Whoever follows the session learns that nothing more will come.
    tx.touch(id);
    get(tx, org, id)
}

/// Deletes a session with its journal. Its home and the home's snapshots stay.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] while a turn is open.
pub fn delete(tx: &Tx<'_>, org: OrgId, id: SessionId) -> Result<()> {
    refuse_if_open(&get(tx, org, id)?, "delete")?;
    let key = (org.to_string(), id.to_string());
    for sql in [
        "UPDATE home SET lease_session = NULL, lease_held = 0 WHERE org = ?1 AND lease_session = ?2",
        "DELETE FROM journal WHERE org = ?1 AND session = ?2",
        "DELETE FROM session WHERE org = ?1 AND id = ?2",
    ] {
        tx.conn.prepare_cached(sql)?.execute((&key.0, &key.1))?;
    }
    tx.touch(id);
    Ok(())
}

/// Takes the session for a driver: whoever drove it before can append no more (I5). Returns it with the new
/// epoch.
///
/// # Errors
/// [`DbError::NotFound`].
pub fn claim(tx: &Tx<'_>, org: OrgId, id: SessionId) -> Result<Session> {
    tx.conn
        .prepare_cached("UPDATE session SET epoch = epoch + 1 WHERE org = ?1 AND id = ?2")?
        .execute((org.to_string(), id.to_string()))?;
    get(tx, org, id)
}

/// Where the session found its home, and what it left there last; none for what it has not come to.
///
/// # Errors
/// [`DbError::NotFound`].
pub fn home_span(
    read: &Read<'_>,
    org: OrgId,
    id: SessionId,
) -> Result<(HomeId, Option<Generation>, Option<Generation>)> {
    let mut statement = read.conn.prepare_cached(
        "SELECT home, home_base, (SELECT max(generation) FROM snapshot
                                  WHERE snapshot.org = session.org AND snapshot.home = session.home
                                        AND snapshot.session = session.id)
         FROM session WHERE org = ?1 AND id = ?2",
    )?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    let Some(row) = rows.next()? else { return Err(DbError::not_found("session", id)) };
    let generation = |at| -> Result<_> { Ok(row.get::<_, Option<i64>>(at)?.map(|n| Generation(n as u64))) };
    Ok((parsed("session's home", &row.get::<_, String>(0)?)?, generation(1)?, generation(2)?))
}

/// Sessions that need a driver: a turn is open, or a user event waits, or a call has waited too long for a client. A
/// message to a session whose calls wait for a client waits with them. With `only`, just that one.
///
/// # Errors
/// When the database refuses.
pub fn needing_driver(read: &Read<'_>, only: Option<SessionId>) -> Result<Vec<(OrgId, SessionId)>> {
    let mut statement = read.conn.prepare_cached(
        "SELECT org, id FROM session
         WHERE (?1 IS NULL OR id = ?1) AND status <> 'terminated'
           AND (status IN ('running', 'rescheduling')
                OR (waits_since < ?2 AND archived_at IS NULL)
                OR id IN (SELECT session FROM journal WHERE processed_at IS NULL
                          AND (session.waits_since IS NULL OR kind <> 'user.message')))
         ORDER BY id",
    )?;
    let too_long = super::now().unix_ms() - ANSWER_WAIT_MAX_MS as i64;
    let rows = statement.query((only.map(|id| id.to_string()), too_long))?;
    ids_of(rows)
}

/// Sessions with a call that has waited too long for a client.
///
/// # Errors
/// When the database refuses.
pub fn waiting_too_long(read: &Read<'_>) -> Result<Vec<(OrgId, SessionId)>> {
    let mut statement = read.conn.prepare_cached(
        "SELECT org, id FROM session WHERE waits_since < ?1 AND status <> 'terminated' AND archived_at IS NULL
         ORDER BY id",
    )?;
    ids_of(statement.query([super::now().unix_ms() - ANSWER_WAIT_MAX_MS as i64])?)
}

fn ids_of(mut rows: rusqlite::Rows<'_>) -> Result<Vec<(OrgId, SessionId)>> {
    let mut sessions = Vec::new();
    while let Some(row) = rows.next()? {
        sessions
            .push((parsed("org", &row.get::<_, String>(0)?)?, parsed("session", &row.get::<_, String>(1)?)?));
    }
    Ok(sessions)
}
