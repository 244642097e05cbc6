//! A directory of backups: what is in it, and who may change it.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use covey_server::db::backup::{self, State};
use covey_types::{Fault, OrgId, RootHash};
use serde::{Deserialize, Serialize};

use crate::exit_code::Refusal;

/// The first line of a record; another one is of another format.
const FORMAT: &str = "covey-backup 1";
const RECORD: &str = "backup.json";
pub(super) const DATABASE: &str = "covey.db";

/// What is written last into a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) format: String,
    pub(super) name: String,
    /// By the clock of the machine; for people.
    pub(super) created_at: String,
    pub(super) covey_version: String,
    pub(super) database_bytes: u64,
    pub(super) database_blake3: String,
    /// States that the database names.
    pub(super) states: u64,
}

/// One backup.
#[derive(Debug, Clone)]
pub(super) struct Backup {
    pub(super) dir: PathBuf,
    pub(super) record: Record,
}

/// A directory of backups, locked.
#[derive(Debug)]
pub(super) struct Backups {
    dir: PathBuf,
    _lock: File,
}

fn refuse(fault: Fault, text: String) -> anyhow::Error {
    Refusal::new(fault, text).into()
}

/// Length and hash of a file.
pub(super) fn hash_of(path: &Path) -> io::Result<(u64, String)> {
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

impl Backups {
    /// Opens it for writing, making what is missing; one process at a time.
    pub(super) fn open_to_write(dir: &Path) -> anyhow::Result<Self> {
        let named = || format!("the backup directory {}", dir.display());
        fs::create_dir_all(dir.join("backups")).with_context(named)?;
        let lock = File::options().create(true).truncate(false).write(true).open(dir.join("lock"));
        let lock = lock.with_context(named)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { dir: dir.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => {
                Err(refuse(Fault::Retry, format!("another backup is being made in {}", dir.display())))
            }
            Err(TryLockError::Error(error)) => Err(error).with_context(named),
        }
    }

    /// Opens it for reading.
    pub(super) fn open(dir: &Path) -> anyhow::Result<Self> {
        let lock = match File::open(dir.join("lock")) {
            Ok(lock) => lock,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(refuse(Fault::NotFound, format!("{} is no directory of backups", dir.display())));
            }
            Err(error) => return Err(error).with_context(|| format!("{}", dir.display())),
        };
        lock.lock_shared().with_context(|| format!("{}", dir.display()))?;
        Ok(Self { dir: dir.to_owned(), _lock: lock })
    }

    pub(super) fn store_dir(&self) -> PathBuf {
        self.dir.join("store")
    }

    fn backups_dir(&self) -> PathBuf {
        self.dir.join("backups")
    }

    /// Where a new backup is put together; what an interrupted one has left there goes.
    pub(super) fn unfinished(&self) -> anyhow::Result<PathBuf> {
        let dir = self.backups_dir().join("unfinished.new");
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error)?,
            _ => {}
        }
        fs::create_dir(&dir).with_context(|| format!("{}", dir.display()))?;
        Ok(dir)
    }

    /// Gives what was put together its name, durably.
    pub(super) fn finish(&self, unfinished: &Path, mut record: Record) -> anyhow::Result<Backup> {
        record.format = FORMAT.to_owned();
        let digits: String = record.created_at.chars().filter(char::is_ascii_digit).collect();
        record.name = digits;
        let dir = self.backups_dir().join(&record.name);
        let file = File::create(unfinished.join(RECORD))?;
        serde_json::to_writer_pretty(&file, &record)?;
        file.sync_all()?;
        File::open(unfinished.join(DATABASE))?.sync_all()?;
        sync_dir(unfinished)?;
        fs::rename(unfinished, &dir).with_context(|| format!("{}", dir.display()))?;
        sync_dir(&self.backups_dir())?;
        sync_dir(&self.dir)?;
        Ok(Backup { dir, record })
    }

    /// Every backup, the oldest first.
    pub(super) fn all(&self) -> anyhow::Result<Vec<Backup>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.backups_dir())? {
            let dir = entry?.path();
            if dir.extension().is_some_and(|extension| extension == "new") {
                continue;
            }
            let path = dir.join(RECORD);
            let damaged = |error: &dyn std::fmt::Display| {
                refuse(Fault::Corrupt, format!("the backup {} is damaged: {RECORD}: {error}", dir.display()))
            };
            let text = fs::read_to_string(&path).map_err(|error| damaged(&error))?;
            let record: Record = serde_json::from_str(&text).map_err(|error| damaged(&error))?;
            if record.format != FORMAT {
                let text = format!(
                    "the backup {} has the format `{}`; this covey knows `{FORMAT}`: use the version that made it",
                    dir.display(),
                    record.format
                );
                return Err(refuse(Fault::Invalid, text));
            }
            found.push(Backup { dir, record });
        }
        found.sort_by(|one, other| one.record.name.cmp(&other.record.name));
        Ok(found)
    }

    /// One by its name, or the newest.
    pub(super) fn one(&self, name: Option<&str>) -> anyhow::Result<Backup> {
        let mut all = self.all()?;
        let found = match name {
            Some(name) => all.into_iter().find(|backup| backup.record.name == name),
            None => all.pop(),
        };
        let what = name.map_or_else(|| "no finished backup".to_owned(), |name| format!("no backup `{name}`"));
        found.ok_or_else(|| refuse(Fault::NotFound, format!("{} has {what}", self.dir.display())))
    }
}

impl Backup {
    pub(super) fn database(&self) -> PathBuf {
        self.dir.join(DATABASE)
    }

    /// Reads the copy of the database whole; an error when it is not what was written.
    pub(super) fn check_database(&self) -> anyhow::Result<()> {
        let damaged = |detail: String| {
            refuse(Fault::Corrupt, format!("{} is damaged: {detail}", self.database().display()))
        };
        let (len, hash) = hash_of(&self.database()).map_err(|error| damaged(error.to_string()))?;
        if (len, &hash) != (self.record.database_bytes, &self.record.database_blake3) {
            return Err(damaged("it has other bytes than were written".to_owned()));
        }
        backup::check(&self.database()).map_err(|error| damaged(error.to_string()))
    }

    pub(super) fn states(&self) -> anyhow::Result<Vec<State>> {
        Ok(backup::states(&self.database())?)
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
