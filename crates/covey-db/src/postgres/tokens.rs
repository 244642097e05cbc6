//! Tokens in PostgreSQL.

use async_trait::async_trait;
use covey_types::{OrgId, TokenId};
use tokio_postgres::Row;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Parameter, get as cell, printed, time, time_if_any};
use super::transaction::{look, transact};
use crate::tokens::{LAST_USED_RESOLUTION_MS, Token, Tokens, fresh_secret, hash_of};
use crate::{DbError, Result, now};

#[async_trait]
impl Tokens for Postgres {
    async fn create_token(&self, org: OrgId, name: &str) -> Result<(Token, String)> {
        let secret = fresh_secret()?;
        let token = Token {
            id: TokenId::from_uuid(Uuid::now_v7()),
            name: name.to_owned(),
            created_at: now(),
            last_used_at: None,
            revoked_at: None,
        };
        let sql = "INSERT INTO token (org, id, name, hash, created_at) VALUES ($1, $2, $3, $4, $5)";
        transact!(self, "create token", |tx| {
            let hash = hash_of(&secret);
            let parameters: [Parameter<'_>; 5] = [
                &org.to_string(),
                &token.id.to_string(),
                &name,
                &hash.as_slice(),
                &token.created_at.unix_ms(),
            ];
            tx.execute(sql, &parameters).await?;
            Ok((token.clone(), secret.clone()))
        })
    }

    async fn verify_token(&self, secret: &str) -> Result<Option<(OrgId, TokenId)>> {
        look!(self, "check token", |read| {
            let sql = "SELECT org, id FROM token WHERE hash = $1 AND revoked_at IS NULL";
            let row = read.row(sql, &[&hash_of(secret).as_slice()]).await?;
            row.as_ref().map(|row| Ok((printed("org", row, 0)?, printed("token", row, 1)?))).transpose()
        })
    }

    async fn touch_token(&self, org: OrgId, id: TokenId) -> Result<()> {
        // Most uses change nothing, and then nothing is written.
        let sql = "UPDATE token SET last_used_at = $3
                   WHERE org = $1 AND id = $2 AND coalesce(last_used_at, 0) < $4";
        let now = now().unix_ms();
        look!(self, "note token use", |tx| {
            let parameters: [Parameter<'_>; 4] =
                [&org.to_string(), &id.to_string(), &now, &(now - LAST_USED_RESOLUTION_MS)];
            tx.execute(sql, &parameters).await?;
            Ok(())
        })
    }

    async fn list_tokens(&self, org: OrgId) -> Result<Vec<Token>> {
        let sql = format!("SELECT {COLUMNS} FROM token WHERE org = $1 ORDER BY id DESC");
        look!(self, "list tokens", |read| {
            read.rows(&sql, &[&org.to_string()]).await?.iter().map(token_of).collect()
        })
    }

    async fn revoke_token(&self, org: OrgId, id: TokenId) -> Result<Token> {
        let sql = format!(
            "UPDATE token SET revoked_at = coalesce(revoked_at, $3) WHERE org = $1 AND id = $2 RETURNING {COLUMNS}"
        );
        transact!(self, "revoke token", |tx| {
            let row = tx.row(&sql, &[&org.to_string(), &id.to_string(), &now().unix_ms()]).await?;
            row.as_ref().map_or_else(|| Err(DbError::not_found("token", id)), token_of)
        })
    }
}

const COLUMNS: &str = "id, name, created_at, last_used_at, revoked_at";

fn token_of(row: &Row) -> Result<Token> {
    Ok(Token {
        id: printed("token", row, 0)?,
        name: cell(row, 1)?,
        created_at: time(row, 2)?,
        last_used_at: time_if_any(row, 3)?,
        revoked_at: time_if_any(row, 4)?,
    })
}
