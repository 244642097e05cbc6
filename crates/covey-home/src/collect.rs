//! Garbage collection: packs that no snapshot needs are deleted, and packs that are mostly garbage are written anew
//! without it.
//!
//! What stays true (I8): in every interleaving with running secures, publishes and other collections nothing is
//! deleted that a published or soon-to-be-published snapshot names. The protocol, with no clock and no lock:
//!
//! 1. Mark: everything that the roots name is live. What cannot be read stops the collection.
//! 2. What is live in packs that shall go is copied to new packs.
//! 3. Condemn: the names of the packs that shall go are written to `gc/condemned` under the next *epoch*. An upload
//!    reads that file when it begins, before it lists packs; to it, condemned packs hold nothing.
//! 4. Raise the floor: a publish whose upload began in an earlier epoch is refused from now on, by the same
//!    conditional write that moves the pointer. Its secure begins again and costs what was condemned.
//! 5. Mark again: a publish that was accepted before the floor is seen now. A condemned pack that it needs stays.
//! 6. Delete the rest.
//!
//! A pack that was condemned once is never trusted again: a collection that was paused before step 6 may still
//! delete it. The next collection copies what is live in it and condemns it again. So a crash anywhere leaves packs
//! twice, or condemned and not deleted, and the next collection goes on. Two collections at once cannot both write
//! the same epoch; the slower one gives up. What does not belong here: which snapshots are kept (their owner deletes
//! pointers), and when to collect.

mod condemned;
mod count;
mod epoch;
mod mark;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use covey_types::{Fault, RootHash};
use serde::Serialize;

pub(crate) use condemned::Condemned;
pub use epoch::meet_floor;
pub use mark::MarkError;
pub(crate) use mark::Marker;

use crate::block::{StoreError, Upload};
use crate::keys::KeyId;
use crate::object;
use crate::pack_store::{
    Existing, PackContents, PackName, PackStore, PackUpload, Packing, SuspectState, Suspects,
};
use crate::progress::Progress;
use count::CountingBackend;

/// Packs that one collection deletes at most, so that their names fit in one small file; about 48 GB.
pub const CONDEMNED_MAX: usize = 1500;
/// A pack below this is small: a secure after a step that changed little makes one.
const SMALL_PACK_BYTES: u64 = 4 * 1024 * 1024;
/// Longest wait for the rate limit before it is looked whether somebody cancels.
const THROTTLE_PIECE: Duration = Duration::from_millis(100);
/// So many small packs are written together; fewer are not worth the writing.
const SMALL_PACKS_MIN: usize = 16;

/// So many epochs that others begin at the same time are no accident.
const FENCE_TRIES_MAX: usize = 16;

/// Who knows which states must stay, and who moves pointers.
pub trait Roots {
    /// Every root that is published, kept or otherwise needed.
    ///
    /// # Errors
    /// When not all can be told.
    fn roots(&self) -> Result<Vec<RootHash>, StoreError>;

    /// Returns when every publish whose upload began before `epoch` is either accepted, and among
    /// [`Roots::roots`] from now on, or will be refused.
    ///
    /// # Errors
    /// When that is not certain.
    fn raise_floor(&self, epoch: u64) -> Result<(), StoreError>;
}

/// The level that packs are written with by a collection: it has time.
pub const THOROUGH_LEVEL: i32 = 9;

/// How to collect.
#[derive(Debug, Clone, Copy)]
pub struct CollectOptions {
    /// Delete and write nothing, and report what would be.
    pub dry_run: bool,
    /// Packs of which less than this share of the stored bytes is live are written anew, 0 to 100 percent.
    pub rewrite_below_percent: u8,
    /// Bytes that are read, compressed and written in a second at most, as they are unfolded; 0: as fast as it
    /// goes. Limits the disk and the one processor that is used.
    pub bytes_per_second: u64,
    /// zstd's level for what is written.
    pub level: i32,
    /// Packs that a secure has written in haste and that are not garbage are written anew at this level, too, up to
    /// so many of their bytes in one run; 0: none.
    pub recompress_bytes: u64,
}

