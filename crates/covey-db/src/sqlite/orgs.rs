//! Orgs in SQLite.

use std::time::Duration;

use async_trait::async_trait;
use covey_types::{OrgId, Timestamp};
use rusqlite::OptionalExtension;

use super::{Read, Result, Sqlite, Tx, parsed};
use crate::orgs::{DEFAULT_ORG_NAME, Deleted, LastCollection, Orgs};

#[async_trait]
impl Orgs for Sqlite {
    async fn ensure_default_org(&self) -> Result<OrgId> {
        self.write("make the default org", ensure_default).await
    }

    async fn create_org(&self, name: &str) -> Result<OrgId> {
        let name = name.to_owned();
        self.write("create org", move |tx| insert(tx, &name)).await
    }

    async fn org_by_name(&self, name: &str) -> Result<Option<OrgId>> {
        let name = name.to_owned();
        self.read("find org", move |read| by_name(read, &name)).await
    }

    async fn collect_floor(&self, org: OrgId) -> Result<u64> {
        self.read("read floor", move |read| collect_floor(read, org)).await
    }

    async fn raise_collect_floor(&self, org: OrgId, floor: u64) -> Result<()> {
        self.write("raise floor", move |tx| raise_collect_floor(tx, org, floor)).await
    }

    async fn note_collected(&self, org: OrgId, report: &str) -> Result<()> {
        let report = report.to_owned();
        self.write("collected", move |tx| note_collected(tx, org, &report)).await
    }

    async fn last_collection(&self, org: OrgId) -> Result<Option<LastCollection>> {
        self.read("last collection", move |read| last_collection(read, org)).await
    }

    async fn orgs_to_collect(&self, now: Timestamp, interval: Duration) -> Result<Vec<OrgId>> {
        self.read("collections due", move |read| due(read, now, interval)).await
    }

    async fn all_orgs(&self) -> Result<Vec<OrgId>> {
        self.read("orgs", all).await
    }

    async fn delete_org(&self, org: OrgId) -> Result<Deleted> {
        self.write("delete org", move |tx| delete(tx, org)).await
    }
}

/// Returns the org named [`DEFAULT_ORG_NAME`], created when it does not exist.
///
/// # Errors
/// When the database refuses.
pub(super) fn ensure_default(tx: &Tx<'_>) -> Result<OrgId> {
    if let Some(org) = by_name(tx, DEFAULT_ORG_NAME)? {
        return Ok(org);
    }
    insert(tx, DEFAULT_ORG_NAME)
}

/// Creates an org.
///
/// # Errors
/// When the name is taken, or the database refuses.
pub(super) fn insert(tx: &Tx<'_>, name: &str) -> Result<OrgId> {
    let org = OrgId::from_uuid(tx.fresh_uuid());
    tx.conn.prepare_cached("INSERT INTO org (id, name, created_at) VALUES (?1, ?2, ?3)")?.execute((
        org.to_string(),
        name,
        tx.now().unix_ms(),
    ))?;
    Ok(org)
}

/// Finds an org by its name.
///
/// # Errors
/// When the database refuses.
pub(super) fn by_name(read: &Read<'_>, name: &str) -> Result<Option<OrgId>> {
    let id: Option<String> = read
        .conn
        .prepare_cached("SELECT id FROM org WHERE name = ?1")?
        .query_row([name], |row| row.get(0))
        .optional()?;
    id.map(|id| parsed("org", &id)).transpose()
}

/// The least epoch that a publish may come from: everything that an earlier upload relied on may have been collected.
///
/// # Errors
/// [`super::DbError::NotFound`].
pub(super) fn collect_floor(read: &Read<'_>, org: OrgId) -> Result<u64> {
    let floor: Option<i64> = read
        .conn
        .prepare_cached("SELECT collect_floor FROM org WHERE id = ?1")?
        .query_row([org.to_string()], |row| row.get(0))
        .optional()?;
    floor.map(|floor| floor as u64).ok_or_else(|| super::DbError::not_found("org", org))
}

