//! The tree of one materialize: one task per directory and per batch of other names; a directory gets its own
//! metadata when everything below it, and every hard link into it, is done.
//!
//! What stays true: each step is relative to a directory descriptor; an existing name is kept only if the stat
//! cache proves that it is what the snapshot says.

use std::ffi::{CStr, CString};
use std::io;
use std::iter::Peekable;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use covey_types::BlockHash;
use rustix::fs::{AtFlags, FileType, Mode, RenameFlags};

use super::job::{Job, lock, show};
use super::{MaterializeError, file, meta, remove};
use crate::anchor::{self, Anchor};
use crate::manifest::{Blob, Cursor, DEPTH_MAX, Entry, EntryBody, MalformedObject, Meta, Xattrs};
use crate::object;
use crate::stat_cache::{CachedDir, CachedEntry, RecordBuilder};
use crate::sys::{self, Names, Stat};
use crate::work::Tasks;

/// Names that one task puts in place.
const BATCH_NAMES: usize = 64;
const BATCH_BYTES: u64 = 1024 * 1024;

/// One name of the snapshot in a directory.
#[derive(Debug)]
enum Item {
    /// It is right, and as the cached directory has it at this position.
    Kept(u32),
    Full(Box<FullItem>),
}

#[derive(Debug)]
struct FullItem {
    name: CString,
    entry: Entry,
    encoded: Vec<u8>,
    /// What is under the name in the target.
    existing: Option<Stat>,
    /// The target's inode already is what the snapshot says; of a directory its own metadata, not what is in it.
    keep: bool,
    /// As it is in the end, for the stat cache.
    done: Option<Stat>,
}

/// What a directory holds while it is worked on.
#[derive(Debug, Default)]
struct Held {
    items: Vec<Item>,
    /// Objects below the listing, if it is cut.
    pieces: Vec<BlockHash>,
    cached: Option<CachedDir>,
}

impl Held {
    fn full(&self, number: usize) -> Option<&FullItem> {
        match self.items.get(number)? {
            Item::Full(item) => Some(item),
            Item::Kept(_) => None,
        }
    }

