//! Sessions that servers lease, in PostgreSQL.
//!
//! A session with an owner whose row is gone is free for everybody; the claim says so in its own condition, so nobody has to
//! clean up after a dead server before its sessions can go on.

use async_trait::async_trait;
use covey_harness::record::Body;
use covey_types::{OrgId, SessionId};
use tokio::sync::watch;

use super::connection::{Connection, get as cell, printed};
use super::transaction::transact;
use super::{Postgres, homes, membership, orgs, sessions, transaction};
use crate::journal::stored_body;
use crate::leases::{Instance, InstanceId, Leases, Rest, ServerPlace, Standing, TAKE_OVER_SESSIONS_MAX};
use crate::sessions::Session;
use crate::{DbError, Result, now};

#[async_trait]
impl Leases for Postgres {
    async fn join(&self, place: &ServerPlace) -> Result<OrgId> {
        if !self.membership.join(place.clone()).await? {
            return Err(DbError::Served { database: self.location.to_string() });
        }
        transact!(self, "join", |tx| {
            membership::release_unowned(tx).await?;
            transaction::forget_old_marks(tx).await?;
            orgs::ensure_default(tx).await
        })
    }

    fn standing(&self) -> watch::Receiver<Standing> {
        self.membership.standing()
    }

    fn servers(&self) -> watch::Receiver<Vec<Instance>> {
        self.membership.servers()
    }

    fn left_behind(&self) -> watch::Receiver<u64> {
        self.membership.left_behind()
    }

    async fn take_left_behind(&self) -> Result<Vec<(OrgId, Session)>> {
        let standing = self.membership.now();
        if !standing.may_claim() {
            return Ok(Vec::new());
        }
        let instance = standing.instance();
        transact!(self, "take over sessions", |tx| take(tx, instance).await)
    }

    async fn release_session(&self, org: OrgId, id: SessionId, epoch: u64, rest: Rest) -> Result<()> {
        let sql = "UPDATE session SET owner = NULL WHERE org = $1 AND id = $2 AND epoch = $3";
        let released: Result<()> = transact!(self, "release session", |tx| {
            // The home before the session, as everybody does who needs both.
            homes::release_of(tx, org, id, epoch).await?;
            tx.execute(sql, &[&org.to_string(), &id.to_string(), &(epoch as i64)]).await?;
            Ok(())
        });
        released?;
        self.feed.free();
        self.notices.tell_freed((rest == Rest::HandedOver).then_some(id));
        Ok(())
    }

    fn offer_session(&self, id: SessionId) {
        self.notices.tell_freed(Some(id));
    }

    async fn drain(&self) -> Result<()> {
        self.membership.drain().await
    }

    async fn leave(&self) -> Result<()> {
        self.membership.leave().await
    }
}

impl Postgres {
    /// Under which number this handle claims; none for one that is not among several servers.
    pub(super) fn own_instance(&self) -> Result<Option<InstanceId>> {
        match self.membership.now() {
            Standing::Outside | Standing::Alone => Ok(None),
            Standing::Member(id) => Ok(Some(id)),
            Standing::Silent(_) | Standing::Draining(_) | Standing::Over(_) => Err(DbError::LeaseEnded),
        }
    }
}

pub(super) async fn claim(
    tx: &Connection,
    org: OrgId,
    id: SessionId,
    instance: Option<InstanceId>,
) -> Result<Session> {
    let (org_text, id_text, own) = (org.to_string(), id.to_string(), instance.map(|id| id.0));
    // Condition and lock are one statement: of two servers that claim at once, the second finds the first one's number.
    let sql = "UPDATE session SET epoch = epoch + 1, owner = $3
               WHERE org = $1 AND id = $2
                 AND (owner IS NULL OR owner = $3
                      OR NOT EXISTS (SELECT FROM instance WHERE instance.id = session.owner))
                 AND ($3::bigint IS NULL OR EXISTS (SELECT FROM instance WHERE instance.id = $3))";
    if tx.execute(sql, &[&org_text, &id_text, &own]).await? == 1 {
        return sessions::get(tx, org, id).await;
    }
    let sql = "SELECT owner FROM session WHERE org = $1 AND id = $2";
    let Some(row) = tx.row(sql, &[&org_text, &id_text]).await? else {
        return Err(DbError::not_found("session", id));
    };
    match cell::<Option<i64>>(&row, 0)? {
        Some(owner) if Some(owner) != own => Err(DbError::Leased { session: id, server: InstanceId(owner) }),
        _ => Err(DbError::LeaseEnded),
    }
}

/// A claim for many, which is already in their journals when it is known.
async fn take(tx: &Connection, instance: Option<InstanceId>) -> Result<Vec<(OrgId, Session)>> {
    let claimed = stored_body(&Body::DriverClaimed { epoch: 0 })?;
    let Some((before, after)) = claimed.split_once('0') else {
        return Err(DbError::Corrupt { what: "claim record", detail: claimed });
    };
    let sql = format!(
        "WITH picked AS (
             SELECT org, id FROM session
             WHERE owner IS NOT NULL AND NOT EXISTS (SELECT FROM instance WHERE instance.id = session.owner)
               AND ($1::bigint IS NULL OR EXISTS (SELECT FROM instance WHERE instance.id = $1))
             ORDER BY id LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED),
         taken AS (
             UPDATE session SET owner = $1, epoch = epoch + 1, head = head + 1, updated_at = $3
             FROM picked WHERE session.org = picked.org AND session.id = picked.id
             RETURNING session.*),
         noted AS (
             INSERT INTO journal (org, session, seq, epoch, kind, body, at, processed_at)
             SELECT org, id, head, epoch, 'driver.claimed', $4 || epoch::text || $5, $3, $3 FROM taken)
         SELECT {}, org FROM taken AS session ORDER BY id",
        sessions::COLUMNS
    );
    let own = instance.map(|id| id.0);
    let limit = TAKE_OVER_SESSIONS_MAX as i64;
    let rows = tx.rows(&sql, &[&own, &limit, &now().unix_ms(), &before, &after]).await?;
    let taken: Vec<(OrgId, Session)> = rows
        .iter()
        .map(|row| Ok((printed("org", row, row.len() - 1)?, sessions::session_of(row)?)))
        .collect::<Result<_>>()?;
    taken.iter().for_each(|(_, session)| tx.touch(session.id));
    Ok(taken)
}
