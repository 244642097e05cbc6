//! Orgs: the tenants.

use std::time::Duration;

use async_trait::async_trait;
use covey_types::{HomeId, OrgId, Timestamp};
use serde_json::Value;

use crate::Result;

/// Name of the org that a fresh installation has.
pub const DEFAULT_ORG_NAME: &str = "default";

/// What a collection did last, and when it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastCollection {
    /// By the server's clock.
    pub at: Timestamp,
    /// JSON.
    pub report: Value,
}

/// What went with an org.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Deleted {
    /// There was such an org.
    pub was_there: bool,
    /// Its agents.
    pub agents: u64,
    /// Its sessions, with their journals.
    pub sessions: u64,
    /// Snapshots of its homes.
    pub snapshots: u64,
    /// Its homes.
    pub homes: Vec<HomeId>,
}

/// What is stored of orgs.
#[async_trait]
pub trait Orgs: Send + Sync {
    /// Returns the org named [`DEFAULT_ORG_NAME`], created when it does not exist.
    ///
    /// # Errors
    /// When the database refuses.
    async fn ensure_default_org(&self) -> Result<OrgId>;

    /// Creates an org.
    ///
    /// # Errors
    /// [`crate::DbError::Conflict`] when the name is taken.
    async fn create_org(&self, name: &str) -> Result<OrgId>;

    /// Finds an org by its name.
    ///
    /// # Errors
    /// When the database refuses.
    async fn org_by_name(&self, name: &str) -> Result<Option<OrgId>>;

    /// The least epoch that a publish may come from: everything that an earlier upload relied on may have been
    /// collected.
    ///
    /// # Errors
    /// [`crate::DbError::NotFound`].
    async fn collect_floor(&self, org: OrgId) -> Result<u64>;

    /// Refuses publishes from epochs below `floor` from now on; a floor never falls.
    ///
    /// # Errors
    /// When the database refuses.
    async fn raise_collect_floor(&self, org: OrgId, floor: u64) -> Result<()>;

    /// Notes that a collection has ended.
    ///
    /// # Errors
    /// When the database refuses.
    async fn note_collected(&self, org: OrgId, report: &str) -> Result<()>;

    /// The last collection that ended well; none before the first.
    ///
    /// # Errors
    /// When the database refuses.
    async fn last_collection(&self, org: OrgId) -> Result<Option<LastCollection>>;

    /// Orgs whose last collection, or whose beginning, lies back at least `interval`.
    ///
    /// # Errors
    /// When the database refuses.
    async fn orgs_to_collect(&self, now: Timestamp, interval: Duration) -> Result<Vec<OrgId>>;

    /// Every org, in no order.
    ///
    /// # Errors
    /// When the database refuses.
    async fn all_orgs(&self) -> Result<Vec<OrgId>>;

    /// Deletes every row of an org. Nobody may drive its sessions: for a process that has the database for itself. Its
    /// blocks are its caller's business.
    ///
    /// # Errors
    /// When the database refuses.
    async fn delete_org(&self, org: OrgId) -> Result<Deleted>;
}
