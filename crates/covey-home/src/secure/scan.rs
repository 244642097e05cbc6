//! Walking a home: one task per directory, and per batch of files to read; a directory's listing is made when
//! everything below it is done.
//!
//! What stays true: each name is looked at with `lstat` first, only regular files are opened, and everything
//! is relative to directory descriptors. What does not belong here: how a file is read (`file`).

use std::ffi::{CStr, CString};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use covey_types::BlockHash;
use rustix::fs::FileType;

use super::SecureError;
use super::file::{self, OpenFile, Opened};
use super::job::{Job, LinkedEntry, Record, show};
use crate::anchor::{self, Anchor};
use crate::manifest::{DEPTH_MAX, Entry, EntryBody, ListingBuilder, Meta, Time};
use crate::stat_cache::{self, CachedDir, CachedEntry, RecordBuilder};
use crate::sys::{self, Names, Stat};
use crate::work::Tasks;

/// Small files that one task reads; enough that taking a task costs nothing, few enough that threads share.
const BATCH_FILES: usize = 64;
const BATCH_BYTES: u64 = 1024 * 1024;

/// One name of a directory.
#[derive(Debug)]
enum Slot {
    /// As the cached directory has it, at this position.
    Cached(u32),
    New(Box<NewSlot>),
}

#[derive(Debug)]
struct NewSlot {
    name: CString,
    /// None until the file is read or the directory done; stays so for a name that vanished.
    known: Option<LinkedEntry>,
    /// Where the cached directory has this name.
    cached: Option<u32>,
}

impl Slot {
    /// The name with what is known of it; none for a name that vanished.
    fn as_cached<'s>(&'s self, dir: Option<&CachedDir<'s>>) -> Option<CachedEntry<'s>> {
        match self {
            Self::Cached(at) => dir?.entries.get(*at as usize).copied(),
            Self::New(new) => new.known.as_ref().map(|known| CachedEntry {
                name: new.name.to_bytes(),
                inode: known.inode,
                ctime: known.ctime,
                size: known.size,
                dirty: known.dirty,
                entry: &known.entry,
            }),
        }
    }
}

#[derive(Debug)]
struct Node {
    anchor: Arc<Anchor>,
    /// The parent and our place in it.
    parent: Option<(Arc<Node>, usize)>,
    stat: Stat,
    /// Filled when the directory was opened.
    meta: Mutex<Option<Meta>>,
    lifted_from: Mutex<Option<u16>>,
    cached: Option<Range<usize>>,
    slots: Mutex<Vec<Slot>>,
    /// Child directories and batches that are not done, and the scan of the directory itself.
    pending: AtomicUsize,
    scanned_at: Mutex<Option<Time>>,
}

impl Drop for Node {
    fn drop(&mut self) {
        // Only after an error: a finished directory has got its mode back already.
        if let Ok(Some(mode)) = self.lifted_from.get_mut() {
            drop(anchor::set_dir_mode(&self.anchor, *mode));
        }
    }
}

enum Task {
    Scan(Arc<Node>),
    Read(Arc<Node>, Vec<usize>),
}

type Queue = Tasks<Task, SecureError>;

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Walks everything; returns the root directory's metadata and listing.
pub(super) fn run(job: &Job<'_>, dir: OwnedFd, stat: &Stat) -> Result<(Meta, BlockHash), SecureError> {
    let root = Arc::new(Node {
        anchor: Anchor::root(dir),
        parent: None,
        stat: *stat,
        meta: Mutex::default(),
        lifted_from: Mutex::default(),
        cached: job.cache.as_ref().and_then(|cache| cache.find(stat.device, stat.inode)),
        slots: Mutex::default(),
        pending: AtomicUsize::new(1),
        scanned_at: Mutex::default(),
    });
    let result = Mutex::new(None);
    Queue::run(job.request.threads, Task::Scan(root), |task, queue| {
        job.check_cancel()?;
        let node = match task {
            Task::Scan(node) => {
                scan_dir(job, &node, queue)?;
                node
            }
            Task::Read(node, slots) => {
                read_batch(job, &node, &slots)?;
                node
            }
        };
        if let Some(done) = complete(job, node)? {
            *lock(&result) = Some(done);
        }
        Ok(())
    })?;
    result.into_inner().unwrap_or_else(PoisonError::into_inner).ok_or_else(|| SecureError::Home {
        dir: job.request.dir.to_owned(),
        source: io::Error::other("the walk ended without a result"),
    })
}

