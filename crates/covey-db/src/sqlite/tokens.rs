//! Tokens in SQLite.

use async_trait::async_trait;
use covey_types::{OrgId, Timestamp, TokenId};
use rusqlite::OptionalExtension;

use super::{DbError, Read, Result, Sqlite, Tx, parsed};
use crate::tokens::{LAST_USED_RESOLUTION_MS, Token, Tokens, fresh_secret, hash_of};

#[async_trait]
impl Tokens for Sqlite {
    async fn create_token(&self, org: OrgId, name: &str) -> Result<(Token, String)> {
        let name = name.to_owned();
        self.write("create token", move |tx| create(tx, org, &name)).await
    }

    async fn verify_token(&self, secret: &str) -> Result<Option<(OrgId, TokenId)>> {
        let secret = secret.to_owned();
        self.read("check token", move |read| verify(read, &secret)).await
    }

    async fn touch_token(&self, org: OrgId, id: TokenId) -> Result<()> {
        self.write("note token use", move |tx| touch(tx, org, id)).await
    }

    async fn list_tokens(&self, org: OrgId) -> Result<Vec<Token>> {
        self.read("list tokens", move |read| list(read, org)).await
    }

    async fn revoke_token(&self, org: OrgId, id: TokenId) -> Result<Token> {
        self.write("revoke token", move |tx| {
            revoke(tx, org, id)?;
            get(tx, org, id)
        })
        .await
    }
}

/// Creates a token and returns it with its secret, which cannot be had again.
///
/// # Errors
/// When the database or the system's randomness refuses.
pub(super) fn create(tx: &Tx<'_>, org: OrgId, name: &str) -> Result<(Token, String)> {
    let secret = fresh_secret()?;
    let token = Token {
        id: TokenId::from_uuid(tx.fresh_uuid()),
        name: name.to_owned(),
        created_at: tx.now(),
        last_used_at: None,
        revoked_at: None,
    };
    tx.conn
        .prepare_cached("INSERT INTO token (org, id, name, hash, created_at) VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute((
            org.to_string(),
            token.id.to_string(),
            name,
            hash_of(&secret).as_slice(),
            token.created_at.unix_ms(),
        ))?;
    Ok((token, secret))
}

/// Finds who a secret belongs to; none when it is unknown or revoked.
///
/// # Errors
/// When the database refuses.
pub(super) fn verify(read: &Read<'_>, secret: &str) -> Result<Option<(OrgId, TokenId)>> {
    let row: Option<(String, String)> = read
        .conn
        .prepare_cached("SELECT org, id FROM token WHERE hash = ?1 AND revoked_at IS NULL")?
        .query_row([hash_of(secret).as_slice()], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    row.map(|(org, id)| Ok((parsed("org", &org)?, parsed("token", &id)?))).transpose()
}

/// Notes that a token was used.
///
/// # Errors
/// When the database refuses.
pub(super) fn touch(tx: &Tx<'_>, org: OrgId, id: TokenId) -> Result<()> {
    let now = tx.now().unix_ms();
    tx.conn
        .prepare_cached(
            "UPDATE token SET last_used_at = ?3 WHERE org = ?1 AND id = ?2 AND coalesce(last_used_at, 0) < ?4",
        )?
        .execute((org.to_string(), id.to_string(), now, now - LAST_USED_RESOLUTION_MS))?;
    Ok(())
}

/// Lists the tokens of an org, newest first, revoked ones included.
///
/// # Errors
/// When the database refuses.
pub(super) fn list(read: &Read<'_>, org: OrgId) -> Result<Vec<Token>> {
    let mut statement = read.conn.prepare_cached(
        "SELECT id, name, created_at, last_used_at, revoked_at FROM token WHERE org = ?1 ORDER BY id DESC",
    )?;
    let mut rows = statement.query([org.to_string()])?;
    let mut tokens = Vec::new();
    while let Some(row) = rows.next()? {
        tokens.push(Token {
            id: parsed("token", &row.get::<_, String>(0)?)?,
            name: row.get(1)?,
            created_at: Timestamp::from_unix_ms(row.get(2)?),
            last_used_at: row.get::<_, Option<i64>>(3)?.map(Timestamp::from_unix_ms),
            revoked_at: row.get::<_, Option<i64>>(4)?.map(Timestamp::from_unix_ms),
        });
    }
    Ok(tokens)
}

/// One token.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn get(read: &Read<'_>, org: OrgId, id: TokenId) -> Result<Token> {
    list(read, org)?.into_iter().find(|token| token.id == id).ok_or_else(|| DbError::not_found("token", id))
}

/// Revokes a token for good; again is no error.
///
/// # Errors
/// [`DbError::NotFound`].
pub(super) fn revoke(tx: &Tx<'_>, org: OrgId, id: TokenId) -> Result<()> {
    let found = tx
        .conn
        .prepare_cached("UPDATE token SET revoked_at = coalesce(revoked_at, ?3) WHERE org = ?1 AND id = ?2")?
        .execute((org.to_string(), id.to_string(), tx.now().unix_ms()))?;
    if found == 0 { Err(DbError::not_found("token", id)) } else { Ok(()) }
}
