//! Homes and their leases in SQLite.

use async_trait::async_trait;
use covey_harness::record::Body;
use covey_types::{Fault, FencingToken, Generation, HomeId, OrgId, RunnerId, SessionId, StepId, Timestamp};
use rusqlite::{OptionalExtension, Row};

use super::{DbError, Page, Read, Result, Sqlite, Tx, journal, parsed, sessions};
use crate::homes::{Claim, DELETED_HOMES_MAX, Home, Homes, Unsecured, grant};
use crate::journal::not_moved;

#[async_trait]
impl Homes for Sqlite {
    async fn home(&self, org: OrgId, id: HomeId) -> Result<Home> {
        self.read("read home", move |read| get(read, org, id)).await
    }

    async fn list_homes(&self, org: OrgId, page: &Page<HomeId>) -> Result<Vec<Home>> {
        let page = *page;
        self.read("list homes", move |read| list(read, org, &page)).await
    }

    async fn claim_home(
        &self,
        org: OrgId,
        id: HomeId,
        session: SessionId,
        epoch: Option<u64>,
        runner: RunnerId,
    ) -> Result<Claim> {
        self.write("claim home", move |tx| {
            if let Some(epoch) = epoch
                && !sessions::is_current(tx, org, session, epoch)?
            {
                return Err(not_moved(session, Some(epoch)));
            }
            claim(tx, org, id, session, runner)
        })
        .await
    }

    async fn release_home(&self, org: OrgId, id: HomeId, session: SessionId) -> Result<()> {
        self.write("release home", move |tx| release(tx, org, id, session)).await
    }

    async fn mark_home_unsecured(&self, org: OrgId, id: HomeId, reason: &str) -> Result<()> {
        let reason = reason.to_owned();
        self.write("home unsecured", move |tx| mark_unsecured(tx, org, id, &reason)).await
    }

    async fn note_secure_failed(&self, id: HomeId, fault: Fault, detail: &str) -> Result<()> {
        let detail = detail.to_owned();
        self.write("secure failed", move |tx| note_secure_failed(tx, org_of(tx, id)?, id, fault, &detail))
            .await
    }

    async fn is_result_known(&self, id: HomeId, step: StepId) -> Result<bool> {
        self.read("is the result known", move |read| {
            let session = get(read, org_of(read, id)?, id)?.lease_session;
            session.map_or(Ok(true), |session| journal::has_result(read, session, step))
        })
        .await
    }

    async fn deleted_homes(&self, org: OrgId) -> Result<Vec<HomeId>> {
        self.read("deleted homes", move |read| deleted(read, org)).await
    }
}

const COLUMNS: &str = "id, agent, generation, root, lease_token, lease_session, lease_held, lease_runner,
     lease_floor, floor_generation, created_at, unsecured_at, unsecured_reason";

fn home_of(row: &Row<'_>) -> Result<Home> {
    Ok(Home {
        id: parsed("home", &row.get::<_, String>(0)?)?,
        agent: parsed("home's agent", &row.get::<_, String>(1)?)?,
        generation: Generation(row.get::<_, i64>(2)? as u64),
        root: row.get::<_, Option<String>>(3)?.map(|r| parsed("root", &r)).transpose()?,
        lease_token: FencingToken(row.get::<_, i64>(4)? as u64),
        lease_session: row.get::<_, Option<String>>(5)?.map(|s| parsed("lease session", &s)).transpose()?,
        lease_held: row.get(6)?,
        lease_runner: row.get::<_, Option<String>>(7)?.map(|r| parsed("lease runner", &r)).transpose()?,
        lease_floor: FencingToken(row.get::<_, i64>(8)? as u64),
        floor_generation: Generation(row.get::<_, i64>(9)? as u64),
        created_at: Timestamp::from_unix_ms(row.get(10)?),
        unsecured: Unsecured::of(row.get(11)?, row.get(12)?),
    })
}

/// Reads one home.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn get(read: &Read<'_>, org: OrgId, id: HomeId) -> Result<Home> {
    let sql = format!("SELECT {COLUMNS} FROM home WHERE org = ?1 AND id = ?2");
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    rows.next()?.map_or_else(|| Err(DbError::not_found("home", id)), home_of)
}

/// Lists homes.
///
/// # Errors
/// When the database refuses.
pub(super) fn list(read: &Read<'_>, org: OrgId, page: &Page<HomeId>) -> Result<Vec<Home>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM home WHERE org = ?1 AND (?2 IS NULL OR id {} ?2) ORDER BY id {} LIMIT ?3",
        page.order.beyond(),
        page.order.sql()
    );
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), page.after_sql(), page.limit_sql()))?;
    let mut homes = Vec::new();
    while let Some(row) = rows.next()? {
        homes.push(home_of(row)?);
    }
    Ok(homes)
}

/// Finds the org of a home; for messages of a runner, which name only the home.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn org_of(read: &Read<'_>, id: HomeId) -> Result<OrgId> {
    let org: Option<String> = read
        .conn
        .prepare_cached("SELECT org FROM home WHERE id = ?1")?
        .query_row([id.to_string()], |row| row.get(0))
        .optional()?;
    parsed("org", &org.ok_or_else(|| DbError::not_found("home", id))?)
}

