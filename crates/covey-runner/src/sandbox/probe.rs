//! What this host can do for sandboxes, found out by doing it: for `covey doctor`.
//!
//! What stays true: every answer is the outcome of an attempt, a refusal carries its remedy, and nothing is left behind.
//! What does not belong here: how the answers are printed.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use covey_types::{ByteCount, FencingToken, HomeId, SandboxId, StepId};
use covey_wire::frame;
use covey_wire::runner::SandboxLimits;
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, ToolCall, ToolContent, ToolResult};
use serde::Serialize;

use super::native::{NativeBackend, NativeSandbox};
use super::{Sandbox, SandboxSpec, StartError};

/// Less free space than this ends the first larger build.
const FREE_BYTES_MIN: u64 = 1 << 30;
/// For one command inside.
const ANSWER_DEADLINE: Duration = Duration::from_secs(30);

/// One thing that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was tried, one word or two.
    pub name: &'static str,
    /// Whether it worked.
    pub ok: bool,
    /// Whether sandboxes do not start without it.
    pub required: bool,
    /// What was seen.
    pub detail: String,
    /// What to change; none when it worked.
    pub remedy: Option<String>,
}

impl Finding {
    fn good(name: &'static str, required: bool, detail: impl Into<String>) -> Self {
        Self { name, ok: true, required, detail: detail.into(), remedy: None }
    }

    fn bad(name: &'static str, required: bool, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, ok: false, required, detail: detail.into(), remedy: Some(remedy.into()) }
    }

    fn of(name: &'static str, outcome: Result<String, String>, remedy: &str) -> Self {
        match outcome {
            Ok(detail) => Self::good(name, true, detail),
            Err(detail) => Self::bad(name, true, detail, remedy),
        }
    }
}

/// Starts a sandbox below `dir` (made if absent, otherwise only a fresh subdirectory is touched), runs commands in it,
/// freezes and destroys it. Blocks for some milliseconds on a healthy host. `host_uid` and `host_gid` as in
/// [`SandboxSpec`].
pub fn probe(dir: &Path, host_uid: u32, host_gid: u32) -> Vec<Finding> {
    let backend = NativeBackend::new();
    let mut findings = vec![disk(dir)];
    let trial = SandboxId::from_uuid(uuid::Uuid::now_v7());
    let root = dir.join(format!("doctor-{trial}"));
    match prepare(&root, host_uid, host_gid) {
        Ok(home_dir) => {
            let spec = SandboxSpec {
                sandbox: trial,
                home: HomeId::from_uuid(uuid::Uuid::now_v7()),
                home_dir,
                outputs_dir: root.join("outputs"),
                run_dir: root.join("run"),
                host_uid,
                host_gid,
                limits: SandboxLimits::default(),
                orphan_term: ANSWER_DEADLINE,
            };
            let started = Instant::now();
            match backend.start_native(&spec) {
                Ok(sandbox) => {
                    inspect(&sandbox, started, &mut findings);
                    if let Err(error) = sandbox.destroy() {
                        findings.push(Finding::bad(
                            "destroy",
                            true,
                            error.to_string(),
                            "report this as a bug",
                        ));
                    }
                }
                Err(StartError::Isolation { what, remedy }) => {
                    findings.push(Finding::bad("isolation", true, what, remedy));
                }
                Err(StartError::Failed(why)) => {
                    findings.push(Finding::bad(
                        "isolation",
                        true,
                        why,
                        "see the message; nothing of the host refused it",
                    ));
                }
            }
        }
        Err(error) => {
            let remedy = "let the runner's user write its data directory";
            findings.push(Finding::bad(
                "data directory",
                true,
                format!("{}: {error}", root.display()),
                remedy,
            ));
        }
    }
    let cgroups = backend.cgroup_host();
    let detail = cgroups.describe();
    findings.push(if cgroups.has_limits() {
        Finding::good("cgroups", false, detail)
    } else {
        let remedy = "for limits on whole sandboxes run the runner as root, or under systemd with Delegate=yes \
                      (as a user: systemd-run --user --scope -p Delegate=yes covey up)";
        Finding::bad("cgroups", false, detail, remedy)
    });
    if let Err(error) = fs::remove_dir_all(&root)
        && error.kind() != io::ErrorKind::NotFound
    {
        let detail = format!("{} stays: {error}", root.display());
        findings.push(Finding::bad("clean up", false, detail, "remove the directory by hand"));
    }
    findings
}

