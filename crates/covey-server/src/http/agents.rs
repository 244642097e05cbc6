//! `/v1/agents`: versioned configurations.

use std::collections::{BTreeMap, BTreeSet};

use axum::Json;
use axum::extract::State;
use covey_types::{AgentId, Timestamp};
use covey_wire::api::{self, Page};
use serde_json::{Map, Value, json};

use super::Api;
use super::error::{ApiError, Result};
use super::extract::{Caller, IdInPath, JsonBody};
use super::fields::{Fields, Query, patch_metadata};
use super::page;
use crate::db::{self, Order, agents};

/// Characters of an agent's name.
const NAME_CHARS_MAX: usize = 256;
/// Characters of an agent's description.
const DESCRIPTION_CHARS_MAX: usize = 2048;
/// Characters of a system prompt.
const SYSTEM_CHARS_MAX: usize = 100_000;
/// Tools of one agent, the toolset counted as one.
const TOOLS_MAX: usize = 128;
/// Bytes of a client's tool's name, as the models' APIs have it.
const TOOL_NAME_BYTES_MAX: usize = 64;
/// The one toolset that Covey has.
const TOOLSET: &str = "agent_toolset_20260401";
/// Its tools.
const TOOLS: [&str; 6] = ["bash", "read", "write", "edit", "glob", "grep"];
/// Tools of the vendor's toolset that need a network, which sandboxes do not have.
const ABSENT_TOOLS: [&str; 2] = ["web_fetch", "web_search"];

pub(super) async fn create(
    State(api): State<Api>,
    caller: Caller,
    JsonBody(body): JsonBody,
) -> Result<Json<api::Agent>> {
    let fields = Fields::body(&body);
    let name = fields.required_name("name", NAME_CHARS_MAX)?.to_owned();
    if fields.value("model").is_none() {
        return Err(ApiError::invalid("`model` is missing"));
    }
    let config = Value::Object(patched(Map::new(), &fields)?);
    let org = caller.org;
    let agent = api.inner.db.create_agent(org, &name, &config).await?;
    Ok(Json(shown(agent)))
}

pub(super) async fn get(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<AgentId>,
    query: Query,
) -> Result<Json<api::Agent>> {
    let org = caller.org;
    let version = match query.one("version") {
        None => None,
        Some(text) => {
            Some(text.parse::<u64>().map_err(|_| ApiError::invalid("`version`: expected a whole number"))?)
        }
    };
    let agent = match version {
        None => api.inner.db.agent(org, id).await?,
        Some(_) => {
            let (agent, version) = api.inner.db.agent_version(org, id, version).await?;
            at_version(&agent, version)
        }
    };
    Ok(Json(shown(agent)))
}

pub(super) async fn list(
    State(api): State<Api>,
    caller: Caller,
    query: Query,
) -> Result<Json<Page<api::Agent>>> {
    query.unsupported(&["created_at"])?;
    let (limit, include_archived) = (page::limit(&query)?, query.flag("include_archived")?);
    let wanted =
        db::Page { after: page::after::<AgentId>(&query)?, limit: limit + 1, order: Order::Descending };
    let org = caller.org;
    let found = api.inner.db.list_agents(org, &wanted, include_archived).await?;
    let agents = found.into_iter().map(shown).collect();
    Ok(Json(page::cut(agents, limit, |agent: &api::Agent| agent.id.clone())))
}

pub(super) async fn update(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<AgentId>,
    JsonBody(body): JsonBody,
) -> Result<Json<api::Agent>> {
    let org = caller.org;
    let fields = Fields::body(&body);
    let name = fields.name("name", NAME_CHARS_MAX)?.map(str::to_owned);
    let expected = fields.number("version")?;
    let current = api.inner.db.agent(org, id).await?;
    let name = name.unwrap_or_else(|| current.name.clone());
    let stored = current.config.as_object().cloned().unwrap_or_default();
    let config = Value::Object(patched(stored, &fields)?);
    // The patch was made on this version; on another one it could undo somebody else's change.
    let base = expected.unwrap_or(current.version);
    let agent = api.inner.db.update_agent(org, id, Some(base), &name, &config).await?;
    Ok(Json(shown(agent)))
}

pub(super) async fn archive(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<AgentId>,
) -> Result<Json<api::Agent>> {
    let org = caller.org;
    let agent = api.inner.db.archive_agent(org, id).await?;
    Ok(Json(shown(agent)))
}

/// Deletes the agent with all that it has: sessions, home, snapshots.
pub(super) async fn delete(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<AgentId>,
) -> Result<Json<api::AgentDeleted>> {
    let org = caller.org;
    let deleted = api.inner.db.delete_agent(org, id).await?;
    if let Some(links) = &api.inner.links {
        links.forget(org, &[deleted.home]);
    }
    Ok(Json(api::AgentDeleted {
        id: id.to_string(),
        kind: "agent_deleted".to_owned(),
        covey_sessions: deleted.sessions,
        covey_snapshots: deleted.snapshots,
    }))
}

