//! Runners that have dialled in.

use async_trait::async_trait;
use covey_types::{OrgId, RunnerId, Timestamp};

use crate::Result;

/// A runner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runner {
    /// Its id.
    pub id: RunnerId,
    /// Shown to people; the host name by default.
    pub name: String,
    /// When it first dialled in.
    pub first_seen_at: Timestamp,
    /// When it last dialled in or went.
    pub last_seen_at: Timestamp,
    /// Whether its link stands.
    pub connected: bool,
}

/// What is stored of runners.
#[async_trait]
pub trait Runners: Send + Sync {
    /// Notes that a runner dialled in; one name is one runner.
    ///
    /// # Errors
    /// When the database refuses.
    async fn runner_connected(&self, org: OrgId, name: &str) -> Result<RunnerId>;

    /// Notes that a runner's link ended.
    ///
    /// # Errors
    /// When the database refuses.
    async fn runner_disconnected(&self, org: OrgId, id: RunnerId) -> Result<()>;

    /// Lists the runners of an org.
    ///
    /// # Errors
    /// When the database refuses.
    async fn list_runners(&self, org: OrgId) -> Result<Vec<Runner>>;
}
