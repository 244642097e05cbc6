//! A block store of pack files, on whatever backend.
//!
//! What stays true: a reader sees whole packs only, because a pack becomes visible after its bytes are durable;
//! several processes write at once, each its own packs; "absent" is said only when every pack that the backend
//! lists has been asked (I7), and a pack that a list leaves out counts as gone only when a second answer says so,
//! too; nothing here deletes a pack but [`PackStore::remove_pack`], which is garbage collection's (I8). What does
//! not belong here: the bytes of a pack (`pack`), where files lie (`crate::backend`), pointers to snapshots
//! (`crate::pointer`).

mod catalogue;
mod check;
mod contents;
mod files;
mod frames;
mod mask;
mod pack;
mod presses;
mod refresh;
mod segment;
mod suspects;
mod upload;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use covey_types::BlockHash;

pub use catalogue::PackName;
pub use contents::{PackContents, PackReport, PackedBlock};
pub use files::Unsealed;
pub use suspects::{SUSPECTS_MAX, SuspectState, Suspects};
pub use upload::{Existing, PackUpload, Packing};

use crate::backend::{Backend, BackendError, DirectoryBackend, Key};
use crate::block::{BlockHasher, BlockStore, StoreError, Upload};
use crate::collect::Condemned;
use crate::identity::StoreIdentity;
use crate::keys::{KeyringReport, MasterKey, NameKeys, OrgKeys};
use catalogue::{Catalogue, Location};
use files::{PackFiles, ReadPackError};
use frames::{Found, Frames};
use pack::PackIndex;

const PACKS_DIR: &str = "packs";
/// So often bytes from far away are read before they count as damaged: a bit that flipped on the way is no damage of
/// the store, and "damaged" makes people act.
const READS_REMOTE_MAX: u32 = 4;

const PACK_SUFFIX: &str = ".pack";

fn packs_dir() -> Result<Key, StoreError> {
    Ok(Key::new(&[PACKS_DIR])?)
}

/// The blocks of one org in pack files; see the module's first lines.
#[derive(Debug)]
pub struct PackStore {
    backend: Arc<dyn Backend>,
    files: PackFiles,
    hasher: BlockHasher,
    packs_dir: Key,
    catalogue: RwLock<Catalogue>,
    frames: Frames,
    refresh: Mutex<refresh::Unread>,
    /// The newest collection that this store knows of.
    epoch: AtomicU64,
    /// Which store this was when it was opened; none: its file is damaged.
    identity: Option<StoreIdentity>,
}

/// Why one copy of a block could not be had.
enum CopyError {
    /// The pack is not there, or cannot be read now.
    Backend(BackendError),
    /// Its bytes are not the block's.
    Damaged(String),
}

fn wrong_hash() -> CopyError {
    CopyError::Damaged("the hash differs".to_owned())
}

impl PackStore {
    /// Opens the store in the directory `path` for `org`, creating what is missing.
    ///
    /// # Errors
    /// As [`DirectoryBackend::open`] and [`PackStore::open`].
    pub fn open_directory(path: &Path, org: &str) -> Result<Self, StoreError> {
        Self::open(Arc::new(DirectoryBackend::open(path, org)?))
    }

    /// The same with a master key, or without one.
    ///
    /// # Errors
    /// As [`DirectoryBackend::open`], [`PackStore::open`] and [`PackStore::open_encrypted`].
    pub fn open_directory_with(
        path: &Path,
        org: &str,
        master: Option<&MasterKey>,
    ) -> Result<Self, StoreError> {
        Self::open_with(Arc::new(DirectoryBackend::open(path, org)?), org, master)
    }

    /// Opens the store of `org` on `backend` with a master key, or without one.
    ///
    /// # Errors
    /// As [`PackStore::open`] and [`PackStore::open_encrypted`].
    pub fn open_with(
        backend: Arc<dyn Backend>,
        org: &str,
        master: Option<&MasterKey>,
    ) -> Result<Self, StoreError> {
        match master {
            None => Self::open(backend),
            Some(master) => Self::open_encrypted(backend, org, master),
        }
    }

    /// Opens the store on `backend`.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the packs cannot be listed, [`StoreError::Keys`] when the store is
    /// encrypted. A pack that is damaged or cannot be read is no error here; only its blocks are.
    pub fn open(backend: Arc<dyn Backend>) -> Result<Self, StoreError> {
        let files = match backend.name_keys()? {
            None => PackFiles::plain(Arc::clone(&backend))?,
            Some(names) => PackFiles::named(Arc::clone(&backend), names),
        };
        Self::with_files(backend, files)
    }

