//! The tree of one materialize: one task per directory and per batch of other names; a directory gets its own
//! metadata when everything below it, and every hard link into it, is done.
//!
//! What stays true: each step is relative to a directory descriptor.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use covey_types::BlockHash;
use rustix::fs::{AtFlags, Mode};

use super::job::{Job, lock};
use super::merge::wanted_items;
use super::node::{Held, Item, Node, add_record, new_node};
use super::place::place;
use super::{MaterializeError, file, meta};
use crate::anchor::{self, Anchor};
use crate::manifest::{Blob, DEPTH_MAX, EntryBody, MalformedObject, Meta, Xattrs};
use crate::path::show;
use crate::sys::{self, Names, Stat};
use crate::work::Tasks;

/// Names that one task puts in place.
const BATCH_NAMES: usize = 64;
const BATCH_BYTES: u64 = 1024 * 1024;

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
                    for waited in place(job, &node, item)? {
                        complete(job, waited)?;
                    }
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
