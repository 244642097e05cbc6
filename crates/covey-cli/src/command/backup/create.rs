//! `covey backup create`.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use clap::Args;
use covey_bucket::Access;
use covey_home::backend::OpenStore as _;
use covey_home::{CarryError, OrgKeys, PointerError, UploadReport, carry_states, claim};
use covey_server::db::{self, DatabaseUrl, backup};
use covey_types::{ByteCount, Fault, OrgId, RootHash};
use serde_json::json;

use super::place::{Backups, DATABASE, Record, by_org};
use crate::database::{DatabaseArgs, must_be_there};
use crate::exit_code::{ExitCode, Refusal};
use crate::global::{ClientFile, Global};
use crate::host::Layout;
use crate::output::{self, card};
use crate::progress::Progress;
use crate::store_key;
use crate::store_location::{OpenedStore, StoreLocation};

/// A garbage collection may take states away that the copy of the database names, or blocks of the backups that only
/// this one needs. Then a fresh copy is made; what was carried over is there already.
const TRIES_MAX: usize = 4;
/// Who names what is needed in a store of backups.
const OWNER: &str = "the backups beside it";

/// Options of `covey backup create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Where backups are: a directory, on another disk than the data directory, or s3://BUCKET/PREFIX; made when it is
    /// missing.
    #[arg(value_name = "PLACE", value_parser = StoreLocation::parser())]
    place: StoreLocation,
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
    let data_dir = global.data_dir()?;
    let layout = Layout::at(data_dir.clone());
    let database = match args.database.url(&layout)? {
        DatabaseUrl::Postgres(location) => return Err(not_a_file(&location.to_string()).into()),
        DatabaseUrl::Sqlite(path) => path,
    };
    // A server of this directory that keeps its state elsewhere may have left an old file here.
    if let Ok(ClientFile { database: Some(elsewhere), .. }) = global.client_file() {
        return Err(not_a_file(&elsewhere).into());
    }
    must_be_there(&database)?;
    let store = match layout.store_location()? {
        // A bucket's key is needed here, as the server needs it.
        Some(location) if location != args.place => Some(location.open(&data_dir, Access::Read, false)?),
        Some(location) => {
            let text = format!("{location} is the server's own store: a backup must lie elsewhere");
            return Err(Refusal::new(Fault::Invalid, text).into());
        }
        None => None,
    };
    let backups = Backups::open_to_write(&args.place, &data_dir)?;
    let (made, carried) = create(&backups, &database, store.as_ref())?;
    let removed = match args.keep {
        Some(keep) => backups.forget_old(keep as usize)?,
        None => 0,
    };
    let value = json!({
        "name": made.name, "states": made.states, "database_bytes": made.database_bytes,
        "blocks_new": carried.blocks_new, "bytes_new": carried.bytes_new,
        "stored_bytes_new": carried.stored_bytes_new, "backups_removed": removed,
    });
    output::value(global.json, &value, |_| {
        card(&[
            ("backup", made.name.clone()),
            ("states", made.states.to_string()),
            ("database", ByteCount(made.database_bytes).to_string()),
            ("new", format!("{} blocks, {}", carried.blocks_new, ByteCount(carried.bytes_new))),
        ])
    })?;
    Ok(ExitCode::Success)
}

fn create(
    backups: &Backups,
    database: &Path,
    store: Option<&OpenedStore>,
) -> anyhow::Result<(Record, UploadReport)> {
    let mut carried = UploadReport::default();
    for tried in 1.. {
        match try_once(backups, database, store, &mut carried) {
            Ok(record) => return Ok((record, carried)),
            Err(error) if tried < TRIES_MAX && was_collected(&error) => {}
            Err(error) => return Err(error),
        }
    }
    anyhow::bail!("no try was made")
}

/// Whether another try may succeed, because a collection came in between.
fn was_collected(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(CarryError::Lost { .. }))
        || matches!(error.downcast_ref(), Some(PointerError::Collected { .. }))
}

fn try_once(
    backups: &Backups,
    database: &Path,
    store: Option<&OpenedStore>,
    carried: &mut UploadReport,
) -> anyhow::Result<Record> {
    let unfinished = backups.begin()?;
    let copy = unfinished.dir.join(DATABASE);
    // The database first: whatever it names was durable before it was named, so it can be carried over now.
    backup::copy(database, &copy)?;
    let created_at = db::now().to_string();
    let states = backup::states(&copy)?;
    carry(backups, store, &by_org(&states), carried)?;
    let record = Record::of(&copy, created_at, states.len() as u64)?;
    backups.finish(&unfinished, &record)?;
    Ok(record)
}

fn carry(
    backups: &Backups,
    store: Option<&OpenedStore>,
    states: &std::collections::BTreeMap<OrgId, Vec<RootHash>>,
    carried: &mut UploadReport,
) -> anyhow::Result<()> {
    for (org, roots) in states {
        let org = org.to_string();
        let from = match store {
            Some(store) => store.open_existing(&org)?,
            None => None,
        };
        let Some(from) = from else {
            let text =
                format!("the database names {} states, and there is no store; is it mounted?", roots.len());
            return Err(Refusal::new(Fault::NotFound, text).into());
        };
        let to = backups.store().open(&org)?;
        // Blocks keep their names only between stores that name them alike.
        OrgKeys::share(&*from, &*to)?;
        let (from, to) = (store_key::open_on(from, &org)?, store_key::open_on(to, &org)?);
        // Before anything is in it: a collection that is started by hand would ask pointers, and there are none.
        let who = claim(to.backend().as_ref(), OWNER)?;
        if who != OWNER {
            let text =
                format!("{} is no store of backups: what it holds is known to {who}", to.backend().place());
            return Err(Refusal::new(Fault::Conflict, text).into());
        }
        let progress = Progress::start_counting("backing up", "blocks");
        let report = carry_states(&from, &to, roots, &AtomicBool::new(false), &progress)?;
        carried.blocks_new += report.blocks_new;
        carried.bytes_new += report.bytes_new;
        carried.stored_bytes_new += report.stored_bytes_new;
    }
    Ok(())
}
