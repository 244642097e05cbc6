//! Snapshots in PostgreSQL.

use async_trait::async_trait;
use covey_harness::record::Body;
use covey_types::{Fault, Generation, HomeId, OrgId, SessionId, Snapshot};
use covey_wire::api::history::GenerationName;
use tokio_postgres::Row;

use super::connection::{
    Connection, Parameter, get as cell, number, number_if_any, printed, printed_if_any, time,
};
use super::homes::{self, Lock, mark_unsecured};
use super::transaction::{look, transact, view};
use super::{Postgres, agents, journal, orgs, rules};
use crate::homes::Home;
use crate::orgs::Orgs;
use crate::page::limit_sql;
use crate::rules::{Load, Size};
use crate::snapshots::{
    ForkTarget, Forked, NewSnapshot, Origin, Publish, Published, Replacement, SnapshotRow, Snapshots,
    TOLD_SESSIONS_MAX, collected_since, judge_offer, kind_and_origin, meant, name_of_fork, not_secured_yet,
    of_snapshot, offered, refuse_if_held, refuse_if_moved, replaced, replacing, searched, secured,
};
use crate::{DbError, Result, now};

#[async_trait]
impl Snapshots for Postgres {
    async fn list_snapshots(
        &self,
        org: OrgId,
        home: HomeId,
        before: Option<Generation>,
        limit: usize,
    ) -> Result<Vec<SnapshotRow>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM snapshot
             WHERE org = $1 AND home = $2 AND ($3::bigint IS NULL OR generation < $3)
             ORDER BY generation DESC LIMIT $4"
        );
        view!(self, "list snapshots", |read| {
            homes::get(read, org, home, Lock::None).await?;
            let parameters: [Parameter<'_>; 4] = [
                &org.to_string(),
                &home.to_string(),
                &before.map(|generation| generation.0 as i64),
                &limit_sql(limit),
            ];
            read.rows(&sql, &parameters).await?.iter().map(row_of).collect()
        })
    }

    async fn count_snapshots(&self, org: OrgId, home: HomeId) -> Result<u64> {
        look!(self, "count snapshots", |read| count(read, org, home).await)
    }

    async fn snapshot(&self, org: OrgId, home: HomeId, name: GenerationName) -> Result<SnapshotRow> {
        view!(self, "find snapshot", |read| {
            let home = homes::get(read, org, home, Lock::None).await?;
            named(read, org, &home, name, "").await
        })
    }

    async fn publish(&self, home: HomeId, offer: &Publish) -> Result<Published> {
        transact!(self, "publish", |tx| {
            let org = homes::org_of(tx, home).await?;
            publish(tx, org, home, offer).await
        })
    }

    async fn replace_home(&self, org: OrgId, home: HomeId, with: &Replacement) -> Result<Generation> {
        transact!(self, "replace home", |tx| {
            let held = orgs_or_home(tx, org, home).await?;
            let home = homes::get(tx, org, home, Lock::Change).await?;
            replace(tx, org, &held, &home, with).await
        })
    }

    async fn check_epoch(&self, org: OrgId, home: HomeId, epoch: u64) -> Result<()> {
        let floor = Orgs::collect_floor(self, org).await?;
        if epoch < floor { Err(collected_since(home)) } else { Ok(()) }
    }

    async fn replace_edited_home(
        &self,
        org: OrgId,
        home: HomeId,
        with: &Replacement,
    ) -> Result<Option<Generation>> {
        transact!(self, "replace edited home", |tx| {
            let held = orgs_or_home(tx, org, home).await?;
            let home = homes::get(tx, org, home, Lock::Change).await?;
            if let Some((_, generation)) = with.from {
                // It may have been forgotten between the look and the edit, by a collection whose epoch the edit already
                // names; as long as its row is there, its blocks are.
                named(tx, org, &home, GenerationName::Number(generation.0), HELD).await?;
            }
            if with.epoch.is_some_and(|epoch| epoch < held.floor) {
                return Ok(None);
            }
            replace(tx, org, &held, &home, with).await.map(Some)
        })
    }

    async fn restore_home(
        &self,
        org: OrgId,
        home: HomeId,
        name: GenerationName,
        base: Option<Generation>,
        over_unsecured: bool,
    ) -> Result<(Generation, SnapshotRow)> {
        transact!(self, "restore home", |tx| {
            let held = orgs_or_home(tx, org, home).await?;
            let home = homes::get(tx, org, home, Lock::Change).await?;
            let from = named(tx, org, &home, name, HELD).await?;
            let with = Replacement { over_unsecured, ..of_snapshot(&from, base, Origin::Restored, None) };
            Ok((replace(tx, org, &held, &home, &with).await?, from))
        })
    }

    async fn fork_home(
        &self,
        org: OrgId,
        source: HomeId,
        name: GenerationName,
        target: &ForkTarget,
        over_unsecured: bool,
    ) -> Result<Forked> {
        transact!(self, "fork home", |tx| {
            let held = orgs_or_home(tx, org, source).await?;
            let agent = match target {
                ForkTarget::Agent(agent) => agents::get(tx, org, *agent).await?,
                ForkTarget::New { name } => {
                    let of = agents::get(tx, org, agents::by_home(tx, org, source).await?).await?;
                    agents::insert(tx, org, &name_of_fork(name.as_deref(), &of.name), &of.config).await?
                }
            };
            // Two forks in opposite directions lock the homes in the same order.
            let mut homes = [source, agent.home];
            homes.sort_unstable();
            for home in homes {
                homes::get(tx, org, home, Lock::Change).await?;
            }
            let source_row = homes::get(tx, org, source, Lock::None).await?;
            let from = named(tx, org, &source_row, name, HELD).await?;
            let other = Some(source).filter(|source| *source != agent.home);
            let with = Replacement { over_unsecured, ..of_snapshot(&from, None, Origin::Forked, other) };
            let home = homes::get(tx, org, agent.home, Lock::Change).await?;
            let generation = replace(tx, org, &held, &home, &with).await?;
            Ok(Forked { agent, generation, from })
        })
    }
}

