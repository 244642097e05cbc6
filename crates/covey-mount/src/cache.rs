//! The block cache: one plain file per content, for mounted homes to read from.
//!
//! ```text
//! contents/<2 hex>/<62 hex>[.m]   one content, mode 0400, never changed; the lowest layer of every mount
//! images/<id>.*                   images (`image`); <id>.ready says that all its contents were put here
//! pins/<name>                     an image that is mounted somewhere
//! tmp/                            contents being written
//! session                         whether what is here has reached the disk, and in which boot it was written
//! lock                            shared by who adds, alone by who removes
//! ```
//!
//! What stays true: a file under its final name is whole and its hash was checked; it is removed only when no
//! mounted image refers to it; after a power cut nothing is believed that was not known to be on the disk. What
//! does not belong here: how a content that is not here might be fetched later than at the mount. [`Missing`] is
//! the place where that begins: it names what is not here.

mod fill;
mod session;
mod trim;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use covey_home::manifest::Content;
use covey_home::{BlockHasher, Contents, StoreError};
use covey_types::{BlockHash, Fault};
use serde::{Deserialize, Serialize};

use crate::content::ContentId;
use crate::image::{Image, ImageError, ImageRequest, Needs};
use crate::overlay::lock_file;

pub use fill::{FillReport, FillRequest};
pub use trim::CacheReport;

/// What went wrong with a cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The caller's flag.
    #[error("cancelled")]
    Cancelled,
    /// Its directory.
    #[error("the block cache cannot be used: {}", path.display())]
    Io {
        /// What.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The store that contents come from.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
}

impl CacheError {
    /// What the caller can do about it.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Cancelled | Self::Io { .. } => Fault::Retry,
            Self::Store(error) => error.fault(),
            Self::Image(error) => error.fault(),
        }
    }
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> CacheError {
    let path = path.to_owned();
    move |source| CacheError::Io { path, source }
}

/// A mounted image, as its pin says it.
#[derive(Debug, Serialize, Deserialize)]
struct Pin {
    image: String,
    /// Mounts do not outlive the boot.
    boot: String,
    /// For people: whose.
    place: PathBuf,
}

/// A directory of contents and images. One org's: a content's name is a hash of what is in it.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
    /// Bytes that contents may take on disk; what mounted images need is kept beyond it.
    limit_bytes: Option<u64>,
    /// How the store that contents come from names its blocks.
    hasher: BlockHasher,
    boot: String,
}

impl Cache {
    /// Opens the cache, makes it when it is not there, and throws away what a power cut may have damaged.
    ///
    /// # Errors
    /// When the directory cannot be used.
    pub fn open(dir: &Path, limit_bytes: Option<u64>) -> Result<Self, CacheError> {
        Self::open_keyed(dir, limit_bytes, BlockHasher::PLAIN)
    }

    /// As [`Cache::open`], for contents of a store whose blocks are named with `hasher`. With another one than the
    /// store's nothing wrong is believed; after a power cut everything is fetched again.
    ///
    /// # Errors
    /// When the directory cannot be used.
    pub fn open_keyed(dir: &Path, limit_bytes: Option<u64>, hasher: BlockHasher) -> Result<Self, CacheError> {
        for part in ["contents", "images", "pins", "tmp"] {
            let path = dir.join(part);
            // Private: who may read a home is for its mount to say.
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(io_error(&path))?;
        }
        let boot = session::boot_id().map_err(io_error(Path::new(session::BOOT_ID)))?;
        let dir = dir.canonicalize().map_err(io_error(dir))?;
        let cache = Self { dir, limit_bytes, hasher, boot };
        cache.begin_session()?;
        cache.sweep()?;
        Ok(cache)
    }

