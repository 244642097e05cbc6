//! Homes and their leases in PostgreSQL.

use async_trait::async_trait;
use covey_harness::record::Body;
use covey_types::{Fault, FencingToken, Generation, HomeId, OrgId, RunnerId, SessionId, StepId};
use tokio_postgres::Row;

use super::connection::{Connection, Parameter, get as cell, number, printed, printed_if_any, time};
use super::transaction::{look, transact};
use super::{Postgres, journal};
use crate::homes::{Claim, DELETED_HOMES_MAX, Home, Homes, Unsecured, grant};
use crate::journal::not_moved;
use crate::{DbError, Page, Result, now};

#[async_trait]
impl Homes for Postgres {
    async fn home(&self, org: OrgId, id: HomeId) -> Result<Home> {
        look!(self, "read home", |read| get(read, org, id, Lock::None).await)
    }

    async fn list_homes(&self, org: OrgId, page: &Page<HomeId>) -> Result<Vec<Home>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM home WHERE org = $1 AND ($2::text IS NULL OR id {} $2) ORDER BY id {} LIMIT $3",
            page.order.beyond(),
            page.order.sql()
        );
        look!(self, "list homes", |read| {
            let rows = read.rows(&sql, &[&org.to_string(), &page.after_sql(), &page.limit_sql()]).await?;
            rows.iter().map(home_of).collect()
        })
    }

    async fn claim_home(
        &self,
        org: OrgId,
        id: HomeId,
        session: SessionId,
        epoch: Option<u64>,
        runner: RunnerId,
    ) -> Result<Claim> {
        transact!(self, "claim home", |tx| claim(tx, org, id, (session, epoch), runner).await)
    }

    async fn release_home(&self, org: OrgId, id: HomeId, session: SessionId) -> Result<()> {
        let sql = "UPDATE home SET lease_held = FALSE WHERE org = $1 AND id = $2 AND lease_session = $3";
        transact!(self, "release home", |tx| {
            tx.execute(sql, &[&org.to_string(), &id.to_string(), &session.to_string()]).await?;
            Ok(())
        })
    }

    async fn mark_home_unsecured(&self, org: OrgId, id: HomeId, reason: &str) -> Result<()> {
        transact!(self, "home unsecured", |tx| mark_unsecured(tx, org, id, reason).await)
    }

    async fn note_secure_failed(&self, id: HomeId, fault: Fault, detail: &str) -> Result<()> {
        transact!(self, "secure failed", |tx| {
            let org = org_of(tx, id).await?;
            let home = get(tx, org, id, Lock::Change).await?;
            mark_unsecured(tx, org, id, detail).await?;
            if let Some(session) = home.lease_session {
                let failed = Body::HomeSecureFailed { fault, detail: detail.to_owned() };
                journal::append_fenced_elsewhere(tx, org, session, failed).await?;
            }
            Ok(())
        })
    }

    async fn is_result_known(&self, id: HomeId, step: StepId) -> Result<bool> {
        let sql = "SELECT lease_session IS NULL
                          OR EXISTS (SELECT FROM journal WHERE journal.session = home.lease_session
                                     AND journal.step = $2 AND journal.kind = 'agent.tool_result')
                   FROM home WHERE id = $1";
        look!(self, "is the result known", |read| {
            let row = read.row(sql, &[&id.to_string(), &step.to_string()]).await?;
            row.as_ref().map_or_else(|| Err(DbError::not_found("home", id)), |row| cell(row, 0))
        })
    }

    async fn deleted_homes(&self, org: OrgId) -> Result<Vec<HomeId>> {
        look!(self, "deleted homes", |read| {
            let sql = "SELECT home FROM deleted_home WHERE org = $1 ORDER BY home";
            let rows = read.rows(sql, &[&org.to_string()]).await?;
            rows.iter().map(|row| printed("deleted home", row, 0)).collect()
        })
    }
}

/// Remembers that a home was deleted on purpose, for runners that have a working copy of it.
pub(super) async fn note_deleted(tx: &Connection, org: &str, home: &str) -> Result<()> {
    let sql = "INSERT INTO deleted_home (org, home, deleted_at) VALUES ($1, $2, $3) ON CONFLICT (org, home) DO NOTHING";
    tx.execute(sql, &[&org, &home, &now().unix_ms()]).await?;
    let sql = "DELETE FROM deleted_home WHERE org = $1 AND home IN
                   (SELECT home FROM deleted_home WHERE org = $1 ORDER BY deleted_at DESC, home OFFSET $2)";
    tx.execute(sql, &[&org, &DELETED_HOMES_MAX]).await?;
    Ok(())
}

const COLUMNS: &str = "id, agent, generation, root, lease_token, lease_session, lease_held, lease_runner,
     lease_floor, floor_generation, created_at, unsecured_at, unsecured_reason";

/// Whether the row shall stay as it is until the transaction ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lock {
    /// It is only looked at.
    None,
    /// It is about to be changed.
    Change,
}

impl Lock {
    const fn sql(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Change => "FOR NO KEY UPDATE",
        }
    }
}

