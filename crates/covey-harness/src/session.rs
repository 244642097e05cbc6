//! A session as the fold of its journal.
//!
//! [`Session::apply`] takes one record; any prefix of a journal folds, and the same prefix gives the same
//! session. [`Session::next`] (in `session/next.rs`) says what should be under way, the functions in
//! `session/answer.rs` turn what came back into records. Nothing here fails: a record that does not fit is
//! folded as far as it makes sense, because a journal cannot be mended by refusing to read it.

mod answer;
mod compact;
mod next;

use std::collections::BTreeSet;

use covey_types::{
    EventId, Fault, Generation, SandboxId, SessionId, SessionStatus, StepId, Timestamp, TurnState,
};
use serde_json::{Map, Value, json};

use crate::config::AgentConfig;
use crate::prompt::{self, Addressee, CallResult, Entry};
use crate::record::{
    Body, Confirmation, FailureKind, HomeOrigin, ModelUsage, Permission, Record, StopReason, derived_uuid,
    step_event,
};
use crate::repair::GO_ON;
use crate::retry;

pub use answer::{HomeReadyFacts, ModelAnswerFacts, ModelFailureFacts};

/// Model calls in one turn; a model that loops is stopped here, visibly.
pub const STEPS_PER_TURN_MAX: u32 = 500;
/// How long a call waits for a client's word; then the model is told that nobody answered.
pub const ANSWER_WAIT_MAX_MS: u64 = 30 * 24 * 60 * 60 * 1000;
/// Calls of one answer that are run; the others get an error result.
pub const PARALLEL_CALLS_MAX: u32 = 64;
/// Times one call is dispatched; each earlier one is proven not to have started.
pub const DISPATCHES_MAX: u32 = 5;

/// What waits to be part of the next request.
#[derive(Debug, Clone, PartialEq)]
struct Pending {
    seq: u64,
    content: Vec<Value>,
    /// Whether it opens a turn: a message does, a note of ours does not.
    opens_turn: bool,
}

/// Where the model stands.
#[derive(Debug, Clone, PartialEq)]
enum ModelState {
    /// No call is wanted or under way.
    Quiet,
    /// The intention is durable. `compact`: to summarise the conversation.
    Intended { step: StepId, attempt: u32, compact: bool },
    /// The last attempt failed.
    Failed {
        step: StepId,
        attempt: u32,
        compact: bool,
        failure: FailureKind,
        status: Option<u16>,
        detail: String,
        until: Timestamp,
        too_long: bool,
    },
    /// There is a summary; what it replaces is decided in the same transaction.
    Summarised,
    /// There is an answer; its calls may still run.
    Answered { stop_reason: String, had_calls: bool },
}

/// Where one call of the last answer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallState {
    Intended,
    /// `fresh`: dispatched in this era, so that whether it was sent is known.
    Dispatched {
        sandbox: SandboxId,
        fresh: bool,
    },
    Done,
}

#[derive(Debug, Clone, PartialEq)]
struct Call {
    step: StepId,
    name: String,
    input: Map<String, Value>,
    refusal: Option<String>,
    dispatches: u32,
    state: CallState,
    /// What a client has to bring first: its word that the call may run, or the result of a tool that it runs itself.
    waits_for: Option<Awaited>,
}

/// What a client has to bring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Awaited {
    Confirmation,
    Result,
}

/// The session is idle in the middle of a turn, because calls wait for a client.
#[derive(Debug, Clone, PartialEq)]
struct Paused {
    event_ids: Vec<EventId>,
    since: Timestamp,
}

/// A failed attempt to ready the sandbox.
#[derive(Debug, Clone, PartialEq)]
struct WakeFailure {
    fault: Fault,
    detail: String,
    attempt: u32,
    until: Timestamp,
    /// The wait is over: the next attempt may begin.
    waited: bool,
}

/// A finished call, with what it did in words that the model knows.
#[derive(Debug, Clone, PartialEq)]
struct Finished {
    step: StepId,
    what: String,
}

