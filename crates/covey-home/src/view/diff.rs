//! What differs between two states.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::ops::ControlFlow;

use covey_types::{BlockHash, RootHash};

use super::{Named, Snapshot, ViewError};
use crate::block::BlockStore;
use crate::manifest::{Entry, EntryBody, ListingPart};
use crate::object::{self, ObjectError};
use crate::path::show;

/// How a path differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// Only in the newer state.
    Added,
    /// Only in the older state.
    Removed,
    /// Another content, link target or kind.
    Modified,
    /// The same content with another mode, time or extended attribute.
    Metadata,
}

/// One path that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// From the home's root; empty for the home's own directory.
    pub path: Vec<u8>,
    /// How.
    pub kind: ChangeKind,
    /// As it was.
    pub old: Option<Entry>,
    /// As it is.
    pub new: Option<Entry>,
}

/// Calls `each` for every path that differs, a directory before what is in it and names in their order, until it
/// breaks. Directories that are the same in both are not read: the cost follows the difference. Below a directory
/// that is only in one state every path is told.
///
/// # Errors
/// [`ViewError`], when either state cannot be read.
pub fn diff(
    store: &dyn BlockStore,
    old: &RootHash,
    new: &RootHash,
    each: &mut dyn FnMut(Change) -> ControlFlow<()>,
) -> Result<(), ViewError> {
    if old == new {
        return Ok(());
    }
    let (old, new) = (Snapshot::open(store, old)?.top(), Snapshot::open(store, new)?.top());
    let mut walk = Walk { store, each, is_over: false };
    walk.pair(Vec::new(), Some(old), Some(new))
}

/// As [`diff`] from the home before its first snapshot: everything in `new` is added.
///
/// # Errors
/// [`ViewError`].
pub fn diff_from_nothing(
    store: &dyn BlockStore,
    new: &RootHash,
    each: &mut dyn FnMut(Change) -> ControlFlow<()>,
) -> Result<(), ViewError> {
    let new = Snapshot::open(store, new)?.top();
    let mut walk = Walk { store, each, is_over: false };
    walk.pair(Vec::new(), None, Some(new))
}

struct Walk<'a> {
    store: &'a dyn BlockStore,
    each: &'a mut dyn FnMut(Change) -> ControlFlow<()>,
    is_over: bool,
}

/// One step of a walk with its own stack: a home may be deeper than a thread's stack.
type Pair = (Vec<u8>, Option<Entry>, Option<Entry>);

impl Walk<'_> {
    fn pair(&mut self, path: Vec<u8>, old: Option<Entry>, new: Option<Entry>) -> Result<(), ViewError> {
        let mut waiting: Vec<Pair> = vec![(path, old, new)];
        while let Some((path, old, new)) = waiting.pop() {
            if self.is_over {
                return Ok(());
            }
            let children = self.children(&path, old.as_ref(), new.as_ref())?;
            self.tell(path, old, new);
            waiting.extend(children.into_iter().rev());
        }
        Ok(())
    }

    fn tell(&mut self, path: Vec<u8>, old: Option<Entry>, new: Option<Entry>) {
        let kind = match (&old, &new) {
            (Some(old), Some(new)) => {
                let both_directories = matches!(
                    (&old.body, &new.body),
                    (EntryBody::Directory { .. }, EntryBody::Directory { .. })
                );
                if old.body != new.body && !both_directories {
                    ChangeKind::Modified
                } else if old.meta != new.meta {
                    ChangeKind::Metadata
                } else {
                    return;
                }
            }
            (None, Some(_)) => ChangeKind::Added,
            (Some(_), None) => ChangeKind::Removed,
            (None, None) => return,
        };
        self.is_over = (self.each)(Change { path, kind, old, new }).is_break();
    }

    fn children(
        &self,
        path: &[u8],
        old: Option<&Entry>,
        new: Option<&Entry>,
    ) -> Result<Vec<Pair>, ViewError> {
        let listing = |entry: Option<&Entry>| match entry.map(|entry| &entry.body) {
            Some(EntryBody::Directory { listing }) => Some(*listing),
            _ => None,
        };
        let (old, new) = (listing(old), listing(new));
        if old == new {
            return Ok(Vec::new());
        }
        let source = |source| ViewError::Object { path: show(path), source };
        let (old, new) = self.differing(old, new).map_err(source)?;
        let child = |name: &[u8]| {
            let mut child = path.to_vec();
            if !child.is_empty() {
                child.push(b'/');
            }
            child.extend_from_slice(name);
            child
        };
        let mut pairs = Vec::new();
        let (mut old, mut new) = (old.into_iter().peekable(), new.into_iter().peekable());
        loop {
            let order = match (old.peek(), new.peek()) {
                (None, None) => return Ok(pairs),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some((old, _)), Some((new, _))) => old.cmp(new),
            };
            let before = if order.is_le() { old.next() } else { None };
            let after = if order.is_ge() { new.next() } else { None };
            if before != after {
                let name = before.as_ref().or(after.as_ref()).map_or(&[][..], |(name, _)| name);
                let path = child(name);
                pairs.push((path, before.map(|(_, entry)| entry), after.map(|(_, entry)| entry)));
            }
        }
    }

    /// The entries of two directories, without those of objects that both have.
    fn differing(
        &self,
        old: Option<BlockHash>,
        new: Option<BlockHash>,
    ) -> Result<(Vec<Named>, Vec<Named>), ObjectError> {
        let pieces = |listing: Option<BlockHash>| -> Result<Part, ObjectError> {
            let Some(listing) = listing else { return Ok(Part::default()) };
            Ok(match object::read_listing_object(self.store, &listing)? {
                ListingPart::Entries(entries) => Part { entries, pieces: Vec::new() },
                ListingPart::Index(pieces) => {
                    Part { entries: Vec::new(), pieces: pieces.iter().map(|piece| piece.listing).collect() }
                }
            })
        };
        let (mut old, mut new) = (pieces(old)?, pieces(new)?);
        let in_old: HashSet<BlockHash> = old.pieces.iter().copied().collect();
        let in_both: HashSet<BlockHash> =
            new.pieces.iter().copied().filter(|one| in_old.contains(one)).collect();
        for part in [&mut old, &mut new] {
            for piece in std::mem::take(&mut part.pieces) {
                if in_both.contains(&piece) {
                    continue;
                }
                match object::read_listing_object(self.store, &piece)? {
                    ListingPart::Entries(entries) => part.entries.extend(entries),
                    ListingPart::Index(_) => return Err(object::index_below_index().into()),
                }
            }
        }
        Ok((old.entries, new.entries))
    }
}

#[derive(Default)]
struct Part {
    entries: Vec<(Vec<u8>, Entry)>,
    pieces: Vec<BlockHash>,
}
