//! Backups in a bucket: a store, in which the org `backups` has one home for each backup, of the copy of the database
//! and its record. So they are stored once, checked, encrypted and copied like everything else in it.
//!
//! What stays true: a backup is visible when its pointer is, after everything that it needs. There is no lock, because
//! its holder could die: a backup notes an epoch before it looks for blocks, and a collection of what old backups leave
//! refuses those that have noted an earlier one, which then begin again (`covey_home`'s `collect`).

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use covey_bucket::Access;
use covey_home::backend::OpenStore as _;
use covey_home::view::Snapshot;
use covey_home::{
    BlockStore as _, CollectOptions, Excludes, MaterializeRequest, NoProgress, PackStore, Pointers,
    SecureRequest, collect, fence_uploads, materialize, secure,
};
use covey_types::{Fault, FencingToken, Generation};

use super::{DATABASE, RECORD, Record, Unfinished, damaged, refuse};
use crate::store_key;
use crate::store_location::{OpenedStore, StoreLocation};

/// No server has an org of this name: theirs are ids.
const ORG: &str = "backups";
/// A backup is published once, by whoever made it.
const TOKEN: FencingToken = FencingToken(1);
/// Longest record; it has some hundred bytes.
const RECORD_BYTES_MAX: u64 = 64 * 1024;

/// A bucket of backups.
#[derive(Debug)]
pub(super) struct BackupBucket {
    location: StoreLocation,
    store: OpenedStore,
    packs: PackStore,
    pointers: Pointers,
    /// Copies of databases on this host; gone with the process.
    scratch: tempfile::TempDir,
}

impl BackupBucket {
    pub(super) fn open_to_write(location: &StoreLocation, data_dir: &Path) -> anyhow::Result<Self> {
        Self::on(location, location.open(data_dir, Access::Write, false)?)
    }

    pub(super) fn open(location: &StoreLocation, data_dir: &Path) -> anyhow::Result<Self> {
        let store = location.open(data_dir, Access::Read, false)?;
        if store.open_existing(ORG)?.is_none() {
            return Err(refuse(Fault::NotFound, format!("{location} is no place of backups")));
        }
        Self::on(location, store)
    }

    fn on(location: &StoreLocation, store: OpenedStore) -> anyhow::Result<Self> {
        let backend = store.open(ORG)?;
        let packs = store_key::open_on(Arc::clone(&backend), ORG)?;
        let scratch = tempfile::Builder::new().prefix("backup-").tempdir_in(store.local_dir()?)?;
        let pointers = Pointers::on(backend);
        Ok(Self { location: location.clone(), store, packs, pointers, scratch })
    }

    pub(super) const fn store(&self) -> &OpenedStore {
        &self.store
    }

    pub(super) fn begin(&self) -> anyhow::Result<Unfinished> {
        let dir = self.scratch.path().join("unfinished");
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        fs::create_dir(&dir).with_context(|| format!("{}", dir.display()))?;
        Ok(Unfinished { dir, epoch: self.packs.upload()?.epoch() })
    }

    pub(super) fn finish(&self, unfinished: &Unfinished, record: &Record) -> anyhow::Result<()> {
        let secured = secure(&SecureRequest {
            dir: &unfinished.dir,
            store: &self.packs,
            stat_cache: None,
            excludes: &Excludes::none(),
            previous: None,
            cancel: &AtomicBool::new(false),
            progress: &NoProgress,
            threads: 0,
        })?;
        if secured.partial {
            let text = format!("the copy of the database could not be read: {}", secured.warnings.join("; "));
            return Err(refuse(Fault::Retry, text));
        }
        let base = Generation::default();
        self.pointers.publish(&record.name, secured.root, base, TOKEN, unfinished.epoch)?;
        Ok(())
    }

    pub(super) fn all(&self) -> anyhow::Result<Vec<Record>> {
        let mut found = Vec::new();
        for name in self.pointers.homes()? {
            // One that is being published, or was forgotten, has no state.
            let Some(pointer) = self.pointers.current(&name)? else { continue };
            let named = format!("{name} in {}", self.location);
            let mut text = String::new();
            let file = Snapshot::open(&self.packs, &pointer.root)?.read(RECORD.as_bytes())?;
            file.take(RECORD_BYTES_MAX).read_to_string(&mut text).map_err(|error| damaged(&named, &error))?;
            found.push(Record::read(&text, &named)?);
        }
        Ok(found)
    }

    /// Brings the copy of the database to this host, once.
    pub(super) fn database(&self, record: &Record) -> anyhow::Result<PathBuf> {
        let copies = self.scratch.path().join("copies");
        fs::create_dir_all(&copies).with_context(|| format!("{}", copies.display()))?;
        let dir = copies.join(&record.name);
        if !dir.exists() {
            let name = &record.name;
            let pointer = self.pointers.current(name)?;
            let pointer = pointer.with_context(|| format!("backup {name} is gone from {}", self.location))?;
            let made = materialize(&MaterializeRequest {
                root: pointer.root,
                dir: &dir,
                store: &self.packs,
                stat_cache: None,
                excludes: &Excludes::none(),
                owner: None,
                cancel: &AtomicBool::new(false),
                progress: &NoProgress,
                threads: 0,
            });
            let made = made.with_context(|| format!("backup {name} in {}", self.location))?;
            if let Some(gap) = made.gaps.first() {
                let text = format!("backup {name} in {} is damaged: {gap:?}", self.location);
                return Err(refuse(Fault::Corrupt, text));
            }
        }
        Ok(dir.join(DATABASE))
    }

    pub(super) fn forget(&self, record: &Record) -> anyhow::Result<()> {
        self.pointers.forget(&record.name)?;
        Ok(())
    }

    /// Returns when every backup that was begun before is finished, or will not be: see the module's first lines.
    pub(super) fn fence(&self) -> anyhow::Result<()> {
        Ok(fence_uploads(&self.packs, &self.pointers)?)
    }

    /// Deletes what only forgotten backups needed of copies of databases.
    pub(super) fn collect(&self) -> anyhow::Result<()> {
        let options = CollectOptions::default();
        collect(&self.packs, &self.pointers, &options, &AtomicBool::new(false), &NoProgress)?;
        Ok(())
    }
}
