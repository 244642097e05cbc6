//! PostgreSQL: the state of any number of servers.
//!
//! Each method of [`crate::Store`] is one transaction under READ COMMITTED that locks the rows it decides on, always in
//! the order org, agent, environment, home, session, snapshot, so that servers rarely wait in a ring; where they do, PostgreSQL ends
//! one of them and it is run again (`transaction.rs`). Reads of several statements see one snapshot. What was appended is
//! announced after the commit, to other servers by a connection of its own (`notices.rs`). What does not belong here:
//! what both databases decide alike, which stands one level up.

mod agents;
mod connection;
mod environments;
mod homes;
mod journal;
mod leases;
mod location;
mod membership;
mod notices;
mod orgs;
mod retention;
mod rules;
mod runners;
mod schema;
mod sessions;
mod snapshots;
mod stores;
mod tls;
mod tokens;
mod transaction;

use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use covey_types::OrgId;
use deadpool_postgres::{Hook, HookError, Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};

use crate::{DbError, Feed, Result, Store};
use connection::connect_error;
use membership::Membership;
use notices::Notices;
use transaction::{Mark, transact};

pub use location::{
    LEASE_SECONDS, LEASE_TERM_DEFAULT, Location, POOL_CONNECTIONS_DEFAULT, POOL_CONNECTIONS_MAX,
};
pub use membership::{LOOK_EVERY, RENEW_EVERY, TERM_MARGIN};
pub use schema::{SERVER_VERSION_LEAST, migrate};
pub use transaction::{OUTCOME_WAIT_MAX, TRANSACTION_TRIES_MAX};

/// How long a transaction waits for one of the pool's connections. Longer, and requests pile up behind a slow database.
pub const CONNECTION_WAIT_MAX: Duration = Duration::from_secs(15);
/// How long connecting may take, the TLS handshake and the password included.
pub const CONNECT_WAIT_MAX: Duration = Duration::from_secs(10);
/// How long one statement may take; PostgreSQL ends it then.
pub const STATEMENT_WAIT_MAX: Duration = Duration::from_secs(60);
/// After how long PostgreSQL ends a transaction whose server has gone silent. Shorter than [`STATEMENT_WAIT_MAX`], so
/// that who waits for its locks outlives it.
pub const IDLE_TRANSACTION_MAX: Duration = Duration::from_secs(20);

/// A database of a PostgreSQL server.
pub struct Postgres {
    location: Location,
    pool: Pool,
    feed: Feed,
    /// Marks of transactions that are not under way.
    marks: Mutex<Vec<Mark>>,
    notices: Notices,
    membership: Membership,
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres").field("location", &self.location.to_string()).finish_non_exhaustive()
    }
}

impl Postgres {
    /// Connects, looks whether the server is new enough, and migrates the database.
    ///
    /// # Errors
    /// [`DbError::Refused`] for a wrong password, a database that is not there, a server that is too old, or a
    /// certificate that cannot be trusted; [`DbError::Unreachable`] when nobody answers; [`DbError::Newer`].
    pub async fn connect(location: &Location) -> Result<Self> {
        migrate(location).await?;
        let pool = pool(location)?;
        let feed = Feed::default();
        let notices = Notices::start(location.clone(), feed.clone());
        let membership = Membership::start(location.clone());
        Ok(Self { location: location.clone(), pool, feed, marks: Mutex::default(), notices, membership })
    }
}

/// What each connection is told first. `client_connection_check_interval` ends statements of servers that are gone.
fn session_settings() -> String {
    format!(
        "SET statement_timeout = {}; SET idle_in_transaction_session_timeout = {}; \
         SET client_connection_check_interval = 5000; SET default_transaction_isolation = 'read committed'; \
         SET synchronous_commit = on",
        STATEMENT_WAIT_MAX.as_millis(),
        IDLE_TRANSACTION_MAX.as_millis()
    )
}

fn pool(location: &Location) -> Result<Pool> {
    // A connection that was lost while it rested is found out by its first statement, and the transaction is run again.
    let config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_config(location.config().clone(), location.tls()?, config);
    let settings = Hook::async_fn(|client, _| {
        Box::pin(async move { client.batch_execute(&session_settings()).await.map_err(HookError::Backend) })
    });
    Pool::builder(manager)
        .max_size(location.pool_connections())
        .runtime(Runtime::Tokio1)
        .wait_timeout(Some(CONNECTION_WAIT_MAX))
        .create_timeout(Some(CONNECT_WAIT_MAX))
        .post_create(settings)
        .build()
        .map_err(|error| DbError::Invalid(error.to_string()))
}

#[async_trait]
impl Store for Postgres {
    async fn take_over(&self) -> Result<OrgId> {
        if !self.membership.hold_alone().await? {
            return Err(DbError::Served { database: self.location.to_string() });
        }
        transact!(self, "take over", |tx| {
            // The advisory lock says that no other server lives, so neither do its drivers.
            homes::release_all(tx).await?;
            membership::forget_all(tx).await?;
            runners::all_disconnected(tx).await?;
            transaction::forget_old_marks(tx).await?;
            orgs::ensure_default(tx).await
        })
    }

    fn feed(&self) -> &Feed {
        &self.feed
    }
}
