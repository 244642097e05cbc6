//! Laying the change over the base: one directory at a time, from the home's own downwards.
//!
//! Only directories that the upper directory mentions are looked into, and those with a name in or below them
//! that changed without being mentioned: another name of a changed inode, or a path that is excluded where a
//! renamed directory now is. Every other directory keeps its listing, unread.

use std::collections::{HashMap, HashSet};

use covey_types::BlockHash;

use super::index::ChangedInodes;
use super::lower::{Lower, find};
use super::marks::Redirect;
use super::upper::{Upper, What};
use super::{TrackedError, TrackedRequest};
use crate::block::Upload;
use crate::manifest::{Entry, EntryBody, ListingBuilder};
use crate::object;
use crate::path::{join, show};
use crate::secure::SecureError;
use crate::work::STACK_BYTES;

/// What the merge found out beside the listings.
#[derive(Debug, Default)]
pub(super) struct Merged {
    /// Lower directories that are seen at another place, by lower path. Below such a place also those that are
    /// not renamed themselves, if they were looked into.
    pub(super) places: HashMap<Vec<u8>, Vec<u8>>,
    /// Lower names that are not seen where their directory is now, by lower path.
    pub(super) hidden: HashMap<Vec<u8>, Entry>,
    /// Upper inodes that have, or may have, several names: inode and path.
    pub(super) linked: Vec<(u64, Vec<u8>)>,
    pub(super) files_added: u64,
    pub(super) bytes_added: u64,
    /// Of files that stay under their name with another size.
    pub(super) bytes_replaced: u64,
}

/// A lower directory.
#[derive(Clone)]
struct LowerDir {
    path: Vec<u8>,
    listing: BlockHash,
    /// It is where it was.
    in_place: bool,
}

struct Merge<'a> {
    request: &'a TrackedRequest<'a>,
    lower: &'a Lower<'a>,
    upload: &'a dyn Upload,
    upper: &'a Upper,
    changed: &'a ChangedInodes,
    /// Directories above a path that is excluded.
    excludes_below: HashSet<Vec<u8>>,
    path: Vec<u8>,
    merged: Merged,
}

/// Makes all listings; returns that of the home's own directory.
pub(super) fn run(
    request: &TrackedRequest<'_>,
    lower: &Lower<'_>,
    upload: &dyn Upload,
    upper: &Upper,
    changed: &ChangedInodes,
) -> Result<(BlockHash, Merged), TrackedError> {
    let mut excludes_below = HashSet::new();
    for path in request.excludes.paths() {
        for (at, byte) in path.iter().enumerate() {
            if *byte == b'/' {
                excludes_below.insert(path[..at].to_vec());
            }
        }
    }
    let mut merge = Merge {
        request,
        lower,
        upload,
        upper,
        changed,
        excludes_below,
        path: Vec::new(),
        merged: Merged::default(),
    };
    let top = LowerDir { path: Vec::new(), listing: lower.root_listing(), in_place: true };
    // The tree may be as deep as the format allows, so the stack has to be.
    let listing = std::thread::scope(|scope| {
        let work = || merge.dir(Some(0), Some(top));
        match std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, work) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(source) => Err(SecureError::Home { dir: request.upper.to_owned(), source }.into()),
        }
    })?;
    Ok((listing, merge.merged))
}

