//! Putting contents into the cache.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use covey_home::manifest::{Content, MalformedObject};
use covey_home::object::{self, ObjectError};
use covey_home::{BlockStore, Gap, Progress};
use covey_types::{BlockHash, Fault};

use super::{Cache, CacheError, Missing, io_error};
use crate::content::ContentId;
use crate::image::Image;

/// Threads at most; more gained nothing against a local store.
const THREADS_MAX: usize = 16;
/// Gaps that a report names; the count goes on.
const GAPS_MAX: usize = 100;

/// What to fetch.
#[derive(Clone, Copy)]
pub struct FillRequest<'a> {
    /// Whose contents.
    pub image: &'a Image,
    /// Where blocks come from.
    pub store: &'a dyn BlockStore,
    /// Ends the work early with [`CacheError::Cancelled`].
    pub cancel: &'a AtomicBool,
    /// Who watches.
    pub progress: &'a dyn Progress,
    /// Threads; 0: as many as there are processors.
    pub threads: usize,
}

impl std::fmt::Debug for FillRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FillRequest").field("image", &self.image).finish_non_exhaustive()
    }
}

/// What a fill did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FillReport {
    /// Contents that were not here and are now.
    pub fetched: u64,
    /// Their bytes.
    pub fetched_bytes: u64,
    /// Contents that the store does not give; files with them cannot be read.
    pub gap_count: u64,
    /// The first of them. Their path is the content's name: several files may have it.
    pub gaps: Vec<Gap>,
}

struct Work<'a> {
    cache: &'a Cache,
    request: &'a FillRequest<'a>,
    missing: Mutex<Missing<'a>>,
    fetched: AtomicU64,
    fetched_bytes: AtomicU64,
    gaps: Mutex<(u64, Vec<Gap>)>,
    error: Mutex<Option<CacheError>>,
}

