//! Journal records: what is durable about a session, in the order in which it happened.
//!
//! Public records are exactly the events of the Managed Agents API; [`Record::public`] renders them and
//! leaves out what only the loop needs. Old journals are read by new code, so fields are added with a
//! default and never reinterpreted (`docs/formats/journal.md`). What does not belong here: what follows from
//! a record (`session`), and how it is stored.

use covey_types::{
    EventId, Fault, Generation, RootHash, SandboxId, SessionStatus, SnapshotKind, StepId, Timestamp,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// One durable record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Position in the session's journal, from 1, without gaps.
    pub seq: u64,
    /// Id of the public event; none for private records.
    pub event: Option<EventId>,
    /// When it was appended, by the server's clock.
    pub at: Timestamp,
    /// When the loop took it; only user events have none at first.
    pub processed_at: Option<Timestamp>,
    /// What happened.
    pub body: Body,
}

/// Why a session went idle, in the API's words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum StopReason {
    /// The model ended its turn, or the user ended it.
    EndTurn,
    /// An error ended the turn; the next message starts a new one.
    RetriesExhausted,
    /// The model refused to go on.
    Refusal,
    /// The turn goes on when a client has answered these calls: confirmed or denied them, or brought their result.
    RequiresAction {
        /// Events of the calls, in the order of the answer.
        event_ids: Vec<EventId>,
    },
}

/// What kind of error a `session.error` reports, in the API's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// 529 and 5xx.
    ModelOverloadedError,
    /// 429.
    ModelRateLimitedError,
    /// The provider refused the request or the key, or the context is full.
    ModelRequestFailedError,
    /// A turn used up its steps.
    ToolUseLimitReachedError,
    /// Everything else; the message says what.
    UnknownError,
}

/// Whether the loop goes on after a `session.error`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RetryStatus {
    /// It tries again by itself.
    Retrying,
    /// It stopped; a new message may be sent.
    Exhausted,
}

/// A visible error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionError {
    /// The kind.
    #[serde(rename = "type")]
    pub kind: ErrorKind,
    /// What failed, on what, what to do next. Never contains a key.
    pub message: String,
    /// Whether the loop goes on.
    pub retry_status: RetryStatus,
}

/// Tokens of one model call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelUsage {
    /// Tokens read that were not cached.
    #[serde(default)]
    pub input_tokens: u64,
    /// Tokens written.
    #[serde(default)]
    pub output_tokens: u64,
    /// Tokens read from the provider's cache.
    #[serde(default)]
    pub cache_read_input_tokens: u64,
    /// Tokens stored in the provider's cache.
    #[serde(default)]
    pub cache_creation_input_tokens: u64,
}

impl ModelUsage {
    /// Reads the provider's usage object; what is absent or odd counts as zero.
    pub fn of(usage: &Value) -> Self {
        let field = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or(0);
        Self {
            input_tokens: field("input_tokens"),
            output_tokens: field("output_tokens"),
            cache_read_input_tokens: field("cache_read_input_tokens"),
            cache_creation_input_tokens: field("cache_creation_input_tokens"),
        }
    }
}

/// How a model call failed; the journal's form of the server's `ModelFailure`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The same request may be sent again.
    Transient,
    /// Sending it again changes nothing.
    Rejected,
    /// The key is missing or not accepted.
    Unauthorized,
}

/// Whether a tool call was let through, in the API's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Permission {
    /// It runs.
    Allow,
    /// It runs when a client says so.
    Ask,
    /// It is answered with an error and never runs: unknown tool, malformed or cut input.
    Deny,
}

/// What a client says of a call that asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Confirmation {
    /// It may run.
    Allow,
    /// It is answered with an error and never runs.
    Deny,
}

/// Where a state came from that replaced a home's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HomeOrigin {
    /// From outside.
    Imported,
    /// From an earlier generation of the same home.
    Restored,
    /// From another home.
    Forked,
}

