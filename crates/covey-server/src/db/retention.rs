//! Which snapshots of a home are kept, and why. What nothing keeps goes with the next collection, never before.
//!
//! Kept are: the current one; the one that each session which is not archived began from, and the last that it made
//! (so that what a session did can be told and taken back); the newest ones and the younger ones of the home's rules.

use std::collections::BTreeMap;

use covey_types::{Generation, HomeId, OrgId, RootHash, Timestamp};

use super::{Page, Read, Result, Tx, homes, parsed, rules};

/// What keeps a snapshot; the first of several that holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptBy {
    /// It is the home's current one.
    Current,
    /// A session that is not archived began from it or left it.
    Session,
    /// The rule about the newest ones.
    Newest,
    /// The rule about the younger ones.
    Age,
}

impl KeptBy {
    /// As the API says it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Session => "session",
            Self::Newest => "newest",
            Self::Age => "age",
        }
    }
}

/// The snapshots of a home that something keeps at the time `now`.
///
/// # Errors
/// [`super::DbError::NotFound`].
pub fn kept(read: &Read<'_>, org: OrgId, id: HomeId, now: Timestamp) -> Result<BTreeMap<Generation, KeptBy>> {
    let home = homes::get(read, org, id)?;
    let (_, rules) = rules::of_home(read, org, id)?;
    let sessions = of_sessions(read, org, id)?;
    let oldest_ms = rules.keep_for_s.map(|seconds| {
        now.unix_ms().saturating_sub(i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1000))
    });
    let mut statement = read.conn.prepare_cached(
        "SELECT generation, published_at FROM snapshot WHERE org = ?1 AND home = ?2 ORDER BY generation DESC",
    )?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    let mut kept = BTreeMap::new();
    let mut newer = 0;
    while let Some(row) = rows.next()? {
        let (generation, published_ms) = (Generation(row.get::<_, i64>(0)? as u64), row.get::<_, i64>(1)?);
        let why = if generation == home.generation {
            Some(KeptBy::Current)
        } else if sessions.contains(&generation) {
            Some(KeptBy::Session)
        } else if rules.keep_newest.is_some_and(|count| newer < count) {
            Some(KeptBy::Newest)
        } else if oldest_ms.is_some_and(|oldest| published_ms >= oldest) {
            Some(KeptBy::Age)
        } else {
            None
        };
        kept.extend(why.map(|why| (generation, why)));
        newer += 1;
    }
    Ok(kept)
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
pub fn forget(tx: &Tx<'_>, org: OrgId, id: HomeId) -> Result<u64> {
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
pub fn homes_of(read: &Read<'_>, org: OrgId) -> Result<Vec<HomeId>> {
    let mut found = Vec::new();
    let mut page = Page { after: None, limit: super::PAGE_ROWS_MAX, order: super::Order::Ascending };
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
pub fn roots(
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
pub fn kept_roots(read: &Read<'_>, org: OrgId, now: Timestamp) -> Result<Vec<RootHash>> {
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