/// The fold of a journal.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    id: SessionId,
    config: AgentConfig,
    head: u64,
    status: SessionStatus,
    turn_open: bool,
    conversation: Vec<Entry>,
    /// Tokens of the last request and its answer, as the provider counted them.
    context_used: u64,
    /// What the user said in parts of the conversation that were left out, oldest first.
    words_left_out: Vec<String>,
    pending: Vec<Pending>,
    /// The last interrupt that has had no effect yet.
    interrupt: Option<u64>,
    /// The last word of a client about a waiting call that has had no effect yet.
    answered: Option<u64>,
    /// What the clients were last told to answer.
    paused: Option<Paused>,
    /// Messages up to here were sent before an interrupt and open no turn by themselves.
    interrupted_upto: u64,
    model: ModelState,
    calls: Vec<Call>,
    /// Steps begun so far; numbers the next one.
    steps_begun: u64,
    requests_this_turn: u32,
    /// Who is asked for the rest of the turn; none: whoever comes first.
    provider: Option<String>,
    /// Failures in a row of the provider that is asked now.
    provider_failures: u32,
    /// Grows when what is under way elsewhere becomes unknown.
    era: u64,
    sandbox: Option<SandboxId>,
    last_sandbox: Option<SandboxId>,
    wake_failure: Option<WakeFailure>,
    /// Cancelled calls that may still run, and where.
    interrupting: Vec<(StepId, SandboxId)>,
    /// Results of this turn that a runner may still keep a copy of.
    results_taken: Vec<StepId>,
    /// Finished calls whose files no published snapshot is known to hold, in order.
    unsecured: Vec<Finished>,
    /// Steps that a snapshot named before their result was here.
    secured_ahead: BTreeSet<StepId>,
    secure_failed: bool,
}

impl Session {
    /// The session before its first record.
    pub fn new(id: SessionId, config: AgentConfig) -> Self {
        Self {
            id,
            config,
            head: 0,
            status: SessionStatus::Idle,
            turn_open: false,
            conversation: Vec::new(),
            context_used: 0,
            words_left_out: Vec::new(),
            pending: Vec::new(),
            interrupt: None,
            answered: None,
            paused: None,
            interrupted_upto: 0,
            model: ModelState::Quiet,
            calls: Vec::new(),
            steps_begun: 0,
            requests_this_turn: 0,
            provider: None,
            provider_failures: 0,
            era: 0,
            sandbox: None,
            last_sandbox: None,
            wake_failure: None,
            interrupting: Vec::new(),
            results_taken: Vec::new(),
            unsecured: Vec::new(),
            secured_ahead: BTreeSet::new(),
            secure_failed: false,
        }
    }

    /// Position of the last folded record.
    pub const fn head(&self) -> u64 {
        self.head
    }

    /// The status, in the API's words.
    pub const fn status(&self) -> SessionStatus {
        self.status
    }

    /// Changes whenever what was sent to the runner before can no longer be relied on: whoever performs
    /// effects then forgets what it has sent.
    pub const fn era(&self) -> u64 {
        self.era
    }

    /// The sandbox that is ready in this era.
    pub const fn sandbox(&self) -> Option<SandboxId> {
        self.sandbox
    }

    /// Whether a turn is open.
    pub const fn is_turn_open(&self) -> bool {
        self.turn_open
    }

    /// Whether nothing can happen until a client answers a call; the turn is open all the same.
    pub const fn is_paused(&self) -> bool {
        self.turn_open && self.paused.is_some() && matches!(self.status, SessionStatus::Idle)
    }

    /// Where the turn stands.
    pub fn turn(&self) -> TurnState {
        match (&self.model, self.turn_open) {
            (_, false) => TurnState::Done,
            _ if self.open_calls().next().is_some() => TurnState::RunningTools,
            (ModelState::Intended { .. } | ModelState::Failed { .. }, _) => TurnState::AwaitingModel,
            _ => TurnState::Open,
        }
    }

    /// Finished calls whose files no published snapshot is known to hold.
    pub fn unsecured(&self) -> impl Iterator<Item = StepId> {
        self.unsecured.iter().map(|f| f.step)
    }

    /// The body of the request that [`crate::Effect::CallModel`] asks for, where there is one provider.
    pub fn request(&self) -> Map<String, Value> {
        self.request_to(Addressee::default())
    }

    /// The same for one of several providers.
    pub fn request_to(&self, to: Addressee<'_>) -> Map<String, Value> {
        match self.model {
            ModelState::Intended { compact: true, .. } => self.summary_request(to),
            _ => prompt::build(&self.config, &self.conversation, to),
        }
    }

    /// The agent's name of the model.
    pub fn model(&self) -> &str {
        &self.config.model
    }

