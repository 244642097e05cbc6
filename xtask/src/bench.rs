//! `cargo xtask bench`: measures one part on this machine and prints JSON.
//!
//! The measuring code of sandboxes and mounts stands beside what it measures and is passed through. Homes are measured from
//! outside, process by process, beside the tools that people use instead ([`home`]).

mod bucket;
mod home;
mod loops;
mod store;
mod takeover;

use std::path::Path;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::process;

/// Building in release on two cores takes minutes; a bench that runs longer than this hangs.
const BENCH_LIMIT: Duration = Duration::from_secs(30 * 60);

/// What to measure.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    part: Part,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Starting, freezing and losing sandboxes.
    Sandbox(ExampleArgs),
    /// Securing and materializing homes, beside the tools that are installed.
    Home(home::HomeArgs),
    /// A store of a million blocks, asked which of many hashes it lacks; needs 10 GB of disk for a while.
    Store(store::StoreArgs),
    /// Securing a home into a bucket: requests and time.
    Bucket(bucket::BucketArgs),
    /// Step commits beside bare inserts of the same bytes, and the memory of idle sessions.
    Loop(loops::LoopArgs),
    /// How long the sessions of a server that is gone wait for another one.
    Takeover(takeover::TakeoverArgs),
    /// Mounting homes and securing what changed in them; as root.
    Mount(ExampleArgs),
}

#[derive(Debug, Args)]
struct ExampleArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Further arguments for the bench itself.
    #[arg(last = true)]
    rest: Vec<String>,
}

pub(crate) fn run(root: &Path, args: &BenchArgs) -> anyhow::Result<()> {
    match &args.part {
        Part::Sandbox(args) => example(root, "covey-runner", "bench-sandbox", args),
        Part::Home(args) => home::run(root, args),
        Part::Store(args) => store::run(root, args),
        Part::Bucket(args) => bucket::run(root, args),
        Part::Loop(args) => loops::run(root, args),
        Part::Takeover(args) => takeover::run(root, args),
        Part::Mount(args) => example(root, "covey-mount", "bench-mount", args),
    }
}

/// Runs a release example that measures, and passes its JSON through.
fn example(root: &Path, package: &str, example: &str, args: &ExampleArgs) -> anyhow::Result<()> {
    let mut command = process::cargo(root);
    command.args(["run", "--quiet", "--release", "--package", package, "--example", example, "--"]);
    if args.json {
        command.arg("--json");
    }
    process::run(command.args(&args.rest), BENCH_LIMIT)
}
