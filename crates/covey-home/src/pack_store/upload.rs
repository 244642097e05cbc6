//! Writing packs: blocks are gathered in groups, compressed outside every lock, appended to one pack at a time,
//! and a full pack is sealed while others write the next.
//!
//! What stays true: a pack is published whole and durable, and known to the catalogue only then (I6). A failed
//! write poisons the upload, because an address that was claimed and not written must never count as stored.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use covey_types::BlockHash;

use super::files::NewPack;
use super::pack::{self, BlockRecord, Codec, Frame, PackIndex};
use super::presses::Presses;
use super::{PackName, PackStore};
use crate::backend::BackendError;
use crate::block::{Block, BlockHasher, StoreError, Upload, UploadReport};

/// A pack is sealed when it has grown to this; four times as big would quarter the requests to an object store
/// and quadruple what a rewrite by garbage collection costs.
const PACK_BYTES: u64 = 32 * 1024 * 1024;
/// A pack is also sealed when it holds so many blocks: its index is in memory until then, and tiny blocks would
/// make it as large as the pack.
const PACK_BLOCKS: usize = 65_536;
/// Small blocks are compressed together up to this many plain bytes. One damaged byte costs at most one group,
/// and reading one block of it unfolds the whole of it.
const GROUP_BYTES: usize = 1024 * 1024;
/// The level of the sleep path: level 3 is 8 % smaller for nearly twice the time, and a later recompression can do
/// it at leisure.
const LEVEL: i32 = 1;
/// Packs that are being made durable while others are written. More would only queue at the disk.
const SEALING_MAX: usize = 3;
/// Groups that fill at the same time, so that threads do not wait for each other and neighbours stay together.
const GROUPS: usize = 4;

/// How an upload packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// zstd's level. Packs that are packed harder than a secure does say so, and need not be packed again.
    pub level: i32,
    /// Plain bytes of small blocks that are compressed together. Blocks from half of it on get a frame of their
    /// own.
    pub group_bytes: usize,
    /// What to do with a block that the store has already.
    pub existing: Existing,
}

/// See [`Packing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Nothing: it is stored.
    Keep,
    /// Write it once more, because the pack that has it is going to be removed.
    Copy,
}

impl Default for Packing {
    fn default() -> Self {
        Self { level: LEVEL, group_bytes: GROUP_BYTES, existing: Existing::Keep }
    }
}

#[derive(Debug, Default)]
struct Group {
    plain: Vec<u8>,
    blocks: Vec<(BlockHash, u32)>,
}

#[derive(Debug)]
struct PackWriter {
    file: NewPack,
    name: PackName,
    index: PackIndex,
}

/// A whole pack on its way to the disk or the bucket, in a thread of its own: waiting for a flush needs no
/// processor.
#[derive(Debug)]
struct Sealing {
    thread: JoinHandle<Result<(), BackendError>>,
    name: PackName,
    len: u64,
    index: PackIndex,
}

/// Blocks on their way into packs.
#[derive(Debug)]
pub struct PackUpload<'a> {
    store: &'a PackStore,
    packing: Packing,
    epoch: u64,
    claimed: [Mutex<HashSet<BlockHash>>; 16],
    groups: [Mutex<Group>; GROUPS],
    writer: Mutex<Option<PackWriter>>,
    sealing: Mutex<VecDeque<Sealing>>,
    presses: Presses,
    failed: AtomicBool,
    sealed_any: AtomicBool,
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

fn cannot_compress(error: io::Error) -> StoreError {
    StoreError::unavailable("compress a block", error)
}

impl<'a> PackUpload<'a> {
    pub(super) fn new(store: &'a PackStore, packing: Packing, epoch: u64) -> Self {
        Self {
            store,
            packing,
            epoch,
            claimed: Default::default(),
            groups: Default::default(),
            writer: Mutex::default(),
            sealing: Mutex::default(),
            presses: Presses::new(packing.level),
            failed: AtomicBool::new(false),
            sealed_any: AtomicBool::new(false),
            blocks_new: AtomicU64::new(0),
            bytes_new: AtomicU64::new(0),
            stored_bytes_new: AtomicU64::new(0),
        }
    }