/// A snapshot that was chosen stays until the transaction ends: who forgets it waits (I8).
const HELD: &str = "FOR KEY SHARE";

const COLUMNS: &str =
    "generation, root, kind, session, step, files, bytes, published_at, origin, from_generation,
     from_home";

fn row_of(row: &Row) -> Result<SnapshotRow> {
    let (kind, origin) = kind_and_origin(cell(row, 2)?, cell(row, 8)?)?;
    Ok(SnapshotRow {
        snapshot: Snapshot {
            generation: Generation(number(row, 0)?),
            root: printed("root", row, 1)?,
            kind,
            step: printed_if_any("step", row, 4)?,
            published_at: time(row, 7)?,
        },
        session: printed_if_any("session", row, 3)?,
        files: number(row, 5)?,
        bytes: number(row, 6)?,
        origin,
        from_generation: number_if_any(row, 9)?.map(Generation),
        from_home: printed_if_any("snapshot's home", row, 10)?,
    })
}

pub(super) async fn count(read: &Connection, org: OrgId, id: HomeId) -> Result<u64> {
    let sql = "SELECT count(*) FROM snapshot WHERE org = $1 AND home = $2";
    let row = read.row(sql, &[&org.to_string(), &id.to_string()]).await?;
    row.as_ref().map_or(Ok(0), |row| number(row, 0))
}

/// The org's row as [`orgs::hold`] holds it; who asks for a home that is not there hears of the home.
async fn orgs_or_home(tx: &Connection, org: OrgId, home: HomeId) -> Result<orgs::Held> {
    match orgs::hold(tx, org).await {
        Err(DbError::NotFound { .. }) => Err(DbError::not_found("home", home)),
        other => other,
    }
}

