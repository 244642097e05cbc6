//! Secure: a home directory becomes new blocks, listings and a root.
//!
//! What stays true: a root is only returned when every block it names is durable in the store (I6); nothing is
//! silently left out: what is not kept is counted and named, what cannot be read is an error or makes the
//! report partial; the home itself is only read. What does not belong here: pointers; who may publish.
//!
//! A change through a writable memory map shows in ctime only at its first write after a write-back; a process
//! that is stopped by the caller while this runs (I12) cannot race, one that is not, can.

mod file;
mod job;
mod scan;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use covey_types::{Fault, Generation, RootHash};
use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use crate::block::{BlockStore, StoreError, Upload};
use crate::excludes::Excludes;
use crate::gaps::Gaps;
use crate::manifest::{LinkTable, Root};
use crate::object;
use crate::progress::Progress;
use crate::stat_cache::{SealedCache, StatCache};
use crate::sys;
use job::{Counts, Job, Lost};

/// What to secure.
#[derive(Clone, Copy)]
pub struct SecureRequest<'a> {
    /// The home's directory.
    pub dir: &'a Path,
    /// Where blocks go.
    pub store: &'a dyn BlockStore,
    /// The stat cache's file, outside the home; it need not exist. Without one everything is read.
    pub stat_cache: Option<&'a Path>,
    /// What is not kept.
    pub excludes: &'a Excludes,
    /// The root to compare with.
    pub previous: Option<RootHash>,
    /// Ends the work early with [`SecureError::Cancelled`].
    pub cancel: &'a AtomicBool,
    /// Who watches.
    pub progress: &'a dyn Progress,
    /// Threads to walk, read and compress with; 0: as many as there are processors, and more while they wait for
    /// the disk.
    pub threads: usize,
}

impl std::fmt::Debug for SecureRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SecureRequest")
            .field("dir", &self.dir)
            .field("previous", &self.previous)
            .finish_non_exhaustive()
    }
}

/// What a secure did. The field names are those of `covey home secure --json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SecureReport {
    /// Names the state.
    pub root: RootHash,
    /// The number it was published under; none where nothing was published.
    pub generation: Option<Generation>,
    /// Whether the root differs from the previous one (or there was none).
    pub changed: bool,
    /// Regular files in the home, each name counted.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Files that were opened and read.
    pub files_read: u64,
    /// Bytes read from them.
    pub bytes_read: u64,
    /// Blocks that the store did not have, objects of the manifest among them.
    pub blocks_new: u64,
    /// Their bytes.
    pub bytes_new: u64,
    /// Bytes that the store grew by.
    pub stored_bytes_new: u64,
    /// The garbage collection that the store knew of when it began; see [`crate::Upload::epoch`].
    #[serde(skip)]
    pub epoch: u64,
    /// Duration in milliseconds.
    pub elapsed_ms: u64,
    /// Something could not be read and stands as it was before; `warnings` says what.
    pub partial: bool,
    /// Names of a kind that is not kept; no such kind is known on Linux.
    pub skipped: u64,
    /// The first of their paths, lossily as text.
    pub skipped_paths: Vec<String>,
    /// For people: patterns that cannot be read, files that changed while they were read, a lost stat cache.
    pub warnings: Vec<String>,
}

/// Why a home was not secured.
#[derive(Debug, thiserror::Error)]
pub enum SecureError {
    /// The caller's flag.
    #[error("cancelled")]
    Cancelled,
    /// It cannot be read, and no earlier state of it is known.
    #[error("`{path}` in the home cannot be read; give its owner access or exclude it")]
    Unreadable {
        /// From the home's root, lossily as text.
        path: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The home's own directory.
    #[error("the home {} cannot be opened", dir.display())]
    Home {
        /// The directory.
        dir: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Deeper than [`crate::manifest::DEPTH_MAX`], or another limit of the format.
    #[error("`{path}` in the home is beyond a limit: {limit}; move or exclude it")]
    Limit {
        /// From the home's root, lossily as text.
        path: String,
        /// Which.
        limit: &'static str,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl SecureError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Cancelled => Fault::Retry,
            Self::Unreadable { .. } => Fault::Denied,
            Self::Home { .. } => Fault::NotFound,
            Self::Limit { .. } => Fault::Limit,
            Self::Store(error) => error.fault(),
        }
    }
}

/// What was read ahead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PrepareReport {
    /// Files that were opened and read.
    pub files_read: u64,
    /// Bytes read from them.
    pub bytes_read: u64,
    /// Bytes that the store grew by.
    pub stored_bytes_new: u64,
    /// Duration in milliseconds.
    pub elapsed_ms: u64,
}

