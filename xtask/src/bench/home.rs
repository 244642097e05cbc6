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
use clap::{Args, ValueEnum as _};
use serde_json::{Value, json};

use claim::Row;
use rows::{Plan, Work};
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
    /// Measure only these, in this order [default: all].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "ROWS")]
    rows: Vec<Work>,
    /// Go on where an earlier run in the same directory has ended; what it has measured is part of the report.
    #[arg(long)]
    resume: bool,
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
        let works = if args.rows.is_empty() { Work::value_variants().to_vec() } else { args.rows.clone() };
        let (runs, with_peers, resume) = (args.runs, !args.no_peers, args.resume);
        rows::measure(&us, &Plan { works, runs, with_peers, resume, root, home: &home, work: &work })?
    } else {
        let rows = scale::measure(&us, &work, &args.scale)?;
        rows.iter().for_each(|row| eprintln!("{}", row.line()));
        rows.iter().map(Row::json).collect()
    };
    if args.json {
        println!("{}", report(&rows));
    }
    Ok(())
}

/// `ok` only when there is a row, and everything that must hold was shown to hold.
fn report(rows: &[Value]) -> Value {
    let ok = !rows.is_empty() && rows.iter().all(|row| row["must"].is_null() || row["holds"] == true);
    json!({ "ok": ok, "rows": rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_good_only_when_every_must_was_shown_to_hold() {
        let row = |must: Value, holds: Value| json!({ "must": must, "holds": holds });
        let (good, free) = (row(json!("a"), json!(true)), row(Value::Null, Value::Null));
        assert_eq!(report(&[good.clone(), free.clone()])["ok"], true);
        for bad in [row(json!("a"), json!(false)), row(json!("a"), Value::Null)] {
            assert_eq!(report(&[good.clone(), bad, free.clone()])["ok"], false);
        }
        assert_eq!(report(&[])["ok"], false);
    }
}
