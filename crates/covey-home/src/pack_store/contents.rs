//! Looking at packs as packs: what each holds, and whether it is right. Garbage collection, recompression, copying
//! to another store and verification are built on this, and need to know no backend.

use std::collections::BTreeSet;

use covey_types::BlockHash;

use super::files::{Form, ReadPackError};
use super::pack::{self, BlockRecord, PackIndex};
use super::{PackName, PackStore};
use crate::backend::BackendError;
use crate::block::StoreError;
use crate::keys::KeyId;

/// Counts what [`PackStore::verify_packs`] looked at.
#[derive(Debug, Clone, Default)]
pub struct PackReport {
    /// Packs.
    pub packs: u64,
    /// Blocks whose hash was right.
    pub blocks: u64,
    /// What was not, one line each.
    pub problems: Vec<String>,
}

/// A block as a pack's index names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedBlock {
    /// Its address.
    pub hash: BlockHash,
    /// Length of its plain bytes.
    pub len: u32,
    /// Its share of the pack's stored bytes: the frame's, divided by plain length, rounded down.
    pub stored_len: u32,
}

/// What a pack holds, from its index; nothing but the index was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackContents {
    /// Length of the file in bytes.
    pub file_len: u64,
    /// Ascending by hash.
    pub blocks: Vec<PackedBlock>,
    /// Whether the index is damaged and these are the blocks that could be found without it.
    pub reindexed: bool,
    /// Whether it was packed at leisure.
    pub thorough: bool,
    /// What it is encrypted with; none: it is not.
    pub key: Option<KeyId>,
}

