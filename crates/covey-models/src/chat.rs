//! The OpenAI Chat Completions wire, as OpenAI and the many servers that imitate it speak it.
//!
//! Written strictly, read liberally: local servers leave out ids, send arguments whole or as objects, name a wrong
//! finish reason. What stays true: an answer without a finish reason is unfinished; the text of a call's arguments is
//! put together by the call's index and parsed only at the end.

mod incoming;
mod read;
mod request;

pub use incoming::from_chat;
pub use read::Reader;
pub use request::request;

/// The wire's name.
pub const WIRE: &str = "openai-chat";
