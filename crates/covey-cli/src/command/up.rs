//! `covey up`: server and runner in one process. `covey server`: the server alone.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::database::DatabaseArgs;
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::host::{self, Layout, RunningServer};
use crate::model_choice::ModelChoice;
use crate::sharing::Sharing;

/// Options of `covey up` and `covey server`.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Where to listen; port 0 takes a free one.
    #[arg(long, env = "COVEY_LISTEN", default_value = "127.0.0.1:7788", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Any Messages-compatible endpoint [default: COVEY_MODEL_URL, ANTHROPIC_BASE_URL, then the vendor's].
    #[arg(long, value_name = "URL")]
    model_url: Option<String>,
    /// Several providers, other wires, failover: docs/operating/models.md [default: COVEY_MODELS_FILE].
    #[arg(long, value_name = "FILE", conflicts_with = "model_url")]
    models_file: Option<PathBuf>,
    /// A scripted model instead of a real one.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model_url", "models_file"])]
    model_script: Option<PathBuf>,
    /// Take the home store that is there although the database knows another one; snapshots that are not in it are
    /// lost.
    #[arg(long)]
    accept_store: bool,
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    sharing: Sharing,
}

impl UpArgs {
    fn model(&self) -> ModelChoice {
        let from_environment = || host::setting("COVEY_MODELS_FILE").map(PathBuf::from);
        match (&self.model_script, &self.models_file, &self.model_url) {
            (Some(script), ..) => ModelChoice::Script(script.clone()),
            (None, Some(file), _) => ModelChoice::File(file.clone()),
            (None, None, Some(url)) => ModelChoice::Endpoint(Some(url.clone())),
            (None, None, None) => from_environment().map_or(ModelChoice::Endpoint(None), ModelChoice::File),
        }
    }
}

/// Whether a runner is part of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parts {
    /// `covey up`.
    ServerAndRunner,
    /// `covey server`.
    Server,
}

pub(crate) fn run(global: &Global, args: &UpArgs, parts: Parts) -> anyhow::Result<ExitCode> {
    host::log_to_stderr()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.context("the runtime does not start")?.block_on(serve(global, args, parts))?;
    Ok(ExitCode::Success)
}

async fn serve(global: &Global, args: &UpArgs, parts: Parts) -> anyhow::Result<()> {
    let layout = Layout::prepare(global.data_dir()?)?;
    let database = args.database.url(&layout)?;
    let (listen, model) = (args.listen, args.model());
    let server =
        RunningServer::start(&layout, listen, &database, &model, args.accept_store, &args.sharing).await?;
    let stop = CancellationToken::new();
    let mut runner = tokio::task::JoinSet::new();
    server.listen_for_store_links(&layout)?;
    match parts {
        Parts::Server => server.listen_for_runners(&layout)?,
        Parts::ServerAndRunner => {
            let (dial, store) = (server.in_process_dial(), server.store()?);
            let (layout, stop) = (layout.clone(), stop.clone());
            runner.spawn(async move { host::run_runner(&layout, store, dial, stop).await });
        }
    }
    announce(global, &server)?;
    let ended = tokio::select! {
        asked = host::asked_to_end() => asked.context("cannot wait for a signal"),
        () = server.stopped() => Err(anyhow::anyhow!("the server stopped by itself; its log says why")),
        Some(ended) = runner.join_next() => ended.context("the runner's task").flatten()
            .and_then(|()| Err(anyhow::anyhow!("the runner stopped by itself; its log says why"))),
    };
    // The runner first: its last messages still reach the server. Sandboxes stay, for the next start.
    stop.cancel();
    while let Some(ended) = runner.join_next().await {
        ended.context("the runner's task")??;
    }
    server.shutdown().await?;
    ended
}

fn announce(global: &Global, server: &RunningServer) -> anyhow::Result<()> {
    use std::io::Write as _;
    let (url, token) = (&server.client.url, &server.client.token);
    let mut out = std::io::stdout().lock();
    if global.json {
        let data_dir = global.data_dir()?;
        let ready = json!({"url": url, "token": token, "data_dir": data_dir, "pid": std::process::id()});
        writeln!(out, "{ready}")?;
    } else {
        writeln!(out, "Covey listens on {url}\ntoken: {token}")?;
    }
    out.flush().context("cannot say where the server listens")
}
