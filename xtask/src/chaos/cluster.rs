//! A server and a runner as processes of their own, with the scripted model, each restartable.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::process;

/// How long building the release binary may take on a fresh machine.
const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
const START_LIMIT: Duration = Duration::from_secs(30);

/// What gets SIGKILL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Victim {
    Server,
    Runner,
    Sandbox,
}

impl Victim {
    pub(super) const ALL: [Self; 3] = [Self::Server, Self::Runner, Self::Sandbox];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Runner => "runner",
            Self::Sandbox => "sandbox",
        }
    }
}

/// Server and runner on one temporary data directory.
#[derive(Debug)]
pub(super) struct Cluster {
    dir: tempfile::TempDir,
    covey: PathBuf,
    script: PathBuf,
    server: Child,
    runner: Child,
    url: String,
    token: String,
}

impl Cluster {
    pub(super) fn start(root: &Path) -> Result<Self> {
        let covey = built(root)?;
        let dir = tempfile::Builder::new().prefix("covey-chaos-").tempdir()?;
        let script = dir.path().join("script.json");
        std::fs::write(&script, super::session::script().to_string())?;
        let (server, url, token) = start_server(&covey, dir.path(), &script)?;
        let runner = start_runner(&covey, dir.path())?;
        Ok(Self { dir, covey, script, server, runner, url, token })
    }

    /// Kills one process; false when there was nothing to kill (no sandbox yet).
    pub(super) fn kill(&mut self, victim: Victim) -> Result<bool> {
        match victim {
            Victim::Server => kill(&mut self.server).map(|()| true),
            Victim::Runner => kill(&mut self.runner).map(|()| true),
            Victim::Sandbox => self.kill_sandboxes(),
        }
    }

    pub(super) fn restart(&mut self, victim: Victim) -> Result<()> {
        match victim {
            Victim::Server => {
                (self.server, self.url, self.token) =
                    start_server(&self.covey, self.dir.path(), &self.script)?;
            }
            Victim::Runner => self.runner = start_runner(&self.covey, self.dir.path())?,
            Victim::Sandbox => {}
        }
        Ok(())
    }

    fn kill_sandboxes(&self) -> Result<bool> {
        kill_recorded(&self.dir.path().join("runner/sandboxes"))
    }

    /// The witness file in a home's working copy; empty before the first call.
    pub(super) fn witness(&self, home: &str) -> Vec<String> {
        let path = self.dir.path().join("runner/homes").join(home).join("files/witness");
        std::fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    pub(super) fn get(&self, path: &str) -> Result<Value> {
        let mut answer = ureq::get(format!("{}{path}", self.url)).header("x-api-key", &self.token).call()?;
        Ok(answer.body_mut().read_json()?)
    }

    pub(super) fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let request = ureq::post(format!("{}{path}", self.url)).header("x-api-key", &self.token);
        Ok(request.send_json(body)?.body_mut().read_json()?)
    }

    pub(super) fn stop(&mut self) -> Result<()> {
        self.kill_sandboxes()?;
        kill(&mut self.runner)?;
        kill(&mut self.server)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in [&mut self.runner, &mut self.server] {
            if let Ok(None) = child.try_wait()
                && let Err(error) = kill(child)
            {
                eprintln!("cannot end a process of the chaos run: {error:#}");
            }
        }
        if let Err(error) = self.kill_sandboxes() {
            eprintln!("cannot end a sandbox of the chaos run: {error:#}");
        }
    }
}

/// The release binary.
pub(super) fn built(root: &Path) -> Result<PathBuf> {
    let mut build = process::cargo(root);
    build.args(["build", "--release", "--quiet", "-p", "covey-cli"]);
    process::run(&mut build, BUILD_LIMIT)?;
    Ok(target_dir(root).join("release/covey"))
}

/// Kills every sandbox that has a record in the directory; false when there was none.
pub(super) fn kill_recorded(sandboxes: &Path) -> Result<bool> {
    let entries = match std::fs::read_dir(sandboxes) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        entries => entries.with_context(|| format!("{}", sandboxes.display()))?,
    };
    let mut killed = false;
    for entry in entries {
        // A record that is being written or removed right now belongs to no running call.
        let Ok(text) = std::fs::read(entry?.path().join("record.json")) else { continue };
        let Ok(record) = serde_json::from_slice::<Value>(&text) else { continue };
        let Some(pid) = record["process"]["pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32)) else {
            continue;
        };
        killed |= kill_process(pid, Signal::KILL).is_ok();
    }
    Ok(killed)
}

pub(super) fn kill(child: &mut Child) -> Result<()> {
    child.kill().context("cannot kill a process of the chaos run")?;
    child.wait().context("cannot wait for a killed process")?;
    Ok(())
}

fn target_dir(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

pub(super) fn log(dir: &Path, name: &str) -> Result<File> {
    Ok(File::options().create(true).append(true).open(dir.join(name))?)
}

fn start_server(covey: &Path, dir: &Path, script: &Path) -> Result<(Child, String, String)> {
    let mut command = Command::new(covey);
    command.args(["server", "--json", "--listen", "127.0.0.1:0", "--data-dir"]).arg(dir);
    command.arg("--model-script").arg(script);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log(dir, "server.log")?);
    announced(command, dir)
}

/// Starts a server and waits until it says where it is: its process, URL and token.
pub(super) fn announced(mut command: Command, dir: &Path) -> Result<(Child, String, String)> {
    let mut child = command.spawn().context("cannot start `covey server`")?;
    let stdout = child.stdout.take().context("the server's output is captured")?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line).map(|_| line);
        if sender.send(read).is_err() {
            eprintln!("the server came up too late");
        }
    });
    let line = receiver.recv_timeout(START_LIMIT);
    let ready: Option<Value> = match &line {
        Ok(Ok(line)) => serde_json::from_str(line).ok(),
        _ => None,
    };
    let field = |name: &str| ready.as_ref().and_then(|r| r[name].as_str()).map(str::to_owned);
    match (field("url"), field("token")) {
        (Some(url), Some(token)) => Ok((child, url, token)),
        _ => {
            kill(&mut child)?;
            let log = std::fs::read_to_string(dir.join("server.log")).unwrap_or_default();
            bail!("`covey server` did not start: {line:?}; its log ends with {:?}", tail(&log))
        }
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().rev().take(5).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}

fn start_runner(covey: &Path, dir: &Path) -> Result<Child> {
    Command::new(covey)
        .args(["runner", "serve", "--data-dir"])
        .arg(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log(dir, "runner.log")?)
        .spawn()
        .context("cannot start `covey runner serve`")
}

/// Waits for a condition, looking every few milliseconds; `None` when the limit passed.
pub(super) fn wait_for<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A message from the user.
pub(crate) fn user_message(text: &str) -> Value {
    json!({"events": [{"type": "user.message", "content": [{"type": "text", "text": text}]}]})
}
