//! Opening files without surprises, and remembering what the agent has seen of them.
//!
//! What stays true: a file is changed only if it is as it was when this sandbox last read or wrote it; this knowledge
//! ends with the sandbox. What does not belong here: what is done with the bytes.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use covey_types::{BlockHash, ByteCount};
use rustix::fs::OFlags;

use super::{Refusal, read, resolve};

/// Files remembered; beyond that the memory is emptied, and the agent is asked to read again.
const KNOWN_FILES_MAX: usize = 50_000;
/// Larger files are not edited or compared; the shell is the tool for them.
pub(super) const EDIT_FILE_BYTES_MAX: u64 = 16 << 20;

/// What the agent has seen: canonical path to hash.
#[derive(Debug, Default)]
pub(crate) struct Files {
    known: Mutex<HashMap<PathBuf, BlockHash>>,
    temporary: AtomicU64,
}

impl Files {
    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, BlockHash>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers that the agent has seen these bytes there.
    pub(super) fn remember(&self, path: &Path, bytes: &[u8]) {
        let mut known = self.lock();
        if known.len() >= KNOWN_FILES_MAX {
            known.clear();
        }
        known.insert(path.to_path_buf(), BlockHash::of(bytes));
    }

    /// Refuses unless the agent has seen exactly these bytes.
    pub(super) fn require_seen(&self, path: &Path, bytes: &[u8]) -> Result<(), Refusal> {
        let shown = path.display();
        match self.lock().get(path) {
            None => Err(format!(
                "{shown} was not read in this sandbox yet (a replaced sandbox remembers nothing): read it first"
            )
            .into()),
            Some(hash) if *hash != BlockHash::of(bytes) => Err(format!(
                "{shown} changed since it was last read or written with these tools: read it again"
            )
            .into()),
            Some(_) => Ok(()),
        }
    }

    /// Whether `read` with this input is over at once: a small regular file.
    pub(crate) fn is_quick_read(&self, input: &str, dir: &Path) -> bool {
        serde_json::from_str::<read::ReadInput>(input)
            .ok()
            .and_then(|input| resolve(&input.file_path, dir).ok())
            .and_then(|path| fs::metadata(path).ok())
            .is_some_and(|metadata| metadata.is_file() && metadata.len() <= read::READ_BYTES_MAX)
    }

    /// Replaces a file's content at once: a reader sees the old or the new, never half. Mode is kept; a file
    /// with further hard links is written in place, because replacing it would cut the others off.
    pub(super) fn replace(&self, path: &Path, bytes: &[u8]) -> Result<(), Refusal> {
        let failed = |error: io::Error| Refusal(format!("cannot write {}: {error}", path.display()));
        let old = match fs::symlink_metadata(path) {
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        if old.as_ref().is_some_and(|old| old.nlink() > 1) {
            fs::write(path, bytes).map_err(failed)?;
        } else {
            self.rename_over(path, bytes, old.as_ref()).map_err(failed)?;
        }
        self.remember(path, bytes);
        Ok(())
    }

    fn rename_over(&self, path: &Path, bytes: &[u8], old: Option<&Metadata>) -> io::Result<()> {
        let number = self.temporary.fetch_add(1, Ordering::Relaxed);
        let parent = path.parent().unwrap_or(Path::new("/"));
        let temporary = parent.join(format!(".covey-write-{}-{number}.tmp", std::process::id()));
        let written = (|| {
            let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&temporary)?;
            file.write_all(bytes)?;
            if let Some(old) = old {
                file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o7777))?;
            }
            fs::rename(&temporary, path)
        })();
        if written.is_err() {
            match fs::remove_file(&temporary) {
                // What could not be made cannot be removed; the first error is the one to tell.
                Ok(()) | Err(_) => {}
            }
        }
        written
    }
}

/// Opens a regular file; never blocks on anything else.
pub(super) fn open(path: &Path) -> Result<(File, Metadata), Refusal> {
    let shown = path.display();
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Refusal(format!("{shown} does not exist")),
        _ => Refusal(format!("cannot open {shown}: {error}")),
    };
    let metadata = fs::metadata(path).map_err(failed)?;
    if metadata.is_dir() {
        return Err(format!("{shown} is a directory; list it with bash (`ls`) or glob").into());
    }
    if !metadata.is_file() {
        return Err(
            format!("{shown} is no regular file but a FIFO, socket or device; it is not opened").into()
        );
    }
    // Not blocking, in case the name stands for something else by now.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(format!("{shown} changed while it was opened: try again").into());
    }
    Ok((file, metadata))
}

/// The canonical path of an open file: one system call instead of one per component, and true for this very file.
pub(super) fn real_path(file: &File) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Reads a whole file that may be edited.
pub(super) fn read_editable(path: &Path) -> Result<Vec<u8>, Refusal> {
    let (file, _) = open(path)?;
    let mut bytes = Vec::new();
    file.take(EDIT_FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Refusal(format!("cannot read {}: {error}", path.display())))?;
    if bytes.len() as u64 > EDIT_FILE_BYTES_MAX {
        let limit = ByteCount(EDIT_FILE_BYTES_MAX);
        return Err(format!("{} is larger than {limit}; change it with bash", path.display()).into());
    }
    Ok(bytes)
}
