//! The trait that both databases fulfil, and the handle that everybody else holds.

use std::fmt::Debug;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use covey_types::OrgId;

use crate::agents::Agents;
use crate::environments::Environments;
use crate::homes::Homes;
use crate::journal::Journal;
use crate::orgs::Orgs;
use crate::retention::Retention;
use crate::rules::Rules;
use crate::runners::Runners;
use crate::sessions::Sessions;
use crate::snapshots::Snapshots;
use crate::sqlite::Sqlite;
use crate::stores::Stores;
use crate::tokens::Tokens;
use crate::{Feed, Result};

/// Everything that a server keeps. Each method is one transaction: whole or not at all, durable when it returns, and
/// after everything that returned before it began, whichever server that was on.
#[async_trait]
pub trait Store:
    Agents
    + Environments
    + Homes
    + Journal
    + Orgs
    + Retention
    + Rules
    + Runners
    + Sessions
    + Snapshots
    + Stores
    + Tokens
    + Debug
{
    /// Makes this process the database's one server: what the last one held is given back, no runner is connected.
    /// Returns the default org.
    ///
    /// # Errors
    /// [`crate::DbError::Served`] when another server is at work.
    async fn take_over(&self) -> Result<OrgId>;

    /// Announcements of appended records.
    fn feed(&self) -> &Feed;
}

/// A handle on the database; clones share it.
#[derive(Debug, Clone)]
pub struct Db {
    store: Arc<dyn Store>,
}

impl Db {
    /// Opens or creates the SQLite database at `path`, migrates it, and locks it for this process (`<path>.lock`).
    ///
    /// # Errors
    /// [`crate::DbError::Locked`] when another process has it, [`crate::DbError::Newer`] when a newer covey wrote it,
    /// [`crate::DbError::Open`] for everything else. Blocking: seconds at most.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { store: Arc::new(Sqlite::open(path)?) })
    }
}

impl Deref for Db {
    type Target = dyn Store;

    fn deref(&self) -> &Self::Target {
        self.store.as_ref()
    }
}
