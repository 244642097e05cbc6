//! A block store in a directory: pack files under `orgs/<org>/packs`.
//!
//! What stays true: a pack becomes visible by one rename after its bytes are durable, so a reader sees whole
//! packs only; several processes write at once, each its own packs; a miss looks for packs that others have
//! sealed meanwhile before it says "absent" (I7); nothing here deletes a pack (I8). What does not belong here:
//! the bytes of a pack (`pack`), pointers to snapshots (`crate::pointer`).

mod catalogue;
mod pack;
mod upload;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use covey_types::BlockHash;
use rustix::fs::FlockOperation;

use crate::block::{BlockStore, StoreError, Upload};
use crate::name::check_name;
use catalogue::{Catalogue, Location};
use pack::PackIndex;

/// Open pack files kept by one store; more would eat into a small `RLIMIT_NOFILE`.
const OPEN_PACKS_MAX: usize = 32;
/// Unfolded frames of several small blocks that are kept, because neighbours are read next. At 256 KiB each
/// this is 8 MiB.
const CACHED_FRAMES_MAX: usize = 32;

/// Counts what [`DirectoryStore::verify_packs`] looked at.
#[derive(Debug, Clone, Default)]
pub struct PackReport {
    /// Pack files.
    pub packs: u64,
    /// Blocks whose hash was right.
    pub blocks: u64,
    /// What was not, one line each.
    pub problems: Vec<String>,
}

/// The blocks of one org in a directory; see the module's first lines.
#[derive(Debug)]
pub struct DirectoryStore {
    org_dir: PathBuf,
    catalogue: RwLock<Catalogue>,
    open_packs: Mutex<Vec<(u32, Arc<File>)>>,
    frames: Mutex<Vec<FrameCached>>,
}

#[derive(Debug)]
struct FrameCached {
    pack: u32,
    frame: u32,
    plain: Arc<Vec<u8>>,
}

impl DirectoryStore {
    /// Opens the store at `path` for `org`, creating what is missing, and clears away the unfinished packs of
    /// processes that are gone.
    ///
    /// # Errors
    /// [`StoreError::Name`] for a bad org name, [`StoreError::Unavailable`] when the directory cannot be used.
    /// A damaged pack is no error here; only its blocks are.
    pub fn open(path: &Path, org: &str) -> Result<Self, StoreError> {
        check_name(org)?;
        let org_dir = path.join("orgs").join(org);
        for part in ["packs", "tmp"] {
            create_dir_durably(&org_dir.join(part))?;
        }
        sweep_abandoned(&org_dir.join("tmp"))?;
        let store = Self {
            org_dir,
            catalogue: RwLock::default(),
            open_packs: Mutex::default(),
            frames: Mutex::default(),
        };
        store.refresh()?;
        Ok(store)
    }

    /// The directory of the org, for those who keep other things of the org beside its blocks.
    pub fn org_dir(&self) -> &Path {
        &self.org_dir
    }

    fn packs_dir(&self) -> PathBuf {
        self.org_dir.join("packs")
    }

    fn pack_path(&self, name: &str) -> PathBuf {
        self.packs_dir().join(format!("{name}.pack"))
    }

    fn catalogue(&self) -> std::sync::RwLockReadGuard<'_, Catalogue> {
        self.catalogue.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn catalogue_mut(&self) -> std::sync::RwLockWriteGuard<'_, Catalogue> {
        self.catalogue.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes up packs that were sealed since; tells whether there were any.
    fn refresh(&self) -> Result<bool, StoreError> {
        let dir = self.packs_dir();
        let unavailable = |error| StoreError::unavailable(format!("list {}", dir.display()), error);
        let mut new = Vec::new();
        for entry in fs::read_dir(&dir).map_err(unavailable)? {
            let name = entry.map_err(unavailable)?.file_name();
            let Some(name) = name.to_str().and_then(|name| name.strip_suffix(".pack")) else { continue };
            if !self.catalogue().knows(name) {
                new.push(name.to_owned());
            }
        }
        for name in &new {
            let path = self.pack_path(name);
            let unavailable = |error| StoreError::unavailable(format!("read {}", path.display()), error);
            let file = match File::open(&path) {
                Ok(file) => file,
                // Collected between listing and opening.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(unavailable(error)),
            };
            let (index, problem) = match PackIndex::read(&file) {
                Ok(index) => (index, None),
                Err(pack::ReadIndexError::Io(error)) => return Err(unavailable(error)),
                Err(pack::ReadIndexError::Damaged(detail)) => {
                    let (index, complete) = PackIndex::rebuild(&file).map_err(unavailable)?;
                    (index, Some((detail, complete)))
                }
            };
            self.catalogue_mut().add(name, &index, problem);
        }
        Ok(!new.is_empty())
    }

