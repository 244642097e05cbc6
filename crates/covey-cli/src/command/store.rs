//! `covey store`: the blocks of an org.

mod key;

use clap::Subcommand;

use crate::exit_code::ExitCode;
use crate::global::Global;

/// What to do with stores.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Keys of encrypted stores; no server needed.
    #[command(subcommand)]
    Key(key::KeyCommand),
}

pub(crate) fn run(global: &Global, command: &StoreCommand) -> anyhow::Result<ExitCode> {
    match command {
        StoreCommand::Key(command) => key::run(global, command),
    }
}
