//! Tool calls: handed to the daemon once, results kept until the server has them.

use covey_types::{FencingToken, SandboxEvent, SandboxId, StepId};
use covey_wire::runner::{RunnerToServer, ToolLoss};
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, StepReport, ToolCall, ToolResult};
use tokio::time::Instant;

use super::Home;
use crate::tool_link::ToolEvent;

/// Unacknowledged results of one home. A daemon that invents more is cut off.
const RESULTS_MAX: usize = 4096;

impl Home {
    pub(super) async fn run_tool(&mut self, token: FencingToken, sandbox: SandboxId, call: ToolCall) {
        if let Some(done) = self.results.get(&call.step) {
            let (sandbox, result) = done.clone();
            return self.send_done(sandbox, call.step, result).await;
        }
        if self.running.contains(&call.step) || self.waiting.iter().any(|c| c.step == call.step) {
            return self.send(RunnerToServer::ToolStarted { home: self.home, step: call.step }).await;
        }
        if self.lease.is_none_or(|lease| token < lease.token) {
            return self.lose(call.step, ToolLoss::NeverStarted, "the call came under an older lease").await;
        }
        if self.live.as_ref().is_none_or(|live| live.sandbox.id() != sandbox || live.kill_at.is_some()) {
            return self
                .lose(call.step, ToolLoss::NeverStarted, "the sandbox it was meant for is gone")
                .await;
        }
        if self.must_wait_for_secure() {
            self.waiting.push(call);
            return;
        }
        self.drop_secure();
        self.hand_over(call).await;
    }

    /// Gives calls that waited for a secure to the daemon.
    pub(super) async fn hand_over_waiting(&mut self) {
        for call in std::mem::take(&mut self.waiting) {
            self.hand_over(call).await;
        }
    }

    async fn hand_over(&mut self, call: ToolCall) {
        let step = call.step;
        if let Err(error) = self.thaw().await {
            let reason = format!("the sandbox does not thaw: {error}");
            return self.lose(step, ToolLoss::NeverStarted, &reason).await;
        }
        let handed = match self.live.as_ref().and_then(|live| live.link.as_ref()) {
            Some((_, link)) => link.send(RunnerToSandbox::Call(call)),
            None => false,
        };
        if !handed {
            return self.lose(step, ToolLoss::NeverStarted, "the sandbox takes no calls").await;
        }
        self.active_at = Instant::now();
        self.running.insert(step);
        self.sandbox_event(SandboxEvent::StepBegan, "a call began").await;
    }

    pub(super) async fn query_tool(&mut self, token: FencingToken, sandbox: SandboxId, step: StepId) {
        if let Some((sandbox, result)) = self.results.get(&step).cloned() {
            return self.send_done(sandbox, step, result).await;
        }
        if self.running.contains(&step) || self.waiting.iter().any(|c| c.step == step) {
            return self.send(RunnerToServer::ToolStarted { home: self.home, step }).await;
        }
        let same =
            self.live.as_ref().is_some_and(|live| live.sandbox.id() == sandbox && live.kill_at.is_none());
        if !same {
            return self.lose(step, ToolLoss::Interrupted, "the sandbox it was started in is gone").await;
        }
        if let Err(error) = self.open_link(token).await {
            let reason = format!("the sandbox it was started in does not answer: {error}");
            return self.lose(step, ToolLoss::Interrupted, &reason).await;
        }
        // The daemon repeats kept results on a new link, and the first of them may have begun a secure: frozen, it
        // would never answer.
        self.drop_secure();
        if let Err(error) = self.thaw().await {
            let reason = format!("the sandbox it was started in does not thaw: {error}");
            return self.lose(step, ToolLoss::Interrupted, &reason).await;
        }
        let asked = self
            .live
            .as_ref()
            .and_then(|live| live.link.as_ref())
            .is_some_and(|(_, link)| link.send(RunnerToSandbox::Query { step }));
        if asked {
            self.asked.insert(step);
        } else {
            self.lose(step, ToolLoss::Interrupted, "the sandbox it was started in does not answer").await;
        }
    }

    pub(super) async fn interrupt_tool(&mut self, step: StepId) {
        if let Some(at) = self.waiting.iter().position(|call| call.step == step) {
            self.waiting.remove(at);
            return self.lose(step, ToolLoss::NeverStarted, "it was interrupted before it began").await;
        }
        if let Some((_, link)) = self.live.as_ref().and_then(|live| live.link.as_ref()) {
            link.send(RunnerToSandbox::Interrupt { step });
        }
    }

    pub(super) fn acknowledge_tool(&mut self, step: StepId) {
        self.results.remove(&step);
        if let Some((_, link)) = self.live.as_ref().and_then(|live| live.link.as_ref()) {
            link.send(RunnerToSandbox::Acknowledge { step });
        }
    }

