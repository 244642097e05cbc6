//! Agents in PostgreSQL.

use async_trait::async_trait;
use covey_types::{AgentId, HomeId, OrgId};
use serde_json::Value;
use tokio_postgres::Row;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Connection, Parameter, document, get as cell, number, printed, time, time_if_any};
use super::transaction::{look, transact, view};
use crate::agents::{Agent, AgentVersion, Agents, Deleted, at_work, refuse_update};
use crate::page::limit_sql;
use crate::{DbError, Page, Result, now, to_json};

#[async_trait]
impl Agents for Postgres {
    async fn create_agent(&self, org: OrgId, name: &str, config: &Value) -> Result<Agent> {
        transact!(self, "create agent", |tx| insert(tx, org, name, config).await)
    }

    async fn agent(&self, org: OrgId, id: AgentId) -> Result<Agent> {
        look!(self, "read agent", |read| get(read, org, id).await)
    }

    async fn list_agents(
        &self,
        org: OrgId,
        page: &Page<AgentId>,
        include_archived: bool,
    ) -> Result<Vec<Agent>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM agent
             WHERE org = $1 AND ($2::text IS NULL OR id {} $2) AND ($3::bool OR archived_at IS NULL)
             ORDER BY id {} LIMIT $4",
            page.order.beyond(),
            page.order.sql()
        );
        look!(self, "list agents", |read| {
            let parameters: [Parameter<'_>; 4] =
                [&org.to_string(), &page.after_sql(), &include_archived, &page.limit_sql()];
            read.rows(&sql, &parameters).await?.iter().map(agent_of).collect()
        })
    }

    async fn update_agent(
        &self,
        org: OrgId,
        id: AgentId,
        expected_version: Option<u64>,
        name: &str,
        config: &Value,
    ) -> Result<Agent> {
        transact!(self, "update agent", |tx| update(tx, org, id, expected_version, name, config).await)
    }

    async fn archive_agent(&self, org: OrgId, id: AgentId) -> Result<Agent> {
        let sql = format!(
            "UPDATE agent SET archived_at = coalesce(archived_at, $3) WHERE org = $1 AND id = $2 RETURNING {COLUMNS}"
        );
        transact!(self, "archive agent", |tx| {
            let row = tx.row(&sql, &[&org.to_string(), &id.to_string(), &now().unix_ms()]).await?;
            found(id, row)
        })
    }

    async fn delete_agent(&self, org: OrgId, id: AgentId) -> Result<Deleted> {
        transact!(self, "delete agent", |tx| delete(tx, org, id).await)
    }

    async fn agent_version(
        &self,
        org: OrgId,
        id: AgentId,
        wanted: Option<u64>,
    ) -> Result<(Agent, AgentVersion)> {
        view!(self, "read agent version", |read| {
            let agent = get(read, org, id).await?;
            let version = version(read, org, id, wanted.unwrap_or(agent.version)).await?;
            Ok((agent, version))
        })
    }

    async fn list_agent_versions(
        &self,
        org: OrgId,
        id: AgentId,
        before: Option<u64>,
        limit: usize,
    ) -> Result<(Agent, Vec<AgentVersion>)> {
        let sql = "SELECT version, name, config, created_at FROM agent_version
                   WHERE org = $1 AND agent = $2 AND ($3::bigint IS NULL OR version < $3)
                   ORDER BY version DESC LIMIT $4";
        view!(self, "list agent versions", |read| {
            let agent = get(read, org, id).await?;
            let before = before.map(|version| version as i64);
            let parameters: [Parameter<'_>; 4] =
                [&org.to_string(), &id.to_string(), &before, &limit_sql(limit)];
            let versions = read.rows(sql, &parameters).await?;
            Ok((agent, versions.iter().map(version_of).collect::<Result<_>>()?))
        })
    }
}

const COLUMNS: &str = "id, home, version, name, config, created_at, updated_at, archived_at";

