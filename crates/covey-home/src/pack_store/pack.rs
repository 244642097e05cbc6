//! The byte format of a pack file, described in `docs/formats/home-store.md`, section 2.
//!
//! What stays true: a pack is written once, front to back; every declared length is compared with a limit and
//! with the file's length before it is used; a pack whose index is damaged can be indexed again from its
//! frames. What does not belong here: which packs exist and who looks for what.

use std::io;

use covey_types::BlockHash;

use super::files::{PackFiles, ReadPackError};
use crate::backend::{BackendError, Key};
use crate::block::{BLOCK_BYTES_MAX, BlockHasher};

pub(crate) const HEADER_BYTES: u64 = 16;
const HEADER_MAGIC: &[u8; 8] = b"COVEYPCK";
const FOOTER_MAGIC: &[u8; 8] = b"COVEYEND";
const FRAME_MAGIC: [u8; 4] = *b"FRAM";
const VERSION: u32 = 1;
const FRAME_HEADER_BYTES: usize = 20;
const FRAME_RECORD_BYTES: usize = 20;
const BLOCK_RECORD_BYTES: usize = 44;
const FOOTER_BYTES: usize = 64;
/// Read at first of a pack far away: holds the index of most packs, so that one request is enough.
const TAIL_BYTES_REMOTE: usize = 1024 * 1024;
/// The same on a disk, where a second read costs little and unneeded bytes are copied.
const TAIL_BYTES_LOCAL: usize = 32 * 1024;
/// A longer pack is not read into memory as a whole to index it again.
const REBUILD_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// More frames or blocks than any writer makes (a pack is sealed at about 32 MiB); larger counts are damage.
const RECORDS_MAX: u32 = 1 << 22;

/// How a frame's bytes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    Raw,
    Zstd,
}

impl Codec {
    pub(crate) const fn byte(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Zstd => 1,
        }
    }

    pub(crate) const fn from_byte(byte: u8) -> Option<Self> {
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
    /// It was packed at leisure: packing it once more saves nothing.
    pub(crate) thorough: bool,
    pub(crate) frames: Vec<Frame>,
    /// Sorted by hash, each once.
    pub(crate) blocks: Vec<BlockRecord>,
}

/// Whether a sample of the bytes is as evenly spread as compressed or random data is: compressing it would take
/// time and save nothing. Text is far below, and so is machine code.
fn looks_random(plain: &[u8]) -> bool {
    const SLICES: usize = 16;
    const SLICE_BYTES: usize = 512;
    /// Bits per byte. A sample of this size has 7.98 of random bytes.
    const ENTROPY_MIN: f64 = 7.95;
    let step = plain.len() / SLICES;
    if step < 2 * SLICE_BYTES {
        return false;
    }
    let mut counts = [0_u32; 256];
    for slice in plain.chunks(step).take(SLICES) {
        slice[..SLICE_BYTES.min(slice.len())].iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    }
    let total = f64::from(counts.iter().sum::<u32>());
    let bits = |count: u32| f64::from(count) / total * (total / f64::from(count)).log2();
    let entropy: f64 = counts.iter().filter(|count| **count > 0).map(|count| bits(*count)).sum();
    entropy >= ENTROPY_MIN
}