fn unreadable(node: &Node, name: &[u8], source: io::Error) -> SecureError {
    SecureError::Unreadable { path: show(&node.anchor.path_of(name)), source }
}

fn scan_dir(job: &Job<'_>, node: &Arc<Node>, queue: &Queue) -> Result<(), SecureError> {
    *lock(&node.lifted_from) =
        anchor::lift_dir(&node.anchor, &node.stat, 0o500).map_err(|error| unreadable(node, b"", error))?;
    let dir = node.anchor.open().map_err(|error| unreadable(node, b"", error))?;
    let now = stat_cache::now();
    *lock(&node.scanned_at) = Some(now);
    let xattrs = match reusable_xattrs(job, node) {
        Some(xattrs) => xattrs,
        None => {
            let xattrs = sys::xattrs_of(&*dir).map_err(|error| unreadable(node, b"", error))?;
            job.blob(&xattrs.encode())?
        }
    };
    *lock(&node.meta) = Some(Meta { mode: node.stat.mode, mtime: node.stat.mtime, xattrs });
    let names = Names::read(dir.as_fd()).map_err(|error| unreadable(node, b"", error))?;
    let cached = job.cache.as_ref().zip(node.cached.as_ref()).and_then(|(cache, range)| cache.dir(range));
    let scan = DirScan { job, node, dir: dir.as_fd(), cached: cached.as_ref(), now };
    let mut slots = Vec::with_capacity(names.len());
    let mut to_read: Vec<(usize, u64)> = Vec::new();
    let mut children: Vec<(usize, CString, Stat)> = Vec::new();
    let path = if job.request.excludes.needs_path() { node.anchor.path() } else { Vec::new() };
    let mut at = 0;
    for name in names.iter() {
        let bytes = name.to_bytes();
        let position = cached.as_ref().and_then(|cached| cached.position(bytes, &mut at));
        let stat = match sys::stat_at(dir.as_fd(), name) {
            Ok(stat) => stat,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(unreadable(node, bytes, error)),
        };
        if job.request.excludes.excludes(&path, bytes, stat.file_type == FileType::Directory) {
            continue;
        }
        match stat.file_type {
            FileType::Directory => children.push((slots.len(), name.to_owned(), stat)),
            FileType::RegularFile | FileType::Symlink | FileType::Fifo => {
                if let Some(slot) = scan.reuse(name, &stat, position) {
                    slots.push(slot);
                    continue;
                }
                if stat.file_type == FileType::RegularFile {
                    to_read.push((slots.len(), stat.size));
                } else {
                    let known = scan.small_entry(name, &stat)?;
                    slots.extend(known.map(|known| scan.slot(name, Some(known), position)));
                    continue;
                }
            }
            _ => {
                job.skip(&node.anchor.path_of(bytes));
                continue;
            }
        }
        slots.push(scan.slot(name, None, position));
    }
    let mut tasks = batches(node, to_read);
    for (slot, name, stat) in children {
        let anchor = Anchor::child(&node.anchor, name);
        if anchor.depth() > DEPTH_MAX {
            return Err(SecureError::Limit {
                path: show(&anchor.path()),
                limit: "directories below each other",
            });
        }
        tasks.push(Task::Scan(Arc::new(Node {
            anchor,
            parent: Some((Arc::clone(node), slot)),
            stat,
            meta: Mutex::default(),
            lifted_from: Mutex::default(),
            cached: job.cache.as_ref().and_then(|cache| cache.find(stat.device, stat.inode)),
            slots: Mutex::default(),
            pending: AtomicUsize::new(1),
            scanned_at: Mutex::default(),
        })));
    }
    *lock(&node.slots) = slots;
    node.pending.fetch_add(tasks.len(), Ordering::SeqCst);
    queue.extend(tasks);
    Ok(())
}

