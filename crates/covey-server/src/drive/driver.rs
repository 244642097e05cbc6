//! One session's driver: claim, fold, ask what comes next, append, perform, and again.
//!
//! The fold's wishes are declarative, so performing them is a comparison: what is wished and not under way is
//! started, what is under way and no longer wished is stopped. `sent` remembers what went over the link in
//! this era; a new era forgets it. Every wait for the runner has a deadline, after which the link is treated
//! as lost and everything is asked for again. This is the only file in which a session is acted upon.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use covey_harness::config::InvalidConfig;
use covey_harness::prompt::Addressee;
use covey_harness::record::{Body, ErrorKind, Record, RetryStatus, SessionError, StopReason};
use covey_harness::session::HomeReadyFacts;
use covey_harness::{AgentConfig, Effect, Session};
use covey_types::{Fault, HomeId, OrgId, SandboxState, SessionId, SessionStatus, StepId, Timestamp};
use covey_wire::runner::{RunnerToServer, ServerToRunner, ToolLoss};
use covey_wire::tool::ToolCall;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::live::Delta;
use super::wake::{self, Changes, Held, Woken};
use super::{Context, Ended, facts, wait_until};
use crate::db::leases::Rest;
use crate::db::snapshots::Publish;
use crate::db::{self, DbError, sessions};
use crate::link::Outbox;
use crate::model::{ModelAnswer, ModelDelta, ModelFailure, ModelRequest, Target};

/// From `WakeHome` to its answer: materializing a large home on a cold host takes minutes.
pub const WAKE_WAIT_MAX: Duration = Duration::from_secs(30 * 60);
/// From a call to its result: the longest that a tool may run, and the time to kill it.
pub const TOOL_WAIT_MAX: Duration = Duration::from_secs(15 * 60);
/// From a question to its answer.
pub const ANSWER_WAIT_MAX: Duration = Duration::from_secs(60);
/// Records read at once while folding.
const FOLD_RECORDS: usize = 500;

/// Why a driver ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum DriveError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error("the session wants to append nothing")]
    EmptyAppend,
}

/// What was sent over the link in this era.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Sent {
    Wake,
    Dispatch(StepId),
    Query(StepId),
    Interrupt(StepId),
    Acknowledge(StepId),
    Secure,
}

type ModelOutcome = Result<ModelAnswer, ModelFailure>;

struct Running {
    step: StepId,
    attempt: u32,
    /// Who was asked.
    target: Target,
    call: Pin<Box<dyn Future<Output = ModelOutcome> + Send>>,
}

struct Driver<'a> {
    context: &'a Context,
    org: OrgId,
    id: SessionId,
    home: HomeId,
    epoch: u64,
    session: Session,
    grown: watch::Receiver<u64>,
    changes: Changes,
    held: Option<Held>,
    model: Option<Running>,
    wait: Option<(Timestamp, Instant, Vec<Body>)>,
    era: u64,
    sent: HashMap<Sent, Option<Instant>>,
    /// The last reason for waiting that was noted, so that it is noted once.
    noted: Option<String>,
    blocked: bool,
}

/// Drives a session until it is at rest, `stop` is cancelled, or somebody else claims it. `taken`: it was claimed already,
/// and its journal says so.
pub(super) async fn drive(
    context: &Context,
    org: OrgId,
    id: SessionId,
    taken: Option<Box<sessions::Session>>,
    stop: &CancellationToken,
) -> Result<Ended, DriveError> {
    // Watched before the first look at the journal: what is appended in between is seen as a change.
    let grown = context.db.feed().watch(id);
    let was_taken = taken.is_some();
    let row = match taken {
        Some(row) => *row,
        None => match context.db.claim_session(org, id).await {
            Err(DbError::NotFound { .. } | DbError::Leased { .. } | DbError::LeaseEnded) => {
                return Ok(Ended::Elsewhere);
            }
            other => other?,
        },
    };
    let config = match AgentConfig::from_document(&row.agent_snapshot) {
        Ok(config) => {
            let context_tokens = context.model.target(&config.model, None).context_tokens;
            config.with_context_default(context_tokens)
        }
        Err(e) => {
            let refused = refuse(context, org, &row, &e).await;
            return give_back(context, org, &row, refused.map(|()| Rest::Idle)).await;
        }
    };
    let mut driver = Driver {
        context,
        org,
        id,
        home: row.home,
        epoch: row.epoch,
        session: Session::new(id, config),
        grown,
        changes: Changes::new(context),
        held: None,
        model: None,
        wait: None,
        era: 0,
        sent: HashMap::new(),
        noted: None,
        blocked: false,
    };
    let result = driver.run(was_taken, stop).await;
    // A cancelled call of the model is simply dropped; the next driver makes it again.
    driver.model = None;
    let answered = match driver.held.take() {
        Some(held) => held.stop_listening(context, row.home).await,
        None => Ok(()),
    };
    let ended = give_back(context, org, &row, result).await?;
    answered?;
    Ok(ended)
}

