//! Sessions in PostgreSQL.

use async_trait::async_trait;
use covey_harness::record::ModelUsage;
use covey_types::{Generation, OrgId, SessionId, Timestamp};
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::{
    Connection, Parameter, document, get as cell, number, number_if_any, printed, time, time_if_any,
};
use super::transaction::{look, transact};
use super::{Postgres, agents, environments, journal, leases};
use crate::homes::Unsecured;
use crate::journal::UserEvent;
use crate::sessions::{
    HomeSpan, NewSession, Session, SessionEdit, SessionFilter, Sessions, document_of, refuse_if_open,
    refuse_new, status_of, waited_too_long,
};
use crate::{DbError, Page, Result, now, to_json};

#[async_trait]
impl Sessions for Postgres {
    async fn create_session(&self, org: OrgId, new: &NewSession, initial: Vec<UserEvent>) -> Result<Session> {
        let id = SessionId::from_uuid(Uuid::now_v7());
        transact!(self, "create session", |tx| {
            insert(tx, org, id, new).await?;
            if !initial.is_empty() {
                journal::append_user_events(tx, org, id, &initial).await?;
            }
            get(tx, org, id).await
        })
    }

    async fn session(&self, org: OrgId, id: SessionId) -> Result<Session> {
        look!(self, "read session", |read| get(read, org, id).await)
    }

    async fn list_sessions(
        &self,
        org: OrgId,
        filter: &SessionFilter,
        page: &Page<SessionId>,
    ) -> Result<Vec<Session>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM session
             WHERE org = $1 AND ($2::text IS NULL OR id {} $2) AND ($3::bool OR archived_at IS NULL)
               AND ($4::text IS NULL OR agent = $4) AND ($5::bigint IS NULL OR agent_version = $5)
               AND (cardinality($6::text[]) = 0 OR status = ANY($6::text[]))
               AND ($7::bigint IS NULL OR created_at >= $7) AND ($8::bigint IS NULL OR created_at <= $8)
             ORDER BY id {} LIMIT $9",
            page.order.beyond(),
            page.order.sql()
        );
        let statuses: Vec<&str> = filter.statuses.iter().map(|status| status.as_str()).collect();
        look!(self, "list sessions", |read| {
            let parameters: [Parameter<'_>; 9] = [
                &org.to_string(),
                &page.after_sql(),
                &filter.include_archived,
                &filter.agent.map(|agent| agent.to_string()),
                &filter.agent_version.map(|version| version as i64),
                &statuses,
                &filter.created_from.map(Timestamp::unix_ms),
                &filter.created_until.map(Timestamp::unix_ms),
                &page.limit_sql(),
            ];
            read.rows(&sql, &parameters).await?.iter().map(session_of).collect()
        })
    }

    async fn edit_session(&self, org: OrgId, id: SessionId, edit: SessionEdit) -> Result<Session> {
        let sql = "UPDATE session SET title = $3, metadata = $4, updated_at = $5 WHERE org = $1 AND id = $2";
        transact!(self, "edit session", |tx| {
            let text = edit.0(&get_to_change(tx, org, id).await?)?;
            let parameters: [Parameter<'_>; 5] =
                [&org.to_string(), &id.to_string(), &text.title, &to_json(&text.metadata)?, &now().unix_ms()];
            tx.execute(sql, &parameters).await?;
            get(tx, org, id).await
        })
    }

    async fn archive_session(&self, org: OrgId, id: SessionId) -> Result<Session> {
        let sql = "UPDATE session SET archived_at = coalesce(archived_at, $3) WHERE org = $1 AND id = $2";
        transact!(self, "archive session", |tx| {
            refuse_if_open(&get_to_change(tx, org, id).await?, "archive")?;
            tx.execute(sql, &[&org.to_string(), &id.to_string(), &now().unix_ms()]).await?;
            // Whoever follows the session learns that nothing more will come.
            tx.touch(id);
            get(tx, org, id).await
        })
    }

    async fn delete_session(&self, org: OrgId, id: SessionId) -> Result<()> {
        transact!(self, "delete session", |tx| {
            let (org_text, text) = (org.to_string(), id.to_string());
            // The home before the session, as everybody does who needs both.
            let sql = "UPDATE home SET lease_session = NULL, lease_held = FALSE
                       WHERE org = $1 AND lease_session = $2";
            tx.execute(sql, &[&org_text, &text]).await?;
            refuse_if_open(&get_to_change(tx, org, id).await?, "delete")?;
            tx.execute("DELETE FROM journal WHERE org = $1 AND session = $2", &[&org_text, &text]).await?;
            tx.execute("DELETE FROM session WHERE org = $1 AND id = $2", &[&org_text, &text]).await?;
            tx.touch(id);
            Ok(())
        })
    }

    async fn claim_session(&self, org: OrgId, id: SessionId) -> Result<Session> {
        let instance = self.own_instance()?;
        transact!(self, "claim session", |tx| leases::claim(tx, org, id, instance).await)
    }

    async fn home_span(&self, org: OrgId, id: SessionId) -> Result<HomeSpan> {
        let sql = "SELECT home, home_base, (SELECT max(generation) FROM snapshot
                                            WHERE snapshot.org = session.org AND snapshot.home = session.home
                                                  AND snapshot.session = session.id)
                   FROM session WHERE org = $1 AND id = $2";
        look!(self, "span of session", |read| {
            let row = read.row(sql, &[&org.to_string(), &id.to_string()]).await?;
            let Some(row) = row else { return Err(DbError::not_found("session", id)) };
            let generation = |at| -> Result<_> { Ok(number_if_any(&row, at)?.map(Generation)) };
            Ok((printed("session's home", &row, 0)?, generation(1)?, generation(2)?))
        })
    }

    async fn sessions_needing_driver(&self, only: Option<SessionId>) -> Result<Vec<(OrgId, SessionId)>> {
        // Of all sessions only those are looked at that an index names: most of them rest.
        let among = match only {
            Some(_) => "id = $1",
            None => {
                "$1::text IS NULL AND id IN (
                     SELECT id FROM session WHERE status IN ('running', 'rescheduling')
                     UNION SELECT id FROM session WHERE waits_since < $2
                     UNION SELECT session FROM journal WHERE processed_at IS NULL)"
            }
        };
        let sql = format!(
            "SELECT org, id FROM session
             WHERE {among} AND status <> 'terminated'
               AND (owner IS NULL OR owner = $3
                    OR NOT EXISTS (SELECT FROM instance WHERE instance.id = session.owner))
               AND (status IN ('running', 'rescheduling')
                    OR (waits_since < $2 AND archived_at IS NULL)
                    OR EXISTS (SELECT FROM journal WHERE journal.session = session.id AND processed_at IS NULL
                                                     AND (waits_since IS NULL OR kind <> 'user.message')))
             ORDER BY id"
        );
        look!(self, "sessions needing a driver", |read| {
            let own = self.membership.now().instance().map(|id| id.0);
            let rows = read.rows(&sql, &[&only.map(|id| id.to_string()), &waited_too_long(), &own]).await?;
            rows.iter().map(|row| Ok((printed("org", row, 0)?, printed("session", row, 1)?))).collect()
        })
    }
}

