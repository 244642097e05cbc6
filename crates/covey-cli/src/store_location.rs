//! Where a home store is: a directory of this machine, or a bucket.
//!
//! What stays true: the same text means the same place in `--store`, in `COVEY_BLOB_STORE` and in `client.json`. What
//! of a bucket is kept on this host stands below the data directory and can be made anew. What does not belong here:
//! what is in a store.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use covey_bucket::{Access, BucketPlace, BucketStore, InvalidPlace, OpenOptions, Patience, Settings};
use covey_home::backend::{Backend, DirectoryBackend, OpenStore};
use covey_runner::StoreLink;
use serde::{Deserialize, Serialize};

const FILE_SCHEME: &str = "file://";
/// Below the data directory: where blocks lie in buckets, stat caches, and what probes have found.
const BUCKETS_DIR: &str = "buckets";

/// A place as people write it: a path, `file:///path` or `s3://bucket/prefix`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum StoreLocation {
    /// A directory of this machine.
    Directory(PathBuf),
    /// A bucket.
    Bucket(BucketPlace),
}

/// A text that is no place of a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidLocation {
    #[error(transparent)]
    Bucket(#[from] InvalidPlace),
    #[error("`{0}` is no place of a store: write a path, file:///PATH or s3://BUCKET/PREFIX")]
    Other(String),
}

impl StoreLocation {
    /// For clap, which must take any path.
    pub(crate) fn parser() -> impl clap::builder::TypedValueParser<Value = Self> {
        use clap::builder::TypedValueParser as _;
        clap::builder::OsStringValueParser::new().try_map(Self::from_argument)
    }

    fn from_argument(text: OsString) -> Result<Self, InvalidLocation> {
        match text.into_string() {
            Ok(text) => Self::try_from(text),
            Err(path) => Ok(Self::Directory(PathBuf::from(path))),
        }
    }

    /// The place that `COVEY_BLOB_STORE` names, where a bare path would be read as relative to who knows what.
    pub(crate) fn from_setting(text: &str) -> Result<Self, InvalidLocation> {
        if BucketPlace::is_meant_by(text) || text.starts_with(FILE_SCHEME) {
            return Self::try_from(text.to_owned());
        }
        Err(InvalidLocation::Other(text.to_owned()))
    }

    /// Opens it. `data_dir` is of this host; `probe_again` asks a bucket everything anew.
    pub(crate) fn open(
        &self,
        data_dir: &Path,
        access: Access,
        probe_again: bool,
    ) -> anyhow::Result<OpenedStore> {
        let place = match self {
            Self::Directory(path) => return Ok(OpenedStore::Directory(path.clone())),
            Self::Bucket(place) => place,
        };
        let settings = Settings::from_environment(&|name| std::env::var(name).ok())?;
        let local_dir = data_dir.join(BUCKETS_DIR);
        make_private(&local_dir)?;
        let options = OpenOptions {
            settings: &settings,
            access,
            patience: Patience::default(),
            local_dir: Some(&local_dir),
            probe_again,
        };
        Ok(OpenedStore::Bucket(BucketStore::open(place, &options)?))
    }
}

/// Makes a directory for this user only.
pub(crate) fn make_private(dir: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.with_context(|| format!("{} cannot be made", dir.display()))
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Bucket(place) => write!(f, "{place}"),
        }
    }
}

impl TryFrom<String> for StoreLocation {
    type Error = InvalidLocation;

    fn try_from(text: String) -> Result<Self, InvalidLocation> {
        if BucketPlace::is_meant_by(&text) {
            return Ok(Self::Bucket(text.parse()?));
        }
        let path = match text.strip_prefix(FILE_SCHEME) {
            Some(path) if path.starts_with('/') => path.to_owned(),
            None if !text.is_empty() && !text.contains("://") => text,
            _ => return Err(InvalidLocation::Other(text)),
        };
        Ok(Self::Directory(PathBuf::from(OsString::from_vec(path.into_bytes()))))
    }
}

impl From<StoreLocation> for String {
    fn from(location: StoreLocation) -> Self {
        location.to_string()
    }
}

