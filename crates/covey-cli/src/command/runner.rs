//! `covey runner`: where sandboxes live.

use std::sync::Arc;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use covey_runner::Dial;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::client::Client;
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::host::{self, Layout, Socket};
use crate::output::{self, field};
use crate::remote_dial::RemoteDial;
use crate::store_location::StoreLocation;

/// What to do with runners.
#[derive(Debug, Subcommand)]
pub(crate) enum RunnerCommand {
    /// List the runners that the server knows.
    List,
    /// Be a runner for the `covey server` of the same data directory, or for those that --server names.
    Serve(ServeArgs),
}

/// Options of `covey runner serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// URL of a server, or of what stands before several; may be given several times. The token comes from --token,
    /// COVEY_TOKEN, or client.json. Servers that share a database name each other, and the runner is at all of them.
    #[arg(long = "server", value_name = "URL")]
    servers: Vec<String>,
}

/// Runs a runner until it is asked to end. Its sandboxes stay for two minutes, in which the next start adopts them.
pub(crate) fn serve(global: &Global, args: &ServeArgs) -> anyhow::Result<ExitCode> {
    host::log_to_stderr()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.context("the runtime does not start")?.block_on(async {
        let layout = Layout::prepare(global.data_dir()?)?;
        let stop = CancellationToken::new();
        let dial = dial(global, args, &layout)?;
        let running = host::run_runner(&layout, layout.store_for_runner()?, dial, stop.clone());
        tokio::pin!(running);
        tokio::select! {
            ended = &mut running => return ended,
            asked = host::asked_to_end() => asked.context("cannot wait for a signal")?,
        }
        // Not dropped: the runner parts from its sandboxes, so that they end themselves if nobody comes back.
        stop.cancel();
        running.await
    })?;
    Ok(ExitCode::Success)
}

/// How the servers are reached.
fn dial(global: &Global, args: &ServeArgs, layout: &Layout) -> anyhow::Result<Arc<dyn Dial>> {
    if args.servers.is_empty() {
        return Ok(Arc::new(Socket::of(layout)));
    }
    if let Some(StoreLocation::Bucket(bucket)) = layout.store_location()? {
        anyhow::bail!(
            "this runner would reach the bucket {bucket:?} only through a server of its own data directory: leave --server \
             away there, or keep blocks in a directory that all see (COVEY_BLOB_STORE=file:///…)"
        );
    }
    let token = match &global.token {
        Some(token) => token.clone(),
        None => global.client_file().context("no token: give one with --token or COVEY_TOKEN")?.token,
    };
    Ok(Arc::new(RemoteDial::new(args.servers.clone(), Some(token))))
}

pub(crate) async fn run(global: &Global, command: &RunnerCommand) -> anyhow::Result<ExitCode> {
    if let RunnerCommand::Serve(_) = command {
        anyhow::bail!("`covey runner serve` needs a runtime of its own");
    }
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
