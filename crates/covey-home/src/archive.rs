//! Snapshots as tar archives, in and out, with everything that a snapshot keeps.
//!
//! The dialect is pax (POSIX.1-2001) as GNU tar, bsdtar and Python read it: `SCHILY.xattr.*` records for extended
//! attributes and ACLs, `GNU.sparse` 1.0 for holes, hard links as links, times with their nanoseconds. An archive
//! is read as hostile input: it becomes a manifest and never touches a file system. What does not belong here:
//! publishing what was read.

mod export;
mod import;
mod pax;
mod stream;
mod tree;

use std::io;

use covey_types::Fault;
use serde::Serialize;

pub use export::export;
pub use import::{ENTRIES_MAX, Imported, import};

use crate::block::StoreError;
use crate::manifest::MalformedObject;
use crate::object::ObjectError;
use crate::view::ViewError;

/// Uid and gid of everything in an archive: what the agent is inside.
const OWNER: u64 = 1000;

/// What went through an archive.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ArchiveReport {
    /// Names.
    pub entries: u64,
    /// Regular files, each name counted.
    pub files: u64,
    /// Sum of their sizes in bytes.
    pub bytes: u64,
    /// Names that an archive has no kind for: sockets.
    pub skipped: u64,
    /// The first of them, lossily as text.
    pub skipped_paths: Vec<String>,
}

/// Names that a report holds; further ones are counted.
const SKIPPED_PATHS_MAX: usize = 100;

impl ArchiveReport {
    fn skip(&mut self, path: &[u8]) {
        self.skipped += 1;
        if self.skipped_paths.len() < SKIPPED_PATHS_MAX {
            self.skipped_paths.push(crate::path::show(path));
        }
    }
}

/// Why an archive was not written or read.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The stream that the archive goes to or comes from.
    #[error("the archive's stream broke")]
    Stream(#[source] io::Error),
    /// The archive cannot be understood.
    #[error("`{path}` in the archive: {problem}")]
    Entry {
        /// Its name, lossily as text.
        path: String,
        /// What is wrong, and what would not be.
        problem: String,
    },
    /// A file of the snapshot cannot be read, so the archive would lack it.
    #[error("`{path}` cannot be read from the store")]
    Object {
        /// From the home's root, lossily as text.
        path: String,
        /// Why.
        source: ObjectError,
    },
    /// The snapshot.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ArchiveError {
    /// What the caller can do about it.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Stream(error) => match stored(error) {
                Some(error) => error.fault(),
                None => Fault::Retry,
            },
            Self::Entry { .. } => Fault::Invalid,
            Self::Object { source: ObjectError::Store(error), .. } | Self::Store(error) => error.fault(),
            Self::Object { source: ObjectError::Malformed(_), .. } => Fault::Corrupt,
            Self::View(error) => error.fault(),
        }
    }
}

/// The store's own words inside an I/O error.
fn stored(error: &io::Error) -> Option<&StoreError> {
    error.get_ref()?.downcast_ref()
}

impl From<MalformedObject> for ArchiveError {
    fn from(error: MalformedObject) -> Self {
        Self::Object { path: String::new(), source: error.into() }
    }
}