fn home_of(row: &Row) -> Result<Home> {
    Ok(Home {
        id: printed("home", row, 0)?,
        agent: printed("home's agent", row, 1)?,
        generation: Generation(number(row, 2)?),
        root: printed_if_any("root", row, 3)?,
        lease_token: FencingToken(number(row, 4)?),
        lease_session: printed_if_any("lease session", row, 5)?,
        lease_held: cell(row, 6)?,
        lease_runner: printed_if_any("lease runner", row, 7)?,
        lease_floor: FencingToken(number(row, 8)?),
        floor_generation: Generation(number(row, 9)?),
        created_at: time(row, 10)?,
        unsecured: Unsecured::of(cell(row, 11)?, cell(row, 12)?),
    })
}

pub(super) async fn get(read: &Connection, org: OrgId, id: HomeId, lock: Lock) -> Result<Home> {
    let sql = format!("SELECT {COLUMNS} FROM home WHERE org = $1 AND id = $2 {}", lock.sql());
    let row = read.row(&sql, &[&org.to_string(), &id.to_string()]).await?;
    row.as_ref().map_or_else(|| Err(DbError::not_found("home", id)), home_of)
}

/// The org of a home, for messages of a runner, which name only the home. It never changes.
pub(super) async fn org_of(read: &Connection, id: HomeId) -> Result<OrgId> {
    let row = read.row("SELECT org FROM home WHERE id = $1", &[&id.to_string()]).await?;
    row.as_ref().map_or_else(|| Err(DbError::not_found("home", id)), |row| printed("org", row, 0))
}

async fn claim(
    tx: &Connection,
    org: OrgId,
    id: HomeId,
    (session, epoch): (SessionId, Option<u64>),
    runner: RunnerId,
) -> Result<Claim> {
    let home = get(tx, org, id, Lock::Change).await?;
    if let Some(epoch) = epoch {
        // Looked at while the home is locked: who claims the session later claims the home later, too.
        let sql = "SELECT EXISTS (SELECT FROM session WHERE org = $1 AND id = $2 AND epoch = $3)";
        let row = tx.row(sql, &[&org.to_string(), &session.to_string(), &(epoch as i64)]).await?;
        if !row.map_or(Ok(false), |row| cell(&row, 0))? {
            return Err(not_moved(session, Some(epoch)));
        }
    }
    let grant = match grant(&home, session, runner) {
        Ok(grant) => grant,
        Err(holder) => return Ok(Claim::HeldBy(holder)),
    };
    let (org, id, session) = (org.to_string(), id.to_string(), session.to_string());
    let sql = "UPDATE home SET lease_token = $3, lease_session = $4, lease_held = TRUE, lease_runner = $5,
                      lease_floor = $6, floor_generation = $7
               WHERE org = $1 AND id = $2";
    let parameters: [Parameter<'_>; 7] = [
        &org,
        &id,
        &(grant.token.0 as i64),
        &session,
        &runner.to_string(),
        &(grant.floor.0 as i64),
        &(grant.floor_generation.0 as i64),
    ];
    tx.execute(sql, &parameters).await?;
    // What a session changes in a home is told from here on.
    let sql =
        "UPDATE session SET home_base = $3 WHERE org = $1 AND id = $2 AND home = $4 AND home_base IS NULL";
    tx.execute(sql, &[&org, &session, &(home.generation.0 as i64), &id]).await?;
    Ok(Claim::Granted(grant.token))
}

/// Gives back what the session holds, if `epoch` is its driver's.
pub(super) async fn release_of(tx: &Connection, org: OrgId, session: SessionId, epoch: u64) -> Result<()> {
    let (org, session) = (org.to_string(), session.to_string());
    let sql = "SELECT id, lease_token FROM home
               WHERE org = $1 AND lease_session = $2 AND lease_held
                 AND EXISTS (SELECT FROM session WHERE org = $1 AND id = $2 AND epoch = $3)";
    for row in tx.rows(sql, &[&org, &session, &(epoch as i64)]).await? {
        let (home, token): (&str, i64) = (cell(&row, 0)?, cell(&row, 1)?);
        // By its token: a driver that has claimed the session since may have claimed the home, too.
        let sql = "UPDATE home SET lease_held = FALSE WHERE org = $1 AND id = $2 AND lease_token = $3";
        tx.execute(sql, &[&org, &home, &token]).await?;
    }
    Ok(())
}

pub(super) async fn release_all(tx: &Connection) -> Result<()> {
    tx.execute("UPDATE home SET lease_held = FALSE WHERE lease_held", &[]).await?;
    Ok(())
}

pub(super) async fn mark_unsecured(tx: &Connection, org: OrgId, id: HomeId, reason: &str) -> Result<()> {
    let sql = "UPDATE home SET unsecured_at = coalesce(unsecured_at, $3), unsecured_reason = $4
               WHERE org = $1 AND id = $2";
    tx.execute(sql, &[&org.to_string(), &id.to_string(), &now().unix_ms(), &reason]).await?;
    Ok(())
}