/// What happened. The serialised `type` is the record's kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum Body {
    /// Public: the user said something.
    #[serde(rename = "user.message")]
    UserMessage {
        /// Blocks as the client sent them.
        content: Vec<Value>,
    },
    /// Public: the user ends the turn.
    #[serde(rename = "user.interrupt")]
    UserInterrupt {},
    /// Public: a client lets a call run that asks, or not.
    #[serde(rename = "user.tool_confirmation")]
    UserToolConfirmation {
        /// Event id of the `agent.tool_use`.
        tool_use_id: EventId,
        /// What the client decided.
        result: Confirmation,
        /// Why not, for the model.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        deny_message: Option<String>,
    },
    /// Public: a client has run a tool of its own.
    #[serde(rename = "user.custom_tool_result")]
    UserCustomToolResult {
        /// Event id of the `agent.custom_tool_use`.
        custom_tool_use_id: EventId,
        /// Text and image blocks.
        #[serde(default)]
        content: Vec<Value>,
        /// Whether the model sees it as a failure.
        #[serde(default)]
        is_error: bool,
    },
    /// Public: a turn is open, or goes on after a wait.
    #[serde(rename = "session.status_running")]
    StatusRunning {},
    /// Public: no turn is open.
    #[serde(rename = "session.status_idle")]
    StatusIdle {
        /// Why.
        stop_reason: StopReason,
    },
    /// Public: a transient error is waited out.
    #[serde(rename = "session.status_rescheduled")]
    StatusRescheduled {},
    /// Public: the session has ended for good.
    #[serde(rename = "session.status_terminated")]
    StatusTerminated {},
    /// Public: something the user should see went wrong.
    #[serde(rename = "session.error")]
    Error {
        /// What.
        error: SessionError,
    },
    /// Public: a model request begins. Its event id is [`span_id`] of step and attempt.
    #[serde(rename = "span.model_request_start")]
    SpanStart {
        /// The model step.
        step: StepId,
        /// From 1.
        attempt: u32,
    },
    /// Public: a model request ended.
    #[serde(rename = "span.model_request_end")]
    SpanEnd {
        /// Event id of the start.
        model_request_start_id: EventId,
        /// Whether there is no answer.
        is_error: bool,
        /// What it used.
        model_usage: ModelUsage,
    },
    /// Private: a model call is about to be made. Everything up to `upto` is in its request.
    #[serde(rename = "model.intended")]
    ModelIntended {
        /// The step; the same for every attempt.
        step: StepId,
        /// The last record that the request takes account of.
        upto: u64,
        /// From 1.
        attempt: u32,
        /// The call is for a summary of the conversation and takes no message.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        compact: bool,
    },
    /// Private: the whole answer, as the provider gave it.
    #[serde(rename = "model.done")]
    ModelDone {
        /// The step.
        step: StepId,
        /// The provider's raw content blocks.
        content: Vec<Value>,
        /// The provider's stop reason.
        stop_reason: String,
        /// The provider's usage object.
        usage: Value,
        /// The model that answered.
        model: String,
        /// The provider's request id.
        request_id: Option<String>,
        /// It is a summary of the conversation and no part of it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        compact: bool,
        /// Who answered, by its name in the models file; none where there is no such file.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        provider: Option<String>,
    },
    /// Public: from here on the model is sent a summary in place of the older part of the conversation; the journal
    /// keeps all of it.
    #[serde(rename = "agent.thread_context_compacted")]
    ContextCompacted {
        /// What the model wrote, or what was put together without it.
        summary: String,
        /// Parts at the end of the conversation that are sent as they were.
        kept: u64,
    },
    /// Private: there is no answer.
    #[serde(rename = "model.failed")]
    ModelFailed {
        /// The step.
        step: StepId,
        /// Which attempt failed.
        attempt: u32,
        /// What can be done about it.
        failure: FailureKind,
        /// HTTP status.
        status: Option<u16>,
        /// What the provider asked us to wait.
        retry_after_ms: Option<u64>,
        /// For people; never contains a key.
        detail: String,
        /// The provider's request id.
        request_id: Option<String>,
        /// A random number from 0 to 1000, drawn once, so that the wait can be computed again.
        jitter_permille: u16,
        /// Who did not answer, by its name in the models file.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        provider: Option<String>,
        /// Who is asked from the next attempt on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        next_provider: Option<String>,
        /// The conversation is longer than the model's context.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        too_long: bool,
    },
    /// Public: a provider did not answer several times in a row, and another one is asked for the rest of the turn.
    #[serde(rename = "model.failed_over")]
    ModelFailedOver {
        /// Who did not answer, by its name in the models file.
        from: Option<String>,
        /// Who is asked now.
        to: String,
        /// How often in a row.
        failures: u32,
        /// The last failure; never contains a key.
        reason: String,
    },
    /// Private: the call was cancelled; its partial answer is dropped.
    #[serde(rename = "model.abandoned")]
    ModelAbandoned {
        /// The step.
        step: StepId,
        /// Why.
        reason: String,
    },
    /// Public: the model thought.
    #[serde(rename = "agent.thinking")]
    AgentThinking {},
    /// Public: the model said something.
    #[serde(rename = "agent.message")]
    AgentMessage {
        /// Text blocks.
        content: Vec<Value>,
    },
    /// Public: the model calls a tool. This is the durable intention of the tool step; its event id is
    /// [`step_event`] of the step.
    #[serde(rename = "agent.tool_use")]
    ToolUse {
        /// The step: our key of the call.
        step: StepId,
        /// The model step that asked for it.
        model_step: StepId,
        /// Position among the calls of that answer, from 0.
        index: u32,
        /// The provider's id of the call, for the prompt.
        call_id: String,
        /// The tool.
        name: String,
        /// Its input.
        input: Map<String, Value>,
        /// Whether it may run.
        evaluated_permission: Permission,
        /// The error the model gets when it may not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        refusal: Option<String>,
    },
    /// Public: the model calls a tool that a client runs. Otherwise as `agent.tool_use`.
    #[serde(rename = "agent.custom_tool_use")]
    CustomToolUse {
        /// The step: our key of the call.
        step: StepId,
        /// The model step that asked for it.
        model_step: StepId,
        /// Position among the calls of that answer, from 0.
        index: u32,
        /// The provider's id of the call, for the prompt.
        call_id: String,
        /// The tool.
        name: String,
        /// Its input.
        input: Map<String, Value>,
        /// The error the model gets when it is not handed to a client.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        refusal: Option<String>,
    },
    /// Private: the call is about to be handed to this sandbox.
    #[serde(rename = "tool.dispatched")]
    ToolDispatched {
        /// The step.
        step: StepId,
        /// The sandbox.
        sandbox: SandboxId,
    },
    /// Private: it is proven that the call never started; it is dispatched again.
    #[serde(rename = "tool.never_started")]
    ToolNeverStarted {
        /// The step.
        step: StepId,
        /// For people.
        reason: String,
    },
    /// Public: the call's result, real or a substitute.
    #[serde(rename = "agent.tool_result")]
    ToolResult {
        /// The step.
        step: StepId,
        /// Event id of the `agent.tool_use`.
        tool_use_id: EventId,
        /// Text and image blocks.
        content: Vec<Value>,
        /// Whether the model sees it as a failure.
        is_error: bool,
        /// Whether it stands in for a result that will never come.
        #[serde(default)]
        substitute: bool,
    },
    /// Private: a cancelled call has ended; nothing of it runs any more.
    #[serde(rename = "tool.ended")]
    ToolEnded {
        /// The step.
        step: StepId,
    },
    /// Private: the interrupts up to here have had their effect.
    #[serde(rename = "interrupt.handled")]
    InterruptHandled {
        /// The last of them.
        upto: u64,
    },
    /// Private: what clients said of waiting calls up to here has had its effect.
    #[serde(rename = "answers.handled")]
    AnswersHandled {
        /// The last of them.
        upto: u64,
    },
    /// Private: a driver took the session up; whatever was under way before is asked for again.
    #[serde(rename = "driver.claimed")]
    DriverClaimed {
        /// Its fencing token.
        epoch: u64,
    },
    /// Private: the link to the runner broke; whatever was under way is asked for again.
    #[serde(rename = "runner.lost")]
    RunnerLost {
        /// For people.
        reason: String,
    },
    /// Public: tool calls wait because no sandbox can be had now.
    #[serde(rename = "sandbox.waiting")]
    SandboxWaiting {
        /// For what.
        reason: String,
    },
    /// Public: the home's sandbox is ready.
    #[serde(rename = "sandbox.ready")]
    SandboxReady {
        /// Which.
        sandbox: SandboxId,
        /// `adopted`, `kept`, `materialized` or `empty`.
        source: String,
        /// The published generation that the home descends from.
        generation: Generation,
        /// A working copy that was moved aside: where it is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        set_aside: Option<String>,
        /// Time from request to ready.
        elapsed_ms: u64,
    },
    /// Public: the sandbox is gone.
    #[serde(rename = "sandbox.lost")]
    SandboxLost {
        /// Which.
        sandbox: SandboxId,
        /// Why.
        reason: String,
    },
    /// Public: the sandbox could not be made ready.
    #[serde(rename = "sandbox.failed")]
    SandboxFailed {
        /// What can be done about it.
        fault: Fault,
        /// For people.
        detail: String,
        /// From 1; counts since the last success.
        attempt: u32,
        /// As in `model.failed`.
        jitter_permille: u16,
    },
    /// Public: a state of the home is published.
    #[serde(rename = "home.secured")]
    HomeSecured {
        /// Its number.
        generation: Generation,
        /// The state.
        root: RootHash,
        /// How still the home was.
        kind: SnapshotKind,
        /// The last finished step whose files it contains.
        step: Option<StepId>,
        /// Whether it differs from the generation before.
        changed: bool,
        /// Files in the home.
        #[serde(default)]
        files: u64,
        /// Their bytes.
        #[serde(default)]
        bytes: u64,
    },
    /// Public: the home could not be secured; work goes on.
    #[serde(rename = "home.secure_failed")]
    HomeSecureFailed {
        /// What can be done about it.
        fault: Fault,
        /// For people.
        detail: String,
    },
    /// Public: the home came up without some of its names, because the store has lost them.
    #[serde(rename = "home_incomplete")]
    HomeIncomplete {
        /// The generation that was put back.
        generation: Generation,
        /// How many names are missing; a directory counts once, with everything in it.
        count: u64,
        /// The first of them.
        paths: Vec<String>,
        /// For people: why the first is missing.
        reason: String,
    },
    /// Public: the home has used up most of what it, or its org, may.
    #[serde(rename = "home.near_limit")]
    HomeNearLimit {
        /// `bytes` or `files` of the home, or `org_bytes` of all homes of the org.
        limit: String,
        /// So much is used.
        used: u64,
        /// So much may be.
        max: u64,
    },
    /// Public: somebody made another state the home's current one, between turns. The model is told.
    #[serde(rename = "home.replaced")]
    HomeReplaced {
        /// Its number.
        generation: Generation,
        /// The state.
        root: RootHash,
        /// Where it came from.
        origin: HomeOrigin,
        /// Restored or forked: the generation whose state it is, whole or in part.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from_generation: Option<Generation>,
    },
    /// Public: the home went back to a published generation.
    #[serde(rename = "home_rolled_back")]
    HomeRolledBack {
        /// The generation.
        generation: Generation,
        /// Event ids of the calls whose files it lacks.
        steps: Vec<EventId>,
        /// For people and the model.
        reason: String,
    },
}

