//! The `native` backend: Linux namespaces, made by the embedded `sandboxd`.
//!
//! What stays true: a sandbox is recorded before it exists and until after it is gone, and its process does nothing before
//! its pid is recorded; so a runner killed at any point leaves nothing that [`NativeBackend::recorded`] and
//! [`Sandbox::destroy`] do not find. The same code runs as root and as an ordinary user. There is no fallback.
//! What does not belong here: what happens inside (see `covey-sandboxd`).

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use covey_types::{FencingToken, HomeId, SandboxId};
use covey_wire::frame::{self, FrameError};
use covey_wire::generation::{TOOL_LINK, TOOL_LINK_MIN};
use covey_wire::setup::{GO, SERVE, SetupReport, SetupSpec};
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};

use super::cgroup::{self, Controller};
use super::record::{self, ProcessName, Record};
use super::setup::SetupLink;
use super::{AdoptError, Sandbox, SandboxBackend, SandboxSpec, StartError, image, remedy};

const CONTROL_SOCKET: &str = "ctl.sock";
/// For one message and its answer. A daemon that is not frozen answers within microseconds.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// From the kill to the last process's end; only an uninterruptible wait takes long.
const DESTROY_DEADLINE: Duration = Duration::from_secs(10);
/// Connections that may wait while the daemon starts or is frozen.
const BACKLOG: i32 = 16;

/// See the module.
#[derive(Debug, Default)]
pub struct NativeBackend {
    cgroups: OnceLock<cgroup::Host>,
}

impl NativeBackend {
    /// Makes the backend; looks at nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    pub(super) fn cgroup_host(&self) -> &cgroup::Host {
        self.cgroups.get_or_init(|| match cgroup::Host::probe() {
            Ok(host) => host,
            Err(error) => {
                tracing::warn!(%error, "cgroups cannot be looked at; sandboxes run without them");
                cgroup::Host::default()
            }
        })
    }
}

impl NativeBackend {
    pub(super) fn start_native(&self, spec: &SandboxSpec) -> Result<NativeSandbox, StartError> {
        let cgroups = self.cgroup_host().plan(spec.sandbox, &spec.limits);
        let mut record = Record::new(spec.sandbox, spec.home, cgroups);
        let dir = record.create(&spec.run_dir).map_err(failed("record the sandbox"))?;
        match launch(spec, &mut record, &dir) {
            Ok(sandbox) => Ok(sandbox),
            Err(error) => {
                let left = NativeSandbox::open(dir, record);
                if let Err(cleanup) = left.destroy() {
                    tracing::warn!(error = %cleanup, sandbox = %spec.sandbox, "a failed start left something behind");
                }
                Err(error)
            }
        }
    }
}

impl SandboxBackend for NativeBackend {
    fn start(&self, spec: &SandboxSpec) -> Result<Arc<dyn Sandbox>, StartError> {
        Ok(Arc::new(self.start_native(spec)?))
    }

    fn recorded(&self, run_dir: &Path) -> io::Result<Vec<(HomeId, Arc<dyn Sandbox>)>> {
        let records = record::all(run_dir)?;
        let open = |(dir, record): (PathBuf, Record)| {
            let home = record.home;
            (home, Arc::new(NativeSandbox::open(dir, record)) as Arc<dyn Sandbox>)
        };
        Ok(records.into_iter().map(open).collect())
    }
}

fn failed<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> StartError {
    move |error| StartError::Failed(format!("cannot {what}: {error}"))
}

fn launch(spec: &SandboxSpec, record: &mut Record, dir: &Path) -> Result<NativeSandbox, StartError> {
    let is_privileged = rustix::process::geteuid().is_root();
    prepare_outputs(spec, is_privileged).map_err(failed("make the outputs directory"))?;
    record.cgroups.create(&spec.limits).map_err(failed("make the cgroups"))?;
    let listener = listen(dir).map_err(failed("listen on the control socket"))?;
    let setup = SetupSpec {
        sandbox: spec.sandbox,
        home_dir: spec.home_dir.canonicalize().map_err(failed("find the working copy"))?,
        outputs_dir: spec.outputs_dir.canonicalize().map_err(failed("find the outputs directory"))?,
        host_uid: spec.host_uid,
        host_gid: spec.host_gid,
        is_privileged,
        limits: spec.limits,
        pids_in_cgroup: record.cgroups.has(Controller::Pids),
        memory_in_cgroup: record.cgroups.has(Controller::Memory),
        cgroup2: record.cgroups.v2.clone(),
        orphan_term_ms: spec.orphan_term.as_millis() as u64,
    };
    let (link, theirs) = SetupLink::pair().map_err(failed("make the setup link"))?;
    let program = image::path().map_err(failed("keep sandboxd in memory"))?;
    let mut command = Command::new(program);
    command.arg0("sandboxd").env_clear().current_dir("/");
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    let mut stage0 = command.spawn().map_err(refused_program)?;
    // Our copy of its end would hide its death from us.
    drop(command);
    let outcome = converse(&link, &setup, &listener, record, dir);
    if outcome.is_err() {
        // It ends by itself unless it is stuck; a failed kill means that it has ended.
        match stage0.kill() {
            Ok(()) | Err(_) => {}
        }
    }
    drop(link);
    stage0.wait().map_err(failed("reap stage 0"))?;
    outcome?;
    Ok(NativeSandbox::open(dir.to_path_buf(), record.clone()))
}

