//! `cargo xtask bench takeover`: how long sessions wait for another server when theirs dies or is cut off.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use clap::Args;
use serde_json::{Value, json};

use crate::postgres_server::PostgresServer;
use crate::process;

const EXAMPLE: &str = "bench-takeover";
/// After SIGKILL, the session that waits longest but for one in a hundred.
const KILL_MUST_MS: u64 = 1000;
/// After a cut, beyond the lease's term.
const PARTITION_MUST_MS: u64 = 10_000 + 1000;

/// What to measure.
#[derive(Debug, Args)]
pub(crate) struct TakeoverArgs {
    /// How many sessions the server has that is gone.
    #[arg(long, default_value_t = 1000)]
    sessions: u32,
    /// Print one JSON object as the last line.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(root: &Path, args: &TakeoverArgs) -> Result<()> {
    let program = process::build_example(root, "covey-server", EXAMPLE, super::BENCH_LIMIT)?;
    let is_root = rustix::process::geteuid().is_root();
    let measure = |how: &str| -> Result<Value> {
        let server = PostgresServer::start(root, &root.join(".test-env"), is_root)?;
        let mut command = Command::new(&program);
        command.args([how, &args.sessions.to_string(), &server.url()]);
        let text = process::output_of_success(&mut command, super::BENCH_LIMIT)?;
        let line = text.lines().last().unwrap_or_default();
        let row: Value = serde_json::from_str(line).with_context(|| format!("{EXAMPLE} said `{line}`"))?;
        eprintln!("{row}");
        Ok(row)
    };
    let (kill, partition) = (measure("kill")?, measure("partition")?);
    let holds = kill["p99_ms"].as_u64().is_some_and(|ms| ms <= KILL_MUST_MS)
        && partition["p99_ms"].as_u64().is_some_and(|ms| ms <= PARTITION_MUST_MS);
    let report = json!({
        "sessions": kill["sessions"],
        "p50_ms": kill["p50_ms"],
        "p99_ms": kill["p99_ms"],
        "last_ms": kill["last_ms"],
        "partition_p50_ms": partition["p50_ms"],
        "partition_p99_ms": partition["p99_ms"],
        "must": {"p99_ms": KILL_MUST_MS, "partition_p99_ms": PARTITION_MUST_MS},
        "holds": holds,
    });
    if args.json {
        println!("{report}");
    } else {
        println!("{report:#}");
    }
    Ok(())
}
