//! `covey backup restore`.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use clap::Args;
use covey_bucket::Access;
use covey_home::backend::OpenStore as _;
use covey_home::{OrgKeys, StoreIdentity, carry_states};
use covey_server::db::backup;
use covey_types::Fault;
use serde_json::json;

use super::place::{Backups, DATABASE, Record, by_org, sync_dir};
use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::host::Layout;
use crate::output;
use crate::progress::Progress;
use crate::store_key;
use crate::store_location::StoreLocation;

/// Options of `covey backup restore`.
#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// Where backups are: a directory or s3://BUCKET/PREFIX.
    #[arg(value_name = "PLACE", value_parser = StoreLocation::parser())]
    place: StoreLocation,
    /// The data directory to make; it must not exist, or be empty.
    #[arg(long, value_name = "DIR")]
    into: PathBuf,
    /// Where blocks come: a directory or s3://BUCKET/PREFIX that no other server uses [default: `store` in --into].
    #[arg(long, value_name = "PLACE", value_parser = StoreLocation::parser())]
    store: Option<StoreLocation>,
    /// Which backup, by its name [default: the newest].
    #[arg(long, value_name = "NAME")]
    backup: Option<String>,
}

pub(super) fn run(global: &Global, args: &RestoreArgs) -> anyhow::Result<ExitCode> {
    let backups = Backups::open(&args.place, &global.data_dir()?)?;
    let chosen = backups.one(args.backup.as_deref())?;
    let database = backups.database(&chosen)?;
    if args.store.as_ref() == Some(&args.place) {
        let text = format!("{} has the backups: blocks must come elsewhere", args.place);
        return Err(Refusal::new(Fault::Invalid, text).into());
    }
    match fs::read_dir(&args.into) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                let text =
                    format!("{} is not empty; a restore never writes over anything", args.into.display());
                return Err(Refusal::new(Fault::Conflict, text).into());
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("{}", args.into.display())),
    }
    Layout::prepare(args.into.clone())?;
    let store = args.store.clone().unwrap_or_else(|| StoreLocation::Directory(args.into.join("store")));
    let restored = restore(&backups, &chosen, &database, &store, &args.into);
    if restored.is_err() {
        // It was empty: nothing but what was made here goes, and half a data directory would be taken for a whole one.
        for entry in fs::read_dir(&args.into)? {
            let path = entry?.path();
            if path.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
        }
    }
    let states = restored.with_context(|| format!("nothing is restored into {}", args.into.display()))?;
    let name = &chosen.name;
    let value = json!({ "backup": name, "states": states, "into": args.into, "store": store });
    output::value(global.json, &value, |_| {
        let setting = match &args.store {
            None => String::new(),
            Some(StoreLocation::Directory(path)) => {
                format!("\nStart its server with COVEY_BLOB_STORE=file://{}.", path.display())
            }
            Some(place) => format!("\nStart its server with COVEY_BLOB_STORE={place}."),
        };
        format!(
            "{} is what backup {name} was, {states} states.{setting}\nHosts that have newer working copies move them aside at the \
             next wake and never write over them; `sandbox.ready` says where they are.",
            args.into.display()
        )
    })?;
    Ok(ExitCode::Success)
}

fn restore(
    backups: &Backups,
    chosen: &Record,
    database: &Path,
    store: &StoreLocation,
    into: &Path,
) -> anyhow::Result<usize> {
    let states = backups.states(chosen)?;
    let carried = by_org(&states);
    let store = store.open(into, Access::Write, true)?;
    let mut stores = Vec::new();
    for org in backup::orgs(database)? {
        let name = org.to_string();
        let from = backups.store().open_existing(&name)?;
        let to = store.open(&name)?;
        if let Some(from) = &from {
            OrgKeys::share(&**from, &*to)?;
        }
        let to = store_key::open_on(to, &name)?;
        if let Some(roots) = carried.get(&org) {
            let from = from.with_context(|| format!("the blocks of org {org} are not in the backup"))?;
            let from = store_key::open_on(from, &name)?;
            let progress = Progress::start_counting("restoring", "blocks");
            carry_states(&from, &to, roots, &AtomicBool::new(false), &progress)?;
        }
        stores.push((org, StoreIdentity::establish(to.backend().as_ref())?.to_string()));
    }
    // The database last: a data directory that has one is whole.
    let unfinished = into.join("covey.db.restoring");
    fs::copy(database, &unfinished)?;
    backup::make_restored(&unfinished, &stores)?;
    File::open(&unfinished)?.sync_all()?;
    fs::rename(&unfinished, into.join(DATABASE))?;
    sync_dir(into)?;
    Ok(states.len())
}
