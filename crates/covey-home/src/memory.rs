//! A block store in memory, for tests and tools; same contract as [`crate::PackStore`].

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use covey_types::BlockHash;

use crate::block::{Block, BlockHasher, BlockStore, StoreError, Upload, UploadReport};

#[derive(Debug, Default)]
struct Contents {
    blocks: HashMap<BlockHash, Arc<[u8]>>,
    damaged: HashSet<BlockHash>,
    unavailable: bool,
}

/// Blocks of one org in memory, with faults that tests switch on.
#[derive(Debug, Default)]
pub struct MemoryStore {
    hasher: BlockHasher,
    contents: Mutex<Contents>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty store whose blocks are named otherwise.
    pub fn with_hasher(hasher: BlockHasher) -> Self {
        Self { hasher, ..Self::default() }
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.contents().blocks.len()
    }

    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every address, in no order.
    pub fn hashes(&self) -> Vec<BlockHash> {
        self.contents().blocks.keys().copied().collect()
    }

    /// Takes a block away, as a garbage collection would; tells whether it was there.
    pub fn remove(&self, hash: &BlockHash) -> bool {
        self.contents().blocks.remove(hash).is_some()
    }

    /// Makes reads of this block answer [`StoreError::Damaged`] until it is put again.
    pub fn damage(&self, hash: BlockHash) {
        self.contents().damaged.insert(hash);
    }

    /// Makes every call answer [`StoreError::Unavailable`], or stop doing so.
    pub fn set_unavailable(&self, unavailable: bool) {
        self.contents().unavailable = unavailable;
    }
}

fn check(contents: &Contents) -> Result<(), StoreError> {
    if contents.unavailable {
        return Err(StoreError::unavailable("switched off", io::Error::from(io::ErrorKind::NotConnected)));
    }
    Ok(())
}

impl BlockStore for MemoryStore {
    fn hasher(&self) -> &BlockHasher {
        &self.hasher
    }

    fn get(&self, hash: &BlockHash) -> Result<Vec<u8>, StoreError> {
        let contents = self.contents();
        check(&contents)?;
        let bytes = contents.blocks.get(hash).ok_or(StoreError::Absent { hash: *hash })?;
        if contents.damaged.contains(hash) || self.hasher.hash(bytes) != *hash {
            return Err(StoreError::damaged(format!("block {hash}"), "the hash differs"));
        }
        Ok(bytes.to_vec())
    }

    fn missing(&self, hashes: &[BlockHash]) -> Result<Vec<BlockHash>, StoreError> {
        let contents = self.contents();
        check(&contents)?;
        let lacks =
            |hash: &&BlockHash| !contents.blocks.contains_key(*hash) || contents.damaged.contains(*hash);
        Ok(hashes.iter().filter(lacks).copied().collect())
    }

    fn upload(&self) -> Result<Box<dyn Upload + '_>, StoreError> {
        check(&self.contents())?;
        Ok(Box::new(MemoryUpload { store: self, pending: Mutex::default() }))
    }
}

#[derive(Debug)]
struct MemoryUpload<'a> {
    store: &'a MemoryStore,
    pending: Mutex<HashMap<BlockHash, Arc<[u8]>>>,
}

impl Upload for MemoryUpload<'_> {
    fn hasher(&self) -> &BlockHasher {
        &self.store.hasher
    }

    fn put(&self, block: &Block<'_>) -> Result<bool, StoreError> {
        block.check_hasher(&self.store.hasher)?;
        if self.store.missing(&[block.hash()])?.is_empty() {
            return Ok(false);
        }
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(pending.insert(block.hash(), block.bytes().into()).is_none())
    }

    fn finish(self: Box<Self>) -> Result<UploadReport, StoreError> {
        let pending = self.pending.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut contents = self.store.contents();
        check(&contents)?;
        let mut report = UploadReport::default();
        for (hash, bytes) in pending {
            report.blocks_new += 1;
            report.bytes_new += bytes.len() as u64;
            report.stored_bytes_new += bytes.len() as u64;
            contents.damaged.remove(&hash);
            contents.blocks.insert(hash, bytes);
        }
        Ok(report)
    }
}
