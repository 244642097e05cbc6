//! Which blocks are needed: everything that the roots name.
//!
//! Memory: eight bytes for each needed block, and the whole hash for each directory object. Two blocks with the
//! same eight bytes are both kept; a directory object is never skipped because of another's bytes.

use std::collections::HashSet;

use covey_types::{BlockHash, Fault, RootHash};

use super::CollectError;
use crate::block::{BlockStore, StoreError};
use crate::manifest::{Blob, Content, Entry, EntryBody, ListingPart, Meta};
use crate::object::{self, ObjectError};

/// A needed object cannot be read, so what it names is not known.
#[derive(Debug, thiserror::Error)]
#[error("state {root} cannot be read whole")]
pub struct MarkError {
    root: RootHash,
    source: ObjectError,
}

impl MarkError {
    pub(super) const fn fault(&self) -> Fault {
        match &self.source {
            ObjectError::Store(error) => error.fault(),
            ObjectError::Malformed(_) => Fault::Corrupt,
        }
    }
}

/// Sorted starts of hashes, and some behind them that are not sorted in yet.
#[derive(Debug, Clone, Default)]
pub(super) struct Live {
    sorted: Vec<u64>,
    recent: Vec<u64>,
}

/// Fewer are sorted in at once.
const RECENT_MIN: usize = 64 * 1024;

fn start(hash: &BlockHash) -> u64 {
    hash.as_bytes()[..8].iter().fold(0, |start, byte| start << 8 | u64::from(*byte))
}

impl Live {
    fn add(&mut self, hash: &BlockHash) {
        self.recent.push(start(hash));
        if self.recent.len() >= RECENT_MIN.max(self.sorted.len() / 2) {
            self.settle();
        }
    }

    fn settle(&mut self) {
        self.sorted.append(&mut self.recent);
        // Mostly sorted runs are what this sort is fast at.
        self.sorted.sort();
        self.sorted.dedup();
    }

    pub(super) fn is_live(&self, hash: &BlockHash) -> bool {
        debug_assert!(self.recent.is_empty(), "asked while marking");
        self.sorted.binary_search(&start(hash)).is_ok()
    }
}

/// See the module's first lines.
#[derive(Debug)]
pub(crate) struct Marker<'a> {
    store: &'a dyn BlockStore,
    live: Live,
    roots: HashSet<RootHash>,
    listings: HashSet<BlockHash>,
}

impl<'a> Marker<'a> {
    pub(crate) fn new(store: &'a dyn BlockStore) -> Self {
        Self { store, live: Live::default(), roots: HashSet::new(), listings: HashSet::new() }
    }

    pub(crate) fn is_live(&self, hash: &BlockHash) -> bool {
        self.live.is_live(hash)
    }

    /// What is live so far.
    pub(super) fn freeze(&self) -> Live {
        self.live.clone()
    }

    /// Marks what these roots name; what was marked before is not read again. `go_on` is asked between objects.
    pub(crate) fn mark(
        &mut self,
        roots: &[RootHash],
        go_on: &dyn Fn() -> Result<(), CollectError>,
    ) -> Result<(), CollectError> {
        for root in roots {
            if self.roots.insert(*root) {
                self.root(root, go_on)?;
            }
        }
        self.live.settle();
        Ok(())
    }

    fn root(
        &mut self,
        root: &RootHash,
        go_on: &dyn Fn() -> Result<(), CollectError>,
    ) -> Result<(), CollectError> {
        let failed = |source: ObjectError| match source {
            ObjectError::Store(error @ StoreError::Unavailable { .. }) => CollectError::Store(error),
            source => MarkError { root: *root, source }.into(),
        };
        let top = object::read_root(self.store, root).map_err(failed)?;
        self.live.add(&BlockHash::from_bytes(*root.as_bytes()));
        self.blob(&top.links);
        self.meta(&top.meta);
        let mut waiting = vec![top.listing];
        while let Some(listing) = waiting.pop() {
            go_on()?;
            self.live.add(&listing);
            if !self.listings.insert(listing) {
                continue;
            }
            match object::read_listing_object(self.store, &listing).map_err(failed)? {
                ListingPart::Index(pieces) => waiting.extend(pieces.iter().map(|piece| piece.listing)),
                ListingPart::Entries(entries) => {
                    for (_, entry) in &entries {
                        self.entry(entry, &mut waiting).map_err(failed)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn entry(&mut self, entry: &Entry, waiting: &mut Vec<BlockHash>) -> Result<(), ObjectError> {
        self.meta(&entry.meta);
        match &entry.body {
            EntryBody::Directory { listing } => waiting.push(*listing),
            EntryBody::File(Content::Whole { block, .. }) => self.live.add(block),
            EntryBody::File(content @ Content::Mapped { map, .. }) => {
                self.blob(map);
                if let Some(map) = object::read_map(self.store, content)? {
                    map.blocks.iter().for_each(|block| self.live.add(block));
                }
            }
            EntryBody::File(Content::Nothing { .. })
            | EntryBody::Symlink { .. }
            | EntryBody::Fifo
            | EntryBody::Socket
            | EntryBody::CharacterDevice(_)
            | EntryBody::BlockDevice(_) => {}
        }
        Ok(())
    }

    fn meta(&mut self, meta: &Meta) {
        self.blob(&meta.xattrs);
    }

    fn blob(&mut self, blob: &Blob) {
        blob.blocks().iter().for_each(|block| self.live.add(block));
    }
}
