//! Where a server keeps its state: the option, and what can only be done with a file.

use std::path::Path;

use anyhow::Result;
use clap::Args;
use covey_server::db::{DatabaseUrl, Db};
use covey_types::Fault;

use crate::exit_code::Refusal;
use crate::host::Layout;

/// Where the state is.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct DatabaseArgs {
    /// Where the server keeps its state: `sqlite:`, `sqlite:PATH` or `postgres://USER:PASSWORD@HOST:PORT/DATABASE`
    /// [default: covey.db in the data directory].
    #[arg(long, env = "COVEY_DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<String>,
}

impl DatabaseArgs {
    /// What is meant.
    pub(crate) fn url(&self, layout: &Layout) -> Result<DatabaseUrl> {
        let text = self.database_url.as_deref().map(str::trim).filter(|text| !text.is_empty());
        Ok(DatabaseUrl::parse(text.unwrap_or("sqlite:"), &layout.database())?)
    }

    /// Opens a database that is there, for a command that works while the server is stopped, and makes sure that no
    /// server works on it.
    pub(crate) async fn open_alone(&self, layout: &Layout) -> Result<Db> {
        let url = self.url(layout)?;
        if let DatabaseUrl::Sqlite(path) = &url {
            must_be_there(path)?;
        }
        let db = Db::connect(&url).await?;
        db.take_over().await?;
        Ok(db)
    }
}

/// Refuses a file that is not there: opening would make an empty one.
pub(crate) fn must_be_there(path: &Path) -> Result<()> {
    if path.is_file() {
        return Ok(());
    }
    let text = format!(
        "no server has kept anything in {}; say where with --data-dir or --database-url",
        path.display()
    );
    Err(Refusal::new(Fault::NotFound, text).into())
}