    pub(super) async fn take_from_daemon(&mut self, sandbox: SandboxId, event: ToolEvent) {
        // A message of an earlier sandbox may still be in the queue.
        if self.live.as_ref().is_none_or(|live| live.sandbox.id() != sandbox) {
            return;
        }
        match event {
            ToolEvent::Message(message) => self.take_message(sandbox, message).await,
            ToolEvent::Closed(reason) => self.link_closed(reason).await,
        }
    }

    async fn take_message(&mut self, sandbox: SandboxId, message: SandboxToRunner) {
        match message {
            SandboxToRunner::Accepted { step } => {
                if self.running.contains(&step) {
                    self.send(RunnerToServer::ToolStarted { home: self.home, step }).await;
                }
            }
            SandboxToRunner::Output { step, text } => {
                // Display only: dropped rather than waited for.
                if let Some(outgoing) = self.listener()
                    && outgoing.try_send(RunnerToServer::ToolOutput { home: self.home, step, text }).is_err()
                {
                    tracing::trace!(home = %self.home, "live output dropped");
                }
            }
            SandboxToRunner::Done { step, result } => self.finish(sandbox, step, result).await,
            SandboxToRunner::Report { step, report } => self.take_report(sandbox, step, report).await,
            SandboxToRunner::Hello { .. }
            | SandboxToRunner::Refused { .. }
            | SandboxToRunner::Frozen
            | SandboxToRunner::Thawed
            | SandboxToRunner::Pong { .. } => {}
        }
    }

    async fn take_report(&mut self, sandbox: SandboxId, step: StepId, report: StepReport) {
        self.asked.remove(&step);
        let loss = match report {
            StepReport::Running => {
                self.active_at = Instant::now();
                self.running.insert(step);
                self.sandbox_event(SandboxEvent::StepBegan, "a running call was reattached").await;
                return self.send(RunnerToServer::ToolStarted { home: self.home, step }).await;
            }
            StepReport::Done { result } => return self.finish(sandbox, step, result).await,
            StepReport::Unknown => (ToolLoss::NeverStarted, "the sandbox never saw it"),
            StepReport::Acknowledged => (ToolLoss::Interrupted, "its result was taken before and is dropped"),
        };
        self.running.remove(&step);
        self.lose(step, loss.0, loss.1).await;
        self.begin_secure().await;
    }

    async fn finish(&mut self, sandbox: SandboxId, step: StepId, result: ToolResult) {
        if self.results.len() >= RESULTS_MAX && !self.results.contains_key(&step) {
            tracing::error!(home = %self.home, %sandbox, "more results than calls; the sandbox is ended");
            return self.destroy().await;
        }
        let was_running = self.running.remove(&step);
        self.asked.remove(&step);
        self.active_at = Instant::now();
        if let Some(live) = &mut self.live {
            live.keep_running = result.keep_running;
        }
        if let Some(mark) = &mut self.mark {
            mark.step = Some(step);
        }
        self.results.insert(step, (sandbox, result.clone()));
        self.send_done(sandbox, step, result).await;
        if self.running.is_empty() {
            if was_running {
                self.sandbox_event(SandboxEvent::StepEnded, "the call ended").await;
            }
            self.begin_secure().await;
        }
    }

    /// The link broke although the sandbox lives: once more, then it counts as dead.
    async fn link_closed(&mut self, reason: String) {
        tracing::warn!(home = %self.home, reason, "the tool link closed");
        if let Some(live) = &mut self.live {
            live.link = None;
        }
        let Some(lease) = self.lease else { return };
        let reopened = self.open_link(lease.token).await;
        let running: Vec<StepId> = self.running.iter().copied().collect();
        match (reopened, self.live.as_ref().and_then(|live| live.link.as_ref())) {
            (Ok(()), Some((_, link))) => {
                for step in running {
                    link.send(RunnerToSandbox::Query { step });
                }
            }
            _ => self.destroy().await,
        }
    }

    /// Every call of a sandbox that died: those that the daemon got may have had effects.
    pub(super) async fn lose_calls(&mut self, reason: &str) {
        for call in std::mem::take(&mut self.waiting) {
            self.lose(call.step, ToolLoss::NeverStarted, reason).await;
        }
        let asked = std::mem::take(&mut self.asked);
        for step in std::mem::take(&mut self.running).union(&asked) {
            self.lose(*step, ToolLoss::Interrupted, reason).await;
        }
    }

    async fn lose(&self, step: StepId, loss: ToolLoss, reason: &str) {
        let reason = reason.to_owned();
        self.send(RunnerToServer::ToolLost { home: self.home, step, loss, reason }).await;
    }

    async fn send_done(&self, sandbox: SandboxId, step: StepId, result: ToolResult) {
        self.send(RunnerToServer::ToolDone { home: self.home, sandbox, step, result }).await;
    }
}
