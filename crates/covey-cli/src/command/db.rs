//! `covey db`: the database of a server.

use clap::Subcommand;
use covey_server::db;
use serde_json::json;

use crate::database::DatabaseArgs;
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::host::Layout;
use crate::output::{self, card};

/// What to do with it.
#[derive(Debug, Subcommand)]
pub(crate) enum DbCommand {
    /// Bring the database to the schema of this Covey; a server does the same when it starts.
    Migrate(DatabaseArgs),
}

pub(crate) async fn run(global: &Global, command: &DbCommand) -> anyhow::Result<ExitCode> {
    let DbCommand::Migrate(database) = command;
    let layout = Layout::prepare(global.data_dir()?)?;
    let url = database.url(&layout)?;
    let migrated = db::migrate(&url).await?;
    let value = json!({ "database": url.to_string(), "from": migrated.from, "to": migrated.to });
    output::value(global.json, &value, |_| {
        let schema = match migrated.from == migrated.to {
            true => format!("{}, nothing to do", migrated.to),
            false => format!("{}, was {}", migrated.to, migrated.from),
        };
        card(&[("database", url.to_string()), ("schema", schema)])
    })?;
    Ok(ExitCode::Success)
}
