//! What came back, as records: each function reads the fold and returns what to append, in one transaction.
//!
//! An answer that no longer fits (its step is over) gives nothing, so a late or repeated one is harmless.
//! What does not belong here: changing the fold.

use covey_types::{Fault, Generation, SandboxId, StepId};
use serde_json::{Value, json};

use super::next::{INTERRUPTED, error_kind, span_end};
use super::{CallState, ModelState, Session};
use crate::record::{Body, FailureKind, ModelUsage, Permission, RetryStatus, SessionError, step_event};
use crate::retry::{FAILURES_BEFORE_FAILOVER, MODEL_ATTEMPTS_MAX, may_wake_again};
use crate::toolset;

/// A finished answer of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelAnswerFacts {
    /// Raw blocks.
    pub content: Vec<Value>,
    /// The provider's word.
    pub stop_reason: String,
    /// The provider's object.
    pub usage: Value,
    /// The model that answered.
    pub model: String,
    /// The provider's request id.
    pub request_id: Option<String>,
    /// Who answered; none where there is only one.
    pub provider: Option<String>,
}

/// A failed attempt.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFailureFacts {
    /// What can be done about it.
    pub failure: FailureKind,
    /// HTTP status.
    pub status: Option<u16>,
    /// What the provider asked us to wait.
    pub retry_after_ms: Option<u64>,
    /// For people; never contains a key.
    pub detail: String,
    /// The provider's request id.
    pub request_id: Option<String>,
    /// Who did not answer; none where there is only one.
    pub provider: Option<String>,
    /// Who could be asked instead.
    pub next_provider: Option<String>,
    /// The conversation is longer than the model's context.
    pub too_long: bool,
}

/// A sandbox that is ready.
#[derive(Debug, Clone, PartialEq)]
pub struct HomeReadyFacts {
    /// Which.
    pub sandbox: SandboxId,
    /// The published generation that the home descends from.
    pub generation: Generation,
    /// `adopted`, `kept`, `materialized` or `empty`.
    pub source: String,
    /// Whether the files are exactly the published generation's, so that what came after is missing.
    pub put_back: bool,
    /// Where a working copy in the way was moved.
    pub set_aside: Option<String>,
    /// How many names of the generation could not be put back.
    pub gap_count: u64,
    /// The first of them.
    pub gap_paths: Vec<String>,
    /// Why the first is missing.
    pub gap_reason: String,
    /// Time from request to ready.
    pub elapsed_ms: u64,
}

impl Session {
    /// The model answered.
    pub fn answered(&self, step: StepId, answer: ModelAnswerFacts) -> Vec<Body> {
        let ModelState::Intended { step: open, attempt, compact } = self.model else { return Vec::new() };
        if open != step {
            return Vec::new();
        }
        let shown = match compact {
            true => vec![self.compacted(&answer.content)],
            false => self.shown(step, &answer),
        };
        let mut bodies = vec![
            Body::ModelDone {
                step,
                content: answer.content,
                stop_reason: answer.stop_reason,
                usage: answer.usage.clone(),
                model: answer.model,
                request_id: answer.request_id,
                compact,
                provider: answer.provider,
            },
            span_end(step, attempt, false, ModelUsage::of(&answer.usage)),
        ];
        bodies.extend(shown);
        bodies
    }

    /// The public side of an answer, in the order of its blocks; a run of texts is one message.
    fn shown(&self, model_step: StepId, answer: &ModelAnswerFacts) -> Vec<Body> {
        let mut bodies = Vec::new();
        let mut texts: Vec<Value> = Vec::new();
        let mut index = 0;
        let last = answer.content.len().saturating_sub(1);
        let flush = |texts: &mut Vec<Value>, bodies: &mut Vec<Body>| {
            if !texts.is_empty() {
                bodies.push(Body::AgentMessage { content: std::mem::take(texts) });
            }
        };
        for (position, block) in answer.content.iter().enumerate() {
            match block["type"].as_str().unwrap_or_default() {
                "text" => {
                    let text = block["text"].as_str().filter(|t| !t.is_empty());
                    texts.extend(text.map(|t| json!({"type": "text", "text": t})));
                }
                "thinking" | "redacted_thinking" => {
                    flush(&mut texts, &mut bodies);
                    if !matches!(bodies.last(), Some(Body::AgentThinking {})) {
                        bodies.push(Body::AgentThinking {});
                    }
                }
                "tool_use" => {
                    flush(&mut texts, &mut bodies);
                    let cut = answer.stop_reason == "max_tokens" && position == last;
                    bodies.push(self.call_of(model_step, index, block, &answer.stop_reason, cut));
                    index += 1;
                }
                _ => {}
            }
        }
        flush(&mut texts, &mut bodies);
        bodies
    }

    fn call_of(&self, model_step: StepId, index: u32, block: &Value, stop_reason: &str, cut: bool) -> Body {
        let name = block["name"].as_str().unwrap_or_default();
        let rules = &self.config.rules;
        let is_custom = rules.is_custom(name);
        let checked = toolset::check(&self.config.tools, name, &block["input"], is_custom);
        let refusal = match (&checked, cut, stop_reason) {
            (_, true, _) => Some(
                "The input was cut: the answer reached the limit of output tokens. Nothing was run; \
                 make the call again in smaller pieces."
                    .to_owned(),
            ),
            (_, _, "refusal") => Some("not run: the answer was refused".to_owned()),
            (Err(text), ..) => Some(text.clone()),
            (Ok(_), ..) => None,
        };
        let step = self.step_id(self.steps_begun + u64::from(index));
        let call_id = block["id"].as_str().unwrap_or_default().to_owned();
        let input = block["input"].as_object().cloned().unwrap_or_default();
        let name = name.to_owned();
        if is_custom {
            return Body::CustomToolUse { step, model_step, index, call_id, name, input, refusal };
        }
        let evaluated_permission = match &refusal {
            Some(_) => Permission::Deny,
            None if rules.asks(&name) => Permission::Ask,
            None => Permission::Allow,
        };
        Body::ToolUse { step, model_step, index, call_id, name, input, evaluated_permission, refusal }
    }

