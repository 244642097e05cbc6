//! What the threads of one secure share.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use covey_types::BlockHash;

use super::{SecureError, SecureRequest};
use crate::anchor::Anchor;
use crate::block::{StoreError, Upload};
use crate::gaps::{GapEntry, Gaps};
use crate::manifest::{Blob, LinkGroup, Time};
use crate::object;
use crate::path::show;
use crate::read_file::{Buffers, FileReads};
use crate::stat_cache::{CacheWriter, RecordBuilder, StatCache};

/// Paths of one kind that a report names; the count goes on.
const REPORTED_MAX: usize = 100;
/// Blocks that one question to the store names: 2 MiB of hashes, few enough for one message and many enough that
/// a home of 200,000 files is four questions to a store that is far away.
const HASHES_PER_QUESTION: usize = 65_536;
/// Lost blocks that are told apart. A store that has lost more than this has most likely lost everything, and
/// reading everything is as cheap.
const LOST_MAX: usize = 262_144;

/// What is known of an inode with several names. All of them get this one entry, so that a file that is
/// written meanwhile cannot become two.
#[derive(Debug, Clone)]
pub(super) struct LinkedEntry {
    pub(super) entry: Arc<[u8]>,
    pub(super) inode: u64,
    pub(super) ctime: Time,
    pub(super) size: u64,
    pub(super) dirty: bool,
    /// As [`CachedEntry::names_proven`](crate::stat_cache::CachedEntry::names_proven).
    pub(super) names_proven: bool,
}

#[derive(Debug, Default)]
pub(super) struct LinkedInode {
    pub(super) entry: Mutex<Option<LinkedEntry>>,
    paths: Mutex<Vec<Vec<u8>>>,
}

/// Blocks that a stat cache speaks of and the store lacks: garbage collection took them, or they are damaged.
#[derive(Debug, Default)]
pub(super) enum Lost {
    /// Not asked yet: the walk takes the store to be whole and asks as it goes.
    #[default]
    Unknown,
    /// These; whatever needs them is read again.
    Known(HashSet<BlockHash>),
}

#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Counts {
    pub(super) files: u64,
    pub(super) bytes: u64,
    pub(super) files_read: u64,
    pub(super) bytes_read: u64,
}

#[derive(Debug, Default)]
struct Notes {
    warnings: Vec<String>,
    warnings_left_out: u64,
    skipped_paths: Vec<String>,
    skipped: u64,
}

pub(super) struct Job<'a> {
    pub(super) request: &'a SecureRequest<'a>,
    pub(super) cache: Option<&'a StatCache>,
    /// Whether names that the cache has proven count: it was written with this list of excludes, and nothing is
    /// missing in the home that belongs to its state.
    pub(super) trusts_names: bool,
    lost: &'a Lost,
    gaps: &'a Gaps,
    /// Gaps that are still there.
    kept_gaps: Mutex<BTreeSet<Vec<u8>>>,
    asked: Mutex<Asked>,
    upload: &'a dyn Upload,
    buffers: Buffers,
    linked: Mutex<HashMap<(u64, u64), Arc<LinkedInode>>>,
    records: Option<CacheWriter>,
    files: AtomicU64,
    bytes: AtomicU64,
    files_read: AtomicU64,
    bytes_read: AtomicU64,
    partial: AtomicBool,
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Asked {
    next: Vec<BlockHash>,
    lost: HashSet<BlockHash>,
}

/// What is left when the threads are done.
pub(super) struct Outcome {
    pub(super) records: Option<CacheWriter>,
    pub(super) partial: bool,
    pub(super) skipped: u64,
    pub(super) skipped_paths: Vec<String>,
    pub(super) warnings: Vec<String>,
    /// Gaps that the state has taken over from the one before.
    pub(super) kept_gaps: BTreeSet<Vec<u8>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Job<'a> {
    pub(super) fn new(
        request: &'a SecureRequest<'a>,
        cache: Option<&'a StatCache>,
        lost: &'a Lost,
        gaps: &'a Gaps,
        upload: &'a dyn Upload,
        warnings: Vec<String>,
    ) -> Self {
        let excludes = request.excludes.fingerprint();
        Self {
            request,
            cache,
            trusts_names: gaps.entries.is_empty() && cache.is_some_and(|cache| cache.excludes() == excludes),
            lost,
            gaps,
            kept_gaps: Mutex::default(),
            asked: Mutex::default(),
            upload,
            buffers: Buffers::new(),
            linked: Mutex::default(),
            records: request.stat_cache.map(|path| CacheWriter::new(path, excludes)),
            files: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            files_read: AtomicU64::new(0),
            bytes_read: AtomicU64::new(0),
            partial: AtomicBool::new(false),
            notes: Mutex::new(Notes { warnings, ..Notes::default() }),
        }
    }

    pub(super) fn check_cancel(&self) -> Result<(), SecureError> {
        if self.request.cancel.load(Ordering::Relaxed) { Err(SecureError::Cancelled) } else { Ok(()) }
    }

    pub(super) fn put(&self, bytes: &[u8]) -> Result<BlockHash, StoreError> {
        object::put(self.upload, bytes)
    }

    pub(super) fn blob(&self, bytes: &[u8]) -> Result<Blob, StoreError> {
        object::put_blob(self.upload, bytes)
    }

