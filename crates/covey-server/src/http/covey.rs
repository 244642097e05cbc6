//! What Covey shows beyond the Managed Agents API and homes: runners, a session's whole journal, health.

use axum::Json;
use axum::extract::State;
use covey_types::SessionId;
use covey_wire::api::{Health, Page, Runner};
use serde_json::Value;

use super::error::{ApiError, Result};
use super::extract::{Caller, IdInPath};
use super::fields::Query;
use super::{Api, page};

pub(super) async fn health() -> Json<Health> {
    Json(Health { status: "ok".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() })
}

pub(super) async fn runners(State(api): State<Api>, caller: Caller) -> Result<Json<Page<Runner>>> {
    let org = caller.org;
    let found = api.inner.db.list_runners(org).await?;
    let data = found
        .into_iter()
        .map(|runner| Runner {
            id: runner.id.to_string(),
            name: runner.name,
            connected: runner.connected,
            first_seen_at: runner.first_seen_at.to_string(),
            last_seen_at: runner.last_seen_at.to_string(),
        })
        .collect();
    Ok(Json(Page { data, next_page: None }))
}

/// The whole journal, private records included, for finding out what happened.
pub(super) async fn records(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<SessionId>,
    query: Query,
) -> Result<Json<Page<Value>>> {
    let (org, limit) = (caller.org, page::limit(&query)?);
    let after = page::after::<u64>(&query)?.unwrap_or(0);
    api.inner.db.session(org, id).await?;
    let found = api.inner.db.records(org, id, after, limit + 1).await?;
    let epochs = api.inner.db.epochs(org, id, after, limit).await?;
    let cut = page::cut(found, limit, |record| record.seq);
    let data = cut
        .data
        .iter()
        .zip(epochs)
        .map(|(record, (_, epoch))| {
            let mut value = serde_json::to_value(record).map_err(|error| {
                ApiError::new(covey_types::Fault::Bug, format!("record {}: {error}", record.seq))
            })?;
            value["epoch"] = epoch.into();
            Ok(value)
        })
        .collect::<Result<_>>()?;
    Ok(Json(Page { data, next_page: cut.next_page }))
}