fn batches(node: &Arc<Node>, to_read: Vec<(usize, u64)>) -> Vec<Task> {
    let mut tasks = Vec::new();
    let mut batch = Vec::new();
    let mut bytes = 0;
    for (slot, size) in to_read {
        batch.push(slot);
        bytes += size;
        if batch.len() >= BATCH_FILES || bytes >= BATCH_BYTES {
            tasks.push(Task::Read(Arc::clone(node), std::mem::take(&mut batch)));
            bytes = 0;
        }
    }
    if !batch.is_empty() {
        tasks.push(Task::Read(Arc::clone(node), batch));
    }
    tasks
}

/// The directory's attributes from the cache of its parent, if its own inode is unchanged.
fn reusable_xattrs(job: &Job<'_>, node: &Node) -> Option<crate::manifest::Blob> {
    let (parent, slot) = node.parent.as_ref()?;
    let position = match lock(&parent.slots).get(*slot)? {
        Slot::New(new) => new.cached?,
        Slot::Cached(_) => return None,
    };
    let dir = job.cache.as_ref()?.dir(parent.cached.as_ref()?)?;
    let cached = dir.entries.get(position as usize)?;
    let unchanged = cached.matches(dir.device, &node.stat);
    let entry = Entry::decode(&mut crate::manifest::Cursor::new(cached.entry, "cached entry")).ok()?;
    let whole = entry.meta.xattrs.blocks().iter().all(|block| !job.missing.contains(block));
    (unchanged && whole).then_some(entry.meta.xattrs)
}

struct DirScan<'a> {
    job: &'a Job<'a>,
    node: &'a Arc<Node>,
    dir: BorrowedFd<'a>,
    cached: Option<&'a CachedDir<'a>>,
    now: Time,
}

impl DirScan<'_> {
    fn slot(&self, name: &CStr, known: Option<LinkedEntry>, cached: Option<u32>) -> Slot {
        Slot::New(Box::new(NewSlot { name: name.to_owned(), known, cached }))
    }

    /// The cached entry, if the inode is certainly unchanged and the store has its blocks.
    fn reuse(&self, name: &CStr, stat: &Stat, position: Option<u32>) -> Option<Slot> {
        let position = position?;
        let dir = self.cached?;
        let cached = dir.entries.get(position as usize)?;
        if !cached.matches(dir.device, stat) || !self.job.has_blocks(cached) {
            return None;
        }
        let mut slot = Slot::Cached(position);
        if stat.links > 1 {
            let inode = self.job.linked_inode(stat.device, stat.inode);
            let mut entry = lock(&inode.entry);
            let shared = entry.get_or_insert_with(|| LinkedEntry {
                entry: cached.entry.into(),
                inode: cached.inode,
                ctime: cached.ctime,
                size: cached.size,
                dirty: false,
            });
            if *shared.entry != *cached.entry {
                slot = self.slot(name, Some(shared.clone()), Some(position));
            }
            drop(entry);
            inode.add_path(self.node.anchor.path_of(name.to_bytes()));
        }
        if stat.file_type == FileType::RegularFile {
            self.job.count_file(stat.size);
        }
        self.job.request.progress.files_done(1);
        Some(slot)
    }

    /// Links and FIFOs are never opened. None: gone meanwhile.
    fn small_entry(&self, name: &CStr, stat: &Stat) -> Result<Option<LinkedEntry>, SecureError> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => Ok(None),
            _ => Err(unreadable(self.node, name.to_bytes(), error)),
        };
        let body = if stat.file_type == FileType::Symlink {
            match rustix::fs::readlinkat(self.dir, name, Vec::new()) {
                Ok(target) => EntryBody::Symlink { target: target.into_bytes() },
                Err(error) => return failed(error.into()),
            }
        } else {
            EntryBody::Fifo
        };
        let xattrs = if stat.file_type == FileType::Fifo {
            let fd = match sys::open_path_at(self.dir, name) {
                Ok(fd) => fd,
                Err(error) => return failed(error),
            };
            sys::xattrs_of_path_fd(fd.as_fd())
                .map_err(|error| unreadable(self.node, name.to_bytes(), error))?
        } else {
            Default::default()
        };
        let meta = Meta { mode: stat.mode, mtime: stat.mtime, xattrs: self.job.blob(&xattrs.encode())? };
        let made = LinkedEntry {
            entry: Entry { meta, body }.encode().into(),
            inode: stat.inode,
            ctime: stat.ctime,
            size: stat.size,
            dirty: stat_cache::is_racy(stat.ctime, self.now),
        };
        self.job.request.progress.files_done(1);
        if stat.links < 2 {
            return Ok(Some(made));
        }
        let inode = self.job.linked_inode(stat.device, stat.inode);
        inode.add_path(self.node.anchor.path_of(name.to_bytes()));
        let shared = lock(&inode.entry).get_or_insert(made).clone();
        Ok(Some(shared))
    }
}

