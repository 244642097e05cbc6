//! `covey backup restore`.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use clap::Args;
use covey_home::backend::DirectoryBackend;
use covey_home::{OrgKeys, StoreIdentity, carry_states};
use covey_server::db::backup;
use covey_types::Fault;
use serde_json::json;

use super::place::{Backup, Backups, DATABASE, by_org, sync_dir};
use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::host::Layout;
use crate::output;
use crate::progress::Progress;
use crate::store_key;

/// Options of `covey backup restore`.
#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// The directory of backups.
    dir: PathBuf,
    /// The data directory to make; it must not exist, or be empty. Blocks come into `store` in it.
    #[arg(long, value_name = "DIR")]
    into: PathBuf,
    /// Which backup, by its name [default: the newest].
    #[arg(long, value_name = "NAME")]
    backup: Option<String>,
}

pub(super) fn run(global: &Global, args: &RestoreArgs) -> anyhow::Result<ExitCode> {
    let backups = Backups::open(&args.dir)?;
    let chosen = backups.one(args.backup.as_deref())?;
    chosen.check_database()?;
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
    let restored = restore(&backups, &chosen, &args.into);
    if restored.is_err() {
        // It was empty: nothing but what was made here goes, and half a data directory would be taken for a whole one.
        for entry in fs::read_dir(&args.into)? {
            let path = entry?.path();
            if path.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
        }
    }
    let states = restored.with_context(|| format!("nothing is restored into {}", args.into.display()))?;
    let value = json!({ "backup": chosen.record.name, "states": states, "into": args.into });
    output::value(global.json, &value, |_| {
        format!(
            "{} is what backup {} was, {states} states.\nHosts that have newer working copies move them aside at the \
             next wake and never write over them; `sandbox.ready` says where they are.",
            args.into.display(),
            chosen.record.name
        )
    })?;
    Ok(ExitCode::Success)
}

fn restore(backups: &Backups, chosen: &Backup, into: &Path) -> anyhow::Result<usize> {
    let states = chosen.states()?;
    let carried = by_org(&states);
    let mut stores = Vec::new();
    for org in backup::orgs(&chosen.database())? {
        let name = org.to_string();
        let from = DirectoryBackend::open_existing(&backups.store_dir(), &name)?;
        if let Some(from) = &from {
            OrgKeys::share(from, &DirectoryBackend::open(&into.join("store"), &name)?)?;
        }
        let to = store_key::open(&into.join("store"), &name)?;
        if let Some(roots) = carried.get(&org) {
            let from = from.with_context(|| format!("the blocks of org {org} are not in the backup"))?;
            let from = store_key::open_on(Arc::new(from), &name)?;
            let progress = Progress::start_counting("restoring", "blocks");
            carry_states(&from, &to, roots, &AtomicBool::new(false), &progress)?;
        }
        stores.push((org, StoreIdentity::establish(to.backend().as_ref())?.to_string()));
    }
    // The database last: a data directory that has one is whole.
    let unfinished = into.join("covey.db.restoring");
    fs::copy(chosen.database(), &unfinished)?;
    backup::make_restored(&unfinished, &stores)?;
    File::open(&unfinished)?.sync_all()?;
    fs::rename(&unfinished, into.join(DATABASE))?;
    sync_dir(into)?;
    Ok(states.len())
}
