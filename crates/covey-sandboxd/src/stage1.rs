//! Stage 1: pid 1 inside. Builds the isolation in its only possible order, then becomes the daemon.
//!
//! What stays true: single-threaded until everything is confined, so that no thread escapes a per-thread
//! setting; nothing is served before. What does not belong here: the single steps (see [`crate::isolate`]).

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process;

use covey_wire::setup::{GO, SERVE, SetupPlace, SetupSpec};
use rustix::fs::{Mode, OFlags};

use crate::daemon;
use crate::isolate::{confine, filter, root};
use crate::setup::{SetupError, SetupLink, Tried};

/// Never returns; the process's end is the sandbox's end.
pub(crate) fn run(spec: SetupSpec, listener: OwnedFd, link: SetupLink) -> ! {
    // Without the runner's word nobody has recorded this process: end, so that nothing unrecorded lives.
    if link.wait_for(GO).is_err() {
        process::exit(1);
    }
    match isolate(&spec) {
        Ok(landlock_abi) => {
            // No process is started before the limits hold.
            if link.wait_for(SERVE).and_then(|()| leave_standard_streams()).is_err() {
                process::exit(1);
            }
            daemon::serve(&spec, UnixListener::from(listener), link, landlock_abi)
        }
        Err(error) => {
            // The exit code is the only word left if the link is gone as well.
            process::exit(if link.report_failure(&error).is_ok() { 1 } else { 2 })
        }
    }
}

fn isolate(spec: &SetupSpec) -> Result<i32, SetupError> {
    rustix::process::setsid().tried(SetupPlace::Other, "start a session")?;
    rustix::process::umask(Mode::empty());
    root::build(spec)?;
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
    confine::apply_limits(spec)?;
    confine::drop_privileges()?;
    // Landlock before seccomp: the filter refuses nothing of Landlock, but its order then never matters.
    let landlock_abi = confine::apply_landlock()?;
    filter::apply()?;
    Ok(landlock_abi)
}

/// Standard input was the setup link; all three streams become the sandbox's own `/dev/null`.
fn leave_standard_streams() -> Result<(), SetupError> {
    let place = SetupPlace::Other;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .tried(place, "open /dev/null")?;
    rustix::stdio::dup2_stdin(null.as_fd()).tried(place, "replace standard input")?;
    rustix::stdio::dup2_stdout(null.as_fd()).tried(place, "replace standard output")?;
    rustix::stdio::dup2_stderr(null.as_fd()).tried(place, "replace standard error")
}
