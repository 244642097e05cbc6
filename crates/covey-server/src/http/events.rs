//! `/v1/sessions/{id}/events`: what the client says, and what has happened.

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use covey_harness::record::{Body, Confirmation};
use covey_types::{EventId, Fault, SessionId};
use covey_wire::api::{EVENTS_PER_REQUEST_MAX, EventsSent, Page};
use serde_json::Value;

use super::error::{ApiError, Result};
use super::extract::{Caller, IdInPath, JsonBody};
use super::fields::{Fields, Query};
use super::{Api, STREAMS_MAX, page, stream as sse};
use crate::db::journal::UserEvent;
use crate::db::{Order, PAGE_ROWS_MAX};

/// Blocks in one message.
const BLOCKS_PER_MESSAGE_MAX: usize = 100;
/// What a client may send.
const USER_KINDS: &str =
    "`user.message`, `user.interrupt`, `user.tool_confirmation`, `user.custom_tool_result`";
/// Bytes of an `Idempotency-Key` header.
const IDEMPOTENCY_KEY_BYTES_MAX: usize = 256;

pub(super) async fn send(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<SessionId>,
    headers: HeaderMap,
    JsonBody(body): JsonBody,
) -> Result<Json<EventsSent>> {
    let fields = Fields::body(&body);
    fields.required_list("events")?;
    let events = user_events(&fields, "events", idempotency_key(&headers)?)?;
    let org = caller.org;
    let records = api.inner.db.append_user_events(org, id, events).await?;
    Ok(Json(EventsSent { data: records.iter().filter_map(|record| record.public()).collect() }))
}

pub(super) async fn list(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<SessionId>,
    query: Query,
) -> Result<Json<Page<Value>>> {
    query.unsupported(&["created_at"])?;
    let (limit, after) = (page::limit(&query)?, page::after::<u64>(&query)?.unwrap_or(0));
    let order = page::order(&query, Order::Ascending)?;
    let types: Vec<String> = query.many("types").into_iter().map(str::to_owned).collect();
    let org = caller.org;
    let mut found = Vec::new();
    let mut after = after;
    // Filtered here and not in SQL: a page of few matches reads more rows, but each only once. A journal only grows at
    // its end, so what lies between the positions is the same in every look.
    loop {
        let rows = api.inner.db.public_events(org, id, after, PAGE_ROWS_MAX, order).await?;
        let (is_last, end) = (rows.len() < PAGE_ROWS_MAX, rows.last().map(|(seq, _)| *seq));
        found.extend(rows.into_iter().filter(|(_, event)| matches(event, &types)));
        match end {
            Some(end) if !is_last && found.len() <= limit => after = end,
            _ => break,
        }
    }
    let cut = page::cut(found, limit, |(seq, _)| *seq);
    Ok(Json(Page { data: cut.data.into_iter().map(|(_, event)| event).collect(), next_page: cut.next_page }))
}

fn matches(event: &Value, types: &[String]) -> bool {
    let kind = event.get("type").and_then(Value::as_str).unwrap_or_default();
    types.is_empty() || types.iter().any(|wanted| wanted == kind)
}

pub(super) async fn stream(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<SessionId>,
    headers: HeaderMap,
) -> Result<Response> {
    let behind: Option<EventId> = match headers.get("last-event-id") {
        None => None,
        Some(value) => {
            let text = value.to_str().unwrap_or_default();
            Some(text.parse().map_err(|error| ApiError::invalid(format!("`Last-Event-ID`: {error}")))?)
        }
    };
    let permit = api.inner.streams.clone().try_acquire_owned().map_err(|_| {
        ApiError::new(Fault::Limit, format!("{STREAMS_MAX} event streams are open already; close some"))
    })?;
    let org = caller.org;
    let session = api.inner.db.session(org, id).await?;
    let after = match behind {
        None => Some(session.head),
        Some(event) => api.inner.db.seq_of_event(org, id, event).await?,
    };
    let Some(after) = after else {
        return Err(ApiError::invalid(
            "`Last-Event-ID`: the session has no such event; list its events, then stream without the header",
        ));
    };
    let follower = api.inner.db.follow(org, id, after);
    Ok(sse::events(follower, &api.inner.tasks, api.inner.stop.clone(), permit))
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    match value.to_str() {
        Ok(key) if !key.is_empty() && key.len() <= IDEMPOTENCY_KEY_BYTES_MAX => Ok(Some(key.to_owned())),
        _ => {
            let text =
                format!("`Idempotency-Key`: expected 1 to {IDEMPOTENCY_KEY_BYTES_MAX} visible characters");
            Err(ApiError::invalid(text))
        }
    }
}

