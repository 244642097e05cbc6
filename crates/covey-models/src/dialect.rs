//! How a model is told of its tools: by the wire's own means, or as JSON in its text.
//!
//! A dialect translates between two conversations in the journal's shape, so it goes with every wire. What does not
//! belong here: which model speaks which (`config`).

pub mod json;

use serde::{Deserialize, Serialize};

/// A dialect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// The wire's own tools and calls.
    #[default]
    Native,
    /// Tools are described in the system prompt, and the answer is one JSON object, enforced by the server where it can.
    Json,
}
