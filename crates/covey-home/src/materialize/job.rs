//! What the threads of one materialize share.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use covey_types::Fault;

use super::place::Group;
use super::{Contents, Gap, MaterializeError, MaterializeRequest};
use crate::block::StoreError;
use crate::gaps::{GAPS_MAX, GapEntry, Gaps};
use crate::manifest::{Content, LinkGroup, LinkTable, Time};
use crate::object::ObjectError;
use crate::path::show;
use crate::stat_cache::{CacheWriter, RecordBuilder, StatCache};
use crate::sys;

/// Warnings that a report holds; further ones are counted.
const WARNINGS_MAX: usize = 100;

pub(super) struct Job<'a> {
    pub(super) request: &'a MaterializeRequest<'a>,
    contents: Option<&'a dyn Contents>,
    /// The file system has refused to share blocks.
    shares_nothing: AtomicBool,
    pub(super) cache: Option<StatCache>,
    /// Mode bits that the process's mask takes from what it creates; none if they cannot be told.
    pub(super) umask: Option<u16>,
    pub(super) groups: Vec<Mutex<Group>>,
    /// Linked names with their group, by directory and then by name.
    linked: Vec<(Vec<u8>, u32)>,
    /// Where the linked names of a directory stand in `linked`.
    linked_dirs: HashMap<Vec<u8>, Range<u32>>,
    /// Inodes of the target that a group goes on using; no second group may.
    adopted: Mutex<HashSet<(u64, u64)>>,
    records: Option<CacheWriter>,
    gaps: Mutex<Vec<Gap>>,
    /// What the next secure must keep.
    kept: Mutex<BTreeMap<Vec<u8>, GapEntry>>,
    /// Names whose attributes could not be read.
    bare: Mutex<BTreeSet<Vec<u8>>>,
    warnings: Mutex<Vec<String>>,
    warnings_left_out: AtomicU64,
    files_written: AtomicU64,
    bytes_written: AtomicU64,
    bytes_fetched: AtomicU64,
    bytes_shared: AtomicU64,
    removed: AtomicU64,
    changed: AtomicBool,
}

pub(super) struct Outcome {
    pub(super) cache: Option<StatCache>,
    pub(super) records: Option<CacheWriter>,
    pub(super) gaps: Vec<Gap>,
    /// The same for the next secure, but for what is hidden below directories.
    pub(super) kept: Gaps,
    pub(super) warnings: Vec<String>,
    pub(super) files_written: u64,
    pub(super) bytes_written: u64,
    pub(super) bytes_fetched: u64,
    pub(super) bytes_shared: u64,
    pub(super) removed: u64,
    pub(super) changed: bool,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Job<'a> {
    pub(super) fn new(
        request: &'a MaterializeRequest<'a>,
        contents: Option<&'a dyn Contents>,
        cache: Option<StatCache>,
        links: LinkTable,
    ) -> Self {
        let mut groups = Vec::with_capacity(links.groups.len());
        let mut paths: Vec<(Vec<u8>, Vec<u8>, u32)> = Vec::new();
        for (number, group) in links.groups.into_iter().enumerate() {
            groups.push(Mutex::new(Group::new(group.len())));
            paths.extend(group.into_iter().map(|mut path| {
                let name_at = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
                let name = path.split_off(name_at);
                path.pop();
                (path, name, number as u32)
            }));
        }
        paths.sort_unstable();
        let mut linked = Vec::with_capacity(paths.len());
        let mut linked_dirs: HashMap<Vec<u8>, Range<u32>> = HashMap::new();
        for (dir, name, group) in paths {
            let at = linked.len() as u32;
            linked_dirs.entry(dir).or_insert(at..at).end = at + 1;
            linked.push((name, group));
        }
        Self {
            request,
            contents,
            shares_nothing: AtomicBool::new(false),
            cache,
            umask: sys::umask(),
            groups,
            linked,
            linked_dirs,
            adopted: Mutex::default(),
            records: request.stat_cache.map(|path| CacheWriter::new(path, request.excludes.fingerprint())),
            gaps: Mutex::default(),
            kept: Mutex::default(),
            bare: Mutex::default(),
            warnings: Mutex::default(),
            warnings_left_out: AtomicU64::new(0),
            files_written: AtomicU64::new(0),
            bytes_written: AtomicU64::new(0),
            bytes_fetched: AtomicU64::new(0),
            bytes_shared: AtomicU64::new(0),
            removed: AtomicU64::new(0),
            changed: AtomicBool::new(false),
        }
    }

    /// A file of this host to share blocks with.
    pub(super) fn content_here(&self, content: &Content) -> Option<File> {
        let contents = self.contents.filter(|_| !self.shares_nothing.load(Ordering::Relaxed))?;
        contents.open(content)
    }

    pub(super) fn share_nothing(&self) {
        self.shares_nothing.store(true, Ordering::Relaxed);
    }