fn prepare(root: &Path, host_uid: u32, host_gid: u32) -> io::Result<std::path::PathBuf> {
    let home = root.join("home");
    fs::create_dir_all(&home)?;
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&home, Some(host_uid), Some(host_gid))?;
    }
    Ok(home)
}

fn disk(dir: &Path) -> Finding {
    let existing = dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(existing) {
        Ok(disk) => {
            let free = disk.f_bavail.saturating_mul(disk.f_frsize);
            let detail = format!("{} free at {}", ByteCount(free), existing.display());
            if free >= FREE_BYTES_MIN {
                Finding::good("disk", false, detail)
            } else {
                Finding::bad("disk", false, detail, "free some space, or set COVEY_DATA_DIR to a larger disk")
            }
        }
        Err(error) => Finding::bad("disk", false, error.to_string(), "make the data directory readable"),
    }
}

fn inspect(sandbox: &NativeSandbox, started: Instant, findings: &mut Vec<Finding>) {
    let first = run(sandbox, "echo ready");
    let elapsed = started.elapsed();
    findings.push(Finding::of(
        "isolation",
        first.and_then(|text| match text.as_str() {
            "ready\n" => Ok(format!(
                "namespaces, root file system, first command after {:.1} ms",
                elapsed.as_secs_f64() * 1e3
            )),
            other => Err(format!("a command answers `{}`", other.trim_end())),
        }),
        "the sandbox starts, but commands do not: bash must be installed on the host",
    ));
    findings.push(Finding::of(
        "confinement",
        run(sandbox, "grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status | tr -s '\\t\\n' '  '")
            .and_then(|text| {
                let is_right = text.contains("NoNewPrivs: 1")
                    && text.contains("Seccomp: 2")
                    && text.contains("CapEff: 0000000000000000");
                if is_right {
                    Ok("no capability, no new privileges, system call filter".into())
                } else {
                    Err(text)
                }
            }),
        "use a kernel built with seccomp filters",
    ));
    findings.push(Finding::of(
        "network",
        run(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' \\n'").and_then(|text| {
            match text.as_str() {
                "lo" => Ok("empty but for its own loopback".into()),
                other => Err(format!("there are interfaces: {other}")),
            }
        }),
        "use a kernel built with network namespaces",
    ));
    findings.push(match sandbox.landlock_abi() {
        0 => Finding::bad(
            "landlock",
            false,
            "not in this kernel; the mounts hold without it",
            "use Linux 5.13 or newer with `landlock` in its lsm= list",
        ),
        abi => Finding::good("landlock", false, format!("version {abi}")),
    });
    let frozen = Instant::now();
    let outcome = sandbox.freeze().and_then(|()| {
        let elapsed = frozen.elapsed();
        sandbox.thaw().map(|()| format!("all processes stopped after {:.2} ms", elapsed.as_secs_f64() * 1e3))
    });
    let outcome = outcome.map_err(|error| error.to_string());
    findings.push(Finding::of("freeze", outcome, "see the message; sandboxes cannot be parked"));
}

/// Runs one command; an answer of any other kind is an error text.
fn run(sandbox: &NativeSandbox, command: &str) -> Result<String, String> {
    let result = call(sandbox, command).map_err(|error| error.to_string())?;
    match (result.is_error, result.content.into_iter().next()) {
        (false, Some(ToolContent::Text { text })) => Ok(text),
        (_, Some(ToolContent::Text { text })) => Err(text),
        _ => Err("the command answers no text".into()),
    }
}

fn call(sandbox: &NativeSandbox, command: &str) -> io::Result<ToolResult> {
    let mut stream = sandbox.connect(FencingToken(0)).map_err(io::Error::other)?;
    stream.set_read_timeout(Some(ANSWER_DEADLINE))?;
    let step = StepId::from_uuid(uuid::Uuid::now_v7());
    let input = serde_json::json!({ "command": command }).to_string();
    let question = RunnerToSandbox::Call(ToolCall { step, name: "bash".into(), input });
    frame::write(&mut stream, &question).map_err(io::Error::other)?;
    let deadline = Instant::now() + ANSWER_DEADLINE;
    while Instant::now() < deadline {
        match frame::read(&mut stream).map_err(io::Error::other)? {
            Some(SandboxToRunner::Done { step: of, result }) if of == step => {
                frame::write(&mut stream, &RunnerToSandbox::Acknowledge { step })
                    .map_err(io::Error::other)?;
                return Ok(result);
            }
            Some(_) => {}
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}
