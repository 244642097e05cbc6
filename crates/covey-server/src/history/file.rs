//! The bytes of a file.

use covey_home::BlockStore;
use covey_home::manifest::EntryBody;
use covey_home::view::{FileReader, Snapshot, ViewError};
use covey_types::Fault;

use super::At;

/// Why a path has no bytes to read.
#[derive(Debug, thiserror::Error)]
pub enum OpenFileError {
    /// The snapshot.
    #[error(transparent)]
    View(#[from] ViewError),
    /// It points elsewhere, and is not followed: what it means depends on where the home is mounted.
    #[error("`{path}` is a symbolic link to `{target}`; ask for that path")]
    Symlink {
        /// As it was given, lossily as text.
        path: String,
        /// Where it points to, lossily as text.
        target: String,
    },
    /// It has names and no bytes.
    #[error("`{path}` is a directory; list it instead")]
    Directory {
        /// As it was given, lossily as text.
        path: String,
    },
}

impl OpenFileError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::View(error) => error.fault(),
            Self::Symlink { .. } | Self::Directory { .. } => Fault::Invalid,
        }
    }
}

/// Opens a regular file of a snapshot; its holes read as zeros.
///
/// # Errors
/// [`OpenFileError`].
pub fn open_file<'a>(
    store: &'a dyn BlockStore,
    at: &At,
    path: &[u8],
) -> Result<FileReader<'a>, OpenFileError> {
    let snapshot = Snapshot::open(store, &at.root)?;
    let shown = || String::from_utf8_lossy(path).into_owned();
    match snapshot.find(path)?.body {
        EntryBody::Symlink { target } => {
            let target = String::from_utf8_lossy(&target).into_owned();
            Err(OpenFileError::Symlink { path: shown(), target })
        }
        EntryBody::Directory { .. } => Err(OpenFileError::Directory { path: shown() }),
        // Of what is no regular file, `read` says so.
        _ => Ok(snapshot.read(path)?),
    }
}
