//! API tokens.

use serde::{Deserialize, Serialize};

/// An API token of an org. Its secret is shown once, by the request that makes it, and stored nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// `tok_…`.
    pub id: String,
    /// For people.
    pub name: String,
    /// RFC 3339.
    pub created_at: String,
    /// RFC 3339, to the minute; none before the first use.
    pub last_used_at: Option<String>,
    /// RFC 3339; a revoked token opens nothing, for good.
    pub revoked_at: Option<String>,
    /// The secret, in the answer to the request that made the token and nowhere else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}
