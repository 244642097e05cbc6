//! Where the bytes of a home are, and which of the store's nobody else needs.
//!
//! Sizes in a snapshot are those of the files as programs see them, each name counted, holes included. Stored bytes are
//! what packs hold, after compression. What does not belong here: limits, and what to do about a full disk.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use covey_types::RootHash;
use serde::Serialize;

use crate::block::BlockStore;
use crate::collect::{CollectError, Marker};
use crate::manifest::EntryBody;
use crate::object;
use crate::pack_store::PackStore;
use crate::path::show;
use crate::view::{Snapshot, ViewError};

/// A path and what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// From the home's root.
    pub path: Vec<u8>,
    /// Sum of the sizes of the regular files at and below it.
    pub bytes: u64,
    /// Names at and below it.
    pub entries: u64,
}

/// What a directory of a snapshot holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// Names below it.
    pub entries: u64,
    /// Regular files among them.
    pub files: u64,
    /// Directories among them.
    pub directories: u64,
    /// Sum of the files' sizes.
    pub bytes: u64,
    /// The largest directories down to the depth that was asked for, largest first.
    pub largest_directories: Vec<Part>,
    /// The largest files, largest first.
    pub largest_files: Vec<Part>,
}

/// How much a usage tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsageOptions {
    /// Directories so far below the one that was asked for are told of; 1: those in it.
    pub depth: usize,
    /// At most so many directories, and so many files.
    pub parts_max: usize,
}

/// Bytes, path and entries; of equal ones the first path is the larger.
type Ranked = (u64, Reverse<Vec<u8>>, u64);

/// The largest parts that were seen, at most so many.
struct Largest {
    max: usize,
    kept: BinaryHeap<Reverse<Ranked>>,
}

impl Largest {
    fn new(max: usize) -> Self {
        Self { max, kept: BinaryHeap::new() }
    }

    fn offer(&mut self, path: &[u8], bytes: u64, entries: u64) {
        let is_too_small = self.kept.len() >= self.max
            && self.kept.peek().is_none_or(|Reverse((least, _, _))| *least > bytes);
        if is_too_small {
            return;
        }
        self.kept.push(Reverse((bytes, Reverse(path.to_vec()), entries)));
        if self.kept.len() > self.max {
            self.kept.pop();
        }
    }

    fn parts(self) -> Vec<Part> {
        let sorted = self.kept.into_sorted_vec().into_iter();
        sorted.map(|Reverse((bytes, Reverse(path), entries))| Part { path, bytes, entries }).collect()
    }
}

/// A directory whose names are being counted.
struct Level {
    path: Vec<u8>,
    entries: std::vec::IntoIter<(Vec<u8>, crate::manifest::Entry)>,
    bytes: u64,
    names: u64,
}

/// Counts what is at and below `path` of the snapshot `root`. Reads every directory object below it and no file.
///
/// # Errors
/// [`ViewError`].
pub fn usage(
    store: &dyn BlockStore,
    root: &RootHash,
    path: &[u8],
    options: &UsageOptions,
) -> Result<Usage, ViewError> {
    let snapshot = Snapshot::open(store, root)?;
    let top = crate::view::components(path)?.join(&b'/');
    let entries = snapshot.list(&top)?.into_iter();
    let mut usage = Usage::default();
    let (mut directories, mut files) = (Largest::new(options.parts_max), Largest::new(options.parts_max));
    let mut levels = vec![Level { path: top, entries, bytes: 0, names: 0 }];
    while let Some(level) = levels.last_mut() {
        if let Some((name, entry)) = level.entries.next() {
            let mut child = level.path.clone();
            if !child.is_empty() {
                child.push(b'/');
            }
            child.extend_from_slice(&name);
            level.names += 1;
            match entry.body {
                EntryBody::File(content) => {
                    usage.files += 1;
                    level.bytes = level.bytes.saturating_add(content.size());
                    files.offer(&child, content.size(), 1);
                }
                EntryBody::Directory { listing } => {
                    usage.directories += 1;
                    let found = object::read_listing(store, &listing);
                    let found = found.map_err(|source| ViewError::Object { path: show(&child), source })?;
                    let entries = found.entries.into_iter();
                    levels.push(Level { path: child, entries, bytes: 0, names: 0 });
                }
                EntryBody::Symlink { .. }
                | EntryBody::Fifo
                | EntryBody::Socket
                | EntryBody::CharacterDevice(_)
                | EntryBody::BlockDevice(_) => {}
            }
            continue;
        }
        let Some(done) = levels.pop() else { break };
        match levels.last_mut() {
            Some(parent) => {
                parent.bytes = parent.bytes.saturating_add(done.bytes);
                parent.names += done.names;
                if levels.len() <= options.depth {
                    directories.offer(&done.path, done.bytes, done.names + 1);
                }
            }
            None => (usage.entries, usage.bytes) = (done.names, done.bytes),
        }
    }
    (usage.largest_directories, usage.largest_files) = (directories.parts(), files.parts());
    Ok(usage)
}

/// Whose the stored bytes of some snapshots are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Shares {
    /// Stored bytes that only these snapshots need: what the store would shrink by without them, once packs are
    /// written anew.
    pub exclusive_bytes: u64,
    /// Stored bytes that others need as well.
    pub shared_bytes: u64,
}

/// Tells for the snapshots `own` which stored bytes nobody but they need; `others` are all other snapshots of the
/// store. Reads every directory object of all of them: as dear as the first half of a collection.
///
/// # Errors
/// [`CollectError::Mark`] when one of them cannot be read whole, [`CollectError::Store`] when the store fails.
pub fn shares(store: &PackStore, own: &[RootHash], others: &[RootHash]) -> Result<Shares, CollectError> {
    let (mut ours, mut theirs) = (Marker::new(store), Marker::new(store));
    ours.mark(own, &|| Ok(()))?;
    theirs.mark(others, &|| Ok(()))?;
    let mut shares = Shares::default();
    for name in store.packs()? {
        // None: collected meanwhile.
        let Some(contents) = store.pack_contents(&name)? else { continue };
        for block in contents.blocks.iter().filter(|block| ours.is_live(&block.hash)) {
            let stored = u64::from(block.stored_len);
            if theirs.is_live(&block.hash) {
                shares.shared_bytes += stored
            } else {
                shares.exclusive_bytes += stored
            }
        }
    }
    Ok(shares)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_kept_and_come_first() {
        let mut largest = Largest::new(2);
        for (path, bytes) in [("a", 5), ("b", 9), ("c", 1), ("d", 9), ("e", 0)] {
            largest.offer(path.as_bytes(), bytes, 1);
        }
        let kept: Vec<_> = largest.parts().into_iter().map(|part| (part.path, part.bytes)).collect();
        assert_eq!(kept, [(b"b".to_vec(), 9), (b"d".to_vec(), 9)]);
        let mut none = Largest::new(0);
        none.offer(b"a", 1, 1);
        assert!(none.parts().is_empty());
    }
}
