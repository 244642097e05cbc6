//! The scripted model: answers that a file decides, in place of a model, for tests, the demo and SDK checks.
//!
//! Which answer comes is read from the request's own history and from nothing else, so killing the server, the
//! runner or the scripted model between two requests changes nothing. [`ScriptedModel`] is the trait in process;
//! [`serve`] speaks all three wires over HTTP, with seeded chunking and faults, so that the real clients are
//! exercised. Both apply the strict verifier to every request. What does not belong here: what the loop does.

mod check;
mod plan;
mod render;
mod script;
mod serve;

use std::time::Duration;

pub use check::{RequestChecker, Violation};
pub use render::{Chunking, Fault, FaultPlan};
pub use script::{
    AfterRollback, Chapter, OnInterrupted, OnRolledBack, Script, ScriptCall, ScriptError, ScriptFile,
    ScriptTurn,
};
pub use serve::{Handle, ServeOptions, serve};

use crate::wire::Wire;
use crate::{Model, ModelCall, ModelDelta, ModelFailure, ModelRequest};

/// The scripted model without a socket.
#[derive(Debug)]
pub struct ScriptedModel {
    scripts: ScriptFile,
    checker: RequestChecker,
}

impl ScriptedModel {
    /// Makes one that answers from `scripts`.
    pub fn new(scripts: ScriptFile) -> Self {
        Self { scripts, checker: RequestChecker::default() }
    }

    /// What the verifier has refused so far, oldest first.
    pub fn violations(&self) -> Vec<Violation> {
        self.checker.violations()
    }
}

impl Model for ScriptedModel {
    fn call<'a>(
        &'a self,
        request: &'a ModelRequest,
        on_delta: &'a (dyn Fn(ModelDelta) + Send + Sync),
    ) -> ModelCall<'a> {
        Box::pin(async move {
            let rejected = |detail: String| ModelFailure::Rejected { status: 400, detail, request_id: None };
            self.checker.check(&self.scripts, Wire::Messages, &request.body, None).map_err(rejected)?;
            let reply = plan::reply(&self.scripts, &request.body).map_err(|e| rejected(e.to_string()))?;
            if reply.think_ms > 0 {
                tokio::time::sleep(Duration::from_millis(reply.think_ms)).await;
            }
            for block in &reply.content {
                if let Some(text) = block.get("text").and_then(|text| text.as_str()) {
                    on_delta(ModelDelta::Text(text.to_owned()));
                }
            }
            Ok(reply.into_answer(&request.body))
        })
    }
}
