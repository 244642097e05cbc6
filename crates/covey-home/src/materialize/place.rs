//! Putting one name in place that is not a directory: kept, changed in place, created anew, or linked.
//!
//! What stays true: each step is relative to a directory descriptor, and nothing that exists is written through.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use rustix::fs::AtFlags;

use super::job::{Job, lock};
use super::node::Node;
use super::{MaterializeError, file};
use crate::manifest::{Content, Cursor, Entry, EntryBody, MalformedObject};
use crate::path::show;
use crate::sys::{self, Stat};

/// Names of one inode.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) names: usize,
    encoded: Option<Vec<u8>>,
    inode: Option<(u64, u64)>,
    first: Option<(Arc<Node>, CString)>,
    pub(super) members: Vec<(Arc<Node>, usize)>,
}

impl Group {
    pub(super) const fn new(names: usize) -> Self {
        Self { names, encoded: None, inode: None, first: None, members: Vec::new() }
    }
}

/// Puts one name that is not a directory in place. Gives the directories that have waited for it.
pub(super) fn place(
    job: &Job<'_>,
    node: &Arc<Node>,
    number: usize,
) -> Result<Vec<Arc<Node>>, MaterializeError> {
    let (name, entry, existing, keep, moved) = {
        let held = lock(&node.held);
        let Some(item) = held.full(number) else { return Ok(Vec::new()) };
        let linked = job.group(&node.linked, item.name.to_bytes()).is_some();
        if item.keep && !linked && item.existing.is_some_and(|stat| stat.links == 1) {
            drop(held);
            placed(job, node, number, None);
            return Ok(Vec::new());
        }
        (item.name.clone(), item.entry.clone(), item.existing, item.keep, item.moved.clone())
    };
    if let Some(group) = job.group(&node.linked, name.to_bytes()) {
        return place_linked(job, node, number, group);
    }
    debug_assert!(!keep || existing.is_some_and(|stat| stat.links != 1), "it would have been kept");
    let old = existing.filter(|stat| stat.links == 1).and_then(|stat| {
        let content = moved.or_else(|| old_content(node, &name, &stat))?;
        let dir = node.anchor.open().ok()?;
        file::Old::open(job, dir.as_fd(), &name, &stat, content)
    });
    if let (Some(old), EntryBody::File(content)) = (&old, &entry.body)
        && old.content == *content
    {
        job.mark_changed();
        let stat = file::set_metadata(job, old, &entry.meta, &|| node.path_of(&name))?;
        placed(job, node, number, Some(stat));
        return Ok(Vec::new());
    }
    if let Some(stat) = create_anew(job, node, &name, &entry, existing.is_some(), old)? {
        placed(job, node, number, Some(stat));
    }
    Ok(Vec::new())
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
fn old_content(node: &Node, name: &CStr, stat: &Stat) -> Option<Content> {
    let held = lock(&node.held);
    let cached = held.cached.as_ref()?;
    // Names that are put in place one by one are few, so looking from the front is not too much.
    let known = cached.entry(cached.position(name.to_bytes(), &mut 0)? as usize)?;
    known.unchanged(cached.device, stat)?;
    match Entry::decode(&mut Cursor::new(known.entry, "cached entry")).ok()?.body {
        EntryBody::File(content) => Some(content),
        _ => None,
    }
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
) -> Result<Vec<Arc<Node>>, MaterializeError> {
    let (name, entry, encoded, existing, keep) = {
        let held = lock(&node.held);
        let Some(item) = held.full(number) else { return Ok(Vec::new()) };
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
        return Ok(Vec::new());
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
    Ok(members.into_iter().map(|(member, _)| member).collect())
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
