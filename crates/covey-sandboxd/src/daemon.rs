//! Serves the tool link: who may ask, what was asked, who does it.
//!
//! What stays true: a step id is recorded before `Accepted` is sent and run once (I4); nothing that a peer sends ends the
//! daemon. `bash` calls run one after another on the shell, all other tools in parallel.
//! What does not belong here: how a tool works.

use std::io::{self, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use covey_types::{FencingToken, SandboxId, StepId};
use covey_wire::frame;
use covey_wire::generation::{self, TOOL_LINK, TOOL_LINK_MIN};
use covey_wire::setup::{SetupReport, SetupSpec};
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, StepReport, ToolCall, ToolResult};

use crate::ledger::{Begin, Ledger};
use crate::link::Link;
use crate::setup::SetupLink;
use crate::shell::Shell;
use crate::tools::{self, Files};
use crate::{processes, sys};

/// Connections whose handshake is not done or whose reader has not ended yet. More are closed at once.
const CONNECTIONS_MAX: usize = 16;
/// A peer that does not say hello for so long is closed.
const HELLO_DEADLINE: Duration = Duration::from_secs(10);
/// Calls other than `bash` at one time; one thread each.
const PARALLEL_CALLS_MAX: usize = 64;
/// The politest end of a sandbox.
const GRACE_MAX: Duration = Duration::from_secs(60);
/// Small, because there are many and none recurses; the file walk keeps its own stack on the heap.
const STACK_BYTES: usize = 512 * 1024;

/// Everything the threads share.
#[derive(Debug)]
pub(crate) struct Daemon {
    sandbox: SandboxId,
    ledger: Mutex<Ledger>,
    link: Link,
    shell: Shell,
    files: Files,
    gate: Gate,
    parallel: Mutex<usize>,
}

/// Keeps the daemon's own writes out of a frozen home.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    is_frozen: bool,
    inside: usize,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass<T>(&self, work: impl FnOnce() -> T) -> T {
        let mut state = self.lock();
        while state.is_frozen {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.inside += 1;
        drop(state);
        let outcome = work();
        self.lock().inside -= 1;
        self.changed.notify_all();
        outcome
    }

    fn close(&self) {
        let mut state = self.lock();
        state.is_frozen = true;
        while state.inside > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn open(&self) {
        self.lock().is_frozen = false;
        self.changed.notify_all();
    }
}

/// Starts the threads and accepts runners; never returns.
pub(crate) fn serve(spec: &SetupSpec, listener: UnixListener, setup: SetupLink, landlock_abi: i32) -> ! {
    let daemon: &'static Daemon = Box::leak(Box::new(Daemon {
        sandbox: spec.sandbox,
        ledger: Mutex::default(),
        link: Link::default(),
        shell: match Shell::new() {
            Ok(shell) => shell,
            Err(_) => process::exit(3),
        },
        files: Files::default(),
        gate: Gate::default(),
        parallel: Mutex::new(0),
    }));
    let term = Duration::from_millis(spec.orphan_term_ms);
    spawn(move || {
        daemon.link.wait_orphaned(term);
        process::exit(0);
    });
    spawn(|| daemon.shell.reap());
    spawn(|| daemon.shell.pump_leftovers());
    spawn(|| daemon.shell.run_calls(daemon));
    // Everything that serves stands; whoever connects from now on is answered.
    if setup.report(&SetupReport::Ready { landlock_abi }).is_err() {
        process::exit(1);
    }
    drop(setup);
    let connections = Arc::new(Mutex::new(0_usize));
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // Out of descriptors or memory for the moment.
            thread::sleep(Duration::from_millis(10));
            continue;
        };
        let open = Arc::clone(&connections);
        let mut count = connections.lock().unwrap_or_else(PoisonError::into_inner);
        if *count >= CONNECTIONS_MAX {
            continue;
        }
        *count += 1;
        spawn(move || {
            daemon.converse(stream);
            *open.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        });
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) {
    if thread::Builder::new().stack_size(STACK_BYTES).spawn(work).is_err() {
        // Without its threads the daemon is not one; ending it ends the sandbox, which the runner sees.
        process::exit(3);
    }
}

