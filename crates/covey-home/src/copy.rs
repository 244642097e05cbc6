//! Copying an org's store to another backend: packs as they are, then the marks of collections, then pointers.
//!
//! What stays true: a pointer is copied after everything it names (I6), also while the source is in use and collects
//! garbage: pointers are read first, packs are listed after that, and listed again until every one is copied. A pack
//! is checked block by block on its way; one that is damaged is copied all the same, because what is whole in it would
//! be lost otherwise, and is named. Nothing in the target is removed, and no pointer there is moved back. Done again,
//! it copies what has come since: what is there is whole. What does not belong here: which orgs there are.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use covey_types::Fault;
use serde::Serialize;

use crate::backend::{Backend, BackendError, Expected, Key, MemoryBackend, PutOutcome};
use crate::block::StoreError;
use crate::collect::Condemned;
use crate::identity::StoreIdentity;
use crate::keys::{MasterKey, NameKeys, OrgKeys};
use crate::owner::{claim, owner};
use crate::pack_store::PackStore;
use crate::pointer::{PointerError, Pointers};
use crate::progress::Progress;

/// Packs on their way at once. Each is in memory twice, once to be checked.
const PACKS_AT_ONCE: usize = 3;
/// Bytes of one read.
const READ_BYTES: usize = 8 * 1024 * 1024;
/// Longest pack that is copied; writers seal at about 32 MiB.
const PACK_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// So often the source is listed; each time all that came since is copied.
const ROUNDS_MAX: usize = 16;
/// So often a pack is read before its damage is the source's and not the way's.
const READS_MAX: usize = 3;

/// What was copied.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CopyReport {
    /// Packs of the source.
    pub packs: u64,
    /// Those of them that the target did not have.
    pub packs_copied: u64,
    /// Their bytes.
    pub bytes_copied: u64,
    /// Blocks in them whose hash was checked.
    pub blocks_checked: u64,
    /// Homes whose pointers are in the target now.
    pub homes: u64,
    /// What is damaged in the source, one line each.
    pub problems: Vec<String>,
    /// Duration in milliseconds.
    pub elapsed_ms: u64,
}

/// Why it was not copied. What has been copied stays, and another try goes on from there.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The caller's flag.
    #[error("cancelled")]
    Cancelled,
    /// The home has another history in the target.
    #[error(
        "home `{home}` is at generation {there} in the target and at {here} in the source: the target has a life of its \
         own; copy to another place"
    )]
    Diverged {
        /// The home.
        home: String,
        /// In the source.
        here: u64,
        /// In the target.
        there: u64,
    },
    /// New packs came as fast as they were copied.
    #[error("the source is written to faster than it is copied; stop what writes to it and try again")]
    Overtaken,
    /// Either store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A pointer.
    #[error(transparent)]
    Pointer(#[from] PointerError),
}

impl CopyError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Cancelled | Self::Overtaken => Fault::Retry,
            Self::Diverged { .. } => Fault::Conflict,
            Self::Store(error) => error.fault(),
            Self::Pointer(error) => error.fault(),
        }
    }
}

impl From<BackendError> for CopyError {
    fn from(error: BackendError) -> Self {
        Self::Store(error.into())
    }
}

impl From<crate::name::InvalidName> for CopyError {
    fn from(error: crate::name::InvalidName) -> Self {
        Self::Store(error.into())
    }
}

/// A small file of the source as it was when it was read.
struct Taken {
    key: Key,
    bytes: Vec<u8>,
}

/// The pointers of one home.
struct HomeTaken {
    name: String,
    generation: u64,
    kept: Vec<Taken>,
    current: Taken,
}

/// What opens an encrypted source, so that its blocks can be checked.
#[derive(Debug, Clone, Copy)]
pub struct Sealing<'a> {
    /// The org.
    pub org: &'a str,
    /// The master key of its ring.
    pub master: &'a MasterKey,
}

