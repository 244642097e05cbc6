//! Stage 0: a plain, single-threaded host process that clones stage 1 and maps its ids.
//!
//! What stays true: it lives for a millisecond, does nothing a runner could not do, and stage 1 goes on only
//! after the runner has recorded the pid reported here. What does not belong here: anything inside the sandbox.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use covey_wire::setup::{SetupPlace, SetupReport, SetupSpec};
use rustix::fs::{Mode, OFlags};

use crate::setup::{SetupError, SetupLink, Tried};
use crate::stage1;
use crate::sys::{self, Side};

/// Inside, the agent is always this uid and gid.
pub(crate) const AGENT_ID: u32 = 1000;

/// Runs stage 0, and in the cloned process stage 1, which never returns.
pub(crate) fn run() -> Result<(), SetupError> {
    let link = SetupLink::from_stdin()?;
    let (spec, listener) = link.receive()?;
    match clone(&spec) {
        Ok(Side::Child) => stage1::run(spec, listener, link),
        Ok(Side::Parent(pid)) => match map_ids(&spec, pid) {
            Ok(()) => link.report(&SetupReport::Cloned { pid }),
            // The cloned process waits on the link and ends when the runner closes it.
            Err(error) => link.report_failure(&error),
        },
        Err(error) => link.report_failure(&error),
    }
}

fn clone(spec: &SetupSpec) -> Result<Side, SetupError> {
    sys::seal_descriptors().tried(SetupPlace::Other, "mark descriptors close-on-exec")?;
    let cgroup: Option<OwnedFd> = match &spec.cgroup2 {
        Some(dir) => {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let fd = rustix::fs::open(dir, flags, Mode::empty());
            Some(fd.tried(SetupPlace::Cgroup, format!("open {}", dir.display()))?)
        }
        None => None,
    };
    let attempt = "make user, mount, pid, network, ipc and uts namespaces";
    match sys::clone_isolated(cgroup.as_ref().map(AsFd::as_fd)) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            if let Some(dir) = &spec.cgroup2 {
                fs::write(dir.join("cgroup.procs"), "0")
                    .tried(SetupPlace::Cgroup, format!("join {}", dir.display()))?;
            }
            sys::clone_isolated_v1().tried(SetupPlace::Clone, attempt)
        }
        outcome => outcome.tried(SetupPlace::Clone, attempt),
    }
}

fn map_ids(spec: &SetupSpec, pid: i32) -> Result<(), SetupError> {
    let write = |file: &str, text: String| -> Result<(), SetupError> {
        fs::write(format!("/proc/{pid}/{file}"), &text)
            .tried(SetupPlace::IdMap, format!("write {file} `{text}`"))
    };
    if !spec.is_privileged {
        // Without privilege the kernel takes a gid map only once groups can no longer be dropped.
        match fs::write(format!("/proc/{pid}/setgroups"), "deny") {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).tried(SetupPlace::IdMap, "write setgroups");
            }
            _ => {}
        }
    }
    write("uid_map", format!("{AGENT_ID} {} 1", spec.host_uid))?;
    write("gid_map", format!("{AGENT_ID} {} 1", spec.host_gid))
}
