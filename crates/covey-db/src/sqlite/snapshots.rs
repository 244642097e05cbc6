//! Snapshots in SQLite.

use async_trait::async_trait;
use covey_harness::record::Body;
use covey_types::{Fault, Generation, HomeId, OrgId, SessionId, Snapshot, Timestamp};
use covey_wire::api::history::GenerationName;
use rusqlite::Row;

use super::homes::{get, mark_unsecured};
use super::{Read, Result, Sqlite, Tx, agents, journal, orgs, parsed, rules};
use crate::DbError;
use crate::homes::Home;
use crate::page::limit_sql;
use crate::rules::{Load, Size};
use crate::snapshots::{
    ForkTarget, Forked, NewSnapshot, Origin, Publish, Published, Replacement, SnapshotRow, Snapshots,
    TOLD_SESSIONS_MAX, collected_since, judge_offer, kind_and_origin, meant, name_of_fork, not_secured_yet,
    of_snapshot, offered, refuse_if_held, refuse_if_moved, replaced, replacing, searched, secured,
};

#[async_trait]
impl Snapshots for Sqlite {
    async fn list_snapshots(
        &self,
        org: OrgId,
        home: HomeId,
        before: Option<Generation>,
        limit: usize,
    ) -> Result<Vec<SnapshotRow>> {
        self.read("list snapshots", move |read| list(read, org, home, before, limit)).await
    }

    async fn count_snapshots(&self, org: OrgId, home: HomeId) -> Result<u64> {
        self.read("count snapshots", move |read| count(read, org, home)).await
    }

    async fn snapshot(&self, org: OrgId, home: HomeId, name: GenerationName) -> Result<SnapshotRow> {
        self.read("find snapshot", move |read| named(read, org, home, name)).await
    }

    async fn publish(&self, home: HomeId, offer: &Publish) -> Result<Published> {
        let offer = offer.clone();
        self.write("publish", move |tx| {
            let org = super::homes::org_of(tx, home)?;
            publish(tx, org, home, &offer)
        })
        .await
    }

    async fn replace_home(&self, org: OrgId, home: HomeId, with: &Replacement) -> Result<Generation> {
        let with = with.clone();
        self.write("replace home", move |tx| replace(tx, org, home, &with)).await
    }

    async fn check_epoch(&self, org: OrgId, home: HomeId, epoch: u64) -> Result<()> {
        self.read("check epoch", move |read| {
            if epoch < orgs::collect_floor(read, org)? { Err(collected_since(home)) } else { Ok(()) }
        })
        .await
    }

    async fn replace_edited_home(
        &self,
        org: OrgId,
        home: HomeId,
        with: &Replacement,
    ) -> Result<Option<Generation>> {
        let with = with.clone();
        self.write("replace edited home", move |tx| replace_edited(tx, org, home, &with)).await
    }

    async fn restore_home(
        &self,
        org: OrgId,
        home: HomeId,
        name: GenerationName,
        base: Option<Generation>,
        over_unsecured: bool,
    ) -> Result<(Generation, SnapshotRow)> {
        self.write("restore home", move |tx| restore(tx, org, home, name, base, over_unsecured)).await
    }

    async fn fork_home(
        &self,
        org: OrgId,
        source: HomeId,
        name: GenerationName,
        target: &ForkTarget,
        over_unsecured: bool,
    ) -> Result<Forked> {
        let target = target.clone();
        self.write("fork home", move |tx| {
            let agent = match &target {
                ForkTarget::Agent(agent) => agents::get(tx, org, *agent)?,
                ForkTarget::New { name } => {
                    let of = agents::get(tx, org, agents::by_home(tx, org, source)?)?;
                    agents::insert(tx, org, &name_of_fork(name.as_deref(), &of.name), &of.config)?
                }
            };
            let (generation, from) = fork(tx, org, source, name, agent.home, over_unsecured)?;
            Ok(Forked { agent, generation, from })
        })
        .await
    }
}

const COLUMNS: &str =
    "generation, root, kind, session, step, files, bytes, published_at, origin, from_generation,
     from_home";

fn row_of(row: &Row<'_>) -> Result<SnapshotRow> {
    let (kind, origin) = kind_and_origin(&row.get::<_, String>(2)?, &row.get::<_, String>(8)?)?;
    Ok(SnapshotRow {
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
        origin,
        from_generation: row.get::<_, Option<i64>>(9)?.map(|generation| Generation(generation as u64)),
        from_home: row.get::<_, Option<String>>(10)?.map(|h| parsed("snapshot's home", &h)).transpose()?,
    })
}

/// Lists a home's snapshots, newest first, those below `before` only.
///
/// # Errors
/// [`DbError::NotFound`] for the home.
pub(super) fn list(
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
    let limit = limit_sql(limit);
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
pub(super) fn count(read: &Read<'_>, org: OrgId, id: HomeId) -> Result<u64> {
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
pub(super) fn named(read: &Read<'_>, org: OrgId, id: HomeId, name: GenerationName) -> Result<SnapshotRow> {
    let home = get(read, org, id)?;
    let (at_most, passed) = searched(&home, name);
    let sql = format!(
        "SELECT {COLUMNS} FROM snapshot
         WHERE org = ?1 AND home = ?2 AND generation <= ?3 ORDER BY generation DESC LIMIT 1 OFFSET ?4"
    );
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), id.to_string(), at_most, passed))?;
    let found = rows.next()?.map(row_of).transpose()?;
    meant(&home, name, found)
}

