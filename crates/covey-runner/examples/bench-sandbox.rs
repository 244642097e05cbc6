//! Measures the native backend against this machine's barest primitives, in one run, and prints one JSON object.
//!
//! For each number: the median, `_floor_ms` (the median of the barest primitive, measured in turns with it so that both see the
//! same load), `_ratio`, and `_reference_ms` (what the prototype reached on a quiet machine). Build with `--release`.
//! What does not belong here: judging the numbers.

use std::error::Error;
use std::fs;
use std::io::{BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use covey_runner::sandbox::native::NativeBackend;
use covey_runner::sandbox::{Sandbox, SandboxBackend, SandboxSpec};
use covey_types::{FencingToken, HomeId, SandboxId, StepId};
use covey_wire::frame;
use covey_wire::runner::SandboxLimits;
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, ToolCall, ToolResult};
use rustix::thread::UnshareFlags;
use serde_json::{Map, Value, json};

/// A connection, and what is to be acknowledged with the next call: a runner does that after its journal, not before the
/// next call.
struct Link {
    stream: BufReader<UnixStream>,
    finished: Option<StepId>,
}

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Repetitions; the slow ones dominate the run time, a few seconds in all.
const SLOW_RUNS: usize = 40;
const QUICK_RUNS: usize = 400;
const HOST_ID: u32 = 234_568;

fn main() -> Outcome<()> {
    let root = scratch()?;
    let outcome = measure(&root);
    fs::remove_dir_all(&root)?;
    println!("{}", Value::Object(outcome?));
    Ok(())
}

fn scratch() -> Outcome<PathBuf> {
    let root = std::env::temp_dir().join(format!("covey-bench-{}", std::process::id()));
    fs::create_dir_all(root.join("home"))?;
    if is_root() {
        std::os::unix::fs::chown(root.join("home"), Some(HOST_ID), Some(HOST_ID))?;
    }
    Ok(root)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn measure(root: &Path) -> Outcome<Map<String, Value>> {
    let backend = NativeBackend::new();
    let mut report = Map::new();
    // One of each first: pages, caches and the daemon's image are warm for all that is counted.
    create(&backend, root)?.1.destroy()?;
    bare_create()?;

    let mut pairs = Vec::new();
    for _ in 0..SLOW_RUNS {
        let started = Instant::now();
        let (_, sandbox) = create(&backend, root)?;
        let took = started.elapsed();
        sandbox.destroy()?;
        pairs.push((took, timed(bare_create)?));
    }
    add(&mut report, "create_first_output", 2.3, &pairs);

    let (mut link, sandbox) = create(&backend, root)?;
    let pairs =
        repeat(QUICK_RUNS, || Ok((timed(|| bash(&mut link, "sh -c 'echo hi'"))?, timed(bare_shell)?)))?;
    add(&mut report, "warm_sh", 0.65, &pairs);

    fs::write(root.join("home/block"), vec![b'x'; 4096])?;
    let mut bare = bare_reader(&root.join("home/block"))?;
    let read = json!({"file_path": "/home/agent/block"});
    let pairs =
        repeat(QUICK_RUNS, || Ok((timed(|| call(&mut link, "read", &read))?, timed(|| bare.read_block())?)))?;
    add(&mut report, "read_4k", 0.010, &pairs);

    // Ten processes, one of them spinning, as in the reference.
    bash(
        &mut link,
        "for i in 1 2 3 4 5 6 7 8 9; do sleep 1000 >/dev/null 2>&1 & done; (while :; do :; done) >/dev/null 2>&1 &",
    )?;
    let frozen = Frozen::start()?;
    let mut freezes = Vec::new();
    let mut thaws = Vec::new();
    for _ in 0..SLOW_RUNS {
        let freeze = timed(|| Ok(sandbox.freeze()?))?;
        let floor = timed(|| {
            frozen.thaw()?;
            bare_shell()
        })?;
        freezes.push((freeze, timed(|| frozen.freeze())?));
        let ours = timed(|| {
            sandbox.thaw()?;
            bash(&mut link, "sh -c 'echo hi'")
        })?;
        thaws.push((ours, floor));
    }
    frozen.end()?;
    add(&mut report, "freeze", 0.06, &freezes);
    add(&mut report, "thaw_first_output", 0.9, &thaws);
    sandbox.destroy()?;

    let mut pairs = Vec::new();
    for _ in 0..SLOW_RUNS {
        let (_, lost) = create(&backend, root)?;
        let started = Instant::now();
        lost.destroy()?;
        let (_, next) = create(&backend, root)?;
        let took = started.elapsed();
        next.destroy()?;
        let floor = timed(|| {
            let mut child = Command::new("/bin/sleep").arg("1000").spawn()?;
            child.kill()?;
            child.wait()?;
            bare_create()
        })?;
        pairs.push((took, floor));
    }
    add(&mut report, "loss_first_output", 2.3, &pairs);
    report.insert("as_root".into(), json!(is_root()));
    Ok(report)
}

fn add(report: &mut Map<String, Value>, name: &str, reference_ms: f64, pairs: &[(Duration, Duration)]) {
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 2].as_secs_f64() * 1e3
    };
    let round = |ms: f64| (ms * 1e4).round() / 1e4;
    let ours = median(pairs.iter().map(|pair| pair.0).collect());
    let floor = median(pairs.iter().map(|pair| pair.1).collect());
    let best = pairs.iter().map(|pair| pair.0).min().map_or(0.0, |best| best.as_secs_f64() * 1e3);
    report.insert(format!("{name}_ms"), json!(round(ours)));
    report.insert(format!("{name}_best_ms"), json!(round(best)));
    report.insert(format!("{name}_floor_ms"), json!(round(floor)));
    report.insert(format!("{name}_ratio"), json!(round(ours / floor)));
    report.insert(format!("{name}_reference_ms"), json!(reference_ms));
}

