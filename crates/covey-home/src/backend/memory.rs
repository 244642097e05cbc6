//! A store in memory: the fake with state for tests, held to the same contract as the others.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    Backend, BackendError, Expected, FileVersion, Key, NewFile, PutOutcome, SMALL_FILE_BYTES_MAX, Tail,
    Versioned,
};

#[derive(Debug, Default)]
struct Files {
    files: BTreeMap<Key, (u64, Vec<u8>)>,
    /// Given to every change, so that a content that comes back is another version.
    changes: u64,
    unavailable: bool,
}

/// Files of one org in memory, with faults that tests switch on. Clones share the files.
#[derive(Debug, Clone, Default)]
pub struct MemoryBackend {
    files: Arc<Mutex<Files>>,
    cache_dir: Option<PathBuf>,
    remote: bool,
}

impl MemoryBackend {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, with a directory for what can be made anew.
    pub fn with_cache_dir(cache_dir: PathBuf) -> Self {
        Self { cache_dir: Some(cache_dir), ..Self::default() }
    }

    /// The same files, seen as those that are far away are.
    pub fn remote(self) -> Self {
        Self { remote: true, ..self }
    }

    /// Makes every call answer [`BackendError::Unavailable`], or stop doing so.
    pub fn set_unavailable(&self, unavailable: bool) {
        self.locked().unavailable = unavailable;
    }

    /// Changes the bytes of a file behind the store's back; tells whether it was there.
    pub fn tamper(&self, key: &Key, change: impl FnOnce(&mut Vec<u8>)) -> bool {
        match self.locked().files.get_mut(key) {
            Some((_, bytes)) => {
                change(bytes);
                true
            }
            None => false,
        }
    }

    /// Every file.
    pub fn keys(&self) -> Vec<Key> {
        self.locked().files.keys().cloned().collect()
    }

    fn locked(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn usable(&self) -> Result<MutexGuard<'_, Files>, BackendError> {
        let files = self.locked();
        if files.unavailable {
            let error = io::Error::from(io::ErrorKind::NotConnected);
            return Err(BackendError::unavailable("use memory that is switched off", error));
        }
        Ok(files)
    }

    fn with_file<T>(&self, key: &Key, read: impl FnOnce(&[u8]) -> T) -> Result<T, BackendError> {
        let files = self.usable()?;
        let found = files.files.get(key).map(|(_, bytes)| read(bytes));
        found.ok_or_else(|| BackendError::NotFound { file: format!("{key} in memory") })
    }

    fn children(
        &self,
        dir: &Key,
        wanted: impl Fn(&str) -> Option<&str>,
    ) -> Result<Vec<String>, BackendError> {
        let below = format!("{dir}/");
        let mut names: Vec<String> = self
            .usable()?
            .files
            .keys()
            .filter_map(|key| wanted(key.as_str().strip_prefix(&below)?))
            .map(str::to_owned)
            .collect();
        names.dedup();
        Ok(names)
    }
}

impl Backend for MemoryBackend {
    fn place(&self) -> String {
        "memory".to_owned()
    }

    fn is_remote(&self) -> bool {
        self.remote
    }

    fn cache_dir(&self) -> Option<PathBuf> {
        self.cache_dir.clone()
    }

    fn list(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        self.children(dir, |rest| (!rest.contains('/')).then_some(rest))
    }

    fn list_dirs(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        self.children(dir, |rest| rest.split_once('/').map(|(name, _)| name))
    }

    fn file_len(&self, key: &Key) -> Result<u64, BackendError> {
        self.with_file(key, |bytes| bytes.len() as u64)
    }

    fn read(&self, key: &Key, offset: u64, len: usize) -> Result<Vec<u8>, BackendError> {
        self.with_file(key, |bytes| {
            let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
            bytes[start..start.saturating_add(len).min(bytes.len())].to_vec()
        })
    }

    fn read_tail(&self, key: &Key, len: usize) -> Result<Tail, BackendError> {
        self.with_file(key, |bytes| Tail {
            bytes: bytes[bytes.len() - len.min(bytes.len())..].to_vec(),
            file_len: bytes.len() as u64,
        })
    }

    fn create(&self) -> Result<Box<dyn NewFile>, BackendError> {
        drop(self.usable()?);
        Ok(Box::new(MemoryFile { backend: self.clone(), bytes: Vec::new() }))
    }

    fn flush(&self, _dir: &Key) -> Result<(), BackendError> {
        self.usable().map(drop)
    }

    fn remove(&self, key: &Key) -> Result<bool, BackendError> {
        Ok(self.usable()?.files.remove(key).is_some())
    }

    fn get(&self, key: &Key) -> Result<Option<Versioned>, BackendError> {
        Ok(self.usable()?.files.get(key).map(|(version, bytes)| Versioned {
            bytes: bytes.clone(),
            version: FileVersion::new(version.to_string()),
        }))
    }

    fn put_if(&self, key: &Key, bytes: &[u8], expected: &Expected) -> Result<PutOutcome, BackendError> {
        let mut files = self.usable()?;
        if bytes.len() > SMALL_FILE_BYTES_MAX {
            return Err(BackendError::unavailable(
                format!("write {key}"),
                io::Error::from(io::ErrorKind::FileTooLarge),
            ));
        }
        let found = files.files.get(key).map(|(version, _)| version.to_string());
        let as_expected = match expected {
            Expected::Any => true,
            Expected::Absent => found.is_none(),
            Expected::Version(version) => found.is_some_and(|found| found == version.as_str()),
        };
        if !as_expected {
            return Ok(PutOutcome::Conflict);
        }
        files.changes += 1;
        let version = files.changes;
        files.files.insert(key.clone(), (version, bytes.to_vec()));
        Ok(PutOutcome::Written(FileVersion::new(version.to_string())))
    }
}

#[derive(Debug)]
struct MemoryFile {
    backend: MemoryBackend,
    bytes: Vec<u8>,
}

impl NewFile for MemoryFile {
    fn append(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        drop(self.backend.usable()?);
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn publish(self: Box<Self>, key: &Key) -> Result<(), BackendError> {
        let mut files = self.backend.usable()?;
        files.changes += 1;
        let version = files.changes;
        files.files.insert(key.clone(), (version, self.bytes));
        Ok(())
    }
}