    /// The provider that the rest of the turn stays with, after another one did not answer.
    pub fn provider(&self) -> Option<&str> {
        self.provider.as_deref()
    }

    /// The step id with that number: computed, so that every fold of the same journal names it alike.
    fn step_id(&self, number: u64) -> StepId {
        StepId::from_uuid(derived_uuid("covey step v1", self.id.as_uuid(), number))
    }

    fn open_calls(&self) -> impl Iterator<Item = &Call> {
        self.calls.iter().filter(|c| c.state != CallState::Done)
    }

    fn call_mut(&mut self, step: StepId) -> Option<&mut Call> {
        self.calls.iter_mut().find(|c| c.step == step)
    }

    fn begin_era(&mut self) {
        self.era += 1;
        self.sandbox = None;
        for call in &mut self.calls {
            if let CallState::Dispatched { fresh, .. } = &mut call.state {
                *fresh = false;
            }
        }
    }

    fn note(&mut self, seq: u64, text: String) {
        let content = vec![json!({"type": "text", "text": text})];
        self.pending.push(Pending { seq, content, opens_turn: false });
    }

    /// Folds the next record. Records that are folded already are ignored.
    pub fn apply(&mut self, record: &Record) {
        if record.seq <= self.head {
            return;
        }
        self.head = record.seq;
        if let Some(status) = record.body.status() {
            self.status = status;
        }
        match &record.body {
            Body::UserMessage { content } => {
                self.pending.push(Pending { seq: record.seq, content: content.clone(), opens_turn: true });
            }
            Body::UserInterrupt {} => self.interrupt = Some(record.seq),
            Body::UserToolConfirmation { tool_use_id, result, deny_message } => {
                self.answered = Some(record.seq);
                self.confirm(*tool_use_id, *result, deny_message.as_deref());
            }
            Body::UserCustomToolResult { custom_tool_use_id, content, is_error } => {
                self.answered = Some(record.seq);
                self.take_clients_result(*custom_tool_use_id, content, *is_error);
            }
            Body::AnswersHandled { upto } => {
                if self.answered.is_some_and(|seq| seq <= *upto) {
                    self.answered = None;
                }
            }
            Body::InterruptHandled { upto } => {
                self.interrupted_upto = self.interrupted_upto.max(*upto);
                if self.interrupt.is_some_and(|seq| seq <= *upto) {
                    self.interrupt = None;
                }
            }
            Body::StatusRunning {} => self.run(),
            Body::StatusIdle { stop_reason: StopReason::RequiresAction { event_ids } } => {
                self.paused = Some(Paused { event_ids: event_ids.clone(), since: record.at });
            }
            Body::StatusIdle { .. } | Body::StatusTerminated {} => self.end_turn(),
            Body::ContextCompacted { summary, kept } => self.compact(summary, *kept),
            Body::ModelIntended { .. }
            | Body::ModelDone { .. }
            | Body::ModelFailed { .. }
            | Body::ModelAbandoned { .. } => self.apply_model(record),
            Body::ToolUse { .. }
            | Body::CustomToolUse { .. }
            | Body::ToolDispatched { .. }
            | Body::ToolNeverStarted { .. }
            | Body::ToolResult { .. }
            | Body::ToolEnded { .. } => self.apply_tool(&record.body),
            Body::DriverClaimed { .. } | Body::RunnerLost { .. } => self.begin_era(),
            Body::SandboxReady { .. }
            | Body::SandboxLost { .. }
            | Body::SandboxFailed { .. }
            | Body::HomeSecured { .. }
            | Body::HomeSecureFailed { .. }
            | Body::HomeIncomplete { .. }
            | Body::HomeReplaced { .. }
            | Body::HomeRolledBack { .. } => self.apply_home(record),
            Body::StatusRescheduled {}
            | Body::ModelFailedOver { .. }
            | Body::Error { .. }
            | Body::SpanStart { .. }
            | Body::SpanEnd { .. }
            | Body::AgentThinking {}
            | Body::AgentMessage { .. }
            | Body::HomeNearLimit { .. }
            | Body::SandboxWaiting { .. } => {}
        }
    }

    fn run(&mut self) {
        self.paused = None;
        if !self.turn_open {
            self.turn_open = true;
            self.requests_this_turn = 0;
            // The first provider gets its chance once per turn.
            self.provider = None;
            self.provider_failures = 0;
            self.model = ModelState::Quiet;
            self.results_taken.clear();
        }
        if let Some(failure) = &mut self.wake_failure {
            failure.waited = true;
        }
    }

