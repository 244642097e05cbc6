//! The commands: one file each. This file only knows which there are.

pub(crate) mod agent;
pub(crate) mod backup;
pub(crate) mod completions;
pub(crate) mod db;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod environment;
pub(crate) mod home;
pub(crate) mod org;
pub(crate) mod run;
pub(crate) mod runner;
pub(crate) mod session;
pub(crate) mod store;
pub(crate) mod token;
pub(crate) mod up;
pub(crate) mod version;

use std::future::Future;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

use crate::exit_code::{self, ExitCode};
use crate::global::Global;

/// A self-hosted platform for AI agents: their compute may vanish at any moment, their work may not.
#[derive(Debug, Parser)]
#[command(name = "covey", version, after_help = exit_code::HELP, propagate_version = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

impl Cli {
    /// Whether a program reads the output, errors among it.
    pub(crate) fn wants_json(&self) -> bool {
        self.global.json
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run server and runner in one process on this machine.
    Up(up::UpArgs),
    /// Run the server alone; runners dial in with `covey runner serve`.
    Server(up::UpArgs),
    /// Let an agent do a task in a directory, and show the whole session.
    Run(run::RunArgs),
    /// Do the main job on real input, with every loss in it, and prove that nothing is missing.
    Demo(demo::DemoArgs),
    /// Agents: versioned configurations with one home each.
    #[command(subcommand)]
    Agent(agent::AgentCommand),
    /// Environments: what a session's sandbox is made from.
    #[command(subcommand)]
    Environment(environment::EnvironmentCommand),
    /// Sessions: conversations with an agent.
    #[command(subcommand)]
    Session(session::SessionCommand),
    /// Homes: what agents keep. `secure` and `materialize` work without a server.
    #[command(subcommand)]
    Home(home::HomeCommand),
    /// Stores: what homes are kept in.
    #[command(subcommand)]
    Store(store::StoreCommand),
    /// Orgs: the tenants.
    #[command(subcommand)]
    Org(org::OrgCommand),
    /// Runners: where sandboxes live.
    #[command(subcommand)]
    Runner(runner::RunnerCommand),
    /// API tokens: who may ask the server.
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// The server's database.
    #[command(subcommand)]
    Db(db::DbCommand),
    /// Backups of database and blocks: create, verify, restore.
    #[command(subcommand)]
    Backup(backup::BackupCommand),
    /// Try what this machine can and cannot do, and name the remedy.
    Doctor(doctor::DoctorArgs),
    /// Print completions for a shell.
    Completions(completions::CompletionsArgs),
    /// Print the version.
    Version,
}

pub(crate) fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    let global = &cli.global;
    match &cli.command {
        Command::Up(args) => up::run(global, args, up::Parts::ServerAndRunner),
        Command::Server(args) => up::run(global, args, up::Parts::Server),
        Command::Run(args) => wait_for(run::run(global, args)),
        Command::Demo(args) => demo::run(global, args),
        Command::Agent(command) => wait_for(agent::run(global, command)),
        Command::Environment(command) => wait_for(environment::run(global, command)),
        Command::Token(command) => wait_for(token::run(global, command)),
        Command::Session(command) => wait_for(session::run(global, command)),
        Command::Home(command) => wait_for(home::run(global, command)),
        Command::Org(command) => wait_for(org::run(global, command)),
        Command::Runner(runner::RunnerCommand::Serve(args)) => runner::serve(global, args),
        Command::Runner(command) => wait_for(runner::run(global, command)),
        Command::Store(command) => wait_for(store::run(global, command)),
        Command::Db(command) => wait_for(db::run(global, command)),
        Command::Backup(command) => backup::run(global, command),
        Command::Doctor(args) => wait_for(doctor::run(global, args)),
        Command::Completions(args) => completions::run(args),
        Command::Version => version::run(global),
    }
}

/// Runs a command that talks to a server; one thread is enough for one conversation.
fn wait_for(command: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("the runtime does not start")?.block_on(command)
}