/// Reads a list of events that a client may send.
pub(super) fn user_events(fields: &Fields<'_>, name: &str, key: Option<String>) -> Result<Vec<UserEvent>> {
    let list = fields.list(name)?.unwrap_or_default();
    if list.len() > EVENTS_PER_REQUEST_MAX {
        return Err(fields.wrong(name, &format!("at most {EVENTS_PER_REQUEST_MAX} events")));
    }
    list.iter()
        .enumerate()
        .map(|(at, event)| {
            let path = fields.path(&format!("{name}[{at}]"));
            let body = user_event(&Fields::at(&path, event)?)?;
            // The position belongs to the key: two events of one request are two.
            Ok(UserEvent { body, dedup: key.as_ref().map(|key| format!("{key}/{at}")) })
        })
        .collect()
}

fn user_event(event: &Fields<'_>) -> Result<Body> {
    match event.required_text("type")? {
        "user.message" => {
            let blocks = event.required_list("content")?;
            if blocks.is_empty() {
                return Err(event.wrong("content", &format!("1 to {BLOCKS_PER_MESSAGE_MAX} blocks")));
            }
            Ok(Body::UserMessage { content: content_blocks(event, blocks)? })
        }
        "user.interrupt" => {
            event.unsupported("session_thread_id")?;
            Ok(Body::UserInterrupt {})
        }
        "user.tool_confirmation" => {
            event.unsupported("session_thread_id")?;
            let result = match event.required_text("result")? {
                "allow" => Confirmation::Allow,
                "deny" => Confirmation::Deny,
                _ => return Err(event.wrong("result", "`allow` or `deny`")),
            };
            let deny_message = event.text("deny_message")?.map(str::to_owned);
            if deny_message.is_some() && result == Confirmation::Allow {
                return Err(event.wrong("deny_message", "nothing when `result` is `allow`"));
            }
            Ok(Body::UserToolConfirmation {
                tool_use_id: event_id(event, "tool_use_id")?,
                result,
                deny_message,
            })
        }
        "user.custom_tool_result" => {
            event.unsupported("session_thread_id")?;
            let custom_tool_use_id = event_id(event, "custom_tool_use_id")?;
            let content = content_blocks(event, event.list("content")?.unwrap_or_default())?;
            let is_error = event.flag("is_error")?.unwrap_or(false);
            Ok(Body::UserCustomToolResult { custom_tool_use_id, content, is_error })
        }
        kind @ ("user.tool_result" | "user.define_outcome" | "system.message") => {
            let expected = format!("one of {USER_KINDS}; `{kind}` is not supported by this version of Covey");
            Err(event.wrong("type", &expected))
        }
        _ => Err(event.wrong("type", &format!("one of {USER_KINDS}"))),
    }
}

fn event_id(event: &Fields<'_>, name: &str) -> Result<EventId> {
    event
        .required_text(name)?
        .parse()
        .map_err(|error| event.wrong(name, &format!("the id of an event ({error})")))
}

fn content_blocks(event: &Fields<'_>, blocks: &[Value]) -> Result<Vec<Value>> {
    if blocks.len() > BLOCKS_PER_MESSAGE_MAX {
        return Err(event.wrong("content", &format!("at most {BLOCKS_PER_MESSAGE_MAX} blocks")));
    }
    let blocks = blocks.iter().enumerate();
    blocks.map(|(at, block)| checked_block(&event.path(&format!("content[{at}]")), block)).collect()
}

fn checked_block(path: &str, block: &Value) -> Result<Value> {
    let fields = Fields::at(path, block)?;
    let source_path = fields.path("source");
    let source = |kinds: &[&str]| -> Result<()> {
        let source = match fields.value("source") {
            Some(source) => Fields::at(&source_path, source)?,
            None => return Err(fields.wrong("source", "an object")),
        };
        let kind = source.required_text("type")?;
        if !kinds.contains(&kind) {
            return Err(source.wrong("type", &format!("one of {}", kinds.join(", "))));
        }
        source.required_text(if kind == "url" { "url" } else { "data" })?;
        Ok(())
    };
    match fields.required_text("type")? {
        "text" => {
            // The model's API refuses a message with an empty text, and would refuse it for ever.
            if fields.required_text("text")?.trim().is_empty() {
                return Err(fields.wrong("text", "a text that is not empty"));
            }
        }
        "image" => source(&["base64", "url"])?,
        "document" => source(&["base64", "text", "url"])?,
        kind => {
            let expected =
                format!("`text`, `image` or `document`; `{kind}` is not supported by this version of Covey");
            return Err(fields.wrong("type", &expected));
        }
    }
    Ok(block.clone())
}
