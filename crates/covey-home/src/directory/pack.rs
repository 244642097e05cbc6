//! The byte format of a pack file, described in `docs/formats/home-store.md`, section 2.
//!
//! What stays true: a pack is written once, front to back; every declared length is compared with a limit and
//! with the file's length before it is used; a pack whose index is damaged can be indexed again from its
//! frames. What does not belong here: which packs exist and who looks for what.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use covey_types::BlockHash;

use crate::block::{BLOCK_BYTES_MAX, StoreError};

pub(crate) const HEADER_BYTES: u64 = 16;
const HEADER_MAGIC: &[u8; 8] = b"COVEYPCK";
const FOOTER_MAGIC: &[u8; 8] = b"COVEYEND";
const FRAME_MAGIC: [u8; 4] = *b"FRAM";
const VERSION: u32 = 1;
const FRAME_HEADER_BYTES: usize = 20;
const FRAME_RECORD_BYTES: usize = 20;
const BLOCK_RECORD_BYTES: usize = 44;
const FOOTER_BYTES: usize = 56;
/// More frames or blocks than any writer makes (a pack is sealed at about 32 MiB); larger counts are damage.
const RECORDS_MAX: u32 = 1 << 22;

/// How a frame's bytes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    Raw,
    Zstd,
}

impl Codec {
    const fn byte(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Zstd => 1,
        }
    }

    const fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Raw),
            1 => Some(Self::Zstd),
            _ => None,
        }
    }
}

/// Where the stored bytes of a group of blocks lie in a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Offset of the stored bytes (behind the frame header).
    pub(crate) offset: u64,
    pub(crate) stored_len: u32,
    pub(crate) plain_len: u32,
    pub(crate) codec: Codec,
}

impl Frame {
    pub(crate) fn end(&self) -> u64 {
        self.offset + u64::from(self.stored_len)
    }
}

/// Where a block lies in its frame's plain bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockRecord {
    pub(crate) hash: BlockHash,
    pub(crate) frame: u32,
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

/// What a pack holds.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PackIndex {
    pub(crate) frames: Vec<Frame>,
    /// Sorted by hash, each once.
    pub(crate) blocks: Vec<BlockRecord>,
}

/// Compresses with level 1 and keeps the result only where it is smaller. The level is the sleep path's:
/// level 3 is 8 % smaller for nearly twice the time, and a later recompression can do it at leisure.
pub(crate) fn compress(plain: &[u8]) -> io::Result<(Codec, Option<Vec<u8>>)> {
    const LEVEL: i32 = 1;
    // Shorter than this, the frame's own overhead eats what zstd could save.
    const PLAIN_BYTES_MIN: usize = 64;
    if plain.len() < PLAIN_BYTES_MIN {
        return Ok((Codec::Raw, None));
    }
    let packed = zstd::bulk::compress(plain, LEVEL)?;
    if packed.len() + packed.len() / 32 < plain.len() {
        Ok((Codec::Zstd, Some(packed)))
    } else {
        Ok((Codec::Raw, None))
    }
}

pub(crate) fn header() -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    header[..8].copy_from_slice(HEADER_MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header
}

