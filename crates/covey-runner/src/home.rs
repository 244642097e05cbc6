//! One actor per home: the only place that touches a home's working copy and sandbox on this host.
//!
//! Everything that happens to a home (a message from the server, a message from the daemon, the end of a
//! process or of a secure, a deadline) is one [`HomeEvent`] in its queue; the actor takes them one by one.
//! Results and offered snapshots are kept until the server has answered them, so a lost link loses nothing.

mod calls;
mod forget;
mod secures;
mod wake;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use covey_types::{FencingToken, Generation, HomeId, OrgId, SandboxEvent, SandboxId, SandboxState, StepId};
use covey_wire::runner::{RunnerToServer, SandboxLimits, ServerToRunner};
use covey_wire::tool::{RunnerToSandbox, ToolCall, ToolResult};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout_at};

use crate::Runner;
use crate::link::{LinkId, Links, blocking};
use crate::mark::{HomeDir, Mark};
use crate::sandbox::{AdoptError, Sandbox};
use crate::tool_link::{ToolEvent, ToolLink};
use secures::{SecureEnd, Securing};

/// Events of one home that may wait.
const QUEUE_MAX: usize = 256;
/// How long processes get between SIGTERM and SIGKILL when a sandbox is stopped.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Something that happens to a home.
#[derive(Debug)]
pub(crate) enum HomeEvent {
    /// From a server, over this link.
    Server(LinkId, ServerToRunner),
    /// A link to a server is up: repeat what was not answered.
    LinkUp(LinkId, mpsc::Sender<RunnerToServer>),
    /// It is down.
    LinkDown(LinkId),
    /// From the daemon of this sandbox.
    Tool(SandboxId, ToolEvent),
    /// The sandbox's first process ended; how.
    SandboxGone(SandboxId, String),
    /// A secure ended.
    Secured(SecureEnd),
    /// The home was deleted, with every snapshot.
    Deleted,
    /// The runner ends in good order.
    RunnerEnds,
}

/// How the link reaches a home.
#[derive(Debug)]
pub(crate) struct HomeHandle {
    queue: mpsc::Sender<HomeEvent>,
    /// The sandbox that was adopted at start.
    pub(crate) adopted: Option<SandboxId>,
    /// Generation of the working copy's mark at start.
    pub(crate) generation: Generation,
}

