//! `covey runner`: where sandboxes live.

use clap::Subcommand;
use serde_json::json;

use crate::client::Client;
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::output::{self, field};

/// What to do with runners.
#[derive(Debug, Subcommand)]
pub(crate) enum RunnerCommand {
    /// List the runners that the server knows.
    List,
}

pub(crate) async fn run(global: &Global, command: &RunnerCommand) -> anyhow::Result<ExitCode> {
    let RunnerCommand::List = command;
    let runners = Client::new(global)?.list("/v1/covey/runners", None).await?;
    output::value(global.json, &json!({ "data": runners }), |_| {
        let rows: Vec<_> = runners
            .iter()
            .map(|runner| ["/id", "/name", "/connected", "/last_seen_at"].map(|at| field(runner, at)))
            .collect();
        output::table(["ID", "NAME", "CONNECTED", "LAST SEEN"], &rows)
    })?;
    Ok(ExitCode::Success)
}
