//! The setup link: how a runner tells stage 0 of its own embedded `sandboxd` what to build.
//!
//! One `SOCK_SEQPACKET` pair, one JSON object per packet. Both ends come from the same build, so nothing here is
//! versioned. Order: [`SetupSpec`] with the listening control socket attached, [`SetupReport::Cloned`], [`GO`],
//! [`SERVE`], [`SetupReport::Ready`]; [`SetupReport::Failed`] may stand for either report and ends it. Until `GO` the new
//! process has done nothing, and the end of the link ends it: a runner killed at any point leaves no sandbox
//! that it has not recorded.
//! What does not belong here: anything said after the sandbox is ready (see [`crate::tool`]).

use std::path::PathBuf;

use covey_types::SandboxId;
use serde::{Deserialize, Serialize};

use crate::runner::SandboxLimits;

/// The packet that lets the cloned process go on, sent once its pid is recorded.
pub const GO: &[u8] = b"go";
/// The packet that lets the isolated process start others, sent once its limits hold. Joining cgroups takes the kernel
/// milliseconds, in which the process builds its root.
pub const SERVE: &[u8] = b"serve";
/// No packet on the setup link is longer.
pub const PACKET_BYTES_MAX: usize = 64 * 1024;

/// What stage 0 builds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SetupSpec {
    /// Its identity, repeated in the tool link's handshake.
    pub sandbox: SandboxId,
    /// Absolute host path, mounted at `/home/agent`.
    pub home_dir: PathBuf,
    /// Absolute host path, mounted at `/outputs`.
    pub outputs_dir: PathBuf,
    /// What the inside's uid 1000 is on the host.
    pub host_uid: u32,
    /// What the inside's gid 1000 is on the host.
    pub host_gid: u32,
    /// Whether the runner may map ids that are not its own.
    pub is_privileged: bool,
    /// Limits that the daemon sets with `setrlimit` where no cgroup holds them.
    pub limits: SandboxLimits,
    /// Whether a cgroup limits the number of processes.
    pub pids_in_cgroup: bool,
    /// Whether a cgroup limits memory.
    pub memory_in_cgroup: bool,
    /// Directory in a cgroup2 file system to be born into.
    pub cgroup2: Option<PathBuf>,
    /// After this long without a runner the daemon ends itself, in milliseconds of its own running time.
    pub orphan_term_ms: u64,
}

/// The part of the setup that failed; decides which remedy the operator is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SetupPlace {
    /// Making the namespaces.
    Clone,
    /// Writing the id maps.
    IdMap,
    /// Joining a cgroup.
    Cgroup,
    /// Mounting and pivoting.
    Mount,
    /// Mounting a fresh `/proc`.
    Proc,
    /// Reaching the working copy.
    Home,
    /// Dropping privileges, seccomp, Landlock, limits.
    Confine,
    /// Anything else.
    Other,
}

/// What stage 0 or stage 1 reports.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub enum SetupReport {
    /// The process exists, its ids are mapped, it waits for [`GO`].
    Cloned {
        /// Its pid on the host.
        pid: i32,
    },
    /// The isolation stands; the daemon accepts.
    Ready {
        /// The Landlock ABI that is enforced; 0 where the kernel has none.
        landlock_abi: i32,
    },
    /// It does not stand, and never will: the process has ended or is about to.
    Failed {
        /// Which part.
        place: SetupPlace,
        /// What was tried, with the system's error.
        what: String,
        /// The system's error number, 0 where there is none.
        errno: i32,
    },
}