    /// Opens the store on `backend`, whose blocks are named with these keys and whose packs are not sealed.
    pub(crate) fn open_named(backend: Arc<dyn Backend>, names: NameKeys) -> Result<Self, StoreError> {
        let files = PackFiles::named(Arc::clone(&backend), names);
        Self::with_files(backend, files)
    }

    /// Opens the store of `org` on `backend`, whose packs are encrypted from now on. An org without keys gets
    /// some; packs that are there stay readable, and collections write them anew.
    ///
    /// # Errors
    /// As [`PackStore::open`]; [`StoreError::Keys`] when the org's keys do not open with this master key. It is not
    /// needed, and not looked at, where the backend opens and seals packs itself.
    pub fn open_encrypted(
        backend: Arc<dyn Backend>,
        org: &str,
        master: &MasterKey,
    ) -> Result<Self, StoreError> {
        if backend.name_keys()?.is_some() {
            // Packs are sealed behind it, with keys that are not for whoever is here.
            return Self::open(backend);
        }
        let files = PackFiles::sealed_with_any(Arc::clone(&backend), org, master)?;
        Self::with_files(backend, files)
    }

    fn with_files(backend: Arc<dyn Backend>, files: PackFiles) -> Result<Self, StoreError> {
        let (identity, problem) = match StoreIdentity::establish(backend.as_ref()) {
            Ok(identity) => (Some(identity), None),
            Err(error @ StoreError::Damaged { .. }) => (None, Some(error.to_string())),
            Err(error) => return Err(error),
        };
        let store = Self {
            identity,
            packs_dir: packs_dir()?,
            catalogue: RwLock::new(Catalogue::open(backend.cache_dir(), files.cache_key())),
            hasher: files.hasher(),
            files,
            frames: Frames::default(),
            refresh: Mutex::default(),
            epoch: AtomicU64::new(0),
            backend,
        };
        problem.into_iter().for_each(|line| store.catalogue_mut().problem(line));
        store.refresh()?;
        Ok(store)
    }

    /// Which store this was when it was opened; none when the file that says so is damaged.
    pub const fn identity(&self) -> Option<&StoreIdentity> {
        self.identity.as_ref()
    }

    /// A store with the same keys on another backend, which must be empty.
    pub(crate) fn same_keys_on(&self, backend: Arc<dyn Backend>) -> Result<Self, StoreError> {
        let files = self.files.on(Arc::clone(&backend));
        Self::with_files(backend, files)
    }

    /// What its key ring says; none: it is not encrypted.
    ///
    /// # Errors
    /// When the ring cannot be read.
    pub fn keyring(&self) -> Result<Option<KeyringReport>, StoreError> {
        OrgKeys::report(self.backend.as_ref())
    }

