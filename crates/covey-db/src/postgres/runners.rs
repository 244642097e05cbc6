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
            let Some(row) = row else { return Err(DbError::Closed) };
            if let Some(instance) = self.membership.now().instance() {
                let runner: &str = cell(&row, 0)?;
                // A server whose row was taken away meanwhile has no links any more.
                let sql = "INSERT INTO runner_link (org, runner, instance)
                           SELECT $1::text, $2::text, id FROM instance WHERE id = $3 ON CONFLICT DO NOTHING";
                tx.execute(sql, &[&org.to_string(), &runner, &instance.0]).await?;
            }
            printed("runner", &row, 0)
        })
    }

    async fn runner_disconnected(&self, org: OrgId, id: RunnerId) -> Result<()> {
        let sql = "UPDATE runner SET last_seen_at = $3,
                          connected = EXISTS (SELECT FROM runner_link WHERE runner = $2)
                   WHERE org = $1 AND id = $2";
        let instance = self.membership.now().instance();
        transact!(self, "runner disconnected", |tx| {
            if let Some(instance) = instance {
                let sql = "DELETE FROM runner_link WHERE runner = $1 AND instance = $2";
                tx.execute(sql, &[&id.to_string(), &instance.0]).await?;
            }
            tx.execute(sql, &[&org.to_string(), &id.to_string(), &now().unix_ms()]).await?;
            Ok(())
        })
    }

    async fn list_runners(&self, org: OrgId) -> Result<Vec<Runner>> {
        // Where several servers are, a dead one has taken its links with it and could not lower the flag.
        let sql = "SELECT id, name, first_seen_at, last_seen_at,
                          EXISTS (SELECT FROM runner_link WHERE runner_link.runner = runner.id)
                          OR (connected AND NOT EXISTS (SELECT FROM instance))
                   FROM runner WHERE org = $1 ORDER BY id";
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
