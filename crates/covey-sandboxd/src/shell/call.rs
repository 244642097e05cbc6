//! The life of one `bash` call: feed, watch, end, report.
//!
//! What stays true: one thread, one poll loop; it never blocks on anything but that poll. Bytes go to the model's
//! head-and-tail and, once they are too many or a process stays, to the full output file.
//! What does not belong here: the order of calls.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use covey_types::StepId;
use covey_wire::tool::{ToolContent, ToolResult};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal};

use super::{
    Job, MEETING_DIR, Running, SAVED_VARIABLES, STATUS_FIFO, Shell, lock, make_fifo, open_fifo, open_status,
};
use crate::daemon::Daemon;
use crate::processes::{Before, CallProcesses, STEP_VARIABLE};
use crate::text::{self, HeadTail};

/// When the call does not say.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(120);
/// Whatever the call says. Longer work belongs into the background.
const TIMEOUT_MAX: Duration = Duration::from_secs(600);
/// After the command's end, for output that is still on its way from processes it left.
const DRAIN_GRACE: Duration = Duration::from_millis(100);
/// Full output of one call, kept in a file; beyond that it is read and dropped, so that the writer never blocks.
pub(super) const OUTPUT_FILE_BYTES_MAX: u64 = 64 << 20;
/// One live message at most this often, with at most this much.
const LIVE_INTERVAL: Duration = Duration::from_millis(100);
const LIVE_BYTES_MAX: usize = 8 * 1024;
const READ_BYTES: usize = 64 * 1024;
/// The status line is a step id and a number.
const STATUS_BYTES_MAX: usize = 4096;

/// How a call ended.
enum End {
    /// The shell said so.
    Completed(i32),
    /// The command ended the shell.
    ShellEnded(i32),
    TimedOut,
    Interrupted,
}

/// The full output, in memory while it is short.
pub(super) struct Output {
    shown: HeadTail,
    path: PathBuf,
    file: Option<File>,
    written: u64,
    failed: Option<String>,
}