/// Copies ahead while the home is being written: blocks go into the store and the stat cache is brought up to
/// date, so that the secure that follows, for which the writers are stopped, reads only what has changed since
/// (I12). What is written during this call is dirty and read again. There is no root, because a moving tree has
/// none that anybody may publish. Needs a stat cache to be of use.
///
/// # Errors
/// As [`secure`]; a failure costs the secure that follows time and nothing else.
pub fn prepare(request: &SecureRequest<'_>) -> Result<PrepareReport, SecureError> {
    let report = secure(request)?;
    Ok(PrepareReport {
        files_read: report.files_read,
        bytes_read: report.bytes_read,
        stored_bytes_new: report.stored_bytes_new,
        elapsed_ms: report.elapsed_ms,
    })
}

/// Secures a home: new blocks and objects into the store, durable when this returns. Moves no pointer.
///
/// # Errors
/// When the root could not be made durable; the store may have gained blocks that nothing names.
pub fn secure(request: &SecureRequest<'_>) -> Result<SecureReport, SecureError> {
    let start = Instant::now();
    let home_error = |source| SecureError::Home { dir: request.dir.to_owned(), source };
    let (dir, stat) = open_home(request.dir).map_err(home_error)?;
    let mut warnings: Vec<String> = request
        .excludes
        .unreadable()
        .iter()
        .map(|pattern| format!("exclude pattern `{pattern}` cannot be read"))
        .collect();
    let cache = match request.stat_cache {
        None => None,
        Some(path) => match StatCache::load(path, &stat) {
            Ok(cache) => Some(cache),
            Err(reason) => {
                if path.exists() {
                    warnings.push(format!("everything is read again: the stat cache is of no use: {reason}"));
                }
                None
            }
        },
    };
    let gaps = match request.stat_cache.map(Gaps::load) {
        None => Gaps::default(),
        Some(Ok(gaps)) => gaps,
        // Without it, what was lost on the way here would be taken for deleted.
        Some(Err(error)) => {
            return Err(StoreError::damaged("what could not be put back", error.to_string()).into());
        }
    };
    // Before the question what is missing: what a collection takes from now on is missing to this upload.
    let upload = request.store.upload()?;
    let epoch = upload.epoch();
    let walked = walk(request, (dir, &stat), (cache.as_ref(), &gaps), &*upload, warnings)?;
    let Walked { root, counts, outcome } = walked;
    let mut warnings = outcome.warnings;
    let records = outcome.records;
    // The cache is written while the disk works on the blocks.
    let (uploaded, sealed) = std::thread::scope(|scope| {
        let sealing = records.map(|records| scope.spawn(|| records.seal(cache.as_ref(), &stat, &root)));
        let uploaded = upload.finish();
        let panicked = || Err(io::Error::other("the thread that writes it panicked"));
        (uploaded, sealing.map_or(Ok(None), |sealing| sealing.join().unwrap_or_else(|_| panicked())))
    });
    let uploaded = uploaded?;
    keep_gaps(request, gaps, &outcome.kept_gaps, &mut warnings)?;
    // After the blocks are durable: the cache must not promise what the store does not have.
    if let Err(error) = sealed.and_then(|sealed| sealed.map_or(Ok(()), SealedCache::put_in_place)) {
        warnings.push(format!("the stat cache was not written: {error}"));
    }
    Ok(SecureReport {
        root,
        generation: None,
        changed: request.previous != Some(root),
        files: counts.files,
        bytes: counts.bytes,
        files_read: counts.files_read,
        bytes_read: counts.bytes_read,
        blocks_new: uploaded.blocks_new,
        bytes_new: uploaded.bytes_new,
        stored_bytes_new: uploaded.stored_bytes_new,
        epoch,
        elapsed_ms: start.elapsed().as_millis() as u64,
        partial: outcome.partial,
        skipped: outcome.skipped,
        skipped_paths: outcome.skipped_paths,
        warnings,
    })
}

