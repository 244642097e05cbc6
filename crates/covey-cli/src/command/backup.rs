//! `covey backup`: database and blocks as one consistent state, while the server works.
//!
//! A place of backups is a directory or a bucket: a store like any other that all backups in it share, and for each
//! backup the copy of the database and a record of it. What stays true: a backup that has its
//! name is whole; the database is copied first and then every block that the copy names, so it never names a block that
//! is not there; what is there is not copied again. Described in `docs/operating/backup.md`.

mod create;
mod place;
mod restore;
mod verify;

use clap::Subcommand;

use crate::exit_code::ExitCode;
use crate::global::Global;

/// What to do with backups.
#[derive(Debug, Subcommand)]
pub(crate) enum BackupCommand {
    /// Copy database and blocks of the server on this machine, which may be running; what is there is not copied again.
    Create(create::CreateArgs),
    /// Read every backup whole and check it.
    Verify(verify::VerifyArgs),
    /// Make a data directory out of a backup.
    Restore(restore::RestoreArgs),
}

pub(crate) fn run(global: &Global, command: &BackupCommand) -> anyhow::Result<ExitCode> {
    match command {
        BackupCommand::Create(args) => create::run(global, args),
        BackupCommand::Verify(args) => verify::run(global, args),
        BackupCommand::Restore(args) => restore::run(global, args),
    }
}
