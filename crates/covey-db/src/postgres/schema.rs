//! The schema and its numbered migrations.
//!
//! A migration that has been released is never edited. It *expands*: the version of Covey before it must be able to work
//! on what it leaves, because a rolling upgrade runs both at once. What nobody reads any more is taken away by a later
//! version (*contract*). Each runs in one transaction under a lock, so servers that start together migrate once.

use tokio::task::JoinSet;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::connection::connect_error;
use super::{Location, session_settings};
use crate::{DbError, Migrated, Result};

/// Migration `n` leads from schema `n` to `n + 1`.
const MIGRATIONS: &[&str] =
    &[include_str!("migrations/0001_first.sql"), include_str!("migrations/0002_leases.sql")];
/// Oldest server, as it writes its version: 14 is the first with lz4 and with checks of connections that are gone.
pub const SERVER_VERSION_LEAST: i32 = 140_000;
/// Names of our advisory locks: this class, and a number in it.
pub(super) const LOCK_CLASS: i32 = 0x0c0e;
const LOCK_MIGRATION: i32 = 0;
pub(super) const LOCK_SERVER: i32 = 1;

/// A connection of its own, for what a pool cannot do. Its task ends with the client.
pub(super) async fn connect_alone(location: &Location) -> Result<(Client, JoinSet<()>)> {
    let connecting = location.config().connect(location.tls()?);
    let connected = tokio::time::timeout(super::CONNECT_WAIT_MAX, connecting).await;
    let (client, connection) = connected
        .map_err(|_| DbError::Unreachable {
            database: location.to_string(),
            what: format!("it does not answer within {} s", super::CONNECT_WAIT_MAX.as_secs()),
            remedy: "check host and port in the database URL, and whether the server runs".to_owned(),
        })?
        .map_err(|error| connect_error(location, &error))?;
    let mut task = JoinSet::new();
    task.spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to the database ended");
        }
    });
    Ok((client, task))
}

/// Brings the database to the schema that this Covey knows, if it is older.
///
/// # Errors
/// [`DbError::Newer`] when a newer Covey was here; [`DbError::Refused`] for a server older than
/// [`SERVER_VERSION_LEAST`]; as [`super::Postgres::connect`].
pub async fn migrate(location: &Location) -> Result<Migrated> {
    let (mut client, _task) = connect_alone(location).await?;
    check_version(&client, location).await?;
    client.batch_execute(&session_settings()).await?;
    let known = MIGRATIONS.len() as i64;
    let mut from = None;
    loop {
        let tx = client.transaction().await?;
        tx.execute("SELECT pg_advisory_xact_lock($1, $2)", &[&LOCK_CLASS, &LOCK_MIGRATION]).await?;
        let made = tx
            .batch_execute(
                "CREATE TABLE IF NOT EXISTS schema_version
                     (is_only BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (is_only), number BIGINT NOT NULL);
                 INSERT INTO schema_version (number) VALUES (0) ON CONFLICT DO NOTHING",
            )
            .await;
        made.map_err(|error| not_ours(location, error))?;
        let found: i64 = tx.query_one("SELECT number FROM schema_version", &[]).await?.try_get(0)?;
        let first = *from.get_or_insert(found);
        if found > known {
            return Err(DbError::Newer { database: location.to_string(), found, known });
        }
        let Some(sql) = MIGRATIONS.get(found as usize) else {
            tx.commit().await?;
            return Ok(Migrated { from: first, to: found });
        };
        tx.batch_execute(sql).await.map_err(|error| not_ours(location, error))?;
        tx.execute("UPDATE schema_version SET number = $1", &[&(found + 1)]).await?;
        tx.commit().await?;
        tracing::info!(database = %location, schema = found + 1, "the database was migrated");
    }
}

/// Tables cannot be made, or somebody else's have our names.
fn not_ours(location: &Location, error: tokio_postgres::Error) -> DbError {
    let remedy = match error.code() {
        Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            "let the user create tables: `GRANT CREATE, USAGE ON SCHEMA public TO …`, or make it the database's owner"
        }
        Some(&SqlState::DUPLICATE_TABLE | &SqlState::DUPLICATE_OBJECT | &SqlState::UNDEFINED_COLUMN) => {
            "something else uses this database; give Covey one of its own"
        }
        _ => return DbError::from(error),
    };
    let what = error.as_db_error().map_or_else(|| error.to_string(), |said| said.message().to_owned());
    DbError::Refused { database: location.to_string(), what, remedy: remedy.to_owned() }
}

async fn check_version(client: &Client, location: &Location) -> Result<()> {
    let row = client.query_one("SELECT current_setting('server_version_num')::int4", &[]).await?;
    let found: i32 = row.try_get(0)?;
    if found >= SERVER_VERSION_LEAST {
        return Ok(());
    }
    Err(DbError::Refused {
        database: location.to_string(),
        what: format!("the server is PostgreSQL {}.{}", found / 10_000, found % 10_000),
        remedy: format!("use PostgreSQL {} or newer", SERVER_VERSION_LEAST / 10_000),
    })
}
