//! Where backups are: a directory, or a bucket. What is in it, and who may change it.

mod bucket;
mod directory;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;
use covey_home::{CollectOptions, NoProgress, Roots, StoreError, collect};
use covey_server::db::backup::{self, State};
use covey_types::{Fault, OrgId, RootHash};
use serde::{Deserialize, Serialize};

use crate::exit_code::Refusal;
use crate::store_key;
use crate::store_location::{OpenedStore, StoreLocation};
use bucket::BackupBucket;
use directory::BackupDirectory;

/// The first line of a record; another one is of another format.
const FORMAT: &str = "covey-backup 1";
const RECORD: &str = "backup.json";
pub(super) const DATABASE: &str = "covey.db";

/// What is written last into a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    format: String,
    pub(super) name: String,
    /// By the clock of the machine; for people.
    created_at: String,
    covey_version: String,
    pub(super) database_bytes: u64,
    database_blake3: String,
    /// States that the database names.
    pub(super) states: u64,
}

impl Record {
    /// Of a copy of a database that was made at `created_at` and names so many states.
    pub(super) fn of(database: &Path, created_at: String, states: u64) -> io::Result<Self> {
        let (database_bytes, database_blake3) = hash_of(database)?;
        let name = created_at.chars().filter(char::is_ascii_digit).collect();
        let covey_version = env!("CARGO_PKG_VERSION").to_owned();
        let format = FORMAT.to_owned();
        Ok(Self { format, name, created_at, covey_version, database_bytes, database_blake3, states })
    }

    /// The record in `text`, which stands in the backup `named`.
    fn read(text: &str, named: &dyn std::fmt::Display) -> anyhow::Result<Self> {
        let record: Self = serde_json::from_str(text).map_err(|error| damaged(named, &error))?;
        if record.format != FORMAT {
            let text = format!(
                "the backup {named} has the format `{}`; this covey knows `{FORMAT}`: use the version that made it",
                record.format
            );
            return Err(refuse(Fault::Invalid, text));
        }
        Ok(record)
    }

    /// Writes it into a backup that is being put together, durably.
    fn write(&self, dir: &Path) -> anyhow::Result<()> {
        let file = File::create(dir.join(RECORD))?;
        serde_json::to_writer_pretty(&file, self)?;
        Ok(file.sync_all()?)
    }

    /// Reads the copy of the database whole; an error when it is not what was written.
    fn check(&self, database: &Path) -> anyhow::Result<()> {
        let damaged = |detail: String| {
            refuse(
                Fault::Corrupt,
                format!("{} of backup {} is damaged: {detail}", database.display(), self.name),
            )
        };
        let (len, hash) = hash_of(database).map_err(|error| damaged(error.to_string()))?;
        if (len, &hash) != (self.database_bytes, &self.database_blake3) {
            return Err(damaged("it has other bytes than were written".to_owned()));
        }
        backup::check(database).map_err(|error| damaged(error.to_string()))
    }
}

fn damaged(named: &dyn std::fmt::Display, error: &dyn std::fmt::Display) -> anyhow::Error {
    refuse(Fault::Corrupt, format!("the backup {named} is damaged: {RECORD}: {error}"))
}

fn refuse(fault: Fault, text: String) -> anyhow::Error {
    Refusal::new(fault, text).into()
}

/// Length and hash of a file.
fn hash_of(path: &Path) -> io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let (mut hasher, mut len) = (blake3::Hasher::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((len, hasher.finalize().to_hex().to_string())),
            count => {
                hasher.update(&buffer[..count]);
                len += count as u64;
            }
        }
    }
}

pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// A backup that is being put together.
#[derive(Debug)]
pub(super) struct Unfinished {
    /// A directory of this host that the copy of the database comes into.
    pub(super) dir: PathBuf,
    /// In a bucket: of the collections that it has seen.
    epoch: u64,
}

/// A place of backups, opened.
#[derive(Debug)]
pub(super) struct Backups {
    location: StoreLocation,
    kind: Kind,
    /// What the databases that were read name; backups never change.
    known: Mutex<BTreeMap<String, Vec<State>>>,
}

#[derive(Debug)]
enum Kind {
    Directory(BackupDirectory),
    Bucket(Box<BackupBucket>),
}

impl Backups {
    /// Opens it for writing, making what is missing. `data_dir` is of this host.
    pub(super) fn open_to_write(location: &StoreLocation, data_dir: &Path) -> anyhow::Result<Self> {
        let kind = match location {
            StoreLocation::Directory(dir) => Kind::Directory(BackupDirectory::open_to_write(dir)?),
            StoreLocation::Bucket(_) => {
                Kind::Bucket(Box::new(BackupBucket::open_to_write(location, data_dir)?))
            }
        };
        Ok(Self { location: location.clone(), kind, known: Mutex::default() })
    }

    /// Opens it for reading.
    pub(super) fn open(location: &StoreLocation, data_dir: &Path) -> anyhow::Result<Self> {
        let kind = match location {
            StoreLocation::Directory(dir) => Kind::Directory(BackupDirectory::open(dir)?),
            StoreLocation::Bucket(_) => Kind::Bucket(Box::new(BackupBucket::open(location, data_dir)?)),
        };
        Ok(Self { location: location.clone(), kind, known: Mutex::default() })
    }

