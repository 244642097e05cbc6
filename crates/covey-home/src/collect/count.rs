//! A place that takes packs and keeps nothing: what a dry run writes to.

use std::io;
use std::path::PathBuf;

use crate::backend::{
    Backend, BackendError, Expected, FileVersion, Key, NewFile, PutOutcome, Tail, Versioned,
};

#[derive(Debug)]
pub(super) struct CountingBackend;

#[derive(Debug)]
struct CountingFile;

impl NewFile for CountingFile {
    fn append(&mut self, _bytes: &[u8]) -> Result<(), BackendError> {
        Ok(())
    }

    fn publish(self: Box<Self>, _key: &Key) -> Result<(), BackendError> {
        Ok(())
    }
}

fn nothing(key: &Key) -> BackendError {
    BackendError::unavailable(format!("read {key} of a dry run"), io::Error::from(io::ErrorKind::Unsupported))
}

impl Backend for CountingBackend {
    fn place(&self) -> String {
        "a dry run".to_owned()
    }

    fn is_remote(&self) -> bool {
        false
    }

    fn cache_dir(&self) -> Option<PathBuf> {
        None
    }

    fn list(&self, _dir: &Key) -> Result<Vec<String>, BackendError> {
        Ok(Vec::new())
    }

    fn list_dirs(&self, _dir: &Key) -> Result<Vec<String>, BackendError> {
        Ok(Vec::new())
    }

    fn file_len(&self, key: &Key) -> Result<u64, BackendError> {
        Err(nothing(key))
    }

    fn read(&self, key: &Key, _offset: u64, _len: usize) -> Result<Vec<u8>, BackendError> {
        Err(nothing(key))
    }

    fn read_tail(&self, key: &Key, _len: usize) -> Result<Tail, BackendError> {
        Err(nothing(key))
    }

    fn create(&self) -> Result<Box<dyn NewFile>, BackendError> {
        Ok(Box::new(CountingFile))
    }

    fn flush(&self, _dir: &Key) -> Result<(), BackendError> {
        Ok(())
    }

    fn remove(&self, key: &Key) -> Result<bool, BackendError> {
        Err(nothing(key))
    }

    fn get(&self, _key: &Key) -> Result<Option<Versioned>, BackendError> {
        Ok(None)
    }

    fn put_if(&self, _key: &Key, _bytes: &[u8], _expected: &Expected) -> Result<PutOutcome, BackendError> {
        Ok(PutOutcome::Written(FileVersion::new("")))
    }
}
