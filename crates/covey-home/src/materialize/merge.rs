//! What a directory should hold laid beside what it holds: what stays, what goes, what has only another name.
//!
//! What stays true: an existing name is kept only if the stat cache proves that it is what the snapshot says.

use std::ffi::CStr;
use std::io;
use std::iter::Peekable;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use covey_types::BlockHash;
use rustix::fs::FileType;

use super::job::{Job, lock};
use super::node::{FullItem, Item, Node};
use super::renamed::{self, Former};
use super::{MaterializeError, remove};
use crate::manifest::{Content, Cursor, Entry, EntryBody};
use crate::object;
use crate::stat_cache::CachedDir;
use crate::sys::{self, Names, Stat};

/// The directory's names as they should be, and the objects below its listing.
pub(super) type Wanted = (Vec<Item>, Vec<BlockHash>);

/// None: nothing is known of the directory.
pub(super) fn wanted_items(
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
    /// What should not be there, and may be something wanted under its former name.
    former: Former,
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
            former: Former::default(),
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
        let former = std::mem::take(&mut self.former);
        for (name, stat) in renamed::take_up(self.job, self.node, self.dir, former, &mut self.items) {
            self.remove(&name, &stat)?;
        }
        Ok(())
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
            self.former.dirs.push((name.to_owned(), stat));
            return Ok(());
        }
        if let Some(content) = self.known_content(name, &stat) {
            self.former.files.push((name.to_owned(), stat, content));
            return Ok(());
        }
        self.remove(name, &stat)
    }

    /// What a regular file that is there contains, if the stat cache proves it.
    fn known_content(&mut self, name: &CStr, stat: &Stat) -> Option<Content> {
        if stat.file_type != FileType::RegularFile || stat.links != 1 || stat.size == 0 {
            return None;
        }
        let dir = self.cached?;
        let known = dir.entry(dir.position(name.to_bytes(), &mut self.cached_at)? as usize)?;
        known.unchanged(dir.device, stat)?;
        match Entry::decode(&mut Cursor::new(known.entry, "cached entry")).ok()?.body {
            EntryBody::File(content) => Some(content),
            _ => None,
        }
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
        self.items.push(Item::Full(Box::new(FullItem {
            name,
            entry,
            encoded,
            existing,
            keep,
            moved: None,
            done: None,
        })));
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
