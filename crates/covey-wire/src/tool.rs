//! The tool link: runner and `sandboxd`, over a unix socket. The runner connects; the daemon never dials.
//!
//! Order on a fresh connection: [`RunnerToSandbox::Hello`], [`SandboxToRunner::Hello`]; then any. At most one
//! connection is live: a newer one with the same or a higher fencing token closes the older (I5).
//!
//! A connection may instead begin with `Freeze`, `Thaw` or `Ping`: that one message is answered and the
//! connection closed. It carries no token and leaves the live connection alone, so that whoever may reach
//! the socket can stop and continue the sandbox, as it could with a cgroup.

use covey_types::{FencingToken, SandboxId, StepId};
use serde::{Deserialize, Serialize};

/// One tool call. `input` is the model's JSON object as text; its shape belongs to the tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Idempotency key: the daemon runs each step id once, ever (I4).
    pub step: StepId,
    /// `bash`, `read`, `write`, `edit`, `glob` or `grep`.
    pub name: String,
    /// JSON object.
    pub input: String,
}

/// A piece of what the model gets to see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToolContent {
    /// Valid UTF-8 without NUL, already cut to the limits.
    Text {
        /// The text.
        text: String,
    },
    /// A picture that `read` opened.
    Image {
        /// `image/png`, `image/jpeg`, `image/gif` or `image/webp`.
        media_type: String,
        /// The file's bytes.
        #[serde(with = "serde_bytes")]
        data: Vec<u8>,
    },
}

/// What a finished call gave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolResult {
    /// For the model, in order.
    pub content: Vec<ToolContent>,
    /// Whether the model shall see it as a failure.
    pub is_error: bool,
    /// Exit status of a `bash` command; 128 + signal when it was killed.
    #[serde(default)]
    pub exit_code: Option<i32>,
    /// Where the full output can be read inside the sandbox, when it was cut.
    #[serde(default)]
    pub output_path: Option<String>,
    /// Bytes the command wrote, before cutting.
    #[serde(default)]
    pub output_bytes: u64,
    /// From start to result, by the daemon's monotonic clock.
    #[serde(default)]
    pub elapsed_ms: u64,
    /// Whether processes of the call were still alive when it ended.
    #[serde(default)]
    pub left_running: bool,
    /// Whether the call asked that the sandbox is not frozen after it.
    #[serde(default)]
    pub keep_running: bool,
}

impl ToolResult {
    /// A result that is one text.
    pub fn text(text: impl Into<String>, is_error: bool) -> Self {
        Self {
            content: vec![ToolContent::Text { text: text.into() }],
            is_error,
            exit_code: None,
            output_path: None,
            output_bytes: 0,
            elapsed_ms: 0,
            left_running: false,
            keep_running: false,
        }
    }
}

/// What the daemon knows of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum StepReport {
    /// It never arrived; it may be started.
    Unknown,
    /// It runs; its result will be sent as [`SandboxToRunner::Done`].
    Running,
    /// It ended; the result is kept until acknowledged.
    Done {
        /// The result.
        result: ToolResult,
    },
    /// It ended and the result was acknowledged and dropped.
    Acknowledged,
}

/// From the runner to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RunnerToSandbox {
    /// First message. Answered by `Hello` or `Refused`.
    Hello {
        /// Versions of the tool link the runner speaks: oldest, newest.
        versions: (u32, u32),
        /// The home lease's token; a smaller one than the daemon has seen is refused.
        token: FencingToken,
    },
    /// Run this once. Answered by `Accepted`, later `Done`. A step id seen before is not run: answered by
    /// `Report`.
    Call(ToolCall),
    /// What of this step? Answered by `Report`; when it runs, `Done` follows on this connection.
    Query {
        /// The step.
        step: StepId,
    },
    /// Kill the call's processes; it ends with an error result, sent as `Done`. Unknown steps are ignored.
    Interrupt {
        /// The step.
        step: StepId,
    },
    /// The result is durable elsewhere: the daemon may drop it. Not answered.
    Acknowledge {
        /// The step.
        step: StepId,
    },
    /// Stop every process but the daemon (for hosts without a freezer). Answered by `Frozen`.
    Freeze,
    /// Continue them. Answered by `Thawed`.
    Thaw,
    /// Answered by `Pong` with the same number.
    Ping {
        /// Any number.
        nonce: u64,
    },
    /// End every process, politely first, then the daemon itself. Not answered: the link closes.
    Shutdown {
        /// Time between SIGTERM and SIGKILL, in milliseconds.
        grace_ms: u32,
    },
}

/// From the daemon to the runner. Hostile input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SandboxToRunner {
    /// Answer to `Hello`.
    Hello {
        /// The version both speak.
        version: u32,
        /// Which sandbox this is.
        sandbox: SandboxId,
    },
    /// Answer to `Hello`: the token is too small or the versions do not meet. The link closes.
    Refused {
        /// For the log.
        reason: String,
    },
    /// The call's start is recorded; it runs or waits for the shell.
    Accepted {
        /// The step.
        step: StepId,
    },
    /// Live output of a running call, for display only: cut, lossy, never a result.
    Output {
        /// The step.
        step: StepId,
        /// Valid UTF-8.
        text: String,
    },
    /// The call ended. Repeated on each new connection until acknowledged.
    Done {
        /// The step.
        step: StepId,
        /// The result.
        result: ToolResult,
    },
    /// Answer to `Query`, or to `Call` of a step id seen before.
    Report {
        /// The step.
        step: StepId,
        /// What is known.
        report: StepReport,
    },
    /// Answer to `Freeze`.
    Frozen,
    /// Answer to `Thaw`.
    Thawed,
    /// Answer to `Ping`.
    Pong {
        /// The number asked with.
        nonce: u64,
    },
}
