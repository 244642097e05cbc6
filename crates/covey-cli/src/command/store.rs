//! `covey store`: the store as a whole. One file for each thing to do with it.

mod copy;
mod gc;
mod key;
mod place;
mod repair;
mod verify;

use clap::Subcommand;

use crate::exit_code::ExitCode;
use crate::global::Global;

/// What to do with stores.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Read everything and check it: packs, states, pointers; names what is lost and who needs it. Changes nothing.
    Verify(verify::VerifyArgs),
    /// Write what is lost or damaged anew, from wherever the right bytes still are.
    Repair(repair::RepairArgs),
    /// Delete blocks that no kept snapshot needs; safe while agents work.
    Gc(gc::GcArgs),
    /// Copy a store to another place, a directory or a bucket; done again, it copies what has come since.
    Copy(copy::CopyArgs),
    /// Keys of encrypted stores; no server needed.
    #[command(subcommand)]
    Key(key::KeyCommand),
}

pub(crate) async fn run(global: &Global, command: &StoreCommand) -> anyhow::Result<ExitCode> {
    match command {
        StoreCommand::Verify(args) => verify::run(global, args).await,
        StoreCommand::Repair(args) => repair::run(global, args).await,
        StoreCommand::Gc(args) => gc::run(global, args).await,
        StoreCommand::Copy(args) => copy::run(global, args),
        StoreCommand::Key(command) => key::run(global, command),
    }
}
