//! The state of a server: one trait, [`Store`], on SQLite and on PostgreSQL. SQL stands only here (I1).
//!
//! Reason for a crate: **purity**, seen from the other side: nothing outside can name a database driver, so the compiler
//! proves I1. Each method of the trait is one named transaction of the domain. It may be run again when the database
//! asks for it, so it contains no effect but SQL; what it appended to a journal is announced after the commit, never
//! before. What does not belong here: deciding what to append.
//!
//! One file per noun here holds the words, the part of the trait and the decisions that both databases share;
//! `sqlite/` and `postgres/` hold the statements, file by file beside each other (`docs/adr/0020-one-store-two-databases.md`).

#![forbid(unsafe_code)]

pub mod agents;
mod database_url;
mod db;
pub mod environments;
mod error;
mod feed;
pub mod homes;
pub mod journal;
pub mod leases;
pub mod orgs;
mod page;
pub mod postgres;
pub mod retention;
pub mod rules;
pub mod runners;
pub mod sessions;
pub mod snapshots;
mod sqlite;
pub mod stores;
pub mod tokens;

use std::time::{SystemTime, UNIX_EPOCH};

use covey_types::Timestamp;

pub use database_url::DatabaseUrl;
pub use db::{Db, Migrated, Store, migrate};
pub use error::{DbError, Result};
pub use feed::{Feed, Follower};
pub use page::{Order, PAGE_ROWS_MAX, Page};
pub use sqlite::{DataLock, READERS_MAX, WRITE_BATCH_MAX, WRITE_QUEUE_MAX, backup};

/// The server's clock.
pub fn now() -> Timestamp {
    // Before 1970 there was no Covey; a clock that says so is shown as 1970 and decides nothing (I5).
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_ms(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// Turns a stored text into what it was.
fn parsed<T: std::str::FromStr>(what: &'static str, text: &str) -> Result<T>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|e: T::Err| DbError::Corrupt { what, detail: e.to_string() })
}

fn parsed_json<T: serde::de::DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| DbError::Corrupt { what, detail: e.to_string() })
}

fn to_json<T: serde::Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| DbError::Invalid(format!("not representable as JSON: {e}")))
}