    fn set_done(&mut self, number: usize, stat: Option<Stat>) {
        if let Some(Item::Full(item)) = self.items.get_mut(number) {
            item.done = stat.or(item.existing);
        }
    }
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
    /// Its number in the stat cache.
    cached: Option<u32>,
    /// The stat cache proves that its own metadata is right, unless something in it changes.
    proven: bool,
    /// Its names in the table of linked names.
    linked: Range<u32>,
    held: Mutex<Held>,
    pending: AtomicUsize,
    /// Its own metadata has to be set again.
    touched: AtomicBool,
    /// It is not what the snapshot says, so the stat cache must not know it.
    flawed: AtomicBool,
    /// Nothing is known of what belongs into it, and it was not there: it is taken away again.
    unknown: AtomicBool,
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
    let root = new_node(job, Anchor::root(dir), None, (meta, listing), (Some(*stat), false));
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
    (meta, listing): (Meta, BlockHash),
    (existing, proven): (Option<Stat>, bool),
) -> Node {
    let cached =
        existing.zip(job.cache.as_ref()).and_then(|(stat, cache)| cache.find(stat.device, stat.inode));
    let linked = if job.has_links() { job.linked_in(&anchor.path()) } else { 0..0 };
    Node {
        anchor,
        parent,
        meta,
        listing,
        existing,
        cached,
        proven,
        linked,
        held: Mutex::default(),
        pending: AtomicUsize::new(1),
        touched: AtomicBool::new(false),
        flawed: AtomicBool::new(false),
        unknown: AtomicBool::new(false),
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
            let has_no_attributes = node.proven && node.meta.xattrs == Blob::empty();
            if !has_no_attributes
                && file::attributes_of(dir.as_fd())
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
    let cached = job.cache.as_ref().zip(node.cached).and_then(|(cache, number)| cache.dir(number));
    let Some((items, pieces)) = wanted_items(job, node, dir.as_fd(), cached.as_ref(), &names)? else {
        return Ok(());
    };
    let mut tasks = Vec::new();
    let mut batch = Vec::new();
    let mut batch_bytes = 0;
    let mut directories = Vec::new();
    for (number, item) in items.iter().enumerate() {
        let Item::Full(item) = item else { continue };
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
        let Some(Item::Full(item)) = items.get(number) else { continue };
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
        let wanted = (item.entry.meta.clone(), listing);
        let child = new_node(job, child, parent, wanted, (item.existing, item.keep));
        tasks.push(Task::Enter(Arc::new(child)));
    }
    *lock(&node.held) = Held { items, pieces, cached };
    node.pending.fetch_add(tasks.len(), Ordering::SeqCst);
    queue.extend(tasks);
    Ok(())
}

/// The directory's names as they should be, and the objects below its listing.
type Wanted = (Vec<Item>, Vec<BlockHash>);

/// None: nothing is known of the directory.
fn wanted_items(
    job: &Job<'_>,
    node: &Arc<Node>,
    dir: BorrowedFd<'_>,
    cached: Option<&CachedDir>,
    names: &Names,
) -> Result<Option<Wanted>, MaterializeError> {
    let mut merge = Merge::new(job, node, dir, cached, names);
    // What the cache knows of this directory is what the snapshot says of it: the store is not asked.
    if let Some(cached) = cached.filter(|cached| cached.listing == node.listing) {
        merge.with_cached(cached)?;
        return Ok(Some((merge.items, Vec::new())));
    }
    match object::read_listing(job.request.store, &node.listing) {
        Ok(listing) => {
            merge.with_listing(listing.entries)?;
            Ok(Some((merge.items, listing.pieces)))
        }
        Err(error) => {
            // Nothing is known of what belongs here, so what is here stays; the caller hears of the gap.
            node.flaw();
            match node.parent.as_ref().filter(|_| node.existing.is_none()) {
                Some((parent, number)) => {
                    parent.flaw();
                    node.unknown.store(true, Ordering::SeqCst);
                    let entry = lock(&parent.held).full(*number).map(|item| item.encoded.clone());
                    job.gap_of(node.anchor.path(), entry.unwrap_or_default(), error)?;
                }
                None => job.gap(&node.anchor.path(), error)?,
            }
            Ok(None)
        }
    }
}

/// Lays the names that are there beside the names that should be.
struct Merge<'a> {
    job: &'a Job<'a>,
    node: &'a Arc<Node>,
    dir: BorrowedFd<'a>,
    cached: Option<&'a CachedDir>,
    /// Where the last name stood in the cached directory.
    cached_at: usize,
    there: Peekable<Box<dyn Iterator<Item = &'a CStr> + 'a>>,
    /// The directory's path, where the excludes ask for it.
    path: Vec<u8>,
    items: Vec<Item>,
    /// Directories that should not be there; one of them may be a wanted one under its former name.
    extra_dirs: Vec<(CString, Stat)>,
}

impl<'a> Merge<'a> {
    fn new(
        job: &'a Job<'a>,
        node: &'a Arc<Node>,
        dir: BorrowedFd<'a>,
        cached: Option<&'a CachedDir>,
        names: &'a Names,
    ) -> Self {
        let path = if job.request.excludes.needs_path() { node.anchor.path() } else { Vec::new() };
        let there: Box<dyn Iterator<Item = &'a CStr> + 'a> = Box::new(names.iter());
        Self {
            job,
            node,
            dir,
            cached,
            cached_at: 0,
            there: there.peekable(),
            path,
            items: Vec::new(),
            extra_dirs: Vec::new(),
        }
    }

    /// The wanted names are those of the cached directory.
    fn with_cached(&mut self, cached: &CachedDir) -> Result<(), MaterializeError> {
        self.items.reserve(cached.len());
        for position in 0..cached.len() {
            let Some(wanted) = cached.entry(position) else { break };
            let (existing, excluded) = self.advance(wanted.name)?;
            if excluded {
                continue;
            }
            self.cached_at = position;
            let proven = existing.is_some_and(|stat| {
                self.owner_is_right(&stat) && wanted.unchanged(cached.device, &stat).is_some()
            });
            let is_dir = existing.is_some_and(|stat| stat.file_type == FileType::Directory);
            if let Some(stat) = existing.filter(|stat| proven && !is_dir && stat.links == 1)
                && self.job.group(&self.node.linked, wanted.name).is_none()
            {
                debug_assert_eq!(stat.inode, wanted.inode, "it was compared");
                self.items.push(Item::Kept(position as u32));
                self.job.request.progress.files_done(1);
                continue;
            }
            let mut cursor = Cursor::new(wanted.entry, "cached entry");
            let entry = Entry::decode(&mut cursor)
                .map_err(|error| self.failed(wanted.name, io::Error::other(error)))?;
            self.add(wanted.name, entry, wanted.entry.to_vec(), existing)?;
        }
        self.rest()
    }