/// Copies an org. An encrypted one takes its key ring along, unless the target has one of its own.
///
/// # Errors
/// [`CopyError`]; damage in the source is in the report.
pub fn copy(
    from: &Arc<dyn Backend>,
    to: &Arc<dyn Backend>,
    sealing: Option<Sealing<'_>>,
    cancel: &AtomicBool,
    progress: &dyn Progress,
) -> Result<CopyReport, CopyError> {
    let started = Instant::now();
    let sealing = match (OrgKeys::ring(from.as_ref())?, sealing) {
        (None, _) => None,
        (Some(ring), Some(sealing)) => {
            OrgKeys::share(from.as_ref(), to.as_ref())?;
            Some((ring, sealing))
        }
        // It says which key is missing.
        (Some(_), None) => {
            PackStore::open(Arc::clone(from))?;
            None
        }
    };
    let job = Job {
        from,
        to,
        sealing,
        cancel,
        progress,
        packs_copied: AtomicU64::new(0),
        bytes_copied: AtomicU64::new(0),
        blocks_checked: AtomicU64::new(0),
        problems: Mutex::default(),
    };
    StoreIdentity::carry(from.as_ref(), to.as_ref())?;
    job.owner()?;
    // First: whatever they name is in a pack that is listed later, or in one that a collection made of it.
    let homes = job.take_homes()?;
    let packs = job.packs()?;
    job.collection_marks()?;
    for home in &homes {
        job.put_home(home)?;
    }
    Ok(CopyReport {
        packs,
        packs_copied: job.packs_copied.into_inner(),
        bytes_copied: job.bytes_copied.into_inner(),
        blocks_checked: job.blocks_checked.into_inner(),
        homes: homes.len() as u64,
        problems: job.problems.into_inner().unwrap_or_else(PoisonError::into_inner),
        elapsed_ms: started.elapsed().as_millis() as u64,
    })
}

struct Job<'a> {
    from: &'a Arc<dyn Backend>,
    to: &'a Arc<dyn Backend>,
    /// The key ring's bytes, and what opens it.
    sealing: Option<(Vec<u8>, Sealing<'a>)>,
    cancel: &'a AtomicBool,
    progress: &'a dyn Progress,
    packs_copied: AtomicU64,
    bytes_copied: AtomicU64,
    blocks_checked: AtomicU64,
    problems: Mutex<Vec<String>>,
}

