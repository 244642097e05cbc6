//! Sessions as the API shows them. Events are JSON objects: their shape belongs to the journal.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Model;

/// One conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Session {
    /// `sesn_…`.
    pub id: String,
    /// Always `session`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `idle`, `running`, `rescheduling` or `terminated`.
    pub status: String,
    /// The agent as it was when the session began.
    pub agent: SessionAgent,
    /// `env_…`.
    pub environment_id: String,
    /// For people.
    pub title: Option<String>,
    /// The client's own pairs.
    pub metadata: BTreeMap<String, String>,
    /// What the session has used.
    pub usage: SessionUsage,
    /// How long it has been.
    pub stats: SessionStats,
    /// Always null: not supported.
    pub budget: Option<Value>,
    /// Always empty: not supported.
    pub outcome_evaluations: Vec<Value>,
    /// Always empty: not supported.
    pub resources: Vec<Value>,
    /// Always empty: not supported.
    pub vault_ids: Vec<String>,
    /// RFC 3339.
    pub created_at: String,
    /// RFC 3339.
    pub updated_at: String,
    /// RFC 3339.
    pub archived_at: Option<String>,
    /// Covey's own: the home that the session works in, `home_…`.
    #[serde(default)]
    pub covey_home_id: Option<String>,
    /// Covey's own: set while what this session did last in its home could not be published.
    #[serde(default)]
    pub covey_unsecured: Option<super::history::Unsecured>,
}

/// The agent as a session keeps it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionAgent {
    /// `agent_…`.
    pub id: String,
    /// Always `agent`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The version that was current, or asked for.
    pub version: u64,
    /// For people.
    pub name: String,
    /// For people.
    pub description: Option<String>,
    /// Which model answers.
    pub model: Model,
    /// The system prompt.
    pub system: Option<String>,
    /// Toolsets with every default filled in.
    pub tools: Vec<Value>,
    /// Always empty: not supported.
    pub mcp_servers: Vec<Value>,
    /// Always empty: not supported.
    pub skills: Vec<Value>,
    /// Always null: not supported.
    pub multiagent: Option<Value>,
    /// See [`super::Agent::execution_identity`].
    pub execution_identity: Value,
}

/// Tokens of all model calls so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionUsage {
    /// Read, not cached.
    pub input_tokens: u64,
    /// Written.
    pub output_tokens: u64,
    /// Read from the provider's cache.
    pub cache_read_input_tokens: u64,
    /// Stored in the provider's cache.
    pub cache_creation: CacheCreation,
}

/// Tokens stored in the provider's cache, by how long they stay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheCreation {
    /// Five minutes; Covey asks for no other time.
    pub ephemeral_5m_input_tokens: u64,
    /// One hour.
    pub ephemeral_1h_input_tokens: u64,
}

/// How long a session has been.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionStats {
    /// From its creation to its last change, in seconds.
    pub duration_seconds: f64,
}

/// Answer to a deletion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionDeleted {
    /// Which.
    pub id: String,
    /// Always `session_deleted`.
    #[serde(rename = "type")]
    pub kind: String,
}

/// Answer to sending events: they are in the journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventsSent {
    /// The events with their ids, in the order they were sent.
    pub data: Vec<Value>,
}
