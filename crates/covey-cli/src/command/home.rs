//! `covey home`: what agents keep.

use clap::Subcommand;
use serde_json::{Value, json};

use crate::client::{Client, id_path};
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::output::{self, card, field};

/// What to do with homes.
#[derive(Debug, Subcommand)]
pub(crate) enum HomeCommand {
    /// List the homes that the server knows.
    List,
    /// Show one home.
    Show {
        /// The home's id.
        home: String,
    },
    /// List the published states of a home.
    Snapshots {
        /// The home's id.
        home: String,
    },
}

pub(crate) async fn run(global: &Global, command: &HomeCommand) -> anyhow::Result<ExitCode> {
    match command {
        HomeCommand::List => list(global).await?,
        HomeCommand::Show { home } => show(global, home).await?,
        HomeCommand::Snapshots { home } => snapshots(global, home).await?,
    }
    Ok(ExitCode::Success)
}

async fn list(global: &Global) -> anyhow::Result<()> {
    let homes = Client::new(global)?.list("/v1/covey/homes", None).await?;
    output::value(global.json, &json!({ "data": homes }), |_| {
        let rows: Vec<_> = homes
            .iter()
            .map(|home| ["/id", "/agent_id", "/generation", "/session_id"].map(|at| field(home, at)))
            .collect();
        output::table(["ID", "AGENT", "GENERATION", "SESSION"], &rows)
    })?;
    Ok(())
}

async fn show(global: &Global, home: &str) -> anyhow::Result<()> {
    let home = Client::new(global)?.get(&id_path("covey/homes", home)?).await?;
    output::value(global.json, &home, |home| {
        card(&[
            ("id", field(home, "/id")),
            ("agent", field(home, "/agent_id")),
            ("generation", field(home, "/generation")),
            ("root", field(home, "/root")),
            ("session", field(home, "/session_id")),
            ("created", field(home, "/created_at")),
        ])
    })?;
    Ok(())
}

async fn snapshots(global: &Global, home: &str) -> anyhow::Result<()> {
    let path = format!("{}/snapshots", id_path("covey/homes", home)?);
    let snapshots = Client::new(global)?.list(&path, None).await?;
    output::value(global.json, &json!({ "data": snapshots }), |_| table(&snapshots))?;
    Ok(())
}

fn table(snapshots: &[Value]) -> String {
    let row = |snapshot: &Value| {
        ["/generation", "/kind", "/files", "/bytes", "/published_at", "/root"].map(|at| field(snapshot, at))
    };
    let rows: Vec<_> = snapshots.iter().map(row).collect();
    output::table(["GENERATION", "KIND", "FILES", "BYTES", "PUBLISHED", "ROOT"], &rows)
}
