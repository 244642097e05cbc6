//! Stores: which one each org's blocks are in.

use async_trait::async_trait;
use covey_types::OrgId;

use crate::Result;

/// What the database knows of an org's store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrgStore {
    /// The org.
    pub org: OrgId,
    /// The name of its store; none before the first use.
    pub identity: Option<String>,
    /// Snapshots that the database names.
    pub snapshots: u64,
}

/// What is known of stores.
#[async_trait]
pub trait Stores: Send + Sync {
    /// Every org with its store.
    ///
    /// # Errors
    /// When the database refuses.
    async fn org_stores(&self) -> Result<Vec<OrgStore>>;

    /// The name of the org's store; none before the first use.
    ///
    /// # Errors
    /// When the database refuses.
    async fn store_identity(&self, org: OrgId) -> Result<Option<String>>;

    /// Notes which store the org's blocks are in from now on.
    ///
    /// # Errors
    /// When the database refuses.
    async fn note_store(&self, org: OrgId, identity: &str) -> Result<()>;
}
