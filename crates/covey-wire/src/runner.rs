//! The runner link: server and runner. The runner dials; one long link carries everything but blocks.
//!
//! Order: [`RunnerToServer::Hello`], [`ServerToRunner::Welcome`] or [`ServerToRunner::Refused`]; then any.
//! Messages of one home are in order. After a reconnect nothing is assumed delivered: the server asks again
//! (`WakeHome`, `QueryTool`), the runner repeats `ToolDone` and `Publish` that were not answered.

use covey_types::{
    ByteCount, Fault, FencingToken, Generation, HomeId, OrgId, RootHash, RunnerId, SandboxId, SandboxState,
    SessionId, SnapshotKind, StepId,
};
use serde::{Deserialize, Serialize};

use crate::tool::{ToolCall, ToolResult};

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Limits of one sandbox. Zero means "no limit of ours".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxLimits {
    /// Memory of all its processes.
    pub memory: ByteCount,
    /// Processes and threads.
    pub pids: u32,
    /// Processor time, in percent of one core.
    pub cpu_percent: u32,
}

impl Default for SandboxLimits {
    fn default() -> Self {
        Self { memory: ByteCount(4 << 30), pids: 2048, cpu_percent: 0 }
    }
}

/// Where the home of a sandbox that is ready came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HomeSource {
    /// The sandbox was alive and stayed so.
    Adopted,
    /// The working copy on this host, at least as new as the published generation.
    Kept,
    /// Put back from the published generation; whatever came after it is not there.
    Materialized,
    /// The agent has no snapshot yet: an empty directory.
    Empty,
}

/// How a call was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolLoss {
    /// Proven never to have started: it may be dispatched again.
    NeverStarted,
    /// It started, or may have: it is never started again (I4).
    Interrupted,
}

/// Server's answer to a publish.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum PublishOutcome {
    /// The root is the home's current snapshot with this number (also when it already was).
    Published {
        /// The number.
        generation: Generation,
    },
    /// The token is old or the base is not current; the runner must not publish on.
    Refused {
        /// For the log.
        reason: String,
    },
    /// Since version 2: the home may not be so large. The working copy stays, and is offered again later: something
    /// may have been deleted from it, or the limit raised.
    OverQuota {
        /// For people: which limit, and by how much.
        reason: String,
    },
    /// Since version 2: a garbage collection has passed since the secure began and may have deleted what it relied
    /// on. The runner secures again.
    Collected {
        /// The least epoch that is taken.
        floor: u64,
    },
}

/// From the server to the runner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ServerToRunner {
    /// Answer to `Hello`.
    Welcome {
        /// The version both speak.
        version: u32,
        /// This runner's identity.
        runner: RunnerId,
        /// How often each side sends `Heartbeat`; three missed beats end the link.
        heartbeat_ms: u32,
    },
    /// Answer to `Hello`; the link closes.
    Refused {
        /// What to do about it.
        reason: String,
    },
    /// Make the home's sandbox ready. Answered by `HomeReady` or `HomeFailed`; idempotent.
    WakeHome {
        /// Owner of the home.
        org: OrgId,
        /// The home.
        home: HomeId,
        /// The session that acts on it.
        session: SessionId,
        /// The home lease's token.
        token: FencingToken,
        /// The home's current snapshot.
        generation: Generation,
        /// Its root; none for generation 0.
        root: Option<RootHash>,
        /// Limits of the sandbox.
        limits: SandboxLimits,
    },
    /// Run a call. Answered by `ToolStarted` then `ToolDone`, or by `ToolLost`.
    RunTool {
        /// The home.
        home: HomeId,
        /// The home lease's token.
        token: FencingToken,
        /// The sandbox that the dispatch was recorded for; another one refuses with `NeverStarted`.
        sandbox: SandboxId,
        /// The call.
        call: ToolCall,
    },
    /// What of this step? Answered by `ToolDone`, `ToolStarted` (it runs, and `ToolDone` follows) or
    /// `ToolLost`.
    QueryTool {
        /// The home.
        home: HomeId,
        /// The home lease's token.
        token: FencingToken,
        /// The sandbox that the dispatch was recorded for.
        sandbox: SandboxId,
        /// The step.
        step: StepId,
    },
    /// Kill the call; `ToolDone` follows.
    InterruptTool {
        /// The home.
        home: HomeId,
        /// The step.
        step: StepId,
    },
    /// The result is in the journal.
    AcknowledgeTool {
        /// The home.
        home: HomeId,
        /// The step.
        step: StepId,
    },
    /// Secure the home now, although no step has just ended. Answered by `Publish` or `SecureFailed`.
    SecureHome {
        /// The home.
        home: HomeId,
        /// The home lease's token.
        token: FencingToken,
    },
    /// Answer to `Publish`.
    PublishAnswer {
        /// The home.
        home: HomeId,
        /// The root that was offered.
        root: RootHash,
        /// What became of it.
        outcome: PublishOutcome,
    },
    /// End the sandbox: stop, secure, publish. Answered by `SandboxChanged` until `Gone`.
    StopSandbox {
        /// The home.
        home: HomeId,
        /// The home lease's token.
        token: FencingToken,
    },
    /// Since version 3: these homes were deleted, with every snapshot. The runner ends their sandboxes and removes all
    /// that it has of them; it answers nothing. Sent when it happens, and again after each handshake.
    ForgetHomes {
        /// At most [`FORGOTTEN_HOMES_MAX`].
        homes: Vec<HomeId>,
    },
    /// Since version 4: the servers that share their database, so that the runner has a link to each of them. Sent after
    /// the handshake and whenever it changes, by servers that share; the last one counts, over whichever link it came.
    Servers {
        /// The URL of the server that says so, as it stands in `all`.
        own: String,
        /// URLs under which runners reach them, at most [`SERVERS_MAX`].
        all: Vec<String>,
    },
    /// Still here.
    Heartbeat,
}

