//! Snapshots: a home's published states, and the pointer to the current one. The pointer moves only here, in the
//! transaction that checks the lease's token, the base generation, the collection's floor and the limits (I5, I6, I8).
//!
//! A token fences **runners**: one host has one working copy and one actor for it, so what it offers under
//! any token since the home came to it descends from what it offered before. Only when the home goes to
//! another runner, or is replaced, do earlier tokens lose their force. That lets a snapshot of the last turn
//! arrive while the next one has its own token already.

use covey_harness::record::{Body, HomeOrigin};
use covey_types::{
    Fault, FencingToken, Generation, HomeId, OrgId, RootHash, SessionId, Snapshot, SnapshotKind, StepId,
    Timestamp,
};
use covey_wire::api::history::GenerationName;
use rusqlite::Row;

use super::homes::{Home, get, mark_unsecured};
use super::{DbError, Read, Result, Tx, journal, orgs, parsed, rules};

/// Sessions at most that are told in their journals when a home is replaced: the newest ones.
const TOLD_SESSIONS_MAX: i64 = 100;

/// How a snapshot came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A runner secured the home.
    Secured,
    /// It came from outside.
    Imported,
    /// It is, whole or in part, as an earlier generation was.
    Restored,
    /// It is another home's.
    Forked,
}

impl Origin {
    const ALL: [Self; 4] = [Self::Secured, Self::Imported, Self::Restored, Self::Forked];

    /// The one text form, as stored and sent.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Secured => "secured",
            Self::Imported => "imported",
            Self::Restored => "restored",
            Self::Forked => "forked",
        }
    }
}

/// A snapshot with what is known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRow {
    /// The snapshot itself.
    pub snapshot: Snapshot,
    /// The session it was taken in; none for what no session did.
    pub session: Option<SessionId>,
    /// Files in the home.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How it came about.
    pub origin: Origin,
    /// Of a restored or forked one: the generation whose state it is.
    pub from_generation: Option<Generation>,
    /// Of a forked one: the home of that generation.
    pub from_home: Option<HomeId>,
}

const COLUMNS: &str =
    "generation, root, kind, session, step, files, bytes, published_at, origin, from_generation,
     from_home";

fn row_of(row: &Row<'_>) -> Result<SnapshotRow> {
    let (kind, origin): (String, String) = (row.get(2)?, row.get(8)?);
    let odd = |what, text: &str| DbError::Corrupt { what, detail: format!("`{text}` is none") };
    let known_kind = SnapshotKind::ALL.into_iter().find(|known| known.as_str() == kind);
    let known_origin = Origin::ALL.into_iter().find(|known| known.as_str() == origin);
    Ok(SnapshotRow {
        snapshot: Snapshot {
            generation: Generation(row.get::<_, i64>(0)? as u64),
            root: parsed("root", &row.get::<_, String>(1)?)?,
            kind: known_kind.ok_or_else(|| odd("snapshot kind", &kind))?,
            step: row.get::<_, Option<String>>(4)?.map(|s| parsed("step", &s)).transpose()?,
            published_at: Timestamp::from_unix_ms(row.get(7)?),
        },
        session: row.get::<_, Option<String>>(3)?.map(|s| parsed("session", &s)).transpose()?,
        files: row.get::<_, i64>(5)? as u64,
        bytes: row.get::<_, i64>(6)? as u64,
        origin: known_origin.ok_or_else(|| odd("snapshot origin", &origin))?,
        from_generation: row.get::<_, Option<i64>>(9)?.map(|generation| Generation(generation as u64)),
        from_home: row.get::<_, Option<String>>(10)?.map(|h| parsed("snapshot's home", &h)).transpose()?,
    })
}

