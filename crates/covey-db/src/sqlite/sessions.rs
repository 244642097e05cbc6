//! Sessions in SQLite.

use async_trait::async_trait;
use covey_harness::record::ModelUsage;
use covey_types::{Generation, OrgId, SessionId, Timestamp};
use rusqlite::Row;
use serde_json::Value;

use super::{
    DbError, Page, Read, Result, Sqlite, Tx, agents, environments, journal, parsed, parsed_json, to_json,
};
use crate::homes::Unsecured;
use crate::journal::UserEvent;
use crate::sessions::{
    HomeSpan, NewSession, Session, SessionEdit, SessionFilter, Sessions, document_of, refuse_if_open,
    refuse_new, status_of, waited_too_long,
};

#[async_trait]
impl Sessions for Sqlite {
    async fn create_session(&self, org: OrgId, new: &NewSession, initial: Vec<UserEvent>) -> Result<Session> {
        let new = new.clone();
        self.write("create session", move |tx| {
            let session = insert(tx, org, &new)?;
            if initial.is_empty() {
                return Ok(session);
            }
            journal::append_user_events(tx, org, session.id, &initial)?;
            get(tx, org, session.id)
        })
        .await
    }

    async fn session(&self, org: OrgId, id: SessionId) -> Result<Session> {
        self.read("read session", move |read| get(read, org, id)).await
    }

    async fn list_sessions(
        &self,
        org: OrgId,
        filter: &SessionFilter,
        page: &Page<SessionId>,
    ) -> Result<Vec<Session>> {
        let (filter, page) = (filter.clone(), *page);
        self.read("list sessions", move |read| list(read, org, &filter, &page)).await
    }

    async fn edit_session(&self, org: OrgId, id: SessionId, edit: SessionEdit) -> Result<Session> {
        self.write("edit session", move |tx| {
            let text = edit.0(&get(tx, org, id)?)?;
            update(tx, org, id, text.title.as_deref(), &text.metadata)
        })
        .await
    }

    async fn archive_session(&self, org: OrgId, id: SessionId) -> Result<Session> {
        self.write("archive session", move |tx| archive(tx, org, id)).await
    }

    async fn delete_session(&self, org: OrgId, id: SessionId) -> Result<()> {
        self.write("delete session", move |tx| delete(tx, org, id)).await
    }

    async fn claim_session(&self, org: OrgId, id: SessionId) -> Result<Session> {
        self.write("claim session", move |tx| claim(tx, org, id)).await
    }

    async fn home_span(&self, org: OrgId, id: SessionId) -> Result<HomeSpan> {
        self.read("span of session", move |read| home_span(read, org, id)).await
    }

    async fn sessions_needing_driver(&self, only: Option<SessionId>) -> Result<Vec<(OrgId, SessionId)>> {
        self.read("sessions needing a driver", move |read| needing_driver(read, only)).await
    }
}

const COLUMNS: &str =
    "id, agent, agent_version, agent_snapshot, environment, home, status, epoch, head, title,
     metadata, extra, input_tokens, output_tokens, cache_read_input_tokens, cache_creation_input_tokens,
     created_at, updated_at, archived_at,
     (SELECT unsecured_at FROM home WHERE home.org = session.org AND home.id = session.home
                                          AND home.lease_session = session.id),
     (SELECT unsecured_reason FROM home WHERE home.org = session.org AND home.id = session.home
                                              AND home.lease_session = session.id)";

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
pub(super) fn insert(tx: &Tx<'_>, org: OrgId, new: &NewSession) -> Result<Session> {
    let agent = agents::get(tx, org, new.agent)?;
    let environment = environments::get(tx, org, new.environment)?;
    refuse_new(&agent, &environment)?;
    let version = agents::version(tx, org, new.agent, new.agent_version.unwrap_or(agent.version))?;
    let snapshot = new.agent_snapshot.clone().unwrap_or_else(|| document_of(&agent, &version));
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
pub(super) fn get(read: &Read<'_>, org: OrgId, id: SessionId) -> Result<Session> {
    let sql = format!("SELECT {COLUMNS} FROM session WHERE org = ?1 AND id = ?2");
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    rows.next()?.map_or_else(|| Err(DbError::not_found("session", id)), session_of)
}

/// Lists sessions.
///
/// # Errors
/// When the database refuses.
pub(super) fn list(
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
pub(super) fn update(
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

/// Archives a session: it takes no more events; again is no error.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] while a turn is open.
pub(super) fn archive(tx: &Tx<'_>, org: OrgId, id: SessionId) -> Result<Session> {
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
pub(super) fn delete(tx: &Tx<'_>, org: OrgId, id: SessionId) -> Result<()> {
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

/// Whether `epoch` is the session's.
///
/// # Errors
/// When the database refuses.
pub(super) fn is_current(read: &Read<'_>, org: OrgId, id: SessionId, epoch: u64) -> Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM session WHERE org = ?1 AND id = ?2 AND epoch = ?3)";
    let mut statement = read.conn.prepare_cached(sql)?;
    Ok(statement.query_row((org.to_string(), id.to_string(), epoch as i64), |row| row.get(0))?)
}

/// Takes the session for a driver: whoever drove it before can append no more (I5). Returns it with the new
/// epoch.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn claim(tx: &Tx<'_>, org: OrgId, id: SessionId) -> Result<Session> {
    tx.conn
        .prepare_cached("UPDATE session SET epoch = epoch + 1 WHERE org = ?1 AND id = ?2")?
        .execute((org.to_string(), id.to_string()))?;
    get(tx, org, id)
}

/// Where the session found its home, and what it left there last; none for what it has not come to.
///
/// # Errors
/// [`DbError::NotFound`].
fn home_span(read: &Read<'_>, org: OrgId, id: SessionId) -> Result<HomeSpan> {
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

/// Sessions that need a driver, as [`Sessions::sessions_needing_driver`] says.
///
/// # Errors
/// When the database refuses.
pub(super) fn needing_driver(read: &Read<'_>, only: Option<SessionId>) -> Result<Vec<(OrgId, SessionId)>> {
    let mut statement = read.conn.prepare_cached(
        "SELECT org, id FROM session
         WHERE (?1 IS NULL OR id = ?1) AND status <> 'terminated'
           AND (status IN ('running', 'rescheduling')
                OR (waits_since < ?2 AND archived_at IS NULL)
                OR EXISTS (SELECT 1 FROM journal WHERE journal.session = session.id AND processed_at IS NULL
                                                   AND (waits_since IS NULL OR kind <> 'user.message')))
         ORDER BY id",
    )?;
    let mut rows = statement.query((only.map(|id| id.to_string()), waited_too_long()))?;
    let mut sessions = Vec::new();
    while let Some(row) = rows.next()? {
        sessions
            .push((parsed("org", &row.get::<_, String>(0)?)?, parsed("session", &row.get::<_, String>(1)?)?));
    }
    Ok(sessions)
}
