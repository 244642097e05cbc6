//! The official SDKs against a running `covey up` with the scripted model.
//!
//! What the tests need is installed once into `.test-env/` from the package registries, at the versions that
//! the lock files name, and kept until a lock file changes.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::Deserialize;

use super::{Ground, Outcome, installed, product};
use crate::metadata::Metadata;
use crate::process;

/// What the model says in both suites.
const SCRIPT: &str = "tests/sdk/script.json";
const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
const INSTALL_LIMIT: Duration = Duration::from_secs(10 * 60);
const TESTS_LIMIT: Duration = Duration::from_secs(10 * 60);
const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);

pub(super) fn python(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    installed::require("python3", "python3 python3-venv")?;
    let tests = ground.root.join("tests/sdk/python");
    let requirements = tests.join("requirements.txt");
    let place = ground.tools.join("python");
    once(&place, &[&requirements], || {
        let made = process::run(Command::new("python3").args(["-m", "venv"]).arg(&place), INSTALL_LIMIT);
        made.context("no virtual environment; on Debian: `apt-get install python3-venv`")?;
        let mut pip = Command::new(place.join("bin/python"));
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"]);
        process::run(pip.arg(&requirements), INSTALL_LIMIT)
    })?;
    let unittest = |files: &[&str]| {
        let mut command = Command::new(place.join("bin/python"));
        command.args(["-m", "unittest", "--verbose"]).args(files).current_dir(&tests);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command
    };
    judge_the_scripted_model(ground, &mut unittest(&["test_scripted_model.py", "test_scripted_wires.py"]))?;
    let covey = product::built_covey(ground)?;
    process::run(unittest(&["test_approvals.py"]).env("COVEY_BIN", covey), TESTS_LIMIT)?;
    Up::start(ground)?.test(&mut unittest(&["test_managed_agents.py"]))
}

/// The scripted model must be what the SDKs take for real ones; else the other tests prove nothing.
fn judge_the_scripted_model(ground: &Ground<'_>, tests: &mut Command) -> anyhow::Result<()> {
    let mut build = process::cargo(ground.root);
    // The whole workspace, so that the features and so the built dependencies are those of the other stages.
    process::run(build.args(["build", "--locked", "--workspace", "--examples"]), BUILD_LIMIT)?;
    let program = Metadata::read(ground.root)?.target_directory.join("debug/examples/scripted_model");
    let mut command = Command::new(program);
    command.arg(ground.root.join(SCRIPT)).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().context("the scripted model does not start")?;
    let mut line = String::new();
    let stdout = child.stdout.take().context("stdout is not a pipe")?;
    // Its first line comes when it listens; an end before that is an empty line here.
    BufReader::new(stdout).read_line(&mut line)?;
    let result = match serde_json::from_str::<ModelPlace>(&line) {
        Ok(model) => process::run(tests.env("COVEY_MODEL_URL", model.base_url), TESTS_LIMIT),
        Err(error) => Err(error).with_context(|| format!("the scripted model said `{line}`")),
    };
    // It ends when its stdin does.
    drop(child.stdin.take());
    process::wait(&mut child, STOP_LIMIT).context("the scripted model does not stop")?;
    result
}

pub(super) fn typescript(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    installed::require("npm", "npm")?;
    installed::require("node", "nodejs")?;
    let tests = ground.root.join("tests/sdk/typescript");
    let place = ground.tools.join("typescript");
    let (manifest, lock) = (tests.join("package.json"), tests.join("package-lock.json"));
    once(&place, &[&manifest, &lock], || {
        fs::create_dir_all(&place)?;
        for file in [&manifest, &lock] {
            let name = file.file_name().context("a file without a name")?;
            fs::copy(file, place.join(name)).with_context(|| format!("copying {}", file.display()))?;
        }
        let mut npm = Command::new("npm");
        process::run(npm.args(["ci", "--no-audit", "--no-fund"]).current_dir(&place), INSTALL_LIMIT)
    })?;
    // Sources are copied each time: they import from the `node_modules` beside them.
    for entry in fs::read_dir(&tests)? {
        let path = entry?.path();
        if path.is_file() {
            fs::copy(&path, place.join(path.file_name().context("a file without a name")?))?;
        }
    }
    let up = Up::start(ground)?;
    let mut command = Command::new("npm");
    up.test(command.args(["test"]).current_dir(&place))
}