impl Output {
    fn new(step: StepId) -> Self {
        Self {
            shown: HeadTail::default(),
            path: PathBuf::from(format!("/outputs/{step}.txt")),
            file: None,
            written: 0,
            failed: None,
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        // The last moment at which memory still holds everything.
        if self.file.is_none()
            && self.failed.is_none()
            && self.shown.total() + bytes.len() as u64 > READ_BYTES as u64
        {
            self.open_file();
        }
        self.shown.push(bytes);
        self.append(bytes);
    }

    /// Starts the file with what memory holds.
    fn open_file(&mut self) {
        if self.file.is_some() || self.failed.is_some() {
            return;
        }
        match fs::OpenOptions::new().write(true).create_new(true).open(&self.path) {
            Ok(file) => {
                self.file = Some(file);
                if let Some(whole) = self.shown.whole() {
                    self.append(&whole);
                }
            }
            Err(error) => self.failed = Some(error.to_string()),
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        let Some(file) = self.file.as_mut() else { return };
        let room = OUTPUT_FILE_BYTES_MAX.saturating_sub(self.written).min(bytes.len() as u64);
        match file.write_all(&bytes[..room as usize]) {
            Ok(()) => self.written += room,
            Err(error) => {
                self.failed = Some(error.to_string());
                self.file = None;
            }
        }
    }

    /// The file and how much it holds, for whoever goes on writing.
    fn into_file(self) -> Option<(File, u64)> {
        self.file.map(|file| (file, self.written))
    }
}

/// Runs one call to its end.
pub(super) fn run(
    shell: &Shell,
    daemon: &Daemon,
    job: &Job,
    running: &mut Option<Running>,
    last_code: &mut i32,
) -> ToolResult {
    let started = Instant::now();
    match attempt(shell, daemon, job, running, last_code, started) {
        Ok(mut result) => {
            result.elapsed_ms = started.elapsed().as_millis() as u64;
            result
        }
        Err(error) => {
            shell.kill(running);
            ToolResult::text(
                format!("the shell cannot be used: {error}; it will be replaced for the next call"),
                true,
            )
        }
    }
}

fn attempt(
    shell: &Shell,
    daemon: &Daemon,
    job: &Job,
    running: &mut Option<Running>,
    last_code: &mut i32,
    started: Instant,
) -> io::Result<ToolResult> {
    let step = job.step.to_string();
    let command = job.input.command.as_deref().unwrap_or_default();
    let timeout = job.input.timeout_ms.map_or(TIMEOUT_DEFAULT, Duration::from_millis).min(TIMEOUT_MAX);

    let mut status = open_status()?;
    let fifo_path = Path::new(MEETING_DIR).join(&step);
    make_fifo(&fifo_path)?;
    let mut fifo = Some(open_fifo(&fifo_path, false)?);

    // The shell may have ended between two calls (`sleep 1; kill $PPID &`); then this call gets a new one.
    forget_if_ended(shell, running);
    let is_fresh = running.is_none();
    let this = daemon.while_thawed(|| shell.ensure(running))?;
    let pid = this.pid;
    let before = Before::now()?;
    let mut input = Vec::new();
    if is_fresh {
        input.extend_from_slice(restore_line(&shell.current_dir()).as_bytes());
    }
    input.extend_from_slice(call_line(&step, command, *last_code).as_bytes());

    let mut output = Output::new(job.step);
    let mut watch = Watch { status_line: Vec::new(), live: Vec::new(), live_sent: started };
    let processes = CallProcesses { before: &before, step: &step, shell: pid };
    let mut buffer = vec![0; READ_BYTES];
    let mut end = None;
    let mut drain_until = None;
    loop {
        let now = Instant::now();
        let deadline = drain_until.unwrap_or(started + timeout);
        if now >= deadline {
            if end.is_some() {
                break;
            }
            stop(shell, running, &processes)?;
            end = Some(End::TimedOut);
            drain_until = Some(Instant::now() + DRAIN_GRACE);
            continue;
        }
        if end.is_some() && fifo.is_none() {
            break;
        }
        let wait = if watch.live.is_empty() { deadline - now } else { (deadline - now).min(LIVE_INTERVAL) };
        let ready =
            wait_ready(shell, running.as_ref().filter(|_| !input.is_empty()), fifo.as_ref(), &status, wait)?;
        if ready.shell_takes_input
            && let Some(this) = running.as_mut()
        {
            feed(this, &mut input)?;
        }
        if ready.has_output
            && let Some(file) = fifo.as_mut()
        {
            match file.read(&mut buffer) {
                Ok(0) => {
                    fifo = None;
                }
                Ok(length) => {
                    output.push(&buffer[..length]);
                    watch.add_live(&buffer[..length]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        watch.show(daemon, job.step);
        if end.is_none() {
            end = watch.read_status(&mut status, &step)?.map(End::Completed);
            if end.is_none() && ready.was_woken {
                if let Some(code) = ended_code(shell, pid) {
                    shell.kill(running);
                    end = Some(End::ShellEnded(code));
                } else if job.interrupt.load(Ordering::SeqCst) {
                    stop(shell, running, &processes)?;
                    end = Some(End::Interrupted);
                }
            }
            if end.is_some() {
                drain_until = Some(Instant::now() + DRAIN_GRACE);
            }
        }
    }
    match fs::remove_file(&fifo_path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let end = end.unwrap_or(End::TimedOut);
    if let End::Completed(code) = end {
        *last_code = code;
        shell.current_dir();
    } else {
        *last_code = 0;
    }
    let left_running = fifo.is_some() || !processes.living()?.is_empty();
    Ok(report(shell, job, timeout, end, output, fifo, left_running))
}

/// What a poll saw.
#[derive(Debug, Default)]
struct Ready {
    shell_takes_input: bool,
    has_output: bool,
    was_woken: bool,
}

fn wait_ready(
    shell: &Shell,
    hungry: Option<&Running>,
    fifo: Option<&File>,
    status: &File,
    wait: Duration,
) -> io::Result<Ready> {
    let mut fds = vec![
        PollFd::from_borrowed_fd(shell.wake.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(status.as_fd(), PollFlags::IN),
    ];
    fds.extend(fifo.map(|file| PollFd::from_borrowed_fd(file.as_fd(), PollFlags::IN)));
    fds.extend(hungry.map(|running| PollFd::from_borrowed_fd(running.stdin.as_fd(), PollFlags::OUT)));
    let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
    match rustix::event::poll(&mut fds, Some(&wait)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let was_woken = !fds[0].revents().is_empty();
    if was_woken {
        let mut counter = [0; 8];
        match rustix::io::read(&shell.wake, &mut counter) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let has_output = fifo.is_some() && !fds[2].revents().is_empty();
    let shell_takes_input = hungry.is_some() && fds.last().is_some_and(|fd| !fd.revents().is_empty());
    Ok(Ready { shell_takes_input, has_output, was_woken })
}

fn feed(running: &mut Running, input: &mut Vec<u8>) -> io::Result<()> {
    match running.stdin.write(input) {
        Ok(length) => {
            input.drain(..length);
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        // The shell is gone; the reaper's word ends the call.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            input.clear();
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// The parts of a call that only its loop sees.
struct Watch {
    status_line: Vec<u8>,
    live: Vec<u8>,
    live_sent: Instant,
}

impl Watch {
    fn add_live(&mut self, bytes: &[u8]) {
        self.live.extend_from_slice(bytes);
        let excess = self.live.len().saturating_sub(LIVE_BYTES_MAX);
        self.live.drain(..excess);
    }

    fn show(&mut self, daemon: &Daemon, step: StepId) {
        if !self.live.is_empty() && self.live_sent.elapsed() >= LIVE_INTERVAL {
            daemon.show(step, text::clean(&self.live).text);
            self.live.clear();
            self.live_sent = Instant::now();
        }
    }

    /// The exit status, once the shell has written it for this step.
    fn read_status(&mut self, status: &mut File, step: &str) -> io::Result<Option<i32>> {
        let mut bytes = [0; 256];
        loop {
            match status.read(&mut bytes) {
                Ok(0) => return Ok(None),
                Ok(length) => self.status_line.extend_from_slice(&bytes[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        while let Some(end) = self.status_line.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.status_line.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            // Lines of other steps come from shells that were given up.
            if let Some((of, code)) = line.trim_end().split_once(' ')
                && of == step
                && let Ok(code) = code.parse()
            {
                return Ok(Some(code));
            }
        }
        let excess = self.status_line.len().saturating_sub(STATUS_BYTES_MAX);
        self.status_line.drain(..excess);
        Ok(None)
    }
}

/// Ends the call's processes and the shell. The shell first stops: else it would go on with the next command of the list
/// as soon as the running one dies.
fn stop(shell: &Shell, running: &mut Option<Running>, processes: &CallProcesses<'_>) -> io::Result<()> {
    shell.current_dir();
    if let Some(pid) = running.as_ref().and_then(|running| Pid::from_raw(running.pid)) {
        match rustix::process::kill_process(pid, Signal::STOP) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let ended = processes.end();
    shell.kill(running);
    ended
}

fn forget_if_ended(shell: &Shell, running: &mut Option<Running>) {
    if let Some(pid) = running.as_ref().map(|running| running.pid)
        && ended_code(shell, pid).is_some()
    {
        shell.kill(running);
    }
}

fn ended_code(shell: &Shell, pid: i32) -> Option<i32> {
    lock(&shell.ended).filter(|end| end.pid == pid).map(|end| end.code)
}

/// Brings a new shell to where the last one was.
fn restore_line(dir: &Path) -> String {
    let dir = quote(&dir.to_string_lossy());
    format!("if [ -r {SAVED_VARIABLES} ]; then . {SAVED_VARIABLES}; fi; builtin cd -- {dir}\n")
}

/// The one line that runs a command. `eval` of a quoted text: whatever is unterminated in it ends with it. The previous
/// exit status is put back first, so that `$?` means what the agent thinks.
fn call_line(step: &str, command: &str, last_code: i32) -> String {
    let command = quote(command);
    format!(
        "builtin export {STEP_VARIABLE}={step}; __covey() {{ builtin return $1; }}; __covey {last_code}; \
         builtin eval {command} </dev/null >{MEETING_DIR}/{step} 2>&1; \
         builtin printf '%s %d\\n' {step} $? >{STATUS_FIFO}; builtin export -p >{SAVED_VARIABLES}\n"
    )
}

fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn report(
    shell: &Shell,
    job: &Job,
    timeout: Duration,
    end: End,
    mut output: Output,
    fifo: Option<File>,
    left_running: bool,
) -> ToolResult {
    let path = output.path.to_string_lossy().into_owned();
    let shown = output.shown.show(&path);
    if shown.is_incomplete || fifo.is_some() {
        output.open_file();
    }
    let mut text = shown.text;
    let mut note = |line: &str| {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(line);
        text.push('\n');
    };
    let kept = "the shell was replaced: directory and exported variables are kept, unexported variables, functions and job \
                numbers are not";
    let (is_error, exit_code) = match end {
        End::Completed(0) => (false, 0),
        End::Completed(code) => {
            note(&format!("[exit code {code}]"));
            (true, code)
        }
        End::ShellEnded(code) => {
            note(&format!("[the command ended the shell with exit code {code}; {kept}]"));
            (code != 0, code)
        }
        End::TimedOut => {
            note(&format!(
                "[timed out after {} ms; its processes were killed; {kept}]{}",
                timeout.as_millis(),
                hint(job.input.command.as_deref().unwrap_or_default())
            ));
            (true, 124)
        }
        End::Interrupted => {
            note(&format!("[interrupted; its processes were killed, what they did before stays; {kept}]"));
            (true, 130)
        }
    };
    if left_running {
        note(&format!("[processes of this call go on in the background; their output goes to {path}]"));
    }
    if let Some(failed) = &output.failed {
        note(&format!("[the full output could not be kept: {failed}]"));
    }
    if text.is_empty() {
        text.push_str("(no output)");
    }
    let output_bytes = output.shown.total();
    let output_path = output.file.is_some().then_some(path);
    if let (Some(fifo), Some((file, written))) = (fifo, output.into_file()) {
        shell.leftovers.add(fifo, file, written);
    }
    ToolResult {
        content: vec![ToolContent::Text { text }],
        is_error,
        exit_code: Some(exit_code),
        output_path,
        output_bytes,
        elapsed_ms: 0,
        left_running,
        keep_running: job.input.keep_running,
    }
}

/// Why commands most often hang.
fn hint(command: &str) -> &'static str {
    let has = |words: &[&str]| {
        words.iter().any(|word| command.split(|c: char| !c.is_alphanumeric()).any(|w| w == *word))
    };
    if has(&["vi", "vim", "nano", "emacs", "less", "more", "top", "htop"]) {
        "\n[there is no terminal: editors and pagers cannot be used; use the edit and read tools]"
    } else if has(&["sudo", "su", "ssh", "passwd", "login"]) {
        "\n[there is no terminal: a prompt for a password can never be answered]"
    } else if has(&["serve", "server", "watch", "dev", "start", "tail"]) {
        "\n[a command that does not end belongs into the background: `command >log 2>&1 &`, with keep_running]"
    } else {
        ""
    }
}
