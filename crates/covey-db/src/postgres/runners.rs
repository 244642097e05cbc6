//! Runners in PostgreSQL.

use async_trait::async_trait;
use covey_types::{OrgId, RunnerId};
use uuid::Uuid;

use super::Postgres;
use super::connection::{Connection, get as cell, printed, time};
use super::transaction::{look, transact};
use crate::runners::{Runner, Runners};
use crate::{DbError, Result, now};

#[async_trait]
impl Runners for Postgres {
    async fn runner_connected(&self, org: OrgId, name: &str) -> Result<RunnerId> {
        let sql = "INSERT INTO runner (org, id, name, first_seen_at, last_seen_at, connected)
                   VALUES ($1, $2, $3, $4, $4, TRUE)
                   ON CONFLICT (org, name) DO UPDATE SET last_seen_at = $4, connected = TRUE
                   RETURNING id";
        let fresh = RunnerId::from_uuid(Uuid::now_v7()).to_string();
        transact!(self, "runner connected", |tx| {
            let row = tx.row(sql, &[&org.to_string(), &fresh, &name, &now().unix_ms()]).await?;
            row.as_ref().map_or(Err(DbError::Closed), |row| printed("runner", row, 0))
        })
    }

    async fn runner_disconnected(&self, org: OrgId, id: RunnerId) -> Result<()> {
        let sql = "UPDATE runner SET connected = FALSE, last_seen_at = $3 WHERE org = $1 AND id = $2";
        transact!(self, "runner disconnected", |tx| {
            tx.execute(sql, &[&org.to_string(), &id.to_string(), &now().unix_ms()]).await?;
            Ok(())
        })
    }

    async fn list_runners(&self, org: OrgId) -> Result<Vec<Runner>> {
        let sql =
            "SELECT id, name, first_seen_at, last_seen_at, connected FROM runner WHERE org = $1 ORDER BY id";
        look!(self, "list runners", |read| {
            let mut runners = Vec::new();
            for row in read.rows(sql, &[&org.to_string()]).await? {
                runners.push(Runner {
                    id: printed("runner", &row, 0)?,
                    name: cell(&row, 1)?,
                    first_seen_at: time(&row, 2)?,
                    last_seen_at: time(&row, 3)?,
                    connected: cell(&row, 4)?,
                });
            }
            Ok(runners)
        })
    }
}

pub(super) async fn all_disconnected(tx: &Connection) -> Result<()> {
    tx.execute("UPDATE runner SET connected = FALSE WHERE connected", &[]).await?;
    Ok(())
}