/// Lists a home's snapshots, newest first, those below `before` only.
///
/// # Errors
/// [`DbError::NotFound`] for the home.
pub fn list(
    read: &Read<'_>,
    org: OrgId,
    id: HomeId,
    before: Option<Generation>,
    limit: usize,
) -> Result<Vec<SnapshotRow>> {
    get(read, org, id)?;
    let sql = format!(
        "SELECT {COLUMNS} FROM snapshot
         WHERE org = ?1 AND home = ?2 AND (?3 IS NULL OR generation < ?3) ORDER BY generation DESC LIMIT ?4"
    );
    let mut statement = read.conn.prepare_cached(&sql)?;
    let limit = limit.min(super::PAGE_ROWS_MAX) as i64;
    let before = before.map(|g| g.0 as i64);
    let mut rows = statement.query((org.to_string(), id.to_string(), before, limit))?;
    let mut snapshots = Vec::new();
    while let Some(row) = rows.next()? {
        snapshots.push(row_of(row)?);
    }
    Ok(snapshots)
}

/// How many snapshots of a home are kept.
///
/// # Errors
/// When the database refuses.
pub fn count(read: &Read<'_>, org: OrgId, id: HomeId) -> Result<u64> {
    let count: i64 = read
        .conn
        .prepare_cached("SELECT count(*) FROM snapshot WHERE org = ?1 AND home = ?2")?
        .query_row((org.to_string(), id.to_string()), |row| row.get(0))?;
    Ok(count as u64)
}

/// Finds the snapshot that is meant.
///
/// # Errors
/// [`DbError::NotFound`] for the home, and for a snapshot that never was or is not kept any more.
pub fn named(read: &Read<'_>, org: OrgId, id: HomeId, name: GenerationName) -> Result<SnapshotRow> {
    let home = get(read, org, id)?;
    let (at_most, passed) = match name {
        GenerationName::Current => (home.generation.0, 0),
        GenerationName::Number(number) => (number, 0),
        GenerationName::Before(before) => (home.generation.0, before),
    };
    let sql = format!(
        "SELECT {COLUMNS} FROM snapshot
         WHERE org = ?1 AND home = ?2 AND generation <= ?3 ORDER BY generation DESC LIMIT 1 OFFSET ?4"
    );
    let mut statement = read.conn.prepare_cached(&sql)?;
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let mut rows = statement.query((org.to_string(), id.to_string(), number(at_most), number(passed)))?;
    let found = rows.next()?.map(row_of).transpose()?;
    let exact =
        |found: &SnapshotRow| !matches!(name, GenerationName::Number(n) if found.snapshot.generation.0 != n);
    found.filter(exact).ok_or_else(|| match home.generation {
        Generation(0) => DbError::NotFound { what: "a snapshot of", id: id.to_string() },
        _ => DbError::NotFound { what: "a kept snapshot", id: format!("{name} of {id}") },
    })
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
    /// The collection that the store knew of when its upload began.
    pub epoch: u64,
}

/// What became of an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Published {
    /// It is the home's current snapshot under this number.
    Current(Generation),
    /// A limit is in the way; the reason is in the lease holder's journal.
    OverQuota(String),
    /// A collection has passed: what the offer relies on may be gone.
    Collected {
        /// The least epoch that is taken.
        floor: u64,
    },
}

/// Makes a state the home's current snapshot and records it in the journal of the session that holds, or
/// last held, the lease; one transaction. The same root again keeps its generation.
///
/// # Errors
/// [`DbError::Fenced`] for a token from before the home came to its runner; [`DbError::Conflict`] when `base`
/// is from before that, or was never reached; [`DbError::NotFound`].
pub fn publish(tx: &Tx<'_>, org: OrgId, id: HomeId, offer: &Publish) -> Result<Published> {
    let home = get(tx, org, id)?;
    if offer.token < home.lease_floor || offer.token > home.lease_token {
        return Err(DbError::Fenced { what: format!("home {id}"), token: offer.token.0 });
    }
    let changed = home.root != Some(offer.root);
    // A publish whose answer was lost comes again with the old base: its root is current, so it is answered
    // like the first time.
    if changed && !(home.floor_generation..=home.generation).contains(&offer.base) {
        return Err(DbError::Conflict(format!(
            "home {id} is at generation {}, the publish descends from {}",
            home.generation, offer.base
        )));
    }
    if changed {
        let floor = orgs::collect_floor(tx, org)?;
        if offer.epoch < floor {
            return Ok(Published::Collected { floor });
        }
        let loads = rules::loads(tx, org, &home, offer.files, offer.bytes)?;
        if let Some(load) = loads.iter().find(|load| load.is_refused()) {
            let reason = load.reason(id);
            note_over_quota(tx, org, &home, &reason)?;
            return Ok(Published::OverQuota(reason));
        }
        let generation = home.generation.next();
        let row = NewSnapshot {
            generation,
            root: offer.root,
            kind: offer.kind,
            session: home.lease_session,
            step: offer.step,
            files: offer.files,
            bytes: offer.bytes,
            origin: Origin::Secured,
            from: None,
        };
        insert(tx, org, id, &row)?;
        warn(tx, org, &home, &loads)?;
    }
    let generation = if changed { home.generation.next() } else { home.generation };
    if home.unsecured.is_some() {
        clear_unsecured(tx, org, id)?;
    }
    if let Some(session) = home.lease_session {
        let secured = Body::HomeSecured {
            generation,
            root: offer.root,
            kind: offer.kind,
            step: offer.step,
            changed,
            files: offer.files,
            bytes: offer.bytes,
        };
        journal::append_fenced_elsewhere(tx, org, session, secured)?;
    }
    Ok(Published::Current(generation))
}

