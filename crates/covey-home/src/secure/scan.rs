//! Walking a home: one task per directory, and per batch of files to read; a directory's listing is made when
//! everything below it is done.
//!
//! What stays true: each name is looked at with `lstat` first, only regular files are opened, and everything
//! is relative to directory descriptors. What does not belong here: how a file is read (`file`).

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use covey_types::BlockHash;
use rustix::fs::FileType;

use super::SecureError;
use super::file::{self, OpenFile, Opened};
use super::job::{Job, LinkedEntry};
use crate::anchor::{self, Anchor};
use crate::gaps::GapEntry;
use crate::manifest::{Blob, DEPTH_MAX, Entry, EntryBody, EntryKind, EntryView, ListingBuilder, Meta, Time};
use crate::path::show;
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
    fn as_cached<'s>(&'s self, dir: Option<&'s CachedDir>) -> Option<CachedEntry<'s>> {
        match self {
            Self::Cached(at) => dir?.entry(*at as usize),
            Self::New(new) => new.known.as_ref().map(|known| CachedEntry {
                name: new.name.to_bytes(),
                inode: known.inode,
                ctime: known.ctime,
                dirty: known.dirty,
                names_proven: known.names_proven,
                entry: &known.entry,
            }),
        }
    }
}

/// A directory of the walk.
#[derive(Debug)]
struct Node {
    anchor: Arc<Anchor>,
    /// The parent and our place in it.
    parent: Option<(Arc<Node>, usize)>,
    stat: Stat,
    known: Known,
    /// Its number in the cache.
    cached: Option<u32>,
    scanned: Mutex<Scanned>,
    /// Child directories and batches that are not done, and the scan of the directory itself.
    pending: AtomicUsize,
}

/// What the parent's record says of a directory whose inode is as it was.
#[derive(Debug, Default)]
struct Known {
    xattrs: Option<Blob>,
    /// It has the names of its own record.
    names: bool,
}

/// What the scan of a directory found; it goes when the directory is done.
#[derive(Debug, Default)]
struct Scanned {
    meta: Option<Meta>,
    lifted_from: Option<u16>,
    cached: Option<CachedDir>,
    slots: Vec<Slot>,
    at: Option<Time>,
    /// As long as its inode stays as it is, it has the names of `slots` and no others but excluded ones.
    names_proven: bool,
}