    /// What it stands on, for those who keep other files of the org beside its packs.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// What is wrong with packs as far as it is known without reading them all: one line each.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = self.catalogue().problems();
        problems.extend(self.unread());
        problems
    }

    /// Begins an upload that packs otherwise than a secure does: harder, or also what is stored already.
    ///
    /// # Errors
    /// As [`BlockStore::upload`].
    pub fn repack(&self, packing: Packing) -> Result<Box<PackUpload<'_>>, StoreError> {
        // In this order: a pack that the list still shows and that is deleted later is in this list of condemned
        // ones, or in one of a later epoch.
        let condemned = Condemned::read(self.backend.as_ref())?;
        self.files.reload_keys()?;
        self.condemn(&condemned);
        self.take_suspects()?;
        self.refresh()?;
        Ok(Box::new(PackUpload::new(self, packing, condemned.epoch())))
    }

    /// From now on these packs hold nothing for uploads; reads still find what is in them.
    pub(crate) fn condemn(&self, condemned: &Condemned) {
        let mut catalogue = self.catalogue_mut();
        // A slower reader of an earlier list must not undo a later one.
        if self.epoch.fetch_max(condemned.epoch(), Ordering::SeqCst) <= condemned.epoch() {
            catalogue.condemn(condemned.packs());
        }
    }

    /// Takes up which packs others have found damaged, and writes down which were found here.
    fn take_suspects(&self) -> Result<(), StoreError> {
        let found_here = self.catalogue().found_damaged().clone();
        let suspects = match Suspects::read(self.backend.as_ref()) {
            Ok(known) if found_here.iter().all(|pack| known.packs().contains_key(pack)) => known,
            Ok(_) => self.add_suspects(&found_here)?,
            Err(error @ StoreError::Damaged { .. }) => {
                // It says nothing that cannot be found again, so it must not keep anybody from securing.
                let line = format!("{error}; it is written anew: verify the store, to know its damage again");
                self.catalogue_mut().problem(line);
                self.add_suspects(&found_here)?
            }
            Err(error) => return Err(error),
        };
        self.suspect(&suspects);
        Ok(())
    }

    /// Whether a pack that can be relied upon has the block.
    pub(crate) fn is_trusted(&self, hash: &BlockHash) -> bool {
        self.catalogue().has(hash)
    }

    /// From now on these packs hold nothing for uploads; reads still take what is right in them.
    pub(crate) fn suspect(&self, suspects: &Suspects) {
        self.catalogue_mut().suspect(suspects.names());
    }

    fn add_suspects(&self, found: &BTreeSet<PackName>) -> Result<Suspects, StoreError> {
        Suspects::change(self.backend.as_ref(), |packs| {
            for pack in found {
                packs.entry(*pack).or_insert(SuspectState::Damaged);
            }
        })
    }

    fn catalogue(&self) -> std::sync::RwLockReadGuard<'_, Catalogue> {
        self.catalogue.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn catalogue_mut(&self) -> std::sync::RwLockWriteGuard<'_, Catalogue> {
        self.catalogue.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn key_of(&self, name: &PackName) -> Result<Key, StoreError> {
        Ok(Key::new(&[self.packs_dir.as_str(), &format!("{name}{PACK_SUFFIX}")])?)
    }

    /// See [`READS_REMOTE_MAX`].
    fn reads_max(&self) -> u32 {
        if self.backend.is_remote() { READS_REMOTE_MAX } else { 1 }
    }

    /// A pack's index.
    fn index_of(&self, key: &Key) -> Result<PackIndex, ReadPackError> {
        let mut reads = self.reads_max();
        loop {
            reads -= 1;
            match PackIndex::read(&self.files, key) {
                Err(ReadPackError::Damaged(_)) if reads > 0 => {}
                read => return read,
            }
        }
    }

    fn read_copy(&self, place: &Location, hash: &BlockHash) -> Result<Vec<u8>, CopyError> {
        let range = place.offset as usize..place.offset as usize + place.len as usize;
        let right =
            |plain: &[u8]| plain.get(range.clone()).is_some_and(|bytes| self.hasher.hash(bytes) == *hash);
        if place.frame.plain_len == place.len {
            let plain = self.read_frame(place)?;
            return if right(&plain) { Ok(plain) } else { Err(wrong_hash()) };
        }
        let unfolding = match self.frames.find(place.pack, place.frame.offset) {
            Found::Kept(plain) if right(&plain) => return Ok(plain[range].to_vec()),
            // It is read again: what is kept may have been damaged on its way.
            Found::Kept(_) => None,
            Found::Unfold(unfolding) => Some(unfolding),
        };
        let plain = self.read_frame(place)?;
        if !right(&plain) {
            return Err(wrong_hash());
        }
        let plain = Arc::new(plain);
        let bytes = plain[range].to_vec();
        if let Some(unfolding) = unfolding {
            unfolding.keep(plain);
        }
        Ok(bytes)
    }

    fn read_frame(&self, place: &Location) -> Result<Vec<u8>, CopyError> {
        let name = self.catalogue().name(place.pack);
        let key = self.key_of(&name).map_err(|error| CopyError::Damaged(error.to_string()))?;
        pack::read_frame(&self.files, &key, &place.frame).map_err(|error| match error {
            ReadPackError::Backend(error) => CopyError::Backend(error),
            ReadPackError::Damaged(detail) => CopyError::Damaged(format!("pack {name}: {detail}")),
        })
    }

    /// Reads the first good copy among `places`; else the failure that says least, because what cannot be read now
    /// may be right later.
    fn read_first(&self, places: &[Location], hash: &BlockHash) -> Result<Vec<u8>, CopyError> {
        let mut worst = None;
        for place in places {
            match self.read_copy(place, hash) {
                Ok(bytes) => return Ok(bytes),
                Err(error) => {
                    if !matches!(worst, Some(CopyError::Backend(_))) {
                        worst = Some(error);
                    }
                }
            }
        }
        Err(worst.unwrap_or_else(|| CopyError::Damaged("there is no copy".to_owned())))
    }

    /// Those of `hashes` of which no pack has a copy, ascending; also a copy that no new state may rely on counts, if
    /// it is not known to be damaged. For looking, where [`BlockStore::missing`] is for writing.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] while that cannot be told of all packs.
    pub(crate) fn without_copy(&self, hashes: &[BlockHash]) -> Result<Vec<BlockHash>, StoreError> {
        let mut without = Vec::new();
        let mut refreshed = false;
        for hash in self.missing(hashes)? {
            let mut places = self.copies(&hash, true)?;
            if places.is_empty() && !std::mem::replace(&mut refreshed, true) && self.refresh()? {
                places = self.copies(&hash, true)?;
            }
            if places.is_empty() || self.catalogue().is_marked_damaged(&hash) {
                without.push(hash);
            }
        }
        if let (false, Some(pack)) = (without.is_empty(), self.unread().into_iter().next()) {
            return Err(StoreError::unavailable(pack, std::io::ErrorKind::WouldBlock));
        }
        Ok(without)
    }

    /// Places of the block. `proof`: the answer "nowhere" is certain, as far as the packs' indexes are.
    fn copies(&self, hash: &BlockHash, proof: bool) -> Result<Vec<Location>, StoreError> {
        let found = self.catalogue().copies(hash, proof);
        match found {
            Ok(places) => Ok(places),
            Err(_) => {
                // The segments are made anew from the packs' own indexes.
                self.catalogue_mut().distrust();
                self.refresh()?;
                let unavailable = |error| StoreError::unavailable("read the catalogue", error);
                self.catalogue().copies(hash, proof).map_err(unavailable)
            }
        }
    }

    /// Whether the index of a pack is another than the catalogue says. Each pack is asked once: damage that is known
    /// is not looked up for each of its blocks.
    fn is_stale(&self, places: &[Location], hash: &BlockHash) -> bool {
        places.iter().any(|place| {
            let (name, known) = {
                let catalogue = self.catalogue();
                (catalogue.name(place.pack), catalogue.is_suspect(place.pack))
            };
            let Ok(key) = self.key_of(&name) else { return false };
            !known
                && match PackIndex::read(&self.files, &key) {
                    Ok(index) => !index.has(hash, &place.frame, place.offset),
                    // Its blocks are found again from its frames.
                    Err(ReadPackError::Damaged(_)) => true,
                    Err(ReadPackError::Backend(_)) => false,
                }
        })
    }

    /// What to answer about a block of which no copy was found.
    fn nowhere(&self, hash: &BlockHash) -> StoreError {
        if let Some(pack) = self.unread().into_iter().next() {
            let error = std::io::Error::from(std::io::ErrorKind::WouldBlock);
            return StoreError::unavailable(format!("look for block {hash}: {pack}"), error);
        }
        match self.catalogue().incomplete() {
            None => StoreError::Absent { hash: *hash },
            // A pack that cannot be read to its end may have held it: absence is not proven.
            Some(pack) => StoreError::damaged(format!("block {hash}"), format!("not found, and {pack}")),
        }
    }
}

