//! `cargo xtask chaos`: sessions under random SIGKILL, and the count of what was lost.
//!
//! Server and runner are processes of their own here, so that each can die alone. Every tool call of a session
//! appends its id to a file in the home: that file is the witness of what was run, and how often. What the
//! server once showed as an event is acknowledged; it must be there in the end, in the same order.
//!
//! With `--sessions`, `--kills`, `--servers` or `--backend` many sessions live at once on one server or several, and more
//! than processes fails (`chaos/storm.rs`); without, each of `--runs` sessions sees one kill.

mod cluster;
pub(crate) mod fleet;
mod relay;
mod session;
mod storm;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::json;

pub(crate) use cluster::user_message;
use cluster::{Cluster, Victim};
use session::Verdict;

/// What to run.
#[derive(Debug, Args)]
pub(crate) struct ChaosArgs {
    /// How many sessions, each with one kill.
    #[arg(long, default_value_t = 200)]
    pub(crate) runs: u32,
    /// Where the state is: many sessions at once.
    #[arg(long, value_enum)]
    pub(crate) backend: Option<fleet::Backend>,
    /// How many servers share it; SQLite has one.
    #[arg(long)]
    pub(crate) servers: Option<u32>,
    /// How many sessions live at once.
    #[arg(long)]
    pub(crate) sessions: Option<u32>,
    /// How many failures they see: SIGKILL, SIGSTOP and SIGCONT, cut ways to the database, crashes of the database.
    #[arg(long)]
    pub(crate) kills: Option<u32>,
    /// Seed of the moments and victims.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// The program to try, instead of building the release binary; with many sessions only.
    #[arg(long)]
    pub(crate) covey: Option<PathBuf>,
    /// Print one JSON object as the last line.
    #[arg(long)]
    pub(crate) json: bool,
}

impl ChaosArgs {
    /// Many sessions at once, if that is meant.
    fn storm(&self) -> Result<Option<storm::Storm>> {
        let is_meant =
            self.backend.is_some() || [self.servers, self.sessions, self.kills].iter().any(Option::is_some);
        if !is_meant {
            return Ok(None);
        }
        let backend = self.backend.unwrap_or(fleet::Backend::Sqlite);
        let servers = self.servers.unwrap_or(1);
        anyhow::ensure!(servers > 0, "--servers: at least one");
        anyhow::ensure!(
            servers == 1 || backend == fleet::Backend::Postgres,
            "SQLite has one server; several share PostgreSQL: --backend postgres"
        );
        let (sessions, kills) = (self.sessions.unwrap_or(SESSIONS), self.kills.unwrap_or(KILLS));
        Ok(Some(storm::Storm { backend, servers, sessions, kills, seed: self.seed }))
    }
}

/// Sessions and failures where only one of them is said.
const SESSIONS: u32 = 100;
const KILLS: u32 = 100;
/// Tool calls of each session.
const STEPS: usize = 12;
/// Sessions of one run that may end without their kill before the run counts as failed.
const MISSES_MAX: usize = 10;
/// Failures that are told in full.
const FAILURES_SHOWN_MAX: usize = 10;

/// SplitMix64: enough for choosing moments, and the same on every machine for one seed.
#[derive(Debug, Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.roll() % end.max(1)
    }
}

pub(crate) fn run(root: &Path, args: &ChaosArgs) -> Result<()> {
    if let Some(storm) = args.storm()? {
        return storm::run(root, &storm, args.covey.as_deref(), args.json);
    }
    let began = Instant::now();
    let mut cluster = Cluster::start(root)?;
    // One session without a kill: that it passes shows that the checks can pass, and how long the window is.
    let calm_began = Instant::now();
    let calm = session::run(&mut cluster, STEPS, None)?;
    let window = calm_began.elapsed();
    anyhow::ensure!(calm.is_clean(), "a session without any kill is not clean: {calm:?}");
    eprintln!("a session without a kill takes {} ms", window.as_millis());

    let mut totals = Totals::default();
    for number in 0..args.runs {
        let mut dice = Dice(args.seed ^ (u64::from(number) << 32));
        let victim = Victim::ALL[dice.below(Victim::ALL.len() as u64) as usize];
        // A session may end before its moment comes, and a sandbox may not be there yet: only a kill counts.
        for _ in 0..MISSES_MAX {
            let delay = Duration::from_micros(dice.below(window.as_micros() as u64));
            let downtime = Duration::from_millis(dice.below(100));
            let verdict = session::run(&mut cluster, STEPS, Some((victim, delay, downtime)))
                .with_context(|| format!("run {number} ({victim:?} after {delay:?})"))?;
            totals.add(number, victim, delay, &verdict);
            if verdict.killed {
                break;
            }
            totals.missed += 1;
        }
        if (number + 1) % 20 == 0 {
            eprintln!("{} of {} runs, {}", number + 1, args.runs, totals.brief());
        }
    }
    cluster.stop()?;
    let report = json!({
        "runs": args.runs,
        "seed": args.seed,
        "steps": STEPS,
        "lost": totals.lost,
        "doubled": totals.doubled,
        "stuck": totals.stuck,
        "interrupted": totals.interrupted,
        "rolled_back": totals.rolled_back,
        "killed": totals.killed,
        "missed": totals.missed,
        "window_ms": window.as_millis() as u64,
        "recovery_ms_median": totals.median_recovery(),
        "elapsed_ms": began.elapsed().as_millis() as u64,
        "failures": totals.failures,
    });
    if args.json {
        println!("{report}");
    } else {
        println!("{} runs: {}", args.runs, totals.brief());
    }
    anyhow::ensure!(
        (totals.lost, totals.doubled, totals.stuck) == (0, 0, 0),
        "something was lost, run twice or stuck; run again with --seed {}",
        args.seed
    );
    let killed: usize = totals.killed.values().sum();
    anyhow::ensure!(killed == args.runs as usize, "only {killed} of {} runs had a kill", args.runs);
    Ok(())
}

#[derive(Debug, Default)]
struct Totals {
    lost: usize,
    doubled: usize,
    stuck: usize,
    interrupted: usize,
    rolled_back: usize,
    killed: BTreeMap<&'static str, usize>,
    missed: usize,
    recoveries_ms: Vec<u64>,
    failures: Vec<String>,
}

impl Totals {
    fn add(&mut self, number: u32, victim: Victim, delay: Duration, verdict: &Verdict) {
        self.lost += verdict.lost.len();
        self.doubled += verdict.doubled.len();
        self.stuck += usize::from(verdict.stuck.is_some());
        self.interrupted += verdict.interrupted;
        self.rolled_back += verdict.rolled_back;
        if verdict.killed {
            *self.killed.entry(victim.name()).or_default() += 1;
        }
        self.recoveries_ms.extend(verdict.recovery_ms);
        if !verdict.is_clean() && self.failures.len() < FAILURES_SHOWN_MAX {
            self.failures.push(format!("run {number}, {victim:?} killed after {delay:?}: {verdict:?}"));
        }
    }

    fn brief(&self) -> String {
        format!(
            "lost {}, doubled {}, stuck {}, interrupted {}",
            self.lost, self.doubled, self.stuck, self.interrupted
        )
    }

    fn median_recovery(&self) -> Option<u64> {
        let mut sorted = self.recoveries_ms.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }
}
