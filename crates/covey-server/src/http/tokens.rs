//! `/v1/covey/tokens`: who may ask. A token opens everything of its org, so it may also make and revoke others.

use axum::Json;
use axum::extract::State;
use covey_types::{Timestamp, TokenId};
use covey_wire::api::{Page, Token};

use super::Api;
use super::error::Result;
use super::extract::{Caller, IdInPath, JsonBody};
use super::fields::Fields;
use crate::db::tokens as store;

/// Characters of a token's name.
const NAME_CHARS_MAX: usize = 256;

pub(super) async fn create(
    State(api): State<Api>,
    caller: Caller,
    JsonBody(body): JsonBody,
) -> Result<Json<Token>> {
    let name = Fields::body(&body).required_name("name", NAME_CHARS_MAX)?.to_owned();
    let org = caller.org;
    let (made, secret) = api.inner.db.create_token(org, &name).await?;
    Ok(Json(Token { secret: Some(secret), ..shown(made) }))
}

/// All of them in one page: tokens are made by hand.
pub(super) async fn list(State(api): State<Api>, caller: Caller) -> Result<Json<Page<Token>>> {
    let org = caller.org;
    let found = api.inner.db.list_tokens(org).await?;
    Ok(Json(Page { data: found.into_iter().map(shown).collect(), next_page: None }))
}

pub(super) async fn revoke(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<TokenId>,
) -> Result<Json<Token>> {
    let org = caller.org;
    let revoked = api.inner.db.revoke_token(org, id).await?;
    Ok(Json(shown(revoked)))
}

fn shown(token: store::Token) -> Token {
    Token {
        id: token.id.to_string(),
        name: token.name,
        created_at: token.created_at.to_string(),
        last_used_at: token.last_used_at.as_ref().map(Timestamp::to_string),
        revoked_at: token.revoked_at.as_ref().map(Timestamp::to_string),
        secret: None,
    }
}
