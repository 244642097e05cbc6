//! `covey up`: server and runner in one process.

use std::path::PathBuf;

use clap::Args;

use crate::exit_code::ExitCode;
use crate::global::Global;

/// Options of `covey up`.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Where to listen; port 0 takes a free one.
    #[arg(long, env = "COVEY_LISTEN", default_value = "127.0.0.1:7788", value_name = "ADDRESS")]
    listen: std::net::SocketAddr,
    /// Any Messages-compatible endpoint [default: the vendor's].
    #[arg(long, env = "COVEY_MODEL_URL", value_name = "URL")]
    model_url: Option<String>,
    /// A scripted model instead of a real one.
    #[arg(long, value_name = "FILE", conflicts_with = "model_url")]
    model_script: Option<PathBuf>,
}

pub(crate) fn run(_global: &Global, args: &UpArgs) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not built yet: {args:?}")
}
