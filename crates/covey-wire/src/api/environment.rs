//! Environments as the API shows them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What a session's sandbox is made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// `env_…`.
    pub id: String,
    /// Always `environment`.
    #[serde(rename = "type")]
    pub kind: String,
    /// For people.
    pub name: String,
    /// For people.
    pub description: Option<String>,
    /// `{"type": "self_hosted"}`, or `{"type": "cloud", …}` with its defaults filled in.
    pub config: Value,
    /// The client's own pairs.
    pub metadata: BTreeMap<String, String>,
    /// RFC 3339.
    pub created_at: String,
    /// RFC 3339.
    pub updated_at: String,
    /// RFC 3339.
    pub archived_at: Option<String>,
}

/// Answer to a deletion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentDeleted {
    /// Which.
    pub id: String,
    /// Always `environment_deleted`.
    #[serde(rename = "type")]
    pub kind: String,
}
