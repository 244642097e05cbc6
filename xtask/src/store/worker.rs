//! The processes that die: the example `store-worker` of `covey-home`, two at a time on one store.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::process;

const EXAMPLE: &str = "store-worker";
/// A build of the example, cold.
const BUILD_LIMIT: Duration = Duration::from_secs(3600);
const CHECK_LIMIT: Duration = Duration::from_secs(300);
/// A worker that is not ready by then is stuck.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// What a worker does.
pub(super) const ROLES: [&str; 5] = ["secure-one", "secure-two", "collect", "materialize", "backup"];

/// The built example.
#[derive(Debug)]
pub(super) struct Program(PathBuf);

/// What a worker has said.
#[derive(Debug, Default)]
struct Said {
    is_ready: bool,
    is_busy: bool,
    /// The newest generation of each home that it has acknowledged.
    published: BTreeMap<String, u64>,
}

/// A worker that lives.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) role: &'static str,
    child: Child,
    said: Arc<Mutex<Said>>,
    reader: Option<JoinHandle<()>>,
}

impl Program {
    /// The given one, or one that is built now.
    pub(super) fn find(root: &Path, given: Option<&Path>) -> anyhow::Result<Self> {
        match given {
            Some(given) => Ok(Self(given.to_owned())),
            None => Ok(Self(process::build_example(root, "covey-home", EXAMPLE, BUILD_LIMIT)?)),
        }
    }

    /// Starts a worker and waits until it has opened the store.
    pub(super) fn work(&self, dir: &Path, role: &'static str, seed: u64) -> anyhow::Result<Worker> {
        let mut command = Command::new(&self.0);
        command.arg("work").arg(dir).args([role, &seed.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("{EXAMPLE} does not start"))?;
        let lines = BufReader::new(child.stdout.take().context("stdout is not a pipe")?).lines();
        let said = Arc::new(Mutex::new(Said::default()));
        let heard = Arc::clone(&said);
        let reader = std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut said = heard.lock().unwrap_or_else(PoisonError::into_inner);
                said.is_ready = true;
                said.is_busy = line == "busy";
                if let Some((home, generation)) =
                    line.strip_prefix("published ").and_then(|rest| rest.split_once('='))
                    && let Ok(generation) = generation.parse()
                {
                    said.published.insert(home.to_owned(), generation);
                }
            }
        });
        let mut worker = Worker { role, child, said, reader: Some(reader) };
        let began = Instant::now();
        while !worker.said().is_ready {
            if let Some(status) = worker.child.try_wait()? {
                bail!("a worker ({role}) ended before it was killed: {status}");
            }
            anyhow::ensure!(began.elapsed() < READY_LIMIT, "a worker ({role}) does not open the store");
            std::thread::yield_now();
        }
        Ok(worker)
    }

    /// Checks the store; `acknowledged` must be there.
    pub(super) fn check(&self, dir: &Path, acknowledged: &BTreeMap<String, u64>) -> anyhow::Result<()> {
        let mut command = Command::new(&self.0);
        command.arg("check").arg(dir);
        command.args(acknowledged.iter().map(|(home, generation)| format!("{home}={generation}")));
        process::output_of_success(&mut command, CHECK_LIMIT).map(drop)
    }
}

impl Worker {
    fn said(&self) -> std::sync::MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it has published; tells how long that took.
    pub(super) fn first_publish(&self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        while self.published().is_empty() {
            anyhow::ensure!(began.elapsed() < READY_LIMIT, "a worker ({}) does not publish", self.role);
            std::thread::yield_now();
        }
        Ok(began.elapsed())
    }

    /// What it has acknowledged so far.
    pub(super) fn published(&self) -> BTreeMap<String, u64> {
        self.said().published.clone()
    }

    /// Kills it with SIGKILL; tells whether that met it at work, and what it had acknowledged in the end.
    pub(super) fn kill(mut self) -> anyhow::Result<(bool, BTreeMap<String, u64>)> {
        if let Some(status) = self.child.try_wait()? {
            bail!("a worker ({}) ended by itself: {status}", self.role);
        }
        let was_busy = self.said().is_busy;
        self.child.kill()?;
        self.child.wait()?;
        if let Some(reader) = self.reader.take() {
            reader.join().map_err(|_| anyhow::anyhow!("reading what a worker says panicked"))?;
        }
        let published = self.published();
        Ok((was_busy, published))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Only after an error; a worker works until it is killed.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Keeps the newest generation of each home.
pub(super) fn add_newest(to: &mut BTreeMap<String, u64>, from: BTreeMap<String, u64>) {
    for (home, generation) in from {
        let newest = to.entry(home).or_default();
        *newest = generation.max(*newest);
    }
}
