//! Agents and their versions. The configuration is the API's JSON document, kept as it is; what the loop
//! reads of it is `covey_harness::config`'s business.

use async_trait::async_trait;
use covey_types::{AgentId, HomeId, OrgId, Timestamp};
use serde_json::Value;

use crate::{DbError, Page, Result};

/// An agent at its current version.
#[derive(Debug, Clone, PartialEq)]
pub struct Agent {
    /// Its id.
    pub id: AgentId,
    /// Its one home.
    pub home: HomeId,
    /// Number of the current version, from 1.
    pub version: u64,
    /// For people.
    pub name: String,
    /// `model`, `system`, `tools`, `metadata`, … as the API takes and gives them.
    pub config: Value,
    /// When the agent was created.
    pub created_at: Timestamp,
    /// When this version was created.
    pub updated_at: Timestamp,
    /// When it was archived.
    pub archived_at: Option<Timestamp>,
}

/// One version of an agent's configuration; never changed.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentVersion {
    /// From 1.
    pub version: u64,
    /// For people.
    pub name: String,
    /// As in [`Agent`].
    pub config: Value,
    /// When it was created.
    pub created_at: Timestamp,
}

/// What went with an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deleted {
    /// Its sessions, with their journals.
    pub sessions: u64,
    /// The snapshots of its home.
    pub snapshots: u64,
    /// Its home.
    pub home: HomeId,
}

/// What is stored of agents.
#[async_trait]
pub trait Agents: Send + Sync {
    /// Creates an agent at version 1, together with its empty home.
    ///
    /// # Errors
    /// When the database refuses.
    async fn create_agent(&self, org: OrgId, name: &str, config: &Value) -> Result<Agent>;

    /// Reads one agent, archived or not.
    ///
    /// # Errors
    /// [`DbError::NotFound`].
    async fn agent(&self, org: OrgId, id: AgentId) -> Result<Agent>;

    /// Lists agents.
    ///
    /// # Errors
    /// When the database refuses.
    async fn list_agents(
        &self,
        org: OrgId,
        page: &Page<AgentId>,
        include_archived: bool,
    ) -> Result<Vec<Agent>>;

    /// Makes `config` the agent's next version. With `expected_version`, only when that is still the current
    /// one. The same name and configuration again make no new version.
    ///
    /// # Errors
    /// [`DbError::NotFound`]; [`DbError::Conflict`] when the version moved on or the agent is archived.
    async fn update_agent(
        &self,
        org: OrgId,
        id: AgentId,
        expected_version: Option<u64>,
        name: &str,
        config: &Value,
    ) -> Result<Agent>;

    /// Archives an agent: no new sessions; again is no error.
    ///
    /// # Errors
    /// [`DbError::NotFound`].
    async fn archive_agent(&self, org: OrgId, id: AgentId) -> Result<Agent>;

    /// Deletes an agent with its sessions, its home and the home's snapshots. What only they needed in the store goes
    /// with the next collection.
    ///
    /// # Errors
    /// [`DbError::NotFound`]; [`DbError::Conflict`] while a session of it has an open turn or acts on the home.
    async fn delete_agent(&self, org: OrgId, id: AgentId) -> Result<Deleted>;

    /// Reads an agent with one of its versions; none stands for the current one.
    ///
    /// # Errors
    /// [`DbError::NotFound`].
    async fn agent_version(
        &self,
        org: OrgId,
        id: AgentId,
        version: Option<u64>,
    ) -> Result<(Agent, AgentVersion)>;

    /// Lists an agent's versions, newest first, those below `before` only.
    ///
    /// # Errors
    /// [`DbError::NotFound`] for the agent.
    async fn list_agent_versions(
        &self,
        org: OrgId,
        id: AgentId,
        before: Option<u64>,
        limit: usize,
    ) -> Result<(Agent, Vec<AgentVersion>)>;
}

/// Refuses a change of `current` that was made on another version.
pub(crate) fn refuse_update(current: &Agent, expected_version: Option<u64>) -> Result<()> {
    if let Some(expected) = expected_version
        && expected != current.version
    {
        return Err(DbError::Conflict(format!(
            "agent {} is at version {}, not {expected}; read it again, then update",
            current.id, current.version
        )));
    }
    if current.archived_at.is_some() {
        return Err(DbError::Conflict(format!("agent {} is archived", current.id)));
    }
    Ok(())
}

/// Why an agent with a session at work is not deleted.
pub(crate) fn at_work(agent: AgentId, session: &str) -> DbError {
    DbError::Conflict(format!(
        "session {session} of agent {agent} is at work; interrupt it and wait until it is idle, then delete the agent"
    ))
}
