//! The metadata image: a home's whole tree without its bytes, as an EROFS file system in one file.
//!
//! Written from the layout in the kernel's documentation (`Documentation/filesystems/erofs.rst`) and in
//! `docs/formats/mounted-home.md`, which says what we use of it. What stays true: the file is written once, front
//! to back but for a few fields that are filled in later, with memory that depends on the largest directories
//! above each other and not on the number of entries. What does not belong here: where the tree comes from.

mod dirents;
mod inode;
mod segments;
mod xattrs;

pub(crate) use dirents::{Dirents, FileType};
pub(crate) use inode::{INODE_BYTES, InodeHead, Layout, chunk_indexes};
pub(crate) use segments::Segments;
pub(crate) use xattrs::{InodeXattrs, METACOPY_SHARED, TooManyAttributes, shared_block};

/// Bytes of a block.
pub(crate) const BLOCK_BYTES: usize = 4096;
/// Inode numbers count slots of this many bytes from the file's start.
pub(crate) const SLOT_BYTES: u64 = 32;
/// Block that holds the attributes which inodes share.
pub(crate) const SHARED_BLOCK: u32 = 1;
/// First byte of inodes.
pub(crate) const FIRST_INODE: u64 = 2 * BLOCK_BYTES as u64;

const SUPER_OFFSET: usize = 1024;
const MAGIC: u32 = 0xE0F5_E1E2;
const COMPAT_CHECKSUM: u32 = 1;
const COMPAT_MTIME: u32 = 2;
const INCOMPAT_CHUNKED_FILE: u32 = 4;

/// What the superblock says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Super {
    pub(crate) root_nid: u16,
    pub(crate) inodes: u64,
    pub(crate) blocks: u32,
    /// Names the file system; overlayfs tells lower layers apart by it.
    pub(crate) uuid: [u8; 16],
}

impl Super {
    /// The first block.
    pub(crate) fn encode(&self) -> [u8; BLOCK_BYTES] {
        let mut block = [0; BLOCK_BYTES];
        let mut put = |at: usize, bytes: &[u8]| {
            block[SUPER_OFFSET + at..SUPER_OFFSET + at + bytes.len()].copy_from_slice(bytes);
        };
        put(0, &MAGIC.to_le_bytes());
        put(8, &(COMPAT_CHECKSUM | COMPAT_MTIME).to_le_bytes());
        put(12, &[BLOCK_BYTES.trailing_zeros() as u8]);
        put(14, &self.root_nid.to_le_bytes());
        put(16, &self.inodes.to_le_bytes());
        // The build time stays 0: one tree has one image. Every inode has its own mtime.
        put(36, &self.blocks.to_le_bytes());
        // Inodes are counted from the file's start, so their area begins at block 0.
        put(44, &SHARED_BLOCK.to_le_bytes());
        put(48, &self.uuid);
        put(80, &INCOMPAT_CHUNKED_FILE.to_le_bytes());
        let checksum = crc32c(&block[SUPER_OFFSET..]);
        block[SUPER_OFFSET + 4..SUPER_OFFSET + 8].copy_from_slice(&checksum.to_le_bytes());
        block
    }
}

/// CRC-32C without the final inversion, as the kernel computes it over the superblock's block.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg());
        }
    }
    crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc_32c() {
        assert_eq!(!crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn the_superblock_is_where_the_kernel_looks() {
        let block = Super { root_nid: 256, inodes: 7, blocks: 9, uuid: [3; 16] }.encode();
        assert_eq!(block[1024..1028], 0xE0F5_E1E2_u32.to_le_bytes());
        assert_eq!((block[1036], &block[1038..1040]), (12, &[0, 1][..]));
        assert_eq!(block[1072..1088], [3; 16]);
    }
}
