//! `covey completions SHELL`.

use std::io::Write as _;

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use super::Cli;
use crate::exit_code::ExitCode;

/// Options of `covey completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// For example: `covey completions bash > ~/.local/share/bash-completion/completions/covey`.
    shell: Shell,
}

pub(crate) fn run(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    // Into memory first: the generator panics when its writer fails, and stdout may be closed.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "covey", &mut script);
    std::io::stdout().lock().write_all(&script)?;
    Ok(ExitCode::Success)
}