/// The full outputs belong to the agent, whose daemon writes them.
fn prepare_outputs(spec: &SandboxSpec, is_privileged: bool) -> io::Result<()> {
    fs::create_dir_all(&spec.outputs_dir)?;
    if is_privileged {
        std::os::unix::fs::chown(&spec.outputs_dir, Some(spec.host_uid), Some(spec.host_gid))?;
    }
    Ok(())
}

fn listen(dir: &Path) -> io::Result<UnixListener> {
    let (_anchor, path) = socket_path(dir)?;
    let listener = UnixListener::bind(path)?;
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// A path to the control socket that is short enough for a socket address, however deep `dir` is, and the
/// descriptor that keeps it valid.
fn socket_path(dir: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let anchor = rustix::fs::open(dir, flags, Mode::empty())?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{CONTROL_SOCKET}", anchor.as_raw_fd()));
    Ok((anchor, path))
}

fn refused_program(error: io::Error) -> StartError {
    if error.kind() == io::ErrorKind::PermissionDenied {
        return StartError::Isolation {
            what: format!("start a program from a memory file: {error}"),
            remedy: "allow it: sysctl vm.memfd_noexec=0 (or 1)".into(),
        };
    }
    StartError::Failed(format!("cannot start sandboxd: {error}"))
}

fn converse(
    link: &SetupLink,
    setup: &SetupSpec,
    listener: &UnixListener,
    record: &mut Record,
    dir: &Path,
) -> Result<(), StartError> {
    link.send(setup, listener.as_fd()).map_err(failed("send the spec"))?;
    let report = link.receive().map_err(failed("hear from stage 0"))?;
    let pid = match report {
        SetupReport::Cloned { pid } => pid,
        SetupReport::Failed { place, what, errno } => return Err(remedy::explain(place, what, errno)),
        SetupReport::Ready { .. } => return Err(StartError::Failed("stage 0 reports out of order".into())),
    };
    // The process waits for us and is our child, so its pid means it. Recorded before it may go on.
    record.process = Some(ProcessName::of(pid).map_err(failed("name the sandbox's process"))?);
    record.update(dir).map_err(failed("record the sandbox's process"))?;
    link.say(GO).map_err(failed("let the sandbox go on"))?;
    // While it builds its root, in which it starts nothing.
    match record.cgroups.join_v1(pid) {
        // It failed and ended meanwhile: its report comes next.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
        joined => joined.map_err(failed("put the sandbox into its cgroups"))?,
    }
    match link.say(SERVE) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        said => said.map_err(failed("let the sandbox serve"))?,
    }
    match link.receive().map_err(failed("hear from the sandbox"))? {
        SetupReport::Ready { landlock_abi } => {
            record.landlock_abi = landlock_abi;
            Ok(())
        }
        SetupReport::Failed { place, what, errno } => Err(remedy::explain(place, what, errno)),
        SetupReport::Cloned { .. } => Err(StartError::Failed("stage 1 reports out of order".into())),
    }
}

/// Reads against one deadline for everything: a hostile daemon that sends a byte now and then gains nothing.
struct Timed<'a> {
    stream: &'a UnixStream,
    until: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        self.stream.set_read_timeout(Some(left.ok_or(io::ErrorKind::TimedOut)?))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

/// One sandbox: its record, and its first process where that still exists.
#[derive(Debug)]
pub(super) struct NativeSandbox {
    dir: PathBuf,
    record: Record,
    /// None once it is known to be gone.
    process: Option<OwnedFd>,
    ended: OnceLock<String>,
}

impl NativeSandbox {
    /// The Landlock ABI that holds inside; 0 where the kernel has none.
    pub(super) fn landlock_abi(&self) -> i32 {
        self.record.landlock_abi
    }

    fn open(dir: PathBuf, record: Record) -> Self {
        let process = record.process.as_ref().and_then(|name| {
            let pid = Pid::from_raw(name.pid)?;
            let process = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
            // Checked after the descriptor is ours: from here on the pid cannot change its meaning.
            name.is_current().then_some(process)
        });
        Self { dir, record, process, ended: OnceLock::new() }
    }