async fn named(
    read: &Connection,
    org: OrgId,
    home: &Home,
    name: GenerationName,
    lock: &str,
) -> Result<SnapshotRow> {
    let (at_most, passed) = searched(home, name);
    let sql = format!(
        "SELECT {COLUMNS} FROM snapshot
         WHERE org = $1 AND home = $2 AND generation <= $3 ORDER BY generation DESC LIMIT 1 OFFSET $4 {lock}"
    );
    let row = read.row(&sql, &[&org.to_string(), &home.id.to_string(), &at_most, &passed]).await?;
    meant(home, name, row.as_ref().map(row_of).transpose()?)
}

async fn publish(tx: &Connection, org: OrgId, id: HomeId, offer: &Publish) -> Result<Published> {
    let held = orgs_or_home(tx, org, id).await?;
    let home = homes::get(tx, org, id, Lock::Change).await?;
    let changed = judge_offer(&home, offer)?;
    if changed {
        if offer.epoch < held.floor {
            return Ok(Published::Collected { floor: held.floor });
        }
        let size = Size { files: offer.files, bytes: offer.bytes };
        let loads = rules::loads(tx, org, &home, size, held.bytes_max).await?;
        if let Some(load) = loads.iter().find(|load| load.is_refused()) {
            let reason = load.reason(id);
            note_over_quota(tx, org, &home, &reason).await?;
            return Ok(Published::OverQuota(reason));
        }
        insert(tx, org, id, &offered(&home, offer)).await?;
        warn(tx, org, &home, &loads).await?;
    }
    let generation = if changed { home.generation.next() } else { home.generation };
    if home.unsecured.is_some() {
        clear_unsecured(tx, org, id).await?;
    }
    if let Some(session) = home.lease_session {
        journal::append_fenced_elsewhere(tx, org, session, secured(generation, changed, offer)).await?;
    }
    Ok(Published::Current(generation))
}

/// Says in the lease holder's journal that a limit is in the way, once until something is secured again: the runner
/// offers again and again.
async fn note_over_quota(tx: &Connection, org: OrgId, home: &Home, reason: &str) -> Result<()> {
    mark_unsecured(tx, org, home.id, reason).await?;
    let Some(session) = home.lease_session else { return Ok(()) };
    let last = journal::last_of(tx, org, session, &["home.secured", "home.secure_failed"]).await?;
    let is_known = last
        .is_some_and(|record| matches!(record.body, Body::HomeSecureFailed { fault: Fault::TooLarge, .. }));
    if !is_known {
        let failed = Body::HomeSecureFailed { fault: Fault::TooLarge, detail: reason.to_owned() };
        journal::append_fenced_elsewhere(tx, org, session, failed).await?;
    }
    Ok(())
}

async fn warn(tx: &Connection, org: OrgId, home: &Home, loads: &[Load]) -> Result<()> {
    for load in loads.iter().filter(|load| load.warns()) {
        tracing::warn!(home = %home.id, limit = load.limit, used = load.after, max = load.max, "a home comes near its limit");
        if let Some(session) = home.lease_session {
            let limit = load.limit.to_owned();
            let near = Body::HomeNearLimit { limit, used: load.after, max: load.max };
            journal::append_fenced_elsewhere(tx, org, session, near).await?;
        }
    }
    Ok(())
}

async fn clear_unsecured(tx: &Connection, org: OrgId, id: HomeId) -> Result<()> {
    let sql = "UPDATE home SET unsecured_at = NULL, unsecured_reason = NULL WHERE org = $1 AND id = $2";
    tx.execute(sql, &[&org.to_string(), &id.to_string()]).await?;
    Ok(())
}

