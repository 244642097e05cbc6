//! Runs the program's own checks, in a fresh sandbox: what an agent wrote is never run on the host.

use std::os::unix::fs::chown;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use covey_runner::sandbox::native::NativeBackend;
use covey_runner::sandbox::{Sandbox, SandboxBackend, SandboxSpec};
use covey_types::{FencingToken, HomeId, SandboxId, StepId};
use covey_wire::frame;
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, ToolCall, ToolResult};
use rustix::process::{getegid, geteuid};
use uuid::Uuid;

/// The checks take milliseconds; a program that hangs is red.
const CHECKS_TERM: Duration = Duration::from_secs(60);
/// Owner of the copied project on the host when the demo runs as root.
const ROOT_MODE_UID: u32 = 199_999;

/// Whether `sh test.sh` succeeds on a copy of `project`.
pub(super) fn pass(project: &Path, scratch: &Path) -> Result<bool> {
    let place = tempfile::Builder::new().prefix("checks-").tempdir_in(scratch)?;
    let home = place.path().join("home");
    copy_project(project, &home)?;
    let (host_uid, host_gid) = match geteuid().is_root() {
        true => (ROOT_MODE_UID, ROOT_MODE_UID),
        false => (geteuid().as_raw(), getegid().as_raw()),
    };
    if geteuid().is_root() {
        give(&home, host_uid)?;
    }
    let spec = SandboxSpec {
        sandbox: SandboxId::from_uuid(Uuid::now_v7()),
        home: HomeId::from_uuid(Uuid::now_v7()),
        home_dir: home,
        outputs_dir: place.path().join("outputs"),
        run_dir: place.path().join("run"),
        host_uid,
        host_gid,
        limits: covey_wire::runner::SandboxLimits::default(),
        orphan_term: CHECKS_TERM,
    };
    let sandbox = NativeBackend::new().start(&spec)?;
    let result = call(sandbox.as_ref());
    sandbox.destroy().context("cannot end the sandbox of the checks")?;
    let result = result?;
    Ok(result.exit_code == Some(0) && !result.is_error)
}

fn call(sandbox: &dyn Sandbox) -> Result<ToolResult> {
    let mut stream = sandbox.connect(FencingToken(1))?;
    stream.set_read_timeout(Some(CHECKS_TERM))?;
    let step = StepId::from_uuid(Uuid::now_v7());
    let input = r#"{"command":"sh test.sh"}"#.to_owned();
    frame::write(&mut stream, &RunnerToSandbox::Call(ToolCall { step, name: "bash".to_owned(), input }))?;
    loop {
        match frame::read(&mut stream)? {
            Some(SandboxToRunner::Done { result, .. }) => return Ok(result),
            Some(_) => {}
            None => bail!("the sandbox of the checks went away"),
        }
    }
}

fn copy_project(source: &Path, target: &Path) -> Result<()> {
    std::fs::create_dir_all(target)?;
    for entry in std::fs::read_dir(source).with_context(|| format!("{}", source.display()))? {
        let entry = entry?;
        let (from, to) = (entry.path(), target.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy_project(&from, &to)?;
        } else if kind.is_file() {
            std::fs::copy(&from, &to)?;
        }
    }
    Ok(())
}

fn give(dir: &Path, uid: u32) -> Result<()> {
    chown(dir, Some(uid), Some(uid))?;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            give(&entry.path(), uid)?;
        } else {
            chown(entry.path(), Some(uid), Some(uid))?;
        }
    }
    Ok(())
}
