//! Homes and their leases. What does not belong here: snapshots, and moving the pointer ([`super::snapshots`]).
//!
//! A token fences **runners**: one host has one working copy and one actor for it, so what it offers under
//! any token since the home came to it descends from what it offered before. Only when the home goes to
//! another runner, or is imported, do earlier tokens lose their force. That lets a snapshot of the last turn
//! arrive while the next one has its own token already.

use covey_harness::record::Body;
use covey_types::{
    AgentId, FencingToken, Generation, HomeId, OrgId, RootHash, RunnerId, SessionId, Timestamp,
};
use rusqlite::{OptionalExtension, Row};

use super::{DbError, Page, Read, Result, Tx, journal, parsed};

/// A home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    /// Its id.
    pub id: HomeId,
    /// Its agent.
    pub agent: AgentId,
    /// Number of the current snapshot; 0 when there is none yet.
    pub generation: Generation,
    /// The current snapshot's state.
    pub root: Option<RootHash>,
    /// The last token that was given out.
    pub lease_token: FencingToken,
    /// The session that holds the lease, or held it last.
    pub lease_session: Option<SessionId>,
    /// Whether it is held now.
    pub lease_held: bool,
    /// The runner that the last token was given to.
    pub lease_runner: Option<RunnerId>,
    /// The first token since the home came to that runner.
    pub lease_floor: FencingToken,
    /// The generation it came there with.
    pub floor_generation: Generation,
    /// When it was created.
    pub created_at: Timestamp,
    /// Set while what was done in it last could not be published.
    pub unsecured: Option<Unsecured>,
}

/// Since when and why a home is not secured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsecured {
    /// Since when, by the server's clock.
    pub since: Timestamp,
    /// For people.
    pub reason: String,
}

impl Unsecured {
    pub(super) fn of(since: Option<i64>, reason: Option<String>) -> Option<Self> {
        Some(Self { since: Timestamp::from_unix_ms(since?), reason: reason? })
    }
}

/// What became of an attempt to take a home's lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// It is held now, under this token.
    Granted(FencingToken),
    /// Another session acts on the home.
    HeldBy(SessionId),
}

const COLUMNS: &str = "id, agent, generation, root, lease_token, lease_session, lease_held, lease_runner,
     lease_floor, floor_generation, created_at, unsecured_at, unsecured_reason";

fn home_of(row: &Row<'_>) -> Result<Home> {
    Ok(Home {
        id: parsed("home", &row.get::<_, String>(0)?)?,
        agent: parsed("home's agent", &row.get::<_, String>(1)?)?,
        generation: Generation(row.get::<_, i64>(2)? as u64),
        root: row.get::<_, Option<String>>(3)?.map(|r| parsed("root", &r)).transpose()?,
        lease_token: FencingToken(row.get::<_, i64>(4)? as u64),
        lease_session: row.get::<_, Option<String>>(5)?.map(|s| parsed("lease session", &s)).transpose()?,
        lease_held: row.get(6)?,
        lease_runner: row.get::<_, Option<String>>(7)?.map(|r| parsed("lease runner", &r)).transpose()?,
        lease_floor: FencingToken(row.get::<_, i64>(8)? as u64),
        floor_generation: Generation(row.get::<_, i64>(9)? as u64),
        created_at: Timestamp::from_unix_ms(row.get(10)?),
        unsecured: Unsecured::of(row.get(11)?, row.get(12)?),
    })
}

/// Reads one home.
///
/// # Errors
/// [`DbError::NotFound`].
pub fn get(read: &Read<'_>, org: OrgId, id: HomeId) -> Result<Home> {
    let sql = format!("SELECT {COLUMNS} FROM home WHERE org = ?1 AND id = ?2");
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    rows.next()?.map_or_else(|| Err(DbError::not_found("home", id)), home_of)
}

/// Lists homes.
///
/// # Errors
/// When the database refuses.
pub fn list(read: &Read<'_>, org: OrgId, page: &Page<HomeId>) -> Result<Vec<Home>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM home WHERE org = ?1 AND (?2 IS NULL OR id {} ?2) ORDER BY id {} LIMIT ?3",
        page.order.beyond(),
        page.order.sql()
    );
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), page.after_sql(), page.limit_sql()))?;
    let mut homes = Vec::new();
    while let Some(row) = rows.next()? {
        homes.push(home_of(row)?);
    }
    Ok(homes)
}

/// Finds the org of a home; for messages of a runner, which name only the home.
///
/// # Errors
/// [`DbError::NotFound`].
pub fn org_of(read: &Read<'_>, id: HomeId) -> Result<OrgId> {
    let org: Option<String> = read
        .conn
        .prepare_cached("SELECT org FROM home WHERE id = ?1")?
        .query_row([id.to_string()], |row| row.get(0))
        .optional()?;
    parsed("org", &org.ok_or_else(|| DbError::not_found("home", id))?)
}

