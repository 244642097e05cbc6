//! Agents as the API shows them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// An agent, in its newest version or in the one that was asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Agent {
    /// `agent_…`.
    pub id: String,
    /// Always `agent`.
    #[serde(rename = "type")]
    pub kind: String,
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
    /// The client's own pairs.
    pub metadata: BTreeMap<String, String>,
    /// Always `{"type": "service_account"}`: a sandbox of Covey has no identity outside.
    pub execution_identity: Value,
    /// From 1; grows with each update.
    pub version: u64,
    /// RFC 3339.
    pub created_at: String,
    /// RFC 3339.
    pub updated_at: String,
    /// RFC 3339.
    pub archived_at: Option<String>,
    /// Covey's own: the agent's home, `home_…`.
    #[serde(default)]
    pub covey_home_id: Option<String>,
}

/// Which model answers, and how.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// The provider's name of the model.
    pub id: String,
    /// `effort`, `speed`, … as the client sent them.
    #[serde(flatten)]
    pub options: Map<String, Value>,
}
