//! A bucket as a backend of the home store.
//!
//! What stays true: the promises of `covey_home::backend`, and nothing of a store's meaning; every call blocks until
//! its requests have ended. What does not belong here: how requests are made and judged.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use covey_home::backend::{
    Backend, BackendError, Expected, FileVersion, Key, NewFile, PutOutcome, SMALL_FILE_BYTES_MAX, Tail,
    Versioned,
};
use object_store::GetRange;
use object_store::path::Path;
use tokio::runtime::Handle;

use crate::client::Client;
use crate::failure::{Failure, FailureKind};
use crate::runtime;
use crate::small::{Condition, Put};
use crate::upload::BucketFile;

/// The files of one org below `orgs/<org>` of a bucket's prefix.
#[derive(Debug)]
pub(crate) struct BucketBackend {
    pub(crate) client: Arc<Client>,
    pub(crate) runtime: Handle,
    /// The org's own part of every key, below the prefix.
    pub(crate) org: String,
    pub(crate) cache_dir: Option<PathBuf>,
}

/// The object of a key that is not below an org.
pub(crate) fn path_in(client: &Client, key: &str) -> Result<Path, BackendError> {
    let prefix = client.place().prefix();
    let text = if prefix.is_empty() { key.to_owned() } else { format!("{prefix}/{key}") };
    Path::parse(&text).map_err(|error| {
        BackendError::unavailable(format!("name {text} in {}", client.place()), io::Error::other(error))
    })
}

impl BucketBackend {
    fn path(&self, key: &Key) -> Result<Path, BackendError> {
        path_in(&self.client, &format!("orgs/{}/{key}", self.org))
    }

    /// Runs `request` on a file; `NotFound` only where it was proven.
    fn ask<T, F>(
        &self,
        verb: &str,
        key: &Key,
        request: impl FnOnce(Arc<Client>, Path) -> F + Send,
    ) -> Result<T, BackendError>
    where
        T: Send,
        F: Future<Output = Result<T, Failure>>,
    {
        let (client, path) = (Arc::clone(&self.client), self.path(key)?);
        let file = || format!("{key} in {}", self.place());
        runtime::wait(&self.runtime, || request(client, path)).map_err(|failure| match failure.kind() {
            FailureKind::Absent => BackendError::NotFound { file: file() },
            _ => failure.into_backend(format!("{verb} {}", file())),
        })
    }
}

impl Backend for BucketBackend {
    fn place(&self) -> String {
        format!("{}/orgs/{}", self.client.place(), self.org)
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn cache_dir(&self) -> Option<PathBuf> {
        self.cache_dir.clone()
    }

    fn list(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        Ok(self.ask("list", dir, |client, path| async move { client.list(&path).await })?.0)
    }

    fn list_dirs(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        Ok(self.ask("list", dir, |client, path| async move { client.list(&path).await })?.1)
    }

    fn file_len(&self, key: &Key) -> Result<u64, BackendError> {
        Ok(self.ask("look at", key, |client, path| async move { client.head(&path).await })?.size)
    }

    fn read(&self, key: &Key, offset: u64, len: usize) -> Result<Vec<u8>, BackendError> {
        if len == 0 {
            return self.file_len(key).map(|_| Vec::new());
        }
        let range = GetRange::Bounded(offset..offset.saturating_add(len as u64));
        self.ask("read", key, |client, path| async move {
            match client.range(&path, range).await {
                Ok((bytes, _)) => Ok(bytes.into()),
                Err(failure) if failure.kind() == FailureKind::Range => Ok(Vec::new()),
                Err(failure) => Err(failure),
            }
        })
    }

    fn read_tail(&self, key: &Key, len: usize) -> Result<Tail, BackendError> {
        if len == 0 {
            return self.file_len(key).map(|file_len| Tail { bytes: Vec::new(), file_len });
        }
        self.ask("read", key, |client, path| async move {
            match client.range(&path, GetRange::Suffix(len as u64)).await {
                Ok((bytes, file_len)) => Ok(Tail { bytes: bytes.into(), file_len }),
                // An empty object has no end that could be asked for.
                Err(failure) if failure.kind() == FailureKind::Range => {
                    Ok(Tail { bytes: Vec::new(), file_len: client.head(&path).await?.size })
                }
                Err(failure) => Err(failure),
            }
        })
    }

    fn create(&self) -> Result<Box<dyn NewFile>, BackendError> {
        Ok(Box::new(BucketFile::new(
            Arc::clone(&self.client),
            self.runtime.clone(),
            format!("orgs/{}", self.org),
        )))
    }

    /// Nothing to do: an object that the server has answered for is durable.
    fn flush(&self, _dir: &Key) -> Result<(), BackendError> {
        Ok(())
    }

    fn remove(&self, key: &Key) -> Result<bool, BackendError> {
        let removed = self.ask("remove", key, |client, path| async move {
            // S3 answers alike whether it was there or not.
            client.head(&path).await?;
            client.delete(&path).await
        });
        match removed {
            Ok(()) => Ok(true),
            Err(BackendError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn get(&self, key: &Key) -> Result<Option<Versioned>, BackendError> {
        let limit = SMALL_FILE_BYTES_MAX as u64;
        match self.ask("read", key, |client, path| async move { client.whole(&path, limit).await }) {
            Ok(found) => {
                Ok(Some(Versioned { bytes: found.bytes.into(), version: FileVersion::new(found.etag) }))
            }
            Err(BackendError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn put_if(&self, key: &Key, bytes: &[u8], expected: &Expected) -> Result<PutOutcome, BackendError> {
        if bytes.len() > SMALL_FILE_BYTES_MAX {
            let error = io::Error::from(io::ErrorKind::FileTooLarge);
            return Err(BackendError::unavailable(format!("write {key} in {}", self.place()), error));
        }
        let condition = match expected {
            Expected::Absent => Condition::Absent,
            Expected::Version(version) => Condition::Etag(version.as_str().to_owned()),
            Expected::Any => Condition::None,
        };
        let bytes = Bytes::copy_from_slice(bytes);
        let put =
            self.ask(
                "write",
                key,
                |client, path| async move { client.put_small(&path, bytes, condition).await },
            )?;
        Ok(match put {
            Put::Written(etag) => PutOutcome::Written(FileVersion::new(etag)),
            Put::Conflict => PutOutcome::Conflict,
        })
    }
}