    /// The wanted names come from the store.
    fn with_listing(&mut self, wanted: Vec<(Vec<u8>, Entry)>) -> Result<(), MaterializeError> {
        self.items.reserve(wanted.len());
        for (name, entry) in wanted {
            let (existing, excluded) = self.advance(&name)?;
            if !excluded {
                let encoded = entry.encode();
                self.add(&name, entry, encoded, existing)?;
            }
        }
        self.rest()
    }

    /// Removes the names before `name` that are there and should not be. Returns what is under the name, and
    /// whether it is excluded.
    fn advance(&mut self, name: &[u8]) -> Result<(Option<Stat>, bool), MaterializeError> {
        while let Some(extra) = self.there.next_if(|there| there.to_bytes() < name) {
            self.extra(extra)?;
        }
        let existing = match self.there.next_if(|there| there.to_bytes() == name) {
            None => None,
            Some(there) => self.stat(there)?,
        };
        let excluded = existing.is_some_and(|stat| self.excludes(name, &stat));
        if excluded {
            self.node.excluded_names.fetch_add(1, Ordering::SeqCst);
            self.node.flaw();
        }
        Ok((existing, excluded))
    }

    fn rest(&mut self) -> Result<(), MaterializeError> {
        while let Some(extra) = self.there.next() {
            self.extra(extra)?;
        }
        let extra_dirs = std::mem::take(&mut self.extra_dirs);
        for (name, stat) in extra_dirs {
            if !self.take_renamed(&name, &stat) {
                self.remove(&name, &stat)?;
            }
        }
        Ok(())
    }

    /// A directory that is not there may be one that should not be, renamed: what is in it is then put right
    /// instead of fetched. Nothing is taken on trust; it is entered like any directory that was there.
    fn take_renamed(&mut self, name: &CStr, stat: &Stat) -> bool {
        let is_missing = |item: &FullItem, listing: &BlockHash| {
            let wanted =
                matches!(&item.entry.body, EntryBody::Directory { listing: wanted } if wanted == listing);
            wanted && item.existing.is_none()
        };
        let cache = self.job.cache.as_ref();
        let known = cache.and_then(|cache| cache.dir(cache.find(stat.device, stat.inode)?));
        let Some(known) = known else { return false };
        let missing = self.items.iter_mut().find_map(|item| match item {
            Item::Full(item) if is_missing(item, &known.listing) => Some(item),
            _ => None,
        });
        let Some(item) = missing else { return false };
        let new_name = item.name.as_c_str();
        let renamed =
            rustix::fs::renameat_with(self.dir, name, self.dir, new_name, RenameFlags::NOREPLACE).is_ok();
        if renamed {
            self.node.touch(self.job);
            item.existing = sys::stat_at(self.dir, &item.name).ok();
        }
        renamed
    }

    fn excludes(&self, name: &[u8], stat: &Stat) -> bool {
        let is_dir = stat.file_type == FileType::Directory;
        self.job.request.excludes.excludes(&self.path, name, is_dir)
    }

