//! The processes of this sandbox, from its own `/proc`: which belong to a call, and how to end them.
//!
//! A call's processes are those that began after it did, do not carry another call's mark in their environment, and do not
//! descend from a process that was there before. That also finds the ones that left the session, the group or
//! their parent. What does not belong here: the shell itself (see [`crate::shell`]).

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::sys;

/// The variable by which a call marks what it starts.
pub(crate) const STEP_VARIABLE: &str = "COVEY_STEP";
/// Between SIGTERM and SIGKILL of a call that is ended early.
const TERM_GRACE: Duration = Duration::from_millis(300);
/// For killing: what forks faster than this is left to the sandbox's end.
const KILL_DEADLINE: Duration = Duration::from_secs(5);
/// For stopping every process.
const STOP_DEADLINE: Duration = Duration::from_secs(5);
/// Between two looks at `/proc`.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// The same while stopping, which takes microseconds.
const STOP_LOOK_INTERVAL: Duration = Duration::from_micros(200);
/// Parents looked up for one process; longer chains do not happen without a loop in a torn reading.
const ANCESTORS_MAX: usize = 4096;

/// One line of `/proc/*/stat`, as far as it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pid: i32,
    parent: i32,
    state: u8,
    /// In clock ticks since boot; with the pid it names a process for good.
    start: u64,
}

impl Process {
    fn read(pid: i32) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may contain anything, the last closing one ends it.
        let end = stat.iter().rposition(|b| *b == b')')?;
        let text = std::str::from_utf8(stat.get(end + 2..)?).ok()?;
        let mut fields = text.split(' ');
        let state = *fields.next()?.as_bytes().first()?;
        let parent = fields.next()?.parse().ok()?;
        // Field 22 of the line; 3 and 4 are taken.
        let start = fields.nth(17)?.parse().ok()?;
        Some(Self { pid, parent, state, start })
    }

    fn is_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }

    fn is_stopped(&self) -> bool {
        matches!(self.state, b'T' | b't') || self.is_dead()
    }

    fn signal(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.pid) else { return };
        match rustix::process::kill_process(pid, signal) {
            // It may end by itself at any time; every caller looks again.
            Ok(()) | Err(_) => {}
        }
    }

    fn mark(&self) -> Option<Vec<u8>> {
        let environment = fs::read(format!("/proc/{}/environ", self.pid)).ok()?;
        let mark = environment.split(|b| *b == 0).find_map(|variable| {
            variable.strip_prefix(STEP_VARIABLE.as_bytes()).and_then(|rest| rest.strip_prefix(b"="))
        });
        mark.map(<[u8]>::to_vec)
    }
}

/// Every process but this one.
fn all() -> io::Result<Vec<Process>> {
    let mut processes = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if pid != 1 {
            processes.extend(Process::read(pid));
        }
    }
    Ok(processes)
}

/// The processes at one moment.
#[derive(Debug)]
pub(crate) struct Before(HashSet<(i32, u64)>);

impl Before {
    /// Looks at them now.
    pub(crate) fn now() -> io::Result<Self> {
        Ok(Self(all()?.into_iter().map(|p| (p.pid, p.start)).collect()))
    }
}

/// A running call, as far as its processes go.
#[derive(Debug)]
pub(crate) struct CallProcesses<'a> {
    /// Who was there before, the shell among them.
    pub(crate) before: &'a Before,
    /// The call's mark.
    pub(crate) step: &'a str,
    /// The shell's pid.
    pub(crate) shell: i32,
}

impl CallProcesses<'_> {
    /// The call's living processes, without the shell.
    pub(crate) fn living(&self) -> io::Result<Vec<Process>> {
        let processes = all()?;
        let by_pid: HashMap<i32, Process> = processes.iter().map(|p| (p.pid, *p)).collect();
        let belongs = |process: &&Process| {
            !process.is_dead()
                && process.pid != self.shell
                && !self.before.0.contains(&(process.pid, process.start))
                // A subshell shows the environment that the shell itself was started with: no mark.
                && process.mark().is_none_or(|mark| mark == self.step.as_bytes())
                && !self.has_older_ancestor(process, &by_pid)
        };
        Ok(processes.iter().filter(belongs).copied().collect())
    }

    fn has_older_ancestor(&self, process: &Process, by_pid: &HashMap<i32, Process>) -> bool {
        let mut parent = process.parent;
        for _ in 0..ANCESTORS_MAX {
            if parent <= 1 || parent == self.shell {
                return false;
            }
            let Some(ancestor) = by_pid.get(&parent) else { return false };
            if self.before.0.contains(&(ancestor.pid, ancestor.start)) {
                return true;
            }
            parent = ancestor.parent;
        }
        false
    }

    /// Ends them: politely, then not. Returns when none is left, or at the deadline.
    pub(crate) fn end(&self) -> io::Result<()> {
        let started = Instant::now();
        for process in self.living()? {
            process.signal(Signal::TERM);
            process.signal(Signal::CONT);
        }
        while started.elapsed() < TERM_GRACE {
            if self.living()?.is_empty() {
                return Ok(());
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        // Killed in rounds: a process may fork between the look and the signal.
        while started.elapsed() < KILL_DEADLINE {
            let living = self.living()?;
            if living.is_empty() {
                return Ok(());
            }
            living.iter().for_each(|process| process.signal(Signal::KILL));
            std::thread::sleep(LOOK_INTERVAL);
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "processes of the call do not end"))
    }
}

/// Stops every process and waits until all have.
pub(crate) fn stop_all() -> io::Result<()> {
    let started = Instant::now();
    loop {
        // Again in each round: a process that was sending SIGCONT when the signal came may have woken others before it
        // stopped itself. Once it has stopped, it wakes nobody.
        sys::signal_all(libc::SIGSTOP)?;
        if all()?.iter().all(Process::is_stopped) {
            return Ok(());
        }
        if started.elapsed() > STOP_DEADLINE {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "processes do not stop"));
        }
        std::thread::sleep(STOP_LOOK_INTERVAL);
    }
}

/// Waits until no process is left, at most `limit`; says whether that is so.
pub(crate) fn wait_all_gone(limit: Duration) -> io::Result<bool> {
    let started = Instant::now();
    loop {
        if all()?.iter().all(Process::is_dead) {
            return Ok(true);
        }
        if started.elapsed() > limit {
            return Ok(false);
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_reads_its_own_line() {
        let pid = std::process::id() as i32;
        let process = Process::read(pid).expect("own stat");
        assert_eq!(process.pid, pid);
        assert!(process.start > 0);
        assert!(!process.is_dead());
    }
}
