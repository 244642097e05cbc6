//! `covey store`: what homes are kept in.

mod copy;

use clap::Subcommand;

use crate::exit_code::ExitCode;
use crate::global::Global;

/// What to do with stores.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Copy a store to another place, a directory or a bucket; done again, it copies what has come since.
    Copy(copy::CopyArgs),
}

pub(crate) fn run(global: &Global, command: &StoreCommand) -> anyhow::Result<ExitCode> {
    match command {
        StoreCommand::Copy(args) => copy::run(global, args),
    }
}