    fn owner_is_right(&self, stat: &Stat) -> bool {
        self.job.request.owner.is_none_or(|owner| owner == (stat.uid, stat.gid))
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
    fn extra(&mut self, name: &CStr) -> Result<(), MaterializeError> {
        let Some(stat) = self.stat(name)? else { return Ok(()) };
        if self.excludes(name.to_bytes(), &stat) {
            self.node.excluded_names.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        if stat.file_type == FileType::Directory {
            self.extra_dirs.push((name.to_owned(), stat));
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

    fn add(
        &mut self,
        name: &[u8],
        entry: Entry,
        encoded: Vec<u8>,
        existing: Option<Stat>,
    ) -> Result<(), MaterializeError> {
        let name = sys::c_name(name).map_err(|error| self.failed(name, error))?;
        let is_dir = |stat: &Stat| stat.file_type == FileType::Directory;
        let wants_dir = matches!(entry.body, EntryBody::Directory { .. });
        let existing = match existing {
            Some(stat) if is_dir(&stat) != wants_dir => {
                self.remove(&name, &stat)?;
                None
            }
            other => other,
        };
        let keep = existing.is_some_and(|stat| self.is_right(&name, &encoded, &stat));
        self.items.push(Item::Full(Box::new(FullItem { name, entry, encoded, existing, keep, done: None })));
        Ok(())
    }

    /// Whether the stat cache proves that the inode is what the snapshot says.
    fn is_right(&mut self, name: &CStr, encoded: &[u8], stat: &Stat) -> bool {
        let Some(dir) = self.cached.filter(|_| self.owner_is_right(stat)) else { return false };
        let Some(position) = dir.position(name.to_bytes(), &mut self.cached_at) else { return false };
        dir.entry(position as usize)
            .is_some_and(|cached| cached.entry == encoded && cached.unchanged(dir.device, stat).is_some())
    }
}

/// Puts one name that is not a directory in place.
fn place(job: &Job<'_>, node: &Arc<Node>, number: usize) -> Result<(), MaterializeError> {
    let (name, entry, existing, keep) = {
        let held = lock(&node.held);
        let Some(item) = held.full(number) else { return Ok(()) };
        let linked = job.group(&node.linked, item.name.to_bytes()).is_some();
        if item.keep && !linked && item.existing.is_some_and(|stat| stat.links == 1) {
            drop(held);
            placed(job, node, number, None);
            return Ok(());
        }
        (item.name.clone(), item.entry.clone(), item.existing, item.keep)
    };
    if let Some(group) = job.group(&node.linked, name.to_bytes()) {
        return place_linked(job, node, number, group);
    }
    debug_assert!(!keep || existing.is_some_and(|stat| stat.links != 1), "it would have been kept");
    let old = existing.filter(|stat| stat.links == 1).and_then(|stat| old_content(job, node, &name, &stat));
    if let (Some(old), EntryBody::File(content)) = (&old, &entry.body)
        && old.content == *content
    {
        job.mark_changed();
        let stat = file::set_metadata(job, old, &entry.meta, &|| node.path_of(&name))?;
        placed(job, node, number, Some(stat));
        return Ok(());
    }
    if let Some(stat) = create_anew(job, node, &name, &entry, existing.is_some(), old)? {
        placed(job, node, number, Some(stat));
    }
    Ok(())
}

fn stat_of(job: &Job<'_>, node: &Node, name: &CStr) -> Result<Stat, MaterializeError> {
    let dir = node.anchor.open().map_err(|error| job.target(&node.anchor.path(), error))?;
    sys::stat_at(dir.as_fd(), name).map_err(|error| job.target(&node.path_of(name), error))
}

/// Notes the inode under the name; none: the one that was there.
fn placed(job: &Job<'_>, node: &Node, number: usize, stat: Option<Stat>) {
    lock(&node.held).set_done(number, stat);
    job.request.progress.files_done(1);
}

/// What a regular file that is there contains, if the stat cache proves it.
fn old_content(job: &Job<'_>, node: &Node, name: &CStr, stat: &Stat) -> Option<file::Old> {
    let content = {
        let held = lock(&node.held);
        let cached = held.cached.as_ref()?;
        // Names that are put in place one by one are few, so looking from the front is not too much.
        let known = cached.entry(cached.position(name.to_bytes(), &mut 0)? as usize)?;
        known.unchanged(cached.device, stat)?;
        match Entry::decode(&mut Cursor::new(known.entry, "cached entry")).ok()?.body {
            EntryBody::File(content) => content,
            _ => return None,
        }
    };
    let dir = node.anchor.open().ok()?;
    file::Old::open(job, dir.as_fd(), name, stat, content)
}

/// Unlinks what is there and creates the name; none: it is a gap.
fn create_anew(
    job: &Job<'_>,
    node: &Node,
    name: &CStr,
    entry: &Entry,
    exists: bool,
    old: Option<file::Old>,
) -> Result<Option<Stat>, MaterializeError> {
    let dir = node.anchor.open().map_err(|error| job.target(&node.anchor.path(), error))?;
    unlink_existing(job, node, dir.as_fd(), name, exists)?;
    node.touch(job);
    let place = file::Place { dir: dir.as_fd(), name, old };
    let created = file::create(job, place, entry, &|| node.path_of(name))?;
    match &created {
        None => node.flaw(),
        Some(stat) => {
            job.placed_bare(&|| node.path_of(name), &|| entry.encode(), (stat.inode, stat.ctime));
        }
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
    group: &Mutex<Group>,
) -> Result<(), MaterializeError> {
    let (name, entry, encoded, existing, keep) = {
        let held = lock(&node.held);
        let Some(item) = held.full(number) else { return Ok(()) };
        (item.name.clone(), item.entry.clone(), item.encoded.clone(), item.existing, item.keep)
    };
    node.has_links.store(true, Ordering::SeqCst);
    node.pending.fetch_add(1, Ordering::SeqCst);
    let mut group = lock(group);
    group.members.push((Arc::clone(node), number));
    if group.encoded.get_or_insert_with(|| encoded.clone()) != &encoded {
        node.flaw();
        let problem = "two names of one inode differ";
        job.gap(&node.path_of(&name), MalformedObject { object: "link table", at: 0, problem }.into())?;
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
        } else if let Some(stat) = create_anew(job, node, &name, &entry, existing.is_some(), None)? {
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
            placed(job, member, *number, Some(stat));
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
        if node.unknown.load(Ordering::SeqCst)
            && let Some((parent, _)) = node.parent.clone()
        {
            remove_unknown(job, &node, &parent)?;
            node = parent;
            continue;
        }
        let stat = finish_dir(job, &node)?;
        add_record(job, &node, &stat);
        node.anchor.close();
        *lock(&node.held) = Held::default();
        let Some((parent, number)) = node.parent.clone() else { return Ok(()) };
        lock(&parent.held).set_done(number, Some(stat));
        node = parent;
    }
}

/// Takes away the directory that we have made for what turned out to be lost: an empty one in its place would be
/// taken for what the home has.
fn remove_unknown(job: &Job<'_>, node: &Node, parent: &Node) -> Result<(), MaterializeError> {
    let failed = |error: io::Error| job.target(&node.anchor.path(), error);
    node.anchor.close();
    let dir = parent.anchor.open().map_err(failed)?;
    rustix::fs::unlinkat(&*dir, node.anchor.name().as_c_str(), AtFlags::REMOVEDIR)
        .map_err(|error| failed(error.into()))
}

fn finish_dir(job: &Job<'_>, node: &Node) -> Result<Stat, MaterializeError> {
    let path = || node.anchor.path();
    let failed = |error: io::Error| job.target(&path(), error);
    let touched = node.touched.load(Ordering::SeqCst);
    if let Some(existing) = node.existing.filter(|_| node.proven && !touched) {
        return Ok(existing);
    }
    let dir = node.anchor.open().map_err(failed)?;
    if touched && !node.flawed.load(Ordering::SeqCst) {
        // Count what is there: a file system that folds or rewrites names shows itself here at the latest.
        let there = sys::count_names(dir.as_fd()).map_err(failed)?;
        let expected = lock(&node.held).items.len() + node.excluded_names.load(Ordering::SeqCst);
        if there != expected {
            return Err(MaterializeError::NamesCollide { path: show(&path()) });
        }
    }
    if node.existing.is_none() {
        // Ours from the beginning: it has no attributes, and nothing is right yet.
        meta::apply(job, dir.as_fd(), &node.meta, &Xattrs::default(), &path)?;
        return sys::stat_fd(dir.as_fd()).map_err(failed);
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
    let held = lock(&node.held);
    let cached = held.cached.as_ref();
    if let Some((cached, number)) =
        cached.zip(node.cached).filter(|(cached, _)| cached.listing == node.listing)
        && held.items.len() == cached.len()
        && held.items.iter().enumerate().all(|(at, item)| is_as_cached(item, cached, at))
    {
        job.keep_record(number);
        return;
    }
    let pieces = match cached.filter(|cached| cached.listing == node.listing) {
        Some(cached) => &cached.pieces,
        None => &held.pieces,
    };
    let inode = (stat.device, stat.inode);
    let mut record = RecordBuilder::new(inode, node.listing, pieces, held.items.len());
    for item in &held.items {
        let entry = match item {
            Item::Kept(position) => cached.and_then(|cached| cached.entry(*position as usize)),
            Item::Full(item) => item.done.map(|done| CachedEntry {
                name: item.name.to_bytes(),
                inode: done.inode,
                ctime: done.ctime,
                dirty: false,
                entry: &item.encoded,
            }),
        };
        // Without a stat it is a flaw, and we are not here.
        let Some(entry) = entry else { return };
        record.push(&entry);
    }
    job.add_record(&record);
}

fn is_as_cached(item: &Item, cached: &CachedDir, at: usize) -> bool {
    match item {
        Item::Kept(position) => *position as usize == at,
        Item::Full(item) => cached.entry(at).zip(item.done).is_some_and(|(cached, done)| {
            cached.name == item.name.to_bytes()
                && !cached.dirty
                && (cached.inode, cached.ctime) == (done.inode, done.ctime)
                && cached.entry == item.encoded
        }),
    }
}
