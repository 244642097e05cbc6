//! A `covey up` of the demo's own: a child process that can be killed, and what it leaves on disk.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use covey_home::{Excludes, NoProgress, PackStore, SecureRequest};
use covey_runner::sandbox::SandboxBackend as _;
use covey_runner::sandbox::native::NativeBackend;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::runtime::Handle;

use crate::client::{Client, ClientError};
use crate::global::ClientFile;

/// How long a start may take: recovery included, it is well below a second on an idle machine.
const START_TERM: Duration = Duration::from_secs(30);

/// The API as a person's script would use it: one question, one answer.
#[derive(Debug)]
pub(super) struct Api {
    runtime: Handle,
    client: Client,
}

impl Api {
    pub(super) fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.runtime.block_on(self.client.get(path))
    }

    pub(super) fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.runtime.block_on(self.client.post(path, body))
    }

    pub(super) fn list(&self, path: &str) -> Result<Vec<Value>, ClientError> {
        self.runtime.block_on(self.client.list(path, None))
    }

    /// Takes a directory as the home of an agent; gives the home's id.
    pub(super) fn import(&self, store: &Path, agent: &str, dir: &Path) -> Result<String> {
        let homes = self.list("/v1/covey/homes")?;
        let home = homes.iter().find(|home| home["agent_id"] == agent).context("an agent has a home")?;
        let text = |name: &str| home[name].as_str().with_context(|| format!("a home has `{name}`"));
        let (id, org) = (text("id")?, text("org_id")?);
        self.runtime.block_on(import_directory(&self.client, store, org, id, dir))?;
        Ok(id.to_owned())
    }
}

/// One data directory and the process that serves it now.
#[derive(Debug)]
pub(super) struct World {
    data_dir: PathBuf,
    model_url: String,
    child: Child,
    runtime: Handle,
    pub(super) api: Api,
}

impl World {
    pub(super) fn start(data_dir: &Path, model_url: &str, runtime: &Handle) -> Result<Self> {
        let (child, server) = launch(data_dir, model_url)?;
        let api = Api { runtime: runtime.clone(), client: Client::of(server)? };
        let (data_dir, model_url, runtime) = (data_dir.to_owned(), model_url.to_owned(), runtime.clone());
        Ok(Self { data_dir, model_url, child, runtime, api })
    }

    /// Kills server and runner, which are one process, without a warning.
    pub(super) fn kill_server(&mut self) -> Result<()> {
        self.child.kill().context("cannot kill the server")?;
        self.child.wait().context("cannot wait for the killed server")?;
        Ok(())
    }

    pub(super) fn start_again(&mut self) -> Result<()> {
        let (child, server) = launch(&self.data_dir, &self.model_url)?;
        self.child = child;
        self.api = Api { runtime: self.runtime.clone(), client: Client::of(server)? };
        Ok(())
    }

