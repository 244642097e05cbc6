//! The growing image file: inodes fill one segment, blocks of directories another, and both are written when
//! they are full.
//!
//! Two kinds of room, because directory blocks begin at block borders and inodes do not: mixed, every large
//! directory would cost a gap.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::{BLOCK_BYTES, FIRST_INODE, SLOT_BYTES};

/// Room that is taken from the file at once; also what is buffered of each kind.
const SEGMENT_BYTES: u64 = 256 * 1024;

#[derive(Debug, Default)]
struct Segment {
    start: u64,
    room: u64,
    /// What is taken of it.
    bytes: Vec<u8>,
}

impl Segment {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    fn holds(&self, offset: u64, len: usize) -> Option<std::ops::Range<usize>> {
        let from = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        (from + len <= self.bytes.len()).then_some(from..from + len)
    }
}

/// An image file that is being written.
#[derive(Debug)]
pub(crate) struct Segments {
    file: File,
    /// Taken by segments so far.
    taken: u64,
    inodes: Segment,
    blocks: Segment,
}

impl Segments {
    pub(crate) fn new(file: File) -> Self {
        Self { file, taken: FIRST_INODE, inodes: Segment::default(), blocks: Segment::default() }
    }

    /// Takes room for an inode of `len` bytes. `tail`: offset and length of a part that must not cross a block
    /// border.
    pub(crate) fn place_inode(&mut self, len: usize, tail: Option<(usize, usize)>) -> io::Result<u64> {
        let fit = |at: u64| {
            let at = at.next_multiple_of(SLOT_BYTES);
            let crosses = tail.is_some_and(|(offset, len)| {
                let within = (at + offset as u64) % BLOCK_BYTES as u64;
                within + len as u64 > BLOCK_BYTES as u64
            });
            if crosses { at.next_multiple_of(BLOCK_BYTES as u64) } else { at }
        };
        let mut at = fit(self.inodes.end());
        if at + len as u64 > self.inodes.start + self.inodes.room {
            renew(&self.file, &mut self.inodes, &mut self.taken, len as u64)?;
            at = fit(self.inodes.end());
        }
        let end = at + len as u64;
        self.inodes.bytes.resize((end - self.inodes.start) as usize, 0);
        Ok(at)
    }

    /// Takes whole blocks that begin with `bytes`; the number of the first.
    pub(crate) fn put_blocks(&mut self, bytes: &[u8]) -> io::Result<u32> {
        let len = (bytes.len() as u64).next_multiple_of(BLOCK_BYTES as u64);
        if self.blocks.end() + len > self.blocks.start + self.blocks.room {
            renew(&self.file, &mut self.blocks, &mut self.taken, len)?;
        }
        let at = self.blocks.end();
        self.blocks.bytes.extend_from_slice(bytes);
        self.blocks.bytes.resize((at + len - self.blocks.start) as usize, 0);
        u32::try_from(at / BLOCK_BYTES as u64).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))
    }

    /// Writes into room that was taken before.
    pub(crate) fn patch(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        for segment in [&mut self.inodes, &mut self.blocks] {
            if let Some(range) = segment.holds(offset, bytes.len()) {
                segment.bytes[range].copy_from_slice(bytes);
                return Ok(());
            }
        }
        self.file.write_all_at(bytes, offset)
    }

    /// Writes what is left and the blocks before the first inode; returns the file with its length in blocks.
    pub(crate) fn finish(
        mut self,
        head: impl FnOnce(u32) -> [u8; BLOCK_BYTES],
        shared: &[u8; BLOCK_BYTES],
    ) -> io::Result<(File, u32)> {
        // The last segment that was taken is one of the two in work: nothing lies behind them.
        let end = self.inodes.end().max(self.blocks.end()).max(FIRST_INODE);
        flush(&self.file, &mut self.inodes)?;
        flush(&self.file, &mut self.blocks)?;
        let end = end.next_multiple_of(BLOCK_BYTES as u64);
        self.file.set_len(end)?;
        let blocks = u32::try_from(end / BLOCK_BYTES as u64)
            .map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        self.file.write_all_at(&head(blocks), 0)?;
        self.file.write_all_at(shared, BLOCK_BYTES as u64)?;
        Ok((self.file, blocks))
    }
}

fn flush(file: &File, segment: &mut Segment) -> io::Result<()> {
    if !segment.bytes.is_empty() {
        file.write_all_at(&segment.bytes, segment.start)?;
        segment.bytes.clear();
    }
    Ok(())
}

fn renew(file: &File, segment: &mut Segment, taken: &mut u64, len: u64) -> io::Result<()> {
    flush(file, segment)?;
    segment.start = *taken;
    segment.room = SEGMENT_BYTES.max(len.next_multiple_of(BLOCK_BYTES as u64));
    *taken += segment.room;
    Ok(())
}
