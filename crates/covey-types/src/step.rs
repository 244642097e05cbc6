//! Steps: one model call or one tool call.

use serde::{Deserialize, Serialize};

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepKind {
    /// One request to a model.
    Model,
    /// One tool call in the sandbox.
    Tool,
}

/// Where a step stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepState {
    /// Entered when the intention is durable; nothing has happened yet. Left by `started` or `abandoned`.
    Intended,
    /// Entered when the dispatch is durable; the effect may have happened. Left by `done` or `abandoned`.
    Started,
    /// The result is durable.
    Done,
    /// Will never have a result of its own; the journal holds a substitute for the model.
    Abandoned,
}