/// Gives session and home back, unless somebody else has them.
async fn give_back(
    context: &Context,
    org: OrgId,
    row: &sessions::Session,
    result: Result<Rest, DriveError>,
) -> Result<Ended, DriveError> {
    let (id, epoch) = (row.id, row.epoch);
    let (rest, ended) = match result {
        Err(DriveError::Db(DbError::Fenced { .. })) => {
            tracing::info!(session = %id, "another driver took the session");
            return Ok(Ended::Elsewhere);
        }
        // Not given away: it is tried again here.
        Err(error) => (Rest::Idle, Err(error)),
        Ok(rest) => (rest, Ok(Ended::GaveBack)),
    };
    context.db.release_session(org, id, epoch, rest).await?;
    ended
}

/// Ends the turn of a session whose agent cannot be driven, visibly.
async fn refuse(
    context: &Context,
    org: OrgId,
    row: &sessions::Session,
    reason: &InvalidConfig,
) -> Result<(), DriveError> {
    let (id, epoch, head) = (row.id, row.epoch, row.head);
    let error = SessionError {
        kind: ErrorKind::UnknownError,
        message: reason.to_string(),
        retry_status: RetryStatus::Exhausted,
    };
    // What waits is taken, or the session would ask for a driver for ever.
    let step = StepId::from_uuid(uuid::Uuid::now_v7());
    let bodies = vec![
        Body::StatusRunning {},
        Body::InterruptHandled { upto: head },
        Body::ModelIntended { step, upto: head, attempt: 1, compact: false },
        Body::ModelAbandoned { step, reason: reason.to_string() },
        Body::Error { error },
        Body::StatusIdle { stop_reason: StopReason::RetriesExhausted },
    ];
    context.db.append(org, id, epoch, bodies).await?;
    Ok(())
}