/// A frame's header and the lengths of its blocks, to be followed by the stored bytes.
pub(crate) fn frame_header(codec: Codec, plain_len: u32, stored_len: u32, lengths: &[u32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(FRAME_HEADER_BYTES + lengths.len() * 4);
    out.extend_from_slice(&FRAME_MAGIC);
    out.extend_from_slice(&[codec.byte(), 0, 0, 0]);
    out.extend_from_slice(&plain_len.to_le_bytes());
    out.extend_from_slice(&stored_len.to_le_bytes());
    out.extend_from_slice(&(lengths.len() as u32).to_le_bytes());
    for length in lengths {
        out.extend_from_slice(&length.to_le_bytes());
    }
    out
}

impl PackIndex {
    /// The index and footer of a pack whose frames end at `index_offset`.
    pub(crate) fn encode(&mut self, index_offset: u64) -> Vec<u8> {
        self.blocks.sort_unstable_by_key(|block| block.hash);
        let mut out = Vec::with_capacity(
            self.frames.len() * FRAME_RECORD_BYTES + self.blocks.len() * BLOCK_RECORD_BYTES + FOOTER_BYTES,
        );
        for frame in &self.frames {
            out.extend_from_slice(&frame.offset.to_le_bytes());
            out.extend_from_slice(&frame.stored_len.to_le_bytes());
            out.extend_from_slice(&frame.plain_len.to_le_bytes());
            out.extend_from_slice(&[frame.codec.byte(), 0, 0, 0]);
        }
        for block in &self.blocks {
            out.extend_from_slice(block.hash.as_bytes());
            out.extend_from_slice(&block.frame.to_le_bytes());
            out.extend_from_slice(&block.offset.to_le_bytes());
            out.extend_from_slice(&block.len.to_le_bytes());
        }
        out.extend_from_slice(&index_offset.to_le_bytes());
        out.extend_from_slice(&(self.frames.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.blocks.len() as u32).to_le_bytes());
        let checksum = blake3::hash(&out);
        out.extend_from_slice(checksum.as_bytes());
        out.extend_from_slice(FOOTER_MAGIC);
        out
    }

    /// Reads the index at the end of a pack.
    ///
    /// # Errors
    /// [`ReadIndexError::Damaged`] says that the frames may still be readable with [`PackIndex::rebuild`].
    pub(crate) fn read(file: &File) -> Result<Self, ReadIndexError> {
        let damaged = |detail: &str| ReadIndexError::Damaged(detail.to_owned());
        let file_len = file.metadata()?.len();
        if file_len < HEADER_BYTES + FOOTER_BYTES as u64 {
            return Err(damaged("shorter than header and footer"));
        }
        check_header(file)?;
        let mut footer = [0; FOOTER_BYTES];
        file.read_exact_at(&mut footer, file_len - FOOTER_BYTES as u64)?;
        if &footer[48..] != FOOTER_MAGIC {
            return Err(damaged("no footer"));
        }
        let index_offset = u64_at(&footer, 0);
        let (frames, blocks) = (u32_at(&footer, 8), u32_at(&footer, 12));
        let index_len =
            u64::from(frames) * FRAME_RECORD_BYTES as u64 + u64::from(blocks) * BLOCK_RECORD_BYTES as u64;
        if frames > RECORDS_MAX
            || blocks > RECORDS_MAX
            || index_offset.checked_add(index_len + FOOTER_BYTES as u64) != Some(file_len)
        {
            return Err(damaged("the footer's lengths do not fit the file"));
        }
        let mut index = vec![0; index_len as usize + 16];
        file.read_exact_at(&mut index, index_offset)?;
        if blake3::hash(&index).as_bytes()[..] != footer[16..48] {
            return Err(damaged("the index's checksum differs"));
        }
        Self::decode(&index[..index_len as usize], frames as usize, index_offset)
            .ok_or_else(|| damaged("the index contradicts itself"))
    }

    fn decode(bytes: &[u8], frame_count: usize, index_offset: u64) -> Option<Self> {
        let (frame_bytes, block_bytes) = bytes.split_at_checked(frame_count * FRAME_RECORD_BYTES)?;
        let mut frames = Vec::with_capacity(frame_count);
        for record in frame_bytes.chunks_exact(FRAME_RECORD_BYTES) {
            let frame = Frame {
                offset: u64_at(record, 0),
                stored_len: u32_at(record, 8),
                plain_len: u32_at(record, 12),
                codec: Codec::from_byte(record[16])?,
            };
            let fits = frame.offset >= HEADER_BYTES
                && frame.offset.checked_add(u64::from(frame.stored_len))? <= index_offset
                && lengths_allowed(&frame);
            fits.then_some(())?;
            frames.push(frame);
        }
        let mut blocks: Vec<BlockRecord> = Vec::with_capacity(block_bytes.len() / BLOCK_RECORD_BYTES);
        for record in block_bytes.chunks_exact(BLOCK_RECORD_BYTES) {
            let (hash, place) = record.split_at(32);
            let block = BlockRecord {
                hash: BlockHash::from_bytes(hash.try_into().ok()?),
                frame: u32_at(place, 0),
                offset: u32_at(place, 4),
                len: u32_at(place, 8),
            };
            let frame = frames.get(block.frame as usize)?;
            (block.offset.checked_add(block.len)? <= frame.plain_len).then_some(())?;
            blocks.last().is_none_or(|last| last.hash < block.hash).then_some(())?;
            blocks.push(block);
        }
        Some(Self { frames, blocks })
    }

    /// Indexes a pack again from its frames. The second value is false when the scan did not reach a clean
    /// end, so that the pack may hold blocks that the result does not name.
    ///
    /// # Errors
    /// Only when the file cannot be read now.
    pub(crate) fn rebuild(file: &File) -> io::Result<(Self, bool)> {
        let file_len = file.metadata()?.len();
        let mut index = Self::default();
        let mut complete = check_header(file).is_ok();
        let mut at = HEADER_BYTES;
        loop {
            let mut head = [0; FRAME_HEADER_BYTES];
            if at + head.len() as u64 > file_len {
                return Ok((index.deduplicated(), complete && at == file_len));
            }
            file.read_exact_at(&mut head, at)?;
            let count = u32_at(&head, 16);
            let offset = at + head.len() as u64 + u64::from(count) * 4;
            let codec = Codec::from_byte(head[4]);
            let (true, Some(codec)) = (head[..4] == FRAME_MAGIC && count <= RECORDS_MAX, codec) else {
                // Here the index begins in a whole pack; anything else is damage, and both look alike.
                let at_index = index.frames.last().is_some_and(|frame| frame.end() == at)
                    && u64_at(&head, 0) == index.frames[0].offset;
                return Ok((index.deduplicated(), complete && at_index));
            };
            let frame = Frame { offset, stored_len: u32_at(&head, 12), plain_len: u32_at(&head, 8), codec };
            if !lengths_allowed(&frame) || frame.end() > file_len {
                return Ok((index.deduplicated(), false));
            }
            let mut lengths = vec![0; count as usize * 4];
            file.read_exact_at(&mut lengths, at + head.len() as u64)?;
            match read_frame(file, &frame) {
                Ok(plain) => complete &= index.add_frame(frame, &plain, &lengths),
                Err(StoreError::Unavailable { source, .. }) => return Err(source),
                Err(_) => complete = false,
            }
            at = frame.end();
        }
    }

    fn add_frame(&mut self, frame: Frame, plain: &[u8], lengths: &[u8]) -> bool {
        let number = self.frames.len() as u32;
        self.frames.push(frame);
        let mut offset = 0_usize;
        for length in lengths.chunks_exact(4) {
            let len = u32_at(length, 0);
            let Some(bytes) = plain.get(offset..offset + len as usize) else { return false };
            let hash = BlockHash::of(bytes);
            self.blocks.push(BlockRecord { hash, frame: number, offset: offset as u32, len });
            offset += len as usize;
        }
        offset == plain.len()
    }

    fn deduplicated(mut self) -> Self {
        self.blocks.sort_unstable_by_key(|block| block.hash);
        self.blocks.dedup_by_key(|block| block.hash);
        self
    }
}

/// Why a pack has no usable index.
#[derive(Debug)]
pub(crate) enum ReadIndexError {
    Io(io::Error),
    Damaged(String),
}

impl From<io::Error> for ReadIndexError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn check_header(file: &File) -> Result<(), ReadIndexError> {
    let mut found = [0; HEADER_BYTES as usize];
    match file.read_exact_at(&mut found, 0) {
        Ok(()) if found == header() => Ok(()),
        Ok(()) => Err(ReadIndexError::Damaged("the header is not a pack's".to_owned())),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(ReadIndexError::Damaged("no header".to_owned()))
        }
        Err(error) => Err(error.into()),
    }
}

fn lengths_allowed(frame: &Frame) -> bool {
    frame.plain_len as usize <= BLOCK_BYTES_MAX
        && match frame.codec {
            Codec::Raw => frame.stored_len == frame.plain_len,
            Codec::Zstd => frame.stored_len < frame.plain_len,
        }
}

/// Reads a frame's plain bytes; the lengths were checked when the index was read.
pub(crate) fn read_frame(file: &File, frame: &Frame) -> Result<Vec<u8>, StoreError> {
    let mut stored = vec![0; frame.stored_len as usize];
    file.read_exact_at(&mut stored, frame.offset).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => StoreError::damaged("a pack", "it ends inside a frame"),
        _ => StoreError::unavailable("read a frame of a pack", error),
    })?;
    let plain = match frame.codec {
        Codec::Raw => stored,
        Codec::Zstd => zstd::bulk::decompress(&stored, frame.plain_len as usize)
            .map_err(|error| StoreError::damaged("a frame of a pack", error.to_string()))?,
    };
    if plain.len() != frame.plain_len as usize {
        return Err(StoreError::damaged("a frame of a pack", "it unfolds to another length than declared"));
    }
    Ok(plain)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}