impl Job<'_> {
    fn has_blocks(&self, cached: &CachedEntry<'_>) -> bool {
        if self.missing.is_empty() {
            return true;
        }
        let entry = Entry::decode(&mut crate::manifest::Cursor::new(cached.entry, "cached entry"));
        entry.is_ok_and(|entry| {
            let behind = stat_cache::mapped_blocks(&entry, self.request.store);
            entry.blocks().iter().chain(&behind).all(|block| !self.missing.contains(block))
        })
    }
}

impl CachedDir<'_> {
    /// Where `name` stands; `at` moves forward with the sorted names that are asked for.
    fn position(&self, name: &[u8], at: &mut usize) -> Option<u32> {
        while let Some(entry) = self.entries.get(*at) {
            match entry.name.cmp(name) {
                std::cmp::Ordering::Less => *at += 1,
                std::cmp::Ordering::Equal => return Some(*at as u32),
                std::cmp::Ordering::Greater => return None,
            }
        }
        None
    }
}

fn read_batch(job: &Job<'_>, node: &Arc<Node>, slots: &[usize]) -> Result<(), SecureError> {
    let dir = node.anchor.open().map_err(|error| unreadable(node, b"", error))?;
    let names: Vec<CString> = {
        let all = lock(&node.slots);
        slots
            .iter()
            .map(|slot| match &all[*slot] {
                Slot::New(new) => new.name.clone(),
                Slot::Cached(_) => CString::default(),
            })
            .collect()
    };
    let start = stat_cache::now();
    let mut forbidden = Vec::new();
    for (slot, name) in slots.iter().zip(&names) {
        job.check_cancel()?;
        match file::open(dir.as_fd(), name) {
            Ok(Opened::File(opened)) => read_one(job, node, *slot, name, opened, start)?,
            Ok(Opened::Forbidden(error)) => forbidden.push((*slot, name, error)),
            Ok(Opened::Changed) => changed_kind(job, node, dir.as_fd(), *slot, name)?,
            Err(error) => keep_previous(job, node, *slot, name, error)?,
        }
    }
    if forbidden.is_empty() {
        return Ok(());
    }
    let mut lifted = Vec::new();
    for (slot, name, error) in forbidden {
        match sys::stat_at(dir.as_fd(), name) {
            // Lifted once for all its names: a second time would move the ctime that the first one noted.
            Ok(stat) if stat.links > 1 => read_shared(job, node, slot, name, &stat, || {
                let opened = match file::open_lifted(dir.as_fd(), name) {
                    Ok(Some(opened)) => opened,
                    Ok(None) => return keep_previous(job, node, slot, name, error).map(|()| None),
                    Err(error) => return keep_previous(job, node, slot, name, error).map(|()| None),
                };
                stat_cache::settle(opened.stat.ctime);
                read_opened(job, node, slot, name, opened, stat_cache::now())
            })?,
            _ => match file::open_lifted(dir.as_fd(), name) {
                Ok(Some(opened)) => lifted.push((slot, name, opened)),
                Ok(None) => keep_previous(job, node, slot, name, error)?,
                Err(error) => keep_previous(job, node, slot, name, error)?,
            },
        }
    }
    // Lifting has moved every ctime to this moment. Without waiting for the next tick these files would be
    // dirty, and read, each time.
    if let Some(latest) = lifted.iter().map(|(_, _, opened)| opened.stat.ctime).max() {
        stat_cache::settle(latest);
    }
    let start = stat_cache::now();
    for (slot, name, opened) in lifted {
        read_one(job, node, slot, name, opened, start)?;
    }
    Ok(())
}