/// Makes `place` anew unless it was made from exactly these files.
fn once(place: &Path, from: &[&PathBuf], make: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut wanted = String::new();
    for file in from {
        wanted += &fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))?;
    }
    let mark = place.join("made-from");
    if fs::read_to_string(&mark).is_ok_and(|made| made == wanted) {
        return Ok(());
    }
    if place.exists() {
        fs::remove_dir_all(place)?;
    }
    make()?;
    // Written last: a half-made environment has no mark and is made again.
    fs::write(mark, wanted)?;
    Ok(())
}

/// What the scripted model says when it listens.
#[derive(Debug, Deserialize)]
struct ModelPlace {
    base_url: String,
}

/// What `covey up` writes for its clients.
#[derive(Debug, Deserialize)]
struct ClientFile {
    url: String,
    token: String,
}

/// A running `covey up`; killed when dropped.
struct Up {
    child: Child,
    client: ClientFile,
    _data: tempfile::TempDir,
}

impl Up {
    fn start(ground: &Ground<'_>) -> anyhow::Result<Self> {
        let script = ground.root.join(SCRIPT);
        let data = tempfile::Builder::new().prefix("covey-sdk-").tempdir()?;
        let mut command = Command::new(product::built_covey(ground)?);
        command.args(["up", "--listen", "127.0.0.1:0", "--data-dir"]).arg(data.path());
        command.arg("--model-script").arg(script).stdin(Stdio::null());
        let mut child = command.spawn().context("`covey up` does not start")?;
        match wait_for_client_file(&mut child, &data.path().join("client.json")) {
            Ok(client) => Ok(Self { child, client, _data: data }),
            Err(error) => {
                process::stop(&mut child, STOP_LIMIT)?;
                Err(error)
            }
        }
    }

    /// Runs the tests, then stops the server; both must go well.
    fn test(mut self, command: &mut Command) -> anyhow::Result<Outcome> {
        let Self { child, client, .. } = &mut self;
        command.env("ANTHROPIC_BASE_URL", &client.url).env("ANTHROPIC_API_KEY", &client.token);
        command.env("COVEY_URL", &client.url).env("COVEY_TOKEN", &client.token);
        // What a developer's own shell may have set would win over the key.
        command.env_remove("ANTHROPIC_AUTH_TOKEN").env_remove("ANTHROPIC_PROFILE");
        let result = process::run(command, TESTS_LIMIT);
        let status = process::stop(child, STOP_LIMIT).context("`covey up` does not stop")?;
        result?;
        if !status.success() {
            bail!("`covey up` ended with {status}");
        }
        Ok(Outcome::Passed)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // Ended already in every good case; else it must not outlive the tests.
        if let Ok(None) = self.child.try_wait() {
            process::stop(&mut self.child, STOP_LIMIT).ok();
        }
    }
}

fn wait_for_client_file(child: &mut Child, file: &Path) -> anyhow::Result<ClientFile> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            bail!("`covey up` ended with {status} before it listened");
        }
        // Written to another name and moved, so it is either absent or whole.
        if let Ok(text) = fs::read_to_string(file) {
            return serde_json::from_str(&text).with_context(|| format!("{}", file.display()));
        }
        if started.elapsed() > START_LIMIT {
            bail!("`covey up` wrote no {} within {} s", file.display(), START_LIMIT.as_secs());
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_is_made_once_per_lock_file_and_again_after_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let (place, lock) = (dir.path().join("env"), dir.path().join("lock"));
        fs::write(&lock, "1").unwrap();
        let made = std::cell::Cell::new(0);
        let make = |good: bool| {
            once(&place, &[&lock], || {
                made.set(made.get() + 1);
                fs::create_dir_all(&place)?;
                if good { Ok(()) } else { bail!("no network") }
            })
        };
        assert!(make(false).is_err());
        make(true).unwrap();
        make(true).unwrap();
        assert_eq!(made.get(), 2);
        fs::write(&lock, "2").unwrap();
        make(true).unwrap();
        assert_eq!(made.get(), 3);
    }
}
