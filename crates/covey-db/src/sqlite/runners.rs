//! Runners in SQLite.

use async_trait::async_trait;
use covey_types::{OrgId, RunnerId, Timestamp};
use rusqlite::OptionalExtension;

use super::{Read, Result, Sqlite, Tx, parsed};
use crate::runners::{Runner, Runners};

#[async_trait]
impl Runners for Sqlite {
    async fn runner_connected(&self, org: OrgId, name: &str) -> Result<RunnerId> {
        let name = name.to_owned();
        self.write("runner connected", move |tx| connected(tx, org, &name)).await
    }

    async fn runner_disconnected(&self, org: OrgId, id: RunnerId) -> Result<()> {
        self.write("runner disconnected", move |tx| disconnected(tx, org, id)).await
    }

    async fn list_runners(&self, org: OrgId) -> Result<Vec<Runner>> {
        self.read("list runners", move |read| list(read, org)).await
    }
}

/// Notes that a runner dialled in; one name is one runner.
///
/// # Errors
/// When the database refuses.
pub(super) fn connected(tx: &Tx<'_>, org: OrgId, name: &str) -> Result<RunnerId> {
    let known: Option<String> = tx
        .conn
        .prepare_cached("SELECT id FROM runner WHERE org = ?1 AND name = ?2")?
        .query_row((org.to_string(), name), |row| row.get(0))
        .optional()?;
    let id = match known {
        Some(id) => parsed("runner", &id)?,
        None => RunnerId::from_uuid(tx.fresh_uuid()),
    };
    tx.conn
        .prepare_cached(
            "INSERT INTO runner (org, id, name, first_seen_at, last_seen_at, connected)
             VALUES (?1, ?2, ?3, ?4, ?4, 1)
             ON CONFLICT (org, id) DO UPDATE SET last_seen_at = ?4, connected = 1",
        )?
        .execute((org.to_string(), id.to_string(), name, tx.now().unix_ms()))?;
    Ok(id)
}

/// Notes that a runner's link ended.
///
/// # Errors
/// When the database refuses.
pub(super) fn disconnected(tx: &Tx<'_>, org: OrgId, id: RunnerId) -> Result<()> {
    tx.conn
        .prepare_cached("UPDATE runner SET connected = 0, last_seen_at = ?3 WHERE org = ?1 AND id = ?2")?
        .execute((org.to_string(), id.to_string(), tx.now().unix_ms()))?;
    Ok(())
}

/// Notes at start that no link stands.
///
/// # Errors
/// When the database refuses.
pub(super) fn all_disconnected(tx: &Tx<'_>) -> Result<()> {
    tx.conn.execute("UPDATE runner SET connected = 0", [])?;
    Ok(())
}

/// Lists the runners of an org.
///
/// # Errors
/// When the database refuses.
pub(super) fn list(read: &Read<'_>, org: OrgId) -> Result<Vec<Runner>> {
    let mut statement = read.conn.prepare_cached(
        "SELECT id, name, first_seen_at, last_seen_at, connected FROM runner WHERE org = ?1 ORDER BY id",
    )?;
    let mut rows = statement.query([org.to_string()])?;
    let mut runners = Vec::new();
    while let Some(row) = rows.next()? {
        runners.push(Runner {
            id: parsed("runner", &row.get::<_, String>(0)?)?,
            name: row.get(1)?,
            first_seen_at: Timestamp::from_unix_ms(row.get(2)?),
            last_seen_at: Timestamp::from_unix_ms(row.get(3)?),
            connected: row.get(4)?,
        });
    }
    Ok(runners)
}