/// Writes the row and moves the pointer to it.
async fn insert(tx: &Connection, org: OrgId, id: HomeId, row: &NewSnapshot) -> Result<()> {
    let (org, id) = (org.to_string(), id.to_string());
    let (generation, root) = (row.generation.0 as i64, row.root.to_string());
    let sql =
        "INSERT INTO snapshot (org, home, generation, root, kind, session, step, files, bytes, published_at,
                                     origin, from_generation, from_home)
               VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)";
    let parameters: [Parameter<'_>; 13] = [
        &org,
        &id,
        &generation,
        &root,
        &row.kind.as_str(),
        &row.session.map(|session| session.to_string()),
        &row.step.map(|step| step.to_string()),
        &(row.files as i64),
        &(row.bytes as i64),
        &now().unix_ms(),
        &row.origin.as_str(),
        &row.from.map(|(_, generation)| generation.0 as i64),
        &row.from.and_then(|(home, _)| home).map(|home| home.to_string()),
    ];
    tx.execute(sql, &parameters).await?;
    let sql = "UPDATE home SET generation = $3, root = $4 WHERE org = $1 AND id = $2";
    tx.execute(sql, &[&org, &id, &generation, &root]).await?;
    Ok(())
}

/// `home` is locked and as it is now.
async fn replace(
    tx: &Connection,
    org: OrgId,
    held: &orgs::Held,
    home: &Home,
    with: &Replacement,
) -> Result<Generation> {
    refuse_if_held(home)?;
    if !with.over_unsecured
        && let Some(session) = home.lease_session
        && is_unsecured(tx, org, session).await?
    {
        return Err(not_secured_yet(home.id, session));
    }
    refuse_if_moved(home, with.base)?;
    if home.root == Some(with.root) {
        return Ok(home.generation);
    }
    if with.epoch.is_some_and(|epoch| epoch < held.floor) {
        return Err(collected_since(home.id));
    }
    let size = Size { files: with.files, bytes: with.bytes };
    let loads = rules::loads(tx, org, home, size, held.bytes_max).await?;
    if let Some(load) = loads.iter().find(|load| load.is_refused()) {
        return Err(DbError::TooLarge(load.reason(home.id)));
    }
    let (token, generation) = (home.lease_token.next(), home.generation.next());
    let sql = "UPDATE home SET lease_token = $3, lease_session = NULL, lease_runner = NULL, lease_floor = $3,
                      floor_generation = $4
               WHERE org = $1 AND id = $2";
    let parameters: [Parameter<'_>; 4] =
        [&org.to_string(), &home.id.to_string(), &(token.0 as i64), &(generation.0 as i64)];
    tx.execute(sql, &parameters).await?;
    insert(tx, org, home.id, &replacing(generation, with)).await?;
    clear_unsecured(tx, org, home.id).await?;
    tell_sessions(tx, org, home.id, with, generation).await?;
    Ok(generation)
}

/// Whether a call has ended in the session and nothing was secured since.
async fn is_unsecured(tx: &Connection, org: OrgId, session: SessionId) -> Result<bool> {
    let last = journal::last_of(tx, org, session, &["home.secured", "agent.tool_result"]).await?;
    Ok(last.is_some_and(|record| matches!(record.body, Body::ToolResult { substitute: false, .. })))
}

/// Whoever worked in the home believes that it is as it was left.
async fn tell_sessions(
    tx: &Connection,
    org: OrgId,
    id: HomeId,
    with: &Replacement,
    generation: Generation,
) -> Result<()> {
    // Locked in the order of their ids, which is the order in which they are told.
    let sql = "SELECT id FROM session
               WHERE org = $1 AND home = $2 AND home_base IS NOT NULL AND archived_at IS NULL AND status <> 'terminated'
               ORDER BY id DESC LIMIT $3 FOR NO KEY UPDATE";
    for row in tx.rows(sql, &[&org.to_string(), &id.to_string(), &TOLD_SESSIONS_MAX]).await? {
        let session = printed("session", &row, 0)?;
        journal::append_fenced_elsewhere(tx, org, session, replaced(generation, with)).await?;
    }
    Ok(())
}
