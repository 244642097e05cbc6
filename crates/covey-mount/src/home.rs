//! A mounted home: its state on disk, and what is done with it.
//!
//! ```text
//! upper/       what changed since the base; the overlay's upper directory
//! work/        overlayfs' own; work/index holds changed inodes with several names
//! state.json   which base, which image, where it is mounted; written when upper/ and work/ are ready for it
//! secured      the root that the last secure came to
//! known        what of upper/ was read by earlier secures
//! lock         held while the state changes
//! ```
//!
//! What stays true: `upper/` is only ever laid over the base it was made on; it is thrown away only when it is
//! empty, when the caller says so, or when it was never used. A process that dies at any point leaves a state that
//! the next [`MountedHome::mount`] or [`MountedHome::umount`] takes up. What does not belong here: which root is
//! the right one, and stopping whoever writes while a secure runs.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use covey_home::manifest::Root;
use covey_home::object::{self, ObjectError};
use covey_home::tracked::{self, CrossCheck, TrackedError, TrackedRequest};
use covey_home::{BlockStore, Excludes, Gap, NoProgress, Progress, SecureError, SecureReport, SecureRequest};
use covey_types::{BlockHash, Fault, RootHash};
use rustix::fs::{AtFlags, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags};
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, CacheError, FillRequest};
use crate::image::{Image, ImageRequest};
use crate::overlay::{self, Layers, MountStepError, lock_file};

/// Version of `state.json`.
const VERSION: u32 = 1;

/// What to mount, and where.
#[derive(Clone, Copy)]
pub struct MountRequest<'a> {
    /// The state to be seen.
    pub root: RootHash,
    /// Where it will be seen; made when it is missing (its parent must be there).
    pub dir: &'a Path,
    /// Where the home's own changes are kept, on a file system that can be an overlay's upper layer; made when it
    /// is missing. One directory for one home.
    pub state: &'a Path,
    /// Where contents and images are. Its file system must be able to back a mount (ext4, xfs, btrfs; not tmpfs).
    pub cache: &'a Cache,
    /// Where the manifest and missing contents come from.
    pub store: &'a dyn BlockStore,
    /// Uid and gid of everything.
    pub owner: (u32, u32),
    /// What of the snapshot is left out.
    pub excludes: &'a Excludes,
    /// Throw away changes that were made on another state, instead of refusing.
    pub discard: bool,
    /// Ends the work early.
    pub cancel: &'a AtomicBool,
    /// Who watches.
    pub progress: &'a dyn Progress,
    /// Threads to fetch contents with; 0: as many as there are processors.
    pub threads: usize,
}

impl std::fmt::Debug for MountRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MountRequest")
            .field("root", &self.root)
            .field("dir", &self.dir)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// What a mount did. The field names are those of `covey home mount --json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MountReport {
    /// The state that was asked for.
    pub root: RootHash,
    /// The state that the lower layer shows; another one where changes go on that were secured as `root`.
    pub base: RootHash,
    /// Regular files in the base, each name counted.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Length of the image.
    pub image_bytes: u64,
    /// Contents that were fetched into the cache.
    pub fetched: u64,
    /// Their bytes.
    pub fetched_bytes: u64,
    /// Changes of an earlier mount are there again.
    pub continued: bool,
    /// It was mounted already, and nothing was done.
    pub already: bool,
    /// Duration of all of it in milliseconds.
    pub elapsed_ms: u64,
    /// Contents that could not be fetched.
    pub gap_count: u64,
    /// The first of them.
    pub gaps: Vec<Gap>,
}

/// What an unmount did. The field names are those of `covey home umount --json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnmountReport {
    /// It was mounted.
    pub was_mounted: bool,
    /// Its changes were thrown away.
    pub discarded: bool,
    /// Duration in milliseconds.
    pub elapsed_ms: u64,
}

