//! One endpoint over HTTP, whichever wire it speaks.
//!
//! One request, one streamed answer. It never retries (that is the harness's decision), never follows a redirect
//! (a redirect would carry the key to another host), and never lets the key into an error: every text that comes
//! from outside is redacted before it is cut and kept. What does not belong here: what the bytes mean (`wire`).

use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, DATE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response, Url};
use serde_json::{Map, Value};

use crate::failure::{self, Refusal};
use crate::reading::{AssembleError, Reading};
use crate::secret::Secret;
use crate::sse::SseParser;
use crate::wire::{Question, Wire};
use crate::{Model, ModelAnswer, ModelCall, ModelDelta, ModelFailure, ModelRequest, Target, retry_after};

const API_VERSION: &str = "2023-06-01";
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// What of a foreign error text is kept; the rest is seldom read and may be a whole HTML page.
const DETAIL_BYTES_MAX: usize = 2 * 1024;
/// What of an error body is read at all.
const ERROR_BODY_BYTES_MAX: usize = 64 * 1024;
/// Whose servers want the limit of an answer under another name than everybody else's.
const OPENAI_HOST: &str = "api.openai.com";

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
pub enum EndpointError {
    /// The base URL is no URL.
    #[error("the model's base URL is not usable: {reason}; give something like https://api.anthropic.com")]
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
pub struct Endpoint {
    wire: Wire,
    client: Client,
    url: Url,
    credential: Option<Credential>,
    headers: HeaderMap,
    limits: CallLimits,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("host", &self.url.host_str()).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Makes a client for a wire below `{base_url}/v1`. Without a credential every call is `Unauthorized`, unless the
    /// base URL is plain `http`: local endpoints often want none.
    ///
    /// # Errors
    /// When the URL, the key or the system's certificates are not usable.
    pub fn new(
        wire: Wire,
        base_url: &str,
        credential: Option<Credential>,
        limits: CallLimits,
    ) -> Result<Self, EndpointError> {
        let parse =
            |text: &str| Url::parse(text).map_err(|e| EndpointError::BaseUrl { reason: e.to_string() });
        // Parsed alone first: with a path behind it, `http://` would read as a host named `v1`.
        parse(base_url.trim())?;
        let base = base_url.trim().trim_end_matches('/');
        let url = parse(&format!("{}/v1/{}", base.strip_suffix("/v1").unwrap_or(base), wire.path()))?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err(EndpointError::BaseUrl { reason: "it is neither http nor https".to_owned() });
        }
        let credential = credential.filter(|credential| !credential.secret().is_empty());
        let mut headers = HeaderMap::new();
        if wire == Wire::Messages {
            headers.insert(ANTHROPIC_VERSION, HeaderValue::from_static(API_VERSION));
        }
        if let Some(credential) = &credential {
            let (name, value) = match (credential, wire) {
                (Credential::ApiKey(key), Wire::Messages) => (API_KEY, key.expose().to_owned()),
                // The other wires know one way only.
                _ => (AUTHORIZATION, format!("Bearer {}", credential.secret().expose())),
            };
            let mut value = HeaderValue::try_from(value).map_err(|_| EndpointError::Key)?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let client = http_client(url.scheme() == "https")?;
        Ok(Self { wire, client, url, credential, headers, limits })
    }

    /// The wire it speaks.
    pub const fn wire(&self) -> Wire {
        self.wire
    }

    /// Whether every call would fail for want of a key: there is none, and the endpoint is not one of this machine or
    /// network, which may need none.
    pub fn lacks_key(&self) -> bool {
        self.credential.is_none() && self.url.scheme() == "https"
    }

    /// Sends one question and reads its answer, within the limits.
    ///
    /// # Errors
    /// When there is no answer; the failure says whether asking again can help.
    pub async fn ask(
        &self,
        body: &Map<String, Value>,
        schema: Option<&Value>,
        on_delta: &(dyn Fn(ModelDelta) + Send + Sync),
    ) -> Result<ModelAnswer, ModelFailure> {
        let limit = self.limits.call_time_max;
        match tokio::time::timeout(limit, self.send(body, schema, on_delta)).await {
            Ok(result) => result,
            Err(_) => Err(transient(format!("the answer took more than {} s", limit.as_secs()), None)),
        }
    }

