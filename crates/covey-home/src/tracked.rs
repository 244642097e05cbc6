//! Tracked secure: a new root from an earlier one and what changed since, without looking at the rest.
//!
//! What changed is the upper directory of an overlay whose lower layer shows the earlier state (crate
//! `covey-mount`); its marks are read as the kernel reads them. What stays true: the root is the one that
//! [`crate::secure()`] would find by scanning the mounted directory; cost follows the number of names in the upper
//! directory and not the size of the home; where the marks contradict each other or the earlier state cannot be
//! read, the answer is an error and a scan is the way on, never a guess. Whoever calls has stopped everything
//! that writes (I12). What does not belong here: mounting.
//!
//! Paths are of two kinds. A *lower path* is one in the earlier state; a *path* is one in the mounted directory.
//! They differ below a directory that was renamed.
//!
//! The earlier state is believed: blocks that only it names are not asked for. A scan now and then
//! ([`cross_check`]) asks for all of them.

mod compare;
mod index;
mod known;
mod links;
mod lower;
mod marks;
mod merge;
mod totals;
mod upper;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use covey_types::{Fault, RootHash};
use rustix::fs::{Mode, OFlags};

use crate::block::BlockStore;
use crate::excludes::Excludes;
use crate::manifest::{LinkTable, Root};
use crate::object::{self, ObjectError};
use crate::progress::Progress;
use crate::read_file::{Buffers, FileReads};
use crate::secure::{SecureError, SecureReport};
use crate::sys;

pub use compare::{CrossCheck, cross_check};

/// On each inode with several names the lower layer carries this attribute: the number of its group in the
/// earlier state's link table, as decimal text. The kernel copies it with the inode when that is changed, and so
/// tells which names a changed inode has.
pub const GROUP_ATTRIBUTE: &[u8] = b"trusted.covey.links";

/// What to secure.
#[derive(Clone, Copy)]
pub struct TrackedRequest<'a> {
    /// The state that the lower layer shows.
    pub base: RootHash,
    /// The overlay's upper directory.
    pub upper: &'a Path,
    /// The overlay's index of changed inodes with several names, the directory `index` in its work directory; it
    /// need not exist.
    pub index: &'a Path,
    /// Where the base's objects are and new blocks go.
    pub store: &'a dyn BlockStore,
    /// A file that remembers what of the upper directory was read before. Without one all of it is read.
    pub known: Option<&'a Path>,
    /// What is not kept; the base must have been made with the same.
    pub excludes: &'a Excludes,
    /// The root to compare with.
    pub previous: Option<RootHash>,
    /// Ends the work early.
    pub cancel: &'a AtomicBool,
    /// Who watches.
    pub progress: &'a dyn Progress,
    /// Threads; 0: as many as there are processors.
    pub threads: usize,
}

impl std::fmt::Debug for TrackedRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrackedRequest")
            .field("base", &self.base)
            .field("upper", &self.upper)
            .finish_non_exhaustive()
    }
}

