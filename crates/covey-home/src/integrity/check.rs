//! Looking at a whole store: every pack, every state, every small file.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use covey_types::{BlockHash, Fault};

use super::names::needs_of;
use super::record::{PackFound, Record};
use super::report::{LOST_NAMED_MAX, LostBlock, LostState, StoreReport};
use super::walk::{Lost, Walk};
use super::{NamedRoot, NamedRoots, RootNames};
use crate::backend::Backend;
use crate::block::{BlockStore as _, StoreError};
use crate::collect::Condemned;
use crate::identity::StoreIdentity;
use crate::name::random_bytes;
use crate::pack_store::{PackName, PackStore, Suspects};
use crate::pointer::Pointers;
use crate::progress::Progress;

/// Threads that read packs; each has some frames in memory.
const READERS_MAX: usize = 4;
/// Damaged copies that are told apart; a store with more is lost, and its other problems say so.
const DAMAGED_MAX: usize = 1_000_000;

/// What to look at.
#[derive(Clone, Copy)]
pub struct StoreCheck<'a> {
    /// The store.
    pub store: &'a PackStore,
    /// What it is kept for.
    pub roots: &'a dyn RootNames,
    /// Share of the packs that are read, 1 to 100 percent. Everything else is looked at whole: each state is walked,
    /// and each of its blocks must be in a pack.
    pub sample_percent: u8,
    /// A file that remembers which packs were read: a run that was stopped goes on, and sampled runs take the packs
    /// in turns until all were read.
    pub record: Option<&'a Path>,
    /// Ends the work early with [`IntegrityError::Cancelled`].
    pub cancel: &'a AtomicBool,
    /// Who watches: "files" are blocks here.
    pub progress: &'a dyn Progress,
}

impl std::fmt::Debug for StoreCheck<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreCheck").field("store", &self.store.backend().place()).finish_non_exhaustive()
    }
}

/// Why a store was not looked at, or not mended.
#[derive(Debug, thiserror::Error)]
pub enum IntegrityError {
    /// The caller's flag.
    #[error("cancelled")]
    Cancelled,
    /// The file that remembers which packs were read.
    #[error("the record {} cannot be used; name another file", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The store cannot be used now.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl IntegrityError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Cancelled => Fault::Retry,
            Self::Record { .. } => Fault::Invalid,
            Self::Store(error) => error.fault(),
        }
    }
}

/// Looks at the whole store and changes nothing in it.
///
/// # Errors
/// [`IntegrityError`]; whatever is wrong with the store is in the report.
pub fn check_store(check: &StoreCheck<'_>) -> Result<StoreReport, IntegrityError> {
    Ok(look(check)?.report)
}

/// What was found, in the form that mending needs.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) report: StoreReport,
    pub(super) roots: Vec<NamedRoot>,
    /// Packs with any damage.
    pub(super) wrong_packs: BTreeSet<PackName>,
    /// Packs that were read whole and are right.
    pub(super) right_packs: BTreeSet<PackName>,
}

pub(super) fn look(check: &StoreCheck<'_>) -> Result<Found, IntegrityError> {
    let started = Instant::now();
    let mut found = Found::default();
    found.report.place = check.store.backend().place();
    for line in small_file_problems(check.store.backend())? {
        found.report.problem(line);
    }
    // Before the packs: what a collection deletes meanwhile was not needed by these.
    let NamedRoots { roots, problems } = check.roots.named_roots()?;
    problems.into_iter().for_each(|line| found.report.problem(line));
    let damaged = packs(check, &mut found)?;
    let damaged = without_right_copy(check.store, damaged)?;
    let lost = states(check, &roots, &damaged, &mut found.report)?;
    found.report.lost = name_lost(check.store, &roots, &lost)?;
    found.report.lost_count = lost.len() as u64;
    found.roots = roots;
    found.report.elapsed_ms = started.elapsed().as_millis() as u64;
    found.report.judge();
    Ok(found)
}

/// What is wrong with the small files beside the packs.
fn small_file_problems(backend: &std::sync::Arc<dyn Backend>) -> Result<Vec<String>, StoreError> {
    let read = [
        StoreIdentity::read(backend.as_ref()).map(drop),
        Condemned::read(backend.as_ref()).map(drop),
        Suspects::read(backend.as_ref()).map(drop),
        Pointers::on(std::sync::Arc::clone(backend)).floor().map(drop),
    ];
    let mut problems = Vec::new();
    for read in read {
        match read {
            Ok(()) => {}
            Err(error @ StoreError::Damaged { .. }) => problems.push(error.to_string()),
            Err(error) => return Err(error),
        }
    }
    Ok(problems)
}

