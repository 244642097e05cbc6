//! Materialize: a root becomes a home directory, exactly.
//!
//! What stays true: afterwards the directory is what the root says and nothing else, but for excluded names;
//! every byte's hash was checked, here or by whoever put it into the local cache; no name that exists is ever written through: it is unlinked and created anew
//! (I13); what cannot be restored is named, and the rest comes up. The working copy is only a cache, so nothing
//! is flushed. What does not belong here: which root is the right one.
//!
//! Order within an inode: data, owner, user attributes, mode, ACL, capability, mtime. A change of owner clears
//! setuid and capabilities, a read-only mode forbids its owner to set attributes, and all of them move ctime
//! but not mtime. Within the tree: a directory is finished after everything below it.

mod file;
mod job;
mod merge;
mod meta;
mod node;
mod place;
mod remove;
mod renamed;
mod tree;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use covey_types::{Fault, RootHash};
use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use crate::block::{BlockStore, StoreError};
use crate::excludes::Excludes;
use crate::gaps::Gaps;
use crate::manifest::{Content, EntryBody, Root};
use crate::object::{self, ObjectError};
use crate::progress::Progress;
use crate::stat_cache::{self, StatCache};
use crate::sys;

/// What to materialize.
#[derive(Clone, Copy)]
pub struct MaterializeRequest<'a> {
    /// The state.
    pub root: RootHash,
    /// The home's directory; created if it is not there (its parent must be). Nobody else may write it
    /// meanwhile.
    pub dir: &'a Path,
    /// Where blocks come from.
    pub store: &'a dyn BlockStore,
    /// The stat cache's file, outside the home. What it knows to be right stays untouched, and it is written
    /// again, so that the next secure reads nothing.
    pub stat_cache: Option<&'a Path>,
    /// What stays as it is in the directory.
    pub excludes: &'a Excludes,
    /// Uid and gid of everything; none: whoever runs this. Needs root.
    pub owner: Option<(u32, u32)>,
    /// Ends the work early with [`MaterializeError::Cancelled`].
    pub cancel: &'a AtomicBool,
    /// Who watches.
    pub progress: &'a dyn Progress,
    /// Threads; 0: as many as there are processors, and more while they wait for the disk.
    pub threads: usize,
}

impl std::fmt::Debug for MaterializeRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MaterializeRequest")
            .field("root", &self.root)
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Something that could not be restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gap {
    /// From the home's root, lossily as text; a directory stands for everything below it.
    pub path: String,
    /// What is the matter: `not_found` (absent), `corrupt` (damaged), `invalid` (malformed).
    pub fault: Fault,
    /// For people.
    pub reason: String,
}

/// What a materialize did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MaterializeReport {
    /// The state.
    pub root: RootHash,
    /// Regular files in the snapshot, each name counted.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Files that were written.
    pub files_written: u64,
    /// Bytes written, those that are shared among them.
    pub bytes_written: u64,
    /// Bytes of files that share their blocks with the local cache.
    pub bytes_shared: u64,
    /// Bytes of file contents that came from the store; the others were in the directory already.
    pub bytes_fetched: u64,
    /// Names that were there and are not in the snapshot, or were something else.
    pub removed: u64,
    /// Duration in milliseconds.
    pub elapsed_ms: u64,
    /// Everything that is not as the snapshot says.
    pub gaps: Vec<Gap>,
    /// For people: attributes that this user or file system cannot set.
    pub warnings: Vec<String>,
}

/// Why a home was not materialized. The directory is then not what the root says, and must not be used.
#[derive(Debug, thiserror::Error)]
pub enum MaterializeError {
    /// The caller's flag.
    #[error("cancelled")]
    Cancelled,
    /// Everything came up but what the report names; whether that is good enough is the caller's decision.
    #[error("{} of the home could not be restored, first `{}`: {}", .report.gaps.len(),
        .report.gaps.first().map_or("", |gap| gap.path.as_str()),
        .report.gaps.first().map_or("", |gap| gap.reason.as_str()))]
    Incomplete {
        /// What was done and what is missing.
        report: Box<MaterializeReport>,
    },
    /// The root object or its link table.
    #[error("the snapshot {root} cannot be read")]
    Root {
        /// The root.
        root: RootHash,
        /// Why.
        source: ObjectError,
    },
    /// The target directory's file system.
    #[error("`{path}` in {} cannot be written", dir.display())]
    Target {
        /// The directory.
        dir: PathBuf,
        /// From the home's root, lossily as text.
        path: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The file system takes two names of one directory for the same, for example because it folds case.
    #[error("the file system does not keep the names in `{path}` apart; use a case-sensitive one")]
    NamesCollide {
        /// The name or directory, lossily as text.
        path: String,
    },
    /// A limit of the format.
    #[error("`{path}` is beyond a limit: {limit}")]
    Limit {
        /// From the home's root, lossily as text.
        path: String,
        /// Which.
        limit: &'static str,
    },
    /// The store cannot be asked now.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl MaterializeError {
    /// What the caller can do about it.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Cancelled => Fault::Retry,
            Self::Incomplete { report } => report.gaps.first().map_or(Fault::Corrupt, |gap| gap.fault),
            Self::Root { source: ObjectError::Store(error), .. } | Self::Store(error) => error.fault(),
            Self::Root { source: ObjectError::Malformed(_), .. } => Fault::Invalid,
            Self::Target { .. } => Fault::Retry,
            Self::NamesCollide { .. } => Fault::Denied,
            Self::Limit { .. } => Fault::Limit,
        }
    }
}

