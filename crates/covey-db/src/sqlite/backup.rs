//! The database's part of a backup: a copy of one moment, taken while the server works, and what a restored copy must
//! say so that nothing newer is overwritten.
//!
//! What does not belong here: blocks, and where backups lie.

use std::path::Path;

use covey_types::{Generation, HomeId, OrgId, RootHash};
use rusqlite::{Connection, OpenFlags};

use super::schema;
use crate::{DbError, Result, now, parsed};

/// How far a restore raises the lease tokens of homes: more than any server gives out between a backup and its
/// restore, so that whoever holds a token of that time is recognised as late.
const TOKENS_SKIPPED: i64 = 1 << 32;

/// A state that the database names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Owner of the home.
    pub org: OrgId,
    /// The home.
    pub home: HomeId,
    /// Its number within the home.
    pub generation: Generation,
    /// The state.
    pub root: RootHash,
}

fn open_error(path: &Path, source: rusqlite::Error) -> DbError {
    DbError::Open { path: path.to_owned(), source: source.into() }
}

fn open_existing(path: &Path, flags: OpenFlags) -> Result<Connection> {
    let conn = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX);
    let conn = conn.map_err(|error| open_error(path, error))?;
    conn.busy_timeout(schema::BUSY_WAIT)?;
    Ok(conn)
}

/// Copies the database at `from` to `to`, which must not exist: one consistent moment, also while a server works on
/// it. The copy is whole and checked, but not flushed.
///
/// # Errors
/// When either cannot be used, or a newer covey wrote it.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let conn = open_existing(from, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    schema::check_known(&conn, from)?;
    let target = to.to_str().ok_or_else(|| DbError::Invalid(format!("{} is no text", to.display())))?;
    conn.execute("VACUUM INTO ?1", [target])?;
    drop(conn);
    check(to)
}

/// Reads a copy whole and checks it.
///
/// # Errors
/// [`DbError::Corrupt`] when it is damaged.
pub fn check(path: &Path) -> Result<()> {
    let conn = open_existing(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    schema::check_known(&conn, path)?;
    let verdict: String = conn.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
    if verdict == "ok" {
        return Ok(());
    }
    Err(DbError::Corrupt { what: "database", detail: format!("{}: {verdict}", path.display()) })
}

/// Every state that a copy names.
///
/// # Errors
/// When it cannot be read.
pub fn states(path: &Path) -> Result<Vec<State>> {
    let conn = open_existing(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let mut statement =
        conn.prepare("SELECT org, home, generation, root FROM snapshot ORDER BY org, home, generation")?;
    let mut rows = statement.query([])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(State {
            org: parsed("org", &row.get::<_, String>(0)?)?,
            home: parsed("home", &row.get::<_, String>(1)?)?,
            generation: Generation(row.get::<_, i64>(2)? as u64),
            root: parsed("root", &row.get::<_, String>(3)?)?,
        });
    }
    Ok(found)
}

/// Every org of a copy.
///
/// # Errors
/// When it cannot be read.
pub fn orgs(path: &Path) -> Result<Vec<OrgId>> {
    let conn = open_existing(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let mut statement = conn.prepare("SELECT id FROM org ORDER BY id")?;
    let mut rows = statement.query([])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(parsed("org", &row.get::<_, String>(0)?)?);
    }
    Ok(found)
}

/// Makes a copy the database of a restored server. Each home with a state gets a new generation with the same state
/// and a token far above all that were ever given out: a runner that still has a newer working copy finds that its
/// mark does not carry the current generation and moves the copy aside, and what it offers to publish is refused.
/// `stores`: which store each org's blocks are in now.
///
/// # Errors
/// When it cannot be written; it must not be used then.
pub fn make_restored(path: &Path, stores: &[(OrgId, String)]) -> Result<()> {
    let mut conn = open_existing(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    schema::configure(&conn)?;
    schema::migrate(&mut conn, path)?;
    let tx = conn.transaction()?;
    let at = now().unix_ms();
    tx.execute(
        "INSERT INTO snapshot (org, home, generation, root, kind, session, step, files, bytes, published_at)
         SELECT s.org, s.home, s.generation + 1, s.root, s.kind, NULL, s.step, s.files, s.bytes, ?1
         FROM snapshot AS s JOIN home AS h ON h.org = s.org AND h.id = s.home AND h.generation = s.generation",
        [at],
    )?;
    tx.execute("UPDATE home SET generation = generation + 1 WHERE root IS NOT NULL", [])?;
    tx.execute(
        "UPDATE home SET lease_token = lease_token + ?1, lease_floor = lease_token + ?1, lease_session = NULL,
                lease_held = 0, lease_runner = NULL, floor_generation = generation",
        [TOKENS_SKIPPED],
    )?;
    tx.execute("UPDATE runner SET connected = 0", [])?;
    for (org, identity) in stores {
        tx.execute(
            "INSERT INTO store (org, identity, noted_at) VALUES (?1, ?2, ?3)
             ON CONFLICT (org) DO UPDATE SET identity = ?2, noted_at = ?3",
            (org.to_string(), identity, at),
        )?;
    }
    tx.commit()?;
    // One file, so that it can be moved to its place.
    conn.execute_batch("PRAGMA journal_mode=DELETE;")?;
    Ok(())
}