    /// Ends it politely.
    pub(super) fn stop(&mut self) -> Result<()> {
        kill_process(pid(&self.child)?, Signal::TERM).context("cannot stop the server")?;
        let deadline = Instant::now() + START_TERM;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                return self.kill_server();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Kills the first process of every sandbox of this world: the kernel then ends the rest.
    pub(super) fn kill_sandboxes(&self) -> Result<usize> {
        // Not through the backend: reading the records with it also sweeps, which is the living runner's business.
        let mut killed = 0;
        for entry in std::fs::read_dir(self.runner_dir().join("sandboxes"))? {
            let Ok(text) = std::fs::read(entry?.path().join("record.json")) else { continue };
            let record: Value = serde_json::from_slice(&text).context("a sandbox's record")?;
            let pid = record["process"]["pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32));
            if let Some(pid) = pid
                && kill_process(pid, Signal::KILL).is_ok()
            {
                killed += 1;
            }
        }
        Ok(killed)
    }

    /// Takes away what a lost host takes with it: working copies, caches, sandboxes. Server and runner must be
    /// dead. It is moved where nothing looks and deleted with the demo's directory: a file system that has just
    /// freed ten thousand inodes creates new ones ten times slower for some seconds (ext4), which no new host does.
    pub(super) fn lose_host(&self) -> Result<()> {
        for (_, sandbox) in NativeBackend::new().recorded(&self.runner_dir().join("sandboxes"))? {
            sandbox.destroy()?;
        }
        let lost = self.data_dir.with_extension("lost-host");
        std::fs::rename(self.runner_dir(), &lost)
            .with_context(|| format!("cannot take {} away", lost.display()))
    }

    pub(super) fn runner_dir(&self) -> PathBuf {
        self.data_dir.join("runner")
    }

    pub(super) fn store_dir(&self) -> PathBuf {
        self.data_dir.join("store")
    }

    /// The working copy of a home, as the runner keeps it.
    pub(super) fn working_copy(&self, home: &str) -> PathBuf {
        self.runner_dir().join("homes").join(home).join("files")
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // On an error path the child still runs; its sandboxes end with it or are ended here.
        if let Ok(None) = self.child.try_wait()
            && let Err(error) = self.kill_server()
        {
            eprintln!("covey demo: {error:#}");
        }
        let sandboxes = NativeBackend::new().recorded(&self.runner_dir().join("sandboxes"));
        for (_, sandbox) in sandboxes.unwrap_or_default() {
            if let Err(error) = sandbox.destroy() {
                eprintln!("covey demo: a sandbox is left: {error}");
            }
        }
    }
}

fn pid(child: &Child) -> Result<Pid> {
    Pid::from_raw(child.id().cast_signed()).context("a process without an id")
}

fn launch(data_dir: &Path, model_url: &str) -> Result<(Child, ClientFile)> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(data_dir.with_extension("log"))
        .context("cannot open the server's log")?;
    let mut child = Command::new(program)
        .args(["up", "--json", "--listen", "127.0.0.1:0", "--model-url", model_url, "--data-dir"])
        .arg(data_dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .context("cannot start `covey up`")?;
    let stdout = child.stdout.take().context("the server's output is captured")?;
    match read_ready(stdout) {
        Ok((url, token)) => {
            Ok((child, ClientFile { url, token, store: None, org: None, excludes: None, database: None }))
        }
        Err(error) => {
            if child.try_wait()?.is_none() {
                child.kill()?;
            }
            let status = child.wait()?;
            bail!(
                "`covey up` did not start ({status}): {error:#}; see {}",
                data_dir.with_extension("log").display()
            )
        }
    }
}

/// Waits for the one line that `covey up --json` prints when it listens.
fn read_ready(stdout: ChildStdout) -> Result<(String, String)> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        // The receiver is gone when the term has passed; there is nobody left to tell.
        if sender.send(read.map(|_| line)).is_err() {
            eprintln!("covey demo: the server came up too late");
        }
    });
    let line = receiver.recv_timeout(START_TERM).context("it did not say where it listens")??;
    let ready: Value = serde_json::from_str(&line).with_context(|| format!("it said {line:?}"))?;
    let field = |name: &str| {
        ready[name].as_str().map(str::to_owned).with_context(|| format!("no `{name}` in {line}"))
    };
    Ok((field("url")?, field("token")?))
}

/// Secures a directory into the store and makes the result the home's current snapshot.
async fn import_directory(client: &Client, store: &Path, org: &str, home: &str, dir: &Path) -> Result<()> {
    let store = PackStore::open_directory_with(store, org, crate::store_key::from_setting()?.as_ref())?;
    let secured = covey_home::secure(&SecureRequest {
        dir,
        store: &store,
        stat_cache: None,
        excludes: &Excludes::from_setting(None),
        previous: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 0,
    })?;
    let body = json!({"root": secured.root, "files": secured.files, "bytes": secured.bytes});
    client.post(&format!("/v1/covey/homes/{home}/import"), &body).await?;
    Ok(())
}

/// Removes a directory and the trees in it, side by side.
pub(super) fn remove_trees(dir: &Path) -> Result<()> {
    let mut trees = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        trees.push(entry?.path());
    }
    std::thread::scope(|scope| {
        let removals: Vec<_> = trees.iter().map(|tree| scope.spawn(|| remove_tree(tree))).collect();
        removals.into_iter().try_for_each(|removal| match removal.join() {
            Ok(removed) => removed,
            Err(_) => bail!("removing the demo's directory panicked"),
        })
    })?;
    remove_tree(dir)
}

/// Removes a tree of ours, also directories without permissions.
fn remove_tree(dir: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let metadata = match std::fs::symlink_metadata(dir) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).with_context(|| format!("cannot look at {}", dir.display())),
    };
    if metadata.is_dir() {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))?;
        for entry in std::fs::read_dir(dir)? {
            remove_tree(&entry?.path())?;
        }
        std::fs::remove_dir(dir).with_context(|| format!("cannot remove {}", dir.display()))
    } else {
        std::fs::remove_file(dir).with_context(|| format!("cannot remove {}", dir.display()))
    }
}