impl Daemon {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn converse(&'static self, stream: UnixStream) {
        let Some((number, mut reader)) = self.greet(stream) else { return };
        for (step, result) in self.ledger().kept() {
            self.link.send(&SandboxToRunner::Done { step, result });
        }
        while let Ok(Some(message)) = frame::read::<RunnerToSandbox>(&mut reader) {
            if !self.handle(message) {
                break;
            }
        }
        self.link.end(number);
    }

    /// The handshake; `None` when the peer was refused or fell silent.
    fn greet(&self, stream: UnixStream) -> Option<(u64, BufReader<UnixStream>)> {
        stream.set_read_timeout(Some(HELLO_DEADLINE)).ok()?;
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        let (versions, token) = match frame::read(&mut reader) {
            Ok(Some(RunnerToSandbox::Hello { versions, token })) => (versions, token),
            Ok(Some(message)) => {
                if let Some(answer) = self.answer_aside(&message)
                    && frame::write(&mut (&stream), &answer).is_err()
                {
                    // Whoever asked is gone and will ask again.
                }
                return None;
            }
            Ok(None) | Err(_) => return None,
        };
        let ours = (TOOL_LINK_MIN, TOOL_LINK);
        let refuse = |reason: String| {
            let mut stream = &stream;
            match frame::write(&mut stream, &SandboxToRunner::Refused { reason }) {
                // The peer that does not hear it is refused all the same.
                Ok(()) | Err(_) => None,
            }
        };
        let version = match generation::agree("tool link", ours, versions, "sandbox", "runner") {
            Ok(version) => version,
            Err(error) => return refuse(error.to_string()),
        };
        reader.get_ref().set_read_timeout(None).ok()?;
        self.accept(stream.try_clone().ok()?, token, version).map_or_else(
            |seen| refuse(format!("token {token} is older than {seen}")),
            |number| Some((number, reader)),
        )
    }

    fn accept(&self, stream: UnixStream, token: FencingToken, version: u32) -> Result<u64, FencingToken> {
        let number = self.link.replace(stream, token)?;
        self.link.send(&SandboxToRunner::Hello { version, sandbox: self.sandbox });
        Ok(number)
    }

    /// Handles one message; `false` ends the connection.
    fn handle(&'static self, message: RunnerToSandbox) -> bool {
        match message {
            RunnerToSandbox::Hello { .. } => return false,
            RunnerToSandbox::Call(call) => self.call(call),
            RunnerToSandbox::Query { step } => {
                let report = self.ledger().report(step);
                self.link.send(&SandboxToRunner::Report { step, report });
            }
            RunnerToSandbox::Interrupt { step } => {
                let flag = self.ledger().interrupt_flag(step);
                if let Some(flag) = flag {
                    flag.store(true, Ordering::SeqCst);
                    self.shell.wake();
                }
            }
            RunnerToSandbox::Acknowledge { step } => self.ledger().acknowledge(step),
            RunnerToSandbox::Freeze | RunnerToSandbox::Thaw | RunnerToSandbox::Ping { .. } => {
                let Some(answer) = self.answer_aside(&message) else { return false };
                self.link.send(&answer);
            }
            RunnerToSandbox::Shutdown { grace_ms } => shut_down(Duration::from_millis(grace_ms.into())),
        }
        true
    }

    /// Answers what may be asked without a handshake; no answer means that it could not be done.
    fn answer_aside(&self, message: &RunnerToSandbox) -> Option<SandboxToRunner> {
        match message {
            RunnerToSandbox::Freeze => self.freeze().ok().map(|()| SandboxToRunner::Frozen),
            RunnerToSandbox::Thaw => self.thaw().ok().map(|()| SandboxToRunner::Thawed),
            RunnerToSandbox::Ping { nonce } => Some(SandboxToRunner::Pong { nonce: *nonce }),
            _ => None,
        }
    }

