//! The tree of one materialize: one task per directory and per batch of other names; a directory gets its own
//! metadata when everything below it, and every hard link into it, is done.
//!
//! What stays true: each step is relative to a directory descriptor; an existing name is kept only if the stat
//! cache proves that it is what the snapshot says.

use std::ffi::{CStr, CString};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use covey_types::BlockHash;
use rustix::fs::{AtFlags, FileType, Mode};

use super::job::{Job, lock, show};
use super::{MaterializeError, file, meta, remove};
use crate::anchor::{self, Anchor};
use crate::manifest::{DEPTH_MAX, Entry, EntryBody, MalformedObject, Meta};
use crate::object::{self, Listing};
use crate::stat_cache::{CachedDir, CachedEntry, RecordBuilder};
use crate::sys::{self, Names, Stat};
use crate::work::Tasks;

/// Names that one task puts in place.
const BATCH_NAMES: usize = 64;
const BATCH_BYTES: u64 = 1024 * 1024;

/// One name of the snapshot in a directory.
#[derive(Debug)]
struct Item {
    name: CString,
    entry: Entry,
    encoded: Vec<u8>,
    /// What is under the name in the target.
    existing: Option<Stat>,
    /// The target's inode already is what the snapshot says.
    keep: bool,
    /// As it is in the end, for the stat cache.
    done: Option<Stat>,
}

/// One directory of the snapshot.
#[derive(Debug)]
pub(super) struct Node {
    anchor: Arc<Anchor>,
    parent: Option<(Arc<Node>, usize)>,
    meta: Meta,
    listing: BlockHash,
    /// None: we have just created it.
    existing: Option<Stat>,
    cached: Option<Range<usize>>,
    items: Mutex<Vec<Item>>,
    pieces: Mutex<Vec<BlockHash>>,
    pending: AtomicUsize,
    /// Its own metadata has to be set again.
    touched: AtomicBool,
    /// It is not what the snapshot says, so the stat cache must not know it.
    flawed: AtomicBool,
    has_links: AtomicBool,
    excluded_names: AtomicUsize,
}

/// Names of one inode.
#[derive(Debug)]
pub(super) struct Group {
    names: usize,
    encoded: Option<Vec<u8>>,
    inode: Option<(u64, u64)>,
    first: Option<(Arc<Node>, CString)>,
    members: Vec<(Arc<Node>, usize)>,
}

impl Group {
    pub(super) const fn new(names: usize) -> Self {
        Self { names, encoded: None, inode: None, first: None, members: Vec::new() }
    }
}

enum Task {
    Enter(Arc<Node>),
    Place(Arc<Node>, Vec<usize>),
}

type Queue = Tasks<Task, MaterializeError>;

/// Puts everything in place below the open directory `dir`.
pub(super) fn run(
    job: &Job<'_>,
    dir: OwnedFd,
    stat: &Stat,
    meta: Meta,
    listing: BlockHash,
) -> Result<(), MaterializeError> {
    let root = new_node(job, Anchor::root(dir), None, meta, listing, Some(*stat));
    Queue::run(job.request.threads, Task::Enter(Arc::new(root)), |task, queue| {
        job.check_cancel()?;
        let node = match task {
            Task::Enter(node) => {
                enter(job, &node, queue)?;
                node
            }
            Task::Place(node, items) => {
                for item in items {
                    job.check_cancel()?;
                    place(job, &node, item)?;
                }
                node
            }
        };
        if node.has_links.load(Ordering::SeqCst) {
            // It may wait long for names elsewhere; it is opened again when one of them needs it.
            node.anchor.close();
        }
        complete(job, node)
    })?;
    for group in &job.groups {
        let group = lock(group);
        if group.members.len() != group.names {
            let problem = "the link table names a path that the tree does not have";
            job.gap(b"", MalformedObject { object: "link table", at: 0, problem }.into())?;
            break;
        }
    }
    Ok(())
}

