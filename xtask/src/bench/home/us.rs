//! Ourselves: the release example that does one step of the bench per process.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use serde_json::Value;

use super::measure::{self, Cost};
use crate::process;

const EXAMPLE: &str = "bench-home";

/// The built example.
#[derive(Debug)]
pub(super) struct Us {
    program: PathBuf,
}

impl Us {
    pub(super) fn build(root: &Path) -> anyhow::Result<Self> {
        let program = process::build_example(root, "covey-home", EXAMPLE, super::super::BENCH_LIMIT)?;
        Ok(Self { program })
    }

    /// Does one step; returns what it cost and what it said.
    pub(super) fn step(&self, args: &[&std::ffi::OsStr]) -> anyhow::Result<(Cost, Value)> {
        let (cost, text) = measure::run(Command::new(&self.program).args(args))?;
        let line = text.lines().last().unwrap_or_default();
        let said = serde_json::from_str(line).with_context(|| format!("{EXAMPLE} said `{line}`"))?;
        Ok((cost, said))
    }

    pub(super) fn secure(&self, dir: &Path, store: &Path, cache: &Path) -> anyhow::Result<(Cost, Value)> {
        self.step(&["secure".as_ref(), dir.as_ref(), store.as_ref(), cache.as_ref()])
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
