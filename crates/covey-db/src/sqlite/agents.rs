//! Agents in SQLite.

use async_trait::async_trait;
use covey_types::{AgentId, HomeId, OrgId, SessionId, Timestamp};
use rusqlite::{OptionalExtension, Row};
use serde_json::Value;

use super::{DbError, Page, Read, Result, Sqlite, Tx, homes, parsed, parsed_json, to_json};
use crate::agents::{Agent, AgentVersion, Agents, Deleted, at_work, refuse_update};
use crate::page::limit_sql;

#[async_trait]
impl Agents for Sqlite {
    async fn create_agent(&self, org: OrgId, name: &str, config: &Value) -> Result<Agent> {
        let (name, config) = (name.to_owned(), config.clone());
        self.write("create agent", move |tx| insert(tx, org, &name, &config)).await
    }

    async fn agent(&self, org: OrgId, id: AgentId) -> Result<Agent> {
        self.read("read agent", move |read| get(read, org, id)).await
    }

    async fn list_agents(
        &self,
        org: OrgId,
        page: &Page<AgentId>,
        include_archived: bool,
    ) -> Result<Vec<Agent>> {
        let page = *page;
        self.read("list agents", move |read| list(read, org, &page, include_archived)).await
    }

    async fn update_agent(
        &self,
        org: OrgId,
        id: AgentId,
        expected_version: Option<u64>,
        name: &str,
        config: &Value,
    ) -> Result<Agent> {
        let (name, config) = (name.to_owned(), config.clone());
        self.write("update agent", move |tx| update(tx, org, id, expected_version, &name, &config)).await
    }

    async fn archive_agent(&self, org: OrgId, id: AgentId) -> Result<Agent> {
        self.write("archive agent", move |tx| archive(tx, org, id)).await
    }

    async fn delete_agent(&self, org: OrgId, id: AgentId) -> Result<Deleted> {
        self.write("delete agent", move |tx| delete(tx, org, id)).await
    }

    async fn agent_version(
        &self,
        org: OrgId,
        id: AgentId,
        wanted: Option<u64>,
    ) -> Result<(Agent, AgentVersion)> {
        self.read("read agent version", move |read| {
            let agent = get(read, org, id)?;
            let version = version(read, org, id, wanted.unwrap_or(agent.version))?;
            Ok((agent, version))
        })
        .await
    }

    async fn list_agent_versions(
        &self,
        org: OrgId,
        id: AgentId,
        before: Option<u64>,
        limit: usize,
    ) -> Result<(Agent, Vec<AgentVersion>)> {
        self.read("list agent versions", move |read| {
            Ok((get(read, org, id)?, versions(read, org, id, before, limit)?))
        })
        .await
    }
}

const COLUMNS: &str = "id, home, version, name, config, created_at, updated_at, archived_at";

fn agent_of(row: &Row<'_>) -> Result<Agent> {
    Ok(Agent {
        id: parsed("agent", &row.get::<_, String>(0)?)?,
        home: parsed("agent's home", &row.get::<_, String>(1)?)?,
        version: row.get::<_, i64>(2)? as u64,
        name: row.get(3)?,
        config: parsed_json("agent configuration", &row.get::<_, String>(4)?)?,
        created_at: Timestamp::from_unix_ms(row.get(5)?),
        updated_at: Timestamp::from_unix_ms(row.get(6)?),
        archived_at: row.get::<_, Option<i64>>(7)?.map(Timestamp::from_unix_ms),
    })
}

/// Creates an agent at version 1, together with its empty home.
///
/// # Errors
/// When the database refuses.
pub(super) fn insert(tx: &Tx<'_>, org: OrgId, name: &str, config: &Value) -> Result<Agent> {
    let now = tx.now();
    let agent = Agent {
        id: AgentId::from_uuid(tx.fresh_uuid()),
        home: HomeId::from_uuid(tx.fresh_uuid()),
        version: 1,
        name: name.to_owned(),
        config: config.clone(),
        created_at: now,
        updated_at: now,
        archived_at: None,
    };
    let (org, id, home) = (org.to_string(), agent.id.to_string(), agent.home.to_string());
    let config = to_json(config)?;
    tx.conn
        .prepare_cached("INSERT INTO home (org, id, agent, created_at) VALUES (?1, ?2, ?3, ?4)")?
        .execute((&org, &home, &id, now.unix_ms()))?;
    tx.conn
        .prepare_cached(
            "INSERT INTO agent (org, id, home, version, name, config, created_at, updated_at)
             VALUES (?1, ?2, ?3, 1, ?4, ?5, ?6, ?6)",
        )?
        .execute((&org, &id, &home, name, &config, now.unix_ms()))?;
    insert_version(tx, &org, &id, 1, name, &config)?;
    Ok(agent)
}