/// Says in the lease holder's journal that a limit is in the way, once until something is secured again: the runner
/// offers again and again.
fn note_over_quota(tx: &Tx<'_>, org: OrgId, home: &Home, reason: &str) -> Result<()> {
    mark_unsecured(tx, org, home.id, reason)?;
    let Some(session) = home.lease_session else { return Ok(()) };
    let last = journal::last_of(tx, org, session, &["home.secured", "home.secure_failed"])?;
    let is_known = last
        .is_some_and(|record| matches!(record.body, Body::HomeSecureFailed { fault: Fault::TooLarge, .. }));
    if !is_known {
        let failed = Body::HomeSecureFailed { fault: Fault::TooLarge, detail: reason.to_owned() };
        journal::append_fenced_elsewhere(tx, org, session, failed)?;
    }
    Ok(())
}

fn warn(tx: &Tx<'_>, org: OrgId, home: &Home, loads: &[rules::Load]) -> Result<()> {
    for load in loads.iter().filter(|load| load.warns()) {
        tracing::warn!(home = %home.id, limit = load.limit, used = load.after, max = load.max, "a home comes near its limit");
        if let Some(session) = home.lease_session {
            let limit = load.limit.to_owned();
            let near = Body::HomeNearLimit { limit, used: load.after, max: load.max };
            journal::append_fenced_elsewhere(tx, org, session, near)?;
        }
    }
    Ok(())
}

fn clear_unsecured(tx: &Tx<'_>, org: OrgId, id: HomeId) -> Result<()> {
    tx.conn
        .prepare_cached(
            "UPDATE home SET unsecured_at = NULL, unsecured_reason = NULL WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string()))?;
    Ok(())
}

/// A row that is about to be written.
struct NewSnapshot {
    generation: Generation,
    root: RootHash,
    kind: SnapshotKind,
    session: Option<SessionId>,
    step: Option<StepId>,
    files: u64,
    bytes: u64,
    origin: Origin,
    from: Option<(Option<HomeId>, Generation)>,
}

/// Writes the row and moves the pointer to it.
fn insert(tx: &Tx<'_>, org: OrgId, id: HomeId, row: &NewSnapshot) -> Result<()> {
    let (org, id) = (org.to_string(), id.to_string());
    tx.conn
        .prepare_cached(
            "INSERT INTO snapshot (org, home, generation, root, kind, session, step, files, bytes, published_at,
                                   origin, from_generation, from_home)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
        )?
        .execute((
            &org,
            &id,
            row.generation.0 as i64,
            row.root.to_string(),
            row.kind.as_str(),
            row.session.map(|session| session.to_string()),
            row.step.map(|step| step.to_string()),
            row.files as i64,
            row.bytes as i64,
            tx.now().unix_ms(),
            row.origin.as_str(),
            row.from.map(|(_, generation)| generation.0 as i64),
            row.from.and_then(|(home, _)| home).map(|home| home.to_string()),
        ))?;
    tx.conn
        .prepare_cached("UPDATE home SET generation = ?3, root = ?4 WHERE org = ?1 AND id = ?2")?
        .execute((&org, &id, row.generation.0 as i64, row.root.to_string()))?;
    Ok(())
}