fn timed<T>(work: impl FnOnce() -> Outcome<T>) -> Outcome<Duration> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed())
}

fn repeat<T>(runs: usize, mut work: impl FnMut() -> Outcome<T>) -> Outcome<Vec<T>> {
    (0..runs).map(|_| work()).collect()
}

/// Up to the first output of the first command.
fn create(backend: &NativeBackend, root: &Path) -> Outcome<(Link, Arc<dyn Sandbox>)> {
    let sandbox = backend.start(&SandboxSpec {
        sandbox: SandboxId::from_uuid(uuid::Uuid::now_v7()),
        home: HomeId::from_uuid(uuid::Uuid::now_v7()),
        home_dir: root.join("home"),
        outputs_dir: root.join("outputs"),
        run_dir: root.join("run"),
        host_uid: if is_root() { HOST_ID } else { rustix::process::geteuid().as_raw() },
        host_gid: if is_root() { HOST_ID } else { rustix::process::getegid().as_raw() },
        limits: SandboxLimits::default(),
        orphan_term: Duration::from_secs(60),
    })?;
    let stream = BufReader::new(sandbox.connect(FencingToken(1))?);
    let mut link = Link { stream, finished: None };
    bash(&mut link, "echo hi")?;
    Ok((link, sandbox))
}

fn bash(link: &mut Link, command: &str) -> Outcome<ToolResult> {
    call(link, "bash", &json!({ "command": command }))
}

fn call(link: &mut Link, name: &str, input: &Value) -> Outcome<ToolResult> {
    let step = StepId::from_uuid(uuid::Uuid::now_v7());
    let call = ToolCall { step, name: name.into(), input: input.to_string() };
    let mut bytes = match link.finished.take() {
        Some(step) => frame::encode(&RunnerToSandbox::Acknowledge { step })?,
        None => Vec::new(),
    };
    bytes.extend(frame::encode(&RunnerToSandbox::Call(call))?);
    link.stream.get_mut().write_all(&bytes)?;
    loop {
        match frame::read(&mut link.stream)?.ok_or("the daemon closed the link")? {
            SandboxToRunner::Done { step: of, result } if of == step => {
                link.finished = Some(step);
                if result.is_error {
                    return Err(format!("{name} failed: {result:?}").into());
                }
                return Ok(result);
            }
            _ => {}
        }
    }
}

