//! What is kept of homes, in PostgreSQL.

use std::collections::BTreeMap;

use async_trait::async_trait;
use covey_types::{Generation, HomeId, OrgId, RootHash, Timestamp};

use super::connection::{Connection, get as cell, number, number_if_any, printed};
use super::homes::{self, Lock};
use super::transaction::{look, transact, view};
use super::{Postgres, rules};
use crate::retention::{KeptBy, Retention, kept_of};
use crate::{Result, now};

#[async_trait]
impl Retention for Postgres {
    async fn kept_snapshots(
        &self,
        org: OrgId,
        home: HomeId,
        now: Timestamp,
    ) -> Result<BTreeMap<Generation, KeptBy>> {
        view!(self, "kept snapshots", |read| kept(read, org, home, now, Lock::None).await)
    }

    async fn homes_of_org(&self, org: OrgId) -> Result<Vec<HomeId>> {
        look!(self, "homes", |read| homes_of(read, org).await)
    }

    async fn forget_snapshots(&self, org: OrgId, homes: &[HomeId]) -> Result<u64> {
        transact!(self, "forget snapshots", |tx| {
            let mut forgotten = 0;
            for home in homes {
                forgotten += forget(tx, org, *home).await?;
            }
            Ok(forgotten)
        })
    }

    async fn forgettable_snapshots(&self, org: OrgId, now: Timestamp) -> Result<u64> {
        view!(self, "snapshots to forget", |read| {
            let mut count = 0;
            for home in homes_of(read, org).await? {
                let kept = kept(read, org, home, now, Lock::None).await?.len() as u64;
                count += super::snapshots::count(read, org, home).await?.saturating_sub(kept);
            }
            Ok(count)
        })
    }

    async fn snapshot_roots(
        &self,
        org: OrgId,
        only: Option<HomeId>,
        except: Option<HomeId>,
    ) -> Result<Vec<RootHash>> {
        let text = |id: Option<HomeId>| id.map(|id| id.to_string());
        let sql = "SELECT DISTINCT root FROM snapshot
                   WHERE org = $1 AND ($2::text IS NULL OR home = $2) AND ($3::text IS NULL OR home <> $3)";
        look!(self, "roots", |read| {
            let rows = read.rows(sql, &[&org.to_string(), &text(only), &text(except)]).await?;
            rows.iter().map(|row| printed("root", row, 0)).collect()
        })
    }

    async fn kept_roots(&self, org: OrgId, now: Timestamp) -> Result<Vec<RootHash>> {
        let sql = "SELECT generation, root FROM snapshot WHERE org = $1 AND home = $2";
        view!(self, "kept roots", |read| {
            let mut roots = Vec::new();
            for home in homes_of(read, org).await? {
                let kept = kept(read, org, home, now, Lock::None).await?;
                for row in read.rows(sql, &[&org.to_string(), &home.to_string()]).await? {
                    if kept.contains_key(&Generation(number(&row, 0)?)) {
                        roots.push(printed("root", &row, 1)?);
                    }
                }
            }
            roots.sort_unstable();
            roots.dedup();
            Ok(roots)
        })
    }
}

async fn homes_of(read: &Connection, org: OrgId) -> Result<Vec<HomeId>> {
    let rows = read.rows("SELECT id FROM home WHERE org = $1 ORDER BY id", &[&org.to_string()]).await?;
    rows.iter().map(|row| printed("home", row, 0)).collect()
}

async fn kept(
    read: &Connection,
    org: OrgId,
    id: HomeId,
    now: Timestamp,
    lock: Lock,
) -> Result<BTreeMap<Generation, KeptBy>> {
    let home = homes::get(read, org, id, lock).await?;
    let (_, rules) = rules::of_home(read, org, id).await?;
    let (org, id) = (org.to_string(), id.to_string());
    let sql = "SELECT home_base, (SELECT max(generation) FROM snapshot
                                  WHERE snapshot.org = session.org AND snapshot.home = session.home
                                        AND snapshot.session = session.id)
               FROM session WHERE org = $1 AND home = $2 AND archived_at IS NULL";
    let mut of_sessions = Vec::new();
    for row in read.rows(sql, &[&org, &id]).await? {
        for at in 0..2 {
            of_sessions.extend(number_if_any(&row, at)?.map(Generation));
        }
    }
    let sql =
        "SELECT generation, published_at FROM snapshot WHERE org = $1 AND home = $2 ORDER BY generation DESC";
    let mut snapshots = Vec::new();
    for row in read.rows(sql, &[&org, &id]).await? {
        snapshots.push((Generation(number(&row, 0)?), cell::<i64>(&row, 1)?));
    }
    Ok(kept_of(home.generation, &of_sessions, &rules, now, snapshots))
}

/// With the home's row locked, so that no publish, claim or restore changes what is kept before the rows are gone.
async fn forget(tx: &Connection, org: OrgId, id: HomeId) -> Result<u64> {
    let kept = match kept(tx, org, id, now(), Lock::Change).await {
        // Deleted since the list was made.
        Err(crate::DbError::NotFound { .. }) => return Ok(0),
        other => other?,
    };
    let kept: Vec<i64> = kept.keys().map(|generation| generation.0 as i64).collect();
    // What was published under the lock is in `kept`; a restore or fork that reads a row holds it (`snapshots::held`),
    // and this waits for it.
    let sql = "DELETE FROM snapshot WHERE org = $1 AND home = $2 AND generation <> ALL($3::bigint[])";
    tx.execute(sql, &[&org.to_string(), &id.to_string(), &kept]).await
}