/// Takes the home's lease for a session that acts on it through `runner`; each grant has a new, higher token.
/// A session that holds it already gets a new token as well. With another runner than before, the earlier one
/// can publish no more.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn claim(
    tx: &Tx<'_>,
    org: OrgId,
    id: HomeId,
    session: SessionId,
    runner: RunnerId,
) -> Result<Claim> {
    let home = get(tx, org, id)?;
    let grant = match grant(&home, session, runner) {
        Ok(grant) => grant,
        Err(holder) => return Ok(Claim::HeldBy(holder)),
    };
    tx.conn
        .prepare_cached(
            "UPDATE home SET lease_token = ?3, lease_session = ?4, lease_held = 1, lease_runner = ?5,
                    lease_floor = ?6, floor_generation = ?7
             WHERE org = ?1 AND id = ?2",
        )?
        .execute((
            org.to_string(),
            id.to_string(),
            grant.token.0 as i64,
            session.to_string(),
            runner.to_string(),
            grant.floor.0 as i64,
            grant.floor_generation.0 as i64,
        ))?;
    // What a session changes in a home is told from here on.
    tx.conn
        .prepare_cached(
            "UPDATE session SET home_base = coalesce(home_base, ?3) WHERE org = ?1 AND id = ?2 AND home = ?4",
        )?
        .execute((org.to_string(), session.to_string(), home.generation.0 as i64, id.to_string()))?;
    Ok(Claim::Granted(grant.token))
}

/// Gives the lease back. The token stays good for late publishes until the next claim.
///
/// # Errors
/// When the database refuses.
pub(super) fn release(tx: &Tx<'_>, org: OrgId, id: HomeId, session: SessionId) -> Result<()> {
    tx.conn
        .prepare_cached("UPDATE home SET lease_held = 0 WHERE org = ?1 AND id = ?2 AND lease_session = ?3")?
        .execute((org.to_string(), id.to_string(), session.to_string()))?;
    Ok(())
}

/// Gives back whatever lease a session holds, if `epoch` is its driver's.
///
/// # Errors
/// When the database refuses.
pub(super) fn release_of(tx: &Tx<'_>, org: OrgId, session: SessionId, epoch: u64) -> Result<()> {
    tx.conn
        .prepare_cached(
            "UPDATE home SET lease_held = 0
             WHERE org = ?1 AND lease_session = ?2
               AND EXISTS (SELECT 1 FROM session WHERE org = ?1 AND id = ?2 AND epoch = ?3)",
        )?
        .execute((org.to_string(), session.to_string(), epoch as i64))?;
    Ok(())
}

/// Gives back every lease: at the start of the only server, no driver of the last one is alive.
///
/// # Errors
/// When the database refuses.
pub(super) fn release_all(tx: &Tx<'_>) -> Result<()> {
    tx.conn.execute("UPDATE home SET lease_held = 0", [])?;
    Ok(())
}

/// Remembers that a home was deleted on purpose, for runners that have a working copy of it.
///
/// # Errors
/// When the database refuses.
pub(super) fn note_deleted(tx: &Tx<'_>, org: OrgId, id: HomeId) -> Result<()> {
    let org = org.to_string();
    tx.conn
        .prepare_cached(
            "INSERT INTO deleted_home (org, home, deleted_at) VALUES (?1, ?2, ?3) ON CONFLICT (org, home) DO NOTHING",
        )?
        .execute((&org, id.to_string(), tx.now().unix_ms()))?;
    tx.conn
        .prepare_cached(
            "DELETE FROM deleted_home WHERE org = ?1 AND home IN
                 (SELECT home FROM deleted_home WHERE org = ?1 ORDER BY deleted_at DESC, home LIMIT -1 OFFSET ?2)",
        )?
        .execute((&org, DELETED_HOMES_MAX))?;
    Ok(())
}

/// The org's homes that were deleted, in order.
///
/// # Errors
/// When the database refuses.
fn deleted(read: &Read<'_>, org: OrgId) -> Result<Vec<HomeId>> {
    let mut statement =
        read.conn.prepare_cached("SELECT home FROM deleted_home WHERE org = ?1 ORDER BY home")?;
    let mut rows = statement.query([org.to_string()])?;
    let mut homes = Vec::new();
    while let Some(row) = rows.next()? {
        homes.push(parsed("deleted home", &row.get::<_, String>(0)?)?);
    }
    Ok(homes)
}

/// Notes why the home is not secured; the time of the first reason in a row stays.
///
/// # Errors
/// When the database refuses.
pub(super) fn mark_unsecured(tx: &Tx<'_>, org: OrgId, id: HomeId, reason: &str) -> Result<()> {
    tx.conn
        .prepare_cached(
            "UPDATE home SET unsecured_at = coalesce(unsecured_at, ?3), unsecured_reason = ?4
             WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string(), tx.now().unix_ms(), reason))?;
    Ok(())
}

/// Records in the lease holder's journal that a secure failed, and that the home is unsecured.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn note_secure_failed(
    tx: &Tx<'_>,
    org: OrgId,
    id: HomeId,
    fault: Fault,
    detail: &str,
) -> Result<()> {
    mark_unsecured(tx, org, id, detail)?;
    if let Some(session) = get(tx, org, id)?.lease_session {
        let failed = Body::HomeSecureFailed { fault, detail: detail.to_owned() };
        journal::append_fenced_elsewhere(tx, org, session, failed)?;
    }
    Ok(())
}
