//! The scripted model as an HTTP server that speaks all three wires, streaming and not.
//!
//! A request is translated into the journal's shape and then checked and answered as any other, so one verifier and one
//! plan stand behind every wire.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::check::{RequestChecker, UNKNOWN_BLOCK_TYPE, Violation};
use super::plan;
use super::render::{self, Chunking, Fault, FaultPlan, Manner, Sending};
use super::script::ScriptFile;
use crate::reading::WIRE_ITEM_TYPE;
use crate::wire::Wire;

/// The provider's own limit of a request.
const REQUEST_BYTES_MAX: usize = 32 * 1024 * 1024;
/// How long open answers may go on after [`Handle::shutdown`].
const SHUTDOWN_TIME_MAX: Duration = Duration::from_secs(2);

/// How the server behaves.
#[derive(Debug, Clone, Default)]
pub struct ServeOptions {
    /// The key that clients must send, as `x-api-key` or as a bearer token; none accepts everything.
    pub key: Option<String>,
    /// How streams are cut.
    pub chunking: Chunking,
    /// What goes wrong.
    pub faults: FaultPlan,
    /// Decides pieces and faults, together with the request's number.
    pub seed: u64,
}

#[derive(Debug)]
struct Shared {
    scripts: ScriptFile,
    options: ServeOptions,
    checker: RequestChecker,
    requests: AtomicU64,
}

/// A running server. Dropping it ends the server at once.
#[derive(Debug)]
pub struct Handle {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: CancellationToken,
    task: Option<JoinHandle<std::io::Result<()>>>,
}

impl Handle {
    /// What a client takes as base URL.
    pub fn base_url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Requests that came in so far, faulty ones included.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    /// What the verifier has refused, oldest first.
    pub fn violations(&self) -> Vec<Violation> {
        self.shared.checker.violations()
    }

    /// Stops accepting, lets open answers end for a short time, and then ends.
    ///
    /// # Errors
    /// When the server had failed before.
    pub async fn shutdown(mut self) -> std::io::Result<()> {
        self.stop.cancel();
        let Some(mut task) = self.task.take() else { return Ok(()) };
        match tokio::time::timeout(SHUTDOWN_TIME_MAX, &mut task).await {
            Ok(ended) => ended.map_err(std::io::Error::other)?,
            Err(_) => {
                task.abort();
                Ok(())
            }
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

/// Serves `scripts` on `listener`: `POST /v1/messages`, `/v1/messages/count_tokens`, `/v1/chat/completions` and
/// `/v1/responses`, and for whoever tests with it `GET /violations` (`{"requests", "refused", "violations"}`).
///
/// # Errors
/// When the listener has no address any more.
pub fn serve(scripts: ScriptFile, listener: TcpListener, options: ServeOptions) -> std::io::Result<Handle> {
    let address = listener.local_addr()?;
    let checker = RequestChecker::default();
    let shared = Arc::new(Shared { scripts, options, checker, requests: AtomicU64::new(0) });
    let stop = CancellationToken::new();
    let router = Router::new()
        .route("/", get(|| async { StatusCode::OK }))
        .route("/v1/messages", post(messages))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/responses", post(responses))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/violations", get(violations))
        .layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX))
        .with_state(shared.clone());
    let stopped = stop.clone().cancelled_owned();
    let task =
        tokio::spawn(async move { axum::serve(listener, router).with_graceful_shutdown(stopped).await });
    Ok(Handle { address, shared, stop, task: Some(task) })
}

type Asked = (State<Arc<Shared>>, HeaderMap, Bytes);

async fn messages(State(shared): State<Arc<Shared>>, headers: HeaderMap, raw: Bytes) -> Response {
    respond(Wire::Messages, (State(shared), headers, raw)).await
}

async fn chat(State(shared): State<Arc<Shared>>, headers: HeaderMap, raw: Bytes) -> Response {
    respond(Wire::Chat, (State(shared), headers, raw)).await
}

async fn responses(State(shared): State<Arc<Shared>>, headers: HeaderMap, raw: Bytes) -> Response {
    respond(Wire::Responses, (State(shared), headers, raw)).await
}

async fn respond(wire: Wire, (State(shared), headers, raw): Asked) -> Response {
    let number = shared.requests.fetch_add(1, Ordering::Relaxed);
    let answer = answer(&shared, (wire, number), &headers, &raw).await;
    let mut response = answer.unwrap_or_else(|refusal| *refusal);
    if let Ok(id) = HeaderValue::try_from(format!("req_scripted_{number}")) {
        let name = if wire == Wire::Messages { "request-id" } else { "x-request-id" };
        response.headers_mut().insert(name, id);
    }
    response
}

