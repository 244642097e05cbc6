//! `cargo xtask bench loop`: step commits beside bare inserts, and what an idle session costs a server.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use serde_json::{Value, json};

use crate::chaos::fleet::{Backend, Fleet};
use crate::postgres_server::PostgresServer;
use crate::process;

const EXAMPLE: &str = "bench-loop";
/// Of the rate of bare inserts of the same bytes.
const RATIO_MUST: f64 = 0.5;
/// What a session that has had a turn and rests may cost the server.
const IDLE_BYTES_MUST: u64 = 5 * 1024;
/// How long the turns of all sessions may take.
const TURNS_MAX: Duration = Duration::from_secs(1200);
const POLL: Duration = Duration::from_millis(200);

/// What to measure.
#[derive(Debug, Args)]
pub(crate) struct LoopArgs {
    /// How many sessions rest while the server's memory is read; 0 leaves that out.
    #[arg(long, default_value_t = 10_000)]
    idle: u32,
    /// Print one JSON object as the last line.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(root: &Path, args: &LoopArgs) -> Result<()> {
    let program = process::build_example(root, "covey-db", EXAMPLE, super::BENCH_LIMIT)?;
    let mut report = {
        let is_root = rustix::process::geteuid().is_root();
        let server = PostgresServer::start(root, &root.join(".test-env"), is_root)?;
        let dir = tempfile::Builder::new().prefix("covey-bench-loop-").tempdir()?;
        let mut command = Command::new(&program);
        let text = process::output_of_success(command.arg(dir.path()).arg(server.url()), super::BENCH_LIMIT)?;
        let line = text.lines().last().unwrap_or_default();
        serde_json::from_str::<Value>(line).with_context(|| format!("{EXAMPLE} said `{line}`"))?
    };
    let rows = report["rows"].as_array().cloned().unwrap_or_default();
    let mut holds = rows.iter().all(|row| row["ratio"].as_f64().is_some_and(|ratio| ratio >= RATIO_MUST));
    if args.idle > 0 {
        let idle = idle(root, args.idle)?;
        holds &= idle["bytes_each"].as_i64().is_some_and(|bytes| bytes <= IDLE_BYTES_MUST as i64);
        report["idle"] = idle;
    }
    report["must"] = json!({"ratio": RATIO_MUST, "idle_bytes_each": IDLE_BYTES_MUST});
    report["holds"] = json!(holds);
    if args.json {
        println!("{report}");
    } else {
        println!("{report:#}");
    }
    Ok(())
}

/// Gives each session a turn without a call, waits until all rest, and reads the server's memory before and after.
fn idle(root: &Path, count: u32) -> Result<Value> {
    let script = json!({"scripts": [{"when": "", "turns": [{"text": "Done."}]}]});
    let fleet = Fleet::start(root, None, Backend::Sqlite, 1, &script, false)?;
    let mut client = fleet.client();
    let id = |answer: &Value| answer["id"].as_str().map(str::to_owned).context("no id");
    let agent = id(&client.post("/v1/agents", &json!({"name": "idle", "model": "scripted"}), None)?)?;
    let environment = id(&client.post("/v1/environments", &json!({"name": "idle"}), None)?)?;
    let mut turn = |number: u32| -> Result<()> {
        let body = json!({"agent": agent, "environment_id": environment});
        let session = id(&client.post("/v1/sessions", &body, None)?)?;
        let message = crate::chaos::user_message(&format!("session {number}"));
        client.post(&format!("/v1/sessions/{session}/events"), &message, None)?;
        Ok(())
    };
    // What a server takes once, whatever it does, is not the sessions'.
    (0..100).try_for_each(&mut turn)?;
    let mut reader = fleet.client();
    wait_until_all_rest(&mut reader)?;
    let before = fleet.resident_bytes(0)?;
    (100..100 + count).try_for_each(&mut turn)?;
    wait_until_all_rest(&mut reader)?;
    let after = fleet.resident_bytes(0)?;
    let each = (after as i64 - before as i64) / i64::from(count);
    eprintln!("{count} idle sessions: {before} bytes before, {after} after");
    Ok(json!({"sessions": count, "resident_before": before, "resident_after": after, "bytes_each": each}))
}

fn wait_until_all_rest(client: &mut crate::chaos::fleet::Client) -> Result<()> {
    let until = Instant::now() + TURNS_MAX;
    loop {
        let busy = ["running", "rescheduling"].iter().try_fold(0, |busy, status| {
            let path = format!("/v1/sessions?limit=1&statuses[]={status}");
            anyhow::Ok(busy + client.get(&path)?["data"].as_array().map_or(0, Vec::len))
        })?;
        if busy == 0 {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < until, "some sessions do not come to rest");
        std::thread::sleep(POLL);
    }
}
