//! `cargo xtask bench store`: a store of many blocks is asked which of many hashes it lacks.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};

use super::BENCH_LIMIT;
use crate::process;

const EXAMPLE: &str = "bench-store";
const ROUNDS: usize = 3;
const FILL_LIMIT: Duration = Duration::from_secs(60 * 60);
/// Asking for 150,000 hashes may take so long, in so many requests and so much memory.
const ASK_MS_MAX: f64 = 2000.0;
const REQUESTS_MAX: u64 = 9;
const PEAK_MIB_MAX: u64 = 200;

/// What to measure.
#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// Where to make the store [default: a temporary directory]; needs as many bytes as it holds, and is removed again.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Blocks in it.
    #[arg(long, default_value_t = 1_000_000)]
    blocks: u64,
    /// Bytes of each, not compressible.
    #[arg(long, default_value_t = 10_240)]
    block_bytes: u64,
    /// Hashes to ask for, half of which are there.
    #[arg(long, default_value_t = 150_000)]
    hashes: u64,
    /// Print one JSON object as the last line.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(root: &Path, args: &StoreArgs) -> anyhow::Result<()> {
    let program = process::build_example(root, "covey-home", EXAMPLE, BENCH_LIMIT)?;
    let place = match &args.dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)?;
            tempfile::tempdir_in(dir)?
        }
        None => tempfile::tempdir()?,
    };
    let step = |words: &[String]| -> anyhow::Result<Value> {
        let text = process::output_of_success(Command::new(&program).args(words), FILL_LIMIT)?;
        let line = text.lines().last().unwrap_or_default();
        serde_json::from_str(line).with_context(|| format!("{EXAMPLE} said `{line}`"))
    };
    let dir = place.path().display().to_string();
    let filled =
        step(&["fill".to_owned(), dir.clone(), args.blocks.to_string(), args.block_bytes.to_string()])?;
    eprintln!("filled: {filled}");
    let mut asked = Vec::new();
    for _ in 0..ROUNDS {
        asked.push(step(&["ask".to_owned(), dir.clone(), args.hashes.to_string()])?);
    }
    asked.sort_by(|one, other| {
        let of = |value: &Value| value["ask_ms"].as_f64().unwrap_or(f64::MAX);
        of(one).total_cmp(&of(other))
    });
    let median = asked[ROUNDS / 2].clone();
    let requests = median["questions"]
        .as_u64()
        .unwrap_or(u64::MAX)
        .max(median["ask_requests"].as_u64().unwrap_or(u64::MAX));
    let holds = median["ask_ms"].as_f64().is_some_and(|ms| ms <= ASK_MS_MAX)
        && requests <= REQUESTS_MAX
        && median["peak_mib"].as_u64().is_some_and(|mib| mib <= PEAK_MIB_MAX)
        && median["right"] == json!(true);
    let must = format!(
        "{} hashes in at most {ASK_MS_MAX} ms, {REQUESTS_MAX} requests, {PEAK_MIB_MAX} MiB",
        args.hashes
    );
    let report = json!({
        "ok": holds,
        "store": filled,
        "rows": [{ "work": "existence of many hashes", "us": median, "must": must, "holds": holds }],
    });
    if args.json {
        println!("{report}");
    } else {
        println!(
            "{} packs: {} ms, {requests} requests, {} MiB",
            median["packs"], median["ask_ms"], median["peak_mib"]
        );
    }
    anyhow::ensure!(holds, "not within {must}");
    Ok(())
}
