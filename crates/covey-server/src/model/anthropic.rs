//! The client for everything that speaks the Anthropic Messages API.
//!
//! One request, one streamed answer. It never retries (that is the harness's decision), never follows a redirect
//! (a redirect would carry the key to another host), and never lets the key into an error: every text that comes
//! from outside is redacted before it is cut and kept.

use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, DATE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode, Url};
use serde_json::Value;

use super::assemble::{AssembleError, Assembler, from_message};
use super::secret::Secret;
use super::sse::SseParser;
use super::{Model, ModelAnswer, ModelCall, ModelDelta, ModelFailure, ModelRequest, retry_after};

/// The provider's public endpoint.
pub const DEFAULT_BASE_URL: &str = "https://api.anthropic.com";
const API_VERSION: &str = "2023-06-01";
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// What of a foreign error text is kept; the rest is seldom read and may be a whole HTML page.
const DETAIL_BYTES_MAX: usize = 2 * 1024;
/// What of an error body is read at all.
const ERROR_BODY_BYTES_MAX: usize = 64 * 1024;
/// Status that the provider answers with when it is overloaded; not registered, so not in any table.
const OVERLOADED: u16 = 529;

/// How the key is presented.
#[derive(Debug, Clone)]
pub enum Credential {
    /// `x-api-key`, from `ANTHROPIC_API_KEY`.
    ApiKey(Secret),
    /// `Authorization: Bearer`, from `ANTHROPIC_AUTH_TOKEN`.
    Bearer(Secret),
}

impl Credential {
    fn secret(&self) -> &Secret {
        match self {
            Self::ApiKey(secret) | Self::Bearer(secret) => secret,
        }
    }
}

/// What one call may use up.
#[derive(Debug, Clone, Copy)]
pub struct CallLimits {
    /// From the request to the answer's head. Local models think before they send it.
    pub head_time_max: Duration,
    /// Between two pieces of the answer; pings count.
    pub idle_time_max: Duration,
    /// The whole call.
    pub call_time_max: Duration,
    /// The whole answer as it came over the wire.
    pub answer_bytes_max: usize,
}

impl Default for CallLimits {
    fn default() -> Self {
        Self {
            head_time_max: Duration::from_secs(300),
            idle_time_max: Duration::from_secs(120),
            call_time_max: Duration::from_secs(3600),
            answer_bytes_max: 64 * 1024 * 1024,
        }
    }
}

/// A client that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum AnthropicError {
    /// The base URL is no URL.
    #[error("the model's base URL is not usable: {reason}; give something like {DEFAULT_BASE_URL}")]
    BaseUrl {
        /// What is wrong; never the URL itself, which may hold a password.
        reason: String,
    },
    /// The key holds bytes that no header may hold.
    #[error("the model's key contains characters that no HTTP header may hold; copy it again")]
    Key,
    /// TLS cannot be set up, normally because the system has no root certificates.
    #[error("TLS for the model's base URL cannot be set up; install the system's CA certificates")]
    Tls(#[source] reqwest::Error),
}

/// A client for one endpoint and one key. Cheap to clone; connections are shared.
#[derive(Clone)]
pub struct Anthropic {
    client: Client,
    url: Url,
    credential: Option<Credential>,
    headers: HeaderMap,
    limits: CallLimits,
}

impl std::fmt::Debug for Anthropic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Anthropic").field("host", &self.url.host_str()).finish_non_exhaustive()
    }
}

impl Anthropic {
    /// Makes a client for `{base_url}/v1/messages`. Without a credential every call is `Unauthorized`, unless the
    /// base URL is plain `http`: local endpoints often want none.
    ///
    /// # Errors
    /// When the URL, the key or the system's certificates are not usable.
    pub fn new(
        base_url: &str,
        credential: Option<Credential>,
        limits: CallLimits,
    ) -> Result<Self, AnthropicError> {
        let parse =
            |text: &str| Url::parse(text).map_err(|e| AnthropicError::BaseUrl { reason: e.to_string() });
        // Parsed alone first: with a path behind it, `http://` would read as a host named `v1`.
        parse(base_url.trim())?;
        let base = base_url.trim().trim_end_matches('/');
        let url = parse(&format!("{}/v1/messages", base.strip_suffix("/v1").unwrap_or(base)))?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err(AnthropicError::BaseUrl { reason: "it is neither http nor https".to_owned() });
        }
        let credential = credential.filter(|credential| !credential.secret().is_empty());
        let mut headers = HeaderMap::new();
        headers.insert(ANTHROPIC_VERSION, HeaderValue::from_static(API_VERSION));
        if let Some(credential) = &credential {
            let (name, value) = match credential {
                Credential::ApiKey(key) => (API_KEY, key.expose().to_owned()),
                Credential::Bearer(token) => (AUTHORIZATION, format!("Bearer {}", token.expose())),
            };
            let mut value = HeaderValue::try_from(value).map_err(|_| AnthropicError::Key)?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let client = http_client(url.scheme() == "https")?;
        Ok(Self { client, url, credential, headers, limits })
    }