/// Why a home was not mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// Only root may mount.
    #[error("only root can mount a home; as an ordinary user make a copy of it")]
    NotRoot,
    /// The cache, the image, or the store.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The snapshot's root object.
    #[error("the snapshot {root} cannot be read")]
    Root {
        /// The root.
        root: RootHash,
        /// Why.
        source: ObjectError,
    },
    /// The state directory, or the place to mount at.
    #[error("`{}` cannot be used", path.display())]
    Io {
        /// What.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The kernel.
    #[error("{} cannot be mounted or unmounted", dir.display())]
    Mount {
        /// The place.
        dir: PathBuf,
        /// Which step.
        source: MountStepError,
    },
    /// There are changes that were made on another state.
    #[error(
        "{} holds changes that were made on {base} and not secured as {wanted}; secure them, or discard them",
        state.display()
    )]
    OtherBase {
        /// The state directory.
        state: PathBuf,
        /// What they were made on.
        base: RootHash,
        /// What was asked for.
        wanted: RootHash,
    },
    /// This state directory's home is mounted somewhere else, or with another state.
    #[error("the home is mounted at {} already; unmount it first", at.display())]
    MountedElsewhere {
        /// Where.
        at: PathBuf,
    },
    /// Something else is mounted or stands there.
    #[error("{} is in use: {what}", dir.display())]
    PlaceTaken {
        /// The place.
        dir: PathBuf,
        /// By what.
        what: &'static str,
    },
    /// No home was mounted with this state directory.
    #[error("{} is no state of a mounted home", state.display())]
    NoState {
        /// The state directory.
        state: PathBuf,
    },
}

