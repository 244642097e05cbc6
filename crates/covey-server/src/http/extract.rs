//! Who asks, and with what: token, body, path and query of a request.
//!
//! The token is checked before anything else is read, so that a stranger learns nothing about a request's form.

use std::str::FromStr;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use covey_types::{Fault, OrgId, TokenId};
use covey_wire::api::REQUEST_BYTES_MAX;
use serde_json::{Map, Value};

use super::Api;
use super::error::{ApiError, Result};
use super::fields::Query;

/// A token's use is written down at most this often, so that reading requests do not become writes.
const TOKEN_USE_RESOLUTION: Duration = Duration::from_secs(60);

/// The org that the request's token belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller {
    pub(super) org: OrgId,
}

impl FromRequestParts<Api> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self> {
        let Some(secret) = secret_of(&parts.headers) else {
            return Err(ApiError::unauthenticated(
                "a token is missing; send `Authorization: Bearer …` or `x-api-key: …`",
            ));
        };
        let found = api.inner.db.verify_token(&secret).await?;
        let Some((org, token)) = found else {
            return Err(ApiError::unauthenticated(
                "the token is not known here, or it was revoked; `covey up` prints a valid one",
            ));
        };
        note_use(api, org, token).await;
        Ok(Self { org })
    }
}

fn secret_of(headers: &HeaderMap) -> Option<String> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION.as_str()).and_then(|value| {
        let (scheme, token) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
    });
    bearer.or_else(|| text("x-api-key").map(str::trim)).filter(|token| !token.is_empty()).map(str::to_owned)
}

async fn note_use(api: &Api, org: OrgId, token: TokenId) {
    let now = Instant::now();
    {
        // A time stamp more or less is all that a panic elsewhere could have cost.
        let mut uses = api.inner.token_uses.lock().unwrap_or_else(PoisonError::into_inner);
        if uses.get(&token).is_some_and(|last| now - *last < TOKEN_USE_RESOLUTION) {
            return;
        }
        uses.insert(token, now);
    }
    if let Err(error) = api.inner.db.touch_token(org, token).await {
        tracing::warn!(%error, "the use of a token could not be written down");
    }
}

/// The body as a JSON object; an empty body is an empty object.
#[derive(Debug)]
pub(super) struct JsonBody(pub(super) Map<String, Value>);

impl FromRequest<Api> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &Api) -> Result<Self> {
        let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
        if length.and_then(|text| text.parse::<usize>().ok()).is_some_and(|n| n > REQUEST_BYTES_MAX) {
            return Err(ApiError::too_large(REQUEST_BYTES_MAX));
        }
        let bytes = match axum::body::to_bytes(request.into_body(), REQUEST_BYTES_MAX).await {
            Ok(bytes) => bytes,
            Err(error) if is_limit(&error) => return Err(ApiError::too_large(REQUEST_BYTES_MAX)),
            Err(error) => return Err(ApiError::invalid(format!("the request body did not arrive: {error}"))),
        };
        if bytes.is_empty() {
            return Ok(Self(Map::new()));
        }
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(_) => Err(ApiError::invalid("the request body: expected a JSON object")),
            Err(error) => Err(ApiError::invalid(format!("the request body is no JSON: {error}"))),
        }
    }
}

fn is_limit(error: &axum::Error) -> bool {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        if error.to_string().contains("length limit exceeded") {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The id in the path. A text that is no id of the wanted kind answers like a thing that does not exist.
#[derive(Debug)]
pub(super) struct IdInPath<Id>(pub(super) Id);

impl<Id> FromRequestParts<Api> for IdInPath<Id>
where
    Id: FromStr + Send,
    Id::Err: std::fmt::Display,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self> {
        let Path(text) = Path::<String>::from_request_parts(parts, api)
            .await
            .map_err(|error| ApiError::invalid(format!("the path cannot be read: {error}")))?;
        text.parse().map(Self).map_err(|error: Id::Err| ApiError::new(Fault::NotFound, error.to_string()))
    }
}

impl FromRequestParts<Api> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Api) -> Result<Self> {
        let pairs = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(&parts.uri)
            .map_err(|error| ApiError::invalid(format!("the query cannot be read: {error}")))?;
        Ok(Query::new(pairs.0))
    }
}
