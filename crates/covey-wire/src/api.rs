//! The public HTTP API: what its answers look like, for the server that writes them and the CLI that reads them.
//!
//! Names and shapes are those of the Managed Agents API, read in the official SDKs (`anthropic` 2.14,
//! `@anthropic-ai/sdk` 1.14); what is Covey's own stands under `/v1/covey/` and in fields that those SDKs ignore.
//! Requests are plain JSON objects: the server reads them field by field, so that it can name the one that is
//! wrong. What does not belong here: routes, and what a request causes.

pub mod agent;
pub mod covey;
pub mod environment;
pub mod history;
pub mod session;
pub mod token;

use serde::{Deserialize, Serialize};

pub use agent::{Agent, Model};
pub use covey::{AgentDeleted, Health, Home, HomeForked, HomeImported, Runner, Snapshot};
pub use environment::{Environment, EnvironmentDeleted};
pub use session::{EventsSent, Session, SessionAgent, SessionDeleted, SessionStats, SessionUsage};
pub use token::Token;

/// A request body with more bytes than this is refused with 413. The Messages API has the same limit, and a
/// message's pictures are the only big thing in a request.
pub const REQUEST_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Events in one `POST /v1/sessions/{id}/events`, and initial events of a session.
pub const EVENTS_PER_REQUEST_MAX: usize = 50;
/// Pairs in one object's metadata.
pub const METADATA_PAIRS_MAX: usize = 16;
/// Characters of a metadata key.
pub const METADATA_KEY_CHARS_MAX: usize = 64;
/// Characters of a metadata value.
pub const METADATA_VALUE_CHARS_MAX: usize = 512;
/// Items of one page at most; a larger `limit` is cut to it.
pub const PAGE_LIMIT_MAX: usize = 500;
/// Items of a page when `limit` is not given.
pub const PAGE_LIMIT_DEFAULT: usize = 100;

/// One page of a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Page<T> {
    /// The items, in the list's order.
    pub data: Vec<T>,
    /// What to send as `page` for the next page; none on the last one.
    pub next_page: Option<String>,
}

/// Every error answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// Always `error`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What went wrong.
    pub error: ErrorDetail,
    /// Also in the header `request-id`, and in the server's log.
    pub request_id: String,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// `invalid_request_error`, `authentication_error`, `permission_error`, `not_found_error`, `conflict_error`,
    /// `request_too_large`, `rate_limit_error`, `api_error` or `overloaded_error`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Which thing, and what to do next.
    pub message: String,
}
