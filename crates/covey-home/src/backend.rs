//! Where the files of one org's store lie: the one seam between what a store does and what it stands on.
//!
//! What stays true: a file is visible whole or not at all; "not there" is said only where the place has answered
//! that it is not there, and any other failure is [`BackendError::Unavailable`] (I7); a moved pointer is one
//! conditional put. What does not belong here: what the files mean. `PackStore` and `Pointers` are written against
//! this trait only, so garbage collection, encryption and verification need to know no backend.

mod directory;
mod memory;

use std::fmt::{self, Debug};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

pub use directory::DirectoryBackend;
pub use memory::MemoryBackend;

use crate::block::StoreError;
use crate::keys::NameKeys;
use crate::name::{InvalidName, check_name};

/// Longest file that [`Backend::get`] reads and [`Backend::put_if`] writes, in bytes: these are pointers and marks.
pub const SMALL_FILE_BYTES_MAX: usize = 64 * 1024;
/// Parts of a key at most, for example `homes/<home>/snapshots/<number>`.
const KEY_PARTS_MAX: usize = 8;

/// The place of a file in an org's store: names joined by `/`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

impl Key {
    /// Joins `parts`, each of which becomes one harmless path component.
    ///
    /// # Errors
    /// When one is no name, or there are none or too many.
    pub fn new(parts: &[&str]) -> Result<Self, InvalidName> {
        parts.iter().try_for_each(|part| check_name(part))?;
        if parts.is_empty() || parts.len() > KEY_PARTS_MAX {
            return Err(InvalidName::of(&parts.join("/")));
        }
        Ok(Self(parts.join("/")))
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a backend did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The place has answered that there is no such file.
    #[error("{file} is not there")]
    NotFound {
        /// The file, with its place.
        file: String,
    },
    /// It cannot be told or done now.
    #[error("{what}: {source}")]
    Unavailable {
        /// What was tried, on which file.
        what: String,
        /// The answer.
        source: io::Error,
    },
}

impl BackendError {
    /// A failure of which nothing follows but that it may be tried again.
    pub fn unavailable(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Unavailable { what: what.into(), source: source.into() }
    }
}

impl From<BackendError> for StoreError {
    /// For calls that have no use for "not there": a file that is gone in between may be found by a later try.
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::NotFound { file } => {
                Self::unavailable(format!("read {file}"), io::Error::from(io::ErrorKind::NotFound))
            }
            BackendError::Unavailable { what, source } => Self::Unavailable { what, source },
        }
    }
}

/// The end of a file, and how long it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tail {
    /// The last bytes.
    pub bytes: Vec<u8>,
    /// Length of the whole file.
    pub file_len: u64,
}

/// Which content a small file had when it was read; of use for [`Backend::put_if`] only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileVersion(String);

impl FileVersion {
    /// Wraps what a backend tells versions apart by.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// What a backend tells versions apart by.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A small file as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned {
    /// All of it.
    pub bytes: Vec<u8>,
    /// For a later [`Backend::put_if`].
    pub version: FileVersion,
}

/// What must be there for a conditional put to happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// No such file.
    Absent,
    /// The file as it was read.
    Version(FileVersion),
    /// Anything.
    Any,
}

/// How a conditional put ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum PutOutcome {
    /// It is there, durably.
    Written(FileVersion),
    /// Something else was there than expected, and still is.
    Conflict,
}

/// A file that is being written. Dropped before [`NewFile::publish`], it leaves nothing that anybody sees.
pub trait NewFile: Send + Debug {
    /// Adds bytes at its end.
    ///
    /// # Errors
    /// When they cannot be kept; the file cannot be published then.
    fn append(&mut self, bytes: &[u8]) -> Result<(), BackendError>;

    /// Makes the whole file durable and then visible, in this order. Whether its name survives a power cut is
    /// certain only after [`Backend::flush`].
    ///
    /// # Errors
    /// When that is not certain. The file may then be there, and is whole if it is.
    fn publish(self: Box<Self>, key: &Key) -> Result<(), BackendError>;
}

