//! Environments in SQLite.

use async_trait::async_trait;
use covey_types::{EnvironmentId, OrgId, Timestamp};
use rusqlite::Row;
use serde_json::Value;

use super::{DbError, Page, Read, Result, Sqlite, Tx, parsed, parsed_json, to_json};
use crate::environments::{Environment, Environments, archived, in_use};

#[async_trait]
impl Environments for Sqlite {
    async fn create_environment(&self, org: OrgId, name: &str, config: &Value) -> Result<Environment> {
        let (name, config) = (name.to_owned(), config.clone());
        self.write("create environment", move |tx| insert(tx, org, &name, &config)).await
    }

    async fn environment(&self, org: OrgId, id: EnvironmentId) -> Result<Environment> {
        self.read("read environment", move |read| get(read, org, id)).await
    }

    async fn list_environments(
        &self,
        org: OrgId,
        page: &Page<EnvironmentId>,
        include_archived: bool,
    ) -> Result<Vec<Environment>> {
        let page = *page;
        self.read("list environments", move |read| list(read, org, &page, include_archived)).await
    }

    async fn update_environment(
        &self,
        org: OrgId,
        id: EnvironmentId,
        name: &str,
        config: &Value,
    ) -> Result<Environment> {
        let (name, config) = (name.to_owned(), config.clone());
        self.write("update environment", move |tx| update(tx, org, id, &name, &config)).await
    }

    async fn archive_environment(&self, org: OrgId, id: EnvironmentId) -> Result<Environment> {
        self.write("archive environment", move |tx| archive(tx, org, id)).await
    }

    async fn delete_environment(&self, org: OrgId, id: EnvironmentId) -> Result<()> {
        self.write("delete environment", move |tx| delete(tx, org, id)).await
    }
}

const COLUMNS: &str = "id, name, config, created_at, updated_at, archived_at";

fn environment_of(row: &Row<'_>) -> Result<Environment> {
    Ok(Environment {
        id: parsed("environment", &row.get::<_, String>(0)?)?,
        name: row.get(1)?,
        config: parsed_json("environment configuration", &row.get::<_, String>(2)?)?,
        created_at: Timestamp::from_unix_ms(row.get(3)?),
        updated_at: Timestamp::from_unix_ms(row.get(4)?),
        archived_at: row.get::<_, Option<i64>>(5)?.map(Timestamp::from_unix_ms),
    })
}

/// Creates an environment.
///
/// # Errors
/// When the database refuses.
pub(super) fn insert(tx: &Tx<'_>, org: OrgId, name: &str, config: &Value) -> Result<Environment> {
    let now = tx.now();
    let id = EnvironmentId::from_uuid(tx.fresh_uuid());
    tx.conn
        .prepare_cached(
            "INSERT INTO environment (org, id, name, config, created_at, updated_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?5)",
        )?
        .execute((org.to_string(), id.to_string(), name, to_json(config)?, now.unix_ms()))?;
    get(tx, org, id)
}

/// Reads one environment, archived or not.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn get(read: &Read<'_>, org: OrgId, id: EnvironmentId) -> Result<Environment> {
    let sql = format!("SELECT {COLUMNS} FROM environment WHERE org = ?1 AND id = ?2");
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), id.to_string()))?;
    rows.next()?.map_or_else(|| Err(DbError::not_found("environment", id)), environment_of)
}

/// Lists environments.
///
/// # Errors
/// When the database refuses.
pub(super) fn list(
    read: &Read<'_>,
    org: OrgId,
    page: &Page<EnvironmentId>,
    include_archived: bool,
) -> Result<Vec<Environment>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM environment
         WHERE org = ?1 AND (?2 IS NULL OR id {} ?2) AND (?3 OR archived_at IS NULL)
         ORDER BY id {} LIMIT ?4",
        page.order.beyond(),
        page.order.sql()
    );
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows =
        statement.query((org.to_string(), page.after_sql(), include_archived, page.limit_sql()))?;
    let mut environments = Vec::new();
    while let Some(row) = rows.next()? {
        environments.push(environment_of(row)?);
    }
    Ok(environments)
}

/// Changes an environment; running sessions see it at their next sandbox.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] when it is archived.
pub(super) fn update(
    tx: &Tx<'_>,
    org: OrgId,
    id: EnvironmentId,
    name: &str,
    config: &Value,
) -> Result<Environment> {
    if get(tx, org, id)?.archived_at.is_some() {
        return Err(archived(id));
    }
    tx.conn
        .prepare_cached(
            "UPDATE environment SET name = ?3, config = ?4, updated_at = ?5 WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string(), name, to_json(config)?, tx.now().unix_ms()))?;
    get(tx, org, id)
}

/// Archives an environment: no new sessions; again is no error.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn archive(tx: &Tx<'_>, org: OrgId, id: EnvironmentId) -> Result<Environment> {
    tx.conn
        .prepare_cached(
            "UPDATE environment SET archived_at = coalesce(archived_at, ?3) WHERE org = ?1 AND id = ?2",
        )?
        .execute((org.to_string(), id.to_string(), tx.now().unix_ms()))?;
    get(tx, org, id)
}

/// Deletes an environment that no session names.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] when sessions name it.
pub(super) fn delete(tx: &Tx<'_>, org: OrgId, id: EnvironmentId) -> Result<()> {
    get(tx, org, id)?;
    let used: i64 = tx
        .conn
        .prepare_cached("SELECT count(*) FROM session WHERE org = ?1 AND environment = ?2")?
        .query_row((org.to_string(), id.to_string()), |row| row.get(0))?;
    if used > 0 {
        return Err(in_use(id, used));
    }
    tx.conn
        .prepare_cached("DELETE FROM environment WHERE org = ?1 AND id = ?2")?
        .execute((org.to_string(), id.to_string()))?;
    Ok(())
}
