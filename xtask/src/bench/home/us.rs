//! Ourselves: the release examples that do one step of the bench per process.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use serde_json::Value;

use super::measure::{self, Cost};
use crate::process;

const HOMES: &str = "bench-home";
const MOUNTS: &str = "bench-mount";
/// Names the file of the master key to the example, as to any command.
const KEY_VARIABLE: &str = "COVEY_STORE_KEY_FILE";

/// The built examples.
#[derive(Debug)]
pub(super) struct Us {
    homes: PathBuf,
    mounts: PathBuf,
}

impl Us {
    pub(super) fn build(root: &Path) -> anyhow::Result<Self> {
        Ok(Self { homes: built(root, "covey-home", HOMES)?, mounts: built(root, "covey-mount", MOUNTS)? })
    }

    /// Does one step; returns what it cost and what it said.
    pub(super) fn step(&self, args: &[&OsStr]) -> anyhow::Result<(Cost, Value)> {
        said(self.command().args(args))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.homes);
        // `covey` sets up its heaps in the same way at its start; the examples are only parts of it.
        command.env("MALLOC_ARENA_MAX", "2").env("MALLOC_MMAP_THRESHOLD_", "1048576");
        command.env_remove(KEY_VARIABLE);
        command
    }

    pub(super) fn secure(&self, dir: &Path, store: &Path, cache: &Path) -> anyhow::Result<(Cost, Value)> {
        self.secure_with(dir, store, cache, None)
    }

    /// `key`: the file of the master key; none: without encryption.
    pub(super) fn secure_with(
        &self,
        dir: &Path,
        store: &Path,
        cache: &Path,
        key: Option<&Path>,
    ) -> anyhow::Result<(Cost, Value)> {
        let mut command = self.command();
        if let Some(key) = key {
            command.env(KEY_VARIABLE, key);
        }
        said(command.arg("secure").arg(dir).arg(store).arg(cache))
    }

    pub(super) fn make_key(&self, file: &Path) -> anyhow::Result<()> {
        self.step(&["key".as_ref(), file.as_ref()]).map(drop)
    }

    /// A collection that compresses everything harder.
    pub(super) fn recompress(&self, root: &Value, store: &Path) -> anyhow::Result<(Cost, Value)> {
        let root = root.as_str().context("a secure did not say its root")?;
        self.step(&["recompress".as_ref(), root.as_ref(), store.as_ref()])
    }

    /// A store of so many blocks that no home needs.
    pub(super) fn fill(&self, store: &Path, blocks: u64) -> anyhow::Result<Value> {
        Ok(self.step(&["fill".as_ref(), store.as_ref(), blocks.to_string().as_ref()])?.1)
    }

    /// Materializes from a local cache, which is filled before.
    pub(super) fn share(&self, root: &Value, store: &Path, cache: &Path, dir: &Path) -> anyhow::Result<Cost> {
        let root = root.as_str().context("a secure did not say its root")?;
        let words = format!("{root},{},{}", store.display(), cache.display());
        said(Command::new(&self.mounts).arg("--fill").arg(&words))?;
        let (cost, report) =
            said(Command::new(&self.mounts).arg("--share").arg(format!("{words},{}", dir.display())))?;
        anyhow::ensure!(report["bytes_shared"].as_u64() > Some(0), "nothing was shared: {report}");
        Ok(cost)
    }

    /// The bench of mounted homes; scratch files in `work`.
    pub(super) fn mounts(&self, args: &[&OsStr], work: &Path) -> anyhow::Result<Value> {
        Ok(said(Command::new(&self.mounts).env("TMPDIR", work).args(args))?.1)
    }

    pub(super) fn materialize(
        &self,
        root: &Value,
        dir: &Path,
        store: &Path,
        cache: &Path,
    ) -> anyhow::Result<(Cost, Value)> {
        let root = root.as_str().context("a secure did not say its root")?;
        self.step(&["materialize".as_ref(), root.as_ref(), dir.as_ref(), store.as_ref(), cache.as_ref()])
    }

    pub(super) fn walk(&self, dir: &Path, threads: &str) -> anyhow::Result<(Cost, Value)> {
        self.step(&["walk".as_ref(), dir.as_ref(), threads.as_ref()])
    }

    pub(super) fn write(&self, file: &Path, bytes: u64) -> anyhow::Result<Cost> {
        Ok(self.step(&["write".as_ref(), file.as_ref(), bytes.to_string().as_ref()])?.0)
    }

    pub(super) fn mutate(&self, dir: &Path, seed: u64) -> anyhow::Result<Value> {
        Ok(self.step(&["mutate".as_ref(), dir.as_ref(), seed.to_string().as_ref()])?.1)
    }

    pub(super) fn generate(&self, dir: &Path, entries: u64) -> anyhow::Result<Value> {
        Ok(self.step(&["generate".as_ref(), dir.as_ref(), entries.to_string().as_ref()])?.1)
    }

    /// A hash over everything that the tree is.
    pub(super) fn digest(&self, dir: &Path) -> anyhow::Result<Value> {
        Ok(self.step(&["digest".as_ref(), dir.as_ref()])?.1)
    }
}

fn built(root: &Path, package: &str, example: &str) -> anyhow::Result<PathBuf> {
    process::build_example(root, package, example, super::super::BENCH_LIMIT)
}

/// Runs a program whose last line is a JSON object.
pub(super) fn said(command: &mut Command) -> anyhow::Result<(Cost, Value)> {
    let (cost, text) = measure::run(command)?;
    let line = text.lines().last().unwrap_or_default();
    let said = serde_json::from_str(line).with_context(|| format!("{command:?} said `{line}`"))?;
    Ok((cost, said))
}
