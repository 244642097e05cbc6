//! Sandboxes: one trait, the `native` backend on Linux primitives, and a fake with state for tests.
//!
//! Every method blocks; callers on an async runtime use a blocking thread. A backend never falls back to less
//! isolation than it promises: it fails and says what to change.

mod cgroup;
pub mod fake;
mod image;
pub mod native;
pub mod probe;
mod record;
mod remedy;
mod setup;

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use covey_types::{FencingToken, HomeId, SandboxId};
use covey_wire::runner::SandboxLimits;

/// What a sandbox is made from.
#[derive(Debug, Clone)]
pub struct SandboxSpec {
    /// Its identity; a fresh one each time.
    pub sandbox: SandboxId,
    /// Whose home it is.
    pub home: HomeId,
    /// The working copy, mounted at `/home/agent`.
    pub home_dir: PathBuf,
    /// Full outputs of calls, mounted at `/outputs`; beside the working copy, not part of the home.
    pub outputs_dir: PathBuf,
    /// Where this host keeps the records and control sockets of its sandboxes (one directory each).
    pub run_dir: PathBuf,
    /// Uid and gid on the host that the inside's 1000 maps to. As an ordinary user: the own ones.
    pub host_uid: u32,
    /// See `host_uid`.
    pub host_gid: u32,
    /// Limits, applied where the host's cgroups allow.
    pub limits: SandboxLimits,
    /// The daemon ends itself (and so the sandbox) after this long without a runner (I14).
    pub orphan_term: Duration,
}

/// Why a sandbox does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The host does not allow what isolation needs; `remedy` says what to change.
    #[error("isolation cannot be had: {what}; {remedy}")]
    Isolation {
        /// What was refused, with the system's error.
        what: String,
        /// What the operator can do.
        remedy: String,
    },
    /// Anything else.
    #[error("the sandbox did not start: {0}")]
    Failed(String),
}

/// Why a recorded sandbox cannot be taken up again.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// Proven: its first process is gone.
    #[error("the sandbox is gone")]
    Gone,
    /// It lives but does not answer in time, or refuses our token.
    #[error("the sandbox does not answer: {0}")]
    Unresponsive(String),
}

/// One living (or just ended) sandbox.
pub trait Sandbox: Send + Sync + std::fmt::Debug {
    /// Its identity.
    fn id(&self) -> SandboxId;
    /// Opens the tool link and does the handshake; thaws nothing.
    ///
    /// # Errors
    /// When it is gone, frozen for longer than the deadline, or refuses the token.
    fn connect(&self, token: FencingToken) -> Result<UnixStream, AdoptError>;
    /// Stops every process of the sandbox at once; returns when all have stopped (I12).
    ///
    /// # Errors
    /// When the sandbox is gone or its processes did not stop within the deadline.
    fn freeze(&self) -> std::io::Result<()>;
    /// Lets them go on.
    ///
    /// # Errors
    /// When the sandbox is gone.
    fn thaw(&self) -> std::io::Result<()>;
    /// Whether its daemon is stopped too and so cannot answer. Where only the daemon can stop the others, it
    /// never is.
    ///
    /// # Errors
    /// When that cannot be told.
    fn is_daemon_frozen(&self) -> std::io::Result<bool>;
    /// Whether its first process still exists.
    fn is_alive(&self) -> bool;
    /// Blocks until its first process is gone; says how it ended where that can be known.
    fn wait_gone(&self) -> String;
    /// Kills every process, also frozen ones, and removes cgroups, sockets and the record. Idempotent.
    ///
    /// # Errors
    /// When processes are left after the deadline.
    fn destroy(&self) -> std::io::Result<()>;
}

/// A way to isolate.
pub trait SandboxBackend: Send + Sync + std::fmt::Debug {
    /// Starts a sandbox; returns after a real round trip with its daemon.
    ///
    /// # Errors
    /// When isolation cannot be had or anything else fails; nothing is left behind then.
    fn start(&self, spec: &SandboxSpec) -> Result<Arc<dyn Sandbox>, StartError>;
    /// Sandboxes recorded in `run_dir`, living or dead, by home.
    ///
    /// # Errors
    /// When the directory cannot be read.
    fn recorded(&self, run_dir: &std::path::Path) -> std::io::Result<Vec<(HomeId, Arc<dyn Sandbox>)>>;
}