/// The public id of a tool step: the same 128 bits under the events' prefix.
pub fn step_event(step: StepId) -> EventId {
    EventId::from_uuid(step.as_uuid())
}

/// The public id of one attempt's `span.model_request_start`.
pub fn span_id(step: StepId, attempt: u32) -> EventId {
    EventId::from_uuid(derived_uuid("covey span v1", step.as_uuid(), u64::from(attempt)))
}

/// A UUID (version 8) computed from what identifies the thing, so that the same fold gives the same id.
pub(crate) fn derived_uuid(domain: &str, of: uuid::Uuid, number: u64) -> uuid::Uuid {
    let mut hasher = blake3::Hasher::new_derive_key(domain);
    hasher.update(of.as_bytes());
    hasher.update(&number.to_le_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    bytes[6] = (bytes[6] & 0x0f) | 0x80;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    uuid::Uuid::from_bytes(bytes)
}

impl Body {
    /// The record's kind: the serialised `type`.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::UserMessage { .. } => "user.message",
            Self::UserInterrupt {} => "user.interrupt",
            Self::UserToolConfirmation { .. } => "user.tool_confirmation",
            Self::UserCustomToolResult { .. } => "user.custom_tool_result",
            Self::StatusRunning {} => "session.status_running",
            Self::StatusIdle { .. } => "session.status_idle",
            Self::StatusRescheduled {} => "session.status_rescheduled",
            Self::StatusTerminated {} => "session.status_terminated",
            Self::Error { .. } => "session.error",
            Self::SpanStart { .. } => "span.model_request_start",
            Self::SpanEnd { .. } => "span.model_request_end",
            Self::ModelIntended { .. } => "model.intended",
            Self::ModelDone { .. } => "model.done",
            Self::ContextCompacted { .. } => "agent.thread_context_compacted",
            Self::ModelFailed { .. } => "model.failed",
            Self::ModelFailedOver { .. } => "model.failed_over",
            Self::ModelAbandoned { .. } => "model.abandoned",
            Self::AgentThinking {} => "agent.thinking",
            Self::AgentMessage { .. } => "agent.message",
            Self::ToolUse { .. } => "agent.tool_use",
            Self::CustomToolUse { .. } => "agent.custom_tool_use",
            Self::ToolDispatched { .. } => "tool.dispatched",
            Self::ToolNeverStarted { .. } => "tool.never_started",
            Self::ToolResult { .. } => "agent.tool_result",
            Self::ToolEnded { .. } => "tool.ended",
            Self::InterruptHandled { .. } => "interrupt.handled",
            Self::AnswersHandled { .. } => "answers.handled",
            Self::DriverClaimed { .. } => "driver.claimed",
            Self::RunnerLost { .. } => "runner.lost",
            Self::SandboxWaiting { .. } => "sandbox.waiting",
            Self::SandboxReady { .. } => "sandbox.ready",
            Self::SandboxLost { .. } => "sandbox.lost",
            Self::SandboxFailed { .. } => "sandbox.failed",
            Self::HomeSecured { .. } => "home.secured",
            Self::HomeSecureFailed { .. } => "home.secure_failed",
            Self::HomeIncomplete { .. } => "home_incomplete",
            Self::HomeNearLimit { .. } => "home.near_limit",
            Self::HomeReplaced { .. } => "home.replaced",
            Self::HomeRolledBack { .. } => "home_rolled_back",
        }
    }

    /// Whether clients see it.
    pub const fn is_public(&self) -> bool {
        !matches!(
            self,
            Self::ModelIntended { .. }
                | Self::ModelDone { .. }
                | Self::ModelFailed { .. }
                | Self::ModelAbandoned { .. }
                | Self::ToolDispatched { .. }
                | Self::ToolNeverStarted { .. }
                | Self::ToolEnded { .. }
                | Self::InterruptHandled { .. }
                | Self::AnswersHandled { .. }
                | Self::DriverClaimed { .. }
                | Self::RunnerLost { .. }
        )
    }

    /// Whether it comes from a client and waits to be taken.
    pub const fn is_user(&self) -> bool {
        matches!(self, Self::UserMessage { .. } | Self::UserInterrupt {}) || self.answered_call().is_some()
    }

    /// The call that a client answers with it.
    pub const fn answered_call(&self) -> Option<EventId> {
        match self {
            Self::UserToolConfirmation { tool_use_id: call, .. }
            | Self::UserCustomToolResult { custom_tool_use_id: call, .. } => Some(*call),
            _ => None,
        }
    }

    /// The event id that the body itself determines, if it does.
    pub fn own_event(&self) -> Option<EventId> {
        match self {
            Self::ToolUse { step, .. } | Self::CustomToolUse { step, .. } => Some(step_event(*step)),
            Self::SpanStart { step, attempt } => Some(span_id(*step, *attempt)),
            _ => None,
        }
    }

    /// The step it is about, for the journal's index.
    pub const fn step(&self) -> Option<StepId> {
        match self {
            Self::ModelIntended { step, .. }
            | Self::ModelDone { step, .. }
            | Self::ModelFailed { step, .. }
            | Self::ModelAbandoned { step, .. }
            | Self::ToolUse { step, .. }
            | Self::CustomToolUse { step, .. }
            | Self::ToolDispatched { step, .. }
            | Self::ToolNeverStarted { step, .. }
            | Self::ToolResult { step, .. }
            | Self::ToolEnded { step } => Some(*step),
            _ => None,
        }
    }

    /// The session's status from this record on; none when it does not change it.
    pub const fn status(&self) -> Option<SessionStatus> {
        match self {
            Self::StatusRunning {} => Some(SessionStatus::Running),
            Self::StatusIdle { .. } => Some(SessionStatus::Idle),
            Self::StatusRescheduled {} => Some(SessionStatus::Rescheduling),
            Self::StatusTerminated {} => Some(SessionStatus::Terminated),
            _ => None,
        }
    }
}

