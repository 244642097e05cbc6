//! One sandbox with its directories, and a client that speaks the tool link.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use covey_runner::sandbox::native::NativeBackend;
use covey_runner::sandbox::{Sandbox, SandboxBackend, SandboxSpec};
use covey_types::{FencingToken, HomeId, SandboxId, StepId};
use covey_wire::frame;
use covey_wire::runner::SandboxLimits;
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, StepReport, ToolCall, ToolContent, ToolResult};
use serde_json::{Value, json};

/// A call that takes longer has hung.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);
/// What the sandboxes of these tests run as when the tests run as root.
const HOST_ID: u32 = 234_567;

pub(crate) fn fresh_step() -> StepId {
    StepId::from_uuid(uuid::Uuid::now_v7())
}

/// A directory that goes with the test, or one that belongs to another process.
#[derive(Debug)]
pub(crate) enum Root {
    Own(tempfile::TempDir),
    Foreign(PathBuf),
}

impl Root {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Own(dir) => dir.path(),
            Self::Foreign(path) => path,
        }
    }
}

/// A directory tree for sandboxes of one home.
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) root: Root,
    pub(crate) home: HomeId,
}

impl Room {
    pub(crate) fn new() -> Self {
        let root = Root::Own(tempfile::tempdir().unwrap());
        let room = Self { root, home: HomeId::from_uuid(uuid::Uuid::now_v7()) };
        std::fs::create_dir(room.home_dir()).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(room.home_dir(), Some(HOST_ID), Some(HOST_ID)).unwrap();
        }
        room
    }

    /// The room that another process made.
    pub(crate) fn at(root: PathBuf) -> Self {
        Self { root: Root::Foreign(root), home: HomeId::from_uuid(uuid::Uuid::now_v7()) }
    }

    pub(crate) fn home_dir(&self) -> PathBuf {
        self.root.path().join("home")
    }

    pub(crate) fn outputs_dir(&self) -> PathBuf {
        self.root.path().join("outputs")
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.root.path().join("run")
    }

    pub(crate) fn spec(&self) -> SandboxSpec {
        let is_root = rustix::process::geteuid().is_root();
        SandboxSpec {
            sandbox: SandboxId::from_uuid(uuid::Uuid::now_v7()),
            home: self.home,
            home_dir: self.home_dir(),
            outputs_dir: self.outputs_dir(),
            run_dir: self.run_dir(),
            host_uid: if is_root { HOST_ID } else { rustix::process::geteuid().as_raw() },
            host_gid: if is_root { HOST_ID } else { rustix::process::getegid().as_raw() },
            limits: SandboxLimits::default(),
            orphan_term: Duration::from_secs(600),
        }
    }

    pub(crate) fn start(&self) -> Live {
        self.start_with(&self.spec())
    }

    pub(crate) fn start_with(&self, spec: &SandboxSpec) -> Live {
        let sandbox = NativeBackend::new().start(spec).unwrap();
        Live::connect(sandbox, 1)
    }
}

/// A running sandbox with a connection; destroyed at the end of the test.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) sandbox: Arc<dyn Sandbox>,
    pub(crate) stream: UnixStream,
    nonce: AtomicU64,
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Err(error) = self.sandbox.destroy() {
            eprintln!("{} is left behind: {error}", self.sandbox.id());
        }
    }
}

impl Live {
    pub(crate) fn connect(sandbox: Arc<dyn Sandbox>, token: u64) -> Self {
        let stream = sandbox.connect(FencingToken(token)).unwrap();
        stream.set_read_timeout(Some(ANSWER_DEADLINE)).unwrap();
        Self { sandbox, stream, nonce: AtomicU64::new(0) }
    }

    pub(crate) fn send(&self, message: &RunnerToSandbox) {
        frame::write(&mut &self.stream, message).unwrap();
    }

    /// The next message that is not live output.
    pub(crate) fn receive(&self) -> SandboxToRunner {
        loop {
            match frame::read(&mut &self.stream).unwrap().expect("the daemon closed the link") {
                SandboxToRunner::Output { .. } => {}
                message => return message,
            }
        }
    }

    pub(crate) fn begin(&self, name: &str, input: &Value) -> StepId {
        let step = fresh_step();
        self.send(&RunnerToSandbox::Call(ToolCall { step, name: name.into(), input: input.to_string() }));
        assert_eq!(self.receive(), SandboxToRunner::Accepted { step });
        step
    }

    pub(crate) fn finish(&self, step: StepId) -> ToolResult {
        match self.receive() {
            SandboxToRunner::Done { step: of, result } if of == step => result,
            other => panic!("expected the end of {step}, got {other:?}"),
        }
    }

    pub(crate) fn call(&self, name: &str, input: &Value) -> ToolResult {
        let step = self.begin(name, input);
        self.finish(step)
    }

    pub(crate) fn bash(&self, command: &str) -> ToolResult {
        self.call("bash", &json!({ "command": command }))
    }

    /// The text of a call that must not fail, whatever exit status a backend gives.
    pub(crate) fn output_of(&self, command: &str) -> String {
        let result = self.bash(command);
        assert!(!result.is_error, "{command}: {result:?}");
        text(&result)
    }

    /// The output of a command that must succeed.
    pub(crate) fn output(&self, command: &str) -> String {
        let result = self.bash(command);
        assert_eq!(result.exit_code, Some(0), "{command}: {result:?}");
        text(&result)
    }

    /// The output of a command that must fail.
    pub(crate) fn failure(&self, command: &str) -> String {
        let result = self.bash(command);
        assert!(result.is_error && result.exit_code != Some(0), "{command}: {result:?}");
        text(&result)
    }

    pub(crate) fn query(&self, step: StepId) -> StepReport {
        self.send(&RunnerToSandbox::Query { step });
        match self.receive() {
            SandboxToRunner::Report { step: of, report } if of == step => report,
            other => panic!("expected a report on {step}, got {other:?}"),
        }
    }

    /// Returns after everything sent before has been handled.
    pub(crate) fn ping(&self) {
        let nonce = self.nonce.fetch_add(1, Ordering::Relaxed);
        self.send(&RunnerToSandbox::Ping { nonce });
        assert_eq!(self.receive(), SandboxToRunner::Pong { nonce });
    }
}

pub(crate) fn text(result: &ToolResult) -> String {
    match result.content.as_slice() {
        [ToolContent::Text { text }] => text.clone(),
        other => panic!("expected one text, got {other:?}"),
    }
}