fn new_node(
    job: &Job<'_>,
    anchor: Arc<Anchor>,
    parent: Option<(Arc<Node>, usize)>,
    meta: Meta,
    listing: BlockHash,
    existing: Option<Stat>,
) -> Node {
    let cached =
        existing.zip(job.cache.as_ref()).and_then(|(stat, cache)| cache.find(stat.device, stat.inode));
    Node {
        anchor,
        parent,
        meta,
        listing,
        existing,
        cached,
        items: Mutex::default(),
        pieces: Mutex::default(),
        pending: AtomicUsize::new(1),
        touched: AtomicBool::new(false),
        flawed: AtomicBool::new(false),
        has_links: AtomicBool::new(false),
        excluded_names: AtomicUsize::new(0),
    }
}

impl Node {
    fn touch(&self, job: &Job<'_>) {
        self.touched.store(true, Ordering::SeqCst);
        job.mark_changed();
    }

    fn flaw(&self) {
        self.flawed.store(true, Ordering::SeqCst);
    }

    fn path_of(&self, name: &CStr) -> Vec<u8> {
        self.anchor.path_of(name.to_bytes())
    }
}

/// Removes what does not belong into the directory, creates its directories, hands out the rest.
fn enter(job: &Job<'_>, node: &Arc<Node>, queue: &Queue) -> Result<(), MaterializeError> {
    let failed = |error: io::Error| job.target(&node.anchor.path(), error);
    if let Some(stat) = &node.existing {
        if anchor::lift_dir(&node.anchor, stat, 0o700).map_err(failed)?.is_some() {
            node.touch(job);
        }
    } else {
        node.touch(job);
    }
    let dir = node.anchor.open().map_err(failed)?;
    let names = match &node.existing {
        None => Names::default(),
        Some(_) => {
            if file::attributes_of(dir.as_fd())
                .0
                .iter()
                .any(|xattr| xattr.name == b"system.posix_acl_default")
            {
                // It would be inherited by what is created here; the true one is set at the end.
                sys::remove_xattr(&*dir, b"system.posix_acl_default").map_err(failed)?;
                node.touch(job);
            }
            Names::read(dir.as_fd()).map_err(failed)?
        }
    };
    let listing = match object::read_listing(job.request.store, &node.listing) {
        Ok(listing) => listing,
        Err(error) => {
            // Nothing is known of what belongs here, so what is here stays; the caller hears of the gap.
            node.flaw();
            return job.gap(&node.anchor.path(), error);
        }
    };
    let cached = job.cache.as_ref().zip(node.cached.as_ref()).and_then(|(cache, range)| cache.dir(range));
    let mut merge =
        Merge { job, node, dir: dir.as_fd(), cached: cached.as_ref(), cached_at: 0, items: Vec::new() };
    merge.run(&names, listing)?;
    let items = merge.items;
    let mut tasks = Vec::new();
    let mut batch = Vec::new();
    let mut batch_bytes = 0;
    let mut directories = Vec::new();
    for (number, item) in items.iter().enumerate() {
        match &item.entry.body {
            EntryBody::Directory { listing } => directories.push((number, *listing)),
            body => {
                batch.push(number);
                if let (EntryBody::File(content), false) = (body, item.keep) {
                    batch_bytes += content.size();
                }
                if batch.len() >= BATCH_NAMES || batch_bytes >= BATCH_BYTES {
                    tasks.push(Task::Place(Arc::clone(node), std::mem::take(&mut batch)));
                    batch_bytes = 0;
                }
            }
        }
    }
    if !batch.is_empty() {
        tasks.push(Task::Place(Arc::clone(node), batch));
    }
    for (number, listing) in directories {
        let item = &items[number];
        let child = Anchor::child(&node.anchor, item.name.clone());
        if child.depth() > DEPTH_MAX {
            return Err(MaterializeError::Limit {
                path: show(&child.path()),
                limit: "directories below each other",
            });
        }
        if item.existing.is_none() {
            match rustix::fs::mkdirat(&*dir, item.name.as_c_str(), Mode::RWXU) {
                Ok(()) => node.touch(job),
                Err(rustix::io::Errno::EXIST) => {
                    return Err(MaterializeError::NamesCollide { path: show(&child.path()) });
                }
                Err(error) => return Err(job.target(&child.path(), error.into())),
            }
        }
        let parent = Some((Arc::clone(node), number));
        let child = new_node(job, child, parent, item.entry.meta.clone(), listing, item.existing);
        tasks.push(Task::Enter(Arc::new(child)));
    }
    *lock(&node.items) = items;
    node.pending.fetch_add(tasks.len(), Ordering::SeqCst);
    queue.extend(tasks);
    Ok(())
}