/// Remembers which gaps are left: what was put in the place of one counts from now on, also its deletion.
fn keep_gaps(
    request: &SecureRequest<'_>,
    mut gaps: Gaps,
    kept: &std::collections::BTreeSet<Vec<u8>>,
    warnings: &mut Vec<String>,
) -> Result<(), SecureError> {
    let before = gaps.entries.len();
    gaps.entries.retain(|path, _| kept.contains(path));
    if let Some(first) = gaps.entries.keys().next() {
        let first = String::from_utf8_lossy(first);
        let text = format!(
            "{} names could not be put back and stay as they were, first `{first}`",
            gaps.entries.len()
        );
        warnings.push(text);
    }
    if let Some(path) = request.stat_cache.filter(|_| gaps.entries.len() != before) {
        let failed = |source| SecureError::Home { dir: path.to_owned(), source };
        gaps.save(path).map_err(failed)?;
    }
    Ok(())
}

/// Opens the home's directory; the mode that is returned is its own, also where it had to be lifted to open it.
fn open_home(dir: &Path) -> io::Result<(OwnedFd, sys::Stat)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let path_fd = rustix::fs::open(dir, flags, Mode::empty())?;
    let stat = sys::stat_fd(&path_fd)?;
    let euid = rustix::process::geteuid().as_raw();
    if euid == 0 || stat.uid != euid || stat.mode & 0o500 == 0o500 {
        return Ok((sys::open_dir_at(path_fd.as_fd(), c".")?, stat));
    }
    sys::chmod_path_fd(path_fd.as_fd(), stat.mode | 0o500)?;
    let opened = sys::open_dir_at(path_fd.as_fd(), c".");
    sys::chmod_path_fd(path_fd.as_fd(), stat.mode)?;
    Ok((opened?, stat))
}

struct Walked {
    root: RootHash,
    counts: Counts,
    outcome: job::Outcome,
}

/// Walks the home and puts what is new. The store is asked on the way whether it still has what the stat cache
/// speaks of; if it does not, which is rare, the walk is done once more knowing what is lost.
fn walk(
    request: &SecureRequest<'_>,
    (dir, stat): (OwnedFd, &sys::Stat),
    (mut cache, gaps): (Option<&StatCache>, &Gaps),
    upload: &dyn Upload,
    warnings: Vec<String>,
) -> Result<Walked, SecureError> {
    let mut lost = if cache.is_some() { Lost::Unknown } else { Lost::Known(Default::default()) };
    let mut reads = Counts::default();
    loop {
        let failed = |source| SecureError::Home { dir: request.dir.to_owned(), source };
        let again = dir.try_clone().map_err(failed)?;
        // The copy shares its position with the one that an earlier walk has read to the end.
        rustix::fs::seek(&again, rustix::fs::SeekFrom::Start(0)).map_err(|error| failed(error.into()))?;
        let mut job = Job::new(request, cache, &lost, gaps, upload, warnings.clone());
        job.add_reads(reads);
        let (meta, listing) = scan::run(&job, again, stat)?;
        if job.asks() {
            let found = job.take_lost()?;
            if found.as_ref().is_none_or(|found| !found.is_empty()) {
                if found.is_none() {
                    cache = None;
                }
                reads = job.counts();
                lost = Lost::Known(found.unwrap_or_default());
                continue;
            }
        }
        let links = LinkTable::new(job.take_link_groups()).encode();
        let links = job.blob(&links)?;
        let mut counts = job.counts();
        let hidden = job.hidden();
        counts.files += hidden.0;
        counts.bytes += hidden.1;
        let root = Root { meta, listing, files: counts.files, bytes: counts.bytes, links };
        let root = object::put_root(upload, &root)?;
        return Ok(Walked { root, counts, outcome: job.into_outcome() });
    }
}