/// A store that can be used.
#[derive(Debug, Clone)]
pub(crate) enum OpenedStore {
    /// In this directory.
    Directory(PathBuf),
    /// In this bucket.
    Bucket(BucketStore),
    /// In a bucket, reached through the server that holds its key.
    Linked {
        /// The way.
        link: StoreLink,
        /// Of this host, for what can be made anew.
        local_dir: PathBuf,
    },
}

impl OpenedStore {
    /// The store of the server that listens on `socket`, for its own org: no key is needed, and nothing can be removed.
    pub(crate) fn through_server(socket: PathBuf, data_dir: &Path) -> anyhow::Result<Self> {
        let local_dir = data_dir.join(BUCKETS_DIR).join("linked");
        make_private(&local_dir)?;
        Ok(Self::Linked { link: StoreLink::new(socket, local_dir.clone()), local_dir })
    }

    /// Orgs that have something in it, in order; none where there is no store.
    pub(crate) fn orgs(&self) -> anyhow::Result<Vec<String>> {
        let mut orgs = match self {
            Self::Bucket(bucket) => bucket.orgs()?,
            Self::Linked { .. } => anyhow::bail!("a server tells nobody which orgs it has"),
            Self::Directory(path) => {
                let dir = path.join("orgs");
                let entries = match std::fs::read_dir(&dir) {
                    Ok(entries) => entries,
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
                    Err(error) => return Err(error).with_context(|| format!("{}", dir.display())),
                };
                let mut names = Vec::new();
                for entry in entries {
                    // What has no such name was not put there by a store.
                    names.extend(entry?.file_name().into_string().ok());
                }
                names
            }
        };
        orgs.retain(|org| covey_home::name::check_name(org).is_ok());
        orgs.sort_unstable();
        Ok(orgs)
    }

    /// The files of one org, if it has any; makes nothing. What a server has of another org is not told apart from none.
    pub(crate) fn open_existing(&self, org: &str) -> anyhow::Result<Option<Arc<dyn Backend>>> {
        Ok(match self {
            Self::Directory(path) => DirectoryBackend::open_existing(path, org)?
                .map(|backend| Arc::new(backend) as Arc<dyn Backend>),
            Self::Bucket(bucket) => match bucket.orgs()?.iter().any(|known| known == org) {
                true => Some(bucket.backend(org)?),
                false => None,
            },
            Self::Linked { link, .. } => Some(link.open(org)?),
        })
    }

    /// A directory of this host for what belongs to the store and can be made anew: stat caches, mounts.
    pub(crate) fn local_dir(&self) -> anyhow::Result<&Path> {
        match self {
            Self::Directory(path) => Ok(path),
            Self::Bucket(bucket) => {
                bucket.local_dir().context("a bucket that was opened without a directory")
            }
            Self::Linked { local_dir, .. } => Ok(local_dir),
        }
    }
}

impl OpenStore for OpenedStore {
    fn open(&self, org: &str) -> Result<Arc<dyn Backend>, covey_home::StoreError> {
        Ok(match self {
            Self::Directory(path) => Arc::new(DirectoryBackend::open(path, org)?),
            Self::Bucket(bucket) => bucket.backend(org)?,
            Self::Linked { link, .. } => link.open(org)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_path_or_an_address() {
        let read = |text: &str| StoreLocation::try_from(text.to_owned());
        assert_eq!(read("a/b").unwrap(), StoreLocation::Directory("a/b".into()));
        assert_eq!(read("file:///a").unwrap(), StoreLocation::Directory("/a".into()));
        assert_eq!(read("s3://bkt/x").unwrap().to_string(), "s3://bkt/x");
        for bad in ["", "file://a", "http://x", "s3://"] {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert!(StoreLocation::from_setting("a/b").is_err(), "relative to what?");
    }

    #[test]
    fn a_path_that_is_no_text_is_a_directory() {
        let odd = OsString::from_vec(vec![b'/', 0xff]);
        let read = StoreLocation::from_argument(odd.clone()).unwrap();
        assert_eq!(read, StoreLocation::Directory(PathBuf::from(odd)));
    }
}
