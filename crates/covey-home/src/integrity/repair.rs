//! Mending a store: what is lost is written anew from whoever still has the right bytes.
//!
//! Order: look; note damaged packs, so that from now on no upload relies on them; then copy what only they hold and
//! can still be read, then ask the sources, until nothing more is found (a directory that is mended may name more
//! that is lacking). Nothing is deleted. What stays lost is named, and comes back with the next secure of whoever
//! has it, because to an upload it is missing.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use covey_types::BlockHash;

use super::check::{Found, IntegrityError, StoreCheck, look, name_lost};
use super::report::RepairReport;
use super::sieve::Sieve;
use super::walk::{Lost, Walk};
use super::{NamedRoot, RootNames};
use crate::block::{BlockStore, StoreError};
use crate::collect::Condemned;
use crate::excludes::Excludes;
use crate::identity::StoreIdentity;
use crate::pack_store::{PackStore, SuspectState, Suspects};
use crate::pointer::Pointers;
use crate::progress::Progress;
use crate::secure::{SecureError, SecureRequest, secure};

/// Where right bytes may be.
#[derive(Clone, Copy)]
pub enum RepairSource<'a> {
    /// Another store, for example a backup.
    Store {
        /// For messages.
        name: &'a str,
        /// Its blocks.
        store: &'a dyn BlockStore,
    },
    /// A directory, for example a working copy; only read.
    Home {
        /// The directory.
        dir: &'a Path,
        /// What was left out of the snapshots: with other excludes the objects of directories are others.
        excludes: &'a Excludes,
    },
}

impl std::fmt::Debug for RepairSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Store { name, .. } => f.debug_tuple("Store").field(name).finish(),
            Self::Home { dir, .. } => f.debug_tuple("Home").field(dir).finish(),
        }
    }
}

/// What to mend.
#[derive(Clone, Copy)]
pub struct RepairRequest<'a> {
    /// The store.
    pub store: &'a PackStore,
    /// What it is kept for.
    pub roots: &'a dyn RootNames,
    /// The pointers of the same store, where states are kept there: damaged ones are mended, too.
    pub pointers: Option<&'a Pointers>,
    /// Asked in this order.
    pub sources: &'a [RepairSource<'a>],
    /// Ends the work early with [`IntegrityError::Cancelled`]; what was mended stays mended.
    pub cancel: &'a AtomicBool,
    /// Who watches.
    pub progress: &'a dyn Progress,
}

impl std::fmt::Debug for RepairRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RepairRequest").field("sources", &self.sources).finish_non_exhaustive()
    }
}

/// Mends what can be mended.
///
/// # Errors
/// [`IntegrityError`]; what is still lost is in the report.
pub fn repair_store(request: &RepairRequest<'_>) -> Result<RepairReport, IntegrityError> {
    let started = Instant::now();
    let mut report = RepairReport::default();
    mend_small_files(request.store, &mut report)?;
    if let Some(pointers) = request.pointers {
        let epoch = Condemned::read(request.store.backend().as_ref())?.epoch();
        report.rewritten.extend(pointers.mend(epoch)?);
    }
    let found = look(&StoreCheck {
        store: request.store,
        roots: request.roots,
        sample_percent: 100,
        record: None,
        cancel: request.cancel,
        progress: request.progress,
    })?;
    note_suspects(request.store, &found, &mut report)?;
    let mut job = Job { request, roots: &found.roots, report: &mut report };
    let mut lost = job.mend()?;
    // What was seen of it at the beginning says more than that no good copy is left.
    for known in &found.report.lost {
        if let Some(why) = lost.get_mut(&known.hash) {
            *why = (known.state, known.detail.clone());
        }
    }
    report.lost = name_lost(request.store, &found.roots, &lost)?;
    report.lost_count = lost.len() as u64;
    if lost.is_empty() {
        let replaced = Suspects::change(request.store.backend().as_ref(), |packs| {
            packs.values_mut().for_each(|state| *state = SuspectState::Replaced);
        })?;
        report.replaced_packs = replaced.packs().len() as u64;
    }
    report.problems.extend(request.roots.named_roots()?.problems);
    report.ok = lost.is_empty() && report.problems.is_empty();
    report.found = found.report;
    report.elapsed_ms = started.elapsed().as_millis() as u64;
    Ok(report)
}

fn mend_small_files(store: &PackStore, report: &mut RepairReport) -> Result<(), StoreError> {
    let backend = store.backend();
    let pointers = Pointers::on(Arc::clone(backend));
    if let Err(StoreError::Damaged { .. }) = StoreIdentity::read(backend.as_ref()) {
        StoreIdentity::write_anew(backend.as_ref())?;
        let line = "identity: the store has a new name; start its server once with --accept-store";
        report.rewritten.push(line.to_owned());
    }
    if let Err(StoreError::Damaged { .. }) = Condemned::read(backend.as_ref()) {
        // Which packs a collection was going to delete is not known any more, so none of those that are there may
        // be relied upon until the next collection has copied what is needed.
        let least = pointers.greatest_floor()?;
        let condemned = Condemned::write_anew(backend.as_ref(), least, store.packs()?)?;
        store.condemn(&condemned);
        report.rewritten.push(
            "gc/condemned: it names every pack; run a collection to make the store small again".to_owned(),
        );
    }
    if let Err(StoreError::Damaged { .. }) = pointers.floor() {
        pointers.write_floor(Condemned::read(backend.as_ref())?.epoch())?;
        report.rewritten.push("gc/floor".to_owned());
    }
    if let Err(StoreError::Damaged { .. }) = Suspects::read(backend.as_ref()) {
        // Every pack is about to be looked at.
        Suspects::change(backend.as_ref(), |_| {})?;
        report.rewritten.push("damage/suspects".to_owned());
    }
    Ok(())
}

