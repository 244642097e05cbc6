//! `cargo xtask bench bucket`: how many requests a secure takes to a store that speaks S3, and how long.
//!
//! The server is SeaweedFS on this machine, so the time is that of the work and not of a network. What does not belong
//! here: the other tools, which have no such number.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::{Value, json};

use super::home::measure;
use crate::bucket_servers::{BucketServers, Wanted};
use crate::process;

const EXAMPLE: &str = "secure-to-bucket";
/// Requests of a first secure, at most.
pub(super) const FIRST_MUST: u64 = 60;
/// And what is aimed at.
const FIRST_AIM: u64 = 40;

/// What to measure on.
#[derive(Debug, Args)]
pub(crate) struct BucketArgs {
    /// The home; only read.
    #[arg(long)]
    home: PathBuf,
    /// Print one JSON object as the last line.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(root: &Path, args: &BucketArgs) -> anyhow::Result<()> {
    let row = row(&count(root, &args.home.canonicalize()?)?);
    eprintln!("{row:#}");
    if args.json {
        println!("{}", json!({ "ok": row["holds"], "rows": [row] }));
    }
    Ok(())
}

/// What a first secure and the same once more took.
#[derive(Debug)]
pub(super) struct Counted {
    pub(super) requests: u64,
    pub(super) first: measure::Cost,
    said: Value,
    again: measure::Cost,
    unchanged: Value,
}

/// Secures `home` into a fresh store in a fresh bucket.
pub(super) fn count(root: &Path, home: &Path) -> anyhow::Result<Counted> {
    let program = build(root)?;
    let servers = BucketServers::start(root, &root.join(".test-env"), Wanted::SeaweedFs)?;
    servers.make_bucket("covey-bench")?;
    let local = tempfile::Builder::new().prefix("covey-bench-bucket-").tempdir()?;
    let secure = || -> anyhow::Result<(measure::Cost, Value)> {
        let mut command = Command::new(&program);
        command.arg(home).arg("s3://covey-bench/store").arg(local.path());
        servers.tell(&mut command)?;
        let (cost, text) = measure::run(&mut command)?;
        let line = text.lines().last().unwrap_or_default();
        Ok((cost, serde_json::from_str(line).with_context(|| format!("{EXAMPLE} said `{line}`"))?))
    };
    let (first, said) = secure()?;
    let (again, unchanged) = secure()?;
    ensure!(unchanged["root"] == said["root"], "the second secure finds another state");
    let requests = said["requests"].as_u64().context("it does not say how many requests")?;
    Ok(Counted { requests, first, said, again, unchanged })
}

fn row(counted: &Counted) -> Value {
    let Counted { requests, first, said, again, unchanged } = counted;
    json!({
        "work": "requests to S3 for a first secure",
        "us": {
            "requests": requests, "of_these_to_try_the_bucket": said["requests_probe"], "packs": said["packs"],
            "stored_bytes": said["stored_bytes_new"], "wall_s": first.wall_s, "cpu_s": first.cpu_s,
            "peak_mib": first.peak_mib,
        },
        "unchanged": { "requests": unchanged["requests"], "wall_s": again.wall_s, "cpu_s": again.cpu_s },
        "must": format!("at most {FIRST_MUST} requests (aim {FIRST_AIM})"),
        "holds": *requests <= FIRST_MUST,
    })
}

fn build(root: &Path) -> anyhow::Result<PathBuf> {
    let mut command = process::cargo(root);
    command.args(["build", "--quiet", "--release", "--package", "covey-bucket", "--example", EXAMPLE]);
    command.arg("--message-format=json-render-diagnostics");
    let messages = process::output_of_success(&mut command, super::BENCH_LIMIT)?;
    let built = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = built
        .filter(|message| message["target"]["name"] == EXAMPLE)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from));
    program.context("cargo did not say where the example is")
}