    fn end_turn(&mut self) {
        self.turn_open = false;
        self.paused = None;
        self.model = ModelState::Quiet;
        self.wake_failure = None;
        // Every call has its result by now; whoever wrote the end wrote those first.
        self.calls.clear();
    }

    fn apply_model(&mut self, record: &Record) {
        if let Body::ModelIntended { attempt: 1, .. } | Body::ModelDone { .. } = record.body {
            self.provider_failures = 0;
        }
        match &record.body {
            Body::ModelIntended { step, attempt, compact: true, .. } => {
                if *attempt <= 1 {
                    self.steps_begun += 1;
                }
                self.calls.clear();
                self.model = ModelState::Intended { step: *step, attempt: *attempt, compact: true };
            }
            Body::ModelIntended { step, upto, attempt, compact: false } => {
                if *attempt <= 1 {
                    self.steps_begun += 1;
                    self.requests_this_turn += 1;
                }
                let (taken, kept) =
                    std::mem::take(&mut self.pending).into_iter().partition(|p| p.seq <= *upto);
                self.pending = kept;
                let taken: Vec<Pending> = taken;
                if taken.is_empty() && self.ends_with_unanswerable() {
                    // Part of the conversation, not only of this request: the next one must repeat it.
                    self.conversation.push(Entry::Note(vec![json!({"type": "text", "text": GO_ON})]));
                }
                self.conversation.extend(taken.into_iter().map(|p| match p.opens_turn {
                    true => Entry::Input(p.content),
                    false => Entry::Note(p.content),
                }));
                self.calls.clear();
                self.model = ModelState::Intended { step: *step, attempt: *attempt, compact: false };
            }
            Body::ModelDone { compact: true, .. } => self.model = ModelState::Summarised,
            Body::ModelDone { content, stop_reason, model, usage, provider, .. } => {
                self.context_used = context_of(usage);
                let had_calls = content.iter().any(|b| b["type"] == "tool_use");
                self.conversation.push(Entry::Answer {
                    content: content.clone(),
                    model: model.clone(),
                    provider: provider.clone(),
                    results: Vec::new(),
                });
                self.model = ModelState::Answered { stop_reason: stop_reason.clone(), had_calls };
            }
            Body::ModelFailed {
                step,
                attempt,
                failure,
                status,
                retry_after_ms,
                detail,
                jitter_permille,
                next_provider,
                too_long,
                ..
            } => {
                let wait = match next_provider {
                    // Another one has nothing to do with how long this one wants to be left alone.
                    Some(_) => retry::wait_ms(1, *jitter_permille, None),
                    None => retry::wait_ms(*attempt, *jitter_permille, *retry_after_ms),
                };
                self.provider_failures = if next_provider.is_some() { 0 } else { self.provider_failures + 1 };
                if next_provider.is_some() {
                    self.provider.clone_from(next_provider);
                }
                let compact = matches!(self.model, ModelState::Intended { compact: true, .. });
                self.model = ModelState::Failed {
                    step: *step,
                    attempt: *attempt,
                    compact,
                    failure: *failure,
                    status: *status,
                    detail: detail.clone(),
                    until: later(record.at, wait),
                    too_long: *too_long,
                };
            }
            _ => self.model = ModelState::Quiet,
        }
    }

    /// Whether the conversation ends with an answer that no result follows and that did not pause for a tool
    /// of the provider.
    fn ends_with_unanswerable(&self) -> bool {
        let Some(Entry::Answer { content, .. }) = self.conversation.last() else { return false };
        !content.iter().any(|block| {
            let named = block["name"].as_str().is_some_and(|name| !name.is_empty());
            block["type"] == "server_tool_use" || (block["type"] == "tool_use" && named)
        })
    }

