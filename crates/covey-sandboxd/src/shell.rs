//! The persistent shell: one bash that keeps its directory, variables and jobs from call to call.
//!
//! What stays true: one call at a time, in order of arrival; a call ends by the shell's own word on a private FIFO or by the
//! shell's end, never by the end of an output pipe. When the shell must be replaced, the next one starts in the same
//! directory with the exported variables of the last finished call, and the result says so.
//! What does not belong here: one call's life (see `call`), output that outlives its call (see `leftover`).

mod call;
mod leftover;

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use covey_types::StepId;
use covey_wire::tool::ToolResult;
use rustix::event::EventfdFlags;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::process::{Pid, Signal, WaitIdOptions, WaitOptions};
use serde::Deserialize;

use crate::daemon::Daemon;
use leftover::Leftovers;

/// Longest command: it is fed to the shell through a pipe that the shell reads byte by byte.
const COMMAND_BYTES_MAX: usize = 256 * 1024;
/// Calls that wait for the shell.
const QUEUE_MAX: usize = 256;
/// Where the shell and the daemon meet: FIFOs and the saved variables. Only the agent's uid reaches it.
const MEETING_DIR: &str = "/run/covey";
const STATUS_FIFO: &str = "/run/covey/status";
const SAVED_VARIABLES: &str = "/run/covey/env";
const BASH: &str = "/bin/bash";
const HOME: &str = "/home/agent";
/// Nothing here may wait for a person: no pager, no editor, no prompt.
const ENVIRONMENT: [(&str, &str); 15] = [
    ("HOME", HOME),
    ("USER", "agent"),
    ("LOGNAME", "agent"),
    ("SHELL", BASH),
    (
        "PATH",
        "/home/agent/.local/bin:/home/agent/.cargo/bin:/home/agent/bin:\
         /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ),
    ("LANG", "C.UTF-8"),
    ("TERM", "dumb"),
    ("PAGER", "cat"),
    ("GIT_PAGER", "cat"),
    ("MANPAGER", "cat"),
    ("SYSTEMD_PAGER", "cat"),
    ("GIT_EDITOR", "true"),
    ("GIT_TERMINAL_PROMPT", "0"),
    ("DEBIAN_FRONTEND", "noninteractive"),
    ("NO_COLOR", "1"),
];

/// The input of `bash`.
#[derive(Debug, Deserialize)]
struct BashInput {
    #[serde(default)]
    command: Option<String>,
    #[serde(default)]
    restart: bool,
    #[serde(default)]
    timeout_ms: Option<u64>,
    #[serde(default)]
    keep_running: bool,
}

#[derive(Debug)]
struct Job {
    step: StepId,
    input: BashInput,
    interrupt: Arc<AtomicBool>,
}

/// How the shell's process ended.
#[derive(Debug, Clone, Copy)]
struct ShellEnd {
    pid: i32,
    /// As a shell would say it: 128 + signal when it was killed.
    code: i32,
}

/// A living shell.
#[derive(Debug)]
struct Running {
    pid: i32,
    stdin: ChildStdin,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Shell {
    queue: Mutex<VecDeque<Job>>,
    arrived: Condvar,
    /// Wakes the running call: an interrupt, or the shell's end.
    wake: OwnedFd,
    ended: Mutex<Option<ShellEnd>>,
    /// The living shell's pid; 0 without one. Also held while one is started, so that the reaper waits.
    pid: Mutex<i32>,
    has_children: Condvar,
    dir: Mutex<PathBuf>,
    leftovers: Leftovers,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shell {
    /// Prepares the meeting place; starts nothing.
    pub(crate) fn new() -> io::Result<Self> {
        make_fifo(Path::new(STATUS_FIFO))?;
        Ok(Self {
            queue: Mutex::default(),
            arrived: Condvar::new(),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            ended: Mutex::new(None),
            pid: Mutex::new(0),
            has_children: Condvar::new(),
            dir: Mutex::new(HOME.into()),
            leftovers: Leftovers::new()?,
        })
    }

    /// Takes a call, or says at once why not.
    pub(crate) fn enqueue(
        &self,
        step: StepId,
        input: &str,
        interrupt: Arc<AtomicBool>,
    ) -> Result<(), ToolResult> {
        let refuse = |text: String| Err(ToolResult::text(text, true));
        let input: BashInput = match serde_json::from_str(input) {
            Ok(input) => input,
            Err(error) => return refuse(format!("invalid input for bash: {error}")),
        };
        match &input.command {
            None if !input.restart => return refuse("bash needs a `command`, or `restart: true`".into()),
            Some(command) if command.len() > COMMAND_BYTES_MAX => {
                return refuse(format!(
                    "the command has {} bytes, at most {COMMAND_BYTES_MAX} are taken; write it to a file and run that",
                    command.len()
                ));
            }
            Some(command) if command.contains('\0') => {
                return refuse("the command contains a NUL byte".into());
            }
            _ => {}
        }
        let mut queue = lock(&self.queue);
        if queue.len() >= QUEUE_MAX {
            return refuse(format!("more than {QUEUE_MAX} bash calls wait; try again"));
        }
        queue.push_back(Job { step, input, interrupt });
        self.arrived.notify_one();
        Ok(())
    }

    /// Makes the running call look at its interrupt flag.
    pub(crate) fn wake(&self) {
        match rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
            // A full counter wakes as well.
            Ok(_) | Err(_) => {}
        }
        self.arrived.notify_one();
    }

    /// The shell's directory now, or the last one known. Relative paths of all tools start here.
    pub(crate) fn current_dir(&self) -> PathBuf {
        let pid = *lock(&self.pid);
        let mut last = lock(&self.dir);
        if pid != 0
            && let Ok(dir) = fs::read_link(format!("/proc/{pid}/cwd"))
        {
            *last = dir;
        }
        last.clone()
    }

    /// Thread: runs the calls.
    pub(crate) fn run_calls(&self, daemon: &Daemon) {
        // Started ahead of the first call, which nearly always comes; if this fails, that call tries again and reports.
        let mut shell = daemon.while_thawed(|| self.start()).ok();
        let mut last_code = 0;
        loop {
            let job = self.next_job(daemon);
            let result = daemon.while_thawed(|| self.reset_if_asked(&job, &mut shell));
            let result = match result {
                Some(result) => result,
                None => call::run(self, daemon, &job, &mut shell, &mut last_code),
            };
            daemon.finish(job.step, result);
        }
    }

    /// The next call; those that were interrupted while they waited are finished on the way.
    fn next_job(&self, daemon: &Daemon) -> Job {
        let mut queue = lock(&self.queue);
        loop {
            match queue.pop_front() {
                Some(job) if job.interrupt.load(Ordering::SeqCst) => {
                    drop(queue);
                    let text = "interrupted before it started; it had no effect";
                    daemon.finish(job.step, ToolResult::text(text, true));
                    queue = lock(&self.queue);
                }
                Some(job) => return job,
                None => queue = self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Handles `restart`; a result means that nothing else was asked.
    fn reset_if_asked(&self, job: &Job, shell: &mut Option<Running>) -> Option<ToolResult> {
        if !job.input.restart {
            return None;
        }
        // Everything goes, background jobs as well: a restart is what one asks for when the state is unclear.
        let ended = crate::sys::signal_all(libc::SIGKILL);
        *shell = None;
        *lock(&self.pid) = 0;
        *lock(&self.dir) = HOME.into();
        match fs::remove_file(SAVED_VARIABLES) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Some(ToolResult::text(
                    format!("the shell's variables could not be reset: {error}"),
                    true,
                ));
            }
            _ => {}
        }
        if let Err(error) = ended {
            return Some(ToolResult::text(format!("the shell could not be restarted: {error}"), true));
        }
        job.input.command.is_none().then(|| {
            ToolResult::text(
                "the shell was restarted: directory, variables and background jobs are gone",
                false,
            )
        })
    }

    /// Starts a shell if none lives.
    fn ensure<'a>(&self, shell: &'a mut Option<Running>) -> io::Result<&'a mut Running> {
        match shell {
            Some(running) => Ok(running),
            None => Ok(shell.insert(self.start()?)),
        }
    }

    fn start(&self) -> io::Result<Running> {
        let dir = lock(&self.dir).clone();
        let start_dir = if dir.is_dir() { dir } else { PathBuf::from(HOME) };
        let mut pid = lock(&self.pid);
        let mut child = Command::new(BASH)
            .args(["--noprofile", "--norc"])
            .env_clear()
            .envs(ENVIRONMENT)
            .env("PWD", &start_dir)
            .current_dir(&start_dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        *pid = child.id() as i32;
        *lock(&self.ended) = None;
        self.has_children.notify_all();
        let stdin = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        rustix::fs::fcntl_setfl(&stdin, OFlags::NONBLOCK)?;
        Ok(Running { pid: *pid, stdin })
    }

    /// Kills the shell itself. The reaper takes note.
    fn kill(&self, shell: &mut Option<Running>) {
        if let Some(running) = shell.take()
            && let Some(pid) = Pid::from_raw(running.pid)
        {
            match rustix::process::kill_process(pid, Signal::KILL) {
                // Already gone is as good.
                Ok(()) | Err(_) => {}
            }
        }
        *lock(&self.pid) = 0;
    }

    /// Thread: reaps every process that ends, as pid 1 must.
    pub(crate) fn reap(&self) {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        loop {
            // Looked at before it is taken: a shell that fails to start is waited for by whoever started it.
            match rustix::process::waitid(rustix::process::WaitId::All, look) {
                Ok(Some(_)) => self.take_ended(),
                Ok(None) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => {
                    // No children at all.
                    let pid = lock(&self.pid);
                    let wait = self.has_children.wait_timeout(pid, Duration::from_millis(500));
                    drop(wait.unwrap_or_else(PoisonError::into_inner));
                }
            }
        }
    }

    fn take_ended(&self) {
        let shell = lock(&self.pid);
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if pid.as_raw_nonzero().get() == *shell {
                let signalled = status.terminating_signal().map(|signal| 128 + signal);
                let code = signalled.or(status.exit_status()).unwrap_or(1);
                *lock(&self.ended) = Some(ShellEnd { pid: *shell, code });
                self.wake();
            }
        }
    }

    /// Thread: drains output of processes that outlived their call.
    pub(crate) fn pump_leftovers(&self) {
        self.leftovers.pump();
    }
}

/// Makes the meeting place as it must be, whatever the agent did to it: it may, but only to itself.
fn restore_meeting_place() -> io::Result<()> {
    let remove = |path: &str| match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        _ => fs::remove_file(path),
    };
    if !fs::symlink_metadata(MEETING_DIR).is_ok_and(|metadata| metadata.is_dir()) {
        remove(MEETING_DIR)?;
        fs::DirBuilder::new().mode(0o700).create(MEETING_DIR)?;
    }
    fs::set_permissions(MEETING_DIR, fs::Permissions::from_mode(0o700))?;
    remove(STATUS_FIFO)?;
    make_fifo(Path::new(STATUS_FIFO))
}

/// The status FIFO, held open for writing as well so that it never ends.
fn open_status() -> io::Result<File> {
    open_fifo(Path::new(STATUS_FIFO), true).or_else(|_| {
        restore_meeting_place()?;
        open_fifo(Path::new(STATUS_FIFO), true)
    })
}

fn make_fifo(path: &Path) -> io::Result<()> {
    Ok(rustix::fs::mknodat(rustix::fs::CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?)
}

/// Opens a FIFO that the agent could have replaced: never blocks, and takes nothing but a FIFO.
fn open_fifo(path: &Path, is_held_open: bool) -> io::Result<File> {
    let file = fs::OpenOptions::new()
        .read(true)
        .write(is_held_open)
        .custom_flags((OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32)
        .open(path)?;
    if !FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_fifo() {
        return Err(io::Error::other("is not the FIFO that was made here"));
    }
    Ok(file)
}