impl HomeHandle {
    /// Queues an event; waits when the home is busy with many.
    pub(crate) async fn tell(&self, event: HomeEvent) {
        if self.queue.send(event).await.is_err() {
            tracing::error!("a home's actor has ended; its next wake starts a new one");
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.queue.is_closed()
    }
}

/// The right to act on the home, as the server last gave it.
#[derive(Debug, Clone, Copy)]
struct Lease {
    org: OrgId,
    token: FencingToken,
    limits: SandboxLimits,
}

/// The home's living sandbox.
#[derive(Debug)]
struct Live {
    sandbox: Arc<dyn Sandbox>,
    state: SandboxState,
    /// The open tool link and the token it was opened with; none between the adoption of a frozen one and its
    /// first wake.
    link: Option<(FencingToken, ToolLink)>,
    frozen: bool,
    /// The last call asked not to be frozen.
    keep_running: bool,
    /// When SIGKILL follows a stop.
    kill_at: Option<Instant>,
}

#[derive(Debug)]
struct Home {
    runner: Arc<Runner>,
    home: HomeId,
    dir: HomeDir,
    queue: mpsc::Sender<HomeEvent>,
    /// The servers that can be reached.
    links: Links,
    /// The link of the server that gave the newest lease: it drives the session, and hears what happens.
    holder: Option<LinkId>,
    /// While a message is handled: whose it is. What answers an outdated server must not go to the one that drives.
    asker: Option<LinkId>,
    lease: Option<Lease>,
    mark: Option<Mark>,
    live: Option<Live>,
    /// Calls handed to the daemon that have no result.
    running: BTreeSet<StepId>,
    /// Questions to the daemon that have no answer: it must not be frozen until they have.
    asked: BTreeSet<StepId>,
    /// Calls that wait for a secure which must not be dropped again.
    waiting: Vec<ToolCall>,
    /// Results that the server has not acknowledged.
    results: BTreeMap<StepId, (SandboxId, ToolResult)>,
    securing: Option<Securing>,
    /// The task of the last dropped secure, which may still read.
    last_task: Option<JoinHandle<()>>,
    /// A sandbox that was stopped on purpose and whose home is being secured for the last time.
    ended: Option<SandboxId>,
    /// Attempts so far, and how many of the last were dropped for a call.
    attempt: u64,
    dropped_in_a_row: u32,
    /// Offers in a row that a collection made worthless.
    collected_in_a_row: u32,
    /// A `Publish` that was not answered.
    offered: Option<RunnerToServer>,
    /// A secure was due while an offer was unanswered.
    secure_after_answer: bool,
    /// When a secure that failed is tried again although nothing happens, and the pause before that.
    secure_again: Option<(Instant, Duration)>,
    /// Last time anything ran.
    active_at: Instant,
    link_down_since: Option<Instant>,
}

/// Starts the actor of one home.
pub(crate) fn spawn(
    tasks: &mut JoinSet<HomeId>,
    runner: Arc<Runner>,
    home: HomeId,
    adopted: Option<Arc<dyn Sandbox>>,
    links: Links,
) -> HomeHandle {
    let (queue, events) = mpsc::channel(QUEUE_MAX);
    let dir = runner.home_dir(home);
    let mark = dir.read_mark().unwrap_or_else(|error| {
        tracing::warn!(%home, %error, "cannot read the mark; the copy is not trusted");
        None
    });
    let handle = HomeHandle {
        queue: queue.clone(),
        adopted: adopted.as_ref().map(|s| s.id()),
        generation: mark.as_ref().map_or(Generation(0), |m| m.generation),
    };
    let mut state = Home {
        runner,
        home,
        dir,
        queue,
        link_down_since: links.is_empty().then(Instant::now),
        links,
        holder: None,
        asker: None,
        lease: None,
        mark,
        live: None,
        running: BTreeSet::new(),
        asked: BTreeSet::new(),
        waiting: Vec::new(),
        results: BTreeMap::new(),
        securing: None,
        last_task: None,
        ended: None,
        attempt: 0,
        dropped_in_a_row: 0,
        collected_in_a_row: 0,
        offered: None,
        secure_after_answer: false,
        secure_again: None,
        active_at: Instant::now(),
    };
    if let Some(sandbox) = adopted {
        state.take_up(sandbox, SandboxState::Parked, true);
    }
    tasks.spawn(async move {
        state.serve(events).await;
        home
    });
    handle
}

impl Home {
    async fn serve(&mut self, mut events: mpsc::Receiver<HomeEvent>) {
        self.greet_adopted().await;
        loop {
            let event = match self.deadline() {
                Some(at) => timeout_at(at, events.recv()).await,
                None => Ok(events.recv().await),
            };
            match event {
                Ok(Some(HomeEvent::RunnerEnds)) => return self.leave().await,
                Ok(Some(event)) => self.take(event).await,
                Ok(None) => return,
                Err(_) => self.deadline_passed().await,
            }
        }
    }