    /// The attempt failed. `jitter_permille` is a fresh random number from 0 to 1000.
    pub fn failed(&self, step: StepId, failure: ModelFailureFacts, jitter_permille: u16) -> Vec<Body> {
        let ModelState::Intended { step: open, attempt, .. } = self.model else { return Vec::new() };
        if open != step {
            return Vec::new();
        }
        let retrying = failure.failure == FailureKind::Transient && attempt < MODEL_ATTEMPTS_MAX;
        let failures = self.provider_failures + 1;
        let gave_up = retrying && failures >= FAILURES_BEFORE_FAILOVER;
        let next_provider = failure.next_provider.filter(|_| gave_up);
        let failed_over = next_provider.clone().map(|to| Body::ModelFailedOver {
            from: failure.provider.clone(),
            to,
            failures,
            reason: failure.detail.clone(),
        });
        let kind = error_kind(failure.failure, failure.status);
        let message = failure.detail.clone();
        let mut bodies = vec![
            Body::ModelFailed {
                step,
                attempt,
                failure: failure.failure,
                status: failure.status,
                retry_after_ms: failure.retry_after_ms,
                detail: failure.detail,
                request_id: failure.request_id,
                jitter_permille,
                provider: failure.provider,
                next_provider,
                too_long: failure.too_long,
            },
            span_end(step, attempt, true, ModelUsage::default()),
        ];
        if retrying {
            let retry_status = RetryStatus::Retrying;
            bodies.push(Body::Error { error: SessionError { kind, message, retry_status } });
            bodies.extend(failed_over);
            bodies.push(Body::StatusRescheduled {});
        }
        bodies
    }

    /// The sandbox is ready.
    pub fn home_ready(&self, ready: HomeReadyFacts) -> Vec<Body> {
        let rolled_back = (ready.put_back && !self.unsecured.is_empty()).then(|| Body::HomeRolledBack {
            generation: ready.generation,
            steps: self.unsecured().map(step_event).collect(),
            reason: "the host with the working copy was lost".into(),
        });
        let mut bodies: Vec<Body> = rolled_back.into_iter().collect();
        if ready.gap_count > 0 {
            bodies.push(Body::HomeIncomplete {
                generation: ready.generation,
                count: ready.gap_count,
                paths: ready.gap_paths,
                reason: ready.gap_reason,
            });
        }
        bodies.push(Body::SandboxReady {
            sandbox: ready.sandbox,
            source: ready.source,
            generation: ready.generation,
            set_aside: ready.set_aside,
            elapsed_ms: ready.elapsed_ms,
        });
        bodies
    }

    /// The sandbox could not be made ready. `jitter_permille` is a fresh random number from 0 to 1000.
    pub fn home_failed(&self, fault: Fault, detail: String, jitter_permille: u16) -> Vec<Body> {
        let attempt = self.wake_failure.as_ref().map_or(1, |f| f.attempt + 1);
        let mut bodies = vec![Body::SandboxFailed { fault, detail, attempt, jitter_permille }];
        if self.turn_open && may_wake_again(fault, attempt) {
            bodies.push(Body::StatusRescheduled {});
        }
        bodies
    }

    /// The call ended with a result of its own. Empty when its result is in the journal already: then it only
    /// needs to be acknowledged.
    pub fn tool_done(&self, step: StepId, content: Vec<Value>, is_error: bool) -> Vec<Body> {
        if self.interrupting.iter().any(|(s, _)| *s == step) {
            return vec![Body::ToolEnded { step }];
        }
        // A result for a call that was not dispatched cannot be ours.
        if !self.open_calls().any(|c| c.step == step && c.state != CallState::Intended) {
            return Vec::new();
        }
        let tool_use_id = step_event(step);
        vec![Body::ToolResult { step, tool_use_id, content, is_error, substitute: false }]
    }

    /// It is proven that the call never started: it is dispatched again.
    pub fn tool_never_started(&self, step: StepId, reason: String) -> Vec<Body> {
        if self.interrupting.iter().any(|(s, _)| *s == step) {
            return vec![Body::ToolEnded { step }];
        }
        if !self.open_calls().any(|c| c.step == step && c.state != CallState::Intended) {
            return Vec::new();
        }
        vec![Body::ToolNeverStarted { step, reason }]
    }

    /// The call started, or may have, and has no result.
    pub fn tool_interrupted(&self, step: StepId, reason: &str) -> Vec<Body> {
        if self.interrupting.iter().any(|(s, _)| *s == step) {
            return vec![Body::ToolEnded { step }];
        }
        if !self.open_calls().any(|c| c.step == step && c.state != CallState::Intended) {
            return Vec::new();
        }
        let text = format!("{INTERRUPTED}: {reason}. It was not run again; look at what it left behind.");
        vec![Body::ToolResult {
            step,
            tool_use_id: step_event(step),
            content: vec![json!({"type": "text", "text": text})],
            is_error: true,
            substitute: true,
        }]
    }
}