impl MountError {
    /// What the caller can do about it.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Cache(error) => error.fault(),
            Self::Root { source: ObjectError::Store(error), .. } => error.fault(),
            Self::Root { source: ObjectError::Malformed(_), .. } => Fault::Invalid,
            Self::Io { .. } => Fault::Retry,
            Self::NotRoot | Self::Mount { .. } | Self::OtherBase { .. } => Fault::Denied,
            Self::MountedElsewhere { .. } | Self::PlaceTaken { .. } => Fault::Denied,
            Self::NoState { .. } => Fault::NotFound,
        }
    }
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> MountError {
    let path = path.to_owned();
    move |source| MountError::Io { path, source }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct State {
    version: u32,
    base: RootHash,
    image: String,
    /// Names of the base that the excludes left out of the image.
    excluded: u64,
    excludes: BlockHash,
    owner: (u32, u32),
    cache: PathBuf,
    dir: PathBuf,
}

/// A home's state directory.
#[derive(Debug)]
pub struct MountedHome {
    dir: PathBuf,
    state: State,
}

impl MountedHome {
    /// Mounts a home, or takes up the mount of an earlier process. Whatever an earlier process left half done is
    /// finished or taken back.
    ///
    /// # Errors
    /// When it is not mounted afterwards; what was fetched stays in the cache.
    pub fn mount(request: &MountRequest<'_>) -> Result<(Self, MountReport), MountError> {
        let start = Instant::now();
        if !rustix::process::geteuid().is_root() {
            return Err(MountError::NotRoot);
        }
        let make_dir = |path: &Path| match fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(io_error(path)(error)),
            _ => Ok(()),
        };
        make_dir(request.state)?;
        make_dir(request.dir)?;
        let place = Place::open(request.state)?;
        let dir = request.dir.canonicalize().map_err(io_error(request.dir))?;
        let upper = place.upper();
        let mut old = place.read_state();
        if let Some(state) = &old {
            let fits =
                |state: &State| state.base == request.root || place.read_secured() == Some(request.root);
            let mounted = place.is_mounted_at(&state.dir)?;
            if mounted && (state.dir != dir || !fits(state)) {
                return Err(MountError::MountedElsewhere { at: state.dir.clone() });
            }
            if let (true, Some(image)) = (mounted, Image::find(&request.cache.images(), &state.image)) {
                let home = Self { dir: place.dir.clone(), state: state.clone() };
                let mut report = report(request, &image, start);
                report.continued = true;
                report.already = true;
                return Ok((home, report));
            }
            if mounted {
                overlay::unmount_ours(&dir, &upper).map_err(mount_error(&dir))?;
            }
            if !fits(state) {
                if !request.discard && !is_untouched(&upper).map_err(io_error(&upper))? {
                    let (state_dir, base, wanted) = (request.state.to_owned(), state.base, request.root);
                    return Err(MountError::OtherBase { state: state_dir, base, wanted });
                }
                old = None;
            }
        }
        if overlay::mounted_at(&dir).map_err(io_error(&dir))?.is_some() {
            return Err(MountError::PlaceTaken { dir, what: "something else is mounted there" });
        }
        let is_empty = fs::read_dir(&dir).and_then(|mut names| names.next().transpose());
        if is_empty.map_err(io_error(&dir))?.is_some() {
            return Err(MountError::PlaceTaken { dir, what: "it is not empty" });
        }
        let base = old.as_ref().map_or(request.root, |state| state.base);
        let owner = old.as_ref().map_or(request.owner, |state| state.owner);
        let image_request = ImageRequest {
            root: base,
            store: request.store,
            owner,
            excludes: request.excludes,
            cancel: request.cancel,
            progress: request.progress,
        };
        let image = request.cache.pin(&image_request, &place.dir)?;
        let filled = request.cache.fill(&FillRequest {
            image: &image,
            store: request.store,
            cancel: request.cancel,
            progress: request.progress,
            threads: request.threads,
        })?;
        let state = State {
            version: VERSION,
            base,
            image: image.id().to_owned(),
            excluded: image.facts().excluded,
            excludes: request.excludes.fingerprint(),
            owner,
            cache: request.cache.dir().to_owned(),
            dir: dir.clone(),
        };
        if old.is_none() {
            place.begin(&image, request)?;
        }
        place.write_state(&state)?;
        let layers = Layers {
            image: &image.path(),
            contents: &request.cache.contents(),
            upper: &upper,
            work: &place.dir.join("work"),
        };
        overlay::mount(layers, &dir).map_err(mount_error(&dir))?;
        let mut report = report(request, &image, start);
        report.base = base;
        report.continued = old.is_some();
        (report.fetched, report.fetched_bytes) = (filled.fetched, filled.fetched_bytes);
        (report.gap_count, report.gaps) = (filled.gap_count, filled.gaps);
        Ok((Self { dir: place.dir.clone(), state }, report))
    }

    /// The home that was last mounted with this state directory, mounted or not; none when there was none.
    pub fn open(state: &Path) -> Option<Self> {
        let dir = state.canonicalize().ok()?;
        let state = Place { dir: dir.clone(), _lock: None }.read_state()?;
        Some(Self { dir, state })
    }

    /// The state directory of the home that is mounted at `dir` now.
    ///
    /// # Errors
    /// When the table of mounts cannot be read.
    pub fn state_at(dir: &Path) -> io::Result<Option<PathBuf>> {
        let Some(upper) = overlay::mounted_at(dir)?.and_then(|top| top.upper_dir()) else { return Ok(None) };
        let state = upper.parent().map(Path::to_owned);
        Ok(state.filter(|state| state.join("state.json").is_file()))
    }

    /// Unmounts the home of this state directory, wherever and by whomever it was mounted; that it is not mounted
    /// is no error. Its changes stay for the next mount unless they are discarded.
    ///
    /// # Errors
    /// When it is still mounted, because a process uses it, or the changes could not be thrown away.
    pub fn umount(state: &Path, discard: bool) -> Result<UnmountReport, MountError> {
        let start = Instant::now();
        if !state.is_dir() {
            return Err(MountError::NoState { state: state.to_owned() });
        }
        let place = Place::open(state)?;
        let Some(found) = place.read_state() else {
            if discard {
                place.throw_away()?;
            }
            return Err(MountError::NoState { state: state.to_owned() });
        };
        let was_mounted =
            overlay::unmount_ours(&found.dir, &place.upper()).map_err(mount_error(&found.dir))?;
        if found.cache.is_dir() {
            Cache::open(&found.cache, None)?.unpin(&place.dir)?;
        }
        if discard {
            place.throw_away()?;
        }
        Ok(UnmountReport { was_mounted, discarded: discard, elapsed_ms: start.elapsed().as_millis() as u64 })
    }

    /// Where it was last mounted.
    pub fn dir(&self) -> &Path {
        &self.state.dir
    }

    /// The state that the lower layer shows.
    pub const fn base(&self) -> RootHash {
        self.state.base
    }

    /// Whether it is mounted now.
    ///
    /// # Errors
    /// When the table of mounts cannot be read.
    pub fn is_mounted(&self) -> io::Result<bool> {
        let top = overlay::mounted_at(&self.state.dir)?;
        Ok(top.is_some_and(|top| top.is_overlay_on(&self.dir.join("upper"))))
    }

    /// Secures what changed since the base, without looking at the rest. Whatever writes has to be stopped; a
    /// mount is not needed.
    ///
    /// # Errors
    /// When it came to no root; [`TrackedError::scan_may_help`] says whether scanning [`MountedHome::dir`] is the
    /// way on.
    pub fn secure(&self, request: &SecureMounted<'_>) -> Result<SecureReport, TrackedError> {
        if self.state.excluded > 0 || self.state.excludes != request.excludes.fingerprint() {
            return Err(TrackedError::OtherExcludes);
        }
        let image = Image::find(&self.state.cache.join("images"), &self.state.image);
        let objects = image.as_ref().map(|image| image.objects_first(request.store));
        let known = self.dir.join("known");
        let report = tracked::secure_tracked(&TrackedRequest {
            base: self.state.base,
            upper: &self.dir.join("upper"),
            index: &self.dir.join("work/index"),
            store: objects.as_ref().map_or(request.store, |objects| objects),
            known: Some(&known),
            excludes: request.excludes,
            previous: request.previous,
            cancel: request.cancel,
            progress: request.progress,
            threads: request.threads,
        })?;
        self.note_secured(report.root).map_err(|error| SecureError::Home {
            dir: self.dir.clone(),
            source: match error {
                MountError::Io { source, .. } => source,
                error => io::Error::other(error),
            },
        })?;
        Ok(report)
    }

    /// Notes that the home as it is now was secured as `root`, so that a later mount of that root goes on with
    /// these changes. [`MountedHome::secure`] does it by itself; after a scan the caller does.
    ///
    /// # Errors
    /// When the note could not be written.
    pub fn note_secured(&self, root: RootHash) -> Result<(), MountError> {
        let (path, draft) = (self.dir.join("secured"), self.dir.join("secured.draft"));
        // Not flushed: a note that a power cut takes or tears only costs that the changes are not taken up again.
        fs::write(&draft, format!("{root}\n"))
            .and_then(|()| fs::rename(&draft, &path))
            .map_err(io_error(&path))
    }

    /// Compares a tracked secure's root with a scan of the mounted directory, which reads everything. Nobody may
    /// write meanwhile, nor since that secure.
    ///
    /// # Errors
    /// When the scan fails.
    pub fn cross_check(
        &self,
        request: &SecureMounted<'_>,
        tracked: RootHash,
    ) -> Result<CrossCheck, SecureError> {
        let scan = SecureRequest {
            dir: &self.state.dir,
            store: request.store,
            stat_cache: None,
            excludes: request.excludes,
            previous: Some(tracked),
            cancel: request.cancel,
            progress: &NoProgress,
            threads: request.threads,
        };
        tracked::cross_check(&scan, tracked)
    }
}

