//! What the threads of one materialize share.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use covey_types::Fault;

use super::tree::Group;
use super::{Gap, MaterializeError, MaterializeRequest};
use crate::block::StoreError;
use crate::manifest::LinkTable;
use crate::object::ObjectError;
use crate::stat_cache::StatCache;

/// Warnings that a report holds; further ones are counted.
const WARNINGS_MAX: usize = 100;

pub(super) struct Job<'a> {
    pub(super) request: &'a MaterializeRequest<'a>,
    pub(super) cache: Option<StatCache>,
    pub(super) groups: Vec<Mutex<Group>>,
    group_of: HashMap<Vec<u8>, u32>,
    /// Inodes of the target that a group goes on using; no second group may.
    adopted: Mutex<HashSet<(u64, u64)>>,
    records: Mutex<Vec<Vec<u8>>>,
    gaps: Mutex<Vec<Gap>>,
    warnings: Mutex<Vec<String>>,
    warnings_left_out: AtomicU64,
    files_written: AtomicU64,
    bytes_written: AtomicU64,
    removed: AtomicU64,
    changed: AtomicBool,
}

pub(super) struct Outcome {
    pub(super) records: Vec<Vec<u8>>,
    pub(super) gaps: Vec<Gap>,
    pub(super) warnings: Vec<String>,
    pub(super) files_written: u64,
    pub(super) bytes_written: u64,
    pub(super) removed: u64,
    pub(super) changed: bool,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn show(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

impl<'a> Job<'a> {
    pub(super) fn new(
        request: &'a MaterializeRequest<'a>,
        cache: Option<StatCache>,
        links: LinkTable,
    ) -> Self {
        let mut group_of = HashMap::new();
        let mut groups = Vec::with_capacity(links.groups.len());
        for (number, paths) in links.groups.into_iter().enumerate() {
            groups.push(Mutex::new(Group::new(paths.len())));
            group_of.extend(paths.into_iter().map(|path| (path, number as u32)));
        }
        Self {
            request,
            cache,
            groups,
            group_of,
            adopted: Mutex::default(),
            records: Mutex::default(),
            gaps: Mutex::default(),
            warnings: Mutex::default(),
            warnings_left_out: AtomicU64::new(0),
            files_written: AtomicU64::new(0),
            bytes_written: AtomicU64::new(0),
            removed: AtomicU64::new(0),
            changed: AtomicBool::new(false),
        }
    }

    pub(super) fn check_cancel(&self) -> Result<(), MaterializeError> {
        if self.request.cancel.load(Ordering::Relaxed) { Err(MaterializeError::Cancelled) } else { Ok(()) }
    }

    pub(super) fn has_links(&self) -> bool {
        !self.groups.is_empty()
    }

    pub(super) fn group(&self, path: &[u8]) -> Option<&Mutex<Group>> {
        self.groups.get(*self.group_of.get(path)? as usize)
    }

    /// Claims an inode for one group.
    pub(super) fn adopt(&self, device: u64, inode: u64) -> bool {
        lock(&self.adopted).insert((device, inode))
    }

    pub(super) fn target(&self, path: &[u8], source: io::Error) -> MaterializeError {
        MaterializeError::Target { dir: self.request.dir.to_owned(), path: show(path), source }
    }

    /// Names what cannot be restored and goes on, unless the store cannot be asked at all.
    pub(super) fn gap(&self, path: &[u8], error: ObjectError) -> Result<(), MaterializeError> {
        let fault = match &error {
            ObjectError::Store(StoreError::Unavailable { .. }) => {
                let ObjectError::Store(error) = error else { return Ok(()) };
                return Err(error.into());
            }
            ObjectError::Store(error) => error.fault(),
            ObjectError::Malformed(_) => Fault::Invalid,
        };
        lock(&self.gaps).push(Gap { path: show(path), fault, reason: error.to_string() });
        Ok(())
    }

    pub(super) fn warn(&self, warning: String) {
        let mut warnings = lock(&self.warnings);
        if warnings.len() < WARNINGS_MAX {
            warnings.push(warning);
        } else {
            self.warnings_left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn add_record(&self, record: Vec<u8>) {
        if self.request.stat_cache.is_some() {
            lock(&self.records).push(record);
        }
    }

    pub(super) fn count_written(&self, bytes: u64) {
        self.files_written.fetch_add(1, Ordering::Relaxed);
        self.bytes_written.fetch_add(bytes, Ordering::Relaxed);
        self.request.progress.bytes_done(bytes);
    }

    pub(super) fn count_removed(&self) {
        self.removed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn mark_changed(&self) {
        self.changed.store(true, Ordering::Relaxed);
    }

    pub(super) fn into_outcome(self) -> Outcome {
        let take = |mutex: Mutex<Vec<String>>| mutex.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut warnings = take(self.warnings);
        let left_out = self.warnings_left_out.into_inner();
        if left_out > 0 {
            warnings.push(format!("{left_out} more warnings"));
        }
        let mut gaps = self.gaps.into_inner().unwrap_or_else(PoisonError::into_inner);
        gaps.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        Outcome {
            records: self.records.into_inner().unwrap_or_else(PoisonError::into_inner),
            gaps,
            warnings,
            files_written: self.files_written.into_inner(),
            bytes_written: self.bytes_written.into_inner(),
            removed: self.removed.into_inner(),
            changed: self.changed.into_inner(),
        }
    }
}