impl Default for CollectOptions {
    fn default() -> Self {
        Self {
            dry_run: false,
            rewrite_below_percent: 50,
            bytes_per_second: 0,
            level: THOROUGH_LEVEL,
            recompress_bytes: 0,
        }
    }
}

/// What a collection did, or would do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CollectReport {
    /// Nothing was changed.
    pub dry_run: bool,
    /// States that stay.
    pub roots: u64,
    /// Packs that were looked at.
    pub packs: u64,
    /// Their bytes.
    pub packs_bytes: u64,
    /// Packs that were deleted.
    pub packs_removed: u64,
    /// Those of them of which something was live and was copied first.
    pub packs_rewritten: u64,
    /// Packs among those that were rewritten only to be compressed harder, or encrypted with the newest key.
    pub packs_improved: u64,
    /// Packs that are garbage and stay until the next collection, because there were too many for one, or because
    /// a publish meanwhile needs something in them.
    pub packs_left: u64,
    /// Bytes of the deleted packs.
    pub removed_bytes: u64,
    /// Bytes of the packs that were written for what was live in them.
    pub written_bytes: u64,
    /// What the store shrank by.
    pub freed_bytes: i64,
    /// Keys that no pack was encrypted with any more, and that are gone.
    pub keys_retired: Vec<KeyId>,
    /// Duration in milliseconds.
    pub elapsed_ms: u64,
}

/// Why nothing, or not everything, was collected. Nothing that is needed was deleted.
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    /// It cannot be told what is needed.
    #[error("nothing is deleted: {0}; repair or delete that state first")]
    Mark(#[from] MarkError),
    /// Another collection of the same store is under way or has just been.
    #[error("another collection of this store was faster; look at what is left and run it again")]
    Overtaken,
    /// The caller's flag.
    #[error("cancelled")]
    Cancelled,
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl CollectError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Mark(error) => error.fault(),
            Self::Overtaken => Fault::Conflict,
            Self::Cancelled => Fault::Retry,
            Self::Store(error) => error.fault(),
        }
    }
}

/// A pack that shall go.
struct Doomed {
    name: PackName,
    file_len: u64,
    is_rewritten: bool,
    /// It goes although it is no garbage.
    is_improved: bool,
    /// It may hold more than is known: it stays condemned, and stays.
    is_damaged: bool,
}

impl CollectReport {
    fn count(&mut self, pack: &Doomed) {
        if pack.is_damaged {
            self.packs_left += 1;
            return;
        }
        self.packs_removed += 1;
        self.packs_rewritten += u64::from(pack.is_rewritten);
        self.packs_improved += u64::from(pack.is_improved);
        self.removed_bytes += pack.file_len;
    }
}

/// Deletes what no root needs; see the module's first lines.
///
/// # Errors
/// [`CollectError`].
pub fn collect(
    store: &PackStore,
    roots: &dyn Roots,
    options: &CollectOptions,
    cancel: &AtomicBool,
    progress: &dyn Progress,
) -> Result<CollectReport, CollectError> {
    let job = Job { store, options, cancel, progress, started: Instant::now() };
    let mut report = CollectReport { dry_run: options.dry_run, ..CollectReport::default() };
    store.reload_keys()?;
    // Before the mark: whoever writes an epoch meanwhile is noticed.
    let earlier = Condemned::read(store.backend().as_ref())?;
    let mut marker = Marker::new(store);
    let first = roots.roots()?;
    report.roots = first.len() as u64;
    marker.mark(&first, &|| job.check())?;
    let doomed = job.doomed(&marker, &earlier, &mut report)?;
    if options.dry_run {
        report.written_bytes =
            job.rewrite_into(&store.same_keys_on(Arc::new(CountingBackend))?, &doomed, &marker)?;
        for pack in &doomed {
            report.count(pack);
        }
    } else if !doomed.is_empty() || store.has_old_keys() {
        report.written_bytes = job.rewrite_into(store, &doomed, &marker)?;
        job.delete(roots, marker, &earlier, &doomed, &mut report)?;
    }
    report.freed_bytes = report.removed_bytes as i64 - report.written_bytes as i64;
    report.elapsed_ms = job.started.elapsed().as_millis() as u64;
    Ok(report)
}

