//! Writing packs: blocks are gathered in groups, compressed outside every lock, appended to one pack file at
//! a time, and a full pack is sealed while others write the next.
//!
//! What stays true: data, flush, rename, flush of the directory, in this order; a crash leaves an unnamed
//! temporary file or a whole pack (I6). A failed write poisons the upload, because an address that was claimed
//! and not written must never count as stored.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use covey_types::BlockHash;
use rustix::fs::FlockOperation;

use super::pack::{self, BlockRecord, Codec, Frame, PackIndex};
use super::{DirectoryStore, sync_dir};
use crate::block::{Block, StoreError, Upload, UploadReport};

/// A pack is sealed when it has grown to this; four times as big would quarter the requests to an object store
/// and quadruple what a rewrite by garbage collection costs.
const PACK_BYTES: u64 = 32 * 1024 * 1024;
/// Small blocks are compressed together up to this many plain bytes. One damaged byte costs at most one group,
/// and reading one block of it unfolds the whole of it.
const GROUP_BYTES: usize = 256 * 1024;
/// Blocks from this size on get a frame of their own.
const LARGE_BLOCK_BYTES: usize = 128 * 1024;
/// Groups that fill at the same time, so that threads do not wait for each other and neighbours stay together.
const GROUPS: usize = 8;

#[derive(Debug, Default)]
struct Group {
    plain: Vec<u8>,
    blocks: Vec<(BlockHash, u32)>,
}

#[derive(Debug)]
struct PackWriter {
    file: File,
    path: PathBuf,
    name: String,
    len: u64,
    index: PackIndex,
    renamed: bool,
}

impl Drop for PackWriter {
    fn drop(&mut self) {
        if !self.renamed {
            // A failure leaves a file that the next opener sweeps.
            drop(fs::remove_file(&self.path));
        }
    }
}

#[derive(Debug)]
pub(crate) struct DirectoryUpload<'a> {
    store: &'a DirectoryStore,
    claimed: [Mutex<HashSet<BlockHash>>; 16],
    groups: [Mutex<Group>; GROUPS],
    writer: Mutex<Option<PackWriter>>,
    failed: AtomicBool,
    blocks_new: AtomicU64,
    bytes_new: AtomicU64,
    stored_bytes_new: AtomicU64,
}

thread_local! {
    static GROUP: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % GROUPS
    };
}

impl<'a> DirectoryUpload<'a> {
    pub(crate) fn new(store: &'a DirectoryStore) -> Self {
        Self {
            store,
            claimed: Default::default(),
            groups: Default::default(),
            writer: Mutex::default(),
            failed: AtomicBool::new(false),
            blocks_new: AtomicU64::new(0),
            bytes_new: AtomicU64::new(0),
            stored_bytes_new: AtomicU64::new(0),
        }
    }

    fn write(&self, block: &Block<'_>) -> Result<(), StoreError> {
        let len = block.bytes().len() as u32;
        if block.bytes().len() >= LARGE_BLOCK_BYTES {
            return self.append(block.bytes(), &[(block.hash(), len)]);
        }
        let full = {
            let mut group =
                self.groups[GROUP.with(|group| *group)].lock().unwrap_or_else(PoisonError::into_inner);
            group.plain.extend_from_slice(block.bytes());
            group.blocks.push((block.hash(), len));
            (group.plain.len() >= GROUP_BYTES).then(|| std::mem::take(&mut *group))
        };
        full.map_or(Ok(()), |group| self.append(&group.plain, &group.blocks))
    }

    fn append(&self, plain: &[u8], blocks: &[(BlockHash, u32)]) -> Result<(), StoreError> {
        let (codec, packed) =
            pack::compress(plain).map_err(|error| StoreError::unavailable("compress a block", error))?;
        let stored = packed.as_deref().unwrap_or(plain);
        let full = {
            let mut slot = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let mut writer = match slot.take() {
                Some(writer) => writer,
                None => self.begin_pack()?,
            };
            writer.append(codec, plain.len() as u32, stored, blocks).map_err(|error| {
                StoreError::unavailable(format!("write {}", writer.path.display()), error)
            })?;
            if writer.len < PACK_BYTES {
                *slot = Some(writer);
                None
            } else {
                Some(writer)
            }
        };
        full.map_or(Ok(()), |writer| self.seal(writer))
    }

