//! Stores in PostgreSQL.

use async_trait::async_trait;
use covey_types::OrgId;

use super::Postgres;
use super::connection::{get as cell, number, printed};
use super::transaction::{look, transact};
use crate::stores::{OrgStore, Stores};
use crate::{Result, now};

#[async_trait]
impl Stores for Postgres {
    async fn org_stores(&self) -> Result<Vec<OrgStore>> {
        let sql = "SELECT org.id, store.identity, (SELECT count(*) FROM snapshot WHERE snapshot.org = org.id)
                   FROM org LEFT JOIN store ON store.org = org.id ORDER BY org.id";
        look!(self, "read stores", |read| {
            let mut found = Vec::new();
            for row in read.rows(sql, &[]).await? {
                found.push(OrgStore {
                    org: printed("org", &row, 0)?,
                    identity: cell(&row, 1)?,
                    snapshots: number(&row, 2)?,
                });
            }
            Ok(found)
        })
    }

    async fn store_identity(&self, org: OrgId) -> Result<Option<String>> {
        look!(self, "read store", |read| {
            let row = read.row("SELECT identity FROM store WHERE org = $1", &[&org.to_string()]).await?;
            row.as_ref().map(|row| cell(row, 0)).transpose()
        })
    }

    async fn note_store(&self, org: OrgId, identity: &str) -> Result<()> {
        let sql = "INSERT INTO store (org, identity, noted_at) VALUES ($1, $2, $3)
                   ON CONFLICT (org) DO UPDATE SET identity = $2, noted_at = $3";
        transact!(self, "note store", |tx| {
            tx.execute(sql, &[&org.to_string(), &identity, &now().unix_ms()]).await?;
            Ok(())
        })
    }
}