/// Lays the names that are there beside the names that should be.
struct Merge<'a> {
    job: &'a Job<'a>,
    node: &'a Arc<Node>,
    dir: BorrowedFd<'a>,
    cached: Option<&'a CachedDir<'a>>,
    cached_at: usize,
    items: Vec<Item>,
}

impl Merge<'_> {
    fn run(&mut self, names: &Names, listing: Listing) -> Result<(), MaterializeError> {
        *lock(&self.node.pieces) = listing.pieces;
        let path = if self.job.request.excludes.needs_path() { self.node.anchor.path() } else { Vec::new() };
        self.items.reserve(listing.entries.len());
        let mut there = names.iter().peekable();
        for (name, entry) in listing.entries {
            while let Some(extra) = there.next_if(|there| there.to_bytes() < name.as_slice()) {
                self.extra(&path, extra)?;
            }
            let c_name = sys::c_name(&name).map_err(|error| self.failed(&name, error))?;
            let existing = match there.next_if(|there| there.to_bytes() == name) {
                None => None,
                Some(_) => self.stat(&c_name)?,
            };
            if let Some(stat) = &existing
                && self.job.request.excludes.excludes(&path, &name, stat.file_type == FileType::Directory)
            {
                self.node.excluded_names.fetch_add(1, Ordering::SeqCst);
                self.node.flaw();
                continue;
            }
            let item = self.item(c_name, entry, existing)?;
            self.items.push(item);
        }
        there.try_for_each(|extra| self.extra(&path, extra))
    }

    fn failed(&self, name: &[u8], error: io::Error) -> MaterializeError {
        self.job.target(&self.node.anchor.path_of(name), error)
    }

    fn stat(&self, name: &CStr) -> Result<Option<Stat>, MaterializeError> {
        match sys::stat_at(self.dir, name) {
            Ok(stat) => Ok(Some(stat)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.failed(name.to_bytes(), error)),
        }
    }

    /// A name that the snapshot does not have.
    fn extra(&self, path: &[u8], name: &CStr) -> Result<(), MaterializeError> {
        let Some(stat) = self.stat(name)? else { return Ok(()) };
        let bytes = name.to_bytes();
        if self.job.request.excludes.excludes(path, bytes, stat.file_type == FileType::Directory) {
            self.node.excluded_names.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        self.remove(name, &stat)
    }

    fn remove(&self, name: &CStr, stat: &Stat) -> Result<(), MaterializeError> {
        self.node.touch(self.job);
        remove::remove(self.dir, name, stat).map_err(|error| self.failed(name.to_bytes(), error))?;
        self.job.count_removed();
        Ok(())
    }

    fn item(
        &mut self,
        name: CString,
        entry: Entry,
        existing: Option<Stat>,
    ) -> Result<Item, MaterializeError> {
        let encoded = entry.encode();
        let is_dir = |stat: &Stat| stat.file_type == FileType::Directory;
        let wants_dir = matches!(entry.body, EntryBody::Directory { .. });
        let existing = match existing {
            Some(stat) if is_dir(&stat) != wants_dir => {
                self.remove(&name, &stat)?;
                None
            }
            other => other,
        };
        let keep = !wants_dir && existing.is_some_and(|stat| self.is_right(&name, &encoded, &stat));
        Ok(Item { name, entry, encoded, existing, keep, done: None })
    }

    /// Whether the stat cache proves that the inode is what the snapshot says.
    fn is_right(&mut self, name: &CStr, encoded: &[u8], stat: &Stat) -> bool {
        let owner_is_right = self.job.request.owner.is_none_or(|owner| owner == (stat.uid, stat.gid));
        let Some(dir) = self.cached.filter(|_| owner_is_right) else { return false };
        while let Some(cached) = dir.entries.get(self.cached_at) {
            match cached.name.cmp(name.to_bytes()) {
                std::cmp::Ordering::Less => self.cached_at += 1,
                std::cmp::Ordering::Greater => return false,
                std::cmp::Ordering::Equal => {
                    return cached.entry == encoded && cached.matches(dir.device, stat);
                }
            }
        }
        false
    }
}