    fn begin_pack(&self) -> Result<PackWriter, StoreError> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let tmp = self.store.org_dir.join("tmp");
        let unavailable =
            |error: io::Error| StoreError::unavailable(format!("write {}", tmp.display()), error);
        loop {
            let seed = (std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
            let name = format!(
                "{:016x}{:016x}",
                RandomState::new().hash_one(seed),
                RandomState::new().hash_one(seed)
            );
            let path = tmp.join(&name);
            let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other.map_err(unavailable)?,
            };
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
                .map_err(|error| unavailable(error.into()))?;
            // An opener's sweep may have been between our create and our lock; then the name is gone.
            if !path.try_exists().map_err(unavailable)? {
                continue;
            }
            let mut writer =
                PackWriter { file, path, name, len: 0, index: PackIndex::default(), renamed: false };
            writer.write(&pack::header()).map_err(unavailable)?;
            return Ok(writer);
        }
    }

    fn seal(&self, mut writer: PackWriter) -> Result<(), StoreError> {
        let unavailable = |what: &PackWriter, error: io::Error| {
            StoreError::unavailable(format!("seal {}", what.path.display()), error)
        };
        let index = writer.index.encode(writer.len);
        writer.write(&index).map_err(|error| unavailable(&writer, error))?;
        writer.file.sync_all().map_err(|error| unavailable(&writer, error))?;
        // After the flush: a pack that is visible is whole, also after a power cut.
        fs::rename(&writer.path, self.store.pack_path(&writer.name))
            .map_err(|error| unavailable(&writer, error))?;
        writer.renamed = true;
        self.stored_bytes_new.fetch_add(writer.len, Ordering::Relaxed);
        self.store.catalogue_mut().add(&writer.name, &writer.index, None);
        Ok(())
    }
}

impl PackWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn append(
        &mut self,
        codec: Codec,
        plain_len: u32,
        stored: &[u8],
        blocks: &[(BlockHash, u32)],
    ) -> io::Result<()> {
        let lengths: Vec<u32> = blocks.iter().map(|(_, len)| *len).collect();
        self.write(&pack::frame_header(codec, plain_len, stored.len() as u32, &lengths))?;
        let number = self.index.frames.len() as u32;
        let stored_len = stored.len() as u32;
        self.index.frames.push(Frame { offset: self.len, stored_len, plain_len, codec });
        let mut offset = 0;
        for (hash, len) in blocks {
            self.index.blocks.push(BlockRecord { hash: *hash, frame: number, offset, len: *len });
            offset += len;
        }
        self.write(stored)
    }
}

impl Upload for DirectoryUpload<'_> {
    fn put(&self, block: &Block<'_>) -> Result<bool, StoreError> {
        let hash = block.hash();
        if self.store.catalogue().has(&hash) {
            return Ok(false);
        }
        let shard = &self.claimed[usize::from(hash.as_bytes()[0] >> 4)];
        if !shard.lock().unwrap_or_else(PoisonError::into_inner).insert(hash) {
            return Ok(false);
        }
        if let Err(error) = self.write(block) {
            self.failed.store(true, Ordering::SeqCst);
            return Err(error);
        }
        self.blocks_new.fetch_add(1, Ordering::Relaxed);
        self.bytes_new.fetch_add(block.bytes().len() as u64, Ordering::Relaxed);
        Ok(true)
    }

    fn finish(mut self: Box<Self>) -> Result<UploadReport, StoreError> {
        if self.failed.load(Ordering::SeqCst) {
            return Err(StoreError::UploadFailed);
        }
        for number in 0..GROUPS {
            let group = std::mem::take(self.groups[number].get_mut().unwrap_or_else(PoisonError::into_inner));
            if !group.blocks.is_empty() {
                self.append(&group.plain, &group.blocks)?;
            }
        }
        let last = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(writer) = last {
            self.seal(writer)?;
        }
        let stored_bytes_new = self.stored_bytes_new.load(Ordering::Relaxed);
        // Always, not only when a pack of ours was sealed: a block that this upload found in the store may be
        // in a pack whose rename another process has not flushed yet.
        sync_dir(&self.store.packs_dir())?;
        Ok(UploadReport {
            blocks_new: self.blocks_new.load(Ordering::Relaxed),
            bytes_new: self.bytes_new.load(Ordering::Relaxed),
            stored_bytes_new,
        })
    }
}
