//! Looking into a snapshot without putting it back: one path, one directory, one file, the difference of two.
//!
//! What stays true: nothing is read but what is asked for, so a look costs what it shows and not what the home
//! holds; a path is bytes from the home's root and cannot leave it. What does not belong here: changing a
//! snapshot (`crate::edit`), and where snapshots come from.

mod diff;
mod file;
mod walk;

use covey_types::{BlockHash, Fault, RootHash};

pub use diff::{Change, ChangeKind, diff, diff_from_nothing};
pub use file::FileReader;
pub use walk::{WalkOptions, is_behind};

use crate::block::BlockStore;
use crate::manifest::{Entry, EntryBody, ListingPart, Meta, NAME_BYTES_MAX, PATH_BYTES_MAX, Root};
use crate::object::{self, ObjectError};
use crate::path::show;

/// Why something in a snapshot cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// Proven: the snapshot has no such name.
    #[error("`{path}` is not in the snapshot")]
    NotFound {
        /// From the home's root, lossily as text.
        path: String,
    },
    /// A directory was asked for, or a name below it.
    #[error("`{path}` is not a directory in the snapshot")]
    NotADirectory {
        /// From the home's root, lossily as text.
        path: String,
    },
    /// A file's bytes were asked for.
    #[error("`{path}` is not a regular file in the snapshot")]
    NotAFile {
        /// From the home's root, lossily as text.
        path: String,
    },
    /// Empty components, `.`, `..`, NUL, or too long.
    #[error("`{path}` is no path in a home; write it from the home's root, without `.` and `..`")]
    NotAPath {
        /// As it was given, lossily as text.
        path: String,
    },
    /// The store did not give what the snapshot names.
    #[error("`{path}` cannot be read from the store")]
    Object {
        /// From the home's root, lossily as text.
        path: String,
        /// Why.
        source: ObjectError,
    },
}

impl ViewError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::NotFound { .. } => Fault::NotFound,
            Self::NotADirectory { .. } | Self::NotAFile { .. } | Self::NotAPath { .. } => Fault::Invalid,
            Self::Object { source: ObjectError::Store(error), .. } => error.fault(),
            Self::Object { source: ObjectError::Malformed(_), .. } => Fault::Corrupt,
        }
    }
}

/// A name in a directory and what it is.
pub(crate) type Named = (Vec<u8>, Entry);

/// Splits a path from the home's root in its names. Slashes at the ends do not count; the empty path is the root.
///
/// # Errors
/// [`ViewError::NotAPath`].
pub fn components(path: &[u8]) -> Result<Vec<&[u8]>, ViewError> {
    let bad = || ViewError::NotAPath { path: show(path) };
    let from = path.iter().position(|byte| *byte != b'/').unwrap_or(path.len());
    let to = path.iter().rposition(|byte| *byte != b'/').map_or(from, |at| at + 1);
    let inner = &path[from..to];
    if inner.len() > PATH_BYTES_MAX {
        return Err(bad());
    }
    if inner.is_empty() {
        return Ok(Vec::new());
    }
    let names: Vec<&[u8]> = inner.split(|byte| *byte == b'/').collect();
    let good = |name: &&[u8]| {
        !name.is_empty()
            && name.len() <= NAME_BYTES_MAX
            && *name != b"."
            && *name != b".."
            && !name.contains(&0)
    };
    if names.iter().all(good) { Ok(names) } else { Err(bad()) }
}

/// A published state, opened for looking into it.
#[derive(Debug)]
pub struct Snapshot<'a> {
    store: &'a dyn BlockStore,
    root: Root,
}

impl<'a> Snapshot<'a> {
    /// Reads the root object and nothing else.
    ///
    /// # Errors
    /// When it is absent, unavailable, damaged or malformed.
    pub fn open(store: &'a dyn BlockStore, root: &RootHash) -> Result<Self, ViewError> {
        let source = |source| ViewError::Object { path: String::new(), source };
        Ok(Self { store, root: object::read_root(store, root).map_err(source)? })
    }

    /// The root object.
    pub const fn root(&self) -> &Root {
        &self.root
    }

    /// The entry of a path; the home's own directory for the empty one.
    ///
    /// # Errors
    /// [`ViewError`].
    pub fn find(&self, path: &[u8]) -> Result<Entry, ViewError> {
        let names = components(path)?;
        let mut entry = self.top();
        for (depth, name) in names.iter().enumerate() {
            let EntryBody::Directory { listing } = entry.body else {
                return Err(ViewError::NotADirectory { path: show(&names[..depth].join(&b'/')) });
            };
            let here = || show(&names[..=depth].join(&b'/'));
            let found = self.find_in(&listing, name);
            let found = found.map_err(|source| ViewError::Object { path: here(), source })?;
            entry = found.ok_or_else(|| ViewError::NotFound { path: here() })?;
        }
        Ok(entry)
    }

    /// The entries of a directory, sorted by name.
    ///
    /// # Errors
    /// [`ViewError`].
    pub fn list(&self, path: &[u8]) -> Result<Vec<(Vec<u8>, Entry)>, ViewError> {
        let EntryBody::Directory { listing } = self.find(path)?.body else {
            return Err(ViewError::NotADirectory { path: show(path) });
        };
        let found = object::read_listing(self.store, &listing);
        Ok(found.map_err(|source| ViewError::Object { path: show(path), source })?.entries)
    }

    /// The bytes of a regular file; holes read as zeros.
    ///
    /// # Errors
    /// [`ViewError`].
    pub fn read(&self, path: &[u8]) -> Result<FileReader<'a>, ViewError> {
        let EntryBody::File(content) = self.find(path)?.body else {
            return Err(ViewError::NotAFile { path: show(path) });
        };
        let reader = FileReader::new(self.store, &content);
        reader.map_err(|source| ViewError::Object { path: show(path), source })
    }

    fn top(&self) -> Entry {
        let Root { meta, listing, .. } = &self.root;
        Entry { meta: Meta::clone(meta), body: EntryBody::Directory { listing: *listing } }
    }

    /// Of a cut directory only the object that can hold the name is read.
    fn find_in(&self, listing: &BlockHash, name: &[u8]) -> Result<Option<Entry>, ObjectError> {
        let entries = match object::read_listing_object(self.store, listing)? {
            ListingPart::Entries(entries) => entries,
            ListingPart::Index(pieces) => {
                let behind = pieces.partition_point(|piece| piece.first.as_slice() <= name);
                let Some(piece) = behind.checked_sub(1).and_then(|at| pieces.get(at)) else {
                    return Ok(None);
                };
                match object::read_listing_object(self.store, &piece.listing)? {
                    ListingPart::Entries(entries) => entries,
                    ListingPart::Index(_) => return Err(object::index_below_index().into()),
                }
            }
        };
        let found = entries.binary_search_by(|(known, _)| known.as_slice().cmp(name));
        Ok(found.ok().and_then(|at| entries.into_iter().nth(at)).map(|(_, entry)| entry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_cannot_leave_the_home() {
        assert_eq!(components(b"").unwrap(), Vec::<&[u8]>::new());
        assert_eq!(components(b"///").unwrap(), Vec::<&[u8]>::new());
        assert_eq!(components(b"/a/b\xff/").unwrap(), vec![&b"a"[..], b"b\xff"]);
        for bad in [&b"a//b"[..], b"..", b"a/../b", b"./a", b"a\0b", &[b'x'; 256]] {
            assert!(components(bad).is_err(), "{bad:?}");
        }
    }
}
