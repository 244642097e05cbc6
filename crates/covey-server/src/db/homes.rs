//! Homes: the current snapshot, the lease, the history of snapshots. The pointer moves only here, in the
//! transaction that checks the lease's token and the base generation (I5, I6).
//!
//! A token fences **runners**: one host has one working copy and one actor for it, so what it offers under
//! any token since the home came to it descends from what it offered before. Only when the home goes to
//! another runner, or is imported, do earlier tokens lose their force. That lets a snapshot of the last turn
//! arrive while the next one has its own token already.

use covey_harness::record::Body;
use covey_types::{
    AgentId, FencingToken, Generation, HomeId, OrgId, RootHash, RunnerId, SessionId, Snapshot, SnapshotKind,
    StepId, Timestamp,
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
}

/// A snapshot with what is known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRow {
    /// The snapshot itself.
    pub snapshot: Snapshot,
    /// The session it was taken in; none for an import.
    pub session: Option<SessionId>,
    /// Files in the home.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What a runner offers to publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publish {
    /// The home lease's token.
    pub token: FencingToken,
    /// A generation it descends from: the current one, or an earlier one of the same runner whose answer had
    /// not arrived.
    pub base: Generation,
    /// The state; all its blocks are durable.
    pub root: RootHash,
    /// How still the home was.
    pub kind: SnapshotKind,
    /// The last finished step.
    pub step: Option<StepId>,
    /// Files in the home.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
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
     lease_floor, floor_generation, created_at";

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

/// Lists a home's snapshots, newest first, those below `before` only.
///
/// # Errors
/// [`DbError::NotFound`] for the home.
pub fn snapshots(
    read: &Read<'_>,
    org: OrgId,
    id: HomeId,
    before: Option<Generation>,
    limit: usize,
) -> Result<Vec<SnapshotRow>> {
    get(read, org, id)?;
    let mut statement = read.conn.prepare_cached(
        "SELECT generation, root, kind, session, step, files, bytes, published_at FROM snapshot
         WHERE org = ?1 AND home = ?2 AND (?3 IS NULL OR generation < ?3) ORDER BY generation DESC LIMIT ?4",
    )?;
    let limit = limit.min(super::PAGE_ROWS_MAX) as i64;
    let before = before.map(|g| g.0 as i64);
    let mut rows = statement.query((org.to_string(), id.to_string(), before, limit))?;
    let mut snapshots = Vec::new();
    while let Some(row) = rows.next()? {
        let kind: String = row.get(2)?;
        let kind = SnapshotKind::ALL
            .into_iter()
            .find(|k| k.as_str() == kind)
            .ok_or_else(|| DbError::Corrupt { what: "snapshot kind", detail: format!("`{kind}` is none") })?;
        snapshots.push(SnapshotRow {
            snapshot: Snapshot {
                generation: Generation(row.get::<_, i64>(0)? as u64),
                root: parsed("root", &row.get::<_, String>(1)?)?,
                kind,
                step: row.get::<_, Option<String>>(4)?.map(|s| parsed("step", &s)).transpose()?,
                published_at: Timestamp::from_unix_ms(row.get(7)?),
            },
            session: row.get::<_, Option<String>>(3)?.map(|s| parsed("session", &s)).transpose()?,
            files: row.get::<_, i64>(5)? as u64,
            bytes: row.get::<_, i64>(6)? as u64,
        });
    }
    Ok(snapshots)
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

/// Makes a state the home's current snapshot and records it in the journal of the session that holds, or
/// last held, the lease; one transaction. The same root again keeps its generation.
///
/// # Errors
/// [`DbError::Fenced`] for a token from before the home came to its runner; [`DbError::Conflict`] when `base`
/// is from before that, or was never reached; [`DbError::NotFound`].
pub fn publish(tx: &Tx<'_>, org: OrgId, id: HomeId, publish: &Publish) -> Result<Generation> {
    let home = get(tx, org, id)?;
    if publish.token < home.lease_floor || publish.token > home.lease_token {
        return Err(DbError::Fenced { what: format!("home {id}"), token: publish.token.0 });
    }
    let changed = home.root != Some(publish.root);
    // A publish whose answer was lost comes again with the old base: its root is current, so it is answered
    // like the first time.
    if changed && !(home.floor_generation..=home.generation).contains(&publish.base) {
        return Err(DbError::Conflict(format!(
            "home {id} is at generation {}, the publish descends from {}",
            home.generation, publish.base
        )));
    }
    let generation = if changed { home.generation.next() } else { home.generation };
    if changed {
        let session = home.lease_session.map(|s| s.to_string());
        insert_snapshot(tx, org, id, generation, publish, session.as_deref())?;
    }
    if let Some(session) = home.lease_session {
        let secured = Body::HomeSecured {
            generation,
            root: publish.root,
            kind: publish.kind,
            step: publish.step,
            changed,
            files: publish.files,
            bytes: publish.bytes,
        };
        journal::append_fenced_elsewhere(tx, org, session, secured)?;
    }
    Ok(generation)
}

fn insert_snapshot(
    tx: &Tx<'_>,
    org: OrgId,
    id: HomeId,
    generation: Generation,
    publish: &Publish,
    session: Option<&str>,
) -> Result<()> {
    let (org, id) = (org.to_string(), id.to_string());
    tx.conn
        .prepare_cached(
            "INSERT INTO snapshot (org, home, generation, root, kind, session, step, files, bytes, published_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
        )?
        .execute((
            &org,
            &id,
            generation.0 as i64,
            publish.root.to_string(),
            publish.kind.as_str(),
            session,
            publish.step.map(|s| s.to_string()),
            publish.files as i64,
            publish.bytes as i64,
            tx.now().unix_ms(),
        ))?;
    tx.conn
        .prepare_cached("UPDATE home SET generation = ?3, root = ?4 WHERE org = ?1 AND id = ?2")?
        .execute((&org, &id, generation.0 as i64, publish.root.to_string()))?;
    Ok(())
}

/// Records in the lease holder's journal that a secure failed.
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
    if let Some(session) = get(tx, org, id)?.lease_session {
        let failed = Body::HomeSecureFailed { fault, detail: detail.to_owned() };
        journal::append_fenced_elsewhere(tx, org, session, failed)?;
    }
    Ok(())
}

/// Makes a state from outside the home's current snapshot (all its blocks must be durable). Only while no
/// session acts on the home; late publishes of earlier holders are refused from then on.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] when the lease is held or `base` is not current.
pub fn import(
    tx: &Tx<'_>,
    org: OrgId,
    id: HomeId,
    base: Generation,
    root: RootHash,
    files: u64,
    bytes: u64,
) -> Result<Generation> {
    let home = get(tx, org, id)?;
    if home.lease_held {
        return Err(DbError::Conflict(format!(
            "a session acts on home {id}; wait until it is idle, then import"
        )));
    }
    if home.generation != base {
        return Err(DbError::Conflict(format!(
            "home {id} is at generation {}, not {base}; look at it again, then import",
            home.generation
        )));
    }
    if home.root == Some(root) {
        return Ok(home.generation);
    }
    let token = home.lease_token.next();
    tx.conn
        .prepare_cached(
            "UPDATE home SET lease_token = ?3, lease_session = NULL, lease_runner = NULL, lease_floor = ?3,
                    floor_generation = ?4
             WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string(), token.0 as i64, base.next().0 as i64))?;
    let kind = SnapshotKind::Quiesced;
    let publish = Publish { token, base, root, kind, step: None, files, bytes };
    insert_snapshot(tx, org, id, base.next(), &publish, None)?;
    Ok(base.next())
}