fn insert_version(tx: &Tx<'_>, org: &str, id: &str, version: u64, name: &str, config: &str) -> Result<()> {
    tx.conn
        .prepare_cached(
            "INSERT INTO agent_version (org, agent, version, name, config, created_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?
        .execute((org, id, version as i64, name, config, tx.now().unix_ms()))?;
    Ok(())
}

/// Reads one agent, archived or not.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn get(read: &Read<'_>, org: OrgId, id: AgentId) -> Result<Agent> {
    let sql = format!("SELECT {COLUMNS} FROM agent WHERE org = ?1 AND id = ?2");
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    rows.next()?.map_or_else(|| Err(DbError::not_found("agent", id)), agent_of)
}

/// Lists agents.
///
/// # Errors
/// When the database refuses.
pub(super) fn list(
    read: &Read<'_>,
    org: OrgId,
    page: &Page<AgentId>,
    include_archived: bool,
) -> Result<Vec<Agent>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM agent
         WHERE org = ?1 AND (?2 IS NULL OR id {} ?2) AND (?3 OR archived_at IS NULL)
         ORDER BY id {} LIMIT ?4",
        page.order.beyond(),
        page.order.sql()
    );
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows =
        statement.query((org.to_string(), page.after_sql(), include_archived, page.limit_sql()))?;
    let mut agents = Vec::new();
    while let Some(row) = rows.next()? {
        agents.push(agent_of(row)?);
    }
    Ok(agents)
}