fn note_suspects(store: &PackStore, found: &Found, report: &mut RepairReport) -> Result<(), StoreError> {
    let before = Suspects::read(store.backend().as_ref())?;
    let is_there = |pack| found.wrong_packs.contains(pack) || found.right_packs.contains(pack);
    let now = Suspects::change(store.backend().as_ref(), |packs| {
        // Gone ones need no line any more.
        packs.retain(|pack, _| found.wrong_packs.contains(pack));
        for pack in &found.wrong_packs {
            packs.entry(*pack).or_insert(SuspectState::Damaged);
        }
    })?;
    report.suspect_packs = now.packs().len() as u64;
    let cleared = before.packs().keys().filter(|pack| is_there(pack) && !now.packs().contains_key(*pack));
    report.cleared_packs = cleared.count() as u64;
    store.suspect(&now);
    Ok(())
}

struct Job<'a> {
    request: &'a RepairRequest<'a>,
    roots: &'a [NamedRoot],
    report: &'a mut RepairReport,
}

impl Job<'_> {
    /// Mends until nothing more is found; gives what is still lost.
    fn mend(&mut self) -> Result<Lost, IntegrityError> {
        loop {
            let lacking = self.lacking()?;
            if lacking.is_empty() {
                return Ok(Lost::new());
            }
            let mended = self.mend_once(lacking.keys().copied().collect())?;
            if mended == 0 {
                return Ok(lacking);
            }
        }
    }

    /// What is needed and in no pack that can be relied upon.
    fn lacking(&self) -> Result<Lost, IntegrityError> {
        let store = self.request.store;
        let lacking = |hashes: &[BlockHash]| store.missing(hashes);
        let go_on = || !self.request.cancel.load(Ordering::Relaxed);
        let nothing = BTreeMap::new();
        let mut walk = Walk::new(store, &lacking, &nothing, &go_on);
        for root in self.roots {
            if !walk.root(&root.root)? {
                return Err(IntegrityError::Cancelled);
            }
        }
        walk.end()?;
        Ok(std::mem::take(&mut walk.lost))
    }

    fn mend_once(&mut self, mut wanted: HashSet<BlockHash>) -> Result<u64, IntegrityError> {
        let (store, before) = (self.request.store, wanted.len());
        let upload = store.upload()?;
        self.report.mended_here += take_from(store, &mut wanted, &*upload, "this store", self.request)?.0;
        for source in self.request.sources {
            if wanted.is_empty() {
                break;
            }
            match source {
                RepairSource::Store { name, store } => {
                    let (count, problem) = take_from(*store, &mut wanted, &*upload, name, self.request)?;
                    self.report.mended_from_stores += count;
                    self.note(problem);
                }
                RepairSource::Home { dir, excludes } => {
                    let count = wanted.len();
                    let sieve = Sieve::new(&*upload, std::mem::take(&mut wanted));
                    let read = secure(&SecureRequest {
                        dir,
                        store: &sieve,
                        stat_cache: None,
                        excludes,
                        previous: None,
                        cancel: self.request.cancel,
                        progress: self.request.progress,
                        threads: 0,
                    });
                    wanted = sieve.into_wanted();
                    self.report.mended_from_homes += (count - wanted.len()) as u64;
                    match read {
                        Ok(_) => {}
                        Err(SecureError::Cancelled) => return Err(IntegrityError::Cancelled),
                        // What was found before it stays found.
                        Err(error) => self.note(Some(format!("{}: {error}", dir.display()))),
                    }
                }
            }
        }
        self.report.mended_bytes += upload.finish()?.bytes_new;
        Ok((before - wanted.len()) as u64)
    }

    fn note(&mut self, problem: Option<String>) {
        if let Some(problem) = problem.filter(|problem| !self.report.problems.contains(problem)) {
            self.report.problems.push(problem);
        }
    }
}

/// Copies what `from` has of `wanted`; tells how many, and what was wrong with it if anything was.
fn take_from(
    from: &dyn BlockStore,
    wanted: &mut HashSet<BlockHash>,
    upload: &dyn crate::block::Upload,
    name: &str,
    request: &RepairRequest<'_>,
) -> Result<(u64, Option<String>), IntegrityError> {
    let mut hashes: Vec<BlockHash> = wanted.iter().copied().collect();
    hashes.sort_unstable();
    let (mut count, mut problem) = (0, None);
    for hash in hashes {
        if request.cancel.load(Ordering::Relaxed) {
            return Err(IntegrityError::Cancelled);
        }
        match from.get(&hash) {
            Ok(bytes) => {
                upload.put(&upload.hasher().block(&bytes)?)?;
                request.progress.bytes_done(bytes.len() as u64);
                wanted.remove(&hash);
                count += 1;
            }
            Err(StoreError::Absent { .. } | StoreError::Damaged { .. }) => {}
            // One of many sources: what it has is not to be had now, and that is said.
            Err(error) => {
                problem = Some(format!("{name}: {error}"));
                break;
            }
        }
    }
    Ok((count, problem))
}
