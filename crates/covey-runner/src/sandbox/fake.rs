//! A backend without isolation or processes, for tests of whoever drives sandboxes.
//!
//! It keeps state and serves the real tool link in threads of this process: steps run once, results are kept, tokens fence,
//! frozen sandboxes stand still, a sandbox may die at any call. It is held to the same contract tests as the native
//! backend. What does not belong here: tools; a script answers calls.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use covey_types::{FencingToken, HomeId, SandboxId, StepId};
use covey_wire::frame;
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, StepReport, ToolCall, ToolResult};

use super::{AdoptError, Sandbox, SandboxBackend, SandboxSpec, StartError};

/// What a script does with a call.
#[derive(Debug)]
pub enum FakeReply {
    /// It ends with this.
    Result(ToolResult),
    /// It runs until it is interrupted or the sandbox is gone.
    Hang,
    /// The sandbox dies in the middle of it.
    Die,
}

/// Answers a call; runs in a thread of its own and may block, write into `spec.home_dir`, or count.
pub type Script = dyn Fn(&SandboxSpec, &ToolCall) -> FakeReply + Send + Sync;

/// See the module.
#[derive(Clone)]
pub struct FakeBackend {
    script: Arc<Script>,
    sandboxes: Arc<Mutex<Vec<Arc<FakeSandbox>>>>,
    starts: Arc<AtomicUsize>,
}

impl std::fmt::Debug for FakeBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeBackend").field("sandboxes", &self.sandboxes).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeBackend {
    /// Makes a backend whose sandboxes answer by `script`.
    pub fn new(script: impl Fn(&SandboxSpec, &ToolCall) -> FakeReply + Send + Sync + 'static) -> Self {
        Self { script: Arc::new(script), sandboxes: Arc::default(), starts: Arc::default() }
    }

    /// Sandboxes started so far.
    pub fn starts(&self) -> usize {
        self.starts.load(Ordering::SeqCst)
    }

    /// Kills a sandbox, as a crash would.
    pub fn kill(&self, sandbox: SandboxId) {
        if let Some(found) = lock(&self.sandboxes).iter().find(|known| known.spec.sandbox == sandbox) {
            found.die("killed by the test");
        }
    }

    /// Whether the sandbox stands still.
    pub fn is_frozen(&self, sandbox: SandboxId) -> bool {
        lock(&self.sandboxes)
            .iter()
            .any(|known| known.spec.sandbox == sandbox && lock(&known.state).is_frozen)
    }
}

impl FakeBackend {
    /// Blocks until a runner has opened the sandbox's tool link this often.
    ///
    /// # Panics
    /// When it has not after `patience`.
    pub fn wait_links(&self, sandbox: SandboxId, links: usize, patience: Duration) {
        let found = lock(&self.sandboxes).iter().find(|known| known.spec.sandbox == sandbox).cloned();
        let Some(found) = found else { panic!("no such sandbox") };
        let (state, _) = found
            .changed
            .wait_timeout_while(lock(&found.state), patience, |state| state.links < links)
            .unwrap_or_else(PoisonError::into_inner);
        assert!(state.links >= links, "no runner opened the tool link");
    }
}

impl SandboxBackend for FakeBackend {
    fn start(&self, spec: &SandboxSpec) -> Result<Arc<dyn Sandbox>, StartError> {
        if !spec.home_dir.is_dir() {
            return Err(StartError::Failed(format!("{} is no directory", spec.home_dir.display())));
        }
        std::fs::create_dir_all(&spec.outputs_dir).map_err(|error| StartError::Failed(error.to_string()))?;
        self.starts.fetch_add(1, Ordering::SeqCst);
        let sandbox = Arc::new_cyclic(|this| FakeSandbox {
            this: this.clone(),
            spec: spec.clone(),
            script: Arc::clone(&self.script),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        lock(&self.sandboxes).push(Arc::clone(&sandbox));
        Ok(sandbox)
    }

    fn recorded(&self, run_dir: &Path) -> io::Result<Vec<(HomeId, Arc<dyn Sandbox>)>> {
        let sandboxes = lock(&self.sandboxes);
        let here = sandboxes.iter().filter(|s| s.spec.run_dir == run_dir && !lock(&s.state).is_destroyed);
        Ok(here.map(|s| (s.spec.home, Arc::clone(s) as Arc<dyn Sandbox>)).collect())
    }
}

#[derive(Debug)]
enum Step {
    Running { is_interrupted: bool },
    Done(ToolResult),
    Acknowledged,
}

#[derive(Debug, Default)]
struct State {
    steps: HashMap<StepId, Step>,
    token: FencingToken,
    live: Option<UnixStream>,
    /// Links opened so far.
    links: usize,
    is_frozen: bool,
    is_destroyed: bool,
    ended: Option<String>,
}

impl State {
    fn send(&mut self, message: &SandboxToRunner) {
        if let Some(stream) = self.live.as_mut()
            && frame::write(stream, message).is_err()
        {
            self.live = None;
        }
    }

    fn report(&self, step: StepId) -> StepReport {
        match self.steps.get(&step) {
            None => StepReport::Unknown,
            Some(Step::Running { .. }) => StepReport::Running,
            Some(Step::Done(result)) => StepReport::Done { result: result.clone() },
            Some(Step::Acknowledged) => StepReport::Acknowledged,
        }
    }
}

struct FakeSandbox {
    this: std::sync::Weak<Self>,
    spec: SandboxSpec,
    script: Arc<Script>,
    state: Mutex<State>,
    changed: Condvar,
}

impl std::fmt::Debug for FakeSandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeSandbox").field("sandbox", &self.spec.sandbox).finish_non_exhaustive()
    }
}