pub(super) async fn versions(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<AgentId>,
    query: Query,
) -> Result<Json<Page<api::Agent>>> {
    let (org, limit, before) = (caller.org, page::limit(&query)?, page::after::<u64>(&query)?);
    let (agent, versions) = api.inner.db.list_agent_versions(org, id, before, limit + 1).await?;
    let agents = versions.into_iter().map(|version| shown(at_version(&agent, version))).collect();
    Ok(Json(page::cut(agents, limit, |agent: &api::Agent| agent.version)))
}

fn at_version(agent: &agents::Agent, version: agents::AgentVersion) -> agents::Agent {
    agents::Agent {
        version: version.version,
        name: version.name,
        config: version.config,
        updated_at: version.created_at,
        ..agent.clone()
    }
}

/// Lays the fields of a request over a stored configuration; fields that are absent stay.
pub(super) fn patched(mut config: Map<String, Value>, fields: &Fields<'_>) -> Result<Map<String, Value>> {
    for name in ["mcp_servers", "skills", "multiagent"] {
        fields.unsupported(name)?;
    }
    if let Some(identity) = fields.value("execution_identity")
        && identity.get("type").and_then(Value::as_str) != Some("service_account")
    {
        return Err(fields.wrong("execution_identity", "`service_account`, the only one that Covey has"));
    }
    if fields.value("model").is_some() {
        config.insert("model".to_owned(), model(fields)?);
    } else if fields.has("model") {
        return Err(fields.wrong("model", "a model; it cannot be cleared"));
    }
    for (name, chars_max) in [("description", DESCRIPTION_CHARS_MAX), ("system", SYSTEM_CHARS_MAX)] {
        if fields.has(name) || !config.contains_key(name) {
            let text = fields.text(name)?.filter(|text| !text.is_empty());
            if text.is_some_and(|text| text.chars().count() > chars_max) {
                return Err(fields.wrong(name, &format!("at most {chars_max} characters")));
            }
            config.insert(name.to_owned(), json!(text));
        }
    }
    if fields.has("tools") || !config.contains_key("tools") {
        config.insert("tools".to_owned(), Value::Array(tools(fields)?));
    }
    let mut metadata = stored_metadata(config.get("metadata"));
    patch_metadata(&mut metadata, fields.metadata("metadata")?.unwrap_or_default())?;
    config.insert("metadata".to_owned(), json!(metadata));
    Ok(config)
}

fn model(fields: &Fields<'_>) -> Result<Value> {
    let path = fields.path("model");
    let (id, fields) = match fields.value("model") {
        Some(Value::String(id)) => (id.as_str(), None),
        Some(value @ Value::Object(_)) => {
            let fields = Fields::at(&path, value)?;
            (fields.required_text("id")?, Some(fields))
        }
        _ => return Err(fields.wrong("model", "a model's name, or an object with `id`")),
    };
    if id.trim().is_empty() || id.chars().count() > NAME_CHARS_MAX {
        return Err(ApiError::invalid(format!(
            "`{path}`: expected a name of 1 to {NAME_CHARS_MAX} characters"
        )));
    }
    if let Some(fields) = fields {
        fields.unsupported("effort")?;
        fields.unsupported("inference_geo")?;
        if fields.text("speed")?.is_some_and(|speed| speed != "standard") {
            return Err(fields.wrong("speed", "`standard`, the only one that Covey has"));
        }
    }
    let mut model = json!({ "id": id });
    // Covey's own: how long one answer may be.
    if let Some(tokens) = fields.map(|fields| fields.number("max_tokens")).transpose()?.flatten() {
        if tokens == 0 {
            return Err(ApiError::invalid(format!(
                "`{path}.max_tokens`: expected a whole number of at least 1"
            )));
        }
        model["max_tokens"] = json!(tokens);
    }
    Ok(model)
}

/// The tools with every default filled in, as the API shows them.
fn tools(fields: &Fields<'_>) -> Result<Vec<Value>> {
    let Some(list) = fields.list("tools")? else { return Ok(Vec::new()) };
    if list.len() > TOOLS_MAX {
        return Err(fields.wrong("tools", &format!("at most {TOOLS_MAX} tools")));
    }
    let mut tools = Vec::new();
    let mut names = BTreeSet::new();
    for (at, tool) in list.iter().enumerate() {
        let path = fields.path(&format!("tools[{at}]"));
        let tool = Fields::at(&path, tool)?;
        match tool.required_text("type")? {
            TOOLSET if !names.insert(TOOLSET.to_owned()) => {
                return Err(fields.wrong("tools", "at most one toolset"));
            }
            TOOLSET => tools.push(toolset(&tool)?),
            "custom" => {
                let made = custom_tool(&tool)?;
                if !names.insert(tool.required_text("name")?.to_owned()) {
                    return Err(tool.wrong("name", "a name that no other tool of the agent has"));
                }
                tools.push(made);
            }
            other => {
                let expected =
                    format!("`{TOOLSET}` or `custom`; `{other}` is not supported by this version of Covey");
                return Err(tool.wrong("type", &expected));
            }
        }
    }
    Ok(tools)
}