    /// What is wrong with packs as far as it is known without reading them all: one line each.
    pub fn problems(&self) -> Vec<String> {
        self.catalogue().problems().to_vec()
    }

    fn pack_file(&self, pack: u32) -> Result<Arc<File>, StoreError> {
        let mut open = self.open_packs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = open.iter().position(|(number, _)| *number == pack) {
            let found = open.remove(at);
            let file = Arc::clone(&found.1);
            open.push(found);
            return Ok(file);
        }
        let path = self.pack_path(self.catalogue().name(pack));
        let file = File::open(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => StoreError::damaged(path.display().to_string(), "the pack is gone"),
            _ => StoreError::unavailable(format!("open {}", path.display()), error),
        })?;
        let file = Arc::new(file);
        if open.len() >= OPEN_PACKS_MAX {
            open.remove(0);
        }
        open.push((pack, Arc::clone(&file)));
        Ok(file)
    }

    fn frames(&self) -> MutexGuard<'_, Vec<FrameCached>> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_at(&self, place: &Location, hash: &BlockHash) -> Result<Vec<u8>, StoreError> {
        let cached = {
            let mut frames = self.frames();
            frames.iter().position(|f| f.pack == place.pack && f.frame == place.frame).map(|at| {
                let found = frames.remove(at);
                let plain = Arc::clone(&found.plain);
                frames.push(found);
                plain
            })
        };
        let from_cache = cached.is_some();
        let plain = match cached {
            Some(plain) => plain,
            None => {
                let file = self.pack_file(place.pack)?;
                let frame = self.catalogue().frame(place);
                Arc::new(pack::read_frame(&file, &frame)?)
            }
        };
        let range = place.offset as usize..place.offset as usize + place.len as usize;
        let shared = plain.len() != place.len as usize;
        let found = plain.get(range.clone()).filter(|bytes| BlockHash::of(bytes) == *hash).is_some();
        if !found {
            return Err(StoreError::damaged(format!("block {hash}"), "the hash differs"));
        }
        if !shared && !from_cache {
            return Ok(Arc::try_unwrap(plain).unwrap_or_else(|plain| plain.to_vec()));
        }
        let bytes = plain[range].to_vec();
        if shared && !from_cache {
            let mut frames = self.frames();
            if frames.len() >= CACHED_FRAMES_MAX {
                frames.remove(0);
            }
            frames.push(FrameCached { pack: place.pack, frame: place.frame, plain });
        }
        Ok(bytes)
    }

    /// Looks for further copies of a block in every pack on disk. Slow, and only used when the first copy is
    /// damaged or its place in the compact catalogue belongs to another block.
    fn read_any_copy(&self, hash: &BlockHash) -> Result<Vec<u8>, StoreError> {
        let mut last = StoreError::Absent { hash: *hash };
        for pack in 0..self.catalogue().pack_count() {
            let file = match self.pack_file(pack) {
                Ok(file) => file,
                Err(error @ StoreError::Unavailable { .. }) => return Err(error),
                Err(error) => {
                    last = error;
                    continue;
                }
            };
            let index = match PackIndex::read(&file) {
                Ok(index) => index,
                Err(pack::ReadIndexError::Io(error)) => {
                    return Err(StoreError::unavailable("read a pack's index", error));
                }
                Err(pack::ReadIndexError::Damaged(_)) => {
                    let (index, complete) = PackIndex::rebuild(&file)
                        .map_err(|error| StoreError::unavailable("read a pack", error))?;
                    if !complete {
                        last = StoreError::damaged(format!("block {hash}"), "a pack is damaged");
                    }
                    index
                }
            };
            let Ok(at) = index.blocks.binary_search_by_key(hash, |block| block.hash) else { continue };
            let block = index.blocks[at];
            let place = Location { pack, frame: block.frame, offset: block.offset, len: block.len };
            match self.read_at(&place, hash) {
                Ok(bytes) => {
                    self.catalogue_mut().replace(hash, place);
                    return Ok(bytes);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Reads every block of every pack and checks its hash.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when that cannot be done; damage is in the report.
    pub fn verify_packs(&self) -> Result<PackReport, StoreError> {
        self.refresh()?;
        let mut report = PackReport { problems: self.problems(), ..PackReport::default() };
        for pack in 0..self.catalogue().pack_count() {
            report.packs += 1;
            let name = self.catalogue().name(pack).to_owned();
            let file = match self.pack_file(pack) {
                Ok(file) => file,
                Err(error @ StoreError::Unavailable { .. }) => return Err(error),
                Err(error) => {
                    report.problems.push(error.to_string());
                    continue;
                }
            };
            let Ok(index) = PackIndex::read(&file) else {
                report.problems.push(format!("pack {name}: the index is damaged"));
                continue;
            };
            let mut plain: Option<(u32, Vec<u8>)> = None;
            let mut blocks = index.blocks;
            blocks.sort_unstable_by_key(|block| (block.frame, block.offset));
            for block in blocks {
                if plain.as_ref().is_none_or(|(frame, _)| *frame != block.frame) {
                    plain = match pack::read_frame(&file, &index.frames[block.frame as usize]) {
                        Ok(bytes) => Some((block.frame, bytes)),
                        Err(error @ StoreError::Unavailable { .. }) => return Err(error),
                        Err(_) => None,
                    };
                }
                let range = block.offset as usize..(block.offset + block.len) as usize;
                let bytes = plain.as_ref().and_then(|(_, bytes)| bytes.get(range));
                if bytes.is_some_and(|bytes| BlockHash::of(bytes) == block.hash) {
                    report.blocks += 1;
                } else {
                    report.problems.push(format!("pack {name}: block {} is damaged", block.hash));
                }
            }
        }
        Ok(report)
    }
}

impl BlockStore for DirectoryStore {
    fn get(&self, hash: &BlockHash) -> Result<Vec<u8>, StoreError> {
        let mut place = self.catalogue().find(hash);
        if place.is_none() && self.refresh()? {
            place = self.catalogue().find(hash);
        }
        let Some(place) = place else {
            return match self.catalogue().incomplete() {
                None => Err(StoreError::Absent { hash: *hash }),
                // A pack that cannot be read to its end may have held it: absence is not proven.
                Some(pack) => {
                    Err(StoreError::damaged(format!("block {hash}"), format!("not found, and {pack}")))
                }
            };
        };
        match self.read_at(&place, hash) {
            Err(damage @ StoreError::Damaged { .. }) => match self.read_any_copy(hash) {
                Ok(bytes) => Ok(bytes),
                Err(error @ StoreError::Unavailable { .. }) => Err(error),
                // The fingerprint was another block's, and every pack was asked: this one is in none.
                Err(error @ StoreError::Absent { .. }) => Err(error),
                Err(_) => {
                    self.catalogue_mut().mark_damaged(*hash);
                    Err(damage)
                }
            },
            other => other,
        }
    }

    fn missing(&self, hashes: &[BlockHash]) -> Result<Vec<BlockHash>, StoreError> {
        let lacking = |hashes: &[BlockHash]| -> Vec<BlockHash> {
            let catalogue = self.catalogue();
            hashes.iter().filter(|hash| !catalogue.has(hash)).copied().collect()
        };
        let missing = lacking(hashes);
        if missing.is_empty() || !self.refresh()? {
            return Ok(missing);
        }
        Ok(lacking(&missing))
    }

    fn upload(&self) -> Result<Box<dyn Upload + '_>, StoreError> {
        self.refresh()?;
        Ok(Box::new(upload::DirectoryUpload::new(self)))
    }
}

/// Creates a directory and those above it, each made durable in its parent: a pack in a directory that a power
/// cut takes away is no pack.
pub(crate) fn create_dir_durably(dir: &Path) -> Result<(), StoreError> {
    let unavailable = |error| StoreError::unavailable(format!("create {}", dir.display()), error);
    match fs::create_dir(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let Some(parent) = dir.parent() else { return Err(unavailable(error)) };
            create_dir_durably(parent)?;
            match fs::create_dir(dir) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(unavailable(error)),
            }
        }
        Err(error) => return Err(unavailable(error)),
    }
    match dir.parent() {
        Some(parent) if parent != Path::new("") => sync_dir(parent),
        _ => sync_dir(Path::new(".")),
    }
}

pub(crate) fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    File::open(dir)
        .and_then(|file| file.sync_all())
        .map_err(|error| StoreError::unavailable(format!("flush {}", dir.display()), error))
}

/// Removes unfinished packs that no living process holds locked. A lock, not an age, decides (I5: no clocks).
fn sweep_abandoned(tmp: &Path) -> Result<(), StoreError> {
    let unavailable = |error| StoreError::unavailable(format!("clear {}", tmp.display()), error);
    for entry in fs::read_dir(tmp).map_err(unavailable)? {
        let path = entry.map_err(unavailable)?.path();
        let Ok(file) = File::open(&path) else { continue };
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(unavailable(error)),
                _ => {}
            }
        }
    }
    Ok(())
}