/// Compresses into `out` where that is smaller; with [`Codec::Raw`] the plain bytes are what is to be stored.
pub(crate) fn compress(
    plain: &[u8],
    compressor: &mut zstd::bulk::Compressor<'static>,
    out: &mut Vec<u8>,
) -> io::Result<Codec> {
    // Shorter than this, the frame's own overhead eats what zstd could save.
    const PLAIN_BYTES_MIN: usize = 64;
    if plain.len() < PLAIN_BYTES_MIN || looks_random(plain) {
        return Ok(Codec::Raw);
    }
    out.clear();
    out.reserve(zstd::zstd_safe::compress_bound(plain.len()));
    let packed_len = compressor.compress_to_buffer(plain, out)?;
    let saves = packed_len + packed_len / 32 < plain.len();
    Ok(if saves { Codec::Zstd } else { Codec::Raw })
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
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&u32::from(self.thorough).to_le_bytes());
        let checksum = blake3::hash(&out);
        out.extend_from_slice(checksum.as_bytes());
        out.extend_from_slice(FOOTER_MAGIC);
        out
    }

    /// Bytes of index and footer.
    pub(crate) const fn encoded_len(&self) -> u64 {
        let records = self.frames.len() * FRAME_RECORD_BYTES + self.blocks.len() * BLOCK_RECORD_BYTES;
        (records + FOOTER_BYTES) as u64
    }

    /// Whether the block lies there.
    pub(crate) fn has(&self, hash: &BlockHash, frame: &Frame, offset: u32) -> bool {
        let found = self.blocks.binary_search_by(|block| block.hash.cmp(hash)).ok();
        found.is_some_and(|at| {
            let block = &self.blocks[at];
            block.offset == offset && self.frames.get(block.frame as usize) == Some(frame)
        })
    }

    /// Reads the index at the end of a pack: one request for most, at most two.
    ///
    /// # Errors
    /// [`ReadPackError::Damaged`] says that the frames may still be readable with [`PackIndex::rebuild`].
    pub(crate) fn read(files: &PackFiles, key: &Key) -> Result<Self, ReadPackError> {
        let damaged = |detail: &str| ReadPackError::Damaged(detail.to_owned());
        let tail_bytes = if files.is_remote() { TAIL_BYTES_REMOTE } else { TAIL_BYTES_LOCAL };
        let tail = files.read_tail(key, tail_bytes)?;
        if tail.file_len < HEADER_BYTES + FOOTER_BYTES as u64 || tail.bytes.len() < FOOTER_BYTES {
            return Err(damaged("shorter than header and footer"));
        }
        let footer = &tail.bytes[tail.bytes.len() - FOOTER_BYTES..];
        if !is_footer(footer) {
            return Err(damaged("no footer"));
        }
        let index_offset = u64_at(footer, 0);
        let (frames, blocks) = (u32_at(footer, 8), u32_at(footer, 12));
        let index_len =
            u64::from(frames) * FRAME_RECORD_BYTES as u64 + u64::from(blocks) * BLOCK_RECORD_BYTES as u64;
        if frames > RECORDS_MAX
            || blocks > RECORDS_MAX
            || index_offset.checked_add(index_len + FOOTER_BYTES as u64) != Some(tail.file_len)
        {
            return Err(damaged("the footer's lengths do not fit the file"));
        }
        let wanted = index_len as usize + FOOTER_BYTES;
        let longer;
        let end = if wanted <= tail.bytes.len() {
            &tail.bytes[tail.bytes.len() - wanted..]
        } else {
            longer = files.read(key, index_offset, wanted)?;
            &longer[..]
        };
        if end.len() != wanted || end[end.len() - FOOTER_BYTES..] != *footer {
            return Err(damaged("it changed while it was read"));
        }
        let (covered, rest) = end.split_at(index_len as usize + 24);
        if blake3::hash(covered).as_bytes()[..] != rest[..32] {
            return Err(damaged("the index's checksum differs"));
        }
        // Behind the checksum, so that damage is not taken for a later version.
        if u32_at(footer, 16) != VERSION || u32_at(footer, 20) > 1 {
            return Err(ReadPackError::Backend(BackendError::unavailable(
                format!("read {key}, which a later version of this program wrote; use that version"),
                io::Error::from(io::ErrorKind::Unsupported),
            )));
        }
        let index = Self::decode(&covered[..index_len as usize], frames as usize, index_offset);
        let index = index.ok_or_else(|| damaged("the index contradicts itself"))?;
        Ok(Self { thorough: u32_at(footer, 20) == 1, ..index })
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
        Some(Self { thorough: false, frames, blocks })
    }

    /// Indexes a pack again from its frames. The second value is false when the scan did not reach a clean
    /// end, so that the pack may hold blocks that the result does not name.
    ///
    /// # Errors
    /// Only when the file cannot be read now.
    pub(crate) fn rebuild(
        files: &PackFiles,
        key: &Key,
        hasher: &BlockHasher,
    ) -> Result<(Self, bool), BackendError> {
        let (file, whole) = match files.read_lossy(key, REBUILD_BYTES_MAX) {
            Ok(Some(read)) => read,
            Ok(None) | Err(ReadPackError::Damaged(_)) => return Ok((Self::default(), false)),
            Err(ReadPackError::Backend(error)) => return Err(error),
        };
        let (index, complete) = Self::scan(&file, hasher);
        Ok((index.deduplicated(), complete && whole))
    }

    /// The index of a pack's bytes, and whether a clean end was reached.
    fn scan(file: &[u8], hasher: &BlockHasher) -> (Self, bool) {
        let mut index = Self::default();
        let mut complete = is_header(file);
        let mut at = HEADER_BYTES as usize;
        loop {
            let Some(head) = file.get(at..).and_then(|rest| rest.get(..FRAME_HEADER_BYTES)) else {
                return (index, complete && at == file.len());
            };
            let count = u32_at(head, 16);
            let lengths_at = at + FRAME_HEADER_BYTES;
            let offset = lengths_at + count as usize * 4;
            let codec = Codec::from_byte(head[4]);
            let (true, Some(codec)) = (head[..4] == FRAME_MAGIC && count <= RECORDS_MAX, codec) else {
                // Here the index begins in a whole pack; anything else is damage, and both look alike.
                let at_index = index.frames.last().is_some_and(|frame| frame.end() == at as u64)
                    && u64_at(head, 0) == index.frames[0].offset;
                return (index, complete && at_index);
            };
            let frame = Frame {
                offset: offset as u64,
                stored_len: u32_at(head, 12),
                plain_len: u32_at(head, 8),
                codec,
            };
            let stored = file.get(offset..).and_then(|rest| rest.get(..frame.stored_len as usize));
            let (true, Some(stored)) = (lengths_allowed(&frame), stored) else { return (index, false) };
            match open_frame(stored.to_vec(), &frame) {
                Ok(plain) => complete &= index.add_frame(frame, &plain, &file[lengths_at..offset], hasher),
                Err(_) => complete = false,
            }
            at = offset + stored.len();
        }
    }

    fn add_frame(&mut self, frame: Frame, plain: &[u8], lengths: &[u8], hasher: &BlockHasher) -> bool {
        let number = self.frames.len() as u32;
        self.frames.push(frame);
        let mut offset = 0_usize;
        for length in lengths.chunks_exact(4) {
            let len = u32_at(length, 0);
            let Some(bytes) = plain.get(offset..offset + len as usize) else { return false };
            let hash = hasher.hash(bytes);
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

/// Whether a pack's file begins as it must.
pub(crate) fn is_header(start: &[u8]) -> bool {
    start.get(..HEADER_BYTES as usize).is_some_and(|found| found == header())
}

/// Whether the end of a pack's file is a footer.
pub(crate) fn is_footer(end: &[u8]) -> bool {
    end.ends_with(FOOTER_MAGIC)
}

fn lengths_allowed(frame: &Frame) -> bool {
    frame.plain_len as usize <= BLOCK_BYTES_MAX
        && match frame.codec {
            Codec::Raw => frame.stored_len == frame.plain_len,
            Codec::Zstd => frame.stored_len < frame.plain_len,
        }
}

/// Reads a frame's plain bytes; the lengths were checked when the index was read.
pub(crate) fn read_frame(files: &PackFiles, key: &Key, frame: &Frame) -> Result<Vec<u8>, ReadPackError> {
    let stored = files.read(key, frame.offset, frame.stored_len as usize)?;
    open_frame(stored, frame).map_err(ReadPackError::Damaged)
}

/// The plain bytes of a frame from its stored ones.
///
/// # Errors
/// A sentence, when these are not the frame's bytes.
pub(crate) fn open_frame(stored: Vec<u8>, frame: &Frame) -> Result<Vec<u8>, String> {
    if stored.len() != frame.stored_len as usize {
        return Err("it ends inside a frame".to_owned());
    }
    let plain = match frame.codec {
        Codec::Raw => stored,
        Codec::Zstd => zstd::bulk::decompress(&stored, frame.plain_len as usize)
            .map_err(|error| format!("a frame does not unfold: {error}"))?,
    };
    if plain.len() != frame.plain_len as usize {
        return Err("a frame unfolds to another length than declared".to_owned());
    }
    Ok(plain)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        blake3::Hasher::new().finalize_xof().fill(&mut bytes);
        bytes
    }

    #[test]
    fn a_frame_that_unfolds_to_more_than_it_says_is_damage_and_costs_no_memory() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
        assert!(bomb.len() < 64 << 10);
        for plain_len in [1, 100, BLOCK_BYTES_MAX as u32] {
            let frame = Frame { offset: 0, stored_len: bomb.len() as u32, plain_len, codec: Codec::Zstd };
            assert!(open_frame(bomb.clone(), &frame).is_err(), "{plain_len}");
        }
    }

    #[test]
    fn what_looks_random_is_stored_as_it_is_and_everything_else_is_compressed() {
        let noise = random(300_000);
        let base64: Vec<u8> =
            noise.iter().map(|byte| b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef"[*byte as usize % 32]).collect();
        let half: Vec<u8> = noise[..150_000].iter().copied().chain(vec![7; 150_000]).collect();
        let mut out = Vec::new();
        let mut compressor = zstd::bulk::Compressor::new(1).unwrap();
        for (plain, wanted) in [(&noise, Codec::Raw), (&base64, Codec::Zstd), (&half, Codec::Zstd)] {
            assert_eq!(compress(plain, &mut compressor, &mut out).unwrap(), wanted);
            if wanted == Codec::Zstd {
                let frame = Frame {
                    offset: 0,
                    stored_len: out.len() as u32,
                    plain_len: plain.len() as u32,
                    codec: wanted,
                };
                assert_eq!(&open_frame(out.clone(), &frame).unwrap(), plain);
            }
        }
    }
}
