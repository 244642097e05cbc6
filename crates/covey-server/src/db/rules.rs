//! Rules: which snapshots of a home are kept, and how large homes may be. What a home leaves open is the org's, what
//! the org leaves open has no limit. What does not belong here: what follows from a rule ([`super::snapshots`],
//! [`super::retention`]).

use covey_types::{ByteCount, HomeId, OrgId};
use covey_wire::api::history::{HomeRules, OrgRules};
use rusqlite::Row;

use super::homes::Home;
use super::{DbError, Read, Result, Tx};

/// A home or org that has used up so much of what it may is warned.
pub const WARN_PERCENT: u64 = 90;

/// A limit and what of it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// `bytes`, `files` or `org_bytes`.
    pub limit: &'static str,
    /// Now, with the current snapshot.
    pub before: u64,
    /// With the offered one.
    pub after: u64,
    /// At most.
    pub max: u64,
}

impl Load {
    /// Whether the offered snapshot may not become current. One that is no larger than the current one always may:
    /// a limit that was lowered must not keep a home from becoming smaller.
    pub const fn is_refused(&self) -> bool {
        self.after > self.max && self.after > self.before
    }

    /// Whether this publish comes near the limit and the one before did not.
    pub const fn warns(&self) -> bool {
        self.is_near(self.after) && !self.is_near(self.before)
    }

    const fn is_near(&self, used: u64) -> bool {
        used as u128 * 100 >= self.max as u128 * WARN_PERCENT as u128
    }

    /// Why it is refused, and what to do.
    pub fn reason(&self, home: HomeId) -> String {
        let (what, command) = match self.limit {
            "files" => (
                format!("{home} would have {} files of at most {}", self.after, self.max),
                format!("covey home rules {home} --files-max"),
            ),
            "org_bytes" => (
                format!(
                    "with {home} the homes of this org would have {} of at most {}",
                    ByteCount(self.after),
                    ByteCount(self.max)
                ),
                "covey home rules --org --org-bytes-max".to_owned(),
            ),
            _ => (
                format!("{home} would have {} of at most {}", ByteCount(self.after), ByteCount(self.max)),
                format!("covey home rules {home} --bytes-max"),
            ),
        };
        format!("{what}; delete what is not needed, or raise the limit with `{command}`")
    }
}

fn rules_of(row: &Row<'_>, first: usize) -> Result<HomeRules> {
    let number =
        |at: usize| -> Result<Option<u64>> { Ok(row.get::<_, Option<i64>>(first + at)?.map(|n| n as u64)) };
    Ok(HomeRules {
        keep_newest: number(0)?,
        keep_for_s: number(1)?,
        bytes_max: number(2)?,
        files_max: number(3)?,
    })
}

/// A number that SQLite can hold.
fn stored(name: &str, number: Option<u64>) -> Result<Option<i64>> {
    let too_large = |_| DbError::Invalid(format!("`{name}` is larger than {}", i64::MAX));
    number.map(|number| i64::try_from(number).map_err(too_large)).transpose()
}

/// A home's own rules, and those that hold for it.
///
/// # Errors
/// [`DbError::NotFound`].
pub fn of_home(read: &Read<'_>, org: OrgId, id: HomeId) -> Result<(HomeRules, HomeRules)> {
    let mut statement = read.conn.prepare_cached(
        "SELECT home.keep_newest, home.keep_for_s, home.bytes_max, home.files_max,
                org.keep_newest, org.keep_for_s, org.home_bytes_max, org.home_files_max
         FROM home JOIN org ON org.id = home.org WHERE home.org = ?1 AND home.id = ?2",
    )?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    let Some(row) = rows.next()? else { return Err(DbError::not_found("home", id)) };
    let (own, of_org) = (rules_of(row, 0)?, rules_of(row, 4)?);
    let effective = HomeRules {
        keep_newest: own.keep_newest.or(of_org.keep_newest),
        keep_for_s: own.keep_for_s.or(of_org.keep_for_s),
        bytes_max: own.bytes_max.or(of_org.bytes_max),
        files_max: own.files_max.or(of_org.files_max),
    };
    Ok((own, effective))
}

/// The org's rules and the size of its homes.
///
/// # Errors
/// [`DbError::NotFound`].
pub fn of_org(read: &Read<'_>, org: OrgId) -> Result<OrgRules> {
    let mut statement = read.conn.prepare_cached(
        "SELECT keep_newest, keep_for_s, home_bytes_max, home_files_max, bytes_max FROM org WHERE id = ?1",
    )?;
    let mut rows = statement.query([org.to_string()])?;
    let Some(row) = rows.next()? else { return Err(DbError::not_found("org", org)) };
    let org_bytes_max = row.get::<_, Option<i64>>(4)?.map(|n| n as u64);
    Ok(OrgRules { homes: rules_of(row, 0)?, org_bytes_max, org_bytes: org_bytes(read, org)? })
}