    async fn send(
        &self,
        body: &Map<String, Value>,
        schema: Option<&Value>,
        on_delta: &(dyn Fn(ModelDelta) + Send + Sync),
    ) -> Result<ModelAnswer, ModelFailure> {
        if self.lacks_key() {
            let detail =
                "no key is configured; set ANTHROPIC_API_KEY or ANTHROPIC_AUTH_TOKEN, or the provider's \
                          `api_key_env` in COVEY_MODELS_FILE"
                    .to_owned();
            return Err(ModelFailure::Unauthorized { detail });
        }
        let is_openai = self.url.host_str() == Some(OPENAI_HOST);
        let output_limit_field = (is_openai && self.wire == Wire::Chat).then_some("max_completion_tokens");
        let body = self.wire.request(Question { body, schema, output_limit_field });
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
        let reading = self.wire.reading(&body);
        if is_json {
            self.read_whole(response, request_id, reading).await
        } else {
            self.read_stream(response, request_id, (reading, on_delta)).await
        }
    }

    async fn read_stream(
        &self,
        mut response: Response,
        request_id: Option<String>,
        (mut reading, on_delta): (Box<dyn Reading>, &(dyn Fn(ModelDelta) + Send + Sync)),
    ) -> Result<ModelAnswer, ModelFailure> {
        let mut parser = SseParser::default();
        let mut received = 0;
        while !reading.is_complete() {
            let Some(piece) = self.next_piece(&mut response, &mut received, &request_id).await? else {
                break;
            };
            let events = parser.push(&piece).map_err(|e| transient(e.to_string(), request_id.clone()))?;
            for event in events {
                let taken = reading.take(&event.data, &mut |delta| on_delta(delta));
                taken.map_err(|error| self.lost(error, request_id.clone()))?;
            }
        }
        reading.finish(request_id.clone()).map_err(|error| self.lost(error, request_id))
    }

    async fn read_whole(
        &self,
        mut response: Response,
        request_id: Option<String>,
        reading: Box<dyn Reading>,
    ) -> Result<ModelAnswer, ModelFailure> {
        let mut received = 0;
        let mut body = Vec::new();
        while let Some(piece) = self.next_piece(&mut response, &mut received, &request_id).await? {
            body.extend_from_slice(&piece);
        }
        let answer = serde_json::from_slice(&body)
            .map_err(|e| transient(format!("the answer is no JSON object: {e}"), request_id.clone()))?;
        reading.whole(answer, request_id.clone()).map_err(|error| self.lost(error, request_id))
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
        let refusal = Refusal::read(status.as_u16(), &body);
        let request_id = request_id.or_else(|| refusal.request_id.clone());
        self.classify(&refusal, wait.or(refusal.retry_after), request_id)
    }

    /// A stream that did not become an answer.
    fn lost(&self, error: AssembleError, request_id: Option<String>) -> ModelFailure {
        let detail = error.to_string();
        match error {
            AssembleError::Provider { status, kind, message } => {
                let refusal = Refusal::in_stream(status, &kind, &message);
                self.classify(&refusal, refusal.retry_after, request_id)
            }
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
        refusal: &Refusal,
        retry_after: Option<Duration>,
        request_id: Option<String>,
    ) -> ModelFailure {
        failure::classify(refusal, self.cleaned(&refusal.detail), retry_after, request_id)
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

impl Model for Endpoint {
    fn target(&self, _model: &str, _wanted: Option<&str>) -> Target {
        Target { wire: self.wire.name(), ..Target::default() }
    }

    fn call<'a>(
        &'a self,
        request: &'a ModelRequest,
        on_delta: &'a (dyn Fn(ModelDelta) + Send + Sync),
    ) -> ModelCall<'a> {
        Box::pin(self.ask(&request.body, None, on_delta))
    }
}

fn transient(detail: String, request_id: Option<String>) -> ModelFailure {
    ModelFailure::Transient { status: None, retry_after: None, detail, request_id }
}

fn header(response: &Response, name: &str) -> Option<String> {
    Some(response.headers().get(name)?.to_str().ok()?.to_owned())
}

fn http_client(needs_tls: bool) -> Result<Client, EndpointError> {
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
    builder.build().map_err(EndpointError::Tls)
}
