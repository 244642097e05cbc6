//! What should be under way now: a pure reading of the fold.
//!
//! The order of the questions is the order of importance: an interrupt before everything, the result of a
//! call before the next choice (I3). What does not belong here: changing the fold.

use covey_types::{EventId, SessionStatus, StepId};
use serde_json::{Value, json};

use super::{
    ANSWER_WAIT_MAX_MS, Call, CallState, DISPATCHES_MAX, ModelState, PARALLEL_CALLS_MAX, STEPS_PER_TURN_MAX,
    Session, WakeFailure, later,
};
use crate::effect::Effect;
use crate::record::{
    Body, ErrorKind, FailureKind, ModelUsage, RetryStatus, SessionError, StopReason, span_id, step_event,
};
use crate::retry::{MODEL_ATTEMPTS_MAX, may_wake_again};

/// What the model is told of a call whose end is unknown.
pub(super) const INTERRUPTED: &str = "interrupted, may have had effects";

/// What the model is told of a call that no client has answered.
const UNANSWERED: &str = "not run: nobody answered in time";

impl Session {
    /// Names everything that should be under way. Pure: the same session gives the same wishes.
    pub fn next(&self) -> Vec<Effect> {
        if self.status == SessionStatus::Terminated {
            return Vec::new();
        }
        if let Some(upto) = self.interrupt {
            return vec![Effect::Append(self.handle_interrupt(upto))];
        }
        if let Some(upto) = self.answered {
            let mut bodies = vec![Body::AnswersHandled { upto }];
            if self.is_paused() {
                bodies.push(Body::StatusRunning {});
            }
            return vec![Effect::Append(bodies)];
        }
        if !self.turn_open {
            if self.wants_turn() {
                return vec![Effect::Append(vec![Body::StatusRunning {}])];
            }
            return self.after_turn();
        }
        if self.open_calls().next().is_some() {
            return self.next_tools();
        }
        match &self.model {
            ModelState::Quiet => vec![self.begin_request()],
            // Only a crash between two records of one transaction could leave it so, and there is none.
            ModelState::Summarised => vec![self.compact_without_model()],
            ModelState::Intended { step, attempt, .. } => {
                let mut effects = self.acknowledgements();
                effects.push(Effect::CallModel { step: *step, attempt: *attempt });
                effects
            }
            ModelState::Failed { .. } => vec![self.after_failure()],
            ModelState::Answered { stop_reason, had_calls } => {
                vec![self.after_answer(stop_reason, *had_calls)]
            }
        }
    }

    fn wants_turn(&self) -> bool {
        self.pending.iter().any(|p| p.opens_turn && p.seq > self.interrupted_upto)
    }

    fn acknowledgements(&self) -> Vec<Effect> {
        self.results_taken.iter().map(|step| Effect::AcknowledgeTool { step: *step }).collect()
    }

    /// With no turn open only what is left of the last one is wanted.
    fn after_turn(&self) -> Vec<Effect> {
        let mut effects = self.acknowledgements();
        if self.sandbox.is_some() {
            effects.extend(self.interrupting.iter().map(|(step, _)| Effect::InterruptTool { step: *step }));
            if self.secure_failed && !self.unsecured.is_empty() {
                effects.push(Effect::SecureHome);
            }
        }
        effects
    }

    fn handle_interrupt(&self, upto: u64) -> Vec<Body> {
        let mut bodies = Vec::new();
        if self.turn_open {
            if let ModelState::Intended { step, attempt, .. } = &self.model {
                bodies.push(Body::ModelAbandoned { step: *step, reason: "interrupted by the user".into() });
                bodies.push(span_end(*step, *attempt, true, ModelUsage::default()));
            }
            bodies.extend(self.open_calls().map(|call| {
                let text = match call.state {
                    CallState::Intended => "interrupted by the user before it started",
                    _ => "interrupted by the user, may have had effects",
                };
                substitute(call, text)
            }));
        }
        bodies.push(Body::InterruptHandled { upto });
        if self.turn_open {
            bodies.push(Body::StatusIdle { stop_reason: StopReason::EndTurn });
        }
        bodies
    }