fn agent_of(row: &Row) -> Result<Agent> {
    Ok(Agent {
        id: printed("agent", row, 0)?,
        home: printed("agent's home", row, 1)?,
        version: number(row, 2)?,
        name: cell(row, 3)?,
        config: document("agent configuration", row, 4)?,
        created_at: time(row, 5)?,
        updated_at: time(row, 6)?,
        archived_at: time_if_any(row, 7)?,
    })
}

fn found(id: AgentId, row: Option<Row>) -> Result<Agent> {
    row.as_ref().map_or_else(|| Err(DbError::not_found("agent", id)), agent_of)
}

fn version_of(row: &Row) -> Result<AgentVersion> {
    Ok(AgentVersion {
        version: number(row, 0)?,
        name: cell(row, 1)?,
        config: document("agent configuration", row, 2)?,
        created_at: time(row, 3)?,
    })
}

pub(super) async fn insert(tx: &Connection, org: OrgId, name: &str, config: &Value) -> Result<Agent> {
    let now = now();
    let agent = Agent {
        id: AgentId::from_uuid(Uuid::now_v7()),
        home: HomeId::from_uuid(Uuid::now_v7()),
        version: 1,
        name: name.to_owned(),
        config: config.clone(),
        created_at: now,
        updated_at: now,
        archived_at: None,
    };
    let (org, id, home) = (org.to_string(), agent.id.to_string(), agent.home.to_string());
    let (config, at) = (to_json(config)?, now.unix_ms());
    let sql = "INSERT INTO home (org, id, agent, created_at) VALUES ($1, $2, $3, $4)";
    tx.execute(sql, &[&org, &home, &id, &at]).await?;
    let sql = "INSERT INTO agent (org, id, home, version, name, config, created_at, updated_at)
               VALUES ($1, $2, $3, 1, $4, $5, $6, $6)";
    tx.execute(sql, &[&org, &id, &home, &name, &config, &at]).await?;
    insert_version(tx, &org, &agent, &config).await?;
    Ok(agent)
}

async fn insert_version(tx: &Connection, org: &str, agent: &Agent, config: &str) -> Result<()> {
    let sql = "INSERT INTO agent_version (org, agent, version, name, config, created_at)
               VALUES ($1, $2, $3, $4, $5, $6)";
    let version = agent.version as i64;
    let at = agent.updated_at.unix_ms();
    tx.execute(sql, &[&org, &agent.id.to_string(), &version, &agent.name, &config, &at]).await?;
    Ok(())
}

pub(super) async fn get(read: &Connection, org: OrgId, id: AgentId) -> Result<Agent> {
    let sql = format!("SELECT {COLUMNS} FROM agent WHERE org = $1 AND id = $2");
    found(id, read.row(&sql, &[&org.to_string(), &id.to_string()]).await?)
}

/// Reads an agent that cannot be changed, archived or deleted before the transaction ends.
pub(super) async fn get_held(tx: &Connection, org: OrgId, id: AgentId) -> Result<Agent> {
    let sql = format!("SELECT {COLUMNS} FROM agent WHERE org = $1 AND id = $2 FOR SHARE");
    found(id, tx.row(&sql, &[&org.to_string(), &id.to_string()]).await?)
}

pub(super) async fn version(
    read: &Connection,
    org: OrgId,
    id: AgentId,
    version: u64,
) -> Result<AgentVersion> {
    let sql = "SELECT version, name, config, created_at FROM agent_version
               WHERE org = $1 AND agent = $2 AND version = $3";
    let row = read.row(sql, &[&org.to_string(), &id.to_string(), &(version as i64)]).await?;
    let missing = || Err(DbError::not_found("agent version", format!("{version} of {id}")));
    row.as_ref().map_or_else(missing, version_of)
}