fn read_one(
    job: &Job<'_>,
    node: &Arc<Node>,
    slot: usize,
    name: &CStr,
    opened: OpenFile,
    start: Time,
) -> Result<(), SecureError> {
    let stat = opened.stat;
    let read = || read_opened(job, node, slot, name, opened, start);
    if stat.links > 1 {
        return read_shared(job, node, slot, name, &stat, read);
    }
    if let Some(known) = read()? {
        note_file(job, node, slot, known);
    }
    Ok(())
}

/// None: it stands as it was.
fn read_opened(
    job: &Job<'_>,
    node: &Arc<Node>,
    slot: usize,
    name: &CStr,
    opened: OpenFile,
    start: Time,
) -> Result<Option<LinkedEntry>, SecureError> {
    match file::read(job, opened, start, &|| node.anchor.path_of(name.to_bytes())) {
        Err(SecureError::Unreadable { source, .. }) => {
            keep_previous(job, node, slot, name, source)?;
            Ok(None)
        }
        other => other.map(Some),
    }
}

/// Reads an inode with several names once; whoever comes first does, the others wait for the result.
fn read_shared(
    job: &Job<'_>,
    node: &Arc<Node>,
    slot: usize,
    name: &CStr,
    stat: &Stat,
    read: impl FnOnce() -> Result<Option<LinkedEntry>, SecureError>,
) -> Result<(), SecureError> {
    let inode = job.linked_inode(stat.device, stat.inode);
    let mut shared = lock(&inode.entry);
    if shared.is_none() {
        *shared = read()?;
    }
    let known = shared.clone();
    drop(shared);
    if let Some(known) = known {
        inode.add_path(node.anchor.path_of(name.to_bytes()));
        note_file(job, node, slot, known);
    }
    Ok(())
}

fn note_file(job: &Job<'_>, node: &Node, slot: usize, known: LinkedEntry) {
    job.count_file(known.size);
    job.request.progress.files_done(1);
    set_slot(node, slot, known);
}

fn set_slot(node: &Node, slot: usize, known: LinkedEntry) {
    if let Some(Slot::New(new)) = lock(&node.slots).get_mut(slot) {
        new.known = Some(known);
    }
}

/// Between `lstat` and `open` the name went away or became something else.
fn changed_kind(
    job: &Job<'_>,
    node: &Arc<Node>,
    dir: BorrowedFd<'_>,
    slot: usize,
    name: &CStr,
) -> Result<(), SecureError> {
    let stat = match sys::stat_at(dir, name) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(unreadable(node, name.to_bytes(), error)),
    };
    if matches!(stat.file_type, FileType::Symlink | FileType::Fifo) {
        let scan = DirScan { job, node, dir, cached: None, now: stat_cache::now() };
        if let Some(known) = scan.small_entry(name, &stat)? {
            set_slot(node, slot, known);
        }
        return Ok(());
    }
    let changing = io::Error::other("it becomes something else while it is looked at");
    keep_previous(job, node, slot, name, changing)
}

/// A file that cannot be read stands as it was; without an earlier state nothing may be secured, because the
/// next reader would take its absence for a deletion.
fn keep_previous(
    job: &Job<'_>,
    node: &Arc<Node>,
    slot: usize,
    name: &CStr,
    error: io::Error,
) -> Result<(), SecureError> {
    if error.kind() == io::ErrorKind::NotFound {
        // Only the directory itself proves that the name is gone; the answer may have been `/proc`'s.
        let gone = node.anchor.open().and_then(|dir| sys::stat_at(dir.as_fd(), name));
        if gone.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Ok(());
        }
    }
    let cached = job.cache.as_ref().zip(node.cached.as_ref()).and_then(|(cache, range)| cache.dir(range));
    let position = match lock(&node.slots).get(slot) {
        Some(Slot::New(new)) => new.cached,
        _ => None,
    };
    let previous = cached.as_ref().zip(position).and_then(|(dir, at)| dir.entries.get(at as usize));
    let Some(previous) = previous.filter(|previous| job.has_blocks(previous)) else {
        return Err(unreadable(node, name.to_bytes(), error));
    };
    let path = show(&node.anchor.path_of(name.to_bytes()));
    job.keep_previous(format!("`{path}` cannot be read and stands as it was: {error}"));
    job.count_file(previous.size);
    let known = LinkedEntry {
        entry: previous.entry.into(),
        inode: previous.inode,
        ctime: previous.ctime,
        size: previous.size,
        dirty: true,
    };
    set_slot(node, slot, known);
    Ok(())
}