    async fn take(&mut self, event: HomeEvent) {
        match event {
            HomeEvent::Server(link, message) => {
                self.asker = Some(link);
                self.take_from_server(link, message).await;
                self.asker = None;
            }
            HomeEvent::LinkUp(link, outgoing) => {
                self.links.insert(link, outgoing);
                self.link_down_since = None;
                // While the server that drives is there, nobody else has to be told.
                if self.holder.is_none_or(|holder| !self.links.contains_key(&holder)) {
                    self.repeat_unanswered().await;
                }
            }
            HomeEvent::LinkDown(link) => {
                self.links.remove(&link);
                if self.links.is_empty() {
                    self.link_down_since = Some(Instant::now());
                } else if self.holder == Some(link) {
                    // Any server can take a snapshot, and tell whether a result is known.
                    self.repeat_unanswered().await;
                }
            }
            HomeEvent::Tool(sandbox, event) => self.take_from_daemon(sandbox, event).await,
            HomeEvent::SandboxGone(sandbox, reason) => self.sandbox_gone(sandbox, reason).await,
            HomeEvent::Secured(end) => self.secured(end).await,
            HomeEvent::Deleted => self.forget().await,
            HomeEvent::RunnerEnds => {}
        }
    }

    async fn take_from_server(&mut self, link: LinkId, message: ServerToRunner) {
        // What only a driver sends. Others secure and stop a home under the same token.
        if let ServerToRunner::WakeHome { token, .. }
        | ServerToRunner::RunTool { token, .. }
        | ServerToRunner::QueryTool { token, .. } = &message
            && self.newest_token().is_none_or(|seen| *token >= seen)
        {
            self.holder = Some(link);
        }
        match message {
            ServerToRunner::WakeHome { org, token, generation, root, limits, .. } => {
                self.wake(Lease { org, token, limits }, generation, root).await;
            }
            ServerToRunner::RunTool { token, sandbox, call, .. } => self.run_tool(token, sandbox, call).await,
            ServerToRunner::QueryTool { token, sandbox, step, .. } => {
                self.query_tool(token, sandbox, step).await
            }
            ServerToRunner::InterruptTool { step, .. } => self.interrupt_tool(step).await,
            ServerToRunner::AcknowledgeTool { step, .. } => self.acknowledge_tool(step),
            ServerToRunner::SecureHome { token, .. } => self.secure_on_demand(token).await,
            ServerToRunner::PublishAnswer { root, outcome, .. } => self.publish_answered(root, outcome).await,
            ServerToRunner::StopSandbox { token, .. } => {
                if self.lease.is_some_and(|lease| token >= lease.token) {
                    self.stop("the server asked for it").await;
                }
            }
            ServerToRunner::Welcome { .. }
            | ServerToRunner::Refused { .. }
            | ServerToRunner::ForgetHomes { .. }
            | ServerToRunner::Servers { .. }
            | ServerToRunner::Heartbeat => {}
        }
    }

    /// The highest token that was seen for this home, by this runner or one before it on this data directory.
    fn newest_token(&self) -> Option<FencingToken> {
        self.lease.map(|lease| lease.token).max(self.mark.as_ref().map(|mark| mark.token))
    }

    /// Where something is told: to who asked, else to who drives, else to anybody.
    fn listener(&self) -> Option<&mpsc::Sender<RunnerToServer>> {
        let named = [self.asker, self.holder].into_iter().flatten().find_map(|link| self.links.get(&link));
        named.or_else(|| self.links.values().next_back())
    }

    /// Sends to a server; what is lost with a broken link is repeated or asked for again.
    async fn send(&self, message: RunnerToServer) {
        if let Some(outgoing) = self.listener()
            && outgoing.send(message).await.is_err()
        {
            tracing::debug!(home = %self.home, "the link went down; the message is repeated when it is up");
        }
    }

    async fn repeat_unanswered(&mut self) {
        for (step, (sandbox, result)) in &self.results {
            let message = RunnerToServer::ToolDone {
                home: self.home,
                sandbox: *sandbox,
                step: *step,
                result: result.clone(),
            };
            self.send(message).await;
        }
        if let Some(offered) = self.offered.clone() {
            self.send(offered).await;
        }
    }