    fn begin_request(&self) -> Effect {
        if self.requests_this_turn >= STEPS_PER_TURN_MAX {
            let message = format!(
                "the turn used {STEPS_PER_TURN_MAX} model calls without coming to an end; send a message to go on"
            );
            return Effect::Append(fail(ErrorKind::ToolUseLimitReachedError, message));
        }
        let step = self.step_id(self.steps_begun);
        let compact = self.wants_compaction();
        Effect::Append(vec![
            Body::ModelIntended { step, upto: self.taken_upto(compact), attempt: 1, compact },
            Body::SpanStart { step, attempt: 1 },
        ])
    }

    /// A request for a summary takes no message.
    const fn taken_upto(&self, compact: bool) -> u64 {
        if compact { 0 } else { self.head }
    }

    fn after_failure(&self) -> Effect {
        let ModelState::Failed { step, attempt, compact, failure, status, detail, until, too_long } =
            &self.model
        else {
            return Effect::Append(Vec::new());
        };
        if *failure == FailureKind::Transient && *attempt < MODEL_ATTEMPTS_MAX {
            let attempt = attempt + 1;
            let then = vec![
                Body::StatusRunning {},
                Body::ModelIntended {
                    step: *step,
                    upto: self.taken_upto(*compact),
                    attempt,
                    compact: *compact,
                },
                Body::SpanStart { step: *step, attempt },
            ];
            return Effect::Wait { until: *until, then };
        }
        if (*compact && *failure == FailureKind::Rejected) || (*too_long && self.can_compact()) {
            // The conversation is, most likely or certainly, too long even for its summary.
            return self.compact_without_model();
        }
        let message = match failure {
            FailureKind::Rejected if *too_long => format!(
                "the conversation no longer fits the model's context; say how much that holds (`context_tokens` of the \
                 agent's model, or in the models file), or start a new session (the home stays): {detail}"
            ),
            FailureKind::Transient => format!("the model did not answer {attempt} times: {detail}"),
            FailureKind::Rejected => format!("the model's provider refused the request: {detail}"),
            FailureKind::Unauthorized => {
                format!(
                    "the model's key is missing or not accepted; set COVEY_MODEL_KEY and send a message: {detail}"
                )
            }
        };
        Effect::Append(fail(error_kind(*failure, *status), message))
    }

    fn after_answer(&self, stop_reason: &str, had_calls: bool) -> Effect {
        match stop_reason {
            "refusal" => Effect::Append(vec![Body::StatusIdle { stop_reason: StopReason::Refusal }]),
            "model_context_window_exceeded" if self.can_compact() => self.compact_without_model(),
            "model_context_window_exceeded" => {
                let message = "the conversation no longer fits the model's context; start a new session (the home stays)";
                Effect::Append(fail(ErrorKind::ModelRequestFailedError, message.into()))
            }
            // The results go back to the model; a paused answer is sent again as it is.
            _ if had_calls || stop_reason == "pause_turn" => self.begin_request(),
            _ if self.wants_turn() => self.begin_request(),
            "max_tokens" => {
                let message =
                    "the answer was cut at the agent's limit of output tokens; send a message to go on";
                let error = exhausted(ErrorKind::UnknownError, message.into());
                Effect::Append(vec![error, Body::StatusIdle { stop_reason: StopReason::EndTurn }])
            }
            _ => Effect::Append(vec![Body::StatusIdle { stop_reason: StopReason::EndTurn }]),
        }
    }

    fn next_tools(&self) -> Vec<Effect> {
        let refused: Vec<Body> = self.open_calls().filter_map(|c| self.refusal_of(c)).collect();
        if !refused.is_empty() {
            return vec![Effect::Append(refused)];
        }
        if self.runnable_calls().next().is_none() {
            return self.await_clients();
        }
        if let Some(failure) = &self.wake_failure
            && !failure.waited
        {
            return vec![self.after_wake_failure(failure)];
        }
        let mut effects = self.acknowledgements();
        let Some(ready) = self.sandbox else {
            effects.push(Effect::WakeHome);
            return effects;
        };
        let dispatched: Vec<Body> = self
            .runnable_calls()
            .filter(|c| c.state == CallState::Intended)
            .map(|c| Body::ToolDispatched { step: c.step, sandbox: ready })
            .collect();
        if !dispatched.is_empty() {
            return vec![Effect::Append(dispatched)];
        }
        effects.extend(self.interrupting.iter().map(|(step, _)| Effect::InterruptTool { step: *step }));
        effects.extend(self.open_calls().filter_map(|call| {
            let CallState::Dispatched { sandbox, fresh } = call.state else { return None };
            let step = call.step;
            Some(if fresh {
                let input = Value::Object(call.input.clone()).to_string();
                Effect::DispatchTool { step, sandbox, name: call.name.clone(), input }
            } else {
                Effect::QueryTool { step, sandbox }
            })
        }));
        effects
    }