/// Reads the packs; gives every copy that is damaged.
fn packs(check: &StoreCheck<'_>, found: &mut Found) -> Result<BTreeMap<BlockHash, String>, IntegrityError> {
    let all: BTreeSet<PackName> = check.store.packs()?.into_iter().collect();
    found.report.packs = all.len() as u64;
    let record_path = check.record.unwrap_or(Path::new(""));
    let failed = |source| IntegrityError::Record { path: record_path.to_owned(), source };
    let record = check.record.map(|path| Record::open(path, &found.report.place, &all));
    let mut record = record.transpose().map_err(failed)?;
    let resumed: BTreeMap<PackName, PackFound> = record.as_mut().map_or_else(BTreeMap::new, |record| {
        std::mem::take(&mut record.done).into_iter().filter(|(pack, _)| all.contains(pack)).collect()
    });
    let chosen = choose(&all, &resumed, check.sample_percent);
    let completes = chosen.len() + resumed.len() == all.len();
    let mut damaged = BTreeMap::new();
    found.report.packs_resumed = resumed.len() as u64;
    for (pack, result) in resumed {
        note(pack, result, found, &mut damaged);
    }
    let next = AtomicUsize::new(0);
    let shared = Mutex::new((&mut *found, &mut damaged, &mut record));
    let (store, cancel, progress) = (check.store, check.cancel, check.progress);
    let work = || -> Result<(), IntegrityError> {
        while let Some(pack) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            if cancel.load(Ordering::Relaxed) {
                return Err(IntegrityError::Cancelled);
            }
            // Gone: collected since it was listed.
            let Some(checked) = store.check_pack(pack)? else { continue };
            progress.files_done(checked.blocks);
            progress.bytes_done(checked.file_len);
            let result = PackFound { damaged: checked.damaged, problems: checked.problems };
            let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
            let (found, damaged, record) = &mut *shared;
            if let Some(record) = record.as_mut() {
                record.add(*pack, &result).map_err(failed)?;
            }
            found.report.packs_checked += 1;
            found.report.bytes += checked.file_len;
            found.report.blocks += checked.blocks;
            note(*pack, result, found, damaged);
        }
        Ok(())
    };
    let readers = std::thread::available_parallelism().map_or(1, usize::from).min(READERS_MAX);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..readers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    if let Some(record) = record.filter(|_| completes) {
        record.complete().map_err(failed)?;
    }
    Ok(damaged)
}

fn note(pack: PackName, result: PackFound, found: &mut Found, damaged: &mut BTreeMap<BlockHash, String>) {
    if result.is_right() {
        found.right_packs.insert(pack);
        return;
    }
    found.wrong_packs.insert(pack);
    for (hash, detail) in result.damaged {
        found.report.damaged_copies += 1;
        if damaged.len() < DAMAGED_MAX {
            damaged.insert(hash, format!("pack {pack}: {detail}"));
        }
    }
    for problem in result.problems {
        found.report.problem(format!("pack {pack}: {problem}"));
    }
}

/// The packs of this run, at random, so that sampled runs without a record see others each time.
fn choose(
    all: &BTreeSet<PackName>,
    done: &BTreeMap<PackName, PackFound>,
    sample_percent: u8,
) -> Vec<PackName> {
    let mut open: Vec<PackName> = all.iter().filter(|pack| !done.contains_key(*pack)).copied().collect();
    if sample_percent >= 100 {
        return open;
    }
    let seed = random_bytes();
    open.sort_by_cached_key(|pack| {
        let mut hasher = blake3::Hasher::new();
        *hasher.update(&seed).update(pack.to_string().as_bytes()).finalize().as_bytes()
    });
    open.truncate((all.len() * usize::from(sample_percent)).div_ceil(100));
    open
}

fn without_right_copy(
    store: &PackStore,
    damaged: BTreeMap<BlockHash, String>,
) -> Result<BTreeMap<BlockHash, String>, StoreError> {
    let mut without = BTreeMap::new();
    for (hash, detail) in damaged {
        match store.get(&hash) {
            Ok(_) => {}
            Err(error @ StoreError::Unavailable { .. }) => return Err(error),
            Err(_) => {
                without.insert(hash, detail);
            }
        }
    }
    Ok(without)
}

fn states(
    check: &StoreCheck<'_>,
    roots: &[NamedRoot],
    damaged: &BTreeMap<BlockHash, String>,
    report: &mut StoreReport,
) -> Result<Lost, IntegrityError> {
    let lacking = |hashes: &[BlockHash]| check.store.without_copy(hashes);
    let go_on = || !check.cancel.load(Ordering::Relaxed);
    let mut walk = Walk::new(check.store, &lacking, damaged, &go_on);
    for root in roots {
        if !walk.root(&root.root)? {
            return Err(IntegrityError::Cancelled);
        }
    }
    walk.end()?;
    report.roots = roots.len() as u64;
    report.homes = roots.iter().map(|root| &root.home).collect::<BTreeSet<_>>().len() as u64;
    report.entries = walk.entries;
    std::mem::take(&mut walk.malformed).into_iter().for_each(|line| report.problem(line));
    Ok(std::mem::take(&mut walk.lost))
}

pub(super) fn name_lost(
    store: &PackStore,
    roots: &[NamedRoot],
    lost: &Lost,
) -> Result<Vec<LostBlock>, StoreError> {
    let named: BTreeMap<BlockHash, (LostState, String)> =
        lost.iter().take(LOST_NAMED_MAX).map(|(hash, why)| (*hash, why.clone())).collect();
    let mut needs = needs_of(store, roots, &named)?;
    let block = |(hash, (state, detail)): (BlockHash, (LostState, String))| {
        let needs = needs.remove(&hash).unwrap_or_default();
        LostBlock { hash, state, detail, needed_count: needs.count, needed_by: needs.first }
    };
    Ok(named.into_iter().map(block).collect())
}
