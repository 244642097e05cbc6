//! Rules in SQLite.

use async_trait::async_trait;
use covey_types::{HomeId, OrgId};
use covey_wire::api::history::{HomeRules, OrgRules};
use rusqlite::Row;

use super::{DbError, Read, Result, Sqlite, Tx};
use crate::homes::Home;
use crate::rules::{HomeRulesEdit, Load, OrgRulesEdit, Rules, Size, effective, loads_of, stored};

#[async_trait]
impl Rules for Sqlite {
    async fn home_rules(&self, org: OrgId, home: HomeId) -> Result<(HomeRules, HomeRules)> {
        self.read("rules of home", move |read| of_home(read, org, home)).await
    }

    async fn org_rules(&self, org: OrgId) -> Result<OrgRules> {
        self.read("rules of org", move |read| of_org(read, org)).await
    }

    async fn edit_home_rules(
        &self,
        org: OrgId,
        home: HomeId,
        edit: HomeRulesEdit,
    ) -> Result<(HomeRules, HomeRules)> {
        self.write("set rules of home", move |tx| {
            let (own, _) = of_home(tx, org, home)?;
            set_home(tx, org, home, &edit.0(own))?;
            of_home(tx, org, home)
        })
        .await
    }

    async fn edit_org_rules(&self, org: OrgId, edit: OrgRulesEdit) -> Result<OrgRules> {
        self.write("set rules of org", move |tx| {
            let (homes, org_bytes_max) = edit.0(of_org(tx, org)?);
            set_org(tx, org, &homes, org_bytes_max)?;
            of_org(tx, org)
        })
        .await
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

/// A home's own rules, and those that hold for it.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn of_home(read: &Read<'_>, org: OrgId, id: HomeId) -> Result<(HomeRules, HomeRules)> {
    let mut statement = read.conn.prepare_cached(
        "SELECT home.keep_newest, home.keep_for_s, home.bytes_max, home.files_max,
                org.keep_newest, org.keep_for_s, org.home_bytes_max, org.home_files_max
         FROM home JOIN org ON org.id = home.org WHERE home.org = ?1 AND home.id = ?2",
    )?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    let Some(row) = rows.next()? else { return Err(DbError::not_found("home", id)) };
    let (own, of_org) = (rules_of(row, 0)?, rules_of(row, 4)?);
    let effective = effective(&own, &of_org);
    Ok((own, effective))
}

/// The org's rules and the size of its homes.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn of_org(read: &Read<'_>, org: OrgId) -> Result<OrgRules> {
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
pub(super) fn set_home(tx: &Tx<'_>, org: OrgId, id: HomeId, rules: &HomeRules) -> Result<()> {
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
pub(super) fn set_org(tx: &Tx<'_>, org: OrgId, homes: &HomeRules, org_bytes_max: Option<u64>) -> Result<()> {
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
pub(super) fn loads(read: &Read<'_>, org: OrgId, home: &Home, offered: Size) -> Result<Vec<Load>> {
    let (_, rules) = of_home(read, org, home.id)?;
    let org_bytes_max = of_org_max(read, org)?;
    let now = current_size(read, org, home)?;
    let org = match org_bytes_max {
        Some(max) => Some((org_bytes(read, org)?, max)),
        None => None,
    };
    Ok(loads_of(&rules, now, offered, org))
}

fn of_org_max(read: &Read<'_>, org: OrgId) -> Result<Option<u64>> {
    let max: Option<i64> = read
        .conn
        .prepare_cached("SELECT bytes_max FROM org WHERE id = ?1")?
        .query_row([org.to_string()], |row| row.get(0))?;
    Ok(max.map(|max| max as u64))
}

fn current_size(read: &Read<'_>, org: OrgId, home: &Home) -> Result<Size> {
    let mut statement = read.conn.prepare_cached(
        "SELECT files, bytes FROM snapshot WHERE org = ?1 AND home = ?2 AND generation = ?3",
    )?;
    let mut rows = statement.query((org.to_string(), home.id.to_string(), home.generation.0 as i64))?;
    match rows.next()? {
        Some(row) => Ok(Size { files: row.get::<_, i64>(0)? as u64, bytes: row.get::<_, i64>(1)? as u64 }),
        None => Ok(Size { files: 0, bytes: 0 }),
    }
}