impl Merge<'_> {
    fn contradiction(&self, name: &[u8], problem: &'static str) -> TrackedError {
        TrackedError::Marks { path: show(&join(&self.path, name)), problem }
    }

    /// The listing of the directory at `self.path`.
    fn dir(&mut self, upper: Option<usize>, lower: Option<LowerDir>) -> Result<BlockHash, TrackedError> {
        let upper_dirs = &self.upper.dirs;
        let entries = upper.and_then(|number| upper_dirs.get(number)).map_or(&[][..], Vec::as_slice);
        let listing = match &lower {
            Some(lower) => {
                if !lower.in_place {
                    self.merged.places.insert(lower.path.clone(), self.path.clone());
                }
                Some(self.lower.listing(&lower.listing)?)
            }
            None => None,
        };
        let mut below =
            listing.as_ref().map_or(&[][..], |listing| listing.entries.as_slice()).iter().peekable();
        let mut builder = ListingBuilder::default();
        for entry in entries {
            while let Some((name, kept)) = below.next_if(|(name, _)| **name < *entry.name) {
                self.lower_entry(name, kept, lower.as_ref(), &mut builder)?;
            }
            let same = below.next_if(|(name, _)| **name == *entry.name).map(|(_, kept)| kept);
            self.upper_entry(&entry.name, &entry.what, same, lower.as_ref(), &mut builder)?;
        }
        for (name, kept) in below {
            self.lower_entry(name, kept, lower.as_ref(), &mut builder)?;
        }
        let upload = self.upload;
        builder.finish(|object| object::put(upload, object).map_err(TrackedError::from))
    }

    /// As [`Merge::dir`], of a directory in this one.
    fn child(
        &mut self,
        name: &[u8],
        upper: Option<usize>,
        lower: Option<LowerDir>,
    ) -> Result<BlockHash, TrackedError> {
        let len = self.path.len();
        if len > 0 {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name);
        let listing = self.dir(upper, lower);
        self.path.truncate(len);
        listing
    }

    fn hide(&mut self, lower: Option<&LowerDir>, name: &[u8], entry: Option<&Entry>) {
        if let (Some(lower), Some(entry)) = (lower, entry) {
            self.merged.hidden.insert(join(&lower.path, name), entry.clone());
        }
    }

    /// A name that the upper directory mentions.
    fn upper_entry(
        &mut self,
        name: &[u8],
        what: &What,
        same: Option<&Entry>,
        lower: Option<&LowerDir>,
        builder: &mut ListingBuilder,
    ) -> Result<(), TrackedError> {
        match what {
            What::Whiteout | What::NotKept => self.hide(lower, name, same),
            What::Directory { number, meta, opaque, redirect } => {
                let below =
                    if *opaque { None } else { self.lower_dir(name, same, lower, redirect.as_ref())? };
                let stays = below.is_some() && redirect.is_none();
                if !stays {
                    self.hide(lower, name, same);
                }
                let listing = self.child(name, Some(*number), below)?;
                let body = EntryBody::Directory { listing };
                builder.push(name, &Entry { meta: meta.clone(), body }.encode());
            }
            What::Metacopy { meta, redirect, inode, links } => {
                let body = self.file_below(name, same, lower, redirect.as_ref())?;
                self.hide(lower, name, same);
                if let EntryBody::File(content) = &body {
                    self.merged.files_added += 1;
                    self.merged.bytes_added += content.size();
                }
                if *links > 1 {
                    self.merged.linked.push((*inode, join(&self.path, name)));
                }
                builder.push(name, &Entry { meta: meta.clone(), body }.encode());
            }
            What::Whole(whole) => {
                self.hide(lower, name, same);
                if let Some(bytes) = whole.file_bytes {
                    self.merged.files_added += 1;
                    self.merged.bytes_added += bytes;
                }
                let changed = self.changed.by_inode.get(&whole.inode);
                if changed.is_some() || whole.links > 1 {
                    self.merged.linked.push((whole.inode, join(&self.path, name)));
                }
                let entry = changed.map_or(&*whole.entry, |number| &*self.changed.all[*number].entry);
                builder.push(name, entry);
            }
        }
        Ok(())
    }

    /// The lower directory that shows through an upper one.
    fn lower_dir(
        &self,
        name: &[u8],
        same: Option<&Entry>,
        lower: Option<&LowerDir>,
        redirect: Option<&Redirect>,
    ) -> Result<Option<LowerDir>, TrackedError> {
        let in_place = redirect.is_none() && lower.is_some_and(|lower| lower.in_place);
        let (path, entry) = match (redirect, lower) {
            (Some(Redirect::Path(path)), _) => (path.clone(), self.lower.entry(path)?),
            (Some(Redirect::Name(other)), Some(lower)) => {
                let listing = self.lower.listing(&lower.listing)?;
                (join(&lower.path, other), find(&listing, other).cloned())
            }
            (Some(Redirect::Name(_)), None) => {
                return Err(self.contradiction(name, "it was renamed within a directory that is new"));
            }
            (None, Some(lower)) => (join(&lower.path, name), same.cloned()),
            (None, None) => return Ok(None),
        };
        match entry.map(|entry| entry.body) {
            Some(EntryBody::Directory { listing }) => Ok(Some(LowerDir { path, listing, in_place })),
            // As the kernel does: what is no directory is not looked through.
            _ if redirect.is_none() => Ok(None),
            _ => Err(self.contradiction(name, "where it was renamed from is no directory")),
        }
    }

    /// The lower file whose bytes an upper one has.
    fn file_below(
        &self,
        name: &[u8],
        same: Option<&Entry>,
        lower: Option<&LowerDir>,
        redirect: Option<&Redirect>,
    ) -> Result<EntryBody, TrackedError> {
        let entry = match (redirect, lower) {
            (Some(Redirect::Path(path)), _) => self.lower.entry(path)?,
            (Some(Redirect::Name(other)), Some(lower)) => {
                find(&*self.lower.listing(&lower.listing)?, other).cloned()
            }
            (None, Some(_)) => same.cloned(),
            (_, None) => None,
        };
        match entry.map(|entry| entry.body) {
            Some(body @ EntryBody::File(_)) => Ok(body),
            _ => Err(self.contradiction(name, "only its metadata was changed, and there is no file below")),
        }
    }

    /// A name that only the lower directory has.
    fn lower_entry(
        &mut self,
        name: &[u8],
        entry: &Entry,
        lower: Option<&LowerDir>,
        builder: &mut ListingBuilder,
    ) -> Result<(), TrackedError> {
        let Some(lower) = lower else { return Ok(()) };
        let is_dir = matches!(entry.body, EntryBody::Directory { .. });
        if self.request.excludes.excludes(&self.path, name, is_dir) {
            if lower.in_place {
                return Err(TrackedError::OtherExcludes);
            }
            self.hide(Some(lower), name, Some(entry));
            return Ok(());
        }
        if let EntryBody::Directory { listing } = &entry.body {
            let path = join(&lower.path, name);
            let must_look = self.changed.are_below(&path)
                || (!self.excludes_below.is_empty() && self.excludes_below.contains(&join(&self.path, name)));
            if must_look {
                let below = LowerDir { path, listing: *listing, in_place: lower.in_place };
                let listing = self.child(name, None, Some(below))?;
                let entry = Entry { meta: entry.meta.clone(), body: EntryBody::Directory { listing } };
                builder.push(name, &entry.encode());
                return Ok(());
            }
        } else if let Some(changed) = self.changed.at(&lower.path, name) {
            if let (Some(bytes), EntryBody::File(content)) = (changed.file_bytes, &entry.body) {
                self.merged.bytes_added += bytes;
                self.merged.bytes_replaced += content.size();
            }
            self.merged.linked.push((changed.inode, join(&self.path, name)));
            builder.push(name, &changed.entry);
            return Ok(());
        }
        builder.push(name, &entry.encode());
        Ok(())
    }
}