/// Makes `config` the agent's next version. With `expected_version`, only when that is still the current
/// one. The same name and configuration again make no new version.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] when the version moved on or the agent is archived.
pub(super) fn update(
    tx: &Tx<'_>,
    org: OrgId,
    id: AgentId,
    expected_version: Option<u64>,
    name: &str,
    config: &Value,
) -> Result<Agent> {
    let current = get(tx, org, id)?;
    refuse_update(&current, expected_version)?;
    if current.name == name && &current.config == config {
        return Ok(current);
    }
    let (now, version, text) = (tx.now(), current.version + 1, to_json(config)?);
    tx.conn
        .prepare_cached(
            "UPDATE agent SET version = ?3, name = ?4, config = ?5, updated_at = ?6 WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string(), version as i64, name, &text, now.unix_ms()))?;
    insert_version(tx, &org.to_string(), &id.to_string(), version, name, &text)?;
    Ok(Agent { version, name: name.to_owned(), config: config.clone(), updated_at: now, ..current })
}

/// Archives an agent: no new sessions; again is no error.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn archive(tx: &Tx<'_>, org: OrgId, id: AgentId) -> Result<Agent> {
    tx.conn
        .prepare_cached(
            "UPDATE agent SET archived_at = coalesce(archived_at, ?3) WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string(), tx.now().unix_ms()))?;
    get(tx, org, id)
}

/// Deletes an agent with its sessions, its home and the home's snapshots. What only they needed in the store goes with
/// the next collection.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] while a session of it has an open turn or acts on the home.
pub(super) fn delete(tx: &Tx<'_>, org: OrgId, id: AgentId) -> Result<Deleted> {
    let agent = get(tx, org, id)?;
    let key = (org.to_string(), id.to_string());
    let open: Option<String> = tx
        .conn
        .prepare_cached(
            "SELECT id FROM session WHERE org = ?1 AND agent = ?2 AND status IN ('running', 'rescheduling')
             UNION ALL
             SELECT lease_session FROM home WHERE org = ?1 AND agent = ?2 AND lease_held = 1 LIMIT 1",
        )?
        .query_row((&key.0, &key.1), |row| row.get(0))
        .optional()?;
    if let Some(session) = open {
        return Err(at_work(id, &session));
    }
    for session in sessions_of(tx, &key)? {
        tx.touch(session);
    }
    let home = agent.home.to_string();
    let count = |sql: &str, id: &str| -> Result<u64> {
        Ok(tx.conn.prepare_cached(sql)?.execute((&key.0, id))? as u64)
    };
    count(
        "DELETE FROM journal WHERE org = ?1 AND session IN (SELECT id FROM session WHERE org = ?1 AND agent = ?2)",
        &key.1,
    )?;
    let sessions = count("DELETE FROM session WHERE org = ?1 AND agent = ?2", &key.1)?;
    count("DELETE FROM agent_version WHERE org = ?1 AND agent = ?2", &key.1)?;
    count("DELETE FROM agent WHERE org = ?1 AND id = ?2", &key.1)?;
    let snapshots = count("DELETE FROM snapshot WHERE org = ?1 AND home = ?2", &home)?;
    count("DELETE FROM home WHERE org = ?1 AND id = ?2", &home)?;
    homes::note_deleted(tx, org, agent.home)?;
    Ok(Deleted { sessions, snapshots, home: agent.home })
}

fn sessions_of(read: &Read<'_>, (org, agent): &(String, String)) -> Result<Vec<SessionId>> {
    let mut statement = read.conn.prepare_cached("SELECT id FROM session WHERE org = ?1 AND agent = ?2")?;
    let mut rows = statement.query((org, agent))?;
    let mut sessions = Vec::new();
    while let Some(row) = rows.next()? {
        sessions.push(parsed("session", &row.get::<_, String>(0)?)?);
    }
    Ok(sessions)
}

fn version_of(row: &Row<'_>) -> Result<AgentVersion> {
    Ok(AgentVersion {
        version: row.get::<_, i64>(0)? as u64,
        name: row.get(1)?,
        config: parsed_json("agent configuration", &row.get::<_, String>(2)?)?,
        created_at: Timestamp::from_unix_ms(row.get(3)?),
    })
}

/// Reads one version of an agent.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn version(read: &Read<'_>, org: OrgId, id: AgentId, version: u64) -> Result<AgentVersion> {
    let mut statement = read.conn.prepare_cached(
        "SELECT version, name, config, created_at FROM agent_version
         WHERE org = ?1 AND agent = ?2 AND version = ?3",
    )?;
    let mut rows = statement.query((org.to_string(), id.to_string(), version as i64))?;
    let missing = || Err(DbError::not_found("agent version", format!("{version} of {id}")));
    rows.next()?.map_or_else(missing, version_of)
}

/// Lists an agent's versions, newest first, those below `before` only.
///
/// # Errors
/// When the database refuses.
pub(super) fn versions(
    read: &Read<'_>,
    org: OrgId,
    id: AgentId,
    before: Option<u64>,
    limit: usize,
) -> Result<Vec<AgentVersion>> {
    let mut statement = read.conn.prepare_cached(
        "SELECT version, name, config, created_at FROM agent_version
         WHERE org = ?1 AND agent = ?2 AND (?3 IS NULL OR version < ?3) ORDER BY version DESC LIMIT ?4",
    )?;
    let limit = limit_sql(limit);
    let mut rows = statement.query((org.to_string(), id.to_string(), before.map(|v| v as i64), limit))?;
    let mut versions = Vec::new();
    while let Some(row) = rows.next()? {
        versions.push(version_of(row)?);
    }
    Ok(versions)
}

/// Finds the agent that owns a home.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn by_home(read: &Read<'_>, org: OrgId, home: HomeId) -> Result<AgentId> {
    let id: Option<String> = read
        .conn
        .prepare_cached("SELECT agent FROM home WHERE org = ?1 AND id = ?2")?
        .query_row((org.to_string(), home.to_string()), |row| row.get(0))
        .optional()?;
    parsed("agent", &id.ok_or_else(|| DbError::not_found("home", home))?)
}
