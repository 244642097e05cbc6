//! Images: what of a home can be mounted without its bytes, as files beside each other.
//!
//! An image is one state of a home for one owner and one list of excludes: `<id>.erofs` is mounted, `<id>.needs`
//! lists the contents it refers to, `<id>.objects` holds its part of the manifest, and `<id>.json`, written last,
//! says that the others are whole. What stays true: an image is never changed once it has its name. What does not
//! belong here: whether the contents are there (`cache`), and mounting.

mod listing;
mod needs;
mod objects;
mod tree;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use covey_home::object::ObjectError;
use covey_home::{BlockStore, Excludes, Progress};
use covey_types::{BlockHash, Fault, RootHash};
use serde::{Deserialize, Serialize};

pub use needs::Needs;
pub use objects::ObjectsFirst;

/// Version of the files; part of an image's name, so that a newer program never mistakes an older image.
const VERSION: u32 = 1;

/// Which image.
#[derive(Clone, Copy)]
pub struct ImageRequest<'a> {
    /// The state.
    pub root: RootHash,
    /// Where its manifest is.
    pub store: &'a dyn BlockStore,
    /// Uid and gid of everything in it.
    pub owner: (u32, u32),
    /// What of the snapshot is left out.
    pub excludes: &'a Excludes,
    /// Ends the work early with [`ImageError::Cancelled`].
    pub cancel: &'a AtomicBool,
    /// Who watches.
    pub progress: &'a dyn Progress,
}

impl std::fmt::Debug for ImageRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageRequest").field("root", &self.root).finish_non_exhaustive()
    }
}

/// What is known of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFacts {
    /// The state.
    pub root: RootHash,
    /// Names in the tree.
    pub entries: u64,
    /// Regular files, each name counted.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Names of the snapshot that the excludes leave out, not counting what is below them.
    pub excluded: u64,
    /// Length of the image.
    pub image_bytes: u64,
}

/// Why an image was not written.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The caller's flag.
    #[error("cancelled")]
    Cancelled,
    /// Part of the manifest; without it the tree below is unknown.
    #[error("`{path}` of the snapshot cannot be read")]
    Object {
        /// From the home's root, lossily as text.
        path: String,
        /// Why.
        source: ObjectError,
    },
    /// Something that this kind of file system cannot hold.
    #[error("`{path}` cannot be mounted: {limit}; use a plain copy of this home")]
    Beyond {
        /// From the home's root, lossily as text.
        path: String,
        /// Which limit.
        limit: &'static str,
    },
    /// The directory of images.
    #[error("the image {} cannot be written", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

impl ImageError {
    /// What the caller can do about it.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Cancelled | Self::Write { .. } => Fault::Retry,
            Self::Object { source: ObjectError::Store(error), .. } => error.fault(),
            Self::Object { source: ObjectError::Malformed(_), .. } => Fault::Invalid,
            Self::Beyond { .. } => Fault::Limit,
        }
    }
}

fn identity(request: &ImageRequest<'_>) -> BlockHash {
    let mut hasher = blake3::Hasher::new_derive_key("covey 2026 mounted home, image");
    hasher.update(&VERSION.to_le_bytes());
    hasher.update(request.root.as_bytes());
    hasher.update(&request.owner.0.to_le_bytes()).update(&request.owner.1.to_le_bytes());
    hasher.update(request.excludes.fingerprint().as_bytes());
    BlockHash::from_bytes(*hasher.finalize().as_bytes())
}

/// A whole image.
#[derive(Debug, Clone)]
pub struct Image {
    dir: PathBuf,
    id: String,
    facts: ImageFacts,
}

impl Image {
    /// The image's name: what makes it differ from others.
    pub fn id_of(request: &ImageRequest<'_>) -> String {
        identity(request).to_string()[..32].to_owned()
    }

    /// The image of this name in the directory of images, if it is there and whole.
    pub fn find(dir: &Path, id: &str) -> Option<Self> {
        let facts = fs::read(dir.join(format!("{id}.json"))).ok()?;
        let facts = serde_json::from_slice(&facts).ok()?;
        Some(Self { dir: dir.to_owned(), id: id.to_owned(), facts })
    }

    /// The image that the request names: the one that is there, or a new one. `dir` exists.
    ///
    /// # Errors
    /// When it could not be written; nothing that has an image's name is left then.
    pub fn prepare(request: &ImageRequest<'_>, dir: &Path) -> Result<Self, ImageError> {
        let id = Self::id_of(request);
        match Self::find(dir, &id) {
            Some(image) => Ok(image),
            None => Self::write(request, dir, id),
        }
    }

    fn write(request: &ImageRequest<'_>, dir: &Path, id: String) -> Result<Self, ImageError> {
        // Two that write the same image at once do not meet: names before the rename are their own.
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let draft = dir.join(format!("{}{id}-{}-{number}", Self::DRAFT_PREFIX, std::process::id()));
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| ImageError::Write { path, source }
        };
        let written = tree::write(request, &draft).and_then(|facts| {
            let json = draft.with_extension("json");
            let text = serde_json::to_vec(&facts).map_err(io::Error::other).map_err(failed(&json))?;
            fs::write(&json, text).map_err(failed(&json))?;
            // The facts last: they say that the rest is there.
            for kind in ["objects", "needs", "erofs", "json"] {
                let path = dir.join(format!("{id}.{kind}"));
                fs::rename(draft.with_extension(kind), &path).map_err(failed(&path))?;
            }
            Ok(facts)
        });
        if written.is_err() {
            for kind in ["objects", "needs", "erofs", "json"] {
                match fs::remove_file(draft.with_extension(kind)) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(failed(&draft)(error)),
                }
            }
        }
        written.map(|facts| Self { dir: dir.to_owned(), id, facts })
    }

    /// How files begin that are not an image yet; whoever opens the cache alone may remove them.
    pub(crate) const DRAFT_PREFIX: &str = "draft-";

    /// Its name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What is known of it.
    pub const fn facts(&self) -> &ImageFacts {
        &self.facts
    }

    /// The file that is mounted.
    pub fn path(&self) -> PathBuf {
        self.file("erofs")
    }

    fn file(&self, kind: &str) -> PathBuf {
        self.dir.join(format!("{}.{kind}", self.id))
    }

    /// The contents that it refers to.
    ///
    /// # Errors
    /// When the list cannot be opened.
    pub fn needs(&self) -> io::Result<Needs> {
        Needs::open(&self.file("needs"))
    }

    /// A store that knows the image's part of the manifest by itself.
    pub fn objects_first<'a>(&self, inner: &'a dyn BlockStore) -> ObjectsFirst<'a> {
        ObjectsFirst::open(&self.file("objects"), inner)
    }

    /// Removes its files, the one that makes it an image first. Nobody may have it mounted.
    ///
    /// # Errors
    /// When a file could not be removed.
    pub fn remove(self) -> io::Result<()> {
        ["json", "erofs", "needs", "objects"].iter().try_for_each(|kind| {
            match fs::remove_file(self.file(kind)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            }
        })
    }
}