/// Refuses publishes from epochs below `floor` from now on; a floor never falls.
///
/// # Errors
/// When the database refuses.
pub(super) fn raise_collect_floor(tx: &Tx<'_>, org: OrgId, floor: u64) -> Result<()> {
    tx.conn
        .prepare_cached("UPDATE org SET collect_floor = max(collect_floor, ?2) WHERE id = ?1")?
        .execute((org.to_string(), i64::try_from(floor).unwrap_or(i64::MAX)))?;
    Ok(())
}

/// Notes that a collection has ended.
///
/// # Errors
/// When the database refuses.
pub(super) fn note_collected(tx: &Tx<'_>, org: OrgId, report: &str) -> Result<()> {
    tx.conn
        .prepare_cached("UPDATE org SET collected_at = ?2, collect_report = ?3 WHERE id = ?1")?
        .execute((org.to_string(), tx.now().unix_ms(), report))?;
    Ok(())
}

/// The last collection that ended well; none before the first.
///
/// # Errors
/// When the database refuses.
pub(super) fn last_collection(read: &Read<'_>, org: OrgId) -> Result<Option<LastCollection>> {
    let row: Option<(Option<i64>, Option<String>)> = read
        .conn
        .prepare_cached("SELECT collected_at, collect_report FROM org WHERE id = ?1")?
        .query_row([org.to_string()], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((Some(at), Some(report))) = row else { return Ok(None) };
    let report = super::parsed_json("collection report", &report)?;
    Ok(Some(LastCollection { at: Timestamp::from_unix_ms(at), report }))
}

/// Orgs whose last collection ended `interval` before `now` or earlier. For one that had none, what counts is when
/// it was created: a server that is started again and again still comes to collect.
///
/// # Errors
/// When the database refuses.
pub(super) fn due(read: &Read<'_>, now: Timestamp, interval: Duration) -> Result<Vec<OrgId>> {
    let interval = i64::try_from(interval.as_millis()).unwrap_or(i64::MAX);
    let mut statement =
        read.conn.prepare_cached("SELECT id FROM org WHERE coalesce(collected_at, created_at) <= ?1")?;
    let mut rows = statement.query([now.unix_ms().saturating_sub(interval)])?;
    let mut orgs = Vec::new();
    while let Some(row) = rows.next()? {
        orgs.push(parsed("org", &row.get::<_, String>(0)?)?);
    }
    Ok(orgs)
}

/// Every org, in no order.
///
/// # Errors
/// When the database refuses.
pub(super) fn all(read: &Read<'_>) -> Result<Vec<OrgId>> {
    due(read, Timestamp::from_unix_ms(i64::MAX), Duration::ZERO)
}

/// Deletes every row of an org. Nobody may drive its sessions: for a process that has the database for itself. Its blocks
/// are its caller's business.
///
/// # Errors
/// When the database refuses.
pub(super) fn delete(tx: &Tx<'_>, org: OrgId) -> Result<Deleted> {
    let homes = super::retention::homes_of(tx, org)?;
    let org = org.to_string();
    let gone = |sql: &str| -> Result<u64> { Ok(tx.conn.prepare_cached(sql)?.execute([&org])? as u64) };
    gone("DELETE FROM journal WHERE org = ?1")?;
    let sessions = gone("DELETE FROM session WHERE org = ?1")?;
    gone("DELETE FROM agent_version WHERE org = ?1")?;
    let agents = gone("DELETE FROM agent WHERE org = ?1")?;
    let snapshots = gone("DELETE FROM snapshot WHERE org = ?1")?;
    for sql in [
        "DELETE FROM deleted_home WHERE org = ?1",
        "DELETE FROM home WHERE org = ?1",
        "DELETE FROM environment WHERE org = ?1",
        "DELETE FROM runner WHERE org = ?1",
        "DELETE FROM token WHERE org = ?1",
        "DELETE FROM store WHERE org = ?1",
    ] {
        gone(sql)?;
    }
    let was_there = gone("DELETE FROM org WHERE id = ?1")? > 0;
    Ok(Deleted { was_there, agents, sessions, snapshots, homes })
}