    fn write(&self, block: &Block<'_>) -> Result<(), StoreError> {
        let len = block.bytes().len() as u32;
        if block.bytes().len() >= self.packing.group_bytes / 2 {
            let blocks = [(block.hash(), len)];
            let appended = self.presses.with(|press| {
                let (codec, stored) = press.compress(block.bytes()).map_err(cannot_compress)?;
                self.append((codec, len, stored), &blocks)
            });
            return self.seal_full(appended.map_err(cannot_compress)??);
        }
        let number = GROUP.with(|group| *group);
        loop {
            {
                let mut group = self.groups[number].lock().unwrap_or_else(PoisonError::into_inner);
                if group.plain.len() < self.packing.group_bytes {
                    if group.plain.capacity() == 0 {
                        // Whole from the beginning: growing it would leave holes in the heap.
                        group.plain.reserve_exact(self.packing.group_bytes + self.packing.group_bytes / 2);
                    }
                    group.plain.extend_from_slice(block.bytes());
                    group.blocks.push((block.hash(), len));
                    if group.plain.len() < self.packing.group_bytes {
                        return Ok(());
                    }
                    drop(group);
                    return self.write_group(number, self.packing.group_bytes);
                }
            }
            // Full, and whoever filled it waits for a press.
            self.write_group(number, self.packing.group_bytes)?;
        }
    }

    /// Compresses and writes a group if it still holds so many plain bytes.
    fn write_group(&self, number: usize, plain_bytes_min: usize) -> Result<(), StoreError> {
        let appended = self.presses.with(|press| {
            let blocks = {
                let mut group = self.groups[number].lock().unwrap_or_else(PoisonError::into_inner);
                if group.plain.len() < plain_bytes_min {
                    return Ok(None);
                }
                // The group goes on with the memory that the press has.
                std::mem::swap(&mut group.plain, &mut press.group);
                std::mem::take(&mut group.blocks)
            };
            let plain_len = press.group.len() as u32;
            let (codec, stored) = press.compress_group().map_err(cannot_compress)?;
            self.append((codec, plain_len, stored), &blocks)
        });
        self.seal_full(appended.map_err(cannot_compress)??)
    }

    /// Without a press in hand: sealing may wait for a disk.
    fn seal_full(&self, full: Option<PackWriter>) -> Result<(), StoreError> {
        full.map_or(Ok(()), |writer| self.seal(writer))
    }

    /// Adds a frame to the pack that is being written; gives the pack if it is full now.
    fn append(
        &self,
        (codec, plain_len, stored): (Codec, u32, &[u8]),
        blocks: &[(BlockHash, u32)],
    ) -> Result<Option<PackWriter>, StoreError> {
        let mut slot = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let mut writer = match slot.take() {
            Some(writer) => writer,
            None => self.begin_pack()?,
        };
        writer.append(codec, plain_len, stored, blocks)?;
        if writer.file.plain_len() < PACK_BYTES && writer.index.blocks.len() < PACK_BLOCKS {
            *slot = Some(writer);
            return Ok(None);
        }
        Ok(Some(writer))
    }

    fn begin_pack(&self) -> Result<PackWriter, StoreError> {
        let name = PackName::random();
        let file = self.store.files.create(self.store.key_of(&name)?)?;
        let index = PackIndex { thorough: self.packing.level > LEVEL, ..PackIndex::default() };
        let mut writer = PackWriter { file, name, index };
        writer.file.append(&pack::header())?;
        Ok(writer)
    }

    fn seal(&self, mut writer: PackWriter) -> Result<(), StoreError> {
        let index = writer.index.encode(writer.file.plain_len());
        writer.file.append(&index)?;
        let len = writer.file.close()?;
        let PackWriter { file, name, index } = writer;
        let publish = move || file.publish();
        let thread = std::thread::Builder::new()
            .spawn(publish)
            .map_err(|error| StoreError::unavailable("start a thread that makes a pack durable", error))?;
        let first = {
            let mut sealing = self.sealing.lock().unwrap_or_else(PoisonError::into_inner);
            sealing.push_back(Sealing { thread, name, len, index });
            if sealing.len() > SEALING_MAX { sealing.pop_front() } else { None }
        };
        first.map_or(Ok(()), |sealing| self.sealed(sealing))
    }

