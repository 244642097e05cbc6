//! `cargo xtask bench home`: what the home store costs on a given home, beside the tools that are installed.
//!
//! What stays true: everything is a process of its own, measured from outside; we and the others do the same work
//! in turn in one run, and what counts is the median; a tool that is not installed is listed as absent and never
//! counts as beaten; what could not be shown is `null` and not `true`; the given home is only read. What does not
//! belong here: how a home is secured.

mod claim;
pub(super) mod measure;
mod peers;
mod place;
mod rows;
mod scale;
mod us;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};

use claim::Row;
use us::Us;

/// What to measure on.
#[derive(Debug, Args)]
pub(crate) struct HomeArgs {
    /// The home; it is copied and only read.
    #[arg(long)]
    home: Option<PathBuf>,
    /// Where stores, copies and images go, several times the size of the home; next to the home if not given.
    #[arg(long)]
    work: Option<PathBuf>,
    /// Print one JSON object as the last line.
    #[arg(long)]
    json: bool,
    /// How often each step is done; the median counts.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Measure only ourselves and the floors.
    #[arg(long)]
    no_peers: bool,
    /// Instead: peak memory on a generated tree of so many entries; may be given several times.
    #[arg(long, value_name = "ENTRIES")]
    scale: Vec<u64>,
}

pub(crate) fn run(root: &Path, args: &HomeArgs) -> anyhow::Result<()> {
    anyhow::ensure!(args.runs > 0, "--runs must be at least 1");
    let work = match (&args.work, &args.home) {
        (Some(work), _) => work.clone(),
        (None, Some(home)) => {
            let home = home.canonicalize().with_context(|| format!("{}", home.display()))?;
            home.parent().context("the home has no parent directory; say --work")?.join("covey-bench")
        }
        (None, None) => anyhow::bail!("say --home DIR, or --scale ENTRIES with --work DIR"),
    };
    std::fs::create_dir_all(&work).with_context(|| format!("{} cannot be made", work.display()))?;
    let us = Us::build(root)?;
    let rows = if args.scale.is_empty() {
        let home = args.home.as_deref().context("say --home DIR")?.canonicalize()?;
        rows::measure(&us, &home, &work, args.runs, !args.no_peers)?
    } else {
        scale::measure(&us, &work, &args.scale)?
    };
    for row in &rows {
        eprintln!("{}", row.line());
    }
    if args.json {
        println!("{}", report(&rows));
    }
    Ok(())
}

/// `ok` only when everything that must hold was shown to hold.
fn report(rows: &[Row]) -> Value {
    let ok = rows.iter().all(|row| row.must().is_none() || row.holds() == Some(true));
    json!({ "ok": ok, "rows": rows.iter().map(Row::json).collect::<Vec<_>>() })
}