/// Begins an epoch in which nothing is condemned: when this returns, every publish whose upload began before is either
/// accepted, and among [`Roots::roots`] from now on, or will be refused. For those whose states are needed by what
/// `roots` publishes and lie in stores of their own: their collections raise their floor with this.
///
/// # Errors
/// [`CollectError::Overtaken`] when others begin epochs all the time; the store's.
pub fn fence_uploads(store: &PackStore, roots: &dyn Roots) -> Result<(), CollectError> {
    for _ in 0..FENCE_TRIES_MAX {
        let earlier = Condemned::read(store.backend().as_ref())?;
        // What was condemned stays so: its collection may still delete it.
        if let Some(fenced) = earlier.replace(store.backend().as_ref(), earlier.packs().clone())? {
            store.condemn(&fenced);
            return Ok(roots.raise_floor(fenced.epoch())?);
        }
    }
    Err(CollectError::Overtaken)
}

struct Job<'a> {
    store: &'a PackStore,
    options: &'a CollectOptions,
    cancel: &'a AtomicBool,
    progress: &'a dyn Progress,
    started: Instant,
}

impl Job<'_> {
    fn check(&self) -> Result<(), CollectError> {
        if self.cancel.load(Ordering::Relaxed) { Err(CollectError::Cancelled) } else { Ok(()) }
    }

    /// The packs that go: those that were condemned before, then others, in the order of their names, so that a dry
    /// run and the run after it choose alike.
    fn doomed(
        &self,
        marker: &Marker<'_>,
        earlier: &Condemned,
        report: &mut CollectReport,
    ) -> Result<Vec<Doomed>, CollectError> {
        let mut doomed = Vec::new();
        let mut small = Vec::new();
        let suspects = Suspects::read(self.store.backend().as_ref())?;
        self.store.suspect(&suspects);
        let mut recompress = self.options.recompress_bytes;
        let newest_key = self.store.newest_key();
        let others: BTreeSet<PackName> = self.store.packs()?.into_iter().collect();
        for name in earlier.packs().iter().chain(others.difference(earlier.packs())) {
            self.check()?;
            let Some(contents) = self.store.pack_contents(name)? else { continue };
            report.packs += 1;
            report.packs_bytes += contents.file_len;
            let (live, all) = (live_bytes(&contents, marker), all_bytes(&contents));
            let percent = u64::from(self.options.rewrite_below_percent.min(100));
            let is_kept = live > 0 && live * 100 >= all * percent;
            let (file_len, is_damaged) = (contents.file_len, contents.reindexed);
            let is_hasty = !contents.thorough && file_len <= recompress;
            let is_improved = is_kept && !is_damaged && (is_hasty || contents.key != newest_key);
            let pack = Doomed { name: *name, file_len, is_rewritten: live > 0, is_improved, is_damaged };
            if suspects.packs().get(name) == Some(&SuspectState::Replaced) {
                // Repair has seen that everything needed lies in other packs; where that is not so, it stays.
                match self.is_elsewhere(&contents, marker) {
                    true => doomed.push(Doomed { is_rewritten: false, is_damaged: false, ..pack }),
                    false => report.packs_left += 1,
                }
            } else if earlier.packs().contains(name) {
                doomed.push(pack);
            } else if is_damaged || (suspects.packs().contains_key(name) && live > 0) {
                // It may hold more than its index could be made to tell: repair decides about it.
            } else if !is_kept || is_improved {
                if is_improved && is_hasty {
                    recompress -= file_len;
                }
                doomed.push(pack);
            } else if file_len < SMALL_PACK_BYTES {
                small.push(pack);
            }
        }
        if small.len() >= SMALL_PACKS_MIN {
            doomed.append(&mut small);
        }
        report.packs_left += doomed.len().saturating_sub(CONDEMNED_MAX) as u64;
        doomed.truncate(CONDEMNED_MAX);
        Ok(doomed)
    }

    /// Whether what is live in a damaged pack can be had without it.
    fn is_elsewhere(&self, contents: &PackContents, marker: &Marker<'_>) -> bool {
        let mut live = contents.blocks.iter().filter(|block| marker.is_live(&block.hash));
        live.all(|block| self.store.is_trusted(&block.hash))
    }

    /// Copies what is live in `doomed` to packs of `target`; gives the bytes of these packs.
    fn rewrite_into(
        &self,
        target: &PackStore,
        doomed: &[Doomed],
        marker: &Marker<'_>,
    ) -> Result<u64, CollectError> {
        if !doomed.iter().any(|pack| pack.is_rewritten) {
            return Ok(0);
        }
        let level = self.options.level;
        let upload = target.repack(Packing { level, existing: Existing::Copy, ..Packing::default() })?;
        for pack in doomed.iter().filter(|pack| pack.is_rewritten) {
            self.copy_live(&upload, pack, marker)?;
        }
        Ok((upload as Box<dyn Upload>).finish()?.stored_bytes_new)
    }

    fn copy_live(
        &self,
        upload: &PackUpload<'_>,
        pack: &Doomed,
        marker: &Marker<'_>,
    ) -> Result<(), CollectError> {
        let mut damage = None;
        self.store.read_pack(
            &pack.name,
            |hash, bytes| {
                if marker.is_live(hash) {
                    object::put(upload, bytes)?;
                }
                self.progress.bytes_done(bytes.len() as u64);
                self.throttle(bytes.len() as u64);
                Ok(())
            },
            |hash, detail| {
                if marker.is_live(hash) {
                    damage = Some(StoreError::damaged(format!("block {hash}"), detail));
                }
            },
        )?;
        self.check()?;
        damage.map_or(Ok(()), |damage| Err(damage.into()))
    }

    /// Keeps the average below the limit by waiting; the wait is for the disk's other users and for nothing else.
    fn throttle(&self, bytes: u64) {
        let nanos = (bytes.saturating_mul(1_000_000_000)).checked_div(self.options.bytes_per_second);
        let mut left = nanos.map_or(Duration::ZERO, Duration::from_nanos);
        // In pieces: a block may be large and the limit small, and whoever cancels does not wait for that.
        while !left.is_zero() && !self.cancel.load(Ordering::Relaxed) {
            let piece = left.min(THROTTLE_PIECE);
            std::thread::sleep(piece);
            left -= piece;
        }
    }

    fn delete(
        &self,
        roots: &dyn Roots,
        mut marker: Marker<'_>,
        earlier: &Condemned,
        doomed: &[Doomed],
        report: &mut CollectReport,
    ) -> Result<(), CollectError> {
        let names = doomed.iter().map(|pack| pack.name).collect();
        let Some(condemned) = earlier.replace(self.store.backend().as_ref(), names)? else {
            return Err(CollectError::Overtaken);
        };
        self.store.condemn(&condemned);
        roots.raise_floor(condemned.epoch())?;
        let before = marker.freeze();
        marker.mark(&roots.roots()?, &|| self.check())?;
        for pack in doomed {
            self.check()?;
            if pack.is_damaged {
                report.count(pack);
                continue;
            }
            // A newly live block is either in no pack that goes, or its pack stays. One that was live before was
            // copied.
            let contents = self.store.pack_contents(&pack.name)?;
            let is_needed = contents.is_some_and(|contents| {
                contents
                    .blocks
                    .iter()
                    .any(|block| marker.is_live(&block.hash) && !before.is_live(&block.hash))
            });
            if is_needed {
                report.packs_left += 1;
                continue;
            }
            if self.store.remove_pack(&pack.name)? {
                report.count(pack);
            }
        }
        // Behind the floor: an upload that does not know the newest key yet cannot be published any more.
        report.keys_retired = self.store.retire_keys()?;
        Ok(())
    }
}

fn all_bytes(contents: &PackContents) -> u64 {
    contents.blocks.iter().map(|block| u64::from(block.stored_len)).sum()
}

fn live_bytes(contents: &PackContents, marker: &Marker<'_>) -> u64 {
    contents
        .blocks
        .iter()
        .filter(|block| marker.is_live(&block.hash))
        .map(|block| u64::from(block.stored_len))
        .sum()
}
