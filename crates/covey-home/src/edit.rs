//! A new state from an old one with one path of it changed, without a directory on disk.
//!
//! What stays true: only the directories above the path get new objects, so the cost follows the depth and the
//! subtree and not the home; which names share an inode stays true for every name that is left. What does not
//! belong here: publishing the new root.

use covey_types::{BlockHash, Fault, RootHash};

use crate::block::{BlockStore, StoreError, Upload};
use crate::manifest::{Entry, EntryBody, LinkTable, ListingBuilder, Root};
use crate::object::{self, ObjectError, put, put_blob, put_root};
use crate::path::show;
use crate::view::{Named, Snapshot, ViewError, components};

/// Why a path was not put back.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// One of the two states cannot be read, or has no such path.
    #[error(transparent)]
    View(#[from] ViewError),
    /// In the newer state something that is not a directory stands above the path.
    #[error("`{path}` is not a directory now; remove it or put it back first")]
    Blocked {
        /// From the home's root, lossily as text.
        path: String,
    },
    /// The home's own directory was named.
    #[error("the path names the home itself; restore the whole state instead")]
    WholeHome,
    /// The store did not take the new objects.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl EditError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::View(error) => error.fault(),
            Self::Blocked { .. } => Fault::Conflict,
            Self::WholeHome => Fault::Invalid,
            Self::Store(error) => error.fault(),
        }
    }
}

/// A state that was made from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edited {
    /// Names it. Every block it names is durable.
    pub root: RootHash,
    /// Regular files in it, each name counted.
    pub files: u64,
    /// Sum of their sizes in bytes.
    pub bytes: u64,
    /// See [`Upload::epoch`]. It is good for what was a kept state when the edit began: whoever looked up `from` before
    /// that must see that it still is one when the new state is published.
    pub epoch: u64,
}

/// Makes the state `current` with `path`, and everything below it, as it is in `from`. Directories above it that
/// are missing now are made as they are in `from`.
///
/// # Errors
/// [`EditError`]; nothing refers to what was written then.
pub fn restore_path(
    store: &dyn BlockStore,
    current: &RootHash,
    from: &RootHash,
    path: &[u8],
) -> Result<Edited, EditError> {
    let names = components(path)?;
    let Some((last, above)) = names.split_last() else { return Err(EditError::WholeHome) };
    // Before anything is read: the new state takes over whole subtrees without asking whether they are stored, so a
    // collection that passes from here on must be noticed.
    let upload = store.upload()?;
    let epoch = upload.epoch();
    let source = Snapshot::open(store, from)?;
    let target = Snapshot::open(store, current)?;
    let wanted = source.find(path)?;

    // From the home's directory down to the one that holds the path: as it is now, or as it was if it is gone.
    let mut chain: Vec<(Entry, Vec<Named>)> = Vec::new();
    for depth in 0..=above.len() {
        let here = above[..depth].join(&b'/');
        let now = match target.find(&here) {
            Ok(entry) => Some(entry),
            Err(ViewError::NotFound { .. }) => None,
            Err(ViewError::NotADirectory { path }) => return Err(EditError::Blocked { path }),
            Err(error) => return Err(error.into()),
        };
        match now {
            Some(entry @ Entry { body: EntryBody::Directory { .. }, .. }) => {
                chain.push((entry, target.list(&here)?));
            }
            Some(_) => return Err(EditError::Blocked { path: show(&here) }),
            None => chain.push((source.find(&here)?, Vec::new())),
        }
    }

    let inner = names.join(&b'/');
    let replaced = match chain.last() {
        Some((_, entries)) => get(entries, last).cloned(),
        None => None,
    };
    let old_size = replaced.map_or(Ok((0, 0)), |entry| subtree(store, &inner, &entry))?;
    let new_size = subtree(store, &inner, &wanted)?;
    let links = merged_links(store, target.root(), source.root(), &inner)?;

    let mut child = (last.to_vec(), wanted);
    let mut top = None;
    for depth in (0..chain.len()).rev() {
        let Some((mut entry, mut entries)) = chain.pop() else { break };
        put_entry(&mut entries, child.0, child.1);
        entry.body = EntryBody::Directory { listing: write_listing(upload.as_ref(), &entries)? };
        match depth.checked_sub(1).and_then(|above_it| above.get(above_it)) {
            Some(name) => child = (name.to_vec(), entry),
            None => {
                top = Some(entry);
                break;
            }
        }
    }
    let Some(Entry { meta, body: EntryBody::Directory { listing } }) = top else {
        return Err(EditError::WholeHome);
    };
    let root = Root {
        meta,
        listing,
        files: target.root().files.saturating_sub(old_size.0).saturating_add(new_size.0),
        bytes: target.root().bytes.saturating_sub(old_size.1).saturating_add(new_size.1),
        links: put_blob(upload.as_ref(), &links.encode())?,
    };
    let hash = put_root(upload.as_ref(), &root)?;
    upload.finish()?;
    Ok(Edited { root: hash, files: root.files, bytes: root.bytes, epoch })
}

