//! `covey org`: tenants, on the server's own machine and while the server is stopped.
//!
//! Deleting one takes everything that it has for good, so it is not something that a request can do: nothing may be at
//! work on it, and whoever does it must be able to stop the server.

use anyhow::Context as _;
use clap::Subcommand;
use covey_bucket::Access;
use covey_home::backend::OpenStore as _;
use covey_home::{Destroyed, destroy};
use covey_types::{ByteCount, Fault, OrgId};
use serde_json::json;

use crate::database::DatabaseArgs;
use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::host::{Layout, remove};
use crate::output::{self, card};
use crate::store_location::{OpenedStore, StoreLocation};

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
    let destroyed = match layout.store_location()? {
        Some(location) => destroy_in(&location, global, &id.to_string())?,
        None => Destroyed::default(),
    };
    let (packs, freed) = (destroyed.packs, destroyed.bytes);
    let copies = layout.remove_working_copies(&rows.homes).context("the runner's working copies")?;
    if rows.homes.is_empty() && rows.agents == 0 && packs == 0 && !rows.was_there {
        let text = format!("{id} does not exist, and nothing of it is left");
        return Err(Refusal::new(Fault::NotFound, text).into());
    }
    let report = json!({
        "id": id.to_string(), "agents": rows.agents, "sessions": rows.sessions, "homes": rows.homes.len(),
        "snapshots": rows.snapshots, "packs": packs, "freed_bytes": freed, "packs_left": 0,
        "key_rings": destroyed.key_rings, "working_copies": copies,
    });
    let keys = match destroyed.key_rings {
        0 => "it had none",
        _ => "destroyed; only a backup's copy of `keys/ring` could open what is kept of it elsewhere",
    };
    output::value(global.json, &report, |_| {
        card(&[
            ("deleted", id.to_string()),
            ("agents", rows.agents.to_string()),
            ("sessions", rows.sessions.to_string()),
            ("homes", format!("{}, {} snapshots", rows.homes.len(), rows.snapshots)),
            ("freed", format!("{packs} packs, {}", ByteCount(freed))),
            ("left in the store", "nothing".to_owned()),
            ("keys", keys.to_owned()),
            ("working copies", format!("{copies} removed from this machine")),
        ])
    })?;
    Ok(ExitCode::Success)
}

/// Removes everything of an org from the store, and from what this host keeps beside it.
fn destroy_in(location: &StoreLocation, global: &Global, org: &str) -> anyhow::Result<Destroyed> {
    if let StoreLocation::Directory(path) = location
        && !path.is_dir()
    {
        return Ok(Destroyed::default());
    }
    let opened = location.open(&global.data_dir()?, Access::Write, false)?;
    let destroyed = match opened.orgs()?.iter().any(|known| known == org) {
        true => destroy(opened.open(org)?.as_ref())?,
        false => Destroyed::default(),
    };
    for part in ["orgs", "stat-caches", "mounts", "mount-cache"] {
        remove(&opened.local_dir()?.join(part).join(org))?;
    }
    // The proof: asked anew, the store does not know the org.
    let opened: OpenedStore = location.open(&global.data_dir()?, Access::Write, false)?;
    if opened.orgs()?.iter().any(|known| known == org) {
        let text = format!("something of {org} is in {location} again: somebody uses the store");
        return Err(Refusal::new(Fault::Conflict, text).into());
    }
    Ok(destroyed)
}
