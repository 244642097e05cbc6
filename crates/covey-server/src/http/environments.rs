//! `/v1/environments`: what a session's sandbox is made from.

use axum::Json;
use axum::extract::State;
use covey_types::{EnvironmentId, Timestamp};
use covey_wire::api::{self, Page};
use serde_json::{Map, Value, json};

use super::Api;
use super::agents::{stored_metadata, stored_text};
use super::error::Result;
use super::extract::{Caller, IdInPath, JsonBody};
use super::fields::{Fields, Query, patch_metadata};
use super::page;
use crate::db::{self, Order, environments};

/// Characters of an environment's name.
const NAME_CHARS_MAX: usize = 256;
/// Characters of an environment's description.
const DESCRIPTION_CHARS_MAX: usize = 2048;

pub(super) async fn create(
    State(api): State<Api>,
    caller: Caller,
    JsonBody(body): JsonBody,
) -> Result<Json<api::Environment>> {
    let fields = Fields::body(&body);
    let name = fields.required_name("name", NAME_CHARS_MAX)?.to_owned();
    let document = Value::Object(patched(Map::new(), &fields)?);
    let org = caller.org;
    let made = api.inner.db.create_environment(org, &name, &document).await?;
    Ok(Json(shown(made)))
}

pub(super) async fn get(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<EnvironmentId>,
) -> Result<Json<api::Environment>> {
    let org = caller.org;
    let found = api.inner.db.environment(org, id).await?;
    Ok(Json(shown(found)))
}

pub(super) async fn list(
    State(api): State<Api>,
    caller: Caller,
    query: Query,
) -> Result<Json<Page<api::Environment>>> {
    let (limit, archived) = (page::limit(&query)?, query.flag("include_archived")?);
    let after = page::after::<EnvironmentId>(&query)?;
    let wanted = db::Page { after, limit: limit + 1, order: Order::Descending };
    let org = caller.org;
    let found = api.inner.db.list_environments(org, &wanted, archived).await?;
    let found = found.into_iter().map(shown).collect();
    Ok(Json(page::cut(found, limit, |environment: &api::Environment| environment.id.clone())))
}

pub(super) async fn update(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<EnvironmentId>,
    JsonBody(body): JsonBody,
) -> Result<Json<api::Environment>> {
    let org = caller.org;
    let fields = Fields::body(&body);
    let name = fields.name("name", NAME_CHARS_MAX)?.map(str::to_owned);
    let current = api.inner.db.environment(org, id).await?;
    let name = name.unwrap_or(current.name);
    let stored = current.config.as_object().cloned().unwrap_or_default();
    let document = Value::Object(patched(stored, &fields)?);
    let changed = api.inner.db.update_environment(org, id, &name, &document).await?;
    Ok(Json(shown(changed)))
}

pub(super) async fn archive(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<EnvironmentId>,
) -> Result<Json<api::Environment>> {
    let org = caller.org;
    let archived = api.inner.db.archive_environment(org, id).await?;
    Ok(Json(shown(archived)))
}

pub(super) async fn delete(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<EnvironmentId>,
) -> Result<Json<api::EnvironmentDeleted>> {
    let org = caller.org;
    api.inner.db.delete_environment(org, id).await?;
    Ok(Json(api::EnvironmentDeleted { id: id.to_string(), kind: "environment_deleted".to_owned() }))
}

fn patched(mut document: Map<String, Value>, fields: &Fields<'_>) -> Result<Map<String, Value>> {
    if fields.text("scope")?.is_some_and(|scope| scope != "organization") {
        return Err(fields.wrong("scope", "`organization`, the only one that Covey has"));
    }
    if fields.has("config") || !document.contains_key("config") {
        document.insert("config".to_owned(), config(fields)?);
    }
    if fields.has("description") || !document.contains_key("description") {
        let text = fields.text("description")?.filter(|text| !text.is_empty());
        if text.is_some_and(|text| text.chars().count() > DESCRIPTION_CHARS_MAX) {
            return Err(fields.wrong("description", &format!("at most {DESCRIPTION_CHARS_MAX} characters")));
        }
        document.insert("description".to_owned(), json!(text));
    }
    let mut metadata = stored_metadata(document.get("metadata"));
    patch_metadata(&mut metadata, fields.metadata("metadata")?.unwrap_or_default())?;
    document.insert("metadata".to_owned(), json!(metadata));
    Ok(document)
}

/// Sandboxes have no network and no package step yet. A configuration that asks for either is refused: its
/// sessions would fail later, and less clearly.
fn config(fields: &Fields<'_>) -> Result<Value> {
    let path = fields.path("config");
    let Some(value) = fields.value("config") else { return Ok(cloud()) };
    let config = Fields::at(&path, value)?;
    match config.required_text("type")? {
        "self_hosted" => return Ok(json!({"type": "self_hosted"})),
        "cloud" => {}
        _ => return Err(config.wrong("type", "`self_hosted` or `cloud`")),
    }
    let path = config.path("networking");
    if let Some(networking) = config.value("networking") {
        let networking = Fields::at(&path, networking)?;
        if networking.required_text("type")? != "limited" {
            let expected =
                "`limited` with no `allowed_hosts`: sandboxes of this version of Covey have no network";
            return Err(networking.wrong("type", expected));
        }
        networking.unsupported("allowed_hosts")?;
        for name in ["allow_mcp_servers", "allow_package_managers"] {
            if networking.flag(name)? == Some(true) {
                return Err(
                    networking.wrong(name, "false: sandboxes of this version of Covey have no network")
                );
            }
        }
    }
    let path = config.path("packages");
    if let Some(packages) = config.value("packages") {
        let packages = Fields::at(&path, packages)?;
        for name in ["apt", "cargo", "gem", "go", "npm", "pip"] {
            packages.unsupported(name)?;
        }
    }
    Ok(cloud())
}

fn cloud() -> Value {
    json!({
        "type": "cloud",
        "networking": {
            "type": "limited",
            "allowed_hosts": [],
            "allow_mcp_servers": false,
            "allow_package_managers": false,
        },
        "packages": {"type": "packages", "apt": [], "cargo": [], "gem": [], "go": [], "npm": [], "pip": []},
    })
}

fn shown(environment: environments::Environment) -> api::Environment {
    let document = &environment.config;
    api::Environment {
        id: environment.id.to_string(),
        kind: "environment".to_owned(),
        description: stored_text(document, "description"),
        config: document.get("config").cloned().unwrap_or_else(cloud),
        metadata: stored_metadata(document.get("metadata")),
        created_at: environment.created_at.to_string(),
        updated_at: environment.updated_at.to_string(),
        archived_at: environment.archived_at.as_ref().map(Timestamp::to_string),
        name: environment.name,
    }
}