/// Puts one name that is not a directory in place.
fn place(job: &Job<'_>, node: &Arc<Node>, number: usize) -> Result<(), MaterializeError> {
    let (name, entry, existing, keep) = {
        let items = lock(&node.items);
        let item = &items[number];
        if item.keep && !job.has_links() && item.existing.is_some_and(|stat| stat.links == 1) {
            drop(items);
            return placed(job, node, number, None);
        }
        (item.name.clone(), item.entry.clone(), item.existing, item.keep)
    };
    let path = node.path_of(&name);
    if let Some(group) = job.group(&path) {
        return place_linked(job, node, number, &path, group);
    }
    if keep && existing.is_some_and(|stat| stat.links == 1) {
        return placed(job, node, number, None);
    }
    if create_anew(job, node, &name, &entry, existing.is_some())? {
        let stat = stat_of(job, node, &name)?;
        placed(job, node, number, Some(stat))?;
    }
    Ok(())
}

fn stat_of(job: &Job<'_>, node: &Node, name: &CStr) -> Result<Stat, MaterializeError> {
    let dir = node.anchor.open().map_err(|error| job.target(&node.anchor.path(), error))?;
    sys::stat_at(dir.as_fd(), name).map_err(|error| job.target(&node.path_of(name), error))
}

/// Notes the inode under the name; none: the one that was there.
fn placed(job: &Job<'_>, node: &Node, number: usize, stat: Option<Stat>) -> Result<(), MaterializeError> {
    let mut items = lock(&node.items);
    let item = &mut items[number];
    item.done = stat.or(item.existing);
    job.request.progress.files_done(1);
    Ok(())
}

/// Unlinks what is there and creates the name; false: it is a gap.
fn create_anew(
    job: &Job<'_>,
    node: &Node,
    name: &CStr,
    entry: &Entry,
    exists: bool,
) -> Result<bool, MaterializeError> {
    let dir = node.anchor.open().map_err(|error| job.target(&node.anchor.path(), error))?;
    unlink_existing(job, node, dir.as_fd(), name, exists)?;
    node.touch(job);
    let created = file::create(job, dir.as_fd(), name, entry, &|| node.path_of(name))?;
    if !created {
        node.flaw();
    }
    Ok(created)
}

fn unlink_existing(
    job: &Job<'_>,
    node: &Node,
    dir: BorrowedFd<'_>,
    name: &CStr,
    exists: bool,
) -> Result<(), MaterializeError> {
    if !exists {
        return Ok(());
    }
    node.touch(job);
    job.count_removed();
    rustix::fs::unlinkat(dir, name, AtFlags::empty())
        .map_err(|error| job.target(&node.path_of(name), error.into()))
}

/// Puts one name of an inode with several names in place. Every directory with such names waits for the whole
/// group, so that it is still accessible when a later name is linked, and its record has the last ctime.
fn place_linked(
    job: &Job<'_>,
    node: &Arc<Node>,
    number: usize,
    path: &[u8],
    group: &Mutex<Group>,
) -> Result<(), MaterializeError> {
    let (name, entry, encoded, existing, keep) = {
        let items = lock(&node.items);
        let item = &items[number];
        (item.name.clone(), item.entry.clone(), item.encoded.clone(), item.existing, item.keep)
    };
    node.has_links.store(true, Ordering::SeqCst);
    node.pending.fetch_add(1, Ordering::SeqCst);
    let mut group = lock(group);
    group.members.push((Arc::clone(node), number));
    if group.encoded.get_or_insert_with(|| encoded.clone()) != &encoded {
        node.flaw();
        let problem = "two names of one inode differ";
        job.gap(path, MalformedObject { object: "link table", at: 0, problem }.into())?;
    } else if let Some((first, first_name)) = group.first.clone() {
        if existing.map(|stat| (stat.device, stat.inode)) != group.inode {
            link(job, node, &name, existing.is_some(), &first, &first_name)?;
        }
    } else {
        let usable = existing.filter(|stat| keep && stat.links as usize <= group.names);
        let adopted = usable.filter(|stat| job.adopt(stat.device, stat.inode));
        if let Some(stat) = adopted {
            group.inode = Some((stat.device, stat.inode));
            group.first = Some((Arc::clone(node), name));
        } else if create_anew(job, node, &name, &entry, existing.is_some())? {
            let stat = stat_of(job, node, &name)?;
            group.inode = Some((stat.device, stat.inode));
            group.first = Some((Arc::clone(node), name));
        }
    }
    if group.members.len() < group.names {
        return Ok(());
    }
    let members = group.members.clone();
    let first = group.first.take();
    drop(group);
    if let Some((first, first_name)) = first {
        let stat = stat_of(job, &first, &first_name)?;
        for (member, number) in &members {
            placed(job, member, *number, Some(stat))?;
        }
    }
    for (member, _) in members {
        complete(job, member)?;
    }
    Ok(())
}

