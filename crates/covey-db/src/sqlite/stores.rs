//! Stores in SQLite.

use async_trait::async_trait;
use covey_types::OrgId;
use rusqlite::OptionalExtension;

use super::{Read, Result, Sqlite, Tx, parsed};
use crate::stores::{OrgStore, Stores};

#[async_trait]
impl Stores for Sqlite {
    async fn org_stores(&self) -> Result<Vec<OrgStore>> {
        self.read("read stores", all).await
    }

    async fn store_identity(&self, org: OrgId) -> Result<Option<String>> {
        self.read("read store", move |read| identity(read, org)).await
    }

    async fn note_store(&self, org: OrgId, identity: &str) -> Result<()> {
        let identity = identity.to_owned();
        self.write("note store", move |tx| note(tx, org, &identity)).await
    }
}

/// Every org with its store.
///
/// # Errors
/// When the database refuses.
pub(super) fn all(read: &Read<'_>) -> Result<Vec<OrgStore>> {
    let mut statement = read.conn.prepare_cached(
        "SELECT org.id, store.identity, (SELECT count(*) FROM snapshot WHERE snapshot.org = org.id)
         FROM org LEFT JOIN store ON store.org = org.id ORDER BY org.id",
    )?;
    let mut rows = statement.query([])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(OrgStore {
            org: parsed("org", &row.get::<_, String>(0)?)?,
            identity: row.get(1)?,
            snapshots: row.get::<_, i64>(2)? as u64,
        });
    }
    Ok(found)
}

/// The name of the org's store; none before the first use.
///
/// # Errors
/// When the database refuses.
pub(super) fn identity(read: &Read<'_>, org: OrgId) -> Result<Option<String>> {
    let mut statement = read.conn.prepare_cached("SELECT identity FROM store WHERE org = ?1")?;
    Ok(statement.query_row([org.to_string()], |row| row.get(0)).optional()?)
}

/// Notes which store the org's blocks are in from now on.
///
/// # Errors
/// When the database refuses.
pub(super) fn note(tx: &Tx<'_>, org: OrgId, identity: &str) -> Result<()> {
    tx.conn
        .prepare_cached(
            "INSERT INTO store (org, identity, noted_at) VALUES (?1, ?2, ?3)
             ON CONFLICT (org) DO UPDATE SET identity = ?2, noted_at = ?3",
        )?
        .execute((org.to_string(), identity, tx.now().unix_ms()))?;
    Ok(())
}
