//! Processes that secure, publish, collect, materialize and back up on one store die by SIGKILL at random moments.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;

use super::worker::{Program, ROLES, add_newest};
use crate::chaos::Dice;

/// A kill comes so late at most after a worker is ready; several rounds of its work.
const DELAY_MAX: Duration = Duration::from_millis(120);
/// Kills that may miss (the worker was between two works) for each that lands.
const MISSES_PER_KILL_MAX: u32 = 20;

/// What to run.
#[derive(Debug, Args)]
pub(crate) struct KillStoreArgs {
    /// How many kills must meet a process at work.
    #[arg(long, default_value_t = 300)]
    pub(crate) kills: u32,
    /// Seed of the moments and roles.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print one JSON object as the last line.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(root: &Path, args: &KillStoreArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let program = Program::build(root)?;
    let dir = tempfile::tempdir()?;
    let mut dice = Dice::new(args.seed);
    let mut acknowledged = BTreeMap::new();
    let (mut landed, mut missed, mut checks) = (BTreeMap::<&str, u32>::new(), 0, 0);
    let mut failure = None;
    while landed.values().sum::<u32>() < args.kills && missed < args.kills * MISSES_PER_KILL_MAX {
        let first = dice.below(ROLES.len() as u64) as usize;
        let second = (first + 1 + dice.below(ROLES.len() as u64 - 1) as usize) % ROLES.len();
        let workers = [first, second].map(|role| program.work(dir.path(), ROLES[role], dice.roll() >> 8));
        for worker in workers {
            let worker = worker?;
            // Not a synchronisation: the random moment of the kill.
            std::thread::sleep(Duration::from_micros(dice.below(DELAY_MAX.as_micros() as u64 / 2)));
            let role = worker.role;
            let (was_busy, published) = worker.kill()?;
            add_newest(&mut acknowledged, published);
            if was_busy {
                *landed.entry(role).or_default() += 1;
            } else {
                missed += 1;
            }
        }
        checks += 1;
        if let Err(error) = program.check(dir.path(), &acknowledged) {
            let roles = [ROLES[first], ROLES[second]];
            failure = Some(format!("after check {checks} ({roles:?} were killed): {error:#}"));
            break;
        }
        if checks % 20 == 0 {
            eprintln!("{} of {} kills, {checks} checks", landed.values().sum::<u32>(), args.kills);
        }
    }
    let total: u32 = landed.values().sum();
    let ok = failure.is_none() && total >= args.kills;
    let report = json!({
        "ok": ok,
        "kills": total,
        "wanted": args.kills,
        "seed": args.seed,
        "by_role": landed,
        "missed": missed,
        "checks": checks,
        "published": acknowledged,
        "failure": failure,
        "elapsed_ms": began.elapsed().as_millis() as u64,
    });
    if args.json {
        println!("{report}");
    } else {
        println!("{total} kills at work, {missed} beside it, {checks} checks");
    }
    if let Some(failure) = failure {
        let kept = dir.keep();
        anyhow::bail!("{failure}; the store is in {}", kept.display());
    }
    anyhow::ensure!(ok, "only {total} of {} kills met a process at work", args.kills);
    Ok(())
}