    /// Makes a started or adopted sandbox the home's, and watches for its end.
    fn take_up(&mut self, sandbox: Arc<dyn Sandbox>, state: SandboxState, frozen: bool) {
        let (watched, queue) = (Arc::clone(&sandbox), self.queue.clone());
        // A plain thread: it waits for as long as the sandbox lives, and must not hold up the runtime's end.
        std::thread::spawn(move || {
            let reason = watched.wait_gone();
            if queue.blocking_send(HomeEvent::SandboxGone(watched.id(), reason)).is_err() {
                tracing::debug!("the runner is shutting down");
            }
        });
        self.live = Some(Live { sandbox, state, link: None, frozen, keep_running: false, kill_at: None });
    }

    /// Opens the tool link of an adopted sandbox whose daemon runs: without one it would end itself after the
    /// orphan term, and the server may not wake its home for longer than that. A frozen one waits for its wake.
    async fn greet_adopted(&mut self) {
        let (Some(live), Some(mark)) = (&self.live, &self.mark) else { return };
        let (sandbox, token) = (Arc::clone(&live.sandbox), mark.token);
        let frozen = blocking(move || sandbox.is_daemon_frozen()).await.and_then(|told| told);
        let greeted = match frozen {
            Ok(true) => return,
            Ok(false) => self.open_link(token).await,
            Err(error) => Err(AdoptError::Unresponsive(error.to_string())),
        };
        if let Err(error) = greeted {
            tracing::warn!(home = %self.home, %error, "an adopted sandbox does not answer yet; its next wake decides");
        }
        if self.set_parked(false)
            && let Err(error) = self.freeze().await
        {
            tracing::warn!(home = %self.home, %error, "an adopted sandbox does not freeze again");
        }
    }

    /// The runner ends in good order and may never come back: a frozen sandbox would keep its memory for ever. It
    /// is thawed, so that its daemon ends it after the orphan term; a runner that comes back earlier freezes it again.
    async fn leave(&mut self) {
        self.drop_secure();
        if self.live.as_ref().is_none_or(|live| !live.frozen) {
            return;
        }
        if self.running.is_empty() && self.asked.is_empty() {
            self.set_parked(true);
        }
        if let Err(error) = self.thaw().await {
            tracing::warn!(home = %self.home, %error, "a sandbox that is left behind does not thaw");
        }
    }

    /// Records in the mark whether the sandbox is only thawed because its runner ended; tells what stood there.
    fn set_parked(&mut self, parked: bool) -> bool {
        let Some(mark) = self.mark.as_mut().filter(|mark| mark.parked != parked) else { return parked };
        mark.parked = parked;
        if let Err(error) = self.dir.write_mark(mark) {
            tracing::warn!(home = %self.home, %error, "cannot write the mark");
        }
        !parked
    }

    /// Applies one event to the sandbox's machine and tells the server about the new state.
    async fn sandbox_event(&mut self, event: SandboxEvent, reason: &str) {
        let Some(live) = &mut self.live else { return };
        let sandbox = live.sandbox.id();
        match live.state.apply(event) {
            Ok(state) if state == live.state => {}
            Ok(state) => {
                live.state = state;
                self.report_state(sandbox, state, reason).await;
            }
            Err(error) => tracing::error!(home = %self.home, %error, "sandbox machine"),
        }
    }

    async fn report_state(&self, sandbox: SandboxId, state: SandboxState, reason: &str) {
        let reason = reason.to_owned();
        self.send(RunnerToServer::SandboxChanged { home: self.home, sandbox, state, reason }).await;
    }

    async fn freeze(&mut self) -> std::io::Result<()> {
        let Some(live) = &mut self.live else { return Ok(()) };
        if live.frozen {
            return Ok(());
        }
        let sandbox = Arc::clone(&live.sandbox);
        blocking(move || sandbox.freeze()).await??;
        live.frozen = true;
        Ok(())
    }

    async fn thaw(&mut self) -> std::io::Result<()> {
        let Some(live) = &mut self.live else { return Ok(()) };
        if !live.frozen {
            return Ok(());
        }
        let sandbox = Arc::clone(&live.sandbox);
        blocking(move || sandbox.thaw()).await??;
        live.frozen = false;
        Ok(())
    }