/// The files of one org. Every method blocks; all may be called from many threads.
///
/// Implementations pass the contract suite in `covey_home::contract`.
pub trait Backend: Send + Sync + Debug {
    /// Where it is, for messages; never a credential.
    fn place(&self) -> String;

    /// Whether a question costs a journey over a network, so that it pays to ask several at once and to keep
    /// the answers.
    fn is_remote(&self) -> bool;

    /// A directory of this host for what can be made anew from the store; none: memory must do.
    fn cache_dir(&self) -> Option<PathBuf>;

    /// What blocks are named with where the backend itself opens and seals packs, so that whoever uses it holds no other
    /// key; none: the store's key ring says it, if there is one.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] when it cannot be told now.
    fn name_keys(&self) -> Result<Option<NameKeys>, BackendError> {
        Ok(None)
    }

    /// Names of the files directly in `dir`, in no order. A directory that was never written to is empty.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] when not all can be told.
    fn list(&self, dir: &Key) -> Result<Vec<String>, BackendError>;

    /// Names of the directories directly in `dir`, in no order.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] when not all can be told.
    fn list_dirs(&self, dir: &Key) -> Result<Vec<String>, BackendError>;

    /// Length of a file in bytes.
    ///
    /// # Errors
    /// [`BackendError::NotFound`] only where the place says so.
    fn file_len(&self, key: &Key) -> Result<u64, BackendError>;

    /// Bytes from `offset` on. Fewer than `len` only where the file ends.
    ///
    /// # Errors
    /// [`BackendError::NotFound`] only where the place says so.
    fn read(&self, key: &Key, offset: u64, len: usize) -> Result<Vec<u8>, BackendError>;

    /// The last bytes, at most `len`, in one request.
    ///
    /// # Errors
    /// [`BackendError::NotFound`] only where the place says so.
    fn read_tail(&self, key: &Key, len: usize) -> Result<Tail, BackendError>;

    /// Begins a file.
    ///
    /// # Errors
    /// When the place cannot be written.
    fn create(&self) -> Result<Box<dyn NewFile>, BackendError>;

    /// Makes certain that the files that are visible in `dir` stay after a power cut, also those that other
    /// processes have published.
    ///
    /// # Errors
    /// When that is not certain.
    fn flush(&self, dir: &Key) -> Result<(), BackendError>;

    /// Removes a file; tells whether it was there. Only garbage collection removes packs (I8).
    ///
    /// # Errors
    /// When that is not certain.
    fn remove(&self, key: &Key) -> Result<bool, BackendError>;

    /// Reads a small file; none where the place says that it is not there.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`], also for one above [`SMALL_FILE_BYTES_MAX`].
    fn get(&self, key: &Key) -> Result<Option<Versioned>, BackendError>;

    /// Writes a small file as a whole, durably, if what is there is as `expected`: of many who try at once on the
    /// same version, one succeeds.
    ///
    /// # Errors
    /// When it is not certain how it ended: read again before anything follows from it.
    fn put_if(&self, key: &Key, bytes: &[u8], expected: &Expected) -> Result<PutOutcome, BackendError>;
}

/// A store of many orgs, wherever it lies: a directory, a bucket, or a way through another process. Whoever works with
/// homes is given one and needs no key for the place.
pub trait OpenStore: Send + Sync + Debug {
    /// The files of one org.
    ///
    /// # Errors
    /// When the org's name is none, or the store cannot be used.
    fn open(&self, org: &str) -> Result<Arc<dyn Backend>, StoreError>;
}

/// A store in a directory of this host.
#[derive(Debug, Clone)]
pub struct DirectoryStore(pub PathBuf);

impl OpenStore for DirectoryStore {
    fn open(&self, org: &str) -> Result<Arc<dyn Backend>, StoreError> {
        Ok(Arc::new(DirectoryBackend::open(&self.0, org)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stays_in_its_store() {
        assert_eq!(Key::new(&["homes", "h", "current"]).unwrap().as_str(), "homes/h/current");
        for bad in [&["..", "x"][..], &["a/b"], &[], &[""], &["a"; 9]] {
            assert!(Key::new(bad).is_err(), "{bad:?}");
        }
    }
}