impl Job<'_> {
    fn check(&self) -> Result<(), CopyError> {
        if self.cancel.load(Ordering::Relaxed) { Err(CopyError::Cancelled) } else { Ok(()) }
    }

    fn problem(&self, line: String) {
        self.problems.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    fn take(&self, key: Key) -> Result<Option<Taken>, CopyError> {
        Ok(self.from.get(&key)?.map(|found| Taken { key, bytes: found.bytes }))
    }

    fn take_homes(&self) -> Result<Vec<HomeTaken>, CopyError> {
        let pointers = Pointers::on(Arc::clone(self.from));
        let mut homes = Vec::new();
        for name in pointers.homes()? {
            self.check()?;
            // Read as what they are, so that a damaged one is not carried on.
            let generation = pointers.current(&name)?.map_or(0, |current| current.generation.0);
            let Some(current) = self.take(Key::new(&["homes", &name, "current"])?)? else { continue };
            let mut kept = Vec::new();
            for number in self.from.list(&Key::new(&["homes", &name, "snapshots"])?)? {
                kept.extend(self.take(Key::new(&["homes", &name, "snapshots", &number])?)?);
            }
            homes.push(HomeTaken { name, generation, kept, current });
        }
        Ok(homes)
    }

    /// Copies every pack; returns how many there are.
    fn packs(&self) -> Result<u64, CopyError> {
        let dir = Key::new(&["packs"])?;
        let mut there: HashSet<String> = self.to.list(&dir)?.into_iter().collect();
        for _ in 0..ROUNDS_MAX {
            let listed = self.from.list(&dir)?;
            let missing: Vec<&String> = listed.iter().filter(|name| !there.contains(*name)).collect();
            if missing.is_empty() {
                self.to.flush(&dir)?;
                return Ok(listed.len() as u64);
            }
            let copied = self.copy_all(&missing)?;
            there.extend(copied);
        }
        Err(CopyError::Overtaken)
    }

    /// Copies these; returns those that are in the target now. One that is gone has been collected since.
    fn copy_all(&self, names: &[&String]) -> Result<Vec<String>, CopyError> {
        let (next, copied) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work = || -> Result<(), CopyError> {
            while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.check()?;
                if self.copy_one(name)? {
                    copied.lock().unwrap_or_else(PoisonError::into_inner).push((*name).clone());
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..PACKS_AT_ONCE.min(names.len())).map(|_| scope.spawn(work)).collect();
            // All of them, so that the first error is told when nobody writes any more.
            let ended: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            ended.into_iter().try_for_each(|ended| ended.unwrap_or(Err(StoreError::UploadFailed.into())))
        })?;
        Ok(copied.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn copy_one(&self, name: &str) -> Result<bool, CopyError> {
        let key = Key::new(&["packs", name])?;
        let mut last = None;
        for _ in 0..READS_MAX {
            let Some(bytes) = self.read(&key)? else { return Ok(false) };
            let opened = |memory: Arc<dyn Backend>| match &self.sealing {
                None => PackStore::open(memory),
                Some((ring, sealing)) => {
                    OrgKeys::put_ring(memory.as_ref(), ring)?;
                    PackStore::open_encrypted(memory, sealing.org, sealing.master)
                }
            };
            let (blocks, problems) = checked(&key, &bytes, opened)?;
            // What differs between two reads was damaged on the way.
            let is_settled = problems.is_empty() || last.as_ref() == Some(&problems);
            if is_settled {
                self.write(&key, &bytes)?;
                problems.into_iter().for_each(|problem| self.problem(problem));
                self.blocks_checked.fetch_add(blocks, Ordering::Relaxed);
                return Ok(true);
            }
            last = Some(problems);
        }
        let error = std::io::Error::from(std::io::ErrorKind::InvalidData);
        let what =
            format!("read {key} in {}, which comes damaged in another way each time", self.from.place());
        Err(StoreError::unavailable(what, error).into())
    }

    fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, CopyError> {
        let len = match self.from.file_len(key) {
            Ok(len) => len,
            Err(BackendError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if len > PACK_BYTES_MAX {
            let error = std::io::Error::from(std::io::ErrorKind::FileTooLarge);
            return Err(StoreError::unavailable(format!("copy {key} of {len} bytes"), error).into());
        }
        let mut bytes = Vec::with_capacity(len as usize);
        while (bytes.len() as u64) < len {
            self.check()?;
            let wanted = READ_BYTES.min(len as usize - bytes.len());
            match self.from.read(key, bytes.len() as u64, wanted) {
                Ok(more) if more.is_empty() => break,
                Ok(more) => bytes.extend_from_slice(&more),
                Err(BackendError::NotFound { .. }) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Some(bytes))
    }

    fn write(&self, key: &Key, bytes: &[u8]) -> Result<(), CopyError> {
        let mut file = self.to.create()?;
        file.append(bytes)?;
        file.publish(key)?;
        self.packs_copied.fetch_add(1, Ordering::Relaxed);
        self.bytes_copied.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.progress.files_done(1);
        self.progress.bytes_done(bytes.len() as u64);
        Ok(())
    }

    /// Before any pack: a collection of the copy must not ask pointers that a server's store never had.
    fn owner(&self) -> Result<(), CopyError> {
        if let Some(who) = owner(self.from.as_ref())? {
            let now = claim(self.to.as_ref(), &who)?;
            if now != who {
                let error = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
                let what = format!("give {} to {who}: it belongs to {now}", self.to.place());
                return Err(StoreError::unavailable(what, error).into());
            }
        }
        Ok(())
    }

    /// Epochs go with their floors: a target that began again at 0 would refuse every publish.
    fn collection_marks(&self) -> Result<(), CopyError> {
        let here = Condemned::read(self.from.as_ref())?;
        let there = Condemned::read(self.to.as_ref())?;
        if here.epoch() <= there.epoch() {
            return Ok(());
        }
        for name in ["condemned", "floor"] {
            let Some(taken) = self.take(Key::new(&["gc", name])?)? else { continue };
            match self.to.put_if(&taken.key, &taken.bytes, &Expected::Any)? {
                PutOutcome::Written(_) | PutOutcome::Conflict => {}
            }
        }
        Ok(())
    }

    fn put_home(&self, home: &HomeTaken) -> Result<(), CopyError> {
        self.check()?;
        let pointers = Pointers::on(Arc::clone(self.to));
        let there = self.to.get(&home.current.key)?;
        let generation = pointers.current(&home.name)?.map_or(0, |current| current.generation.0);
        let is_same = there.as_ref().is_some_and(|there| there.bytes == home.current.bytes);
        let diverged =
            || CopyError::Diverged { home: home.name.clone(), here: home.generation, there: generation };
        // The same generation with another floor is of the same life.
        let is_ahead = generation > home.generation
            || (generation == home.generation
                && generation > 0
                && pointers.current(&home.name)?
                    != Pointers::on(Arc::clone(self.from)).current(&home.name)?);
        if is_ahead && !is_same {
            return Err(diverged());
        }
        for kept in &home.kept {
            match self.to.put_if(&kept.key, &kept.bytes, &Expected::Any)? {
                PutOutcome::Written(_) | PutOutcome::Conflict => {}
            }
        }
        if is_same {
            return Ok(());
        }
        let expected = there.map_or(Expected::Absent, |there| Expected::Version(there.version));
        match self.to.put_if(&home.current.key, &home.current.bytes, &expected)? {
            PutOutcome::Written(_) => Ok(()),
            PutOutcome::Conflict => Err(diverged()),
        }
    }
}

/// A file that is not a whole pack, with the first reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DamagedPack(pub String);

/// Checks that `bytes` are a whole pack under a pack's name and that every block in it is what it is called, with a key
/// if `names` has one; returns how many there are. For whoever receives a pack that is not sealed from somebody else (I7).
///
/// # Errors
/// The first thing that is wrong.
pub fn check_pack(key: &Key, bytes: &[u8], names: Option<NameKeys>) -> Result<u64, DamagedPack> {
    let opened = |memory| match names {
        None => PackStore::open(memory),
        Some(names) => PackStore::open_named(memory, names),
    };
    let (blocks, problems) = checked(key, bytes, opened).map_err(|error| DamagedPack(error.to_string()))?;
    match problems.into_iter().next() {
        Some(problem) => Err(DamagedPack(problem)),
        None => Ok(blocks),
    }
}

/// Checks a pack's bytes; returns how many blocks are right, and what is not.
fn checked(
    key: &Key,
    bytes: &[u8],
    open: impl FnOnce(Arc<dyn Backend>) -> Result<PackStore, StoreError>,
) -> Result<(u64, Vec<String>), CopyError> {
    let memory: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    let mut file = memory.create()?;
    file.append(bytes)?;
    file.publish(key)?;
    let store = open(memory)?;
    let nothing = || Ok((0, vec![format!("{key} is no name of a pack")]));
    let Some(name) = store.packs()?.into_iter().next() else { return nothing() };
    let Some(check) = store.check_pack(&name)? else { return nothing() };
    let mut problems = check.problems;
    let damaged = check.damaged.iter();
    problems.extend(damaged.map(|(hash, why)| format!("{key}: block {hash} is damaged: {why}")));
    Ok((check.blocks, problems))
}