/// Why a tracked secure came to no root. Unless the store failed or the caller gave up, scanning the mounted
/// directory is the way on.
#[derive(Debug, thiserror::Error)]
pub enum TrackedError {
    /// As for any secure.
    #[error(transparent)]
    Secure(#[from] SecureError),
    /// Part of the base cannot be read.
    #[error("the earlier state {base} cannot be read; secure the mounted directory by a scan")]
    Base {
        /// The base.
        base: RootHash,
        /// Why.
        source: ObjectError,
    },
    /// The base holds what would not be kept now.
    #[error("the earlier state was kept with other excludes; secure the mounted directory by a scan")]
    OtherExcludes,
    /// Marks in the upper directory that cannot be true.
    #[error("the change of `{path}` cannot be told: {problem}; secure the mounted directory by a scan")]
    Marks {
        /// From the home's root, lossily as text.
        path: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// So many names changed that a scan costs no more.
    #[error("more than {} names changed; secure the mounted directory by a scan", upper::NAMES_MAX)]
    TooMany,
    /// Only root sees the kernel's marks.
    #[error("a tracked secure needs root: nobody else sees the marks of overlayfs")]
    NotRoot,
    /// The index of inodes with several names.
    #[error("the index {} cannot be read; secure the mounted directory by a scan", path.display())]
    Index {
        /// The directory or entry.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl TrackedError {
    /// What the caller can do about it.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Secure(error) => error.fault(),
            Self::Base { source: ObjectError::Store(error), .. } => error.fault(),
            Self::Base { source: ObjectError::Malformed(_), .. } | Self::Marks { .. } => Fault::Invalid,
            Self::OtherExcludes | Self::NotRoot => Fault::Denied,
            Self::TooMany => Fault::Limit,
            Self::Index { .. } => Fault::Retry,
        }
    }

    /// Whether a scan of the mounted directory may come to a root although this did not.
    pub const fn scan_may_help(&self) -> bool {
        !matches!(self, Self::Secure(SecureError::Cancelled | SecureError::Store(_)))
    }
}

impl From<crate::block::StoreError> for TrackedError {
    fn from(error: crate::block::StoreError) -> Self {
        Self::Secure(error.into())
    }
}

/// Secures what the mounted directory shows: new blocks and objects into the store, durable when this returns.
/// Moves no pointer.
///
/// # Errors
/// When no root could be made durable; the store may have gained blocks that nothing names.
pub fn secure_tracked(request: &TrackedRequest<'_>) -> Result<SecureReport, TrackedError> {
    let start = Instant::now();
    if !rustix::process::geteuid().is_root() {
        return Err(TrackedError::NotRoot);
    }
    let base_error = |source| TrackedError::Base { base: request.base, source };
    let home_error = |source| SecureError::Home { dir: request.upper.to_owned(), source };
    // Before the question what is missing: what a collection takes from now on is missing to this upload.
    let upload = request.store.upload().map_err(SecureError::from)?;
    let epoch = upload.epoch();
    let root = object::read_root(request.store, &request.base).map_err(base_error)?;
    let base_links = object::read_links(request.store, &root).map_err(base_error)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir =
        rustix::fs::open(request.upper, flags, Mode::empty()).map_err(|error| home_error(error.into()))?;
    let stat = sys::stat_fd(dir.as_fd()).map_err(home_error)?;
    let mut warnings: Vec<String> = request
        .excludes
        .unreadable()
        .iter()
        .map(|pattern| format!("exclude pattern `{pattern}` cannot be read"))
        .collect();
    let known = match request.known {
        None => known::Known::default(),
        Some(path) => {
            known::Known::load(path, &stat, &request.base, request.store).unwrap_or_else(|reason| {
                if path.exists() {
                    warnings.push(format!("the whole upper directory is read again: {reason}"));
                }
                Ok(known::Known::default())
            })?
        }
    };
    let lower = lower::Lower::new(request, &root);
    let buffers = Buffers::new();
    let reads = FileReads { upload: &*upload, cancel: request.cancel, buffers: &buffers };
    let changed = index::read(request, &lower, reads, &known, &base_links)?;
    let upper = upper::scan(request, dir, reads, &known, &changed)?;
    let (listing, merged) = merge::run(request, &lower, &*upload, &upper, &changed)?;
    let meta = upper.root_meta.clone();
    let links = links::merge(&base_links, &changed, &merged);
    let links = object::put_blob(&*upload, &LinkTable::new(links).encode())?;
    let totals = totals::sum(&lower, &root, &merged)?;
    let new_root = Root { meta, listing, files: totals.files, bytes: totals.bytes, links };
    let root = object::put_root(&*upload, &new_root)?;
    let uploaded = upload.finish().map_err(SecureError::from)?;
    warnings.extend(upper.warnings.iter().cloned());
    if let Some(path) = request.known {
        // After the blocks are durable: it must not promise what the store does not have.
        if let Err(error) = known::write(path, &stat, &request.base, upper.read.iter().chain(&changed.read)) {
            warnings.push(format!("what was read is not remembered: {error}"));
        }
    }
    Ok(SecureReport {
        root,
        generation: None,
        epoch,
        changed: request.previous != Some(root),
        files: totals.files,
        bytes: totals.bytes,
        files_read: upper.files_read + changed.files_read,
        bytes_read: upper.bytes_read + changed.bytes_read,
        blocks_new: uploaded.blocks_new,
        bytes_new: uploaded.bytes_new,
        stored_bytes_new: uploaded.stored_bytes_new,
        elapsed_ms: start.elapsed().as_millis() as u64,
        partial: false,
        skipped: upper.skipped,
        skipped_paths: upper.skipped_paths,
        warnings,
    })
}