    /// The blocks of all backups.
    pub(super) fn store(&self) -> &OpenedStore {
        match &self.kind {
            Kind::Directory(directory) => directory.store(),
            Kind::Bucket(bucket) => bucket.store(),
        }
    }

    /// Begins a backup; what an interrupted one has left goes. Comes before any block of it is looked for.
    pub(super) fn begin(&self) -> anyhow::Result<Unfinished> {
        match &self.kind {
            Kind::Directory(directory) => directory.begin(),
            Kind::Bucket(bucket) => bucket.begin(),
        }
    }

    /// Gives what was put together its name, durably.
    pub(super) fn finish(&self, unfinished: &Unfinished, record: &Record) -> anyhow::Result<()> {
        record.write(&unfinished.dir)?;
        match &self.kind {
            Kind::Directory(directory) => directory.finish(unfinished, record),
            Kind::Bucket(bucket) => bucket.finish(unfinished, record),
        }
    }

    /// Every finished backup, the oldest first.
    pub(super) fn all(&self) -> anyhow::Result<Vec<Record>> {
        let mut found = match &self.kind {
            Kind::Directory(directory) => directory.all(),
            Kind::Bucket(bucket) => bucket.all(),
        }?;
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// One by its name, or the newest.
    pub(super) fn one(&self, name: Option<&str>) -> anyhow::Result<Record> {
        let mut all = self.all()?;
        let found = match name {
            Some(name) => all.into_iter().find(|record| record.name == name),
            None => all.pop(),
        };
        let what = name.map_or_else(|| "no finished backup".to_owned(), |name| format!("no backup `{name}`"));
        found.ok_or_else(|| refuse(Fault::NotFound, format!("{} has {what}", self.location)))
    }

    /// The copy of the database of a backup, as a file that was read whole and is as it was written.
    pub(super) fn database(&self, record: &Record) -> anyhow::Result<PathBuf> {
        let path = match &self.kind {
            Kind::Directory(directory) => directory.database(record),
            Kind::Bucket(bucket) => bucket.database(record)?,
        };
        record.check(&path)?;
        Ok(path)
    }

    /// The states that a backup's database names.
    pub(super) fn states(&self, record: &Record) -> anyhow::Result<Vec<State>> {
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(states) = known().get(&record.name) {
            return Ok(states.clone());
        }
        let states = backup::states(&self.database(record)?)?;
        known().insert(record.name.clone(), states.clone());
        Ok(states)
    }

    /// What all finished backups need of each org.
    fn needed(&self) -> anyhow::Result<BTreeMap<OrgId, Vec<RootHash>>> {
        let mut states = Vec::new();
        for record in self.all()? {
            states.extend(self.states(&record)?);
        }
        Ok(by_org(&states))
    }

    /// Removes the oldest backups beyond `keep`, and the blocks that only they need; tells how many backups went.
    pub(super) fn forget_old(&self, keep: usize) -> anyhow::Result<usize> {
        let all = self.all()?;
        let (old, kept) = all.split_at(all.len().saturating_sub(keep));
        // Nothing goes while it cannot be told what the others need.
        for record in kept {
            self.states(record)?;
        }
        for record in old {
            match &self.kind {
                Kind::Directory(directory) => directory.forget(record)?,
                Kind::Bucket(bucket) => bucket.forget(record)?,
            }
        }
        if old.is_empty() {
            return Ok(0);
        }
        for org in self.store().orgs()? {
            // What is no org of a server belongs to the backups themselves.
            if let Ok(id) = org.parse::<OrgId>() {
                let backend = self.store().open_existing(&org)?.context("an org went away")?;
                self.collect(&store_key::open_on(backend, &org)?, id)?;
            }
        }
        if let Kind::Bucket(bucket) = &self.kind {
            bucket.collect()?;
        }
        Ok(old.len())
    }

    fn collect(&self, store: &covey_home::PackStore, org: OrgId) -> anyhow::Result<()> {
        let never = std::sync::atomic::AtomicBool::new(false);
        let needed = Needed { backups: self, org };
        collect(store, &needed, &CollectOptions::default(), &never, &NoProgress)?;
        Ok(())
    }
}

/// What the backups need of one org.
struct Needed<'a> {
    backups: &'a Backups,
    org: OrgId,
}

fn not_told(error: &anyhow::Error) -> StoreError {
    let what = "tell what the backups need".to_owned();
    StoreError::Unavailable { what, source: io::Error::other(format!("{error:#}")) }
}

impl Roots for Needed<'_> {
    fn roots(&self) -> Result<Vec<RootHash>, StoreError> {
        let mut needed = self.backups.needed().map_err(|error| not_told(&error))?;
        Ok(needed.remove(&self.org).unwrap_or_default())
    }

    fn raise_floor(&self, _epoch: u64) -> Result<(), StoreError> {
        match &self.backups.kind {
            // Nobody else makes backups there while the lock is held.
            Kind::Directory(_) => Ok(()),
            Kind::Bucket(bucket) => bucket.fence().map_err(|error| not_told(&error)),
        }
    }
}

/// The roots of each org, each once.
pub(super) fn by_org(states: &[State]) -> BTreeMap<OrgId, Vec<RootHash>> {
    let mut found: BTreeMap<OrgId, Vec<RootHash>> = BTreeMap::new();
    for state in states {
        found.entry(state.org).or_default().push(state.root);
    }
    for roots in found.values_mut() {
        roots.sort_unstable();
        roots.dedup();
    }
    found
}
