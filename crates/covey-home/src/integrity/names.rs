//! Which homes and paths need the blocks that are lost.
//!
//! A directory of which everything below is whole is read once, however many states share it.

use std::collections::{BTreeMap, HashSet};

use covey_types::BlockHash;

use super::NamedRoot;
use super::report::Need;
use super::walk::Lost;
use crate::block::StoreError;
use crate::manifest::{Content, Entry, EntryBody, ListingPart};
use crate::object::{self, ObjectError};
use crate::pack_store::PackStore;

/// Places that are named for one block; the count goes on.
pub const NEEDS_NAMED_MAX: usize = 10;

/// Who needs a block.
#[derive(Debug, Default)]
pub(super) struct Needs {
    pub(super) count: u64,
    pub(super) first: Vec<Need>,
}

/// A directory object that is being looked at.
struct Open {
    listing: BlockHash,
    /// Directory objects below, with their paths.
    below: Vec<(Vec<u8>, BlockHash)>,
    is_whole: bool,
}

struct Names<'a> {
    store: &'a PackStore,
    lost: &'a Lost,
    whole: HashSet<BlockHash>,
    needs: BTreeMap<BlockHash, Needs>,
}

/// Finds who needs `lost`. What is damaged beyond it is passed over.
///
/// # Errors
/// [`StoreError::Unavailable`].
pub(super) fn needs_of(
    store: &PackStore,
    roots: &[NamedRoot],
    lost: &Lost,
) -> Result<BTreeMap<BlockHash, Needs>, StoreError> {
    let mut names = Names { store, lost, whole: HashSet::new(), needs: BTreeMap::new() };
    if !lost.is_empty() {
        for root in roots {
            names.root(root)?;
        }
    }
    Ok(names.needs)
}

impl Names<'_> {
    fn root(&mut self, named: &NamedRoot) -> Result<(), StoreError> {
        let block = BlockHash::from_bytes(*named.root.as_bytes());
        self.note(named, b"", [block]);
        let Some(top) = known(object::read_root(self.store, &named.root))? else { return Ok(()) };
        self.note(named, b"", top.links.blocks().to_vec());
        self.note(named, b"", top.meta.xattrs.blocks().to_vec());
        let mut open = vec![self.open(named, &[], top.listing)?];
        while let Some(dir) = open.last_mut() {
            if let Some((path, listing)) = dir.below.pop() {
                if !self.whole.contains(&listing) {
                    open.push(self.open(named, &path, listing)?);
                }
                continue;
            }
            let (listing, is_whole) = (dir.listing, dir.is_whole);
            open.pop();
            if is_whole {
                self.whole.insert(listing);
            } else if let Some(parent) = open.last_mut() {
                parent.is_whole = false;
            }
        }
        Ok(())
    }

    fn open(&mut self, named: &NamedRoot, path: &[u8], listing: BlockHash) -> Result<Open, StoreError> {
        let mut shown = path.to_vec();
        if !shown.is_empty() {
            shown.push(b'/');
        }
        let is_lost = self.note(named, &shown, [listing]);
        let mut open = Open { listing, below: Vec::new(), is_whole: !is_lost };
        match known(object::read_listing_object(self.store, &listing))? {
            None => open.is_whole = false,
            Some(ListingPart::Index(pieces)) => {
                open.below.extend(pieces.iter().map(|piece| (path.to_vec(), piece.listing)));
            }
            Some(ListingPart::Entries(entries)) => {
                for (name, entry) in entries {
                    let child = [&shown[..], &name].concat();
                    let blocks = self.blocks_of(&entry)?;
                    open.is_whole &= !self.note(named, &child, blocks);
                    if let EntryBody::Directory { listing } = entry.body {
                        open.below.push((child, listing));
                    }
                }
            }
        }
        Ok(open)
    }

    fn blocks_of(&self, entry: &Entry) -> Result<Vec<BlockHash>, StoreError> {
        let mut blocks = entry.meta.xattrs.blocks().to_vec();
        match &entry.body {
            EntryBody::File(Content::Whole { block, .. }) => blocks.push(*block),
            EntryBody::File(content @ Content::Mapped { map, .. }) => {
                blocks.extend_from_slice(map.blocks());
                if let Some(Some(map)) = known(object::read_map(self.store, content))? {
                    blocks.extend(map.blocks);
                }
            }
            _ => {}
        }
        Ok(blocks)
    }

    /// Tells whether one of the blocks is lost.
    fn note(&mut self, named: &NamedRoot, path: &[u8], blocks: impl IntoIterator<Item = BlockHash>) -> bool {
        let mut any = false;
        for block in blocks {
            if !self.lost.contains_key(&block) {
                continue;
            }
            any = true;
            let needs = self.needs.entry(block).or_default();
            needs.count += 1;
            if needs.first.len() < NEEDS_NAMED_MAX {
                needs.first.push(Need {
                    home: named.home.clone(),
                    generation: named.generation,
                    path: String::from_utf8_lossy(path).into_owned(),
                });
            }
        }
        any
    }
}

/// None for what is lost or no object.
fn known<T>(read: Result<T, ObjectError>) -> Result<Option<T>, StoreError> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(ObjectError::Store(error @ StoreError::Unavailable { .. })) => Err(error),
        Err(_) => Ok(None),
    }
}