fn get<'a>(entries: &'a [(Vec<u8>, Entry)], name: &[u8]) -> Option<&'a Entry> {
    let found = entries.binary_search_by(|(known, _)| known.as_slice().cmp(name)).ok()?;
    entries.get(found).map(|(_, entry)| entry)
}

fn put_entry(entries: &mut Vec<(Vec<u8>, Entry)>, name: Vec<u8>, entry: Entry) {
    match entries.binary_search_by(|(known, _)| known.cmp(&name)) {
        Ok(at) => entries[at].1 = entry,
        Err(at) => entries.insert(at, (name, entry)),
    }
}

/// Regular files at and below an entry, and the sum of their sizes.
fn subtree(store: &dyn BlockStore, path: &[u8], entry: &Entry) -> Result<(u64, u64), ViewError> {
    let (mut files, mut bytes) = (0_u64, 0_u64);
    let mut waiting = vec![entry.clone()];
    while let Some(entry) = waiting.pop() {
        match entry.body {
            EntryBody::File(content) => {
                files += 1;
                bytes = bytes.saturating_add(content.size());
            }
            EntryBody::Directory { listing } => {
                let found = object::read_listing(store, &listing);
                let found = found.map_err(|source| ViewError::Object { path: show(path), source })?;
                waiting.extend(found.entries.into_iter().map(|(_, entry)| entry));
            }
            EntryBody::Symlink { .. }
            | EntryBody::Fifo
            | EntryBody::Socket
            | EntryBody::CharacterDevice(_)
            | EntryBody::BlockDevice(_) => {}
        }
    }
    Ok((files, bytes))
}

fn is_at_or_below(path: &[u8], top: &[u8]) -> bool {
    path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

/// The groups of the current state outside of `top`, and those of the earlier one inside.
fn merged_links(
    store: &dyn BlockStore,
    current: &Root,
    from: &Root,
    top: &[u8],
) -> Result<LinkTable, ViewError> {
    let read = |root: &Root| {
        let source = |source: ObjectError| ViewError::Object { path: String::new(), source };
        object::read_links(store, root).map_err(source)
    };
    let mut groups = Vec::new();
    for group in read(current)?.groups {
        groups.push(group.into_iter().filter(|path| !is_at_or_below(path, top)).collect::<Vec<_>>());
    }
    for group in read(from)?.groups {
        groups.push(group.into_iter().filter(|path| is_at_or_below(path, top)).collect());
    }
    Ok(LinkTable::new(groups))
}

fn write_listing(upload: &dyn Upload, entries: &[(Vec<u8>, Entry)]) -> Result<BlockHash, StoreError> {
    let mut builder = ListingBuilder::default();
    for (name, entry) in entries {
        builder.push(name, &entry.encode());
    }
    builder.finish(|object| put(upload, object))
}
