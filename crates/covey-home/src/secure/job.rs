//! What the threads of one secure share.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use covey_types::BlockHash;

use super::{SecureError, SecureRequest};
use crate::block::{Block, StoreError, Upload};
use crate::manifest::{Blob, LinkGroup, Time, window_bytes};
use crate::stat_cache::StatCache;

/// Paths of one kind that a report names; the count goes on.
const REPORTED_MAX: usize = 100;

/// What is known of an inode with several names. All of them get this one entry, so that a file that is
/// written meanwhile cannot become two.
#[derive(Debug, Clone)]
pub(super) struct LinkedEntry {
    pub(super) entry: Arc<[u8]>,
    pub(super) inode: u64,
    pub(super) ctime: Time,
    pub(super) size: u64,
    pub(super) dirty: bool,
}

#[derive(Debug, Default)]
pub(super) struct LinkedInode {
    pub(super) entry: Mutex<Option<LinkedEntry>>,
    paths: Mutex<Vec<Vec<u8>>>,
}

/// A directory's record in the next stat cache.
#[derive(Debug)]
pub(super) enum Record {
    Kept(Range<usize>),
    New(Vec<u8>),
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
    pub(super) cache: Option<StatCache>,
    pub(super) missing: HashSet<BlockHash>,
    upload: &'a dyn Upload,
    linked: Mutex<HashMap<(u64, u64), Arc<LinkedInode>>>,
    records: Mutex<Vec<Record>>,
    files: AtomicU64,
    bytes: AtomicU64,
    files_read: AtomicU64,
    bytes_read: AtomicU64,
    partial: AtomicBool,
    notes: Mutex<Notes>,
}

/// What is left when the threads are done.
pub(super) struct Outcome {
    cache: Option<StatCache>,
    records: Vec<Record>,
    pub(super) cache_changed: bool,
    pub(super) partial: bool,
    pub(super) skipped: u64,
    pub(super) skipped_paths: Vec<String>,
    pub(super) warnings: Vec<String>,
}

impl Outcome {
    pub(super) fn records(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.records.iter().map(|record| match record {
            Record::New(bytes) => bytes.as_slice(),
            Record::Kept(range) => self.cache.as_ref().map_or(&[][..], |cache| cache.record(range)),
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Job<'a> {
    pub(super) fn new(
        request: &'a SecureRequest<'a>,
        cache: Option<StatCache>,
        missing: HashSet<BlockHash>,
        upload: &'a dyn Upload,
        warnings: Vec<String>,
    ) -> Self {
        Self {
            request,
            cache,
            missing,
            upload,
            linked: Mutex::default(),
            records: Mutex::default(),
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
        let block = Block::of(bytes)?;
        self.upload.put(&block)?;
        Ok(block.hash())
    }

    /// Bytes that stand in the object if they are few, else in blocks.
    pub(super) fn blob(&self, bytes: &[u8]) -> Result<Blob, StoreError> {
        if Blob::fits_inline(bytes.len()) {
            return Ok(Blob::Inline(bytes.to_vec()));
        }
        let len = bytes.len() as u64;
        let blocks =
            bytes.chunks(window_bytes(len) as usize).map(|part| self.put(part)).collect::<Result<_, _>>()?;
        Ok(Blob::Blocks { len, blocks })
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

    pub(super) fn add_record(&self, record: Record) {
        if self.request.stat_cache.is_some() {
            lock(&self.records).push(record);
        }
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
        linked.into_values().map(|inode| std::mem::take(&mut *lock(&inode.paths))).collect()
    }

    pub(super) fn into_outcome(self) -> Outcome {
        let records = self.records.into_inner().unwrap_or_else(PoisonError::into_inner);
        let all_kept = records.iter().all(|record| matches!(record, Record::Kept(_)));
        let known = self.cache.as_ref().map_or(0, StatCache::len);
        let mut notes = self.notes.into_inner().unwrap_or_else(PoisonError::into_inner);
        if notes.warnings_left_out > 0 {
            notes.warnings.push(format!("{} more warnings", notes.warnings_left_out));
        }
        Outcome {
            cache_changed: !all_kept || records.len() != known,
            cache: self.cache,
            records,
            partial: self.partial.into_inner(),
            skipped: notes.skipped,
            skipped_paths: notes.skipped_paths,
            warnings: notes.warnings,
        }
    }
}

impl LinkedInode {
    /// Adds a name whose entry is now part of its listing.
    pub(super) fn add_path(&self, path: Vec<u8>) {
        lock(&self.paths).push(path);
    }
}

pub(super) fn show(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}