/// A state that shall take the place of a home's current one without any runner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replacement {
    /// The home's current generation, as the caller knows it.
    pub base: Generation,
    /// The state; all its blocks are durable.
    pub root: RootHash,
    /// Files in it.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The collection that the store knew of when its upload began; none when the state is that of a snapshot that is
    /// read in the same transaction, so that no collection can have missed it.
    pub epoch: Option<u64>,
    /// How it comes about.
    pub origin: Origin,
    /// Whose earlier state it is, whole or in part; a home only when it is another one.
    pub from: Option<(Option<HomeId>, Generation)>,
    /// Also when the last step in the home is not secured, so that its files can only be had from the runner's host.
    pub over_unsecured: bool,
}

/// Makes a state from outside the home's current snapshot. Only while no session acts on the home; late publishes of
/// earlier holders are refused from then on. Sessions that have worked in the home and are not archived are told.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] when the lease is held, `base` is not current, or a collection has
/// passed since the upload began; [`DbError::TooLarge`] when the home may not be so large.
pub fn replace(tx: &Tx<'_>, org: OrgId, id: HomeId, with: &Replacement) -> Result<Generation> {
    let home = get(tx, org, id)?;
    if home.lease_held {
        let session = home.lease_session.map_or_else(|| "a session".to_owned(), |s| format!("session {s}"));
        return Err(DbError::Conflict(format!(
            "{session} acts on home {id}; wait until it is idle, or interrupt it, then try again"
        )));
    }
    if !with.over_unsecured
        && let Some(session) = home.lease_session
        && is_unsecured(tx, org, session)?
    {
        return Err(DbError::Conflict(format!(
            "the last step of session {session} in home {id} is not secured yet; try again in a moment, or force it: \
             what that step changed then stays only on the runner's host"
        )));
    }
    if home.generation != with.base {
        return Err(DbError::Conflict(format!(
            "home {id} is at generation {}, not {}; look at it again, then try again",
            home.generation, with.base
        )));
    }
    if home.root == Some(with.root) {
        return Ok(home.generation);
    }
    let floor = orgs::collect_floor(tx, org)?;
    if with.epoch.is_some_and(|epoch| epoch < floor) {
        return Err(collected(id));
    }
    let loads = rules::loads(tx, org, &home, with.files, with.bytes)?;
    if let Some(load) = loads.iter().find(|load| load.is_refused()) {
        return Err(DbError::TooLarge(load.reason(id)));
    }
    let (token, generation) = (home.lease_token.next(), home.generation.next());
    tx.conn
        .prepare_cached(
            "UPDATE home SET lease_token = ?3, lease_session = NULL, lease_runner = NULL, lease_floor = ?3,
                    floor_generation = ?4
             WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string(), token.0 as i64, generation.0 as i64))?;
    let row = NewSnapshot {
        generation,
        root: with.root,
        kind: SnapshotKind::Quiesced,
        session: None,
        step: None,
        files: with.files,
        bytes: with.bytes,
        origin: with.origin,
        from: with.from,
    };
    insert(tx, org, id, &row)?;
    clear_unsecured(tx, org, id)?;
    tell_sessions(tx, org, id, with, generation)?;
    Ok(generation)
}

/// What shall become the home's state was stored before a collection.
fn collected(id: HomeId) -> DbError {
    DbError::Conflict(format!(
        "a garbage collection has passed since what shall become home {id} was stored, and may have deleted parts of it; \
         store it again, then try again"
    ))
}

/// Refuses what was stored in an earlier epoch than is taken now.
///
/// # Errors
/// [`DbError::Conflict`], as [`replace`] says it; [`DbError::NotFound`].
pub fn check_epoch(read: &Read<'_>, org: OrgId, id: HomeId, epoch: u64) -> Result<()> {
    if epoch < orgs::collect_floor(read, org)? { Err(collected(id)) } else { Ok(()) }
}