    fn apply_tool(&mut self, body: &Body) {
        match body {
            Body::ToolUse { step, call_id, name, input, refusal, evaluated_permission, .. } => {
                let asks = *evaluated_permission == Permission::Ask;
                let waits_for = asks.then_some(Awaited::Confirmation);
                self.begin_call((*step, call_id), name, input, refusal.as_ref(), waits_for);
            }
            Body::CustomToolUse { step, call_id, name, input, refusal, .. } => {
                self.begin_call((*step, call_id), name, input, refusal.as_ref(), Some(Awaited::Result));
            }
            Body::ToolDispatched { step, sandbox } => {
                if let Some(call) = self.call_mut(*step) {
                    call.dispatches += 1;
                    call.state = CallState::Dispatched { sandbox: *sandbox, fresh: true };
                }
            }
            Body::ToolNeverStarted { step, .. } => {
                if let Some(call) = self.call_mut(*step) {
                    call.state = CallState::Intended;
                }
                // The sandbox it was meant for is not the one that is there.
                self.begin_era();
            }
            Body::ToolResult { step, content, is_error, substitute, .. } => {
                self.take_result(*step, content, *is_error, *substitute);
            }
            Body::ToolEnded { step } => self.interrupting.retain(|(s, _)| s != step),
            _ => {}
        }
    }

    fn begin_call(
        &mut self,
        (step, call_id): (StepId, &str),
        name: &str,
        input: &Map<String, Value>,
        refusal: Option<&String>,
        waits_for: Option<Awaited>,
    ) {
        self.steps_begun += 1;
        self.calls.push(Call {
            step,
            name: name.to_owned(),
            input: input.clone(),
            refusal: refusal.cloned(),
            dispatches: 0,
            state: CallState::Intended,
            waits_for,
        });
        if let Some(Entry::Answer { results, .. }) = self.conversation.last_mut() {
            results.push(CallResult { call_id: call_id.to_owned(), outcome: None });
        }
    }

    /// The open call that waits for this of a client.
    fn waiting_call(&mut self, event: EventId, awaited: Awaited) -> Option<&mut Call> {
        let is_meant = |call: &&mut Call| {
            step_event(call.step) == event
                && call.waits_for == Some(awaited)
                && call.state == CallState::Intended
        };
        self.calls.iter_mut().find(is_meant)
    }

    fn confirm(&mut self, event: EventId, result: Confirmation, deny_message: Option<&str>) {
        let Some(call) = self.waiting_call(event, Awaited::Confirmation) else { return };
        call.waits_for = None;
        if result == Confirmation::Deny {
            let why = deny_message.map_or_else(String::new, |message| format!(": {message}"));
            call.refusal = Some(format!("not run: the user denied the call{why}"));
        }
    }

    fn take_clients_result(&mut self, event: EventId, content: &[Value], is_error: bool) {
        let Some(call) = self.waiting_call(event, Awaited::Result) else { return };
        let step = call.step;
        call.state = CallState::Done;
        self.set_outcome(step, content, is_error);
    }

    /// The result becomes part of the conversation.
    fn set_outcome(&mut self, step: StepId, content: &[Value], is_error: bool) {
        let index = self.calls.iter().position(|call| call.step == step);
        // Calls are pushed in the order of the answer, so both lists have the same positions.
        if let Some(index) = index
            && let Some(Entry::Answer { results, .. }) = self.conversation.last_mut()
            && let Some(result) = results.get_mut(index)
        {
            result.outcome = Some((content.to_vec(), is_error));
        }
    }

    fn take_result(&mut self, step: StepId, content: &[Value], is_error: bool, substitute: bool) {
        let Some(index) = self.calls.iter().position(|c| c.step == step) else { return };
        let call = &mut self.calls[index];
        if let (CallState::Dispatched { sandbox, .. }, true, true) =
            (call.state, substitute, self.interrupt.is_some())
        {
            self.interrupting.push((step, sandbox));
        }
        call.state = CallState::Done;
        let what = describe(call);
        self.set_outcome(step, content, is_error);
        if !substitute {
            self.results_taken.push(step);
            if !self.secured_ahead.remove(&step) {
                self.unsecured.push(Finished { step, what });
            }
        }
    }

