//! Environments in PostgreSQL.

use async_trait::async_trait;
use covey_types::{EnvironmentId, OrgId};
use serde_json::Value;
use tokio_postgres::Row;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Connection, Parameter, document, get as cell, printed, time, time_if_any};
use super::transaction::{look, transact};
use crate::environments::{Environment, Environments, archived, in_use};
use crate::{DbError, Page, Result, now, to_json};

#[async_trait]
impl Environments for Postgres {
    async fn create_environment(&self, org: OrgId, name: &str, config: &Value) -> Result<Environment> {
        let sql = format!(
            "INSERT INTO environment (org, id, name, config, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $5) RETURNING {COLUMNS}"
        );
        let id = EnvironmentId::from_uuid(Uuid::now_v7());
        transact!(self, "create environment", |tx| {
            let parameters: [Parameter<'_>; 5] =
                [&org.to_string(), &id.to_string(), &name, &to_json(config)?, &now().unix_ms()];
            found(id, tx.row(&sql, &parameters).await?)
        })
    }

    async fn environment(&self, org: OrgId, id: EnvironmentId) -> Result<Environment> {
        let sql = format!("SELECT {COLUMNS} FROM environment WHERE org = $1 AND id = $2");
        look!(self, "read environment", |read| {
            found(id, read.row(&sql, &[&org.to_string(), &id.to_string()]).await?)
        })
    }

    async fn list_environments(
        &self,
        org: OrgId,
        page: &Page<EnvironmentId>,
        include_archived: bool,
    ) -> Result<Vec<Environment>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM environment
             WHERE org = $1 AND ($2::text IS NULL OR id {} $2) AND ($3::bool OR archived_at IS NULL)
             ORDER BY id {} LIMIT $4",
            page.order.beyond(),
            page.order.sql()
        );
        look!(self, "list environments", |read| {
            let parameters: [Parameter<'_>; 4] =
                [&org.to_string(), &page.after_sql(), &include_archived, &page.limit_sql()];
            read.rows(&sql, &parameters).await?.iter().map(environment_of).collect()
        })
    }

    async fn update_environment(
        &self,
        org: OrgId,
        id: EnvironmentId,
        name: &str,
        config: &Value,
    ) -> Result<Environment> {
        let sql = format!(
            "UPDATE environment SET name = $3, config = $4, updated_at = $5
             WHERE org = $1 AND id = $2 RETURNING {COLUMNS}"
        );
        transact!(self, "update environment", |tx| {
            let sql_now =
                format!("SELECT {COLUMNS} FROM environment WHERE org = $1 AND id = $2 FOR NO KEY UPDATE");
            let current = tx.row(&sql_now, &[&org.to_string(), &id.to_string()]).await?;
            if found(id, current)?.archived_at.is_some() {
                return Err(archived(id));
            }
            let parameters: [Parameter<'_>; 5] =
                [&org.to_string(), &id.to_string(), &name, &to_json(config)?, &now().unix_ms()];
            found(id, tx.row(&sql, &parameters).await?)
        })
    }

    async fn archive_environment(&self, org: OrgId, id: EnvironmentId) -> Result<Environment> {
        let sql = format!(
            "UPDATE environment SET archived_at = coalesce(archived_at, $3)
             WHERE org = $1 AND id = $2 RETURNING {COLUMNS}"
        );
        transact!(self, "archive environment", |tx| {
            found(id, tx.row(&sql, &[&org.to_string(), &id.to_string(), &now().unix_ms()]).await?)
        })
    }

    async fn delete_environment(&self, org: OrgId, id: EnvironmentId) -> Result<()> {
        transact!(self, "delete environment", |tx| {
            let (org, text) = (org.to_string(), id.to_string());
            // Waits for who creates a session with it, and lets nobody do so any more.
            let sql = "SELECT id FROM environment WHERE org = $1 AND id = $2 FOR UPDATE";
            if tx.row(sql, &[&org, &text]).await?.is_none() {
                return Err(DbError::not_found("environment", id));
            }
            let sql = "SELECT count(*) FROM session WHERE org = $1 AND environment = $2";
            let used: i64 = tx.row(sql, &[&org, &text]).await?.map_or(Ok(0), |row| cell(&row, 0))?;
            if used > 0 {
                return Err(in_use(id, used));
            }
            tx.execute("DELETE FROM environment WHERE org = $1 AND id = $2", &[&org, &text]).await?;
            Ok(())
        })
    }
}

const COLUMNS: &str = "id, name, config, created_at, updated_at, archived_at";

fn environment_of(row: &Row) -> Result<Environment> {
    Ok(Environment {
        id: printed("environment", row, 0)?,
        name: cell(row, 1)?,
        config: document("environment configuration", row, 2)?,
        created_at: time(row, 3)?,
        updated_at: time(row, 4)?,
        archived_at: time_if_any(row, 5)?,
    })
}

fn found(id: EnvironmentId, row: Option<Row>) -> Result<Environment> {
    row.as_ref().map_or_else(|| Err(DbError::not_found("environment", id)), environment_of)
}

/// Reads an environment that cannot be changed, archived or deleted before the transaction ends.
pub(super) async fn held(tx: &Connection, org: OrgId, id: EnvironmentId) -> Result<Environment> {
    let sql = format!("SELECT {COLUMNS} FROM environment WHERE org = $1 AND id = $2 FOR SHARE");
    found(id, tx.row(&sql, &[&org.to_string(), &id.to_string()]).await?)
}