/// [`replace`] with a state that was made from the current one and an earlier snapshot of the same home, whose number
/// `with.from` says. None when a collection has passed since it was begun: it has to be made again.
///
/// # Errors
/// As [`replace`]; [`DbError::NotFound`] also when the snapshot is not kept any more.
pub fn replace_edited(tx: &Tx<'_>, org: OrgId, id: HomeId, with: &Replacement) -> Result<Option<Generation>> {
    if let Some((_, generation)) = with.from {
        // It may have been forgotten between the look and the edit, by a collection whose epoch the edit already
        // names; as long as its row is there, its blocks are.
        named(tx, org, id, GenerationName::Number(generation.0))?;
    }
    let floor = orgs::collect_floor(tx, org)?;
    if with.epoch.is_some_and(|epoch| epoch < floor) {
        return Ok(None);
    }
    replace(tx, org, id, with).map(Some)
}

/// Whether a call has ended in the session and nothing was secured since.
fn is_unsecured(tx: &Tx<'_>, org: OrgId, session: SessionId) -> Result<bool> {
    let last = journal::last_of(tx, org, session, &["home.secured", "agent.tool_result"])?;
    Ok(last.is_some_and(|record| matches!(record.body, Body::ToolResult { substitute: false, .. })))
}

/// Whoever worked in the home believes that it is as it was left.
fn tell_sessions(
    tx: &Tx<'_>,
    org: OrgId,
    id: HomeId,
    with: &Replacement,
    generation: Generation,
) -> Result<()> {
    let origin = match with.origin {
        Origin::Restored => HomeOrigin::Restored,
        Origin::Forked => HomeOrigin::Forked,
        Origin::Imported | Origin::Secured => HomeOrigin::Imported,
    };
    let from_generation = with.from.map(|(_, generation)| generation);
    let mut statement = tx.conn.prepare_cached(
        "SELECT id FROM session
         WHERE org = ?1 AND home = ?2 AND home_base IS NOT NULL AND archived_at IS NULL AND status <> 'terminated'
         ORDER BY id DESC LIMIT ?3",
    )?;
    let mut rows = statement.query((org.to_string(), id.to_string(), TOLD_SESSIONS_MAX))?;
    let mut sessions = Vec::new();
    while let Some(row) = rows.next()? {
        sessions.push(parsed("session", &row.get::<_, String>(0)?)?);
    }
    for session in sessions {
        let replaced = Body::HomeReplaced { generation, root: with.root, origin, from_generation };
        journal::append_fenced_elsewhere(tx, org, session, replaced)?;
    }
    Ok(())
}

/// Makes the snapshot `name` of a home its current one again, under a new number.
///
/// # Errors
/// As [`named`] and [`replace`]; `base` none stands for whatever is current.
pub fn restore(
    tx: &Tx<'_>,
    org: OrgId,
    id: HomeId,
    name: GenerationName,
    base: Option<Generation>,
    over_unsecured: bool,
) -> Result<(Generation, SnapshotRow)> {
    let from = named(tx, org, id, name)?;
    let base = base.map_or_else(|| get(tx, org, id).map(|home| home.generation), Ok)?;
    let with = Replacement { over_unsecured, ..of_snapshot(&from, base, Origin::Restored, None) };
    Ok((replace(tx, org, id, &with)?, from))
}

/// Makes the snapshot `name` of the home `source` the current one of the home `target` of the same org. Nothing is
/// copied: both name the same blocks.
///
/// # Errors
/// As [`named`] and [`replace`].
pub fn fork(
    tx: &Tx<'_>,
    org: OrgId,
    source: HomeId,
    name: GenerationName,
    target: HomeId,
    over_unsecured: bool,
) -> Result<(Generation, SnapshotRow)> {
    let from = named(tx, org, source, name)?;
    let base = get(tx, org, target)?.generation;
    let from_home = Some(source).filter(|source| *source != target);
    let with = Replacement { over_unsecured, ..of_snapshot(&from, base, Origin::Forked, from_home) };
    Ok((replace(tx, org, target, &with)?, from))
}

fn of_snapshot(from: &SnapshotRow, base: Generation, origin: Origin, home: Option<HomeId>) -> Replacement {
    Replacement {
        base,
        root: from.snapshot.root,
        files: from.files,
        bytes: from.bytes,
        epoch: None,
        origin,
        from: Some((home, from.snapshot.generation)),
        over_unsecured: false,
    }
}