    fn apply_home(&mut self, record: &Record) {
        match &record.body {
            Body::SandboxReady { sandbox, .. } => {
                self.wake_failure = None;
                self.interrupting.retain(|(_, s)| s == sandbox);
                if self.last_sandbox.is_some_and(|last| last != *sandbox) {
                    let text = "[covey] The sandbox was replaced by a new one. Running processes, the shell with \
                                its working directory and variables, and files outside of the home directory \
                                are gone.";
                    self.note(record.seq, text.to_owned());
                }
                self.sandbox = Some(*sandbox);
                self.last_sandbox = Some(*sandbox);
            }
            Body::SandboxLost { sandbox, .. } => {
                self.interrupting.retain(|(_, s)| s != sandbox);
                if self.sandbox == Some(*sandbox) {
                    self.begin_era();
                }
            }
            Body::SandboxFailed { fault, detail, attempt, jitter_permille } => {
                self.wake_failure = Some(WakeFailure {
                    fault: *fault,
                    detail: detail.clone(),
                    attempt: *attempt,
                    until: later(record.at, retry::wait_ms(*attempt, *jitter_permille, None)),
                    waited: false,
                });
                self.begin_era();
            }
            Body::HomeSecured { step, .. } => {
                self.secure_failed = false;
                let Some(step) = step else { return };
                match self.unsecured.iter().position(|f| f.step == *step) {
                    Some(position) => drop(self.unsecured.drain(..=position)),
                    None if !self.results_taken.contains(step) => drop(self.secured_ahead.insert(*step)),
                    None => {}
                }
            }
            Body::HomeSecureFailed { .. } => self.secure_failed = true,
            Body::HomeIncomplete { count, paths, .. } => {
                self.note(record.seq, incomplete_text(*count, paths));
            }
            Body::HomeReplaced { generation, origin, from_generation, .. } => {
                // Whatever was not secured is not part of the home any more, and nobody need say so again.
                self.unsecured.clear();
                self.note(record.seq, replaced_text(*generation, *origin, *from_generation));
            }
            Body::HomeRolledBack { generation, steps, .. } => {
                let lost = std::mem::take(&mut self.unsecured);
                self.note(record.seq, rolled_back_text(*generation, steps, &lost));
            }
            _ => {}
        }
    }
}

/// Tokens that the conversation took in the context, answer included: their sum, unless the usage is that of several
/// requests and says so.
fn context_of(usage: &Value) -> u64 {
    let used = ModelUsage::of(usage);
    usage["context_tokens"].as_u64().unwrap_or_else(|| {
        [used.output_tokens, used.cache_read_input_tokens, used.cache_creation_input_tokens]
            .into_iter()
            .fold(used.input_tokens, u64::saturating_add)
    })
}

/// Calls that the note about a rolled back home spells out; more are only counted.
const SPELLED_OUT_MAX: usize = 20;

fn describe(call: &Call) -> String {
    let input: String = Value::Object(call.input.clone()).to_string().chars().take(160).collect();
    format!("{} {input}", call.name)
}

fn rolled_back_text(generation: Generation, steps: &[EventId], lost: &[Finished]) -> String {
    let named: Vec<&str> = lost
        .iter()
        .filter(|f| steps.contains(&step_event(f.step)))
        .map(|f| f.what.as_str())
        .take(SPELLED_OUT_MAX)
        .collect();
    format!(
        "[covey] The host with the home directory was lost. It was rolled back to generation {generation}. \
         What these {} finished calls changed in it is missing; check before you build on it: {}",
        steps.len(),
        named.join("; ")
    )
}

fn incomplete_text(count: u64, paths: &[String]) -> String {
    let named: Vec<&str> = paths.iter().map(String::as_str).take(SPELLED_OUT_MAX).collect();
    format!(
        "[covey] The store has lost parts of the home directory: {count} names are missing in it and were not \
         deleted by anybody: {}. They come back when the store is repaired. What you write in their place counts; \
         check before you build on them.",
        named.join("; ")
    )
}

fn replaced_text(generation: Generation, origin: HomeOrigin, from: Option<Generation>) -> String {
    let what = match (origin, from) {
        (HomeOrigin::Restored, Some(from)) => {
            format!("what it was at generation {from} was put back, all of it or a part")
        }
        (HomeOrigin::Forked, Some(from)) => {
            format!("it is now that of another agent at its generation {from}")
        }
        (HomeOrigin::Restored | HomeOrigin::Forked | HomeOrigin::Imported, _) => {
            "another state was put in its place".to_owned()
        }
    };
    format!(
        "[covey] Somebody changed the home directory since you last worked in it: {what}. It is now generation \
         {generation}. Files may be other than you remember; look before you build on them."
    )
}

fn later(at: Timestamp, ms: u64) -> Timestamp {
    Timestamp::from_unix_ms(at.unix_ms().saturating_add(i64::try_from(ms).unwrap_or(i64::MAX)))
}

#[cfg(test)]
mod tests;
