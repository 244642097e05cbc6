//! Writing packs: blocks are gathered in groups, compressed outside every lock, appended to one pack at a time,
//! and a full pack is sealed while others write the next.
//!
//! What stays true: a pack is published whole and durable, and known to the catalogue only then (I6). A failed
//! write poisons the upload, because an address that was claimed and not written must never count as stored.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use covey_types::BlockHash;

use super::pack::{self, BlockRecord, Codec, Frame, PackIndex};
use super::{PackName, PackStore};
use crate::backend::{BackendError, NewFile};
use crate::block::{Block, StoreError, Upload, UploadReport};

/// A pack is sealed when it has grown to this; four times as big would quarter the requests to an object store
/// and quadruple what a rewrite by garbage collection costs.
const PACK_BYTES: u64 = 32 * 1024 * 1024;
/// Small blocks are compressed together up to this many plain bytes. One damaged byte costs at most one group,
/// and reading one block of it unfolds the whole of it.
const GROUP_BYTES: usize = 1024 * 1024;
/// The level of the sleep path: level 3 is 8 % smaller for nearly twice the time, and a later recompression can do
/// it at leisure.
const LEVEL: i32 = 1;
/// Packs that are being made durable while others are written. More would only queue at the disk.
const SEALING_MAX: usize = 3;
/// Pieces of memory for large compressed blocks that are kept for the next.
const LARGE_SPARE_MAX: usize = 2;
/// Groups that fill at the same time, so that threads do not wait for each other and neighbours stay together.
const GROUPS: usize = 8;

/// How an upload packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// zstd's level.
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
    file: Box<dyn NewFile>,
    name: PackName,
    len: u64,
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
    /// Memory for compressed bytes, as many as threads have compressed at once: fresh pages cost more than filling
    /// them, and in each thread they would stay.
    spare: Mutex<Vec<Vec<u8>>>,
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
            spare: Mutex::default(),
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
            return self.append(block.bytes(), &[(block.hash(), len)]);
        }
        let full = {
            let mut group =
                self.groups[GROUP.with(|group| *group)].lock().unwrap_or_else(PoisonError::into_inner);
            group.plain.extend_from_slice(block.bytes());
            group.blocks.push((block.hash(), len));
            (group.plain.len() >= self.packing.group_bytes).then(|| std::mem::take(&mut *group))
        };
        let Some(mut full) = full else { return Ok(()) };
        self.append(&full.plain, &full.blocks)?;
        // The next group of this thread takes over the memory.
        let mut group =
            self.groups[GROUP.with(|group| *group)].lock().unwrap_or_else(PoisonError::into_inner);
        if group.plain.capacity() == 0 {
            full.plain.clear();
            group.plain = full.plain;
        }
        Ok(())
    }

    fn append(&self, plain: &[u8], blocks: &[(BlockHash, u32)]) -> Result<(), StoreError> {
        let mut packed = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        let codec = pack::compress(plain, self.packing.level, &mut packed)
            .map_err(|error| StoreError::unavailable("compress a block", error))?;
        let stored = if codec == Codec::Raw { plain } else { &packed };
        let full = {
            let mut slot = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let mut writer = match slot.take() {
                Some(writer) => writer,
                None => self.begin_pack()?,
            };
            writer.append(codec, plain.len() as u32, stored, blocks)?;
            if writer.len < PACK_BYTES {
                *slot = Some(writer);
                None
            } else {
                Some(writer)
            }
        };
        self.keep_spare(packed);
        full.map_or(Ok(()), |writer| self.seal(writer))
    }

    /// Keeps memory for the next frame; of large pieces only a few, or each thread that ever packed a large block
    /// would have one in the end.
    fn keep_spare(&self, packed: Vec<u8>) {
        let is_large = |packed: &Vec<u8>| packed.capacity() > 2 * GROUP_BYTES;
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_large(&packed) || spare.iter().filter(|packed| is_large(packed)).count() < LARGE_SPARE_MAX {
            spare.push(packed);
        }
    }

    fn begin_pack(&self) -> Result<PackWriter, StoreError> {
        let mut writer = PackWriter {
            file: self.store.backend.create()?,
            name: PackName::random(),
            len: 0,
            index: PackIndex::default(),
        };
        writer.write(&pack::header())?;
        Ok(writer)
    }

    fn seal(&self, mut writer: PackWriter) -> Result<(), StoreError> {
        let index = writer.index.encode(writer.len);
        writer.write(&index)?;
        let PackWriter { file, name, len, index } = writer;
        let key = self.store.key_of(&name)?;
        let publish = move || file.publish(&key);
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
    fn write(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        self.file.append(bytes)?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn append(
        &mut self,
        codec: Codec,
        plain_len: u32,
        stored: &[u8],
        blocks: &[(BlockHash, u32)],
    ) -> Result<(), BackendError> {
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

impl Upload for PackUpload<'_> {
    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn put(&self, block: &Block<'_>) -> Result<bool, StoreError> {
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
            let group = std::mem::take(self.groups[number].get_mut().unwrap_or_else(PoisonError::into_inner));
            if !group.blocks.is_empty() {
                self.append(&group.plain, &group.blocks)?;
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
