//! Model clients in three wires, the choice between providers, and the scripted model that tests and the demo use.
//!
//! Reason for a crate: **trust**. Beyond it stands whoever answers for a model: third parties' keys are held here and
//! nowhere else, and what their servers send is read here first. Nothing here decides what to ask or when to ask again
//! (that is `covey-harness`), and no key is ever part of a request's body, an answer or a log line.

#![forbid(unsafe_code)]

pub mod chat;
pub mod config;
pub mod dialect;
pub mod endpoint;
pub mod failure;
pub mod messages;
pub mod reading;
pub mod responses;
pub mod retry_after;
pub mod router;
pub mod scripted;
pub mod secret;
pub mod sse;
mod translate;
pub mod wire;

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use serde_json::{Map, Value};

pub use endpoint::{CallLimits, Credential, Endpoint, EndpointError};
pub use reading::MALFORMED_INPUT_KEY;
pub use router::Router;
pub use secret::Secret;
pub use wire::Wire;

/// One request in the shape of the Messages API, without `stream` and without credentials. The text of the
/// parts that the provider caches is byte-stable from call to call.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelRequest {
    /// `model`, `max_tokens`, `system`, `tools`, `messages`, …
    pub body: Map<String, Value>,
    /// The provider that is to be asked, as [`Model::target`] named it; none: the first one.
    pub provider: Option<String>,
}

impl ModelRequest {
    /// A request to whoever comes first.
    pub const fn new(body: Map<String, Value>) -> Self {
        Self { body, provider: None }
    }
}

/// Who will answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The provider's name; none where there is only one without a name.
    pub provider: Option<String>,
    /// The wire it speaks.
    pub wire: &'static str,
    /// Tokens that the model's context holds there, as far as the configuration says.
    pub context_tokens: Option<u64>,
    /// Who is asked when this one does not answer.
    pub next: Option<String>,
}

impl Default for Target {
    fn default() -> Self {
        Self { provider: None, wire: Wire::Messages.name(), context_tokens: None, next: None }
    }
}

/// A finished answer. An unfinished stream is never one.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelAnswer {
    /// The provider's content blocks as assembled from the stream, unknown ones and unknown fields included.
    pub content: Vec<Value>,
    /// `end_turn`, `tool_use`, `max_tokens`, `refusal`, `pause_turn`, …
    pub stop_reason: String,
    /// The provider's usage object, cumulative.
    pub usage: Value,
    /// The model that answered, in the provider's words.
    pub model: String,
    /// The provider's request id, for its support.
    pub request_id: Option<String>,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelFailure {
    /// 429, 529, 5xx, a broken connection or a stream that did not finish: the same request may be sent again.
    #[error("the model is not available: {detail}")]
    Transient {
        /// HTTP status, when there was one.
        status: Option<u16>,
        /// The provider's `retry-after`.
        retry_after: Option<Duration>,
        /// For people; never contains a key.
        detail: String,
        /// The provider's request id.
        request_id: Option<String>,
    },
    /// 400, 413, …: sending it again changes nothing.
    #[error("the model refused the request: {detail}")]
    Rejected {
        /// HTTP status.
        status: u16,
        /// For people; never contains a key.
        detail: String,
        /// The provider's request id.
        request_id: Option<String>,
    },
    /// The conversation is longer than the model's context: only a shorter one can be answered.
    #[error("the conversation does not fit the model's context: {detail}")]
    TooLong {
        /// HTTP status.
        status: u16,
        /// For people; never contains a key.
        detail: String,
        /// The provider's request id.
        request_id: Option<String>,
    },
    /// 401 or 403, or no key is configured.
    #[error("the model's key is missing or not accepted: {detail}")]
    Unauthorized {
        /// For people; never contains a key.
        detail: String,
    },
}

/// Something to show while the model still speaks; never a result.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelDelta {
    /// A piece of the answer's text.
    Text(String),
    /// A piece of the model's thinking.
    Thinking(String),
}

/// What [`Model::call`] returns. Dropping it cancels the request.
pub type ModelCall<'a> = Pin<Box<dyn Future<Output = Result<ModelAnswer, ModelFailure>> + Send + 'a>>;

/// Something that answers requests.
pub trait Model: Send + Sync {
    /// Who would be asked for a model of this name. `wanted` is the provider that a session wants to stay with.
    fn target(&self, _model: &str, _wanted: Option<&str>) -> Target {
        Target::default()
    }

    /// Sends one request and assembles the streamed answer. `on_delta` is called as pieces arrive.
    fn call<'a>(
        &'a self,
        request: &'a ModelRequest,
        on_delta: &'a (dyn Fn(ModelDelta) + Send + Sync),
    ) -> ModelCall<'a>;
}