fn link(
    job: &Job<'_>,
    node: &Node,
    name: &CStr,
    exists: bool,
    first: &Node,
    first_name: &CStr,
) -> Result<(), MaterializeError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => MaterializeError::NamesCollide { path: show(&node.path_of(name)) },
        _ => job.target(&node.path_of(name), error),
    };
    let dir = node.anchor.open().map_err(failed)?;
    unlink_existing(job, node, dir.as_fd(), name, exists)?;
    node.touch(job);
    let first_dir = first.anchor.open().map_err(failed)?;
    rustix::fs::linkat(&*first_dir, first_name, &*dir, name, AtFlags::empty())
        .map_err(|error| failed(error.into()))
}

/// Takes one off the node's pending work; at zero gives the directory its metadata and goes on with the parent.
fn complete(job: &Job<'_>, mut node: Arc<Node>) -> Result<(), MaterializeError> {
    loop {
        if node.pending.fetch_sub(1, Ordering::SeqCst) != 1 {
            return Ok(());
        }
        let stat = finish_dir(job, &node)?;
        add_record(job, &node, &stat);
        node.anchor.close();
        lock(&node.items).clear();
        let Some((parent, number)) = node.parent.clone() else { return Ok(()) };
        if let Some(item) = lock(&parent.items).get_mut(number) {
            item.done = Some(stat);
        }
        node = parent;
    }
}

fn finish_dir(job: &Job<'_>, node: &Node) -> Result<Stat, MaterializeError> {
    let path = || node.anchor.path();
    let failed = |error: io::Error| job.target(&path(), error);
    let dir = node.anchor.open().map_err(failed)?;
    let touched = node.touched.load(Ordering::SeqCst);
    if touched && !node.flawed.load(Ordering::SeqCst) {
        // Count what is there: a file system that folds or rewrites names shows itself here at the latest.
        let there = Names::read(dir.as_fd()).map_err(failed)?.len();
        let expected = lock(&node.items).len() + node.excluded_names.load(Ordering::SeqCst);
        if there != expected {
            return Err(MaterializeError::NamesCollide { path: show(&path()) });
        }
    }
    let before = sys::stat_fd(dir.as_fd()).map_err(failed)?;
    let existing = sys::xattrs_of(&*dir).map_err(failed)?;
    let owner_is_right = job.request.owner.is_none_or(|owner| owner == (before.uid, before.gid));
    let same = !touched
        && owner_is_right
        && before.mode == node.meta.mode
        && before.mtime == node.meta.mtime
        && existing == meta::wanted_xattrs(job, &node.meta, &path)?;
    if same {
        return Ok(before);
    }
    job.mark_changed();
    meta::apply(job, dir.as_fd(), &node.meta, &existing, &path)?;
    sys::stat_fd(dir.as_fd()).map_err(failed)
}

fn add_record(job: &Job<'_>, node: &Node, stat: &Stat) {
    if node.flawed.load(Ordering::SeqCst) {
        return;
    }
    let items = lock(&node.items);
    let pieces = node.pieces.lock().unwrap_or_else(PoisonError::into_inner);
    let mut record = RecordBuilder::new(stat.device, stat.inode, node.listing, &pieces, items.len());
    for item in items.iter() {
        // Without a stat it is a flaw, and we are not here.
        let Some(done) = item.done else { return };
        record.push(&CachedEntry {
            name: item.name.to_bytes(),
            inode: done.inode,
            ctime: done.ctime,
            size: match &item.entry.body {
                EntryBody::File(content) => content.size(),
                EntryBody::Directory { .. } => 0,
                EntryBody::Symlink { .. } | EntryBody::Fifo => done.size,
            },
            dirty: false,
            entry: &item.encoded,
        });
    }
    job.add_record(record.finish());
}
