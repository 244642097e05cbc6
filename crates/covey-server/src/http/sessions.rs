//! `/v1/sessions`: conversations.

use axum::Json;
use axum::extract::State;
use covey_types::{AgentId, EnvironmentId, SessionId, SessionStatus, Timestamp};
use covey_wire::api::session::CacheCreation;
use covey_wire::api::{self, Page};
use serde_json::{Map, Value, json};

use super::Api;
use super::agents::{execution_identity, patched, stored_list, stored_metadata, stored_model, stored_text};
use super::error::{ApiError, Result};
use super::events;
use super::extract::{Caller, IdInPath, JsonBody};
use super::fields::{Fields, Query, patch_metadata};
use super::page;
use crate::db::sessions::{NewSession, SessionEdit, SessionFilter, SessionText};
use crate::db::{self, Order, agents, sessions};

/// Characters of a session's title.
const TITLE_CHARS_MAX: usize = 512;
/// What a session may be created with instead of the agent's own.
const OVERRIDABLE: [&str; 5] = ["model", "system", "tools", "mcp_servers", "skills"];

/// Which agent a session is created from.
struct AgentReference {
    id: AgentId,
    version: Option<u64>,
    /// Fields that replace the agent's own, as the client sent them.
    overrides: Map<String, Value>,
}

pub(super) async fn create(
    State(api): State<Api>,
    caller: Caller,
    JsonBody(body): JsonBody,
) -> Result<Json<api::Session>> {
    let fields = Fields::body(&body);
    for name in ["resources", "vault_ids", "budget", "deployment_id"] {
        fields.unsupported(name)?;
    }
    let agent = agent_reference(&fields)?;
    let environment: EnvironmentId =
        named_id(&fields, "environment_id", fields.required_text("environment_id")?)?;
    let title = title(&fields)?;
    let mut metadata = std::collections::BTreeMap::new();
    patch_metadata(&mut metadata, fields.metadata("metadata")?.unwrap_or_default())?;
    let initial = events::user_events(&fields, "initial_events", None)?;
    if initial.iter().any(|event| event.body.kind() != "user.message") {
        return Err(fields.wrong("initial_events", "`user.message` events only"));
    }

    let org = caller.org;
    let agent_snapshot = if agent.overrides.is_empty() {
        None
    } else {
        let (_, version) = api.inner.db.agent_version(org, agent.id, agent.version).await?;
        Some(overridden(&agent, version)?)
    };
    let version_of = |document: &Value| document.get("version").and_then(Value::as_u64);
    let new = NewSession {
        agent: agent.id,
        // The version that the overrides were laid over, even if the agent has moved on meanwhile.
        agent_version: agent_snapshot.as_ref().and_then(version_of).or(agent.version),
        agent_snapshot,
        environment,
        title,
        metadata: json!(metadata),
        extra: json!({}),
    };
    let session = api.inner.db.create_session(org, &new, initial).await?;
    Ok(Json(shown(session)))
}

pub(super) async fn get(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<SessionId>,
) -> Result<Json<api::Session>> {
    let org = caller.org;
    let session = api.inner.db.session(org, id).await?;
    Ok(Json(shown(session)))
}

pub(super) async fn list(
    State(api): State<Api>,
    caller: Caller,
    query: Query,
) -> Result<Json<Page<api::Session>>> {
    query.unsupported(&["created_at", "deployment_id", "memory_store_id"])?;
    let limit = page::limit(&query)?;
    let wanted = db::Page {
        after: page::after::<SessionId>(&query)?,
        limit: limit + 1,
        order: page::order(&query, Order::Descending)?,
    };
    let filter = SessionFilter {
        agent: query
            .one("agent_id")
            .map(str::parse)
            .transpose()
            .map_err(|error| ApiError::invalid(format!("`agent_id`: {error}")))?,
        agent_version: query
            .one("agent_version")
            .map(str::parse)
            .transpose()
            .map_err(|_| ApiError::invalid("`agent_version`: expected a whole number"))?,
        statuses: query.many("statuses").into_iter().map(status).collect::<Result<_>>()?,
        include_archived: query.flag("include_archived")?,
        ..SessionFilter::default()
    };
    let org = caller.org;
    let found = api.inner.db.list_sessions(org, &filter, &wanted).await?;
    let found = found.into_iter().map(shown).collect();
    Ok(Json(page::cut(found, limit, |session: &api::Session| session.id.clone())))
}

pub(super) async fn update(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<SessionId>,
    JsonBody(body): JsonBody,
) -> Result<Json<api::Session>> {
    let fields = Fields::body(&body);
    for name in ["agent", "budget", "vault_ids"] {
        fields.unsupported(name)?;
    }
    let (title, keeps_title) = (title(&fields)?, !fields.has("title"));
    let patch = fields.metadata("metadata")?.unwrap_or_default();
    let org = caller.org;
    let edit = SessionEdit(Box::new(move |current| {
        let mut metadata = stored_metadata(Some(&current.metadata));
        let patched = patch_metadata(&mut metadata, patch.clone());
        patched.map_err(|e| db::DbError::Invalid(e.message().to_owned()))?;
        let title = if keeps_title { current.title.clone() } else { title.clone() };
        Ok(SessionText { title, metadata: json!(metadata) })
    }));
    let session = api.inner.db.edit_session(org, id, edit).await?;
    Ok(Json(shown(session)))
}

