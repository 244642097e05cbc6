//! Model clients: one trait, the Anthropic Messages client, and the scripted model that tests and the demo use.
//!
//! The provider's raw blocks are kept and sent back unchanged; nothing here decides what to ask or when to
//! retry (that is `covey-harness`), and no key is ever part of a request, an answer or a log line.

pub mod anthropic;
pub mod assemble;
pub mod retry_after;
pub mod scripted;
pub mod secret;
pub mod sse;

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use serde_json::{Map, Value};

pub use assemble::MALFORMED_INPUT_KEY;
pub use secret::Secret;

/// One request in the shape of the Messages API, without `stream` and without credentials. The text of the
/// parts that the provider caches is byte-stable from call to call.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelRequest {
    /// `model`, `max_tokens`, `system`, `tools`, `messages`, … exactly as they are to be sent.
    pub body: Map<String, Value>,
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
    /// Sends one request and assembles the streamed answer. `on_delta` is called as pieces arrive.
    fn call<'a>(
        &'a self,
        request: &'a ModelRequest,
        on_delta: &'a (dyn Fn(ModelDelta) + Send + Sync),
    ) -> ModelCall<'a>;
}