/// Contents of files that this host has already, whole and checked, each as a plain file.
pub trait Contents: Send + Sync {
    /// A file with exactly this content, opened for reading; none: it is not here.
    fn open(&self, content: &Content) -> Option<File>;
}

/// Makes the directory what the root says.
///
/// # Errors
/// [`MaterializeError::Incomplete`] when all but the named gaps came up; anything else ended the work.
pub fn materialize(request: &MaterializeRequest<'_>) -> Result<MaterializeReport, MaterializeError> {
    materialize_sharing(request, None)
}

/// The same, sharing the blocks of large files with contents of this host where the file system can: they take no
/// room a second time, and an agent's write changes only its own file. Everything else comes from the store.
///
/// # Errors
/// As [`materialize`].
pub fn materialize_sharing(
    request: &MaterializeRequest<'_>,
    contents: Option<&dyn Contents>,
) -> Result<MaterializeReport, MaterializeError> {
    let start = Instant::now();
    let target = |source: io::Error| MaterializeError::Target {
        dir: request.dir.to_owned(),
        path: String::new(),
        source,
    };
    let root_error = |source| MaterializeError::Root { root: request.root, source };
    // Before anything is touched: a root that cannot be read must not cost what is there.
    let root = object::read_root(request.store, &request.root).map_err(root_error)?;
    let links = object::read_links(request.store, &root).map_err(root_error)?;
    match rustix::fs::mkdir(request.dir, Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(target(error.into())),
    }
    let path_only = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir =
        rustix::fs::open(request.dir, path_only, Mode::empty()).map_err(|error| target(error.into()))?;
    let stat = sys::stat_fd(&dir).map_err(target)?;
    let euid = rustix::process::geteuid().as_raw();
    if euid != 0 && stat.uid == euid && stat.mode & 0o700 != 0o700 {
        sys::chmod_path_fd(dir.as_fd(), stat.mode | 0o700).map_err(target)?;
    }
    let dir = sys::open_dir_at(dir.as_fd(), c".").map_err(target)?;
    let cache = request.stat_cache.and_then(|path| StatCache::load(path, &stat).ok());
    let job = job::Job::new(request, contents, cache, links);
    tree::run(&job, dir, &stat, root.meta.clone(), root.listing)?;
    let outcome = job.into_outcome();
    if outcome.changed {
        // What was just written has a ctime of this tick; a later write must show. At most 20 ms.
        stat_cache::settle(stat_cache::now());
    }
    if let Some(stat_cache) = request.stat_cache {
        let mut kept = outcome.kept;
        kept.hidden = hidden_files(request.store, &root, &kept);
        kept.save(stat_cache).map_err(target)?;
    }
    let mut warnings = outcome.warnings;
    if let Some(records) = outcome.records
        && let Err(error) = records.finish(outcome.cache.as_ref(), &stat, &request.root)
    {
        warnings.push(format!("the stat cache was not written: {error}"));
    }
    let report = MaterializeReport {
        root: request.root,
        files: root.files,
        bytes: root.bytes,
        files_written: outcome.files_written,
        bytes_written: outcome.bytes_written,
        bytes_shared: outcome.bytes_shared,
        bytes_fetched: outcome.bytes_fetched,
        removed: outcome.removed,
        elapsed_ms: start.elapsed().as_millis() as u64,
        gaps: outcome.gaps,
        warnings,
    };
    if report.gaps.is_empty() {
        Ok(report)
    } else {
        Err(MaterializeError::Incomplete { report: Box::new(report) })
    }
}

/// Files and bytes that the root counts below directories which cannot be read.
fn hidden_files(store: &dyn BlockStore, root: &Root, gaps: &Gaps) -> (u64, u64) {
    if !gaps.entries.values().any(crate::gaps::GapEntry::is_directory) {
        return (0, 0);
    }
    let (mut files, mut bytes) = (0, 0);
    let mut waiting = vec![root.listing];
    while let Some(listing) = waiting.pop() {
        // What cannot be read is what is looked for.
        let Ok(listing) = object::read_listing(store, &listing) else { continue };
        for (_, entry) in listing.entries {
            match entry.body {
                EntryBody::Directory { listing } => waiting.push(listing),
                EntryBody::File(content) => {
                    files += 1;
                    bytes += content.size();
                }
                _ => {}
            }
        }
    }
    (root.files.saturating_sub(files), root.bytes.saturating_sub(bytes))
}
