//! What is kept of homes, in SQLite.

use std::collections::BTreeMap;

use async_trait::async_trait;
use covey_types::{Generation, HomeId, OrgId, RootHash, Timestamp};

use super::{DbError, Order, PAGE_ROWS_MAX, Page, Read, Result, Sqlite, Tx, homes, parsed, rules, snapshots};
use crate::retention::{KeptBy, Retention, kept_of};

#[async_trait]
impl Retention for Sqlite {
    async fn kept_snapshots(
        &self,
        org: OrgId,
        home: HomeId,
        now: Timestamp,
    ) -> Result<BTreeMap<Generation, KeptBy>> {
        self.read("kept snapshots", move |read| kept(read, org, home, now)).await
    }

    async fn homes_of_org(&self, org: OrgId) -> Result<Vec<HomeId>> {
        self.read("homes", move |read| homes_of(read, org)).await
    }

    async fn forget_snapshots(&self, org: OrgId, homes: &[HomeId]) -> Result<u64> {
        let homes = homes.to_vec();
        self.write("forget snapshots", move |tx| {
            let forgotten = homes.iter().map(|home| match forget(tx, org, *home) {
                // Deleted since the homes were listed.
                Err(DbError::NotFound { .. }) => Ok(0),
                other => other,
            });
            forgotten.sum()
        })
        .await
    }

    async fn forgettable_snapshots(&self, org: OrgId, now: Timestamp) -> Result<u64> {
        self.read("snapshots to forget", move |read| {
            let mut count = 0;
            for home in homes_of(read, org)? {
                let kept = kept(read, org, home, now)?.len() as u64;
                count += snapshots::count(read, org, home)?.saturating_sub(kept);
            }
            Ok(count)
        })
        .await
    }

    async fn snapshot_roots(
        &self,
        org: OrgId,
        only: Option<HomeId>,
        except: Option<HomeId>,
    ) -> Result<Vec<RootHash>> {
        self.read("roots", move |read| roots(read, org, only, except)).await
    }

    async fn kept_roots(&self, org: OrgId, now: Timestamp) -> Result<Vec<RootHash>> {
        self.read("kept roots", move |read| kept_roots(read, org, now)).await
    }
}

/// The snapshots of a home that something keeps at the time `now`.
///
/// # Errors
/// [`super::DbError::NotFound`].
pub(super) fn kept(
    read: &Read<'_>,
    org: OrgId,
    id: HomeId,
    now: Timestamp,
) -> Result<BTreeMap<Generation, KeptBy>> {
    let home = homes::get(read, org, id)?;
    let (_, rules) = rules::of_home(read, org, id)?;
    let sessions = of_sessions(read, org, id)?;
    let mut statement = read.conn.prepare_cached(
        "SELECT generation, published_at FROM snapshot WHERE org = ?1 AND home = ?2 ORDER BY generation DESC",
    )?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    let mut snapshots = Vec::new();
    while let Some(row) = rows.next()? {
        snapshots.push((Generation(row.get::<_, i64>(0)? as u64), row.get::<_, i64>(1)?));
    }
    Ok(kept_of(home.generation, &sessions, &rules, now, snapshots))
}

/// Where sessions that are not archived began in this home, and what they left.
fn of_sessions(read: &Read<'_>, org: OrgId, id: HomeId) -> Result<Vec<Generation>> {
    let mut statement = read.conn.prepare_cached(
        "SELECT home_base, (SELECT max(generation) FROM snapshot
                            WHERE snapshot.org = session.org AND snapshot.home = session.home
                                  AND snapshot.session = session.id)
         FROM session WHERE org = ?1 AND home = ?2 AND archived_at IS NULL",
    )?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        for at in 0..2 {
            found.extend(row.get::<_, Option<i64>>(at)?.map(|generation| Generation(generation as u64)));
        }
    }
    Ok(found)
}

/// Forgets the snapshots of a home that nothing keeps; tells how many went. Their blocks stay until they are collected.
///
/// # Errors
/// [`super::DbError::NotFound`].
pub(super) fn forget(tx: &Tx<'_>, org: OrgId, id: HomeId) -> Result<u64> {
    let kept = kept(tx, org, id, tx.now())?;
    let mut forgotten = 0;
    for generation in generations(tx, org, id)? {
        if !kept.contains_key(&generation) {
            forgotten += tx
                .conn
                .prepare_cached("DELETE FROM snapshot WHERE org = ?1 AND home = ?2 AND generation = ?3")?
                .execute((org.to_string(), id.to_string(), generation.0 as i64))?;
        }
    }
    Ok(forgotten as u64)
}

fn generations(read: &Read<'_>, org: OrgId, id: HomeId) -> Result<Vec<Generation>> {
    let mut statement =
        read.conn.prepare_cached("SELECT generation FROM snapshot WHERE org = ?1 AND home = ?2")?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(Generation(row.get::<_, i64>(0)? as u64));
    }
    Ok(found)
}

/// Homes of the org, in no order.
///
/// # Errors
/// When the database refuses.
pub(super) fn homes_of(read: &Read<'_>, org: OrgId) -> Result<Vec<HomeId>> {
    let mut found = Vec::new();
    let mut page = Page { after: None, limit: PAGE_ROWS_MAX, order: Order::Ascending };
    loop {
        let homes = homes::list(read, org, &page)?;
        let Some(last) = homes.last() else { return Ok(found) };
        page.after = Some(last.id);
        found.extend(homes.iter().map(|home| home.id));
    }
}

/// Roots of the org's snapshots: those of one home, or without one, of all but `except`.
///
/// # Errors
/// When the database refuses.
pub(super) fn roots(
    read: &Read<'_>,
    org: OrgId,
    only: Option<HomeId>,
    except: Option<HomeId>,
) -> Result<Vec<RootHash>> {
    let mut statement = read.conn.prepare_cached(
        "SELECT DISTINCT root FROM snapshot
         WHERE org = ?1 AND (?2 IS NULL OR home = ?2) AND (?3 IS NULL OR home <> ?3)",
    )?;
    let text = |id: Option<HomeId>| id.map(|id| id.to_string());
    let mut rows = statement.query((org.to_string(), text(only), text(except)))?;
    let mut roots = Vec::new();
    while let Some(row) = rows.next()? {
        roots.push(parsed("root", &row.get::<_, String>(0)?)?);
    }
    Ok(roots)
}

/// Roots of the snapshots of all homes of the org that something keeps at the time `now`.
///
/// # Errors
/// When the database refuses.
pub(super) fn kept_roots(read: &Read<'_>, org: OrgId, now: Timestamp) -> Result<Vec<RootHash>> {
    let mut roots = Vec::new();
    for home in homes_of(read, org)? {
        let kept = kept(read, org, home, now)?;
        let mut statement =
            read.conn.prepare_cached("SELECT generation, root FROM snapshot WHERE org = ?1 AND home = ?2")?;
        let mut rows = statement.query((org.to_string(), home.to_string()))?;
        while let Some(row) = rows.next()? {
            if kept.contains_key(&Generation(row.get::<_, i64>(0)? as u64)) {
                roots.push(parsed("root", &row.get::<_, String>(1)?)?);
            }
        }
    }
    roots.sort_unstable();
    roots.dedup();
    Ok(roots)
}