impl Cache {
    /// Fetches everything that the image refers to and that is not here. When nothing is missing afterwards, the
    /// image is ready, and later calls cost nothing.
    ///
    /// # Errors
    /// When the store or the cache's directory cannot be used; what was fetched stays.
    pub fn fill(&self, request: &FillRequest<'_>) -> Result<FillReport, CacheError> {
        if self.is_ready(request.image) {
            return Ok(FillReport::default());
        }
        let _shared = self.lock_shared()?;
        self.mark_unsynced()?;
        let missing = self.missing(request.image).map_err(io_error(&self.images()))?;
        let work = Work {
            cache: self,
            request,
            missing: Mutex::new(missing),
            fetched: AtomicU64::new(0),
            fetched_bytes: AtomicU64::new(0),
            gaps: Mutex::default(),
            error: Mutex::default(),
        };
        let threads = match request.threads {
            0 => std::thread::available_parallelism().map_or(2, usize::from),
            threads => threads,
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(THREADS_MAX) {
                scope.spawn(|| work.run());
            }
            work.run();
        });
        if let Some(error) = work.error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        let (gap_count, gaps) = work.gaps.into_inner().unwrap_or_else(PoisonError::into_inner);
        if gap_count == 0 {
            let mark = self.ready_mark(request.image.id());
            File::create(&mark).map_err(io_error(&mark))?;
        }
        Ok(FillReport {
            fetched: work.fetched.into_inner(),
            fetched_bytes: work.fetched_bytes.into_inner(),
            gap_count,
            gaps,
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Work<'_> {
    fn run(&self) {
        while let Some(next) = self.next() {
            let done = match next {
                Ok(content) => self.fetch(&content),
                Err(source) => Err(io_error(&self.cache.images())(source)),
            };
            if let Err(error) = done {
                lock(&self.error).get_or_insert(error);
                return;
            }
        }
    }

    fn next(&self) -> Option<io::Result<Content>> {
        if self.request.cancel.load(Ordering::Relaxed) {
            lock(&self.error).get_or_insert(CacheError::Cancelled);
        }
        if lock(&self.error).is_some() {
            return None;
        }
        lock(&self.missing).next()
    }

    fn fetch(&self, content: &Content) -> Result<(), CacheError> {
        let Some(id) = ContentId::of(content) else { return Ok(()) };
        match self.cache.put(&id, content, self.request.store) {
            Ok(bytes) => {
                self.fetched.fetch_add(1, Ordering::Relaxed);
                self.fetched_bytes.fetch_add(bytes, Ordering::Relaxed);
                self.request.progress.bytes_done(bytes);
                self.request.progress.files_done(1);
                Ok(())
            }
            Err(PutError::Write(source)) => Err(io_error(&self.cache.path_of(&id))(source)),
            Err(PutError::Object(error)) if error.is_unavailable() => match error {
                ObjectError::Store(error) => Err(error.into()),
                ObjectError::Malformed(_) => Ok(()),
            },
            Err(PutError::Object(error)) => {
                let fault = match &error {
                    ObjectError::Store(error) => error.fault(),
                    ObjectError::Malformed(_) => Fault::Invalid,
                };
                let mut gaps = lock(&self.gaps);
                gaps.0 += 1;
                if gaps.1.len() < GAPS_MAX {
                    gaps.1.push(Gap { path: id.to_string(), fault, reason: error.to_string() });
                }
                Ok(())
            }
        }
    }
}

enum PutError {
    Write(io::Error),
    Object(ObjectError),
}

impl From<io::Error> for PutError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl Cache {
    /// Puts one content into its place; the bytes that were written.
    fn put(&self, id: &ContentId, content: &Content, store: &dyn BlockStore) -> Result<u64, PutError> {
        // The first block before the file: the usual gap then leaves nothing to clean up.
        let whole = match content {
            Content::Whole { size, block } => Some(get(store, block, *size)?),
            Content::Mapped { .. } | Content::Nothing { .. } => None,
        };
        let draft = self.draft();
        let file = File::options().write(true).create_new(true).mode(0o600).open(&draft)?;
        let written = match whole {
            Some(bytes) => file.write_all_at(&bytes, 0).map(|()| bytes.len() as u64).map_err(PutError::Write),
            None => write_mapped(&file, content, store),
        };
        let placed = written.and_then(|bytes| {
            file.set_permissions(fs::Permissions::from_mode(0o400))?;
            place(&draft, &self.path_of(id))?;
            Ok(bytes)
        });
        if placed.is_err() {
            fs::remove_file(&draft)?;
        }
        placed
    }
}

fn place(draft: &Path, path: &Path) -> io::Result<()> {
    match fs::rename(draft, path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(dir) = path.parent() {
                fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            }
            fs::rename(draft, path)
        }
        other => other,
    }
}

fn get(store: &dyn BlockStore, block: &BlockHash, len: u64) -> Result<Vec<u8>, PutError> {
    let bytes = store.get(block).map_err(|error| PutError::Object(error.into()))?;
    if bytes.len() as u64 != len {
        let problem = "a block has another length than its file says";
        return Err(PutError::Object(MalformedObject { object: "entry", at: 0, problem }.into()));
    }
    Ok(bytes)
}

fn write_mapped(file: &File, content: &Content, store: &dyn BlockStore) -> Result<u64, PutError> {
    let size = content.size();
    let Some(map) = object::read_map(store, content).map_err(PutError::Object)? else { return Ok(0) };
    file.set_len(size)?;
    let mut written = 0;
    map.for_each_window(size, |block, extents| {
        let len = extents.iter().map(|extent| extent.len).sum();
        let bytes = get(store, block, len)?;
        let mut rest = bytes.as_slice();
        for extent in extents {
            let (part, behind) = rest.split_at(extent.len as usize);
            file.write_all_at(part, extent.start)?;
            rest = behind;
        }
        written += len;
        Ok::<(), PutError>(())
    })?;
    Ok(written)
}
