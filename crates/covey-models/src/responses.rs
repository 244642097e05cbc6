//! The OpenAI Responses wire: items instead of messages.
//!
//! Used without state on the provider's side (`store: false`): the journal is the one memory. Reasoning comes back
//! encrypted and is sent back as it came, to this wire only. What stays true: a stream without
//! `response.completed` or `response.incomplete` is unfinished.

mod incoming;
mod read;
mod request;

pub use incoming::from_responses;
pub use read::Reader;
pub use request::request;

/// The wire's name.
pub const WIRE: &str = "openai-responses";