/// Takes one off the node's pending work; at zero makes its listing and goes on with the parent. Returns the
/// root's metadata and listing when everything is done.
fn complete(job: &Job<'_>, mut node: Arc<Node>) -> Result<Option<(Meta, BlockHash)>, SecureError> {
    loop {
        if node.pending.fetch_sub(1, Ordering::SeqCst) != 1 {
            return Ok(None);
        }
        let listing = finish_dir(job, &node)?;
        let lifted = lock(&node.lifted_from).take();
        if let Some(mode) = lifted {
            anchor::set_dir_mode(&node.anchor, mode).map_err(|error| unreadable(&node, b"", error))?;
        }
        node.anchor.close();
        let meta =
            lock(&node.meta).take().ok_or_else(|| unreadable(&node, b"", io::Error::other("not scanned")))?;
        let Some((parent, slot)) = node.parent.clone() else {
            return Ok(Some((meta, listing)));
        };
        let racy = lock(&node.scanned_at).is_none_or(|at| stat_cache::is_racy(node.stat.ctime, at));
        let known = LinkedEntry {
            entry: Entry { meta, body: EntryBody::Directory { listing } }.encode().into(),
            inode: node.stat.inode,
            ctime: node.stat.ctime,
            size: 0,
            dirty: racy || lifted.is_some(),
        };
        set_slot(&parent, slot, known);
        node = parent;
    }
}

fn finish_dir(job: &Job<'_>, node: &Node) -> Result<BlockHash, SecureError> {
    let slots = std::mem::take(&mut *lock(&node.slots));
    let cached = job.cache.as_ref().zip(node.cached.as_ref()).and_then(|(cache, range)| cache.dir(range));
    if let Some(dir) = cached.as_ref().filter(|dir| is_unchanged(job, dir, &slots)) {
        job.add_record(Record::Kept(node.cached.clone().unwrap_or_default()));
        return Ok(dir.listing);
    }
    let entries: Vec<CachedEntry<'_>> =
        slots.iter().filter_map(|slot| slot.as_cached(cached.as_ref())).collect();
    let mut builder = ListingBuilder::default();
    for entry in &entries {
        builder.push(entry.name, entry.entry);
    }
    let mut objects = Vec::new();
    let listing = builder.finish(|object| {
        let hash = job.put(object)?;
        objects.push(hash);
        Ok::<_, SecureError>(hash)
    })?;
    objects.retain(|object| *object != listing);
    let mut record = RecordBuilder::new(node.stat.device, node.stat.inode, listing, &objects, entries.len());
    entries.iter().for_each(|entry| record.push(entry));
    job.add_record(Record::New(record.finish()));
    Ok(listing)
}

fn is_unchanged(job: &Job<'_>, dir: &CachedDir<'_>, slots: &[Slot]) -> bool {
    let same = |(at, slot): (usize, &Slot)| match slot {
        Slot::Cached(position) => *position as usize == at,
        Slot::New(new) => {
            new.cached == Some(at as u32)
                && new.known.as_ref().is_some_and(|known| {
                    let cached = &dir.entries[at];
                    *known.entry == *cached.entry
                        && (known.inode, known.ctime, known.dirty)
                            == (cached.inode, cached.ctime, cached.dirty)
                })
        }
    };
    slots.len() == dir.entries.len()
        && slots.iter().enumerate().all(same)
        && !job.missing.contains(&dir.listing)
        && dir.pieces.iter().all(|piece| !job.missing.contains(piece))
}
