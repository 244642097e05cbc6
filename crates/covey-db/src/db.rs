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
use crate::leases::Leases;
use crate::orgs::Orgs;
use crate::postgres::Postgres;
use crate::retention::Retention;
use crate::rules::Rules;
use crate::runners::Runners;
use crate::sessions::Sessions;
use crate::snapshots::Snapshots;
use crate::sqlite::Sqlite;
use crate::stores::Stores;
use crate::tokens::Tokens;
use crate::{DatabaseUrl, Feed, Result};

/// Everything that a server keeps. Each method is one transaction: whole or not at all, durable when it returns, and
/// after everything that returned before it began, whichever server that was on.
#[async_trait]
pub trait Store:
    Agents
    + Environments
    + Homes
    + Journal
    + Leases
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
    /// Returns the default org. For several servers there is [`Leases::join`].
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

    /// Opens the database that `url` names and migrates it. Needs a tokio runtime.
    ///
    /// # Errors
    /// As [`Self::open`] and [`Postgres::connect`].
    pub async fn connect(url: &DatabaseUrl) -> Result<Self> {
        match url {
            DatabaseUrl::Sqlite(path) => {
                let path = path.clone();
                let opened = tokio::task::spawn_blocking(move || Self::open(&path)).await;
                opened.map_err(|_| crate::DbError::Panicked("open"))?
            }
            DatabaseUrl::Postgres(location) => Ok(Postgres::connect(location).await?.into()),
        }
    }
}

/// What a migration found and left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migrated {
    /// The schema before; 0 for an empty database.
    pub from: i64,
    /// The schema now.
    pub to: i64,
}

/// Brings a database to the schema that this Covey knows, if it is older.
///
/// # Errors
/// As [`Db::connect`].
pub async fn migrate(url: &DatabaseUrl) -> Result<Migrated> {
    match url {
        DatabaseUrl::Sqlite(path) => {
            let path = path.clone();
            let migrated = tokio::task::spawn_blocking(move || Sqlite::migrate(&path)).await;
            migrated.map_err(|_| crate::DbError::Panicked("migrate"))?
        }
        DatabaseUrl::Postgres(location) => crate::postgres::migrate(location).await,
    }
}

impl From<Postgres> for Db {
    fn from(store: Postgres) -> Self {
        Self { store: Arc::new(store) }
    }
}

impl Deref for Db {
    type Target = dyn Store;

    fn deref(&self) -> &Self::Target {
        self.store.as_ref()
    }
}