async fn answer(
    shared: &Shared,
    (wire, number): (Wire, u64),
    headers: &HeaderMap,
    raw: &[u8],
) -> Result<Response, Box<Response>> {
    authorize(wire, &shared.options, headers)?;
    let invalid =
        |text: String| Box::new(error(wire, StatusCode::BAD_REQUEST, "invalid_request_error", &text));
    let sent: Map<String, Value> = serde_json::from_slice(raw).map_err(|e| invalid(e.to_string()))?;
    let body = understood(wire, &sent).map_err(invalid)?;
    // Verified before any fault: a request that a fault would hide is as wrong as any other.
    shared.checker.check(&shared.scripts, wire, &body, Some(raw)).map_err(invalid)?;
    let reply = plan::reply(&shared.scripts, &body).map_err(|e| invalid(e.to_string()))?;
    let fault = shared.options.faults.fault(shared.options.seed, number);
    if let Some(refusal) = fault.and_then(|fault| refusal(wire, fault)) {
        return Err(Box::new(refusal));
    }
    if reply.think_ms > 0 {
        tokio::time::sleep(Duration::from_millis(reply.think_ms)).await;
    }
    if sent.get("stream").and_then(Value::as_bool) != Some(true) {
        return Ok(Json(render::whole(wire, &body, &reply)).into_response());
    }
    let manner = Manner { fault, chunking: shared.options.chunking, seed: shared.options.seed ^ number };
    let sending = render::stream(wire, &body, &reply, manner);
    let head = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    Ok((head, stream_body(sending)).into_response())
}

/// The request in the journal's shape, with what came over its own wire as the blocks that the script knows.
fn understood(wire: Wire, sent: &Map<String, Value>) -> Result<Map<String, Value>, String> {
    let mut body = wire.incoming(sent)?;
    if let Some(options) = sent.get("stream_options").filter(|_| wire == Wire::Chat) {
        body.insert("stream_options".to_owned(), options.clone());
    }
    for message in body.get_mut("messages").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(Value::Array(blocks)) = message.get_mut("content") else { continue };
        *blocks = std::mem::take(blocks).into_iter().filter_map(scripts_block).collect();
    }
    Ok(body)
}

fn scripts_block(block: Value) -> Option<Value> {
    if block["type"] != WIRE_ITEM_TYPE {
        return Some(block);
    }
    let item = &block["item"];
    let (text, signature) = match (item["type"].as_str(), item["reasoning_content"].as_str()) {
        (Some("reasoning"), _) => {
            (item["summary"][0]["text"].as_str()?, item["encrypted_content"].as_str()?.to_owned())
        }
        (Some(UNKNOWN_BLOCK_TYPE), _) => return Some(item.clone()),
        // There is no signature on that wire; the text is compared with the script's.
        (_, Some(text)) => (text, plan::signature(text)),
        _ => return None,
    };
    Some(json!({"type": "thinking", "thinking": text, "signature": signature}))
}

fn stream_body(sending: Sending) -> Body {
    let Sending { pieces, pause, hang_up } = sending;
    let end = hang_up.then(|| Err(std::io::Error::other("the script hangs up")));
    let pieces = pieces.into_iter().map(Ok).chain(end);
    Body::from_stream(futures_util::stream::unfold(pieces, move |mut pieces| async move {
        let piece = pieces.next()?;
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        Some((piece, pieces))
    }))
}

async fn count_tokens(State(shared): State<Arc<Shared>>, headers: HeaderMap, raw: Bytes) -> Response {
    if let Err(refusal) = authorize(Wire::Messages, &shared.options, &headers) {
        return *refusal;
    }
    Json(json!({"input_tokens": raw.len() / 4 + 1})).into_response()
}

async fn violations(State(shared): State<Arc<Shared>>) -> Response {
    let (requests, refused) = shared.checker.counts();
    let violations = shared.checker.violations();
    Json(json!({"requests": requests, "refused": refused, "violations": violations})).into_response()
}

fn authorize(wire: Wire, options: &ServeOptions, headers: &HeaderMap) -> Result<(), Box<Response>> {
    let Some(key) = &options.key else { return Ok(()) };
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = header("authorization").and_then(|value| value.strip_prefix("Bearer "));
    if header("x-api-key") == Some(key) || bearer == Some(key) {
        return Ok(());
    }
    let sent = header("x-api-key").or(bearer).unwrap_or("none");
    // The real service does not echo the key. This one does, so that a client that logs errors is caught.
    let text = format!("invalid key: {sent}");
    Err(Box::new(error(wire, StatusCode::UNAUTHORIZED, "authentication_error", &text)))
}

/// Faults that are a whole answer.
fn refusal(wire: Wire, fault: Fault) -> Option<Response> {
    let (status, kind, retry_after) = match fault {
        Fault::RateLimited { retry_after_s } => (429, "rate_limit_error", Some(retry_after_s)),
        Fault::Overloaded { retry_after_s } => (529, "overloaded_error", Some(retry_after_s)),
        Fault::ServerError => (500, "api_error", None),
        _ => return None,
    };
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = error(wire, status, kind, "The script says so");
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    Some(response)
}

fn error(wire: Wire, status: StatusCode, kind: &str, message: &str) -> Response {
    let body = match wire {
        Wire::Messages => json!({"type": "error", "error": {"type": kind, "message": message}}),
        Wire::Chat | Wire::Responses => {
            json!({"error": {"message": message, "type": kind, "param": null, "code": null}})
        }
    };
    (status, Json(body)).into_response()
}
