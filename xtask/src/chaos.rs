//! `cargo xtask chaos`: sessions under random SIGKILL, and the count of what was lost.

use std::path::Path;

use clap::Args;

/// What to run.
#[derive(Debug, Args)]
pub(crate) struct ChaosArgs {
    /// How many sessions, each with one kill.
    #[arg(long, default_value_t = 200)]
    pub(crate) runs: u32,
    /// Seed of the moments and victims.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print one JSON object as the last line.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(_root: &Path, args: &ChaosArgs) -> anyhow::Result<()> {
    anyhow::bail!(
        "chaos is not built yet (asked for {} runs, seed {}, json {})",
        args.runs,
        args.seed,
        args.json
    )
}
