//! An inode's fixed part, always the long form: 64-bit sizes and times, nanoseconds, 32-bit owners.

use covey_home::manifest::Time;

use super::BLOCK_BYTES;

/// Bytes of the fixed part.
pub(crate) const INODE_BYTES: usize = 64;
/// Chunk indexes of one file at most: with the largest chunk (8 TiB) files of 32 PiB.
const CHUNKS_MAX: u64 = 4096;
/// Largest chunk, as a power of two of blocks.
const CHUNK_BITS_MAX: u32 = 31;
/// A chunk that is a hole.
const HOLE: u32 = u32::MAX;

/// Where an inode's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// In whole blocks from this one on; also for what has no bytes.
    Plain(u32),
    /// All but the last, incomplete block from this one on; that one behind the inode.
    Inline(u32),
    /// No bytes: the number of a device, as the kernel packs it.
    Device(u32),
    /// In chunks of two to this power blocks; ours are all holes.
    Holes(u32),
}

/// The fixed part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InodeHead {
    pub(crate) layout: Layout,
    /// As the format counts them, see [`super::InodeXattrs::count`].
    pub(crate) xattr_count: u16,
    /// File type and permissions.
    pub(crate) mode: u16,
    pub(crate) size: u64,
    /// Only for programs that cannot have more than 32 bits.
    pub(crate) number: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) mtime: Time,
    pub(crate) links: u32,
}

impl InodeHead {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let (layout, place) = match self.layout {
            Layout::Plain(block) | Layout::Device(block) => (0_u16, block),
            Layout::Inline(block) => (2, block),
            Layout::Holes(bits) => (4, bits),
        };
        out.extend_from_slice(&(1 | layout << 1).to_le_bytes());
        out.extend_from_slice(&self.xattr_count.to_le_bytes());
        out.extend_from_slice(&self.mode.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&self.size.to_le_bytes());
        out.extend_from_slice(&place.to_le_bytes());
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.owner.0.to_le_bytes());
        out.extend_from_slice(&self.owner.1.to_le_bytes());
        // The kernel reads the 64 bits as signed: times before 1970 are kept.
        out.extend_from_slice(&self.mtime.seconds.to_le_bytes());
        out.extend_from_slice(&self.mtime.nanoseconds.to_le_bytes());
        out.extend_from_slice(&self.links.to_le_bytes());
        out.extend_from_slice(&[0; 16]);
    }
}

/// Layout and chunk indexes of a file that is one hole of `size` bytes; none where it is beyond the format.
pub(crate) fn chunk_indexes(size: u64) -> Option<(Layout, Vec<u8>)> {
    if size == 0 {
        return Some((Layout::Plain(0), Vec::new()));
    }
    let blocks = size.div_ceil(BLOCK_BYTES as u64);
    let bits = blocks.next_power_of_two().trailing_zeros().min(CHUNK_BITS_MAX);
    let chunks = blocks.div_ceil(1 << bits);
    if chunks > CHUNKS_MAX {
        return None;
    }
    Some((Layout::Holes(bits), HOLE.to_le_bytes().repeat(chunks as usize)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_files_have_one_chunk_index_and_the_largest_few() {
        let count = |size| chunk_indexes(size).map(|(_, indexes)| indexes.len() / 4);
        assert_eq!(count(0), Some(0));
        assert_eq!(count(1), Some(1));
        assert_eq!(count(4097), Some(1));
        assert_eq!(count(1 << 43), Some(1));
        assert_eq!(count((1 << 43) + 1), Some(2));
        assert_eq!(count(1 << 55), Some(4096));
        assert_eq!(count(i64::MAX as u64), None);
    }
}