impl Record {
    /// The event as clients see it; none for private records.
    pub fn public(&self) -> Option<Value> {
        let id = self.event?;
        let mut fields = match serde_json::to_value(&self.body) {
            Ok(Value::Object(fields)) => fields,
            // Every body serialises to an object; a body that does not is not shown rather than half shown.
            _ => return None,
        };
        for private in ["step", "model_step", "index", "call_id", "refusal", "substitute", "jitter_permille"]
        {
            // `home.secured` names its step: as the public id of the call, below.
            fields.shift_remove(private);
        }
        match &self.body {
            Body::ContextCompacted { .. } => {
                // As the API has it: that it happened. What the model is sent stays in the journal.
                fields.retain(|name, _| name == "type");
            }
            Body::SpanStart { .. } => {
                fields.shift_remove("attempt");
            }
            Body::HomeSecured { step, .. } => {
                fields.insert("step".into(), json!(step.map(step_event)));
            }
            Body::ToolUse { evaluated_permission, .. } => {
                // A refused call was refused before any policy was looked at.
                let policy = match evaluated_permission {
                    Permission::Allow => Some("always_allow"),
                    Permission::Ask => Some("always_ask"),
                    Permission::Deny => None,
                };
                fields.extend(policy.map(|policy| ("evaluation".into(), json!({"type": policy}))));
            }
            _ => {}
        }
        fields.insert("id".into(), json!(id));
        fields.insert("processed_at".into(), json!(self.processed_at.map(|at| at.to_string())));
        Some(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(n: u128) -> StepId {
        StepId::from_uuid(uuid::Uuid::from_u128(n))
    }

    #[test]
    fn the_kind_is_the_serialised_type() {
        let bodies = [
            Body::UserMessage { content: vec![] },
            Body::StatusIdle { stop_reason: StopReason::EndTurn },
            Body::ModelIntended { step: step(1), upto: 3, attempt: 1, compact: false },
            Body::ContextCompacted { summary: "s".into(), kept: 2 },
            Body::HomeRolledBack { generation: Generation(2), steps: vec![], reason: "r".into() },
            Body::HomeIncomplete {
                generation: Generation(2),
                count: 1,
                paths: vec!["a".into()],
                reason: "r".into(),
            },
            Body::HomeNearLimit { limit: "bytes".into(), used: 9, max: 10 },
            Body::HomeReplaced {
                generation: Generation(3),
                root: RootHash::of(b"r"),
                origin: HomeOrigin::Restored,
                from_generation: Some(Generation(1)),
            },
            Body::ModelFailedOver { from: None, to: "b".into(), failures: 3, reason: "r".into() },
            Body::UserInterrupt {},
            Body::StatusIdle {
                stop_reason: StopReason::RequiresAction { event_ids: vec![step_event(step(3))] },
            },
            Body::UserToolConfirmation {
                tool_use_id: step_event(step(3)),
                result: Confirmation::Deny,
                deny_message: Some("no".into()),
            },
            Body::UserCustomToolResult {
                custom_tool_use_id: step_event(step(4)),
                content: vec![],
                is_error: true,
            },
            Body::AnswersHandled { upto: 4 },
        ];
        for body in bodies {
            let value = serde_json::to_value(&body).unwrap();
            assert_eq!(value["type"], body.kind());
            assert_eq!(serde_json::from_value::<Body>(value).unwrap(), body);
        }
    }

    #[test]
    fn a_public_call_shows_the_steps_public_id_and_nothing_private() {
        let body = Body::ToolUse {
            step: step(7),
            model_step: step(6),
            index: 0,
            call_id: "toolu_1".into(),
            name: "bash".into(),
            input: Map::new(),
            evaluated_permission: Permission::Allow,
            refusal: None,
        };
        let at = Timestamp::from_unix_ms(0);
        let record = Record { seq: 1, event: body.own_event(), at, processed_at: Some(at), body };
        assert_eq!(
            record.public().unwrap(),
            json!({
                "type": "agent.tool_use", "name": "bash", "input": {}, "evaluated_permission": "allow",
                "evaluation": {"type": "always_allow"},
                "id": "sevt_00000000000000000000000000000007", "processed_at": "1970-01-01T00:00:00.000Z",
            })
        );
    }

    #[test]
    fn records_from_before_there_were_providers_are_read() {
        let done = json!({"type": "model.done", "step": step(1), "content": [], "stop_reason": "end_turn",
            "usage": {}, "model": "m", "request_id": null});
        let failed = json!({"type": "model.failed", "step": step(1), "attempt": 1, "failure": "transient",
            "status": 529, "retry_after_ms": null, "detail": "d", "request_id": null, "jitter_permille": 3});
        for old in [done, failed] {
            let body: Body = serde_json::from_value(old.clone()).unwrap();
            // And an older reader finds nothing new in what is written without one.
            assert_eq!(serde_json::to_value(&body).unwrap(), old);
        }
    }

    #[test]
    fn derived_ids_differ_by_what_they_are_derived_from() {
        assert_eq!(span_id(step(1), 1), span_id(step(1), 1));
        assert_ne!(span_id(step(1), 1), span_id(step(1), 2));
        assert_ne!(span_id(step(1), 1), span_id(step(2), 1));
    }
}
