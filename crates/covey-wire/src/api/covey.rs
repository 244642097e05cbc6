//! What Covey shows that the Managed Agents API has no word for.

use serde::{Deserialize, Serialize};

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
}

/// Answer to `POST /v1/covey/homes/{id}/import`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeImported {
    /// `home_…`.
    pub id: String,
    /// The number under which the imported state is published.
    pub generation: u64,
    /// Its root hash.
    pub root: String,
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