/// Takes the home's lease for a session that acts on it through `runner`; each grant has a new, higher token.
/// A session that holds it already gets a new token as well. With another runner than before, the earlier one
/// can publish no more.
///
/// # Errors
/// [`DbError::NotFound`].
pub fn claim(tx: &Tx<'_>, org: OrgId, id: HomeId, session: SessionId, runner: RunnerId) -> Result<Claim> {
    let home = get(tx, org, id)?;
    if home.lease_held
        && let Some(holder) = home.lease_session
        && holder != session
    {
        return Ok(Claim::HeldBy(holder));
    }
    let token = home.lease_token.next();
    let (floor, floor_generation) = if home.lease_runner == Some(runner) {
        (home.lease_floor, home.floor_generation)
    } else {
        (token, home.generation)
    };
    tx.conn
        .prepare_cached(
            "UPDATE home SET lease_token = ?3, lease_session = ?4, lease_held = 1, lease_runner = ?5,
                    lease_floor = ?6, floor_generation = ?7
             WHERE org = ?1 AND id = ?2",
        )?
        .execute((
            org.to_string(),
            id.to_string(),
            token.0 as i64,
            session.to_string(),
            runner.to_string(),
            floor.0 as i64,
            floor_generation.0 as i64,
        ))?;
    // What a session changes in a home is told from here on.
    tx.conn
        .prepare_cached(
            "UPDATE session SET home_base = coalesce(home_base, ?3) WHERE org = ?1 AND id = ?2 AND home = ?4",
        )?
        .execute((org.to_string(), session.to_string(), home.generation.0 as i64, id.to_string()))?;
    Ok(Claim::Granted(token))
}

/// Gives the lease back. The token stays good for late publishes until the next claim.
///
/// # Errors
/// When the database refuses.
pub fn release(tx: &Tx<'_>, org: OrgId, id: HomeId, session: SessionId) -> Result<()> {
    tx.conn
        .prepare_cached("UPDATE home SET lease_held = 0 WHERE org = ?1 AND id = ?2 AND lease_session = ?3")?
        .execute((org.to_string(), id.to_string(), session.to_string()))?;
    Ok(())
}

/// Gives back whatever lease a session holds: its driver died without doing so.
///
/// # Errors
/// When the database refuses.
pub fn release_of(tx: &Tx<'_>, org: OrgId, session: SessionId) -> Result<()> {
    tx.conn
        .prepare_cached("UPDATE home SET lease_held = 0 WHERE org = ?1 AND lease_session = ?2")?
        .execute((org.to_string(), session.to_string()))?;
    Ok(())
}

/// Gives back every lease: at the start of the only server, no driver of the last one is alive.
///
/// # Errors
/// When the database refuses.
pub fn release_all(tx: &Tx<'_>) -> Result<()> {
    tx.conn.execute("UPDATE home SET lease_held = 0", [])?;
    Ok(())
}

/// Deleted homes of an org that are remembered, the newest ones. A runner that does not dial in while so many are
/// deleted keeps its copies of the older ones.
const DELETED_HOMES_MAX: i64 = 10_000;

/// Remembers that a home was deleted on purpose, for runners that have a working copy of it.
///
/// # Errors
/// When the database refuses.
pub fn note_deleted(tx: &Tx<'_>, org: OrgId, id: HomeId) -> Result<()> {
    let org = org.to_string();
    tx.conn
        .prepare_cached(
            "INSERT INTO deleted_home (org, home, deleted_at) VALUES (?1, ?2, ?3) ON CONFLICT (org, home) DO NOTHING",
        )?
        .execute((&org, id.to_string(), tx.now().unix_ms()))?;
    tx.conn
        .prepare_cached(
            "DELETE FROM deleted_home WHERE org = ?1 AND home IN
                 (SELECT home FROM deleted_home WHERE org = ?1 ORDER BY deleted_at DESC, home LIMIT -1 OFFSET ?2)",
        )?
        .execute((&org, DELETED_HOMES_MAX))?;
    Ok(())
}

/// The org's homes that were deleted, in order.
///
/// # Errors
/// When the database refuses.
pub fn deleted(read: &Read<'_>, org: OrgId) -> Result<Vec<HomeId>> {
    let mut statement =
        read.conn.prepare_cached("SELECT home FROM deleted_home WHERE org = ?1 ORDER BY home")?;
    let mut rows = statement.query([org.to_string()])?;
    let mut homes = Vec::new();
    while let Some(row) = rows.next()? {
        homes.push(parsed("deleted home", &row.get::<_, String>(0)?)?);
    }
    Ok(homes)
}

/// Notes why the home is not secured; the time of the first reason in a row stays.
///
/// # Errors
/// When the database refuses.
pub fn mark_unsecured(tx: &Tx<'_>, org: OrgId, id: HomeId, reason: &str) -> Result<()> {
    tx.conn
        .prepare_cached(
            "UPDATE home SET unsecured_at = coalesce(unsecured_at, ?3), unsecured_reason = ?4
             WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string(), tx.now().unix_ms(), reason))?;
    Ok(())
}

/// Records in the lease holder's journal that a secure failed, and that the home is unsecured.
///
/// # Errors
/// [`DbError::NotFound`].
pub fn note_secure_failed(
    tx: &Tx<'_>,
    org: OrgId,
    id: HomeId,
    fault: covey_types::Fault,
    detail: &str,
) -> Result<()> {
    mark_unsecured(tx, org, id, detail)?;
    if let Some(session) = get(tx, org, id)?.lease_session {
        let failed = Body::HomeSecureFailed { fault, detail: detail.to_owned() };
        journal::append_fenced_elsewhere(tx, org, session, failed)?;
    }
    Ok(())
}
