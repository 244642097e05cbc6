//! Session and turn states (design section 5).

use serde::{Deserialize, Serialize};

/// What a session is doing, in the API's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionStatus {
    /// No turn is open; the start state. Left by a user event.
    Idle,
    /// A turn is open and steps run. Left at the end of the turn, or by a transient error.
    Running,
    /// A transient error is being waited out; the turn stays open. Left when the wait ends.
    Rescheduling,
    /// Archived or failed for good. Never left.
    Terminated,
}

impl SessionStatus {
    /// Every status, for tables and CHECK lists.
    pub const ALL: [Self; 4] = [Self::Idle, Self::Running, Self::Rescheduling, Self::Terminated];

    /// The one text form, as stored and sent.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Running => "running",
            Self::Rescheduling => "rescheduling",
            Self::Terminated => "terminated",
        }
    }
}

/// Where a turn stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnState {
    /// A user event is durable, no step has been chosen.
    Open,
    /// A model call is intended or running.
    AwaitingModel,
    /// At least one tool call has no result.
    RunningTools,
    /// Blocked on the client.
    AwaitingInput,
    /// Ended by the model.
    Done,
    /// Ended by the user.
    Cancelled,
    /// Ended by an error that retrying cannot mend.
    Failed,
}
