//! Orgs in PostgreSQL.

use std::time::Duration;

use async_trait::async_trait;
use covey_types::{OrgId, Timestamp};
use uuid::Uuid;

use super::Postgres;
use super::connection::{Connection, document, get as cell, number, printed, time};
use super::transaction::{look, transact};
use crate::orgs::{DEFAULT_ORG_NAME, Deleted, LastCollection, Orgs};
use crate::{DbError, Result, now};

#[async_trait]
impl Orgs for Postgres {
    async fn ensure_default_org(&self) -> Result<OrgId> {
        transact!(self, "make the default org", |tx| ensure_default(tx).await)
    }

    async fn create_org(&self, name: &str) -> Result<OrgId> {
        let org = OrgId::from_uuid(Uuid::now_v7());
        transact!(self, "create org", |tx| {
            let sql = "INSERT INTO org (id, name, created_at) VALUES ($1, $2, $3)";
            tx.execute(sql, &[&org.to_string(), &name, &now().unix_ms()]).await?;
            Ok(org)
        })
    }

    async fn org_by_name(&self, name: &str) -> Result<Option<OrgId>> {
        look!(self, "find org", |read| {
            let row = read.row("SELECT id FROM org WHERE name = $1", &[&name]).await?;
            row.as_ref().map(|row| printed("org", row, 0)).transpose()
        })
    }

    async fn collect_floor(&self, org: OrgId) -> Result<u64> {
        look!(self, "read floor", |read| {
            let row = read.row("SELECT collect_floor FROM org WHERE id = $1", &[&org.to_string()]).await?;
            row.as_ref().map_or_else(|| Err(DbError::not_found("org", org)), |row| number(row, 0))
        })
    }

    async fn raise_collect_floor(&self, org: OrgId, floor: u64) -> Result<()> {
        // The row's lock waits for publishes under way, which share it ([`hold`]): what they name is seen by who reads
        // the roots after this.
        let sql = "UPDATE org SET collect_floor = greatest(collect_floor, $2) WHERE id = $1";
        transact!(self, "raise floor", |tx| {
            tx.execute(sql, &[&org.to_string(), &i64::try_from(floor).unwrap_or(i64::MAX)]).await?;
            Ok(())
        })
    }

    async fn note_collected(&self, org: OrgId, report: &str) -> Result<()> {
        let sql = "UPDATE org SET collected_at = $2, collect_report = $3 WHERE id = $1";
        transact!(self, "collected", |tx| {
            tx.execute(sql, &[&org.to_string(), &now().unix_ms(), &report]).await?;
            Ok(())
        })
    }

    async fn last_collection(&self, org: OrgId) -> Result<Option<LastCollection>> {
        let sql = "SELECT collected_at, collect_report FROM org
                   WHERE id = $1 AND collected_at IS NOT NULL AND collect_report IS NOT NULL";
        look!(self, "last collection", |read| {
            let Some(row) = read.row(sql, &[&org.to_string()]).await? else { return Ok(None) };
            Ok(Some(LastCollection { at: time(&row, 0)?, report: document("collection report", &row, 1)? }))
        })
    }

    async fn orgs_to_collect(&self, now: Timestamp, interval: Duration) -> Result<Vec<OrgId>> {
        let interval = i64::try_from(interval.as_millis()).unwrap_or(i64::MAX);
        let until = now.unix_ms().saturating_sub(interval);
        look!(self, "collections due", |read| {
            let sql = "SELECT id FROM org WHERE coalesce(collected_at, created_at) <= $1";
            read.rows(sql, &[&until]).await?.iter().map(|row| printed("org", row, 0)).collect()
        })
    }

    async fn all_orgs(&self) -> Result<Vec<OrgId>> {
        look!(self, "orgs", |read| {
            read.rows("SELECT id FROM org", &[]).await?.iter().map(|row| printed("org", row, 0)).collect()
        })
    }

    async fn delete_org(&self, org: OrgId) -> Result<Deleted> {
        transact!(self, "delete org", |tx| delete(tx, org).await)
    }
}

pub(super) async fn ensure_default(tx: &Connection) -> Result<OrgId> {
    let fresh = OrgId::from_uuid(Uuid::now_v7()).to_string();
    let sql = "INSERT INTO org (id, name, created_at) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING";
    tx.execute(sql, &[&fresh, &DEFAULT_ORG_NAME, &now().unix_ms()]).await?;
    let row = tx.row("SELECT id FROM org WHERE name = $1", &[&DEFAULT_ORG_NAME]).await?;
    row.as_ref()
        .map_or_else(|| Err(DbError::not_found("org", DEFAULT_ORG_NAME)), |row| printed("org", row, 0))
}

/// What of an org decides on a publish.
pub(super) struct Held {
    pub(super) floor: u64,
    /// Bytes of all its homes, at most.
    pub(super) bytes_max: Option<u64>,
}

/// Reads the floor so that it cannot be raised before the transaction ends (I8), and lets only one home of an org with
/// a limit for all of them grow at a time.
pub(super) async fn hold(tx: &Connection, org: OrgId) -> Result<Held> {
    let id = org.to_string();
    let sql = "SELECT bytes_max IS NOT NULL FROM org WHERE id = $1";
    let has_limit: bool = tx.row(sql, &[&id]).await?.map_or(Ok(false), |row| cell(&row, 0))?;
    // Chosen beforehand: two that share the row and both want it alone would wait for each other. A limit that is set
    // between the two statements holds from the next publish on.
    let lock = if has_limit { "FOR NO KEY UPDATE" } else { "FOR SHARE" };
    let sql = format!("SELECT collect_floor, bytes_max FROM org WHERE id = $1 {lock}");
    let Some(row) = tx.row(&sql, &[&id]).await? else { return Err(DbError::not_found("org", org)) };
    Ok(Held { floor: number(&row, 0)?, bytes_max: super::connection::number_if_any(&row, 1)? })
}

async fn delete(tx: &Connection, org: OrgId) -> Result<Deleted> {
    let org = org.to_string();
    let was_there = tx.row("SELECT id FROM org WHERE id = $1 FOR UPDATE", &[&org]).await?.is_some();
    let mut homes = Vec::new();
    for row in tx.rows("SELECT id FROM home WHERE org = $1 ORDER BY id", &[&org]).await? {
        homes.push(printed("home", &row, 0)?);
    }
    tx.execute("DELETE FROM journal WHERE org = $1", &[&org]).await?;
    let sessions = tx.execute("DELETE FROM session WHERE org = $1", &[&org]).await?;
    tx.execute("DELETE FROM agent_version WHERE org = $1", &[&org]).await?;
    let agents = tx.execute("DELETE FROM agent WHERE org = $1", &[&org]).await?;
    let snapshots = tx.execute("DELETE FROM snapshot WHERE org = $1", &[&org]).await?;
    for sql in [
        "DELETE FROM deleted_home WHERE org = $1",
        "DELETE FROM home WHERE org = $1",
        "DELETE FROM environment WHERE org = $1",
        "DELETE FROM runner WHERE org = $1",
        "DELETE FROM token WHERE org = $1",
        "DELETE FROM store WHERE org = $1",
        "DELETE FROM org WHERE id = $1",
    ] {
        tx.execute(sql, &[&org]).await?;
    }
    Ok(Deleted { was_there, agents, sessions, snapshots, homes })
}