/// What a request to `GET /v1/covey/runners/link` upgrades to: from then on the connection carries frames.
pub const RUNNER_LINK_PROTOCOL: &str = "covey-runner-link";

/// Servers that one [`ServerToRunner::Servers`] names.
pub const SERVERS_MAX: usize = 256;

/// Homes that one [`ServerToRunner::ForgetHomes`] names.
pub const FORGOTTEN_HOMES_MAX: usize = 1000;

/// Names of a home that are not there although its state has them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeGaps {
    /// How many.
    pub count: u64,
    /// The first of them, at most [`GAPS_NAMED_MAX`].
    pub first: Vec<HomeGap>,
}

/// See [`HomeGaps`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeGap {
    /// From the home's root, lossily as text; a directory stands for everything in it.
    pub path: String,
    /// For people.
    pub reason: String,
}

/// Gaps that one message names; the count goes on.
pub const GAPS_NAMED_MAX: usize = 100;

impl HomeGaps {
    /// Whether everything is there.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// A home that a runner still holds when it dials in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomePresence {
    /// The home.
    pub home: HomeId,
    /// Generation of the working copy's mark.
    pub generation: Generation,
    /// The sandbox that lives, if any.
    pub sandbox: Option<SandboxId>,
}

/// From the runner to the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RunnerToServer {
    /// First message.
    Hello {
        /// Versions of the runner link the runner speaks: oldest, newest.
        versions: (u32, u32),
        /// Shown to people; the host name by default.
        name: String,
        /// The runner's registration token; absent on the in-process link.
        credential: Option<String>,
        /// What it holds.
        homes: Vec<HomePresence>,
    },
    /// Answer to `WakeHome`.
    HomeReady {
        /// The home.
        home: HomeId,
        /// The token asked with.
        token: FencingToken,
        /// The sandbox.
        sandbox: SandboxId,
        /// The published generation that the working copy descends from.
        generation: Generation,
        /// Where its files came from.
        source: HomeSource,
        /// A working copy that was in the way and was moved aside instead of overwritten: where it is.
        set_aside: Option<String>,
        /// What of the published state could not be put back, because the store has lost it.
        #[serde(default, skip_serializing_if = "HomeGaps::is_empty")]
        gaps: HomeGaps,
        /// Time from request to ready.
        elapsed_ms: u64,
    },
    /// Answer to `WakeHome`.
    HomeFailed {
        /// The home.
        home: HomeId,
        /// The token asked with.
        token: FencingToken,
        /// What to do about it.
        fault: Fault,
        /// For people: what failed, on what, what to do next.
        detail: String,
    },
    /// The call runs.
    ToolStarted {
        /// The home.
        home: HomeId,
        /// The step.
        step: StepId,
    },
    /// Live output, for display only.
    ToolOutput {
        /// The home.
        home: HomeId,
        /// The step.
        step: StepId,
        /// Valid UTF-8.
        text: String,
    },
    /// The call ended.
    ToolDone {
        /// The home.
        home: HomeId,
        /// The sandbox it ran in.
        sandbox: SandboxId,
        /// The step.
        step: StepId,
        /// The result.
        result: ToolResult,
    },
    /// The call has no result.
    ToolLost {
        /// The home.
        home: HomeId,
        /// The step.
        step: StepId,
        /// Whether it may be dispatched again.
        loss: ToolLoss,
        /// For people and the model.
        reason: String,
    },
    /// Every block and directory object of `root` is durable: make it the home's current snapshot.
    Publish {
        /// The home.
        home: HomeId,
        /// The home lease's token.
        token: FencingToken,
        /// The generation it descends from; must be the current one.
        base: Generation,
        /// The state.
        root: RootHash,
        /// How still the home was.
        kind: SnapshotKind,
        /// The last step that had finished when it was taken.
        step: Option<StepId>,
        /// Files in the home.
        files: u64,
        /// Their bytes.
        bytes: ByteCount,
        /// Bytes that the store grew by.
        stored_bytes_new: ByteCount,
        /// Duration of the secure.
        elapsed_ms: u64,
        /// Since version 2: the garbage collection that the store knew of when the secure began to upload.
        #[serde(default, skip_serializing_if = "is_zero")]
        epoch: u64,
    },
    /// A secure failed; work goes on, the home is unsecured since.
    SecureFailed {
        /// The home.
        home: HomeId,
        /// What to do about it.
        fault: Fault,
        /// For people.
        detail: String,
    },
    /// The sandbox changed its state.
    SandboxChanged {
        /// The home.
        home: HomeId,
        /// The sandbox.
        sandbox: SandboxId,
        /// The new state.
        state: SandboxState,
        /// Why, for people.
        reason: String,
    },
    /// Still here.
    Heartbeat,
}
