//! A directory as a source of blocks: it is secured into a sieve that keeps only those that are wanted.
//!
//! So files, windows, attributes, listings and the root itself are found, whatever of them is lost.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use covey_types::BlockHash;

use crate::block::{Block, BlockHasher, BlockStore, StoreError, Upload, UploadReport};

/// Passes on what is wanted, once.
#[derive(Debug)]
pub(super) struct Sieve<'a> {
    upload: &'a dyn Upload,
    wanted: Mutex<HashSet<BlockHash>>,
}

impl<'a> Sieve<'a> {
    pub(super) fn new(upload: &'a dyn Upload, wanted: HashSet<BlockHash>) -> Self {
        Self { upload, wanted: Mutex::new(wanted) }
    }

    /// What did not come.
    pub(super) fn into_wanted(self) -> HashSet<BlockHash> {
        self.wanted.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockStore for Sieve<'_> {
    fn hasher(&self) -> &BlockHasher {
        self.upload.hasher()
    }

    fn get(&self, hash: &BlockHash) -> Result<Vec<u8>, StoreError> {
        Err(StoreError::Absent { hash: *hash })
    }

    fn missing(&self, hashes: &[BlockHash]) -> Result<Vec<BlockHash>, StoreError> {
        Ok(hashes.to_vec())
    }

    fn upload(&self) -> Result<Box<dyn Upload + '_>, StoreError> {
        Ok(Box::new(Through(self)))
    }
}

#[derive(Debug)]
struct Through<'a>(&'a Sieve<'a>);

impl Upload for Through<'_> {
    fn hasher(&self) -> &BlockHasher {
        self.0.upload.hasher()
    }

    fn put(&self, block: &Block<'_>) -> Result<bool, StoreError> {
        let is_wanted = self.0.wanted.lock().unwrap_or_else(PoisonError::into_inner).remove(&block.hash());
        if is_wanted { self.0.upload.put(block) } else { Ok(false) }
    }

    fn finish(self: Box<Self>) -> Result<UploadReport, StoreError> {
        // The real upload is finished by whoever began it.
        Ok(UploadReport::default())
    }
}
