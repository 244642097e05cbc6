//! Events of a streamed answer become a finished answer, whichever wire they come over.
//!
//! An answer exists only when the wire's own end has arrived; everything else is unfinished, whatever has come
//! before. What does not belong here: the events of one wire (`messages`, `chat`, `responses`), HTTP.

use serde_json::{Map, Value, json};

use crate::{ModelAnswer, ModelDelta};

/// The key under which the raw text of a tool input stands that is not a JSON object.
///
/// The journal takes only objects as `input`, so the block stays one that can be sent back; the tool then refuses the
/// unknown field, and the model sees what it wrote.
pub const MALFORMED_INPUT_KEY: &str = "_malformed_json";
/// An answer with more blocks than this is a broken or hostile peer.
pub const ANSWER_BLOCKS_MAX: usize = 4096;

/// Type of a block that only the wire it came over understands. Its `wire` names that one, its `item` is what is sent
/// back to it, unchanged; every other wire is sent the conversation without it.
pub const WIRE_ITEM_TYPE: &str = "wire_item";

/// Why the events do not give an answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AssembleError {
    /// The provider said so in the middle of the stream.
    #[error("{kind}: {message}")]
    Provider {
        /// The HTTP status that the provider would have answered with.
        status: u16,
        /// `overloaded_error`, `server_error`, …
        kind: String,
        /// The provider's words.
        message: String,
    },
    /// The events contradict the protocol.
    #[error("the answer's stream is malformed: {0}")]
    Malformed(String),
    /// The stream ended too early.
    #[error("the answer's stream ended before {0}")]
    Unfinished(&'static str),
}

/// One answer that is being read.
pub trait Reading: Send {
    /// Takes one event's data and hands on what may be shown at once.
    ///
    /// # Errors
    /// When the provider reports an error or the event contradicts the protocol; the answer is then lost.
    fn take(&mut self, data: &str, show: &mut dyn FnMut(ModelDelta)) -> Result<(), AssembleError>;

    /// Whether nothing more is needed from the stream.
    fn is_complete(&self) -> bool;

    /// The answer.
    ///
    /// # Errors
    /// When the stream has not said that it is finished.
    fn finish(self: Box<Self>, request_id: Option<String>) -> Result<ModelAnswer, AssembleError>;

    /// Reads the answer of an endpoint that did not stream although it was asked to.
    ///
    /// # Errors
    /// When it is not a finished answer.
    fn whole(
        self: Box<Self>,
        answer: Map<String, Value>,
        request_id: Option<String>,
    ) -> Result<ModelAnswer, AssembleError>;
}

/// One event as an object.
pub(crate) fn object(data: &str) -> Result<Map<String, Value>, AssembleError> {
    match serde_json::from_str(data) {
        Ok(Value::Object(event)) => Ok(event),
        Ok(_) => Err(AssembleError::Malformed("an event is no object".into())),
        Err(error) => Err(AssembleError::Malformed(error.to_string())),
    }
}

/// The input of a call from the text that the model wrote. A call without any text has no arguments.
pub(crate) fn input_of(text: &str) -> Value {
    if text.trim().is_empty() {
        return json!({});
    }
    match serde_json::from_str::<Value>(text) {
        Ok(input @ Value::Object(_)) => input,
        _ => json!({ MALFORMED_INPUT_KEY: text }),
    }
}

/// The block that keeps what only this wire understands.
pub(crate) fn wire_item(wire: &str, item: Value) -> Value {
    json!({"type": WIRE_ITEM_TYPE, "wire": wire, "item": item})
}

/// Ids for calls of peers that give none: the same request and position give the same id, another request another.
#[derive(Debug, Clone)]
pub struct Ids(String);

impl Ids {
    /// For the answer to `request`.
    pub fn of(request: &Map<String, Value>) -> Self {
        let mut hasher = blake3::Hasher::new();
        for (key, value) in request {
            hasher.update(key.as_bytes());
            hasher.update(value.to_string().as_bytes());
        }
        Self(hasher.finalize().to_hex()[..20].to_owned())
    }

    /// The id of the call at this place of the answer.
    pub fn call(&self, place: usize) -> String {
        format!("call_{}_{place}", self.0)
    }
}

/// Usage under the journal's names, from a wire that counts cached tokens among those of the input: `input` all of them,
/// those read from a cache, those written to one. `said`: the provider's own object.
pub(crate) fn usage_of((input, cached, written): (u64, u64, u64), output: u64, said: &Value) -> Value {
    json!({
        "input_tokens": input - cached - written,
        "output_tokens": output,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "provider": said,
    })
}

/// Tokens at a guess of four bytes each, where a peer counts none.
pub(crate) const fn guessed_tokens(bytes: usize) -> usize {
    bytes / 4 + 1
}