/// Sets a home's own rules; what is none is left to the org.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Invalid`] for a number that is too large.
pub fn set_home(tx: &Tx<'_>, org: OrgId, id: HomeId, rules: &HomeRules) -> Result<()> {
    let changed = tx
        .conn
        .prepare_cached(
            "UPDATE home SET keep_newest = ?3, keep_for_s = ?4, bytes_max = ?5, files_max = ?6
             WHERE org = ?1 AND id = ?2",
        )?
        .execute((
            org.to_string(),
            id.to_string(),
            stored("keep_newest", rules.keep_newest)?,
            stored("keep_for_s", rules.keep_for_s)?,
            stored("bytes_max", rules.bytes_max)?,
            stored("files_max", rules.files_max)?,
        ))?;
    if changed == 0 { Err(DbError::not_found("home", id)) } else { Ok(()) }
}

/// Sets the org's rules.
///
/// # Errors
/// As [`set_home`].
pub fn set_org(tx: &Tx<'_>, org: OrgId, homes: &HomeRules, org_bytes_max: Option<u64>) -> Result<()> {
    let changed = tx
        .conn
        .prepare_cached(
            "UPDATE org SET keep_newest = ?2, keep_for_s = ?3, home_bytes_max = ?4, home_files_max = ?5,
                    bytes_max = ?6
             WHERE id = ?1",
        )?
        .execute((
            org.to_string(),
            stored("keep_newest", homes.keep_newest)?,
            stored("keep_for_s", homes.keep_for_s)?,
            stored("bytes_max", homes.bytes_max)?,
            stored("files_max", homes.files_max)?,
            stored("org_bytes_max", org_bytes_max)?,
        ))?;
    if changed == 0 { Err(DbError::not_found("org", org)) } else { Ok(()) }
}

/// Bytes of the files in all homes of the org, by their current snapshots.
fn org_bytes(read: &Read<'_>, org: OrgId) -> Result<u64> {
    let sum: i64 = read
        .conn
        .prepare_cached(
            "SELECT coalesce(sum(snapshot.bytes), 0) FROM home
             JOIN snapshot ON snapshot.org = home.org AND snapshot.home = home.id
                  AND snapshot.generation = home.generation
             WHERE home.org = ?1",
        )?
        .query_row([org.to_string()], |row| row.get(0))?;
    Ok(sum.max(0) as u64)
}

/// What each limit that holds for the home is used, now and with a snapshot of `files` and `bytes`.
///
/// # Errors
/// When the database refuses.
pub(super) fn loads(read: &Read<'_>, org: OrgId, home: &Home, files: u64, bytes: u64) -> Result<Vec<Load>> {
    let (_, rules) = of_home(read, org, home.id)?;
    let org_bytes_max = of_org_max(read, org)?;
    let (files_now, bytes_now) = current_size(read, org, home)?;
    let mut loads = Vec::new();
    let mut add = |limit, before, after, max: Option<u64>| {
        loads.extend(max.map(|max| Load { limit, before, after, max }));
    };
    add("bytes", bytes_now, bytes, rules.bytes_max);
    add("files", files_now, files, rules.files_max);
    if org_bytes_max.is_some() {
        let all = org_bytes(read, org)?;
        add("org_bytes", all, all.saturating_sub(bytes_now).saturating_add(bytes), org_bytes_max);
    }
    Ok(loads)
}

fn of_org_max(read: &Read<'_>, org: OrgId) -> Result<Option<u64>> {
    let max: Option<i64> = read
        .conn
        .prepare_cached("SELECT bytes_max FROM org WHERE id = ?1")?
        .query_row([org.to_string()], |row| row.get(0))?;
    Ok(max.map(|max| max as u64))
}

fn current_size(read: &Read<'_>, org: OrgId, home: &Home) -> Result<(u64, u64)> {
    let mut statement = read.conn.prepare_cached(
        "SELECT files, bytes FROM snapshot WHERE org = ?1 AND home = ?2 AND generation = ?3",
    )?;
    let mut rows = statement.query((org.to_string(), home.id.to_string(), home.generation.0 as i64))?;
    match rows.next()? {
        Some(row) => Ok((row.get::<_, i64>(0)? as u64, row.get::<_, i64>(1)? as u64)),
        None => Ok((0, 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_refuses_growth_beyond_it_and_warns_once_before() {
        let load = |before, after| Load { limit: "bytes", before, after, max: 100 };
        let table = [
            (0, 89, false, false),
            (0, 90, false, true),
            (90, 95, false, false),
            (95, 100, false, false),
            (95, 101, true, false),
            (300, 300, false, false),
            (300, 200, false, false),
            (300, 301, true, false),
            (0, 101, true, true),
        ];
        for (before, after, refused, warns) in table {
            let load = load(before, after);
            assert_eq!((load.is_refused(), load.warns()), (refused, warns), "{load:?}");
        }
        let none = Load { limit: "bytes", before: 0, after: 1, max: 0 };
        assert!(none.is_refused(), "0 is a limit, not the want of one");
    }
}
