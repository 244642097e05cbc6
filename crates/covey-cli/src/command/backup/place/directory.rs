//! Backups in a directory: `store/`, and `backups/<name>/` for each. One process at a time makes them, by a lock that
//! goes with it.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use covey_types::Fault;

use super::{DATABASE, RECORD, Record, Unfinished, damaged, refuse, sync_dir};
use crate::store_location::OpenedStore;

/// A directory of backups, locked.
#[derive(Debug)]
pub(super) struct BackupDirectory {
    dir: PathBuf,
    store: OpenedStore,
    _lock: File,
}

impl BackupDirectory {
    fn locked(dir: &Path, lock: File) -> Self {
        Self { dir: dir.to_owned(), store: OpenedStore::Directory(dir.join("store")), _lock: lock }
    }

    pub(super) fn open_to_write(dir: &Path) -> anyhow::Result<Self> {
        let named = || format!("the backup directory {}", dir.display());
        fs::create_dir_all(dir.join("backups")).with_context(named)?;
        let lock = File::options().create(true).truncate(false).write(true).open(dir.join("lock"));
        let lock = lock.with_context(named)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self::locked(dir, lock)),
            Err(TryLockError::WouldBlock) => {
                Err(refuse(Fault::Retry, format!("another backup is being made in {}", dir.display())))
            }
            Err(TryLockError::Error(error)) => Err(error).with_context(named),
        }
    }

    pub(super) fn open(dir: &Path) -> anyhow::Result<Self> {
        let lock = match File::open(dir.join("lock")) {
            Ok(lock) => lock,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(refuse(Fault::NotFound, format!("{} is no directory of backups", dir.display())));
            }
            Err(error) => return Err(error).with_context(|| format!("{}", dir.display())),
        };
        lock.lock_shared().with_context(|| format!("{}", dir.display()))?;
        Ok(Self::locked(dir, lock))
    }

    pub(super) const fn store(&self) -> &OpenedStore {
        &self.store
    }

    fn backups_dir(&self) -> PathBuf {
        self.dir.join("backups")
    }

    pub(super) fn begin(&self) -> anyhow::Result<Unfinished> {
        let dir = self.backups_dir().join("unfinished.new");
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error)?,
            _ => {}
        }
        fs::create_dir(&dir).with_context(|| format!("{}", dir.display()))?;
        Ok(Unfinished { dir, epoch: 0 })
    }

    pub(super) fn finish(&self, unfinished: &Unfinished, record: &Record) -> anyhow::Result<()> {
        let dir = self.backups_dir().join(&record.name);
        File::open(unfinished.dir.join(DATABASE))?.sync_all()?;
        sync_dir(&unfinished.dir)?;
        fs::rename(&unfinished.dir, &dir).with_context(|| format!("{}", dir.display()))?;
        sync_dir(&self.backups_dir())?;
        Ok(sync_dir(&self.dir)?)
    }

    pub(super) fn all(&self) -> anyhow::Result<Vec<Record>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.backups_dir())? {
            let dir = entry?.path();
            if dir.extension().is_some_and(|extension| extension == "new") {
                continue;
            }
            let text = fs::read_to_string(dir.join(RECORD));
            let text = text.map_err(|error| damaged(&dir.display(), &error))?;
            found.push(Record::read(&text, &dir.display())?);
        }
        Ok(found)
    }

    pub(super) fn database(&self, record: &Record) -> PathBuf {
        self.backups_dir().join(&record.name).join(DATABASE)
    }

    pub(super) fn forget(&self, record: &Record) -> anyhow::Result<()> {
        let dir = self.backups_dir().join(&record.name);
        fs::remove_dir_all(&dir).with_context(|| format!("{}", dir.display()))
    }
}