/// A tool that a client runs.
fn custom_tool(tool: &Fields<'_>) -> Result<Value> {
    let name = tool.required_text("name")?;
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    if name.len() > TOOL_NAME_BYTES_MAX || !name.bytes().all(is_word) {
        let expected = format!("1 to {TOOL_NAME_BYTES_MAX} letters, digits, `_` and `-`");
        return Err(tool.wrong("name", &expected));
    }
    if TOOLS.contains(&name) || ABSENT_TOOLS.contains(&name) {
        return Err(tool.wrong("name", "a name that no tool of Covey has"));
    }
    let schema = tool.value("input_schema").filter(|schema| schema["type"] == "object");
    let Some(schema) = schema else {
        return Err(tool.wrong("input_schema", "a JSON Schema with `type` `object`"));
    };
    let description = tool.required_text("description")?;
    Ok(json!({"type": "custom", "name": name, "description": description, "input_schema": schema}))
}

fn toolset(tool: &Fields<'_>) -> Result<Value> {
    let path = tool.path("default_config");
    let allow = || json!({"type": "always_allow"});
    let (enabled, policy) = match tool.value("default_config") {
        None => (true, allow()),
        Some(value) => {
            let fields = Fields::at(&path, value)?;
            (fields.flag("enabled")?.unwrap_or(true), permission(&fields)?.unwrap_or_else(allow))
        }
    };
    let mut configs = Vec::new();
    for (at, config) in tool.list("configs")?.unwrap_or_default().iter().enumerate() {
        let path = tool.path(&format!("configs[{at}]"));
        let config = Fields::at(&path, config)?;
        let name = config.required_text("name")?;
        let on = config.flag("enabled")?.unwrap_or(enabled);
        if ABSENT_TOOLS.contains(&name) && on {
            return Err(
                config.wrong("enabled", &format!("false: Covey has no `{name}`, a sandbox has no network"))
            );
        }
        if !TOOLS.contains(&name) && !ABSENT_TOOLS.contains(&name) {
            return Err(config.wrong("name", &format!("one of {}", TOOLS.join(", "))));
        }
        let policy = permission(&config)?.unwrap_or_else(|| policy.clone());
        configs.push(json!({"type": name, "name": name, "enabled": on, "permission_policy": policy}));
    }
    Ok(json!({
        "type": TOOLSET,
        "default_config": {"enabled": enabled, "permission_policy": policy},
        "configs": configs,
    }))
}

/// The policy that is asked for; none: the one that stands above.
fn permission(fields: &Fields<'_>) -> Result<Option<Value>> {
    let path = fields.path("permission_policy");
    let Some(policy) = fields.value("permission_policy") else { return Ok(None) };
    let policy = Fields::at(&path, policy)?;
    match policy.required_text("type")? {
        kind @ ("always_allow" | "always_ask") => Ok(Some(json!({"type": kind}))),
        kind => {
            let expected =
                format!("`always_allow` or `always_ask`; `{kind}` is not supported by this version of Covey");
            Err(policy.wrong("type", &expected))
        }
    }
}

/// The pairs of a stored document.
pub(super) fn stored_metadata(metadata: Option<&Value>) -> BTreeMap<String, String> {
    let pairs = metadata.and_then(Value::as_object).into_iter().flatten();
    pairs.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}

/// The model of a stored document; a bare name is understood as well.
pub(super) fn stored_model(config: &Value) -> api::Model {
    match config.get("model") {
        Some(Value::String(id)) => api::Model { id: id.clone(), options: Map::new() },
        Some(Value::Object(model)) => {
            let mut options = model.clone();
            let id = options.shift_remove("id");
            let id = id.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned();
            api::Model { id, options }
        }
        _ => api::Model::default(),
    }
}

/// A text of a stored document.
pub(super) fn stored_text(config: &Value, name: &str) -> Option<String> {
    config.get(name).and_then(Value::as_str).map(str::to_owned)
}

/// A list of a stored document.
pub(super) fn stored_list(config: &Value, name: &str) -> Vec<Value> {
    config.get(name).and_then(Value::as_array).cloned().unwrap_or_default()
}

/// A sandbox of Covey has no identity outside; this is the API's word for it.
pub(super) fn execution_identity() -> Value {
    json!({"type": "service_account"})
}

fn shown(agent: agents::Agent) -> api::Agent {
    let config = &agent.config;
    api::Agent {
        id: agent.id.to_string(),
        kind: "agent".to_owned(),
        description: stored_text(config, "description"),
        model: stored_model(config),
        system: stored_text(config, "system"),
        tools: stored_list(config, "tools"),
        mcp_servers: Vec::new(),
        skills: Vec::new(),
        multiagent: None,
        metadata: stored_metadata(config.get("metadata")),
        execution_identity: execution_identity(),
        version: agent.version,
        created_at: agent.created_at.to_string(),
        updated_at: agent.updated_at.to_string(),
        archived_at: agent.archived_at.as_ref().map(Timestamp::to_string),
        covey_home_id: Some(agent.home.to_string()),
        name: agent.name,
    }
}
