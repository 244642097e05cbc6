//! What a session may ask of the world: a closed list.
//!
//! Effects are wishes, not commands: [`crate::Session::next`] names everything that should be under way now,
//! and whoever performs them starts what is not under way yet and stops what is no longer named. What does
//! not belong here: how they are performed.

use covey_types::{SandboxId, StepId, Timestamp};

use crate::record::Body;

/// One wish.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Append these records in one transaction, fold them, ask again. Comes alone.
    Append(Vec<Body>),
    /// Make the model call whose intention is durable: [`crate::Session::request`] is its body. Answered by
    /// [`crate::Session::answered`] or [`crate::Session::failed`]. No longer named: cancel it.
    CallModel {
        /// The step.
        step: StepId,
        /// From 1.
        attempt: u32,
    },
    /// Take the home's lease and make its sandbox ready. Answered by [`crate::Session::home_ready`] or
    /// [`crate::Session::home_failed`].
    WakeHome,
    /// Hand the call to the sandbox; its dispatch is durable and was not sent before this era.
    DispatchTool {
        /// The step: idempotency key.
        step: StepId,
        /// The sandbox that the dispatch was recorded for.
        sandbox: SandboxId,
        /// The tool.
        name: String,
        /// JSON object.
        input: String,
    },
    /// The call may have been sent in an earlier era: ask what became of it.
    QueryTool {
        /// The step.
        step: StepId,
        /// The sandbox that the dispatch was recorded for.
        sandbox: SandboxId,
    },
    /// Kill the call; nobody waits for its result.
    InterruptTool {
        /// The step.
        step: StepId,
    },
    /// The result is durable: the runner may drop its copy.
    AcknowledgeTool {
        /// The step.
        step: StepId,
    },
    /// Secure the home: the last secure failed and the turn has ended.
    SecureHome,
    /// Wait until then, then append `then`. A new record in between makes the wish anew.
    Wait {
        /// By the server's clock.
        until: Timestamp,
        /// What the end of the wait means.
        then: Vec<Body>,
    },
}
