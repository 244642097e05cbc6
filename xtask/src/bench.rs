//! `cargo xtask bench`: runs the release examples that measure, and passes their JSON through.
//!
//! The measuring code stands beside what it measures (`examples/bench-*.rs` of the crate); nothing here
//! interprets a number.

use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::process;

/// Building in release on two cores takes minutes; a bench that runs longer than this hangs.
const BENCH_LIMIT: Duration = Duration::from_secs(30 * 60);

/// What to measure.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    part: Part,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Further arguments for the bench itself.
    #[arg(last = true)]
    rest: Vec<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Part {
    /// Starting, freezing and losing sandboxes.
    Sandbox,
    /// Securing and materializing homes.
    Home,
}

pub(crate) fn run(root: &Path, args: &BenchArgs) -> anyhow::Result<()> {
    let (package, example) = match args.part {
        Part::Sandbox => ("covey-runner", "bench-sandbox"),
        Part::Home => ("covey-home", "bench-home"),
    };
    let mut command = process::cargo(root);
    command.args(["run", "--quiet", "--release", "--package", package, "--example", example, "--"]);
    if args.json {
        command.arg("--json");
    }
    process::run(command.args(&args.rest), BENCH_LIMIT)
}
