//! `covey demo`: the main job on real input, with every loss in it.

use std::path::PathBuf;

use clap::Args;

use crate::exit_code::ExitCode;
use crate::global::Global;

/// Options of `covey demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// The repository to work in [default: this one and the fetched package sources].
    #[arg(long, value_name = "PATH")]
    repo: Option<PathBuf>,
    /// A Messages-compatible endpoint instead of the scripted model.
    #[arg(long, value_name = "URL")]
    model: Option<String>,
    /// Keep the demo's directory and say where it is.
    #[arg(long)]
    keep: bool,
}

pub(crate) fn run(_global: &Global, args: &DemoArgs) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not built yet: {args:?}")
}