impl Driver<'_> {
    async fn run(&mut self, was_taken: bool, stop: &CancellationToken) -> Result<Rest, DriveError> {
        let draining = self.context.draining.clone();
        if !was_taken {
            self.catch_up().await?;
            self.append(vec![Body::DriverClaimed { epoch: self.epoch }]).await?;
        }
        loop {
            self.grown.mark_unchanged();
            self.catch_up().await?;
            // A border: what a model says is whole in the journal, and whoever drives next asks for what runs.
            if draining.is_cancelled() && self.model.is_none() && !self.is_at_rest() {
                return Ok(Rest::HandedOver);
            }
            let wishes = self.session.next();
            if let [Effect::Append(bodies)] = wishes.as_slice() {
                if bodies.is_empty() {
                    return Err(DriveError::EmptyAppend);
                }
                self.append(bodies.clone()).await?;
                continue;
            }
            if self.perform(&wishes).await? {
                continue;
            }
            if self.is_at_rest() {
                return Ok(Rest::Idle);
            }
            let deadline = self.deadline();
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(Rest::HandedOver),
                () = draining.cancelled(), if self.model.is_none() => {}
                heard = listen(&mut self.held) => match heard {
                    Heard::Mail(mail) => self.take(mail).await?,
                    Heard::LinkEnded => self.lost("the link to the runner ended".to_owned()).await?,
                },
                changed = self.grown.changed() => changed.map_err(|_| DbError::Closed)?,
                (step, target, outcome) = finish(&mut self.model) => {
                    self.model_ended(step, target, outcome).await?;
                }
                () = wait_until(self.wait.as_ref().map(|w| w.1)) => self.waited().await?,
                () = self.changes.next(), if self.blocked => self.blocked = false,
                () = wait_until(deadline) => {
                    self.lost("the runner did not answer in time".to_owned()).await?;
                }
            }
        }
    }

    /// Nothing is open and nothing waits: a new event starts a new driver.
    fn is_at_rest(&self) -> bool {
        if self.session.is_paused() {
            // Days may pass; whoever answers, or the supervisor's look for those that nobody answers, starts a new driver.
            return self.wait.as_ref().is_none_or(|(until, ..)| *until > db::now());
        }
        !self.session.is_turn_open()
            && self.model.is_none()
            && self.wait.is_none()
            && matches!(self.session.status(), SessionStatus::Idle | SessionStatus::Terminated)
    }

    async fn catch_up(&mut self) -> Result<(), DriveError> {
        loop {
            let (org, id, head) = (self.org, self.id, self.session.head());
            let records = self.context.db.records(org, id, head, FOLD_RECORDS).await?;
            records.iter().for_each(|r| self.session.apply(r));
            if records.len() < FOLD_RECORDS {
                return Ok(());
            }
        }
    }

    async fn append(&mut self, bodies: Vec<Body>) -> Result<(), DriveError> {
        if bodies.is_empty() {
            return Ok(());
        }
        let (org, id, epoch) = (self.org, self.id, self.epoch);
        let records: Vec<Record> = self.context.db.append(org, id, epoch, bodies).await?;
        if records.first().is_some_and(|r| r.seq == self.session.head() + 1) {
            records.iter().for_each(|r| self.session.apply(r));
            return Ok(());
        }
        // Somebody else's records stand between ours and the fold.
        self.catch_up().await
    }

    /// Starts and stops what the wishes ask for. True when the fold changed and the wishes are old.
    async fn perform(&mut self, wishes: &[Effect]) -> Result<bool, DriveError> {
        if self.era != self.session.era() {
            self.era = self.session.era();
            self.sent.clear();
            self.blocked = false;
        }
        let wished_call = wishes.iter().find_map(|w| match w {
            Effect::CallModel { step, attempt } => Some((*step, *attempt)),
            _ => None,
        });
        if self.model.as_ref().map(|m| (m.step, m.attempt)) != wished_call {
            self.model = wished_call.map(|(step, attempt)| self.start_call(step, attempt));
        }
        self.set_wait(wishes);
        // A deadline counts only for what is still wished: an answer has come for the rest.
        self.sent.retain(|sent, deadline| {
            if !is_wished(wishes, *sent) {
                *deadline = None;
            }
            true
        });
        for wish in wishes {
            match wish {
                Effect::WakeHome if !self.sent.contains_key(&Sent::Wake) && !self.blocked => {
                    if self.wake().await? {
                        return Ok(true);
                    }
                }
                _ => self.send_wish(wish),
            }
        }
        Ok(false)
    }

    fn set_wait(&mut self, wishes: &[Effect]) {
        let wished = wishes.iter().find_map(|w| match w {
            Effect::Wait { until, then } => Some((*until, then.clone())),
            _ => None,
        });
        let Some((until, then)) = wished else {
            self.wait = None;
            return;
        };
        let known = self.wait.as_ref().filter(|w| w.0 == until).map(|w| w.1);
        let at = known.unwrap_or_else(|| {
            // A clock that was set back must not make the wait longer than it was meant to be.
            let ms = until.unix_ms().saturating_sub(db::now().unix_ms());
            let longest = covey_harness::retry::RETRY_AFTER_LONGEST_MS;
            Instant::now() + Duration::from_millis(u64::try_from(ms).unwrap_or(0).min(longest))
        });
        self.wait = Some((until, at, then));
    }

    fn start_call(&self, step: StepId, attempt: u32) -> Running {
        let (model, live, id) = (Arc::clone(&self.context.model), self.context.live.clone(), self.id);
        let target = model.target(self.session.model(), self.session.provider());
        let to = Addressee { provider: target.provider.as_deref(), wire: target.wire };
        let request = ModelRequest { body: self.session.request_to(to), provider: target.provider.clone() };
        let call = Box::pin(async move {
            let on_delta = |delta: ModelDelta| {
                live.show(
                    id,
                    match delta {
                        ModelDelta::Text(text) => Delta::Text { step, text },
                        ModelDelta::Thinking(text) => Delta::Thinking { step, text },
                    },
                );
            };
            model.call(&request, &on_delta).await
        });
        Running { step, attempt, target, call }
    }

    /// True when something was noted in the journal.
    async fn wake(&mut self) -> Result<bool, DriveError> {
        let woken =
            wake::ask(self.context, self.org, (self.id, self.epoch), self.home, &mut self.held).await?;
        match woken {
            Woken::Asked => {
                self.noted = None;
                self.sent.insert(Sent::Wake, Some(Instant::now() + WAKE_WAIT_MAX));
                Ok(false)
            }
            Woken::Waiting(reason) => {
                self.blocked = true;
                if self.noted.as_ref() == Some(&reason) {
                    return Ok(false);
                }
                self.noted = Some(reason.clone());
                self.append(vec![Body::SandboxWaiting { reason }]).await?;
                Ok(true)
            }
        }
    }

    fn send_wish(&mut self, wish: &Effect) {
        let Some(held) = &self.held else { return };
        let Some(outbox) = &held.outbox else { return };
        let (home, token) = (self.home, held.token);
        let (key, wait, message) = match wish {
            Effect::DispatchTool { step, sandbox, name, input } => {
                let call = ToolCall { step: *step, name: name.clone(), input: input.clone() };
                let message = ServerToRunner::RunTool { home, token, sandbox: *sandbox, call };
                (Sent::Dispatch(*step), Some(TOOL_WAIT_MAX), message)
            }
            Effect::QueryTool { step, sandbox } => {
                let message = ServerToRunner::QueryTool { home, token, sandbox: *sandbox, step: *step };
                // `ToolStarted` makes it longer: then it runs.
                (Sent::Query(*step), Some(ANSWER_WAIT_MAX), message)
            }
            Effect::InterruptTool { step } => {
                (Sent::Interrupt(*step), None, ServerToRunner::InterruptTool { home, step: *step })
            }
            Effect::AcknowledgeTool { step } => {
                (Sent::Acknowledge(*step), None, ServerToRunner::AcknowledgeTool { home, step: *step })
            }
            Effect::SecureHome => (Sent::Secure, None, ServerToRunner::SecureHome { home, token }),
            Effect::Append(_) | Effect::CallModel { .. } | Effect::WakeHome | Effect::Wait { .. } => return,
        };
        if self.sent.contains_key(&key) {
            return;
        }
        // A link that has ended is seen in the loop; until then nothing more is sent over it.
        if outbox.send(message).is_ok() {
            self.sent.insert(key, wait.map(|wait| Instant::now() + wait));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.sent.values().flatten().min().copied()
    }

    async fn lost(&mut self, reason: String) -> Result<(), DriveError> {
        if let Some(held) = &mut self.held {
            held.outbox = None;
        }
        self.append(vec![Body::RunnerLost { reason }]).await
    }

    async fn waited(&mut self) -> Result<(), DriveError> {
        match self.wait.take() {
            Some((_, _, then)) => self.append(then).await,
            None => Ok(()),
        }
    }

    async fn model_ended(
        &mut self,
        step: StepId,
        target: Target,
        outcome: ModelOutcome,
    ) -> Result<(), DriveError> {
        let bodies = match outcome {
            Ok(answer) => self.session.answered(step, facts::answer(answer, target)),
            Err(e) => self.session.failed(step, facts::failure(e, target), facts::jitter_permille()),
        };
        self.append(bodies).await
    }

    async fn take(&mut self, mail: Option<RunnerToServer>) -> Result<(), DriveError> {
        match mail {
            Some(message) => self.take_message(message).await,
            // Another driver took the route: it has claimed the session or the home, and the next append or
            // claim says so.
            None => {
                self.held = None;
                self.append(vec![Body::RunnerLost { reason: "another driver took the home".into() }]).await
            }
        }
    }

    async fn take_message(&mut self, message: RunnerToServer) -> Result<(), DriveError> {
        use RunnerToServer as M;
        let token = self.held.as_ref().map(|h| h.token);
        match message {
            M::HomeReady { token: of, sandbox, generation, source, set_aside, gaps, elapsed_ms, .. } => {
                if Some(of) != token || self.session.sandbox() == Some(sandbox) {
                    return Ok(());
                }
                let put_back = facts::is_put_back(source);
                let source = facts::source_name(source).to_owned();
                let ready = HomeReadyFacts {
                    sandbox,
                    generation,
                    source,
                    put_back,
                    set_aside,
                    gap_count: gaps.count,
                    gap_reason: gaps.first.first().map_or_else(String::new, |gap| gap.reason.clone()),
                    gap_paths: gaps.first.into_iter().map(|gap| gap.path).collect(),
                    elapsed_ms,
                };
                self.append(self.session.home_ready(ready)).await
            }
            M::HomeFailed { token: of, fault, detail, .. } => {
                if Some(of) != token || self.session.sandbox().is_some() {
                    return Ok(());
                }
                self.append(self.session.home_failed(fault, detail, facts::jitter_permille())).await
            }
            M::ToolStarted { step, .. } => {
                if let Some(deadline) = self.sent.get_mut(&Sent::Query(step)) {
                    *deadline = Some(Instant::now() + TOOL_WAIT_MAX);
                }
                Ok(())
            }
            M::ToolOutput { step, text, .. } => {
                self.context.live.show(self.id, Delta::Output { step, text });
                Ok(())
            }
            M::ToolDone { step, result, .. } => {
                let (content, is_error) = facts::result_blocks(result);
                let bodies = self.session.tool_done(step, content, is_error);
                // Also for a result that is known already: its acknowledgement was lost.
                self.sent.remove(&Sent::Acknowledge(step));
                let known = !bodies.iter().any(|b| matches!(b, Body::ToolResult { .. }));
                self.append(bodies).await?;
                if known {
                    self.send_wish(&Effect::AcknowledgeTool { step });
                }
                Ok(())
            }
            M::ToolLost { step, loss, reason, .. } => {
                let bodies = match loss {
                    ToolLoss::NeverStarted => self.session.tool_never_started(step, reason),
                    ToolLoss::Interrupted => self.session.tool_interrupted(step, &reason),
                };
                self.append(bodies).await
            }
            M::Publish { token, base, root, kind, step, files, bytes, epoch, .. } => {
                let offer = Publish { token, base, root, kind, step, files, bytes: bytes.0, epoch };
                self.publish(offer).await
            }
            M::SecureFailed { fault, detail, .. } => self.note_secure_failed(fault, detail).await,
            M::SandboxChanged { sandbox, state, reason, .. } => {
                let gone = match state {
                    SandboxState::Stopping
                    | SandboxState::Securing
                    | SandboxState::Gone
                    | SandboxState::Lost => true,
                    SandboxState::Requested
                    | SandboxState::Materializing
                    | SandboxState::Starting
                    | SandboxState::Ready
                    | SandboxState::Working
                    | SandboxState::Parked => false,
                };
                if !gone || self.session.sandbox() != Some(sandbox) {
                    return Ok(());
                }
                self.append(vec![Body::SandboxLost { sandbox, reason }]).await
            }
            // The link answers these itself.
            M::Hello { .. } | M::Heartbeat => Ok(()),
        }
    }

    async fn publish(&mut self, offer: Publish) -> Result<(), DriveError> {
        let Some(outbox) = self.held.as_ref().and_then(|h| h.outbox.clone()) else { return Ok(()) };
        // The runner offers it again; the work of the session does not depend on it.
        if let Err(e) = crate::link::publish(&self.context.links, &outbox, self.home, offer).await {
            tracing::warn!(session = %self.id, error = %e, "could not publish");
        }
        Ok(())
    }

    async fn note_secure_failed(&mut self, fault: Fault, detail: String) -> Result<(), DriveError> {
        self.context.db.mark_home_unsecured(self.org, self.home, &detail).await?;
        self.append(vec![Body::HomeSecureFailed { fault, detail }]).await
    }
}

