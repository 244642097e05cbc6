//! API tokens. Only the hash of a secret is stored: a copy of the database opens nothing.

use async_trait::async_trait;
use covey_types::{OrgId, Timestamp, TokenId};

use crate::{DbError, Result};

/// What a secret begins with, so that scanners for leaked secrets recognise it.
pub const SECRET_PREFIX: &str = "covey_";

/// A token without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: TokenId,
    /// For people.
    pub name: String,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it was last seen, to within [`LAST_USED_RESOLUTION_MS`].
    pub last_used_at: Option<Timestamp>,
    /// When it was revoked.
    pub revoked_at: Option<Timestamp>,
}

/// A use is written down at most this often, so that reading requests do not become writes.
pub const LAST_USED_RESOLUTION_MS: i64 = 60_000;

pub(crate) fn hash_of(secret: &str) -> [u8; 32] {
    // A plain hash suffices: the secret has 256 random bits, so there is nothing to guess.
    *blake3::hash(secret.as_bytes()).as_bytes()
}

/// What is stored of tokens.
#[async_trait]
pub trait Tokens: Send + Sync {
    /// Creates a token and returns it with its secret, which cannot be had again.
    ///
    /// # Errors
    /// When the database or the system's randomness refuses.
    async fn create_token(&self, org: OrgId, name: &str) -> Result<(Token, String)>;

    /// Finds who a secret belongs to; none when it is unknown or revoked.
    ///
    /// # Errors
    /// When the database refuses.
    async fn verify_token(&self, secret: &str) -> Result<Option<(OrgId, TokenId)>>;

    /// Notes that a token was used.
    ///
    /// # Errors
    /// When the database refuses.
    async fn touch_token(&self, org: OrgId, id: TokenId) -> Result<()>;

    /// Lists the tokens of an org, newest first, revoked ones included.
    ///
    /// # Errors
    /// When the database refuses.
    async fn list_tokens(&self, org: OrgId) -> Result<Vec<Token>>;

    /// Revokes a token for good; again is no error.
    ///
    /// # Errors
    /// [`DbError::NotFound`].
    async fn revoke_token(&self, org: OrgId, id: TokenId) -> Result<Token>;
}

/// A fresh secret.
pub(crate) fn fresh_secret() -> Result<String> {
    let mut random = [0_u8; 32];
    getrandom::fill(&mut random)
        .map_err(|e| DbError::Conflict(format!("the system gave no randomness for a token: {e}")))?;
    let hex: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{SECRET_PREFIX}{hex}"))
}
