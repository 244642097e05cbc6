//! What Covey shows beyond the Managed Agents API: homes, runners, a session's whole journal, health.

use axum::Json;
use axum::extract::State;
use covey_harness::record::step_event;
use covey_types::{Generation, HomeId, OrgId, RootHash, SessionId};
use covey_wire::api::{Health, Home, HomeImported, Page, Runner, Snapshot};
use serde_json::Value;

use super::error::{ApiError, Result};
use super::extract::{Caller, IdInPath, JsonBody};
use super::fields::{Fields, Query};
use super::{Api, page};
use crate::db::{self, Order, homes as store, journal, runners as registry, sessions};

pub(super) async fn health() -> Json<Health> {
    Json(Health { status: "ok".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() })
}

pub(super) async fn homes(State(api): State<Api>, caller: Caller, query: Query) -> Result<Json<Page<Home>>> {
    let limit = page::limit(&query)?;
    let after = page::after::<HomeId>(&query)?;
    let wanted = db::Page { after, limit: limit + 1, order: page::order(&query, Order::Descending)? };
    let org = caller.org;
    let found = api.inner.db.read("list homes", move |read| store::list(read, org, &wanted)).await?;
    let found = found.into_iter().map(|home| shown(org, &home)).collect();
    Ok(Json(page::cut(found, limit, |home: &Home| home.id.clone())))
}

pub(super) async fn home(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
) -> Result<Json<Home>> {
    let org = caller.org;
    let home = api.inner.db.read("get home", move |read| store::get(read, org, id)).await?;
    Ok(Json(shown(org, &home)))
}

pub(super) async fn snapshots(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    query: Query,
) -> Result<Json<Page<Snapshot>>> {
    let (org, limit) = (caller.org, page::limit(&query)?);
    let before = page::after::<u64>(&query)?.map(Generation);
    let found = api
        .inner
        .db
        .read("list snapshots", move |read| {
            store::get(read, org, id)?;
            store::snapshots(read, org, id, before, limit + 1)
        })
        .await?;
    let found = found
        .into_iter()
        .map(|row| Snapshot {
            generation: row.snapshot.generation.0,
            root: row.snapshot.root.to_string(),
            kind: row.snapshot.kind.as_str().to_owned(),
            step: row.snapshot.step.map(|step| step_event(step).to_string()),
            files: row.files,
            bytes: row.bytes,
            published_at: row.snapshot.published_at.to_string(),
        })
        .collect();
    Ok(Json(page::cut(found, limit, |snapshot: &Snapshot| snapshot.generation)))
}

/// Makes a root that is already whole in the store the home's current snapshot. Whoever calls this has secured the
/// directory first (`covey home secure`); the next runner that materializes checks every hash.
pub(super) async fn import(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    JsonBody(body): JsonBody,
) -> Result<Json<HomeImported>> {
    let fields = Fields::body(&body);
    let root: RootHash = fields
        .required_text("root")?
        .parse()
        .map_err(|_| fields.wrong("root", "a root hash as `covey home secure` prints it"))?;
    let base = fields.number("base_generation")?.map(Generation);
    let (files, bytes) = (fields.number("files")?.unwrap_or(0), fields.number("bytes")?.unwrap_or(0));
    let org = caller.org;
    let generation = api
        .inner
        .db
        .write("import home", move |tx| {
            let base = match base {
                Some(base) => base,
                None => store::get(tx, org, id)?.generation,
            };
            store::import(tx, org, id, base, root, files, bytes)
        })
        .await?;
    Ok(Json(HomeImported { id: id.to_string(), generation: generation.0, root: root.to_string() }))
}

pub(super) async fn runners(State(api): State<Api>, caller: Caller) -> Result<Json<Page<Runner>>> {
    let org = caller.org;
    let found = api.inner.db.read("list runners", move |read| registry::list(read, org)).await?;
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
    let found = api
        .inner
        .db
        .read("list records", move |read| {
            sessions::get(read, org, id)?;
            journal::since(read, org, id, after, limit + 1)
        })
        .await?;
    let cut = page::cut(found, limit, |record| record.seq);
    let data = cut
        .data
        .iter()
        .map(|record| {
            serde_json::to_value(record).map_err(|error| {
                ApiError::new(covey_types::Fault::Bug, format!("record {}: {error}", record.seq))
            })
        })
        .collect::<Result<_>>()?;
    Ok(Json(Page { data, next_page: cut.next_page }))
}

fn shown(org: OrgId, home: &store::Home) -> Home {
    Home {
        id: home.id.to_string(),
        org_id: org.to_string(),
        agent_id: home.agent.to_string(),
        generation: home.generation.0,
        root: home.root.map(|root| root.to_string()),
        session_id: home.lease_session.filter(|_| home.lease_held).map(|session| session.to_string()),
        created_at: home.created_at.to_string(),
    }
}
