//! Sessions: one row per conversation. The row's status and head are changed by [`crate::journal`] only, in the
//! transaction that appends; the epoch by [`Sessions::claim_session`] only.

use std::fmt;

use async_trait::async_trait;
use covey_harness::record::ModelUsage;
use covey_harness::session::ANSWER_WAIT_MAX_MS;
use covey_types::{AgentId, EnvironmentId, Generation, HomeId, OrgId, SessionId, SessionStatus, Timestamp};
use serde_json::Value;

use crate::agents::{Agent, AgentVersion};
use crate::environments::Environment;
use crate::homes::Unsecured;
use crate::journal::UserEvent;
use crate::{DbError, Page, Result};

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

pub(crate) fn status_of(text: &str) -> Result<SessionStatus> {
    SessionStatus::ALL
        .into_iter()
        .find(|s| s.as_str() == text)
        .ok_or_else(|| DbError::Corrupt { what: "session status", detail: format!("`{text}` is none") })
}

pub(crate) fn refuse_if_open(session: &Session, verb: &str) -> Result<()> {
    if matches!(session.status, SessionStatus::Running | SessionStatus::Rescheduling) {
        return Err(DbError::Conflict(format!(
            "session {} is {}; interrupt it and wait until it is idle, then {verb} it",
            session.id,
            session.status.as_str()
        )));
    }
    Ok(())
}

/// Title and metadata as they shall be.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionText {
    /// For people.
    pub title: Option<String>,
    /// JSON object.
    pub metadata: Value,
}

/// What title and metadata shall be, given the session as it is. It may be called again: it must depend on nothing else.
pub struct SessionEdit(pub Box<EditSession>);

/// See [`SessionEdit`].
pub type EditSession = dyn Fn(&Session) -> Result<SessionText> + Send + Sync;

impl fmt::Debug for SessionEdit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionEdit")
    }
}

/// Where a session found its home, and what it left there last; none for what it has not come to.
pub type HomeSpan = (HomeId, Option<Generation>, Option<Generation>);

/// What is stored of sessions, their journals apart.
#[async_trait]
pub trait Sessions: Send + Sync {
    /// Creates an idle session whose journal holds the events of `initial`.
    ///
    /// # Errors
    /// [`DbError::NotFound`] for agent, version or environment; [`DbError::Conflict`] when one is archived; as
    /// [`crate::journal::Journal::append_user_events`].
    async fn create_session(&self, org: OrgId, new: &NewSession, initial: Vec<UserEvent>) -> Result<Session>;

    /// Reads one session.
    ///
    /// # Errors
    /// [`DbError::NotFound`].
    async fn session(&self, org: OrgId, id: SessionId) -> Result<Session>;

    /// Lists sessions.
    ///
    /// # Errors
    /// When the database refuses.
    async fn list_sessions(
        &self,
        org: OrgId,
        filter: &SessionFilter,
        page: &Page<SessionId>,
    ) -> Result<Vec<Session>>;

    /// Changes title and metadata.
    ///
    /// # Errors
    /// [`DbError::NotFound`], or what `edit` says.
    async fn edit_session(&self, org: OrgId, id: SessionId, edit: SessionEdit) -> Result<Session>;

    /// Archives a session: it takes no more events; again is no error.
    ///
    /// # Errors
    /// [`DbError::NotFound`]; [`DbError::Conflict`] while a turn is open.
    async fn archive_session(&self, org: OrgId, id: SessionId) -> Result<Session>;

    /// Deletes a session with its journal. Its home and the home's snapshots stay.
    ///
    /// # Errors
    /// [`DbError::NotFound`]; [`DbError::Conflict`] while a turn is open.
    async fn delete_session(&self, org: OrgId, id: SessionId) -> Result<()>;

    /// Takes the session for a driver of this server: whoever drove it before can append no more (I5). Returns it with the
    /// new epoch. It is given back by [`crate::leases::Leases::release_session`].
    ///
    /// # Errors
    /// [`DbError::NotFound`]; [`DbError::Leased`] while a server that lives drives it; [`DbError::LeaseEnded`].
    async fn claim_session(&self, org: OrgId, id: SessionId) -> Result<Session>;

    /// Where the session found its home, and what it left there last.
    ///
    /// # Errors
    /// [`DbError::NotFound`].
    async fn home_span(&self, org: OrgId, id: SessionId) -> Result<HomeSpan>;

    /// Sessions that need a driver: a turn is open, or a user event waits, or a call has waited too long for a client. A
    /// message to a session whose calls wait for a client waits with them. With `only`, just that one. Those that another
    /// server drives are left out.
    ///
    /// # Errors
    /// When the database refuses.
    async fn sessions_needing_driver(&self, only: Option<SessionId>) -> Result<Vec<(OrgId, SessionId)>>;
}

/// Refuses a new session of what is archived.
pub(crate) fn refuse_new(agent: &Agent, environment: &Environment) -> Result<()> {
    if agent.archived_at.is_some() || environment.archived_at.is_some() {
        return Err(DbError::Conflict(format!(
            "agent {} or environment {} is archived; new sessions need live ones",
            agent.id, environment.id
        )));
    }
    Ok(())
}

/// The agent's document as a new session keeps it.
pub(crate) fn document_of(agent: &Agent, version: &AgentVersion) -> Value {
    let mut document = version.config.as_object().cloned().unwrap_or_default();
    document.insert("type".into(), "agent".into());
    document.insert("id".into(), agent.id.to_string().into());
    document.insert("version".into(), version.version.into());
    document.insert("name".into(), version.name.clone().into());
    Value::Object(document)
}

/// Calls that have waited for a client since before this have waited too long.
pub(crate) fn waited_too_long() -> i64 {
    crate::now().unix_ms() - i64::try_from(ANSWER_WAIT_MAX_MS).unwrap_or(i64::MAX)
}
