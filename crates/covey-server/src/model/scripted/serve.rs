//! The scripted model as an HTTP server that speaks the Messages wire, streaming and not.

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

use super::check::{RequestChecker, Violation};
use super::plan;
use super::render::{self, Chunking, Fault, FaultPlan, Sending};
use super::script::ScriptFile;

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

/// Serves `scripts` on `listener`: `POST /v1/messages`, `POST /v1/messages/count_tokens`, and for whoever tests
/// with it `GET /violations` (`{"requests", "refused", "violations"}`).
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
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/violations", get(violations))
        .layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX))
        .with_state(shared.clone());
    let stopped = stop.clone().cancelled_owned();
    let task =
        tokio::spawn(async move { axum::serve(listener, router).with_graceful_shutdown(stopped).await });
    Ok(Handle { address, shared, stop, task: Some(task) })
}

async fn messages(State(shared): State<Arc<Shared>>, headers: HeaderMap, raw: Bytes) -> Response {
    let number = shared.requests.fetch_add(1, Ordering::Relaxed);
    let mut response = answer(&shared, number, &headers, &raw).await.unwrap_or_else(|refusal| *refusal);
    if let Ok(id) = HeaderValue::try_from(format!("req_scripted_{number}")) {
        response.headers_mut().insert("request-id", id);
    }
    response
}

async fn answer(
    shared: &Shared,
    number: u64,
    headers: &HeaderMap,
    raw: &[u8],
) -> Result<Response, Box<Response>> {
    authorize(&shared.options, headers)?;
    let invalid = |text: String| Box::new(error(StatusCode::BAD_REQUEST, "invalid_request_error", &text));
    let body: Map<String, Value> = serde_json::from_slice(raw).map_err(|e| invalid(e.to_string()))?;
    // Verified before any fault: a request that a fault would hide is as wrong as any other.
    shared.checker.check(&shared.scripts, &body, Some(raw)).map_err(invalid)?;
    let reply = plan::reply(&shared.scripts, &body).map_err(|e| invalid(e.to_string()))?;
    let fault = shared.options.faults.fault(shared.options.seed, number);
    if let Some(refusal) = fault.and_then(refusal) {
        return Err(Box::new(refusal));
    }
    if reply.think_ms > 0 {
        tokio::time::sleep(Duration::from_millis(reply.think_ms)).await;
    }
    if body.get("stream").and_then(Value::as_bool) != Some(true) {
        return Ok(Json(render::message(&body, &reply)).into_response());
    }
    let seed = shared.options.seed ^ number;
    let sending = render::stream(&body, &reply, fault, shared.options.chunking, seed);
    let head = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    Ok((head, stream_body(sending)).into_response())
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
    if let Err(refusal) = authorize(&shared.options, &headers) {
        return *refusal;
    }
    Json(json!({"input_tokens": raw.len() / 4 + 1})).into_response()
}

async fn violations(State(shared): State<Arc<Shared>>) -> Response {
    let (requests, refused) = shared.checker.counts();
    let violations = shared.checker.violations();
    Json(json!({"requests": requests, "refused": refused, "violations": violations})).into_response()
}

fn authorize(options: &ServeOptions, headers: &HeaderMap) -> Result<(), Box<Response>> {
    let Some(key) = &options.key else { return Ok(()) };
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = header("authorization").and_then(|value| value.strip_prefix("Bearer "));
    if header("x-api-key") == Some(key) || bearer == Some(key) {
        return Ok(());
    }
    let sent = header("x-api-key").or(bearer).unwrap_or("none");
    // The real service does not echo the key. This one does, so that a client that logs errors is caught.
    let text = format!("invalid key: {sent}");
    Err(Box::new(error(StatusCode::UNAUTHORIZED, "authentication_error", &text)))
}

/// Faults that are a whole answer.
fn refusal(fault: Fault) -> Option<Response> {
    let (status, kind, retry_after) = match fault {
        Fault::RateLimited { retry_after_s } => (429, "rate_limit_error", Some(retry_after_s)),
        Fault::Overloaded { retry_after_s } => (529, "overloaded_error", Some(retry_after_s)),
        Fault::ServerError => (500, "api_error", None),
        _ => return None,
    };
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = error(status, kind, "The script says so");
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    Some(response)
}

fn error(status: StatusCode, kind: &str, message: &str) -> Response {
    let body = json!({"type": "error", "error": {"type": kind, "message": message}});
    (status, Json(body)).into_response()
}