    async fn destroy(&mut self) {
        let Some(live) = &self.live else { return };
        let sandbox = Arc::clone(&live.sandbox);
        let destroyed = blocking(move || sandbox.destroy()).await.and_then(|ended| ended);
        if let Err(error) = destroyed {
            tracing::error!(home = %self.home, %error, "cannot end every process of the sandbox");
        }
    }

    /// Begins to end the sandbox: politely, then by force, then a last secure.
    async fn stop(&mut self, reason: &str) {
        if self.live.as_ref().is_none_or(|live| live.kill_at.is_some()) {
            return;
        }
        self.drop_secure();
        self.sandbox_event(SandboxEvent::StopDecided, reason).await;
        let thawed = self.thaw().await;
        let asked = match (&thawed, &self.live) {
            (Ok(()), Some(Live { link: Some((_, link)), .. })) => {
                link.send(RunnerToSandbox::Shutdown { grace_ms: STOP_GRACE.as_millis() as u32 })
            }
            _ => false,
        };
        if asked {
            if let Some(live) = &mut self.live {
                live.kill_at = Some(Instant::now() + STOP_GRACE * 2);
            }
        } else {
            self.destroy().await;
        }
    }

    /// The next moment at which something must happen although nobody asks.
    fn deadline(&self) -> Option<Instant> {
        let again = self.secure_again.map(|(at, _)| at);
        let Some(live) = &self.live else { return again };
        if let Some(kill_at) = live.kill_at {
            return Some(kill_at);
        }
        let orphaned = self.link_down_since.map(|since| since + self.runner.config.orphan_term);
        let idle = self.running.is_empty().then(|| self.active_at + self.runner.config.warm_limit);
        orphaned.into_iter().chain(idle).chain(again).min()
    }

    async fn deadline_passed(&mut self) {
        let now = Instant::now();
        if self.secure_again.is_some_and(|(at, _)| now >= at) {
            return self.secure_once_more().await;
        }
        let Some(live) = &mut self.live else { return };
        if let Some(kill_at) = &mut live.kill_at {
            *kill_at = now + STOP_GRACE;
            self.destroy().await;
        } else if self.link_down_since.is_some_and(|since| now >= since + self.runner.config.orphan_term) {
            // I14: nobody renews the lease, so nothing may run. The copy and its mark stay.
            self.stop("no server for longer than the lease's term").await;
        } else {
            self.stop("idle for longer than the warm limit").await;
        }
    }

    /// The sandbox's first process ended, expected or not.
    async fn sandbox_gone(&mut self, sandbox: SandboxId, reason: String) {
        let Some(live) = self.live.take_if(|live| live.sandbox.id() == sandbox) else { return };
        let wanted = live.kill_at.is_some() || live.state == SandboxState::Stopping;
        self.drop_secure();
        // Also when it ended by itself: cgroup, socket and record are still there.
        let ended = Arc::clone(&live.sandbox);
        if let Err(error) = blocking(move || ended.destroy()).await.and_then(|done| done) {
            tracing::warn!(home = %self.home, %error, "cannot clean up after the sandbox");
        }
        drop(live);
        self.lose_calls(&reason).await;
        if wanted {
            self.report_state(sandbox, SandboxState::Securing, &reason).await;
            self.ended = Some(sandbox);
        } else {
            tracing::warn!(home = %self.home, %sandbox, reason, "the sandbox died");
            self.report_state(sandbox, SandboxState::Lost, &reason).await;
        }
        // The working copy is what the agent goes on with, partial effects included: its own generation.
        self.begin_secure().await;
        if self.securing.is_none() && !self.secure_after_answer && self.ended.take().is_some() {
            self.report_state(sandbox, SandboxState::Gone, "nothing could be secured").await;
        }
    }
}
