//! `covey backup create`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use clap::Args;
use covey_home::backend::DirectoryBackend;
use covey_home::{
    CarryError, CollectOptions, NoProgress, OrgKeys, Roots, StoreError, UploadReport, carry_states, collect,
};
use covey_server::db::{self, DatabaseUrl, backup};
use covey_types::{ByteCount, Fault, OrgId, RootHash};
use serde_json::json;

use super::place::{Backup, Backups, DATABASE, Record, by_org, hash_of};
use crate::database::{DatabaseArgs, must_be_there};
use crate::exit_code::{ExitCode, Refusal};
use crate::global::{ClientFile, Global};
use crate::host::Layout;
use crate::output::{self, card};
use crate::progress::Progress;
use crate::store_key;

/// A garbage collection may take states away that the copy of the database names. Then a fresh copy is made; what was
/// carried over is there already.
const TRIES_MAX: usize = 4;

/// Options of `covey backup create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The directory of backups; made when it is missing. On another disk than the data directory.
    dir: PathBuf,
    /// Remove the oldest backups when there are more than this, and what only they need [default: keep all].
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    keep: Option<u32>,
    #[command(flatten)]
    database: DatabaseArgs,
}

/// Why there is no backup of a database server, and what to do instead.
fn not_a_file(database: &str) -> Refusal {
    let text = format!(
        "the server's state is in {database}, and `covey backup` copies SQLite only so far; copy it with \
         `pg_dump --format=custom`, and then the store with `covey store copy` (docs/operating/postgresql.md)"
    );
    Refusal::new(Fault::Invalid, text)
}

pub(super) fn run(global: &Global, args: &CreateArgs) -> anyhow::Result<ExitCode> {
    let layout = Layout::at(global.data_dir()?);
    let database = match args.database.url(&layout)? {
        DatabaseUrl::Postgres(location) => return Err(not_a_file(&location.to_string()).into()),
        DatabaseUrl::Sqlite(path) => path,
    };
    // A server of this directory that keeps its state elsewhere may have left an old file here.
    if let Ok(ClientFile { database: Some(elsewhere), .. }) = global.client_file() {
        return Err(not_a_file(&elsewhere).into());
    }
    must_be_there(&database)?;
    let store_dir = layout.store_dir()?;
    let backups = Backups::open_to_write(&args.dir)?;
    let (made, carried) = create(&backups, &database, store_dir.as_deref())?;
    let removed = match args.keep {
        Some(keep) => forget_old(&backups, keep as usize)?,
        None => 0,
    };
    let value = json!({
        "name": made.record.name, "states": made.record.states, "database_bytes": made.record.database_bytes,
        "blocks_new": carried.blocks_new, "bytes_new": carried.bytes_new,
        "stored_bytes_new": carried.stored_bytes_new, "backups_removed": removed,
    });
    output::value(global.json, &value, |_| {
        card(&[
            ("backup", made.record.name.clone()),
            ("states", made.record.states.to_string()),
            ("database", ByteCount(made.record.database_bytes).to_string()),
            ("new", format!("{} blocks, {}", carried.blocks_new, ByteCount(carried.bytes_new))),
        ])
    })?;
    Ok(ExitCode::Success)
}

fn create(
    backups: &Backups,
    database: &Path,
    store_dir: Option<&Path>,
) -> anyhow::Result<(Backup, UploadReport)> {
    let unfinished = backups.unfinished()?;
    let copy = unfinished.join(DATABASE);
    let mut carried = UploadReport::default();
    for tried in 1.. {
        // The database first: whatever it names was durable before it was named, so it can be carried over now.
        backup::copy(database, &copy)?;
        let created_at = db::now().to_string();
        let states = backup::states(&copy)?;
        match carry(backups, store_dir, &by_org(&states), &mut carried) {
            Ok(()) => {
                let (database_bytes, database_blake3) = hash_of(&copy)?;
                let record = Record {
                    format: String::new(),
                    name: String::new(),
                    created_at,
                    covey_version: env!("CARGO_PKG_VERSION").to_owned(),
                    database_bytes,
                    database_blake3,
                    states: states.len() as u64,
                };
                return Ok((backups.finish(&unfinished, record)?, carried));
            }
            Err(error) => {
                let is_lost = matches!(error.downcast_ref(), Some(CarryError::Lost { .. }));
                if !is_lost || tried == TRIES_MAX {
                    return Err(error);
                }
                std::fs::remove_file(&copy)?;
            }
        }
    }
    anyhow::bail!("no try was made")
}

fn carry(
    backups: &Backups,
    store_dir: Option<&Path>,
    states: &std::collections::BTreeMap<OrgId, Vec<RootHash>>,
    carried: &mut UploadReport,
) -> anyhow::Result<()> {
    for (org, roots) in states {
        let org = org.to_string();
        let from = match store_dir {
            Some(dir) => DirectoryBackend::open_existing(dir, &org)?,
            None => None,
        };
        let Some(from) = from else {
            let text =
                format!("the database names {} states, and there is no store; is it mounted?", roots.len());
            return Err(Refusal::new(Fault::NotFound, text).into());
        };
        // Blocks keep their names only between stores that name them alike.
        OrgKeys::share(&from, &DirectoryBackend::open(&backups.store_dir(), &org)?)?;
        let from = store_key::open_on(Arc::new(from), &org)?;
        let to = store_key::open(&backups.store_dir(), &org)?;
        let progress = Progress::start_counting("backing up", "blocks");
        let report = carry_states(&from, &to, roots, &AtomicBool::new(false), &progress)?;
        carried.blocks_new += report.blocks_new;
        carried.bytes_new += report.bytes_new;
        carried.stored_bytes_new += report.stored_bytes_new;
    }
    Ok(())
}

/// What the backups that stay need. Nobody publishes into a store of backups but who holds its lock.
struct Needed(Vec<RootHash>);

impl Roots for Needed {
    fn roots(&self) -> Result<Vec<RootHash>, StoreError> {
        Ok(self.0.clone())
    }

    fn raise_floor(&self, _epoch: u64) -> Result<(), StoreError> {
        Ok(())
    }
}

fn forget_old(backups: &Backups, keep: usize) -> anyhow::Result<usize> {
    let all = backups.all()?;
    let (old, kept) = all.split_at(all.len().saturating_sub(keep));
    if old.is_empty() {
        return Ok(0);
    }
    let mut states = Vec::new();
    for backup in kept {
        states.extend(backup.states()?);
    }
    for backup in old {
        std::fs::remove_dir_all(&backup.dir).with_context(|| format!("{}", backup.dir.display()))?;
    }
    let needed = by_org(&states);
    for org in crate::command::store::orgs_of(&backups.store_dir())? {
        let roots = org.parse::<OrgId>().ok().and_then(|org| needed.get(&org)).cloned().unwrap_or_default();
        let store = store_key::open(&backups.store_dir(), &org)?;
        collect(&store, &Needed(roots), &CollectOptions::default(), &AtomicBool::new(false), &NoProgress)?;
    }
    Ok(old.len())
}