impl PackStore {
    /// The bytes of a block in its frame's plain ones, if they are right.
    fn bytes_of<'a>(&self, plain: &'a [u8], block: &BlockRecord) -> Option<&'a [u8]> {
        let range = block.offset as usize..block.offset as usize + block.len as usize;
        plain.get(range).filter(|bytes| self.hasher.hash(bytes) == block.hash)
    }

    /// The packs that the backend lists now.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when they cannot be listed.
    pub fn packs(&self) -> Result<Vec<PackName>, StoreError> {
        self.list_packs()
    }

    /// What a pack holds; none when it is gone.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when it cannot be read now.
    pub fn pack_contents(&self, name: &PackName) -> Result<Option<PackContents>, StoreError> {
        let key = self.key_of(name)?;
        let read = || -> Result<(u64, PackIndex, bool), BackendError> {
            let file_len = self.backend.file_len(&key)?;
            match self.index_of(&key) {
                Ok(index) => Ok((file_len, index, false)),
                Err(ReadPackError::Backend(error)) => Err(error),
                Err(ReadPackError::Damaged(_)) => {
                    Ok((file_len, PackIndex::rebuild(&self.files, &key, &self.hasher)?.0, true))
                }
            }
        };
        let form = match self.files.known_form(&key) {
            Some(form) => Ok(form),
            None => self.files.form_of_file(&key),
        };
        let key = match form {
            Ok(Form::Sealed(id)) => Some(id),
            // A damaged header is found by whoever reads the pack.
            Ok(Form::Plain) | Err(ReadPackError::Damaged(_)) => None,
            Err(ReadPackError::Backend(BackendError::NotFound { .. })) => return Ok(None),
            Err(ReadPackError::Backend(error)) => return Err(error.into()),
        };
        let (file_len, index, reindexed) = match read() {
            Ok(found) => found,
            Err(BackendError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let thorough = index.thorough;
        let blocks = index.blocks.iter().map(|block| {
            let frame = index.frames[block.frame as usize];
            let share =
                u64::from(frame.stored_len) * u64::from(block.len) / u64::from(frame.plain_len.max(1));
            PackedBlock { hash: block.hash, len: block.len, stored_len: share as u32 }
        });
        Ok(Some(PackContents { file_len, blocks: blocks.collect(), reindexed, thorough, key }))
    }

    /// Reads every block of a pack in the order in which they lie there and gives each to `take`, whose hash was
    /// checked; `damaged` gets those whose bytes are not theirs, with the reason. Memory is that of the index and
    /// one frame. None when the pack is gone.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when it cannot be read now, and whatever `take` returns.
    pub fn read_pack(
        &self,
        name: &PackName,
        mut take: impl FnMut(&BlockHash, &[u8]) -> Result<(), StoreError>,
        mut damaged: impl FnMut(&BlockHash, &str),
    ) -> Result<Option<()>, StoreError> {
        let key = self.key_of(name)?;
        let index = match self.index_of(&key) {
            Ok(index) => index,
            Err(ReadPackError::Damaged(_)) => match PackIndex::rebuild(&self.files, &key, &self.hasher) {
                Ok((index, _)) => index,
                Err(BackendError::NotFound { .. }) => return Ok(None),
                Err(error) => return Err(error.into()),
            },
            Err(ReadPackError::Backend(BackendError::NotFound { .. })) => return Ok(None),
            Err(ReadPackError::Backend(error)) => return Err(error.into()),
        };
        let mut blocks = index.blocks;
        blocks.sort_unstable_by_key(|block| (block.frame, block.offset));
        for of_frame in blocks.chunk_by(|one, other| one.frame == other.frame) {
            let frame = &index.frames[of_frame[0].frame as usize];
            let mut reads = self.reads_max();
            let plain = loop {
                reads -= 1;
                let plain = match pack::read_frame(&self.files, &key, frame) {
                    Ok(plain) => Ok(plain),
                    Err(ReadPackError::Damaged(detail)) => Err(detail),
                    Err(ReadPackError::Backend(BackendError::NotFound { .. })) => return Ok(None),
                    Err(ReadPackError::Backend(error)) => return Err(error.into()),
                };
                let is_right = plain.as_ref().is_ok_and(|plain| {
                    reads == 0 || of_frame.iter().all(|block| self.bytes_of(plain, block).is_some())
                });
                if is_right || reads == 0 {
                    break plain;
                }
            };
            for block in of_frame {
                match &plain {
                    Err(detail) => damaged(&block.hash, detail),
                    Ok(plain) => match self.bytes_of(plain, block) {
                        Some(bytes) => take(&block.hash, bytes)?,
                        None => damaged(&block.hash, "the hash differs"),
                    },
                }
            }
        }
        Ok(Some(()))
    }

    /// Reads every block of every pack and checks its hash, and each pack's header.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when that cannot be done; damage is in the report.
    pub fn verify_packs(&self) -> Result<PackReport, StoreError> {
        self.refresh()?;
        let mut report = PackReport { problems: self.problems(), ..PackReport::default() };
        for name in self.list_packs()? {
            let key = self.key_of(&name)?;
            let mut problems = Vec::new();
            let mut blocks = 0;
            let header = || self.files.read(&key, 0, pack::HEADER_BYTES as usize);
            let mut start = header();
            for _ in 1..self.reads_max() {
                if start.as_ref().is_ok_and(|start| !pack::is_header(start)) {
                    start = header();
                }
            }
            match start {
                Ok(start) if pack::is_header(&start) => {}
                Ok(_) => problems.push(format!("pack {name}: the header is not a pack's")),
                Err(ReadPackError::Damaged(detail)) => problems.push(format!("pack {name}: {detail}")),
                // Collected since it was listed.
                Err(ReadPackError::Backend(BackendError::NotFound { .. })) => continue,
                Err(ReadPackError::Backend(error)) => return Err(error.into()),
            }
            let read = self.read_pack(
                &name,
                |_, _| {
                    blocks += 1;
                    Ok(())
                },
                |hash, detail| problems.push(format!("pack {name}: block {hash} is damaged: {detail}")),
            )?;
            if read.is_some() {
                report.packs += 1;
                report.blocks += blocks;
                report.problems.append(&mut problems);
            }
        }
        Ok(report)
    }

    /// What new packs are encrypted with; none: they are not.
    pub fn newest_key(&self) -> Option<KeyId> {
        match self.files.form() {
            Form::Plain => None,
            Form::Sealed(id) => Some(id),
        }
    }

    /// Takes up keys that others have added.
    pub(crate) fn reload_keys(&self) -> Result<(), StoreError> {
        self.files.reload_keys()
    }

    /// Whether the ring holds keys that new packs are not encrypted with.
    pub(crate) fn has_old_keys(&self) -> bool {
        self.files.keys().is_some_and(|keys| keys.ids().len() > 1)
    }

    /// Takes keys out of the ring that no pack is encrypted with. For garbage collection only, which has made sure
    /// that no snapshot is going to need a pack that is not listed now. Gives those that are gone.
    pub(crate) fn retire_keys(&self) -> Result<Vec<KeyId>, StoreError> {
        if self.files.keys().is_none_or(|keys| keys.ids().len() < 2) {
            return Ok(Vec::new());
        }
        let mut used = BTreeSet::new();
        for name in self.list_packs()? {
            match self.files.form_of_file(&self.key_of(&name)?) {
                Ok(Form::Sealed(id)) => drop(used.insert(id)),
                Ok(Form::Plain) | Err(ReadPackError::Backend(BackendError::NotFound { .. })) => {}
                // Which key it needs is not known, so all of them stay.
                Err(ReadPackError::Damaged(_)) => return Ok(Vec::new()),
                Err(ReadPackError::Backend(error)) => return Err(error.into()),
            }
        }
        self.files.retire_keys(|id| used.contains(id))
    }

    /// Deletes a pack. For garbage collection only (I8), which has made sure that nothing needs it; tells whether
    /// it was there.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when it is not certain that it is gone.
    pub fn remove_pack(&self, name: &PackName) -> Result<bool, StoreError> {
        let removed = self.backend.remove(&self.key_of(name)?)?;
        self.catalogue_mut().bury(name);
        Ok(removed)
    }
}