/// Makes a state the home's current snapshot and records it in the journal of the session that holds, or
/// last held, the lease; one transaction. The same root again keeps its generation.
///
/// # Errors
/// [`DbError::Fenced`] for a token from before the home came to its runner; [`DbError::Conflict`] when `base`
/// is from before that, or was never reached; [`DbError::NotFound`].
pub(super) fn publish(tx: &Tx<'_>, org: OrgId, id: HomeId, offer: &Publish) -> Result<Published> {
    let home = get(tx, org, id)?;
    let changed = judge_offer(&home, offer)?;
    if changed {
        let floor = orgs::collect_floor(tx, org)?;
        if offer.epoch < floor {
            return Ok(Published::Collected { floor });
        }
        let loads = rules::loads(tx, org, &home, Size { files: offer.files, bytes: offer.bytes })?;
        if let Some(load) = loads.iter().find(|load| load.is_refused()) {
            let reason = load.reason(id);
            note_over_quota(tx, org, &home, &reason)?;
            return Ok(Published::OverQuota(reason));
        }
        insert(tx, org, id, &offered(&home, offer))?;
        warn(tx, org, &home, &loads)?;
    }
    let generation = if changed { home.generation.next() } else { home.generation };
    if home.unsecured.is_some() {
        clear_unsecured(tx, org, id)?;
    }
    if let Some(session) = home.lease_session {
        let secured = secured(generation, changed, offer);
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

fn warn(tx: &Tx<'_>, org: OrgId, home: &Home, loads: &[Load]) -> Result<()> {
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

/// Makes a state from outside the home's current snapshot. Only while no session acts on the home; late publishes of
/// earlier holders are refused from then on. Sessions that have worked in the home and are not archived are told.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] when the lease is held, `base` is not current, or a collection has
/// passed since the upload began; [`DbError::TooLarge`] when the home may not be so large.
pub(super) fn replace(tx: &Tx<'_>, org: OrgId, id: HomeId, with: &Replacement) -> Result<Generation> {
    let home = get(tx, org, id)?;
    refuse_if_held(&home)?;
    if !with.over_unsecured
        && let Some(session) = home.lease_session
        && is_unsecured(tx, org, session)?
    {
        return Err(not_secured_yet(id, session));
    }
    refuse_if_moved(&home, with.base)?;
    if home.root == Some(with.root) {
        return Ok(home.generation);
    }
    let floor = orgs::collect_floor(tx, org)?;
    if with.epoch.is_some_and(|epoch| epoch < floor) {
        return Err(collected_since(id));
    }
    let loads = rules::loads(tx, org, &home, Size { files: with.files, bytes: with.bytes })?;
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
    insert(tx, org, id, &replacing(generation, with))?;
    clear_unsecured(tx, org, id)?;
    tell_sessions(tx, org, id, with, generation)?;
    Ok(generation)
}

/// [`replace`] with a state that was made from the current one and an earlier snapshot of the same home, whose number
/// `with.from` says. None when a collection has passed since it was begun: it has to be made again.
///
/// # Errors
/// As [`replace`]; [`DbError::NotFound`] also when the snapshot is not kept any more.
fn replace_edited(tx: &Tx<'_>, org: OrgId, id: HomeId, with: &Replacement) -> Result<Option<Generation>> {
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
        journal::append_fenced_elsewhere(tx, org, session, replaced(generation, with))?;
    }
    Ok(())
}

/// Makes the snapshot `name` of a home its current one again, under a new number.
///
/// # Errors
/// As [`named`] and [`replace`]; `base` none stands for whatever is current.
pub(super) fn restore(
    tx: &Tx<'_>,
    org: OrgId,
    id: HomeId,
    name: GenerationName,
    base: Option<Generation>,
    over_unsecured: bool,
) -> Result<(Generation, SnapshotRow)> {
    let from = named(tx, org, id, name)?;
    let with = Replacement { over_unsecured, ..of_snapshot(&from, base, Origin::Restored, None) };
    Ok((replace(tx, org, id, &with)?, from))
}

/// Makes the snapshot `name` of the home `source` the current one of the home `target` of the same org. Nothing is
/// copied: both name the same blocks.
///
/// # Errors
/// As [`named`] and [`replace`].
pub(super) fn fork(
    tx: &Tx<'_>,
    org: OrgId,
    source: HomeId,
    name: GenerationName,
    target: HomeId,
    over_unsecured: bool,
) -> Result<(Generation, SnapshotRow)> {
    let from = named(tx, org, source, name)?;
    let from_home = Some(source).filter(|source| *source != target);
    let with = Replacement { over_unsecured, ..of_snapshot(&from, None, Origin::Forked, from_home) };
    Ok((replace(tx, org, target, &with)?, from))
}
