//! Rules in PostgreSQL.

use async_trait::async_trait;
use covey_types::{HomeId, OrgId};
use covey_wire::api::history::{HomeRules, OrgRules};
use tokio_postgres::Row;

use super::Postgres;
use super::connection::{Connection, Parameter, get as cell, number, number_if_any};
use super::transaction::{look, transact, view};
use crate::homes::Home;
use crate::rules::{HomeRulesEdit, Load, OrgRulesEdit, Rules, Size, effective, loads_of, stored};
use crate::{DbError, Result};

#[async_trait]
impl Rules for Postgres {
    async fn home_rules(&self, org: OrgId, home: HomeId) -> Result<(HomeRules, HomeRules)> {
        look!(self, "rules of home", |read| of_home(read, org, home).await)
    }

    async fn org_rules(&self, org: OrgId) -> Result<OrgRules> {
        view!(self, "rules of org", |read| of_org(read, org).await)
    }

    async fn edit_home_rules(
        &self,
        org: OrgId,
        home: HomeId,
        edit: HomeRulesEdit,
    ) -> Result<(HomeRules, HomeRules)> {
        let sql = "UPDATE home SET keep_newest = $3, keep_for_s = $4, bytes_max = $5, files_max = $6
                   WHERE org = $1 AND id = $2";
        transact!(self, "set rules of home", |tx| {
            super::homes::get(tx, org, home, super::homes::Lock::Change).await?;
            let (own, _) = of_home(tx, org, home).await?;
            let rules = edit.0(own);
            let parameters: [Parameter<'_>; 6] = [
                &org.to_string(),
                &home.to_string(),
                &stored("keep_newest", rules.keep_newest)?,
                &stored("keep_for_s", rules.keep_for_s)?,
                &stored("bytes_max", rules.bytes_max)?,
                &stored("files_max", rules.files_max)?,
            ];
            tx.execute(sql, &parameters).await?;
            of_home(tx, org, home).await
        })
    }

    async fn edit_org_rules(&self, org: OrgId, edit: OrgRulesEdit) -> Result<OrgRules> {
        let sql =
            "UPDATE org SET keep_newest = $2, keep_for_s = $3, home_bytes_max = $4, home_files_max = $5,
                          bytes_max = $6
                   WHERE id = $1";
        transact!(self, "set rules of org", |tx| {
            tx.row("SELECT id FROM org WHERE id = $1 FOR NO KEY UPDATE", &[&org.to_string()]).await?;
            let (homes, org_bytes_max) = edit.0(of_org(tx, org).await?);
            let parameters: [Parameter<'_>; 6] = [
                &org.to_string(),
                &stored("keep_newest", homes.keep_newest)?,
                &stored("keep_for_s", homes.keep_for_s)?,
                &stored("bytes_max", homes.bytes_max)?,
                &stored("files_max", homes.files_max)?,
                &stored("org_bytes_max", org_bytes_max)?,
            ];
            tx.execute(sql, &parameters).await?;
            of_org(tx, org).await
        })
    }
}

fn rules_of(row: &Row, first: usize) -> Result<HomeRules> {
    Ok(HomeRules {
        keep_newest: number_if_any(row, first)?,
        keep_for_s: number_if_any(row, first + 1)?,
        bytes_max: number_if_any(row, first + 2)?,
        files_max: number_if_any(row, first + 3)?,
    })
}

pub(super) async fn of_home(read: &Connection, org: OrgId, id: HomeId) -> Result<(HomeRules, HomeRules)> {
    let sql = "SELECT home.keep_newest, home.keep_for_s, home.bytes_max, home.files_max,
                      org.keep_newest, org.keep_for_s, org.home_bytes_max, org.home_files_max
               FROM home JOIN org ON org.id = home.org WHERE home.org = $1 AND home.id = $2";
    let row = read.row(sql, &[&org.to_string(), &id.to_string()]).await?;
    let Some(row) = row else { return Err(DbError::not_found("home", id)) };
    let (own, of_org) = (rules_of(&row, 0)?, rules_of(&row, 4)?);
    let effective = effective(&own, &of_org);
    Ok((own, effective))
}

async fn of_org(read: &Connection, org: OrgId) -> Result<OrgRules> {
    let sql =
        "SELECT keep_newest, keep_for_s, home_bytes_max, home_files_max, bytes_max FROM org WHERE id = $1";
    let Some(row) = read.row(sql, &[&org.to_string()]).await? else {
        return Err(DbError::not_found("org", org));
    };
    let org_bytes_max = number_if_any(&row, 4)?;
    Ok(OrgRules { homes: rules_of(&row, 0)?, org_bytes_max, org_bytes: org_bytes(read, org).await? })
}

/// Bytes of the files in all homes of the org, by their current snapshots.
async fn org_bytes(read: &Connection, org: OrgId) -> Result<u64> {
    let sql = "SELECT coalesce(sum(snapshot.bytes), 0)::bigint FROM home
               JOIN snapshot ON snapshot.org = home.org AND snapshot.home = home.id
                    AND snapshot.generation = home.generation
               WHERE home.org = $1";
    let sum: i64 = read.row(sql, &[&org.to_string()]).await?.map_or(Ok(0), |row| cell(&row, 0))?;
    Ok(sum.max(0) as u64)
}

/// What each limit that holds for the home is used, now and with a snapshot of the size `offered`.
pub(super) async fn loads(
    read: &Connection,
    org: OrgId,
    home: &Home,
    offered: Size,
    org_bytes_max: Option<u64>,
) -> Result<Vec<Load>> {
    let (_, rules) = of_home(read, org, home.id).await?;
    let sql = "SELECT files, bytes FROM snapshot WHERE org = $1 AND home = $2 AND generation = $3";
    let generation = home.generation.0 as i64;
    let now = match read.row(sql, &[&org.to_string(), &home.id.to_string(), &generation]).await? {
        Some(row) => Size { files: number(&row, 0)?, bytes: number(&row, 1)? },
        None => Size { files: 0, bytes: 0 },
    };
    let of_org = match org_bytes_max {
        Some(max) => Some((org_bytes(read, org).await?, max)),
        None => None,
    };
    Ok(loads_of(&rules, now, offered, of_org))
}
