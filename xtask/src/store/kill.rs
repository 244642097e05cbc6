//! Processes that secure, publish, collect, materialize and back up on one store die by SIGKILL at random moments.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;

use super::worker::{Program, ROLES, add_newest};
use crate::chaos::Dice;

/// A kill comes so late at most after a worker is ready: this many times what a publish takes on this machine now.
const PUBLISHES_PER_DELAY: u32 = 3;
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
    /// A `store-worker` that is built already [default: it is built in release mode].
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) worker: Option<PathBuf>,
    /// Print one JSON object as the last line.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(root: &Path, args: &KillStoreArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let program = Program::find(root, args.worker.as_deref())?;
    let dir = tempfile::tempdir()?;
    let mut dice = Dice::new(args.seed);
    let mut acknowledged = BTreeMap::new();
    let (mut landed, mut missed, mut checks) = (BTreeMap::<&str, u32>::new(), 0, 0);
    let mut failure = None;
    // One publish without a kill: that it passes shows that the check can pass, and how long the moments must reach.
    let calm = program.work(dir.path(), ROLES[0], dice.roll() >> 8)?;
    let delay_max = calm.first_publish()? * PUBLISHES_PER_DELAY;
    add_newest(&mut acknowledged, calm.kill()?.1);
    program.check(dir.path(), &acknowledged)?;
    while landed.values().sum::<u32>() < args.kills && missed < args.kills * MISSES_PER_KILL_MAX {
        // One of them publishes: there must be something to lose.
        let first = dice.below(2) as usize;
        let second = (first + 1 + dice.below(ROLES.len() as u64 - 1) as usize) % ROLES.len();
        let workers = [first, second].map(|role| program.work(dir.path(), ROLES[role], dice.roll() >> 8));
        for worker in workers {
            let worker = worker?;
            // Not a synchronisation: the random moment of the kill.
            std::thread::sleep(Duration::from_micros(dice.below(delay_max.as_micros() as u64)));
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
    let published: u64 = acknowledged.values().sum();
    let ok = failure.is_none() && total >= args.kills && published > u64::from(args.kills) / 10;
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
    anyhow::ensure!(ok, "{total} of {} kills met a process at work, {published} publishes", args.kills);
    Ok(())
}