    /// Open calls that wait for no client.
    fn runnable_calls(&self) -> impl Iterator<Item = &Call> {
        self.open_calls().filter(|call| call.waits_for.is_none())
    }

    /// Every open call waits for a client: says so once, and then rests until one answers or all are too late.
    fn await_clients(&self) -> Vec<Effect> {
        let event_ids: Vec<EventId> = self.open_calls().map(|call| step_event(call.step)).collect();
        let Some(paused) = self.paused.as_ref().filter(|paused| paused.event_ids == event_ids) else {
            let stop_reason = StopReason::RequiresAction { event_ids };
            return vec![Effect::Append(vec![Body::StatusIdle { stop_reason }])];
        };
        let mut then = vec![Body::StatusRunning {}];
        then.extend(self.open_calls().map(|call| substitute(call, UNANSWERED)));
        let mut effects = self.after_turn();
        effects.push(Effect::Wait { until: later(paused.since, ANSWER_WAIT_MAX_MS), then });
        effects
    }

    fn refusal_of(&self, call: &Call) -> Option<Body> {
        let index = self.calls.iter().position(|c| c.step == call.step).unwrap_or(0);
        if let Some(refusal) = &call.refusal {
            return Some(substitute(call, refusal));
        }
        if call.state == CallState::Intended && call.dispatches >= DISPATCHES_MAX {
            return Some(substitute(
                call,
                "the call could not be started in any sandbox; it has had no effects",
            ));
        }
        if index >= PARALLEL_CALLS_MAX as usize {
            let text = format!("not run: one answer may call at most {PARALLEL_CALLS_MAX} tools");
            return Some(substitute(call, &text));
        }
        None
    }

    fn after_wake_failure(&self, failure: &WakeFailure) -> Effect {
        if may_wake_again(failure.fault, failure.attempt) {
            return Effect::Wait { until: failure.until, then: vec![Body::StatusRunning {}] };
        }
        let mut bodies: Vec<Body> = self
            .open_calls()
            .map(|call| match call.state {
                CallState::Intended => substitute(
                    call,
                    &format!("not run: the sandbox could not be started: {}", failure.detail),
                ),
                _ => substitute(call, INTERRUPTED),
            })
            .collect();
        let message = format!("the agent's sandbox could not be started: {}", failure.detail);
        bodies.extend(fail(ErrorKind::UnknownError, message));
        Effect::Append(bodies)
    }
}

pub(super) fn span_end(step: StepId, attempt: u32, is_error: bool, model_usage: ModelUsage) -> Body {
    Body::SpanEnd { model_request_start_id: span_id(step, attempt), is_error, model_usage }
}

pub(super) fn error_kind(failure: FailureKind, status: Option<u16>) -> ErrorKind {
    match (failure, status) {
        (FailureKind::Transient, Some(429)) => ErrorKind::ModelRateLimitedError,
        (FailureKind::Transient, _) => ErrorKind::ModelOverloadedError,
        _ => ErrorKind::ModelRequestFailedError,
    }
}

fn exhausted(kind: ErrorKind, message: String) -> Body {
    Body::Error { error: SessionError { kind, message, retry_status: RetryStatus::Exhausted } }
}

fn fail(kind: ErrorKind, message: String) -> Vec<Body> {
    vec![exhausted(kind, message), Body::StatusIdle { stop_reason: StopReason::RetriesExhausted }]
}

fn substitute(call: &Call, text: &str) -> Body {
    Body::ToolResult {
        step: call.step,
        tool_use_id: step_event(call.step),
        content: vec![json!({"type": "text", "text": text})],
        is_error: true,
        substitute: true,
    }
}
