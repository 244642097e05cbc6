//! Looking at every byte of a pack: header, frames with their headers, blocks, index.
//!
//! What stays true: nothing but the pack itself is believed, not the catalogue and not the index where the frames
//! say something else; memory is that of the index and some frames. What does not belong here: which blocks are
//! needed, and what to do about damage.

use covey_types::BlockHash;

use super::files::{PackFiles, ReadPackError};
use super::pack::{self, BlockRecord, PackIndex};
use super::{PackName, PackStore};
use crate::backend::{BackendError, Key};
use crate::block::StoreError;

/// Bytes that one request to the backend reads ahead.
const READ_BYTES: usize = 4 * 1024 * 1024;

/// What a look at every byte of a pack found.
#[derive(Debug, Clone, Default)]
pub(crate) struct PackCheck {
    /// Length of the file in bytes.
    pub(crate) file_len: u64,
    /// Blocks whose hash is right.
    pub(crate) blocks: u64,
    /// Blocks whose bytes are not theirs, and why.
    pub(crate) damaged: Vec<(BlockHash, String)>,
    /// What else is not as it was written, one line each.
    pub(crate) problems: Vec<String>,
}

/// Reads a file front to back in few requests.
struct Ahead<'a> {
    files: &'a PackFiles,
    key: &'a Key,
    at: u64,
    bytes: Vec<u8>,
}

impl Ahead<'_> {
    /// Fewer than `len` where the file ends.
    fn read(&mut self, offset: u64, len: usize) -> Result<&[u8], ReadPackError> {
        let end = offset.saturating_add(len as u64);
        if offset < self.at || end > self.at + self.bytes.len() as u64 {
            self.bytes = match self.files.read(self.key, offset, len.max(READ_BYTES)) {
                // Damage behind the wanted bytes is no damage to them.
                Err(ReadPackError::Damaged(_)) => self.files.read(self.key, offset, len)?,
                read => read?,
            };
            self.at = offset;
        }
        let from = ((offset - self.at) as usize).min(self.bytes.len());
        let to = (from + len).min(self.bytes.len());
        Ok(&self.bytes[from..to])
    }
}

impl PackStore {
    /// Looks at every byte of a pack; none when it is gone.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when it cannot be read now; damage is in the result.
    pub(crate) fn check_pack(&self, name: &PackName) -> Result<Option<PackCheck>, StoreError> {
        match self.look_at(name) {
            Ok(check) => Ok(Some(check)),
            Err(StoreOrBackend::Backend(BackendError::NotFound { .. })) => Ok(None),
            Err(StoreOrBackend::Backend(error)) => Err(error.into()),
            Err(StoreOrBackend::Store(error)) => Err(error),
        }
    }

    fn look_at(&self, name: &PackName) -> Result<PackCheck, StoreOrBackend> {
        let key = self.key_of(name).map_err(StoreOrBackend::Store)?;
        let files = &self.files;
        let mut check = PackCheck { file_len: self.backend.file_len(&key)?, ..PackCheck::default() };
        let (mut index, is_own) = match damage_or(PackIndex::read(files, &key))? {
            Ok(index) => (index, true),
            Err(detail) => {
                let (index, complete) = PackIndex::rebuild(files, &key, &self.hasher)?;
                let outcome =
                    if complete { "every block could still be found" } else { "blocks may be lost" };
                check.problems.push(format!("the index is damaged: {detail}; {outcome}"));
                (index, false)
            }
        };
        let mut ahead = Ahead { files, key: &key, at: 0, bytes: Vec::new() };
        match damage_or(ahead.read(0, pack::HEADER_BYTES as usize))? {
            Ok(header) if pack::is_header(header) => {}
            Ok(_) => check.problems.push("the header is not a pack's".to_owned()),
            Err(detail) => check.problems.push(format!("the header is damaged: {detail}")),
        }
        index.blocks.sort_unstable_by_key(|block| (block.frame, block.offset));
        let mut rest = index.blocks.as_slice();
        let mut at = pack::HEADER_BYTES;
        for (number, frame) in index.frames.iter().enumerate() {
            let count = rest.partition_point(|block| block.frame as usize == number);
            let (blocks, behind) = rest.split_at(count);
            rest = behind;
            if is_own {
                let head = head_of(frame, blocks);
                let found = damage_or(ahead.read(at, head.as_ref().map_or(0, Vec::len)))?;
                if head.is_none_or(|head| found != Ok(&head) || at + head.len() as u64 != frame.offset) {
                    check.problems.push(format!("the header of frame {number} is damaged"));
                }
            }
            at = frame.end();
            let stored = damage_or(ahead.read(frame.offset, frame.stored_len as usize))?;
            match stored.and_then(|stored| pack::open_frame(stored.to_vec(), frame)) {
                Err(detail) => {
                    check.damaged.extend(blocks.iter().map(|block| (block.hash, detail.clone())));
                }
                Ok(plain) => {
                    for block in blocks {
                        let range = block.offset as usize..block.offset as usize + block.len as usize;
                        match plain.get(range) {
                            Some(bytes) if self.hasher.hash(bytes) == block.hash => check.blocks += 1,
                            _ => check.damaged.push((block.hash, "the hash differs".to_owned())),
                        }
                    }
                }
            }
        }
        let plain_len = damage_or(files.read_tail(&key, 1))?.map_or(check.file_len, |tail| tail.file_len);
        if is_own && at + index.encoded_len() != plain_len {
            check.problems.push("there are bytes between the last frame and the index".to_owned());
        }
        Ok(check)
    }
}

/// What must stand before the frame's stored bytes; none when its blocks are not just its plain bytes.
fn head_of(frame: &pack::Frame, blocks: &[BlockRecord]) -> Option<Vec<u8>> {
    let mut end = 0;
    for block in blocks {
        (block.offset == end).then_some(())?;
        end += block.len;
    }
    let lengths: Vec<u32> = blocks.iter().map(|block| block.len).collect();
    (end == frame.plain_len)
        .then(|| pack::frame_header(frame.codec, frame.plain_len, frame.stored_len, &lengths))
}

/// Damage is what is looked for; only what cannot be read now ends the look.
fn damage_or<T>(read: Result<T, ReadPackError>) -> Result<Result<T, String>, BackendError> {
    match read {
        Ok(read) => Ok(Ok(read)),
        Err(ReadPackError::Damaged(detail)) => Ok(Err(detail)),
        Err(ReadPackError::Backend(error)) => Err(error),
    }
}

enum StoreOrBackend {
    Store(StoreError),
    Backend(BackendError),
}

impl From<BackendError> for StoreOrBackend {
    fn from(error: BackendError) -> Self {
        Self::Backend(error)
    }
}