impl FakeSandbox {
    fn die(&self, how: &str) {
        let mut state = lock(&self.state);
        if state.ended.is_none() {
            state.ended = Some(how.to_owned());
        }
        close(state.live.take());
        self.changed.notify_all();
    }

    /// Waits while frozen; none when the sandbox is gone.
    fn moving(&self) -> Option<MutexGuard<'_, State>> {
        let mut state = lock(&self.state);
        while state.is_frozen && state.ended.is_none() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.ended.is_none().then_some(state)
    }

    fn serve(&self, mut peer: UnixStream) {
        while let Ok(Some(message)) = frame::read::<RunnerToSandbox>(&mut peer) {
            let Some(mut state) = self.moving() else { return };
            match message {
                RunnerToSandbox::Hello { .. } => return close(Some(peer)),
                RunnerToSandbox::Call(call) => self.call(&mut state, call),
                RunnerToSandbox::Query { step } => {
                    let report = state.report(step);
                    state.send(&SandboxToRunner::Report { step, report });
                }
                RunnerToSandbox::Interrupt { step } => {
                    if let Some(Step::Running { is_interrupted }) = state.steps.get_mut(&step) {
                        *is_interrupted = true;
                    }
                }
                RunnerToSandbox::Acknowledge { step } => {
                    if let Some(entry @ Step::Done(_)) = state.steps.get_mut(&step) {
                        *entry = Step::Acknowledged;
                    }
                }
                RunnerToSandbox::Freeze => state.send(&SandboxToRunner::Frozen),
                RunnerToSandbox::Thaw => state.send(&SandboxToRunner::Thawed),
                RunnerToSandbox::Ping { nonce } => state.send(&SandboxToRunner::Pong { nonce }),
                RunnerToSandbox::Shutdown { .. } => {
                    drop(state);
                    return self.die("shut down");
                }
            }
            self.changed.notify_all();
        }
    }

    fn call(&self, state: &mut State, call: ToolCall) {
        let step = call.step;
        if state.steps.contains_key(&step) {
            let report = state.report(step);
            return state.send(&SandboxToRunner::Report { step, report });
        }
        state.steps.insert(step, Step::Running { is_interrupted: false });
        state.send(&SandboxToRunner::Accepted { step });
        if let Some(this) = self.this.upgrade() {
            thread::spawn(move || this.perform(&call));
        }
    }

    fn perform(&self, call: &ToolCall) {
        if self.moving().is_none() {
            return;
        }
        let result = match (self.script)(&self.spec, call) {
            FakeReply::Result(result) => result,
            FakeReply::Die => return self.die("died in the middle of a call"),
            FakeReply::Hang => {
                let mut state = lock(&self.state);
                loop {
                    if state.ended.is_some() {
                        return;
                    }
                    if matches!(state.steps.get(&call.step), Some(Step::Running { is_interrupted: true })) {
                        break;
                    }
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                ToolResult::text("interrupted", true)
            }
        };
        let Some(mut state) = self.moving() else { return };
        state.steps.insert(call.step, Step::Done(result.clone()));
        state.send(&SandboxToRunner::Done { step: call.step, result });
    }
}

impl Sandbox for FakeSandbox {
    fn id(&self) -> SandboxId {
        self.spec.sandbox
    }

    fn connect(&self, token: FencingToken) -> Result<UnixStream, AdoptError> {
        let unresponsive = |error: io::Error| AdoptError::Unresponsive(error.to_string());
        let (ours, theirs) = UnixStream::pair().map_err(unresponsive)?;
        let reader = theirs.try_clone().map_err(unresponsive)?;
        let mut state = lock(&self.state);
        if state.ended.is_some() {
            return Err(AdoptError::Gone);
        }
        if state.is_frozen {
            return Err(AdoptError::Unresponsive("it is frozen".into()));
        }
        if token < state.token {
            return Err(AdoptError::Unresponsive(format!("token {token} is older than {}", state.token)));
        }
        state.token = token;
        close(state.live.replace(theirs));
        state.links += 1;
        self.changed.notify_all();
        let kept: Vec<_> = state
            .steps
            .iter()
            .filter_map(|(step, entry)| match entry {
                Step::Done(result) => Some(SandboxToRunner::Done { step: *step, result: result.clone() }),
                _ => None,
            })
            .collect();
        kept.iter().for_each(|message| state.send(message));
        let this = self.this.upgrade().ok_or(AdoptError::Gone)?;
        thread::spawn(move || this.serve(reader));
        Ok(ours)
    }

    fn freeze(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        if state.ended.is_some() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the sandbox is gone"));
        }
        state.is_frozen = true;
        Ok(())
    }

    fn thaw(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        if state.ended.is_some() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the sandbox is gone"));
        }
        state.is_frozen = false;
        self.changed.notify_all();
        Ok(())
    }

    fn is_daemon_frozen(&self) -> io::Result<bool> {
        Ok(lock(&self.state).is_frozen)
    }

    fn is_alive(&self) -> bool {
        lock(&self.state).ended.is_none()
    }

    fn wait_gone(&self) -> String {
        let mut state = lock(&self.state);
        loop {
            match &state.ended {
                Some(how) => return how.clone(),
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn destroy(&self) -> io::Result<()> {
        self.die("destroyed");
        lock(&self.state).is_destroyed = true;
        Ok(())
    }
}

fn close(stream: Option<UnixStream>) {
    // A stream that is already down is as good.
    if let Some(Ok(()) | Err(_)) = stream.map(|stream| stream.shutdown(Shutdown::Both)) {}
}