    /// Waits for a pack to be durable and makes it known.
    fn sealed(&self, sealing: Sealing) -> Result<(), StoreError> {
        let Sealing { thread, name, len, index } = sealing;
        match thread.join() {
            Ok(published) => published?,
            Err(_) => return Err(StoreError::UploadFailed),
        }
        self.stored_bytes_new.fetch_add(len, Ordering::Relaxed);
        self.store.catalogue_mut().add(name, &index, None);
        // From here on the catalogue knows them, and memory is bounded by the packs on their way. Copies that were
        // asked for stay claimed, or each would be written twice.
        if self.packing.existing == Existing::Copy {
            return Ok(());
        }
        self.sealed_any.store(true, Ordering::SeqCst);
        for block in &index.blocks {
            self.claims(&block.hash).remove(&block.hash);
        }
        Ok(())
    }

    fn claims(&self, hash: &BlockHash) -> MutexGuard<'_, HashSet<BlockHash>> {
        let shard = &self.claimed[usize::from(hash.as_bytes()[0] >> 4)];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PackUpload<'_> {
    fn drop(&mut self) {
        // Packs that were whole when the upload failed stay, as blocks that nobody names; their threads must not
        // outlive the store.
        for sealing in self.sealing.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            drop(sealing.thread.join());
        }
    }
}

impl PackWriter {
    fn append(
        &mut self,
        codec: Codec,
        plain_len: u32,
        stored: &[u8],
        blocks: &[(BlockHash, u32)],
    ) -> Result<(), BackendError> {
        let lengths: Vec<u32> = blocks.iter().map(|(_, len)| *len).collect();
        self.file.append(&pack::frame_header(codec, plain_len, stored.len() as u32, &lengths))?;
        let number = self.index.frames.len() as u32;
        let stored_len = stored.len() as u32;
        self.index.frames.push(Frame { offset: self.file.plain_len(), stored_len, plain_len, codec });
        let mut offset = 0;
        for (hash, len) in blocks {
            self.index.blocks.push(BlockRecord { hash: *hash, frame: number, offset, len: *len });
            offset += len;
        }
        self.file.append(stored)
    }
}

impl Upload for PackUpload<'_> {
    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn hasher(&self) -> &BlockHasher {
        &self.store.hasher
    }

    fn put(&self, block: &Block<'_>) -> Result<bool, StoreError> {
        block.check_hasher(&self.store.hasher)?;
        let hash = block.hash();
        if self.packing.existing == Existing::Keep && self.store.catalogue().has(&hash) {
            return Ok(false);
        }
        if !self.claims(&hash).insert(hash) {
            return Ok(false);
        }
        // Between our first look and our claim its pack may have been sealed, which ends the claim of whoever wrote
        // it.
        if self.sealed_any.load(Ordering::SeqCst)
            && self.packing.existing == Existing::Keep
            && self.store.catalogue().has(&hash)
        {
            self.claims(&hash).remove(&hash);
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
            let is_empty =
                self.groups[number].get_mut().unwrap_or_else(PoisonError::into_inner).blocks.is_empty();
            if !is_empty {
                self.write_group(number, 0)?;
            }
        }
        let last = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(writer) = last {
            self.seal(writer)?;
        }
        while let Some(sealing) = self.sealing.get_mut().unwrap_or_else(PoisonError::into_inner).pop_front() {
            self.sealed(sealing)?;
        }
        let stored_bytes_new = self.stored_bytes_new.load(Ordering::Relaxed);
        // Always, not only when a pack of ours was sealed: a block that this upload found in the store may be
        // in a pack whose rename another process has not flushed yet.
        self.store.backend.flush(&self.store.packs_dir)?;
        self.store.catalogue_mut().settle(self.store.backend.is_remote());
        Ok(UploadReport {
            blocks_new: self.blocks_new.load(Ordering::Relaxed),
            bytes_new: self.bytes_new.load(Ordering::Relaxed),
            stored_bytes_new,
        })
    }
}
