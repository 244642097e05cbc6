//! The schema and its numbered migrations. A migration that has been released is never edited; the next one
//! expands, a later one contracts. What does not belong here: rows.

use std::path::Path;
use std::time::Duration;

use rusqlite::Connection;

use crate::{DbError, Result};

/// How long a statement waits for SQLite's own locks; only a checkpoint holds one.
pub(super) const BUSY_WAIT: Duration = Duration::from_secs(10);

/// Migration `n` leads from schema `n` to `n + 1`.
const MIGRATIONS: &[&str] = &[
    include_str!("migrations/0001_first.sql"),
    include_str!("migrations/0002_history.sql"),
    include_str!("migrations/0003_store.sql"),
    include_str!("migrations/0004_deleted_homes.sql"),
    include_str!("migrations/0005_waiting_calls.sql"),
    include_str!("migrations/0006_home_lease.sql"),
];

pub(super) fn configure(conn: &Connection) -> rusqlite::Result<()> {
    conn.busy_timeout(BUSY_WAIT)?;
    // WAL: readers do not wait for the writer. FULL: what was answered survives a power cut; with group commit
    // it costs next to nothing (measured: reference figures in docs/data-model.md).
    conn.execute_batch(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON; PRAGMA temp_store=MEMORY;",
    )
}

/// Refuses a database that a newer covey wrote; gives its schema.
pub(super) fn check_known(conn: &Connection, path: &Path) -> Result<i64> {
    let known = MIGRATIONS.len() as i64;
    let found: i64 = conn.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if found > known {
        return Err(DbError::Newer { database: path.display().to_string(), found, known });
    }
    Ok(found)
}

pub(super) fn migrate(conn: &mut Connection, path: &Path) -> Result<()> {
    let found = check_known(conn, path)?;
    for (number, sql) in (found + 1..).zip(&MIGRATIONS[found as usize..]) {
        let tx = conn.transaction()?;
        tx.execute_batch(sql)?;
        tx.pragma_update(None, "user_version", number)?;
        tx.commit()?;
    }
    Ok(())
}