    async fn send(
        &self,
        request: &ModelRequest,
        on_delta: &(dyn Fn(ModelDelta) + Send + Sync),
    ) -> Result<ModelAnswer, ModelFailure> {
        if self.credential.is_none() && self.url.scheme() == "https" {
            let detail = "no key is configured; set ANTHROPIC_API_KEY or ANTHROPIC_AUTH_TOKEN".to_owned();
            return Err(ModelFailure::Unauthorized { detail });
        }
        let mut body = request.body.clone();
        body.insert("stream".to_owned(), Value::Bool(true));
        let sending = self.client.post(self.url.clone()).headers(self.headers.clone()).json(&body).send();
        let response = match tokio::time::timeout(self.limits.head_time_max, sending).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(self.broken(&error, None)),
            Err(_) => {
                let seconds = self.limits.head_time_max.as_secs();
                return Err(transient(format!("no answer began within {seconds} s"), None));
            }
        };
        let request_id = header(&response, "request-id").or_else(|| header(&response, "x-request-id"));
        if !response.status().is_success() {
            return Err(self.refused(response, request_id).await);
        }
        let is_json =
            header(&response, CONTENT_TYPE.as_str()).is_some_and(|v| v.starts_with("application/json"));
        if is_json {
            self.read_whole(response, request_id).await
        } else {
            self.read_stream(response, request_id, on_delta).await
        }
    }

    async fn read_stream(
        &self,
        mut response: Response,
        request_id: Option<String>,
        on_delta: &(dyn Fn(ModelDelta) + Send + Sync),
    ) -> Result<ModelAnswer, ModelFailure> {
        let mut parser = SseParser::default();
        let mut assembler = Assembler::default();
        let mut received = 0;
        while !assembler.is_stopped() {
            let Some(piece) = self.next_piece(&mut response, &mut received, &request_id).await? else {
                break;
            };
            let events = parser.push(&piece).map_err(|e| transient(e.to_string(), request_id.clone()))?;
            for event in events {
                match assembler.push(&event.data) {
                    Ok(Some(delta)) => on_delta(delta),
                    Ok(None) => {}
                    Err(error) => return Err(self.lost(error, request_id)),
                }
            }
        }
        assembler.finish(request_id.clone()).map_err(|error| self.lost(error, request_id))
    }

    async fn read_whole(
        &self,
        mut response: Response,
        request_id: Option<String>,
    ) -> Result<ModelAnswer, ModelFailure> {
        let mut received = 0;
        let mut body = Vec::new();
        while let Some(piece) = self.next_piece(&mut response, &mut received, &request_id).await? {
            body.extend_from_slice(&piece);
        }
        let message = serde_json::from_slice(&body)
            .map_err(|e| transient(format!("the answer is no JSON object: {e}"), request_id.clone()))?;
        from_message(message, request_id.clone()).map_err(|error| self.lost(error, request_id))
    }

    async fn next_piece(
        &self,
        response: &mut Response,
        received: &mut usize,
        request_id: &Option<String>,
    ) -> Result<Option<bytes::Bytes>, ModelFailure> {
        let piece = match tokio::time::timeout(self.limits.idle_time_max, response.chunk()).await {
            Ok(Ok(piece)) => piece,
            Ok(Err(error)) => return Err(self.broken(&error, request_id.clone())),
            Err(_) => {
                let ms = self.limits.idle_time_max.as_millis();
                return Err(transient(
                    format!("the answer's stream was silent for {ms} ms"),
                    request_id.clone(),
                ));
            }
        };
        *received += piece.as_ref().map_or(0, bytes::Bytes::len);
        if *received > self.limits.answer_bytes_max {
            let limit = self.limits.answer_bytes_max;
            return Err(transient(format!("the answer exceeds {limit} bytes"), request_id.clone()));
        }
        Ok(piece)
    }

    /// An HTTP status that is no success.
    async fn refused(&self, mut response: Response, request_id: Option<String>) -> ModelFailure {
        let status = response.status();
        let date = header(&response, DATE.as_str());
        let wait = header(&response, "retry-after-ms")
            .and_then(|ms| Some((ms.trim().parse::<f64>().ok()? / 1000.0).to_string()))
            .or_else(|| header(&response, RETRY_AFTER.as_str()))
            .and_then(|text| retry_after::parse(&text, date.as_deref()));
        let mut body = Vec::new();
        while body.len() < ERROR_BODY_BYTES_MAX {
            // What cannot be read of an error's text is only missing from the text.
            match tokio::time::timeout(self.limits.idle_time_max, response.chunk()).await {
                Ok(Ok(Some(piece))) => body.extend_from_slice(&piece),
                _ => break,
            }
        }
        body.truncate(ERROR_BODY_BYTES_MAX);
        let json: Value = serde_json::from_slice(&body).unwrap_or_default();
        let request_id = request_id.or_else(|| Some(json.get("request_id")?.as_str()?.to_owned()));
        let detail = match (json.pointer("/error/type"), json.pointer("/error/message")) {
            (Some(Value::String(kind)), Some(Value::String(message))) => {
                format!("{status}: {kind}: {message}")
            }
            _ => format!("{status}: {}", String::from_utf8_lossy(&body)),
        };
        self.classify(status.as_u16(), detail, wait, request_id)
    }

    /// A stream that did not become an answer.
    fn lost(&self, error: AssembleError, request_id: Option<String>) -> ModelFailure {
        let detail = error.to_string();
        match error {
            AssembleError::Provider { kind, .. } => self.classify(status_of(&kind), detail, None, request_id),
            AssembleError::Malformed(_) | AssembleError::Unfinished(_) => {
                transient(self.cleaned(&detail), request_id)
            }
        }
    }

    /// The connection failed.
    fn broken(&self, error: &reqwest::Error, request_id: Option<String>) -> ModelFailure {
        let mut detail = match self.url.host_str() {
            Some(host) if error.is_connect() => format!("cannot connect to {host}"),
            _ => "the connection broke".to_owned(),
        };
        // The error's own text holds the URL, and that may hold a password; its causes do not.
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            detail.push_str(": ");
            detail.push_str(&cause.to_string());
            source = cause.source();
        }
        transient(self.cleaned(&detail), request_id)
    }

    fn classify(
        &self,
        status: u16,
        detail: String,
        retry_after: Option<Duration>,
        request_id: Option<String>,
    ) -> ModelFailure {
        let detail = self.cleaned(&detail);
        match status {
            401 | 403 => ModelFailure::Unauthorized { detail },
            408 | 409 | 425 | 429 | 500.. => {
                ModelFailure::Transient { status: Some(status), retry_after, detail, request_id }
            }
            _ => ModelFailure::Rejected { status, detail, request_id },
        }
    }

    fn cleaned(&self, text: &str) -> String {
        let mut text = match &self.credential {
            Some(credential) => credential.secret().redact(text),
            None => text.to_owned(),
        };
        text.truncate(text.floor_char_boundary(DETAIL_BYTES_MAX));
        text
    }
}