    fn has_ended(&self, wait: Option<Duration>) -> bool {
        let Some(process) = &self.process else { return true };
        let wait =
            wait.map(|wait| Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() });
        loop {
            let mut fds = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
            match rustix::event::poll(&mut fds, wait.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                outcome => return outcome.is_ok_and(|ready| ready > 0),
            }
        }
    }

    /// Takes the exit status if it is ours to take; every later caller gets the first one's words.
    fn how_it_ended(&self) -> &str {
        self.ended.get_or_init(|| {
            let Some(process) = &self.process else { return "it was gone before this runner looked".into() };
            match rustix::process::waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED) {
                Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => format!("its daemon exited with code {code}"),
                    (None, Some(signal)) => format!("its daemon was killed by signal {signal}"),
                    (None, None) => "its daemon ended".into(),
                },
                // An adopted sandbox is not our child.
                Ok(None) | Err(_) => {
                    "its daemon ended; how is known to the runner that started it only".into()
                }
            }
        })
    }

    fn dial(&self) -> io::Result<UnixStream> {
        let (_anchor, path) = socket_path(&self.dir)?;
        let stream = UnixStream::connect(path)?;
        stream.set_write_timeout(Some(ANSWER_DEADLINE))?;
        Ok(stream)
    }

    /// Sends one message and reads one.
    fn exchange(
        stream: &mut UnixStream,
        question: &RunnerToSandbox,
    ) -> Result<Option<SandboxToRunner>, FrameError> {
        frame::write(stream, question)?;
        frame::read(&mut Timed { stream, until: Instant::now() + ANSWER_DEADLINE })
    }

    /// Asks one thing on a connection of its own, which leaves the live one alone.
    fn ask(&self, question: &RunnerToSandbox) -> io::Result<SandboxToRunner> {
        let mut stream = self.dial()?;
        let answer = Self::exchange(&mut stream, question).map_err(io::Error::other)?;
        answer.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "the daemon closed the connection"))
    }

    fn ask_expecting(&self, question: &RunnerToSandbox, expected: &SandboxToRunner) -> io::Result<()> {
        if self.ask(question)? == *expected {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the daemon answers something else"))
    }

    fn gone() -> io::Error {
        io::Error::new(io::ErrorKind::NotFound, "the sandbox is gone")
    }
}

impl Sandbox for NativeSandbox {
    fn id(&self) -> SandboxId {
        self.record.sandbox
    }

    fn connect(&self, token: FencingToken) -> Result<UnixStream, AdoptError> {
        if !self.is_alive() {
            return Err(AdoptError::Gone);
        }
        let unresponsive =
            |error: String| if self.is_alive() { AdoptError::Unresponsive(error) } else { AdoptError::Gone };
        let mut stream = self.dial().map_err(|e| unresponsive(e.to_string()))?;
        let hello = RunnerToSandbox::Hello { versions: (TOOL_LINK_MIN, TOOL_LINK), token };
        match Self::exchange(&mut stream, &hello).map_err(|e| unresponsive(e.to_string()))? {
            Some(SandboxToRunner::Hello { version, sandbox }) if sandbox == self.record.sandbox => {
                if !(TOOL_LINK_MIN..=TOOL_LINK).contains(&version) {
                    return Err(AdoptError::Unresponsive(format!("it speaks version {version}")));
                }
            }
            Some(SandboxToRunner::Refused { reason }) => return Err(AdoptError::Unresponsive(reason)),
            Some(_) => {
                return Err(AdoptError::Unresponsive("it answers something else than a handshake".into()));
            }
            None => return Err(unresponsive("it closed the connection".into())),
        }
        let untimed = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(None));
        untimed.map_err(|error| AdoptError::Unresponsive(error.to_string()))?;
        Ok(stream)
    }

    fn freeze(&self) -> io::Result<()> {
        if !self.is_alive() {
            return Err(Self::gone());
        }
        match self.record.cgroups.freeze() {
            Some(outcome) => outcome,
            None => self.ask_expecting(&RunnerToSandbox::Freeze, &SandboxToRunner::Frozen),
        }
    }

    fn thaw(&self) -> io::Result<()> {
        if !self.is_alive() {
            return Err(Self::gone());
        }
        match self.record.cgroups.thaw() {
            Some(outcome) => outcome,
            None => self.ask_expecting(&RunnerToSandbox::Thaw, &SandboxToRunner::Thawed),
        }
    }

    fn is_daemon_frozen(&self) -> io::Result<bool> {
        self.record.cgroups.is_frozen()
    }

    fn is_alive(&self) -> bool {
        !self.has_ended(Some(Duration::ZERO))
    }

    fn wait_gone(&self) -> String {
        self.has_ended(None);
        self.how_it_ended().to_owned()
    }

    fn destroy(&self) -> io::Result<()> {
        if let Some(process) = &self.process
            && !self.has_ended(Some(Duration::ZERO))
        {
            self.record.cgroups.kill()?;
            // The end of pid 1 ends every process of the namespace, and is reported only after theirs.
            match rustix::process::pidfd_send_signal(process, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
            // A frozen version 1 cgroup holds even a killed process.
            if self.record.cgroups.v2.is_none() {
                self.record.cgroups.thaw().transpose()?;
            }
            if !self.has_ended(Some(DESTROY_DEADLINE)) {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the sandbox's processes do not end"));
            }
        }
        self.how_it_ended();
        self.record.cgroups.remove()?;
        // The record goes last but for the directory: whoever is killed here finds the rest again.
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