pub(super) const COLUMNS: &str =
    "id, agent, agent_version, agent_snapshot, environment, home, status, epoch, head, title,
     metadata, extra, input_tokens, output_tokens, cache_read_input_tokens, cache_creation_input_tokens,
     created_at, updated_at, archived_at,
     (SELECT unsecured_at FROM home WHERE home.org = session.org AND home.id = session.home
                                          AND home.lease_session = session.id),
     (SELECT unsecured_reason FROM home WHERE home.org = session.org AND home.id = session.home
                                              AND home.lease_session = session.id)";

pub(super) fn session_of(row: &Row) -> Result<Session> {
    Ok(Session {
        id: printed("session", row, 0)?,
        agent: printed("session's agent", row, 1)?,
        agent_version: number(row, 2)?,
        agent_snapshot: document("agent snapshot", row, 3)?,
        environment: printed("session's environment", row, 4)?,
        home: printed("session's home", row, 5)?,
        status: status_of(cell(row, 6)?)?,
        epoch: number(row, 7)?,
        head: number(row, 8)?,
        title: cell(row, 9)?,
        metadata: document("session metadata", row, 10)?,
        extra: document("session fields", row, 11)?,
        usage: ModelUsage {
            input_tokens: number(row, 12)?,
            output_tokens: number(row, 13)?,
            cache_read_input_tokens: number(row, 14)?,
            cache_creation_input_tokens: number(row, 15)?,
        },
        created_at: time(row, 16)?,
        updated_at: time(row, 17)?,
        archived_at: time_if_any(row, 18)?,
        unsecured: Unsecured::of(cell(row, 19)?, cell(row, 20)?),
    })
}

fn found(id: SessionId, row: Option<Row>) -> Result<Session> {
    row.as_ref().map_or_else(|| Err(DbError::not_found("session", id)), session_of)
}

async fn insert(tx: &Connection, org: OrgId, id: SessionId, new: &NewSession) -> Result<()> {
    let agent = agents::get_held(tx, org, new.agent).await?;
    let environment = environments::held(tx, org, new.environment).await?;
    refuse_new(&agent, &environment)?;
    let wanted = new.agent_version.unwrap_or(agent.version);
    let version = agents::version(tx, org, new.agent, wanted).await?;
    let snapshot = new.agent_snapshot.clone().unwrap_or_else(|| document_of(&agent, &version));
    let sql = "INSERT INTO session (org, id, agent, agent_version, agent_snapshot, environment, home, title,
                                    metadata, extra, created_at, updated_at)
               VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $11)";
    let parameters: [Parameter<'_>; 11] = [
        &org.to_string(),
        &id.to_string(),
        &agent.id.to_string(),
        &(version.version as i64),
        &to_json(&snapshot)?,
        &environment.id.to_string(),
        &agent.home.to_string(),
        &new.title,
        &to_json(&new.metadata)?,
        &to_json(&new.extra)?,
        &now().unix_ms(),
    ];
    tx.execute(sql, &parameters).await?;
    Ok(())
}

pub(super) async fn get(read: &Connection, org: OrgId, id: SessionId) -> Result<Session> {
    let sql = format!("SELECT {COLUMNS} FROM session WHERE org = $1 AND id = $2");
    found(id, read.row(&sql, &[&org.to_string(), &id.to_string()]).await?)
}

/// Reads a session that nobody else changes before the transaction ends.
pub(super) async fn get_to_change(tx: &Connection, org: OrgId, id: SessionId) -> Result<Session> {
    let sql =
        format!("SELECT {COLUMNS} FROM session WHERE org = $1 AND id = $2 FOR NO KEY UPDATE OF session");
    found(id, tx.row(&sql, &[&org.to_string(), &id.to_string()]).await?)
}

pub(super) async fn must_be_there(read: &Connection, org: OrgId, id: SessionId) -> Result<()> {
    let sql = "SELECT 1 FROM session WHERE org = $1 AND id = $2";
    match read.row(sql, &[&org.to_string(), &id.to_string()]).await? {
        Some(_) => Ok(()),
        None => Err(DbError::not_found("session", id)),
    }
}