impl Model for Anthropic {
    fn call<'a>(
        &'a self,
        request: &'a ModelRequest,
        on_delta: &'a (dyn Fn(ModelDelta) + Send + Sync),
    ) -> ModelCall<'a> {
        Box::pin(async move {
            let limit = self.limits.call_time_max;
            match tokio::time::timeout(limit, self.send(request, on_delta)).await {
                Ok(result) => result,
                Err(_) => Err(transient(format!("the answer took more than {} s", limit.as_secs()), None)),
            }
        })
    }
}

fn transient(detail: String, request_id: Option<String>) -> ModelFailure {
    ModelFailure::Transient { status: None, retry_after: None, detail, request_id }
}

fn header(response: &Response, name: &str) -> Option<String> {
    Some(response.headers().get(name)?.to_str().ok()?.to_owned())
}

/// The HTTP status that the provider sends with an error type; in the middle of a stream only the type comes.
fn status_of(kind: &str) -> u16 {
    match kind {
        "invalid_request_error" => 400,
        "authentication_error" => 401,
        "billing_error" => 402,
        "permission_error" => 403,
        "not_found_error" => 404,
        "request_too_large" => 413,
        "rate_limit_error" => 429,
        "timeout_error" => 504,
        "overloaded_error" => OVERLOADED,
        _ => StatusCode::INTERNAL_SERVER_ERROR.as_u16(),
    }
}

fn http_client(needs_tls: bool) -> Result<Client, AnthropicError> {
    // The provider is chosen here and not left to whichever crate features happen to be on. It is process-wide; a
    // second installation is refused and changes nothing.
    if rustls::crypto::CryptoProvider::get_default().is_none()
        && rustls::crypto::ring::default_provider().install_default().is_err()
    {
        tracing::debug!("another thread installed the TLS provider first");
    }
    let mut builder =
        Client::builder().redirect(reqwest::redirect::Policy::none()).connect_timeout(CONNECT_TIME_MAX);
    if !needs_tls {
        // Without this a machine that has no CA certificates could not even talk to a local model.
        let roots = rustls::RootCertStore::empty();
        let config = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        builder = builder.tls_backend_preconfigured(config);
    }
    builder.build().map_err(AnthropicError::Tls)
}