/// The same namespaces and a shell in them, nothing else.
#[expect(unsafe_code, reason = "the floor is one system call between fork and exec")]
fn bare_create() -> Outcome<()> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "echo hi"]).stdin(Stdio::null());
    let flags = UnshareFlags::NEWUSER
        | UnshareFlags::NEWNS
        | UnshareFlags::NEWPID
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS
        | UnshareFlags::NEWCGROUP;
    // SAFETY: one system call without memory arguments, between fork and exec of a single-threaded copy.
    unsafe {
        command.pre_exec(move || Ok(rustix::thread::unshare_unsafe(flags)?));
    }
    expect_hi(command)
}

fn bare_shell() -> Outcome<()> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "echo hi"]).stdin(Stdio::null());
    expect_hi(command)
}

fn expect_hi(mut command: Command) -> Outcome<()> {
    let output = command.output()?;
    if output.stdout == b"hi\n" { Ok(()) } else { Err(format!("a bare shell answers {output:?}").into()) }
}

/// A thread that answers each byte with 4 KiB of a file, over a socket pair.
struct BareReader {
    socket: UnixStream,
    buffer: Vec<u8>,
}

impl BareReader {
    fn read_block(&mut self) -> Outcome<()> {
        self.socket.write_all(b"x")?;
        Ok(self.socket.read_exact(&mut self.buffer)?)
    }
}

fn bare_reader(path: &Path) -> Outcome<BareReader> {
    let (socket, mut peer) = UnixStream::pair()?;
    let file = fs::File::open(path)?;
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        let mut request = [0];
        while peer.read_exact(&mut request).is_ok() {
            let answered =
                rustix::io::pread(file.as_fd(), &mut buffer, 0).is_ok() && peer.write_all(&buffer).is_ok();
            if !answered {
                return;
            }
        }
    });
    Ok(BareReader { socket, buffer: vec![0; 4096] })
}

/// The same ten processes in a bare cgroup, or stopped by signals where there is none.
struct Frozen {
    cgroup: Option<PathBuf>,
    children: Vec<std::process::Child>,
}

impl Frozen {
    fn start() -> Outcome<Self> {
        let mut children = vec![Command::new("/bin/sh").args(["-c", "while :; do :; done"]).spawn()?];
        for _ in 0..9 {
            children.push(Command::new("/bin/sleep").arg("1000").spawn()?);
        }
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"));
        let cgroup = mount
            .and_then(|line| line.split(' ').nth(1))
            .map(|mount| Path::new(mount).join(format!("covey-bench-{}", std::process::id())));
        let usable = cgroup.filter(|dir| {
            fs::create_dir(dir).is_ok()
                && children
                    .iter()
                    .all(|child| fs::write(dir.join("cgroup.procs"), child.id().to_string()).is_ok())
        });
        let frozen = Self { cgroup: usable, children };
        // Stands still except where it is measured, so that both measure beside one spinning process.
        frozen.freeze()?;
        Ok(frozen)
    }

    fn set(&self, frozen: bool) -> Outcome<()> {
        match &self.cgroup {
            Some(dir) => {
                fs::write(dir.join("cgroup.freeze"), if frozen { "1" } else { "0" })?;
                let wanted = format!("frozen {}", u8::from(frozen));
                while !fs::read_to_string(dir.join("cgroup.events"))?.lines().any(|line| line == wanted) {}
            }
            None => {
                let signal =
                    if frozen { rustix::process::Signal::STOP } else { rustix::process::Signal::CONT };
                for child in &self.children {
                    let pid = rustix::process::Pid::from_raw(child.id() as i32).ok_or("no pid")?;
                    rustix::process::kill_process(pid, signal)?;
                }
                for child in &self.children {
                    let stat = format!("/proc/{}/stat", child.id());
                    while fs::read_to_string(&stat)?.contains(") T ") != frozen {}
                }
            }
        }
        Ok(())
    }

    fn freeze(&self) -> Outcome<()> {
        self.set(true)
    }

    fn thaw(&self) -> Outcome<()> {
        self.set(false)
    }

    fn end(mut self) -> Outcome<()> {
        self.thaw()?;
        for child in &mut self.children {
            child.kill()?;
            child.wait()?;
        }
        if let Some(dir) = &self.cgroup {
            while fs::remove_dir(dir).is_err() {
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }
}
