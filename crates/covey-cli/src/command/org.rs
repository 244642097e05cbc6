//! `covey org`: tenants, on the server's own machine and while the server is stopped.
//!
//! Deleting one takes everything that it has for good, so it is not something that a request can do: nothing may be at
//! work on it, and whoever does it must be able to stop the server.

use anyhow::Context as _;
use clap::Subcommand;
use covey_home::backend::DirectoryBackend;
use covey_home::{PackStore, destroy};
use covey_types::{ByteCount, Fault, OrgId};
use serde_json::json;

use crate::database::DatabaseArgs;
use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::host::{Layout, remove};
use crate::output::{self, card};

/// What to do with orgs.
#[derive(Debug, Subcommand)]
pub(crate) enum OrgCommand {
    /// Delete an org with its agents, sessions, homes and all their blocks, for good; the server must be stopped.
    Delete {
        /// Its id or name.
        org: String,
        /// Do it without being asked again.
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        database: DatabaseArgs,
    },
}

pub(crate) async fn run(global: &Global, command: &OrgCommand) -> anyhow::Result<ExitCode> {
    let OrgCommand::Delete { org, yes, database } = command;
    let layout = Layout::at(global.data_dir()?);
    // A lock says that no server works with it.
    let db = database.open_alone(&layout).await?;
    let found = match org.parse::<OrgId>() {
        Ok(id) => Some(id),
        Err(_) => db.org_by_name(org).await?,
    };
    let text = format!("no org has the id or name `{}`", output::one_line(org));
    let id = found.ok_or_else(|| Refusal::new(Fault::NotFound, text))?;
    if !yes {
        let text = format!(
            "this deletes every agent, session and home of {id} for good, and their blocks with them; give --yes to do it"
        );
        return Err(Refusal::new(Fault::Conflict, text).into());
    }
    // Rows first: without them the blocks are garbage, the other way round homes would have holes. What a crash leaves
    // between the two goes when this is run again.
    let rows = db.delete_org(id).await?;
    let mut freed = 0;
    let mut packs = 0;
    if let Some(store) = layout.store_dir()?.filter(|store| store.is_dir()) {
        let name = id.to_string();
        let backend = DirectoryBackend::open(&store, &name)?;
        let destroyed = destroy(&backend)?;
        (freed, packs) = (destroyed.bytes, destroyed.packs);
        drop(backend);
        for part in ["orgs", "stat-caches", "mounts", "mount-cache"] {
            remove(&store.join(part).join(&name))?;
        }
        // The proof: what a server would open now is empty.
        let left = PackStore::open_directory(&store, &name)?.packs()?.len();
        remove(&store.join("orgs").join(&name))?;
        if left > 0 {
            let text = format!("{left} packs of {id} are in {}: somebody uses the store", store.display());
            return Err(Refusal::new(Fault::Conflict, text).into());
        }
    }
    let copies = layout.remove_working_copies(&rows.homes).context("the runner's working copies")?;
    if rows.homes.is_empty() && rows.agents == 0 && packs == 0 && !rows.was_there {
        let text = format!("{id} does not exist, and nothing of it is left");
        return Err(Refusal::new(Fault::NotFound, text).into());
    }
    let report = json!({
        "id": id.to_string(), "agents": rows.agents, "sessions": rows.sessions, "homes": rows.homes.len(),
        "snapshots": rows.snapshots, "packs": packs, "freed_bytes": freed, "packs_left": 0,
        "working_copies": copies,
    });
    output::value(global.json, &report, |_| {
        card(&[
            ("deleted", id.to_string()),
            ("agents", rows.agents.to_string()),
            ("sessions", rows.sessions.to_string()),
            ("homes", format!("{}, {} snapshots", rows.homes.len(), rows.snapshots)),
            ("freed", format!("{packs} packs, {}", ByteCount(freed))),
            ("left in the store", "nothing".to_owned()),
            ("working copies", format!("{copies} removed from this machine")),
        ])
    })?;
    Ok(ExitCode::Success)
}
