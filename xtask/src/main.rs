//! `cargo xtask`: everything that is done to this repository rather than with Covey.
//!
//! CI runs `cargo xtask test` and nothing else, so what passes here passes there. What does not belong here:
//! anything that a person who only uses Covey needs.

mod bench;
mod bucket_servers;
mod chaos;
mod fidelity;
mod graph;
mod licences;
mod metadata;
mod postgres_server;
mod process;
mod python;
mod real_model;
mod spdx;
mod store;
mod test;
mod tidy;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "xtask", bin_name = "cargo xtask", about = "Tasks of the Covey repository")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Sets up what the tests need and runs everything that CI runs.
    Test(test::TestArgs),
    /// Checks that crates depend only on what ARCHITECTURE.md allows them to know.
    CheckGraph,
    /// Checks the rules of CONTRIBUTING.md that no compiler checks.
    Tidy,
    /// Checks the licence of every dependency against deny.toml.
    Licences,
    /// Measures one part on this machine.
    Bench(bench::BenchArgs),
    /// Measures what is kept of odd inodes, beside other tools; writes the table of docs/fidelity.md.
    Fidelity(fidelity::FidelityArgs),
    /// Kills processes that work on one store at random moments and checks that it is whole.
    KillStore(store::KillStoreArgs),
    /// Takes the power from a disk with a store at random moments and checks that nothing acknowledged is lost.
    CutPower(store::CutPowerArgs),
    /// Kills server, runner and sandboxes at random moments and checks that nothing is lost.
    Chaos(chaos::ChaosArgs),
    /// A real, very small model drives a turn with a tool call; builds its server first.
    RealModel(real_model::RealModelArgs),
}

/// The root of the checkout.
fn repository() -> anyhow::Result<PathBuf> {
    // Cargo tells the running program where it is; the built-in value would be wrong after a move.
    let manifest_dir = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let root = manifest_dir.parent().context("xtask has no parent directory")?;
    Ok(root.to_owned())
}

fn run() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let root = repository()?;
    match args.task {
        Task::Test(args) => return test::run(&root, &args),
        Task::CheckGraph => graph::check(&root)?,
        Task::Tidy => tidy::check(&root)?,
        Task::Licences => licences::check(&root)?,
        Task::Bench(args) => bench::run(&root, &args)?,
        Task::Fidelity(args) => fidelity::run(&root, &args)?,
        Task::KillStore(args) => store::kill_store(&root, &args)?,
        Task::CutPower(args) => store::cut_power(&root, &args)?,
        Task::Chaos(args) => chaos::run(&root, &args)?,
        Task::RealModel(args) => real_model::run(&root, &args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