    pub(super) fn file_reads(&self) -> FileReads<'_> {
        FileReads { upload: self.upload, cancel: self.request.cancel, buffers: &self.buffers }
    }

    pub(super) fn linked_inode(&self, device: u64, inode: u64) -> Arc<LinkedInode> {
        Arc::clone(lock(&self.linked).entry((device, inode)).or_default())
    }

    pub(super) fn count_file(&self, bytes: u64) {
        self.files.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn count_read(&self, bytes: u64) {
        self.files_read.fetch_add(1, Ordering::Relaxed);
        self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
        self.request.progress.bytes_done(bytes);
    }

    pub(super) fn counts(&self) -> Counts {
        Counts {
            files: self.files.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            files_read: self.files_read.load(Ordering::Relaxed),
            bytes_read: self.bytes_read.load(Ordering::Relaxed),
        }
    }

    /// The directory is as the cache has it, under this number.
    pub(super) fn keep_record(&self, number: u32) {
        if let Some(records) = &self.records {
            records.keep(number);
        }
    }

    pub(super) fn add_record(&self, record: &RecordBuilder) {
        if let Some(records) = &self.records {
            records.add(record);
        }
    }

    /// Whether the store is known to lack the block.
    pub(super) fn is_lost(&self, block: &BlockHash) -> bool {
        matches!(self.lost, Lost::Known(lost) if lost.contains(block))
    }

    /// Whether any block is known to be lost.
    pub(super) fn has_losses(&self) -> bool {
        matches!(self.lost, Lost::Known(lost) if !lost.is_empty())
    }

    /// Whether the store has to be asked for blocks that are not read again.
    pub(super) const fn asks(&self) -> bool {
        matches!(self.lost, Lost::Unknown)
    }

    /// Asks the store whether it has these, together with others.
    pub(super) fn ask(&self, blocks: &[BlockHash]) -> Result<(), StoreError> {
        let question = {
            let mut asked = lock(&self.asked);
            asked.next.extend_from_slice(blocks);
            if asked.next.len() < HASHES_PER_QUESTION {
                return Ok(());
            }
            std::mem::take(&mut asked.next)
        };
        self.put_question(&question)
    }

    fn put_question(&self, question: &[BlockHash]) -> Result<(), StoreError> {
        for part in question.chunks(HASHES_PER_QUESTION) {
            let missing = self.request.store.missing(part)?;
            let mut asked = lock(&self.asked);
            if asked.lost.len() <= LOST_MAX {
                asked.lost.extend(missing);
            }
        }
        Ok(())
    }

    /// Asks what is left to ask; returns what the store lacks, or nothing at all if that is too much to tell
    /// apart.
    pub(super) fn take_lost(&self) -> Result<Option<HashSet<BlockHash>>, StoreError> {
        let rest = std::mem::take(&mut lock(&self.asked).next);
        self.put_question(&rest)?;
        let lost = std::mem::take(&mut lock(&self.asked).lost);
        Ok((lost.len() <= LOST_MAX).then_some(lost))
    }

    /// Counts what an earlier walk of the same secure has read.
    pub(super) fn add_reads(&self, earlier: Counts) {
        self.files_read.fetch_add(earlier.files_read, Ordering::Relaxed);
        self.bytes_read.fetch_add(earlier.bytes_read, Ordering::Relaxed);
    }

    pub(super) fn warn(&self, warning: String) {
        let mut notes = lock(&self.notes);
        if notes.warnings.len() < REPORTED_MAX {
            notes.warnings.push(warning);
        } else {
            notes.warnings_left_out += 1;
        }
    }

    pub(super) fn keep_previous(&self, warning: String) {
        self.partial.store(true, Ordering::Relaxed);
        self.warn(warning);
    }

    pub(super) fn skip(&self, path: &[u8]) {
        let mut notes = lock(&self.notes);
        notes.skipped += 1;
        if notes.skipped_paths.len() < REPORTED_MAX {
            notes.skipped_paths.push(show(path));
        }
    }

    pub(super) fn take_link_groups(&mut self) -> Vec<LinkGroup> {
        let linked = std::mem::take(&mut *lock(&self.linked));
        let mut groups: Vec<LinkGroup> =
            linked.into_values().map(|inode| std::mem::take(&mut *lock(&inode.paths))).collect();
        let kept = lock(&self.kept_gaps);
        let of_gaps = self.gaps.links.iter().filter(|group| group.iter().all(|path| kept.contains(path)));
        groups.extend(of_gaps.cloned());
        groups
    }

    /// What a materialize could not put into this directory, ascending by name.
    pub(super) fn gaps_in(&self, anchor: &Anchor) -> Vec<(&'a [u8], &'a GapEntry)> {
        if self.gaps.entries.is_empty() { Vec::new() } else { self.gaps.in_dir(&anchor.path()) }
    }

    /// The name stays as it was in the snapshot: it is a gap.
    pub(super) fn keep_gap(&self, path: Vec<u8>) {
        lock(&self.kept_gaps).insert(path);
    }

    /// Files and bytes below the directories that are gaps; none when one of them is no gap any more, because it is
    /// not known which were below that one.
    pub(super) fn hidden(&self) -> (u64, u64) {
        let kept = lock(&self.kept_gaps);
        let mut directories = self.gaps.entries.iter().filter(|(_, gap)| gap.is_directory());
        if directories.all(|(path, _)| kept.contains(path)) { self.gaps.hidden } else { (0, 0) }
    }

    pub(super) fn into_outcome(self) -> Outcome {
        let mut notes = self.notes.into_inner().unwrap_or_else(PoisonError::into_inner);
        if notes.warnings_left_out > 0 {
            notes.warnings.push(format!("{} more warnings", notes.warnings_left_out));
        }
        Outcome {
            records: self.records,
            partial: self.partial.into_inner(),
            skipped: notes.skipped,
            skipped_paths: notes.skipped_paths,
            warnings: notes.warnings,
            kept_gaps: self.kept_gaps.into_inner().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl LinkedInode {
    /// Adds a name whose entry is now part of its listing.
    pub(super) fn add_path(&self, path: Vec<u8>) {
        lock(&self.paths).push(path);
    }
}