    pub(super) fn count_shared(&self, bytes: u64) {
        self.bytes_shared.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn check_cancel(&self) -> Result<(), MaterializeError> {
        if self.request.cancel.load(Ordering::Relaxed) { Err(MaterializeError::Cancelled) } else { Ok(()) }
    }

    pub(super) fn has_links(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Where the linked names of the directory at `path` stand.
    pub(super) fn linked_in(&self, path: &[u8]) -> Range<u32> {
        self.linked_dirs.get(path).cloned().unwrap_or_default()
    }

    /// The group of a name in the directory whose linked names stand at `linked`.
    pub(super) fn group(&self, linked: &Range<u32>, name: &[u8]) -> Option<&Mutex<Group>> {
        let names = self.linked.get(linked.start as usize..linked.end as usize)?;
        let at = names.binary_search_by(|(linked, _)| linked.as_slice().cmp(name)).ok()?;
        self.groups.get(names[at].1 as usize)
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
        let mut gaps = lock(&self.gaps);
        if gaps.len() >= GAPS_MAX {
            return Err(MaterializeError::Limit {
                path: show(path),
                limit: "names of one home that the store has lost; repair the store first",
            });
        }
        gaps.push(Gap { path: show(path), fault, reason: error.to_string() });
        Ok(())
    }

    /// As [`Job::gap`] for a name under which there is nothing now; `entry` is what the snapshot has.
    pub(super) fn gap_of(
        &self,
        path: Vec<u8>,
        entry: Vec<u8>,
        error: ObjectError,
    ) -> Result<(), MaterializeError> {
        self.gap(&path, error)?;
        lock(&self.kept).insert(path, GapEntry { entry, instead: None });
        Ok(())
    }

    /// The attributes of this name could not be read; [`Job::placed_bare`] follows when it is there.
    pub(super) fn note_bare(&self, path: Vec<u8>) {
        lock(&self.bare).insert(path);
    }

    /// A name was put in place; where its attributes are lacking, that is remembered with the inode.
    pub(super) fn placed_bare(
        &self,
        path: &dyn Fn() -> Vec<u8>,
        entry: &dyn Fn() -> Vec<u8>,
        at: (u64, Time),
    ) {
        let mut bare = lock(&self.bare);
        if bare.is_empty() {
            return;
        }
        let path = path();
        if bare.remove(&path) {
            lock(&self.kept).insert(path, GapEntry { entry: entry(), instead: Some(at) });
        }
    }

    /// Groups of linked names all of which are gaps.
    fn lost_links(&self, kept: &BTreeMap<Vec<u8>, GapEntry>) -> Vec<LinkGroup> {
        if kept.is_empty() {
            return Vec::new();
        }
        let mut groups: BTreeMap<u32, LinkGroup> = BTreeMap::new();
        for (dir, range) in &self.linked_dirs {
            for (name, group) in &self.linked[range.start as usize..range.end as usize] {
                let mut path = dir.clone();
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(name);
                groups.entry(*group).or_default().push(path);
            }
        }
        groups.into_values().filter(|group| group.iter().all(|path| kept.contains_key(path))).collect()
    }

    pub(super) fn warn(&self, warning: String) {
        let mut warnings = lock(&self.warnings);
        if warnings.len() < WARNINGS_MAX {
            warnings.push(warning);
        } else {
            self.warnings_left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The directory is as the stat cache has it, under this number.
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

    pub(super) fn count_written(&self, bytes: u64) {
        self.files_written.fetch_add(1, Ordering::Relaxed);
        self.bytes_written.fetch_add(bytes, Ordering::Relaxed);
        self.request.progress.bytes_done(bytes);
    }

    pub(super) fn count_fetched(&self, bytes: u64) {
        self.bytes_fetched.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn count_removed(&self) {
        self.removed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn mark_changed(&self) {
        self.changed.store(true, Ordering::Relaxed);
    }

    pub(super) fn into_outcome(self) -> Outcome {
        let kept = std::mem::take(&mut *lock(&self.kept));
        let links = self.lost_links(&kept);
        let kept = Gaps { entries: kept, links, hidden: (0, 0) };
        let take = |mutex: Mutex<Vec<String>>| mutex.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut warnings = take(self.warnings);
        let left_out = self.warnings_left_out.into_inner();
        if left_out > 0 {
            warnings.push(format!("{left_out} more warnings"));
        }
        let mut gaps = self.gaps.into_inner().unwrap_or_else(PoisonError::into_inner);
        gaps.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        Outcome {
            cache: self.cache,
            records: self.records,
            gaps,
            kept,
            warnings,
            files_written: self.files_written.into_inner(),
            bytes_written: self.bytes_written.into_inner(),
            bytes_fetched: self.bytes_fetched.into_inner(),
            bytes_shared: self.bytes_shared.into_inner(),
            removed: self.removed.into_inner(),
            changed: self.changed.into_inner(),
        }
    }
}