impl BlockStore for PackStore {
    fn hasher(&self) -> &BlockHasher {
        &self.hasher
    }

    fn get(&self, hash: &BlockHash) -> Result<Vec<u8>, StoreError> {
        let places = self.copies(hash, false)?;
        if !places.is_empty()
            && let Ok(bytes) = self.read_first(&places, hash)
        {
            if self.catalogue().is_marked_damaged(hash) {
                self.catalogue_mut().unmark_damaged(hash);
            }
            return Ok(bytes);
        }
        // A pack may have come, or have been replaced by another, since it was last listed.
        self.refresh()?;
        let places = self.copies(hash, true)?;
        if places.is_empty() {
            return Err(self.nowhere(hash));
        }
        let mut reads = self.reads_max();
        let mut read = loop {
            reads -= 1;
            match self.read_first(&places, hash) {
                Err(CopyError::Damaged(_)) if reads > 0 => {}
                read => break read,
            }
        };
        if matches!(read, Err(CopyError::Damaged(_))) && self.is_stale(&places, hash) {
            // Packs were put back, or exchanged, behind our back.
            self.catalogue_mut().forget_all();
            self.refresh()?;
            let places = self.copies(hash, true)?;
            if places.is_empty() {
                return Err(self.nowhere(hash));
            }
            read = self.read_first(&places, hash);
        }
        match read {
            Ok(bytes) => Ok(bytes),
            // Also a pack that is listed and then said not to be there: two answers that contradict each other
            // prove nothing.
            Err(CopyError::Backend(error)) => Err(error.into()),
            Err(CopyError::Damaged(detail)) => {
                let mut catalogue = self.catalogue_mut();
                catalogue.mark_damaged(*hash);
                for place in &places {
                    let pack = catalogue.name(place.pack);
                    catalogue.note_damaged(pack);
                }
                drop(catalogue);
                Err(StoreError::damaged(format!("block {hash}"), detail))
            }
        }
    }

    fn missing(&self, hashes: &[BlockHash]) -> Result<Vec<BlockHash>, StoreError> {
        let lacking = |hashes: &[BlockHash]| self.catalogue().lacking(hashes);
        let missing = lacking(hashes);
        if missing.is_empty() || !self.refresh()? {
            return Ok(missing);
        }
        Ok(lacking(&missing))
    }

    fn upload(&self) -> Result<Box<dyn Upload + '_>, StoreError> {
        Ok(self.repack(Packing::default())?)
    }
}