    /// Removes what processes that died were writing.
    fn sweep(&self) -> Result<(), CacheError> {
        // Whoever writes holds the lock: alone, there is nobody whose drafts these could be.
        let Some(_alone) = self.try_lock_alone()? else { return Ok(()) };
        let mut left = session::entries(&self.dir.join("tmp"))?;
        let is_draft = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(Image::DRAFT_PREFIX))
        };
        left.extend(session::entries(&self.images())?.into_iter().filter(is_draft));
        left.iter().try_for_each(|path| fs::remove_file(path).map_err(io_error(path)))
    }

    /// Its directory, as an absolute path.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory of images, for [`Image::prepare`].
    pub fn images(&self) -> PathBuf {
        self.dir.join("images")
    }

    /// The layer of contents.
    pub fn contents(&self) -> PathBuf {
        self.dir.join("contents")
    }

    /// Where a content is, or would be.
    pub fn path_of(&self, id: &ContentId) -> PathBuf {
        self.contents().join(id.to_string())
    }

    /// What the image refers to and is not here, in the order of the tree; a content that several files share
    /// may come several times. Costs a look-up for each content.
    ///
    /// # Errors
    /// When the image's list cannot be opened.
    pub fn missing(&self, image: &Image) -> io::Result<Missing<'_>> {
        Ok(Missing { cache: self, needs: image.needs()? })
    }

    /// Whether everything that the image refers to has been put here. Costs one look-up.
    pub fn is_ready(&self, image: &Image) -> bool {
        self.ready_mark(image.id()).exists()
    }

    fn ready_mark(&self, id: &str) -> PathBuf {
        self.images().join(format!("{id}.ready"))
    }

    /// The image that the request names, written if it is not here, and noted as mounted at `place`: nothing it
    /// refers to goes away until [`Cache::unpin`].
    ///
    /// # Errors
    /// When it could not be written or noted; nothing may be mounted then.
    pub fn pin(&self, request: &ImageRequest<'_>, place: &Path) -> Result<Image, CacheError> {
        // Over both steps: what is not pinned may be trimmed.
        let _shared = self.lock_shared()?;
        let image = match Image::find(&self.images(), &Image::id_of(request)) {
            Some(image) => image,
            None => {
                self.mark_unsynced()?;
                Image::prepare(request, &self.images())?
            }
        };
        let path = self.pin_path(place);
        let pin = Pin { image: image.id().to_owned(), boot: self.boot.clone(), place: place.to_owned() };
        let draft = self.draft();
        let written = serde_json::to_vec(&pin).map_err(io::Error::other);
        written.and_then(|text| fs::write(&draft, text)).map_err(io_error(&draft))?;
        fs::rename(&draft, &path).map_err(io_error(&path))?;
        // Which image was used last decides what is trimmed first.
        let mark = self.images().join(format!("{}.json", image.id()));
        let touched = File::options().write(true).open(&mark);
        touched.and_then(|file| file.set_modified(std::time::SystemTime::now())).map_err(io_error(&mark))?;
        Ok(image)
    }

    /// Takes the note of `place` back; that there is none is no error.
    ///
    /// # Errors
    /// When it is still there.
    pub fn unpin(&self, place: &Path) -> Result<(), CacheError> {
        let path = self.pin_path(place);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error(&path)(error)),
            _ => Ok(()),
        }
    }

    fn pin_path(&self, place: &Path) -> PathBuf {
        use std::os::unix::ffi::OsStrExt;
        let name = BlockHash::of(place.as_os_str().as_bytes()).to_string();
        self.dir.join("pins").join(&name[..32])
    }

    /// A name in `tmp` that nobody else has.
    fn draft(&self) -> PathBuf {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        self.dir.join("tmp").join(format!("{}-{number}", std::process::id()))
    }

    /// Held while contents are added or an image begins to be used.
    fn lock_shared(&self) -> Result<File, CacheError> {
        let path = self.dir.join("lock");
        let lock = lock_file(&path).map_err(io_error(&path))?;
        lock.lock_shared().map_err(io_error(&path))?;
        Ok(lock)
    }

    /// Held while something is removed; none: somebody else works here.
    fn try_lock_alone(&self) -> Result<Option<File>, CacheError> {
        let path = self.dir.join("lock");
        let lock = lock_file(&path).map_err(io_error(&path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Some(lock)),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => Err(io_error(&path)(error)),
        }
    }
}

impl Contents for Cache {
    fn open(&self, content: &Content) -> Option<File> {
        File::open(self.path_of(&ContentId::of(content)?)).ok()
    }
}

/// Contents that an image refers to and the cache does not have.
#[derive(Debug)]
pub struct Missing<'a> {
    cache: &'a Cache,
    needs: Needs,
}

impl Iterator for Missing<'_> {
    type Item = io::Result<Content>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let content = match self.needs.next()? {
                Ok(content) => content,
                Err(error) => return Some(Err(error)),
            };
            let Some(id) = ContentId::of(&content) else { continue };
            match rustix::fs::access(self.cache.path_of(&id), rustix::fs::Access::EXISTS) {
                Ok(()) => {}
                Err(rustix::io::Errno::NOENT) => return Some(Ok(content)),
                Err(error) => return Some(Err(error.into())),
            }
        }
    }
}