impl Node {
    fn new(
        job: &Job<'_>,
        anchor: Arc<Anchor>,
        parent: Option<(Arc<Node>, usize)>,
        stat: Stat,
        known: Known,
    ) -> Arc<Self> {
        Arc::new(Self {
            anchor,
            parent,
            stat,
            known,
            cached: job.cache.and_then(|cache| cache.find(stat.device, stat.inode)),
            scanned: Mutex::default(),
            pending: AtomicUsize::new(1),
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Only after an error: a finished directory has got its mode back already.
        if let Ok(Scanned { lifted_from: Some(mode), .. }) = self.scanned.get_mut() {
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
    let root = Node::new(job, Anchor::root(dir), None, *stat, Known::default());
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

/// A directory that was found, to be scanned once its parent's slots stand.
struct Child {
    slot: usize,
    name: CString,
    stat: Stat,
    known: Known,
}

fn scan_dir(job: &Job<'_>, node: &Arc<Node>, queue: &Queue) -> Result<(), SecureError> {
    let lifted =
        anchor::lift_dir(&node.anchor, &node.stat, 0o500).map_err(|error| unreadable(node, b"", error))?;
    lock(&node.scanned).lifted_from = lifted;
    let dir = node.anchor.open().map_err(|error| unreadable(node, b"", error))?;
    let now = stat_cache::now();
    let xattrs = match &node.known.xattrs {
        Some(xattrs) => xattrs.clone(),
        None => {
            let xattrs = sys::xattrs_of(&*dir).map_err(|error| unreadable(node, b"", error))?;
            job.blob(&xattrs.encode())?
        }
    };
    let cached = job.cache.zip(node.cached).and_then(|(cache, number)| cache.dir(number));
    let names = match cached.as_ref().filter(|_| node.known.names) {
        Some(cached) => Names::known(cached.names()),
        None => Names::read(dir.as_fd()).map_err(|error| unreadable(node, b"", error))?,
    };
    let mut names_proven = true;
    let mut scan = DirScan { job, node, dir: dir.as_fd(), cached: cached.as_ref(), now, blocks: Vec::new() };
    if let Some(cached) = scan.cached.filter(|_| job.asks()) {
        scan.blocks.reserve(names.len() + 1);
        scan.blocks.push(cached.listing);
        scan.blocks.extend_from_slice(&cached.pieces);
    }
    let mut slots = Vec::with_capacity(names.len());
    let mut to_read: Vec<(usize, u64)> = Vec::new();
    let mut children: Vec<Child> = Vec::new();
    let path = if job.request.excludes.needs_path() { node.anchor.path() } else { Vec::new() };
    let mut at = 0;
    let mut gaps = job.gaps_in(&node.anchor).into_iter().peekable();
    for name in names.iter() {
        let bytes = name.to_bytes();
        while let Some((gap_name, gap)) = gaps.next_if(|(gap_name, _)| *gap_name < bytes) {
            slots.extend(scan.keep_gap(&path, gap_name, gap, None));
        }
        let gap = gaps.next_if(|(gap_name, _)| *gap_name == bytes).map(|(_, gap)| gap);
        let position = scan.cached.and_then(|cached| cached.position(bytes, &mut at));
        let stat = match sys::stat_at(dir.as_fd(), name) {
            Ok(stat) => stat,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(unreadable(node, bytes, error)),
        };
        let is_dir = stat.file_type == FileType::Directory;
        if job.request.excludes.excludes(&path, bytes, is_dir) {
            // One that only this path excludes has to be seen when the directory is renamed.
            names_proven &= job.request.excludes.excludes_anywhere(bytes, is_dir);
            continue;
        }
        if let Some(slot) = gap.and_then(|gap| scan.keep_gap(&path, bytes, gap, Some(&stat))) {
            slots.push(slot);
            continue;
        }
        if is_dir {
            let known = scan.known_dir(&stat, position);
            children.push(Child { slot: slots.len(), name: name.to_owned(), stat, known });
        } else if stat.file_type == FileType::Unknown {
            job.skip(&node.anchor.path_of(bytes));
            names_proven = false;
            continue;
        } else if let Some(slot) = scan.reuse(name, &stat, position) {
            slots.push(slot);
            continue;
        } else if stat.file_type == FileType::RegularFile {
            to_read.push((slots.len(), stat.size));
        } else {
            let known = scan.small_entry(name, &stat)?;
            slots.extend(known.map(|known| scan.slot(name, Some(known), position)));
            continue;
        }
        slots.push(scan.slot(name, None, position));
    }
    for (gap_name, gap) in gaps {
        slots.extend(scan.keep_gap(&path, gap_name, gap, None));
    }
    let blocks = scan.blocks;
    job.ask(&blocks)?;
    let mut tasks = batches(node, to_read);
    for child in children {
        let anchor = Anchor::child(&node.anchor, child.name);
        if anchor.depth() > DEPTH_MAX {
            return Err(SecureError::Limit {
                path: show(&anchor.path()),
                limit: "directories below each other",
            });
        }
        let parent = Some((Arc::clone(node), child.slot));
        tasks.push(Task::Scan(Node::new(job, anchor, parent, child.stat, child.known)));
    }
    {
        let mut scanned = lock(&node.scanned);
        scanned.meta = Some(Meta { mode: node.stat.mode, mtime: node.stat.mtime, xattrs });
        scanned.cached = cached;
        scanned.slots = slots;
        scanned.at = Some(now);
        scanned.names_proven = names_proven;
    }
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

struct DirScan<'a> {
    job: &'a Job<'a>,
    node: &'a Arc<Node>,
    dir: BorrowedFd<'a>,
    cached: Option<&'a CachedDir>,
    now: Time,
    /// What the store is asked for when the directory is scanned.
    blocks: Vec<BlockHash>,
}

impl<'a> DirScan<'a> {
    fn slot(&self, name: &CStr, known: Option<LinkedEntry>, cached: Option<u32>) -> Slot {
        Slot::New(Box::new(NewSlot { name: name.to_owned(), known, cached }))
    }

    /// What the cache says of the name, if its inode is certainly as it was.
    fn unchanged(&self, stat: &Stat, position: Option<u32>) -> Option<(CachedEntry<'a>, EntryView<'a>)> {
        let dir = self.cached?;
        let cached = dir.entry(position? as usize)?;
        let view = cached.unchanged(dir.device, stat)?;
        Some((cached, view))
    }

    /// What is certainly as it was of a child directory.
    fn known_dir(&mut self, stat: &Stat, position: Option<u32>) -> Known {
        let Some((cached, view)) = self.unchanged(stat, position) else { return Known::default() };
        let names = cached.names_proven && self.job.trusts_names;
        if view.xattr_blocks().any(|block| self.job.is_lost(&block)) {
            return Known { xattrs: None, names };
        }
        let (xattrs, blocks) = (view.xattrs().ok(), view.xattr_blocks());
        if xattrs.is_some() && self.job.asks() {
            self.blocks.extend(blocks);
        }
        Known { xattrs, names }
    }

    /// The cached entry, if the inode is certainly unchanged and the store is not known to lack its blocks.
    fn reuse(&mut self, name: &CStr, stat: &Stat, position: Option<u32>) -> Option<Slot> {
        let (cached, view) = self.unchanged(stat, position)?;
        if self.job.has_losses() && !self.job.has_blocks(cached.entry) {
            return None;
        }
        let behind = if view.is_mapped_in_blocks() && self.job.asks() {
            stat_cache::mapped_blocks(cached.entry, self.job.request.store)
        } else {
            Vec::new()
        };
        let blocks = view.blocks();
        let mut slot = Slot::Cached(position?);
        if stat.links > 1 {
            let inode = self.job.linked_inode(stat.device, stat.inode);
            let mut entry = lock(&inode.entry);
            let shared = entry.get_or_insert_with(|| LinkedEntry {
                entry: cached.entry.into(),
                inode: cached.inode,
                ctime: cached.ctime,
                size: stat.size,
                dirty: false,
                names_proven: false,
            });
            if *shared.entry != *cached.entry {
                slot = self.slot(name, Some(shared.clone()), position);
            }
            drop(entry);
            inode.add_path(self.node.anchor.path_of(name.to_bytes()));
        }
        if stat.file_type == FileType::RegularFile {
            self.job.count_file(stat.size);
        }
        if self.job.asks() {
            self.blocks.extend(blocks);
            self.blocks.extend(behind);
        }
        self.job.request.progress.files_done(1);
        Some(slot)
    }

    /// The entry of a name that a materialize could not put back, if still nothing else stands in its place: the
    /// state keeps what it had.
    fn keep_gap(&self, dir: &[u8], name: &[u8], gap: &GapEntry, there: Option<&Stat>) -> Option<Slot> {
        let is_dir = gap.is_directory();
        if !gap.is_untouched(there) || self.job.request.excludes.excludes(dir, name, is_dir) {
            return None;
        }
        let view = EntryView::parse(&gap.entry).ok()?;
        let name = sys::c_name(name).ok()?;
        if view.kind == EntryKind::File {
            self.job.count_file(view.size);
        }
        self.job.keep_gap(self.node.anchor.path_of(name.to_bytes()));
        let known = LinkedEntry {
            entry: gap.entry.as_slice().into(),
            inode: 0,
            ctime: Time { seconds: 0, nanoseconds: 0 },
            size: view.size,
            // Never taken for what is there.
            dirty: true,
            names_proven: false,
        };
        Some(self.slot(&name, Some(known), None))
    }

    /// Everything but files and directories is never opened. None: gone meanwhile.
    fn small_entry(&self, name: &CStr, stat: &Stat) -> Result<Option<LinkedEntry>, SecureError> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => Ok(None),
            _ => Err(unreadable(self.node, name.to_bytes(), error)),
        };
        let body = match stat.file_type {
            FileType::Symlink => match rustix::fs::readlinkat(self.dir, name, Vec::new()) {
                Ok(target) => EntryBody::Symlink { target: target.into_bytes() },
                Err(error) => return failed(error.into()),
            },
            FileType::Socket => EntryBody::Socket,
            FileType::CharacterDevice => EntryBody::CharacterDevice(stat.number),
            FileType::BlockDevice => EntryBody::BlockDevice(stat.number),
            _ => EntryBody::Fifo,
        };
        let xattrs = if stat.file_type != FileType::Symlink {
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
            names_proven: false,
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
    /// Whether none of the entry's blocks is known to be lost.
    fn has_blocks(&self, entry: &[u8]) -> bool {
        if !self.has_losses() {
            return true;
        }
        let Ok(view) = EntryView::parse(entry) else { return false };
        let behind = stat_cache::mapped_blocks(entry, self.request.store);
        view.blocks().chain(behind).all(|block| !self.is_lost(&block))
    }
}

fn read_batch(job: &Job<'_>, node: &Arc<Node>, slots: &[usize]) -> Result<(), SecureError> {
    let dir = node.anchor.open().map_err(|error| unreadable(node, b"", error))?;
    let names: Vec<CString> = {
        let scanned = lock(&node.scanned);
        slots
            .iter()
            .map(|slot| match &scanned.slots[*slot] {
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
    if let Some(Slot::New(new)) = lock(&node.scanned).slots.get_mut(slot) {
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
    if !matches!(stat.file_type, FileType::RegularFile | FileType::Directory | FileType::Unknown) {
        let scan = DirScan { job, node, dir, cached: None, now: stat_cache::now(), blocks: Vec::new() };
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
    let known = {
        let scanned = lock(&node.scanned);
        let position = match scanned.slots.get(slot) {
            Some(Slot::New(new)) => new.cached,
            _ => None,
        };
        let previous = scanned.cached.as_ref().zip(position).and_then(|(dir, at)| dir.entry(at as usize));
        let kept = previous.filter(|previous| job.has_blocks(previous.entry));
        kept.zip(kept.and_then(|previous| previous.view())).map(|(previous, view)| LinkedEntry {
            entry: previous.entry.into(),
            inode: previous.inode,
            ctime: previous.ctime,
            size: view.size,
            dirty: true,
            names_proven: false,
        })
    };
    let Some(known) = known else {
        return Err(unreadable(node, name.to_bytes(), error));
    };
    if job.asks() {
        let blocks: Vec<_> =
            EntryView::parse(&known.entry).into_iter().flat_map(|view| view.blocks()).collect();
        job.ask(&blocks)?;
    }
    let path = show(&node.anchor.path_of(name.to_bytes()));
    job.keep_previous(format!("`{path}` cannot be read and stands as it was: {error}"));
    job.count_file(known.size);
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
        let scanned = std::mem::take(&mut *lock(&node.scanned));
        let listing = finish_dir(job, &node, &scanned);
        if let Some(mode) = scanned.lifted_from {
            anchor::set_dir_mode(&node.anchor, mode).map_err(|error| unreadable(&node, b"", error))?;
        }
        let listing = listing?;
        node.anchor.close();
        let meta = scanned.meta.ok_or_else(|| unreadable(&node, b"", io::Error::other("not scanned")))?;
        let Some((parent, slot)) = node.parent.clone() else {
            return Ok(Some((meta, listing)));
        };
        let racy = scanned.at.is_none_or(|at| stat_cache::is_racy(node.stat.ctime, at));
        let known = LinkedEntry {
            entry: Entry { meta, body: EntryBody::Directory { listing } }.encode().into(),
            inode: node.stat.inode,
            ctime: node.stat.ctime,
            size: 0,
            dirty: racy || scanned.lifted_from.is_some(),
            names_proven: scanned.names_proven,
        };
        set_slot(&parent, slot, known);
        node = parent;
    }
}

fn finish_dir(job: &Job<'_>, node: &Node, scanned: &Scanned) -> Result<BlockHash, SecureError> {
    let (slots, cached) = (&scanned.slots, scanned.cached.as_ref());
    if let Some((dir, number)) = cached.zip(node.cached)
        && is_unchanged(job, dir, slots)
    {
        job.keep_record(number);
        return Ok(dir.listing);
    }
    let entries: Vec<CachedEntry<'_>> = slots.iter().filter_map(|slot| slot.as_cached(cached)).collect();
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
    let inode = (node.stat.device, node.stat.inode);
    let mut record = RecordBuilder::new(inode, listing, &objects, entries.len());
    entries.iter().for_each(|entry| record.push(entry));
    job.add_record(&record);
    Ok(listing)
}

fn is_unchanged(job: &Job<'_>, dir: &CachedDir, slots: &[Slot]) -> bool {
    let same = |(at, slot): (usize, &Slot)| match slot {
        Slot::Cached(position) => *position as usize == at,
        Slot::New(new) => {
            new.cached == Some(at as u32)
                && new.known.as_ref().zip(dir.entry(at)).is_some_and(|(known, cached)| {
                    *known.entry == *cached.entry
                        && (known.inode, known.ctime, known.dirty, known.names_proven)
                            == (cached.inode, cached.ctime, cached.dirty, cached.names_proven)
                })
        }
    };
    slots.len() == dir.len()
        && slots.iter().enumerate().all(same)
        && !job.is_lost(&dir.listing)
        && dir.pieces.iter().all(|piece| !job.is_lost(piece))
}