/// How to secure a mounted home.
#[derive(Clone, Copy)]
pub struct SecureMounted<'a> {
    /// Where new blocks go.
    pub store: &'a dyn BlockStore,
    /// What is not kept; the same as at the mount.
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

impl std::fmt::Debug for SecureMounted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SecureMounted").field("previous", &self.previous).finish_non_exhaustive()
    }
}

fn mount_error(dir: &Path) -> impl FnOnce(MountStepError) -> MountError {
    let dir = dir.to_owned();
    move |source| MountError::Mount { dir, source }
}

fn report(request: &MountRequest<'_>, image: &Image, start: Instant) -> MountReport {
    let facts = image.facts();
    MountReport {
        root: request.root,
        base: facts.root,
        files: facts.files,
        bytes: facts.bytes,
        image_bytes: facts.image_bytes,
        fetched: 0,
        fetched_bytes: 0,
        continued: false,
        already: false,
        elapsed_ms: start.elapsed().as_millis() as u64,
        gap_count: 0,
        gaps: Vec::new(),
    }
}

fn is_untouched(upper: &Path) -> io::Result<bool> {
    match fs::read_dir(upper) {
        Ok(mut names) => Ok(names.next().transpose()?.is_none()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

/// A state directory, locked.
#[derive(Debug)]
struct Place {
    dir: PathBuf,
    _lock: Option<File>,
}

impl Place {
    fn open(dir: &Path) -> Result<Self, MountError> {
        let dir = dir.canonicalize().map_err(io_error(dir))?;
        let path = dir.join("lock");
        let lock = lock_file(&path).map_err(io_error(&path))?;
        lock.lock().map_err(io_error(&path))?;
        Ok(Self { dir, _lock: Some(lock) })
    }

    fn upper(&self) -> PathBuf {
        self.dir.join("upper")
    }

    fn is_mounted_at(&self, dir: &Path) -> Result<bool, MountError> {
        let top = overlay::mounted_at(dir).map_err(io_error(dir))?;
        Ok(top.is_some_and(|top| top.is_overlay_on(&self.upper())))
    }

    /// What the last mount noted; none also where it is of another version or was cut short.
    fn read_state(&self) -> Option<State> {
        let text = fs::read(self.dir.join("state.json")).ok()?;
        serde_json::from_slice(&text).ok().filter(|state: &State| state.version == VERSION)
    }

    fn read_secured(&self) -> Option<RootHash> {
        fs::read_to_string(self.dir.join("secured")).ok()?.trim_end().parse().ok()
    }

    fn write_state(&self, state: &State) -> Result<(), MountError> {
        let (path, draft) = (self.dir.join("state.json"), self.dir.join("state.draft"));
        let write = || -> io::Result<()> {
            let mut file = File::create(&draft)?;
            file.write_all(&serde_json::to_vec(state)?)?;
            file.sync_all()?;
            fs::rename(&draft, &path)?;
            File::open(&self.dir)?.sync_all()
        };
        write().map_err(io_error(&path))
    }

    fn throw_away(&self) -> Result<(), MountError> {
        // The state first: an upper directory without one was never used.
        for name in ["state.json", "secured", "known"] {
            let path = self.dir.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io_error(&path)(error)),
                _ => {}
            }
        }
        for name in ["upper", "work"] {
            let path = self.dir.join(name);
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io_error(&path)(error)),
                _ => {}
            }
        }
        Ok(())
    }

    /// An upper directory without changes: it has the metadata of the home's own directory, which an overlay
    /// shows from there.
    fn begin(&self, image: &Image, request: &MountRequest<'_>) -> Result<(), MountError> {
        self.throw_away()?;
        let store = image.objects_first(request.store);
        let root_error = |source| MountError::Root { root: request.root, source };
        let root = object::read_root(&store, &request.root).map_err(root_error)?;
        let xattrs = object::read_xattrs(&store, &root.meta.xattrs).map_err(root_error)?;
        let work = self.dir.join("work");
        fs::DirBuilder::new().mode(0o700).create(&work).map_err(io_error(&work))?;
        let upper = self.upper();
        fs::DirBuilder::new().mode(0o700).create(&upper).map_err(io_error(&upper))?;
        let dress = || dress(&upper, &root, &xattrs, request.owner);
        dress().map_err(io_error(&upper))
    }
}

/// Gives a directory the metadata of the home's own.
fn dress(
    dir: &Path,
    root: &Root,
    xattrs: &covey_home::manifest::Xattrs,
    owner: (u32, u32),
) -> io::Result<()> {
    let fd = File::open(dir)?;
    rustix::fs::fchown(&fd, Some(Uid::from_raw(owner.0)), Some(Gid::from_raw(owner.1)))?;
    // Before the attributes: a mode that is set later would rewrite the ACL's mask.
    rustix::fs::fchmod(&fd, Mode::from_raw_mode(root.meta.mode.into()))?;
    for xattr in &xattrs.0 {
        rustix::fs::fsetxattr(&fd, xattr.name.as_slice(), &xattr.value, XattrFlags::empty())?;
    }
    let times = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        last_modification: Timespec {
            tv_sec: root.meta.mtime.seconds,
            tv_nsec: root.meta.mtime.nanoseconds.into(),
        },
    };
    Ok(rustix::fs::utimensat(fd.as_fd(), c".", &times, AtFlags::empty())?)
}