fn is_wished(wishes: &[Effect], sent: Sent) -> bool {
    wishes.iter().any(|wish| match (wish, sent) {
        (Effect::WakeHome, Sent::Wake) => true,
        (Effect::DispatchTool { step, .. }, Sent::Dispatch(of))
        | (Effect::QueryTool { step, .. }, Sent::Query(of)) => *step == of,
        _ => false,
    })
}

enum Heard {
    Mail(Option<RunnerToServer>),
    LinkEnded,
}

async fn listen(held: &mut Option<Held>) -> Heard {
    let Some(Held { mail, outbox, .. }) = held else { return std::future::pending().await };
    tokio::select! {
        // The mail first: what the runner said before the link ended still counts.
        biased;
        message = mail.recv() => Heard::Mail(message),
        () = ended(outbox.as_ref()) => Heard::LinkEnded,
    }
}

async fn ended(outbox: Option<&Outbox>) {
    match outbox {
        Some(outbox) => outbox.ended().await,
        None => std::future::pending().await,
    }
}

async fn finish(model: &mut Option<Running>) -> (StepId, Target, ModelOutcome) {
    match model {
        Some(running) => {
            let outcome = running.call.as_mut().await;
            let (step, target) = (running.step, std::mem::take(&mut running.target));
            *model = None;
            (step, target, outcome)
        }
        None => std::future::pending().await,
    }
}
