//! Walking everything that roots name, and asking which of its blocks are lacking.
//!
//! Memory: 32 bytes for each directory object of all states, and one batch of hashes.

use std::collections::{BTreeMap, HashSet};

use covey_types::{BlockHash, RootHash};

use super::report::LostState;
use crate::block::{BlockStore, StoreError};
use crate::manifest::{Blob, Content, Entry, EntryBody, ListingPart, Meta};
use crate::object::{self, ObjectError};
use crate::pack_store::PackStore;

/// Blocks that one question names.
const HASHES_PER_QUESTION: usize = 65_536;

/// Which of these blocks are lacking.
pub(crate) type Lacking<'a> = dyn Fn(&[BlockHash]) -> Result<Vec<BlockHash>, StoreError> + 'a;

/// Blocks that are needed and cannot be had, and how that shows.
pub(crate) type Lost = BTreeMap<BlockHash, (LostState, String)>;

/// See the module's first lines.
pub(crate) struct Walk<'a> {
    store: &'a PackStore,
    lacking: &'a Lacking<'a>,
    /// Blocks of which no copy is right, and why.
    damaged: &'a BTreeMap<BlockHash, String>,
    go_on: &'a dyn Fn() -> bool,
    seen: HashSet<BlockHash>,
    roots: HashSet<RootHash>,
    batch: Vec<BlockHash>,
    pub(crate) lost: Lost,
    pub(crate) entries: u64,
    /// Objects whose hash is right and that are no objects.
    pub(crate) malformed: Vec<String>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(
        store: &'a PackStore,
        lacking: &'a Lacking<'a>,
        damaged: &'a BTreeMap<BlockHash, String>,
        go_on: &'a dyn Fn() -> bool,
    ) -> Self {
        Self {
            store,
            lacking,
            damaged,
            go_on,
            seen: HashSet::new(),
            roots: HashSet::new(),
            batch: Vec::new(),
            lost: Lost::new(),
            entries: 0,
            malformed: Vec::new(),
        }
    }

    /// Walks what a root names; what was walked before is not read again. False: the caller wants it to end.
    pub(crate) fn root(&mut self, root: &RootHash) -> Result<bool, StoreError> {
        if !self.roots.insert(*root) {
            return Ok(true);
        }
        let block = BlockHash::from_bytes(*root.as_bytes());
        self.need(&block)?;
        let top = match object::read_root(self.store, root) {
            Ok(top) => top,
            Err(error) => return self.unreadable(&[block], error).map(|()| true),
        };
        self.blob(&top.links)?;
        if let Err(error) = object::read_links(self.store, &top) {
            self.unreadable(top.links.blocks(), error)?;
        }
        self.meta(&top.meta)?;
        let mut waiting = vec![top.listing];
        while let Some(listing) = waiting.pop() {
            if !(self.go_on)() {
                return Ok(false);
            }
            if !self.seen.insert(listing) {
                continue;
            }
            self.need(&listing)?;
            match object::read_listing_object(self.store, &listing) {
                Ok(ListingPart::Index(pieces)) => waiting.extend(pieces.iter().map(|piece| piece.listing)),
                Ok(ListingPart::Entries(entries)) => {
                    self.entries += entries.len() as u64;
                    for (_, entry) in &entries {
                        self.entry(entry, &mut waiting)?;
                    }
                }
                Err(error) => self.unreadable(&[listing], error)?,
            }
        }
        Ok(true)
    }

    /// Asks what is left to ask.
    pub(crate) fn end(&mut self) -> Result<(), StoreError> {
        let batch = std::mem::take(&mut self.batch);
        self.ask(batch)
    }

    fn entry(&mut self, entry: &Entry, waiting: &mut Vec<BlockHash>) -> Result<(), StoreError> {
        self.meta(&entry.meta)?;
        match &entry.body {
            EntryBody::Directory { listing } => waiting.push(*listing),
            EntryBody::File(Content::Whole { block, .. }) => self.need(block)?,
            EntryBody::File(content @ Content::Mapped { map, .. }) => {
                self.blob(map)?;
                match object::read_map(self.store, content) {
                    Ok(map) => {
                        for block in map.iter().flat_map(|map| &map.blocks) {
                            self.need(block)?;
                        }
                    }
                    Err(error) => self.unreadable(map.blocks(), error)?,
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

    fn meta(&mut self, meta: &Meta) -> Result<(), StoreError> {
        self.blob(&meta.xattrs)
    }

    fn blob(&mut self, blob: &Blob) -> Result<(), StoreError> {
        blob.blocks().iter().try_for_each(|block| self.need(block))
    }

    fn need(&mut self, block: &BlockHash) -> Result<(), StoreError> {
        if let Some(detail) = self.damaged.get(block) {
            self.lost.insert(*block, (LostState::Damaged, detail.clone()));
            return Ok(());
        }
        self.batch.push(*block);
        if self.batch.len() < HASHES_PER_QUESTION {
            return Ok(());
        }
        let batch = std::mem::take(&mut self.batch);
        self.ask(batch)
    }

    fn ask(&mut self, mut batch: Vec<BlockHash>) -> Result<(), StoreError> {
        batch.sort_unstable();
        batch.dedup();
        for block in (self.lacking)(&batch)? {
            self.lost.entry(block).or_insert_with(|| (LostState::Missing, "no pack has it".to_owned()));
        }
        Ok(())
    }

    /// An object made of these blocks cannot be read: which of them is at fault is found by reading each.
    fn unreadable(&mut self, blocks: &[BlockHash], error: ObjectError) -> Result<(), StoreError> {
        match error {
            ObjectError::Store(error @ StoreError::Unavailable { .. }) => return Err(error),
            ObjectError::Store(_) => {}
            ObjectError::Malformed(error) => {
                let named = blocks.first().map_or_else(String::new, ToString::to_string);
                self.malformed.push(format!("object {named}: {error}"));
            }
        }
        for block in blocks {
            match self.store.get(block) {
                Ok(_) => {}
                Err(error @ StoreError::Unavailable { .. }) => return Err(error),
                Err(StoreError::Absent { .. }) => {
                    self.lost.insert(*block, (LostState::Missing, "no pack has it".to_owned()));
                }
                Err(error) => {
                    self.lost.insert(*block, (LostState::Damaged, error.to_string()));
                }
            }
        }
        Ok(())
    }
}
