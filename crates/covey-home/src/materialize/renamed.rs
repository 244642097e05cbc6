//! Names that should not be there and are something wanted under a former name: they are renamed and put right instead of
//! removed, created and fetched.
//!
//! What stays true: nothing is taken on trust. A renamed directory is entered like any that was there, so a wrong guess
//! costs time only; a renamed file has the content that the stat cache proves.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use covey_types::BlockHash;
use rustix::fs::RenameFlags;

use super::job::Job;
use super::node::{FullItem, Item, Node};
use crate::manifest::{Content, EntryBody};
use crate::object;
use crate::stat_cache::CachedDir;
use crate::sys::{self, Stat};

/// Missing directories that are compared with those that are too many by the names in them. More at once is no
/// renaming but another tree.
const COMPARED_MAX: usize = 32;

/// What a directory holds and should not.
#[derive(Debug, Default)]
pub(super) struct Former {
    pub(super) dirs: Vec<(CString, Stat)>,
    /// With the content that the stat cache proves.
    pub(super) files: Vec<(CString, Stat, Content)>,
}

/// Renames what is wanted under another name, and notes it in `items`. Gives what is wanted under none.
pub(super) fn take_up(
    job: &Job<'_>,
    node: &Arc<Node>,
    dir: BorrowedFd<'_>,
    former: Former,
    items: &mut [Item],
) -> Vec<(CString, Stat)> {
    let renames = Renames { job, node, dir };
    let mut left = renames.take_up_files(former.files, items);
    left.extend(renames.take_up_dirs(former.dirs, items));
    left
}

struct Renames<'a> {
    job: &'a Job<'a>,
    node: &'a Arc<Node>,
    dir: BorrowedFd<'a>,
}

impl Renames<'_> {
    fn take_up_files(
        &self,
        files: Vec<(CString, Stat, Content)>,
        items: &mut [Item],
    ) -> Vec<(CString, Stat)> {
        if files.is_empty() {
            return Vec::new();
        }
        let mut wanted: HashMap<Content, Vec<usize>> = HashMap::new();
        for (number, item) in items.iter().enumerate() {
            if let Item::Full(item) = item
                && let EntryBody::File(content) = &item.entry.body
                && item.existing.is_none()
                && self.job.group(&self.node.linked, item.name.to_bytes()).is_none()
            {
                wanted.entry(content.clone()).or_default().push(number);
            }
        }
        let mut left = Vec::new();
        for (name, stat, content) in files {
            let number = wanted.get_mut(&content).and_then(Vec::pop);
            match number.and_then(|number| self.rename(&name, items.get_mut(number))) {
                Some(item) => item.moved = Some(content),
                None => left.push((name, stat)),
            }
        }
        left
    }

    fn take_up_dirs(&self, dirs: Vec<(CString, Stat)>, items: &mut [Item]) -> Vec<(CString, Stat)> {
        let mut missing: Vec<Missing> = items
            .iter()
            .enumerate()
            .filter_map(|(number, item)| match item {
                Item::Full(item) if item.existing.is_none() => match item.entry.body {
                    EntryBody::Directory { listing } => Some(Missing { number, listing, names: None }),
                    _ => None,
                },
                _ => None,
            })
            .collect();
        let mut left = Vec::new();
        for (name, stat) in dirs {
            let cache = self.job.cache.as_ref();
            let known = cache.and_then(|cache| cache.dir(cache.find(stat.device, stat.inode)?));
            let found = known.and_then(|known| {
                let same = missing.iter().position(|missing| missing.listing == known.listing);
                same.or_else(|| self.most_similar(&known, &mut missing))
            });
            let number = found.map(|found| missing.swap_remove(found).number);
            if number.and_then(|number| self.rename(&name, items.get_mut(number))).is_none() {
                left.push((name, stat));
            }
        }
        left
    }

    /// The missing directory that shares most names with the one that is known, and at least half of them.
    fn most_similar(&self, known: &CachedDir, missing: &mut [Missing]) -> Option<usize> {
        if missing.len() > COMPARED_MAX {
            return None;
        }
        let shared = missing.iter_mut().enumerate().filter_map(|(at, missing)| {
            let names = missing.names(self.job);
            let shared = shared_names(known.names(), names);
            (shared > 0 && shared * 2 >= known.len().max(names.len())).then_some((shared, at))
        });
        shared.max().map(|(_, at)| at)
    }

    /// Gives what is under its new name now; none: it stays under the old one.
    fn rename<'i>(&self, name: &CStr, item: Option<&'i mut Item>) -> Option<&'i mut FullItem> {
        let Some(Item::Full(item)) = item else { return None };
        let new_name = item.name.as_c_str();
        rustix::fs::renameat_with(self.dir, name, self.dir, new_name, RenameFlags::NOREPLACE).ok()?;
        self.node.touch(self.job);
        item.existing = sys::stat_at(self.dir, &item.name).ok();
        Some(item)
    }
}

/// A directory that is wanted and not there.
struct Missing {
    number: usize,
    listing: BlockHash,
    /// Its names, ascending, once they were asked for.
    names: Option<Vec<Vec<u8>>>,
}

impl Missing {
    fn names(&mut self, job: &Job<'_>) -> &[Vec<u8>] {
        // A listing that cannot be read is told of when the directory is entered.
        self.names.get_or_insert_with(|| match object::read_listing(job.request.store, &self.listing) {
            Ok(listing) => listing.entries.into_iter().map(|(name, _)| name).collect(),
            Err(_) => Vec::new(),
        })
    }
}

fn shared_names<'n>(known: impl Iterator<Item = &'n [u8]>, wanted: &[Vec<u8>]) -> usize {
    let mut wanted = wanted.iter().map(Vec::as_slice).peekable();
    known
        .filter(|name| {
            while wanted.next_if(|wanted| wanted < name).is_some() {}
            wanted.next_if(|wanted| wanted == name).is_some()
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_counted_that_both_have() {
        let known: [&[u8]; 4] = [b"a", b"b", b"d", b"e"];
        let wanted: Vec<Vec<u8>> = [b"b", b"c", b"e", b"f"].iter().map(|name| name.to_vec()).collect();
        assert_eq!(shared_names(known.into_iter(), &wanted), 2);
        assert_eq!(shared_names(known.into_iter(), &[]), 0);
        assert_eq!(shared_names(std::iter::empty(), &wanted), 0);
    }
}