    /// Stops our own writes, then every process. The signal is sent to all at once, so no fork escapes it.
    fn freeze(&self) -> io::Result<()> {
        self.gate.close();
        if let Err(error) = processes::stop_all() {
            // Not frozen must not look frozen: everything goes on.
            self.thaw()?;
            return Err(error);
        }
        Ok(())
    }

    fn thaw(&self) -> io::Result<()> {
        let outcome = sys::signal_all(libc::SIGCONT);
        self.gate.open();
        outcome
    }

    fn call(&'static self, call: ToolCall) {
        let step = call.step;
        let begun = self.ledger().begin(step);
        let interrupt = match begun {
            Begin::Run(interrupt) => interrupt,
            Begin::Seen(report) => return self.link.send(&SandboxToRunner::Report { step, report }),
            Begin::Full => {
                let report = StepReport::Unknown;
                return self.link.send(&SandboxToRunner::Report { step, report });
            }
        };
        // A small read is over before a thread would have started, and its two answers go out as one.
        if call.name == "read" {
            let dir = self.shell.current_dir();
            if self.files.is_quick_read(&call.input, &dir) {
                let result = self.perform(&call, &interrupt, &dir);
                self.ledger().finish(step, &result);
                let answers = [SandboxToRunner::Accepted { step }, SandboxToRunner::Done { step, result }];
                return self.link.send_all(&answers);
            }
        }
        self.link.send(&SandboxToRunner::Accepted { step });
        if call.name == "bash" {
            return match self.shell.enqueue(step, &call.input, interrupt) {
                Ok(()) => {}
                Err(result) => self.finish(step, result),
            };
        }
        {
            let mut parallel = self.parallel.lock().unwrap_or_else(PoisonError::into_inner);
            if *parallel >= PARALLEL_CALLS_MAX {
                drop(parallel);
                let text = format!("more than {PARALLEL_CALLS_MAX} calls run at once; try again");
                return self.finish(step, ToolResult::text(text, true));
            }
            *parallel += 1;
        }
        spawn(move || {
            let result = self.perform(&call, &interrupt, &self.shell.current_dir());
            self.finish(call.step, result);
            *self.parallel.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        });
    }

    fn perform(&self, call: &ToolCall, interrupt: &AtomicBool, dir: &Path) -> ToolResult {
        let started = Instant::now();
        let mut result = self.gate.pass(|| tools::run(&self.files, &call.name, &call.input, dir, interrupt));
        result.elapsed_ms = started.elapsed().as_millis() as u64;
        result
    }

    /// Keeps and sends a result. Kept first: a connection that ends in between gets it again.
    pub(crate) fn finish(&self, step: StepId, result: ToolResult) {
        self.ledger().finish(step, &result);
        self.link.send(&SandboxToRunner::Done { step, result });
    }

    /// Shows live output, if the runner keeps up.
    pub(crate) fn show(&self, step: StepId, text: String) {
        self.link.offer(&SandboxToRunner::Output { step, text });
    }

    /// Runs `work` while the sandbox is not frozen.
    pub(crate) fn while_thawed<T>(&self, work: impl FnOnce() -> T) -> T {
        self.gate.pass(work)
    }
}

fn shut_down(grace: Duration) -> ! {
    let polite = sys::signal_all(libc::SIGTERM).and_then(|()| sys::signal_all(libc::SIGCONT));
    let gone = polite.and_then(|()| processes::wait_all_gone(grace.min(GRACE_MAX)));
    // The end of pid 1 kills whatever is left; the code tells a runner that still looks how it went.
    process::exit(if matches!(gone, Ok(true)) { 0 } else { 4 })
}