async fn update(
    tx: &Connection,
    org: OrgId,
    id: AgentId,
    expected_version: Option<u64>,
    name: &str,
    config: &Value,
) -> Result<Agent> {
    let sql = format!("SELECT {COLUMNS} FROM agent WHERE org = $1 AND id = $2 FOR NO KEY UPDATE");
    let current = found(id, tx.row(&sql, &[&org.to_string(), &id.to_string()]).await?)?;
    refuse_update(&current, expected_version)?;
    if current.name == name && &current.config == config {
        return Ok(current);
    }
    let (now, text) = (now(), to_json(config)?);
    let version = current.version + 1;
    let sql =
        "UPDATE agent SET version = $3, name = $4, config = $5, updated_at = $6 WHERE org = $1 AND id = $2";
    let parameters: [Parameter<'_>; 6] =
        [&org.to_string(), &id.to_string(), &(version as i64), &name, &text, &now.unix_ms()];
    tx.execute(sql, &parameters).await?;
    let agent = Agent { version, name: name.to_owned(), config: config.clone(), updated_at: now, ..current };
    insert_version(tx, &org.to_string(), &agent, &text).await?;
    Ok(agent)
}

async fn delete(tx: &Connection, org: OrgId, id: AgentId) -> Result<Deleted> {
    let (org, agent) = (org.to_string(), id.to_string());
    // Waits for who creates a session of it, and lets nobody do so any more.
    let sql = "SELECT home FROM agent WHERE org = $1 AND id = $2 FOR UPDATE";
    let Some(row) = tx.row(sql, &[&org, &agent]).await? else { return Err(DbError::not_found("agent", id)) };
    let home: String = cell(&row, 0)?;
    // Its lease says that a session is at work, and nobody takes it from here on.
    let sql =
        "SELECT CASE WHEN lease_held THEN lease_session END FROM home WHERE org = $1 AND id = $2 FOR UPDATE";
    let row = tx.row(sql, &[&org, &home]).await?;
    let holder: Option<String> = row.map_or(Ok(None), |row| cell(&row, 0))?;
    let sql = "SELECT id, status IN ('running', 'rescheduling') FROM session
               WHERE org = $1 AND agent = $2 ORDER BY id FOR UPDATE";
    let mut open = holder;
    let mut sessions = Vec::new();
    for row in tx.rows(sql, &[&org, &agent]).await? {
        let session: String = cell(&row, 0)?;
        if cell(&row, 1)? {
            open = Some(session.clone());
        }
        tx.touch(crate::parsed("session", &session)?);
        sessions.push(session);
    }
    if let Some(session) = open {
        return Err(at_work(id, &session));
    }
    tx.execute("DELETE FROM journal WHERE org = $1 AND session = ANY($2::text[])", &[&org, &sessions])
        .await?;
    let sessions = tx.execute("DELETE FROM session WHERE org = $1 AND agent = $2", &[&org, &agent]).await?;
    tx.execute("DELETE FROM agent_version WHERE org = $1 AND agent = $2", &[&org, &agent]).await?;
    tx.execute("DELETE FROM agent WHERE org = $1 AND id = $2", &[&org, &agent]).await?;
    let snapshots = tx.execute("DELETE FROM snapshot WHERE org = $1 AND home = $2", &[&org, &home]).await?;
    tx.execute("DELETE FROM home WHERE org = $1 AND id = $2", &[&org, &home]).await?;
    super::homes::note_deleted(tx, &org, &home).await?;
    Ok(Deleted { sessions, snapshots, home: crate::parsed("home", &home)? })
}

/// The agent that owns a home.
pub(super) async fn by_home(read: &Connection, org: OrgId, home: HomeId) -> Result<AgentId> {
    let sql = "SELECT agent FROM home WHERE org = $1 AND id = $2";
    let row = read.row(sql, &[&org.to_string(), &home.to_string()]).await?;
    row.as_ref().map_or_else(|| Err(DbError::not_found("home", home)), |row| printed("agent", row, 0))
}
