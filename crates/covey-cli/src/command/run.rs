//! `covey run`: a task in a directory.

use std::path::PathBuf;

use clap::Args;

use crate::exit_code::ExitCode;
use crate::global::Global;

/// Options of `covey run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// What to do.
    task: String,
    /// The directory to work in.
    #[arg(long, value_name = "DIR")]
    home: PathBuf,
}

pub(crate) async fn run(_global: &Global, args: &RunArgs) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not built yet: {args:?}")
}
