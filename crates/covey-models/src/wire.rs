//! The wires that models are spoken to over: which path, which body, how the answer is read.
//!
//! The journal keeps the conversation in the shape of the Messages wire; the others are translations of it, pure in
//! both directions. What does not belong here: sending (`endpoint`), who is asked (`router`).

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::messages::assemble::Assembler;
use crate::reading::{Ids, Reading};
use crate::{chat, messages, responses};

/// A wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Wire {
    /// Anthropic Messages.
    #[serde(rename = "anthropic")]
    Messages,
    /// OpenAI Chat Completions, which vLLM, llama-server, Ollama and most others speak as well.
    #[serde(rename = "openai-chat")]
    Chat,
    /// OpenAI Responses.
    #[serde(rename = "openai-responses")]
    Responses,
}

/// One request on its way to a wire.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// In the shape of the Messages API.
    pub body: &'a Map<String, Value>,
    /// The answer's text must be JSON of this schema, where the wire can say so.
    pub schema: Option<&'a Value>,
    /// Name of the field that limits the answer; the wire's usual one when the endpoint has no other.
    pub output_limit_field: Option<&'a str>,
}

impl Wire {
    /// The name in configuration files and in the journal.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Messages => "anthropic",
            Self::Chat => chat::WIRE,
            Self::Responses => responses::WIRE,
        }
    }

    /// Where the endpoint is below the base URL.
    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::Messages => "messages",
            Self::Chat => "chat/completions",
            Self::Responses => "responses",
        }
    }

    /// The body as it is sent, asking for a stream. Pure: the same question gives the same bytes.
    pub fn request(self, question: Question<'_>) -> Map<String, Value> {
        match self {
            Self::Messages => messages::request(question),
            Self::Chat => chat::request(question),
            Self::Responses => responses::request(question),
        }
    }

    /// The conversation of a request that somebody else's client sent, in the journal's shape.
    ///
    /// # Errors
    /// A sentence that names the field that is not as it must be.
    pub fn incoming(self, body: &Map<String, Value>) -> Result<Map<String, Value>, String> {
        match self {
            Self::Messages => Ok(body.clone()),
            Self::Chat => chat::from_chat(body),
            Self::Responses => responses::from_responses(body),
        }
    }

    /// A reader for the answer to `sent`.
    pub fn reading(self, sent: &Map<String, Value>) -> Box<dyn Reading> {
        let ids = Ids::of(sent);
        match self {
            Self::Messages => Box::new(Assembler::default()),
            Self::Chat => Box::new(chat::Reader::new(ids, sent)),
            Self::Responses => Box::new(responses::Reader::new(ids)),
        }
    }
}