pub(super) async fn archive(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<SessionId>,
) -> Result<Json<api::Session>> {
    let org = caller.org;
    let session = api.inner.db.archive_session(org, id).await?;
    Ok(Json(shown(session)))
}

pub(super) async fn delete(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<SessionId>,
) -> Result<Json<api::SessionDeleted>> {
    let org = caller.org;
    api.inner.db.delete_session(org, id).await?;
    Ok(Json(api::SessionDeleted { id: id.to_string(), kind: "session_deleted".to_owned() }))
}

fn status(text: &str) -> Result<SessionStatus> {
    let found = SessionStatus::ALL.into_iter().find(|status| status.as_str() == text);
    found.ok_or_else(|| {
        let all = SessionStatus::ALL.map(SessionStatus::as_str).join(", ");
        ApiError::invalid(format!("`statuses`: expected some of {all}"))
    })
}

fn title(fields: &Fields<'_>) -> Result<Option<String>> {
    let title = fields.text("title")?.filter(|title| !title.is_empty());
    if title.is_some_and(|title| title.chars().count() > TITLE_CHARS_MAX) {
        return Err(fields.wrong("title", &format!("at most {TITLE_CHARS_MAX} characters")));
    }
    Ok(title.map(str::to_owned))
}

/// An id in a body: a text that is no such id is a mistake in the request, not a missing thing.
fn named_id<Id>(fields: &Fields<'_>, name: &str, text: &str) -> Result<Id>
where
    Id: std::str::FromStr,
    Id::Err: std::fmt::Display,
{
    text.parse().map_err(|error: Id::Err| ApiError::invalid(format!("`{}`: {error}", fields.path(name))))
}

fn agent_reference(fields: &Fields<'_>) -> Result<AgentReference> {
    let path = fields.path("agent");
    match fields.value("agent") {
        None => Err(ApiError::invalid(format!("`{path}` is missing"))),
        Some(Value::String(text)) => {
            let id = named_id(fields, "agent", text)?;
            Ok(AgentReference { id, version: None, overrides: Map::new() })
        }
        Some(value @ Value::Object(map)) => {
            let agent = Fields::at(&path, value)?;
            let id = named_id(&agent, "id", agent.required_text("id")?)?;
            let version = agent.number("version")?;
            let overrides = match agent.required_text("type")? {
                "agent" => Map::new(),
                "agent_with_overrides" => map
                    .iter()
                    .filter(|(key, _)| OVERRIDABLE.contains(&key.as_str()))
                    .map(|(k, v)| (k.clone(), v.clone()))
                    .collect(),
                _ => return Err(agent.wrong("type", "`agent` or `agent_with_overrides`")),
            };
            Ok(AgentReference { id, version, overrides })
        }
        Some(_) => Err(fields.wrong("agent", "an agent's id, or an object with `type` and `id`")),
    }
}

/// The agent's document with the overrides laid over it.
fn overridden(agent: &AgentReference, version: agents::AgentVersion) -> Result<Value> {
    let overrides = Value::Object(agent.overrides.clone());
    let stored = version.config.as_object().cloned().unwrap_or_default();
    let mut document = patched(stored, &Fields::at("agent", &overrides)?)?;
    document.insert("type".to_owned(), json!("agent"));
    document.insert("id".to_owned(), json!(agent.id));
    document.insert("version".to_owned(), json!(version.version));
    document.insert("name".to_owned(), json!(version.name));
    Ok(Value::Object(document))
}

fn shown(session: sessions::Session) -> api::Session {
    let agent = &session.agent_snapshot;
    let lasted_ms = session.updated_at.unix_ms() - session.created_at.unix_ms();
    api::Session {
        id: session.id.to_string(),
        kind: "session".to_owned(),
        status: session.status.as_str().to_owned(),
        agent: api::SessionAgent {
            id: session.agent.to_string(),
            kind: "agent".to_owned(),
            version: session.agent_version,
            name: stored_text(agent, "name").unwrap_or_default(),
            description: stored_text(agent, "description"),
            model: stored_model(agent),
            system: stored_text(agent, "system"),
            tools: stored_list(agent, "tools"),
            mcp_servers: Vec::new(),
            skills: Vec::new(),
            multiagent: None,
            execution_identity: execution_identity(),
        },
        environment_id: session.environment.to_string(),
        metadata: stored_metadata(Some(&session.metadata)),
        usage: api::SessionUsage {
            input_tokens: session.usage.input_tokens,
            output_tokens: session.usage.output_tokens,
            cache_read_input_tokens: session.usage.cache_read_input_tokens,
            cache_creation: CacheCreation {
                ephemeral_5m_input_tokens: session.usage.cache_creation_input_tokens,
                ephemeral_1h_input_tokens: 0,
            },
        },
        stats: api::SessionStats { duration_seconds: lasted_ms.max(0) as f64 / 1000.0 },
        budget: None,
        outcome_evaluations: Vec::new(),
        resources: Vec::new(),
        vault_ids: Vec::new(),
        created_at: session.created_at.to_string(),
        updated_at: session.updated_at.to_string(),
        archived_at: session.archived_at.as_ref().map(Timestamp::to_string),
        covey_home_id: Some(session.home.to_string()),
        covey_unsecured: session.unsecured.as_ref().map(super::homes::unsecured),
        title: session.title,
    }
}
