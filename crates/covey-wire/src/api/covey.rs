//! What Covey shows that the Managed Agents API has no word for.

use serde::{Deserialize, Serialize};

use super::history::Unsecured;

/// The directory tree of one agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// `home_…`.
    pub id: String,
    /// The org whose part of the store holds its blocks, `org_…`.
    pub org_id: String,
    /// `agent_…`.
    pub agent_id: String,
    /// The current snapshot's number; 0 before the first.
    pub generation: u64,
    /// The current snapshot's root hash.
    pub root: Option<String>,
    /// The session that acts on it now, `sesn_…`.
    pub session_id: Option<String>,
    /// Set while what the agent did last could not be published.
    #[serde(default)]
    pub unsecured: Option<Unsecured>,
    /// RFC 3339.
    pub created_at: String,
}

/// A published state of a home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Number within the home, from 1.
    pub generation: u64,
    /// Root hash.
    pub root: String,
    /// `quiesced` or `frozen`.
    pub kind: String,
    /// Event id of the last finished tool call whose files it contains.
    pub step: Option<String>,
    /// Files in it.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// RFC 3339.
    pub published_at: String,
    /// How it came about: `secured`, `imported`, `restored` or `forked`.
    #[serde(default)]
    pub origin: String,
    /// For `restored` and `forked`: the generation whose state it is, or a part of it.
    #[serde(default)]
    pub from_generation: Option<u64>,
    /// For `forked`: the home of that generation, `home_…`.
    #[serde(default)]
    pub from_home_id: Option<String>,
    /// The session that it was secured in, `sesn_…`.
    #[serde(default)]
    pub session_id: Option<String>,
    /// What keeps it: `current`, `session` (one began from it or left it), `newest` or `age` (the home's rules); none:
    /// the next collection lets it go.
    #[serde(default)]
    pub kept_by: Option<String>,
}

/// Answer to `POST /v1/covey/homes/{id}/import` and `/restore`, and to `PUT …/archive`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeImported {
    /// `home_…`.
    pub id: String,
    /// The number under which the state is published.
    pub generation: u64,
    /// Its root hash.
    pub root: String,
    /// Regular files in it, each name counted.
    #[serde(default)]
    pub files: u64,
    /// Their bytes.
    #[serde(default)]
    pub bytes: u64,
}

/// Answer to `POST /v1/covey/homes/{id}/fork`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeForked {
    /// The home that now has the state, `home_…`.
    pub id: String,
    /// Its agent, `agent_…`.
    pub agent_id: String,
    /// The number of the state in that home.
    pub generation: u64,
    /// Its root hash.
    pub root: String,
}

/// Answer to `DELETE /v1/agents/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentDeleted {
    /// `agent_…`.
    pub id: String,
    /// Always `agent_deleted`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Sessions that went with it.
    pub covey_sessions: u64,
    /// Snapshots whose exclusive blocks the next collection frees.
    pub covey_snapshots: u64,
}

/// A process on a host that owns sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runner {
    /// `rnr_…`.
    pub id: String,
    /// Normally the host's name.
    pub name: String,
    /// Whether its link stands now.
    pub connected: bool,
    /// RFC 3339.
    pub first_seen_at: String,
    /// RFC 3339.
    pub last_seen_at: String,
}

/// Answer to `GET /healthz`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// `ok`.
    pub status: String,
    /// The server's version.
    pub version: String,
}
