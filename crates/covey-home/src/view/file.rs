//! A file's bytes, block by block.

use std::io::{self, Read};

use covey_types::BlockHash;

use crate::block::BlockStore;
use crate::manifest::{Content, Extent, MalformedObject};
use crate::object::{self, ObjectError};

/// Zeros of a hole that are handed out at once.
static ZEROS: [u8; 16 * 1024] = [0; 16 * 1024];

/// One block of a file and where its bytes lie.
#[derive(Debug)]
struct Window {
    block: BlockHash,
    extents: Vec<Extent>,
}

/// Reads a file out of a store from its first to its last byte; holes are zeros. One block, at most 8 MiB, is in
/// memory at a time. A block that is absent or damaged is an error of kind `InvalidData` with the cause in it,
/// never zeros and never an early end.
#[derive(Debug)]
pub struct FileReader<'a> {
    store: &'a dyn BlockStore,
    size: u64,
    at: u64,
    windows: std::vec::IntoIter<Window>,
    /// The data that comes next: where each range lies, and the bytes of all of them joined.
    extents: std::vec::IntoIter<Extent>,
    extent: Option<Extent>,
    bytes: Vec<u8>,
    taken: usize,
}

impl<'a> FileReader<'a> {
    pub(crate) fn new(store: &'a dyn BlockStore, content: &Content) -> Result<Self, ObjectError> {
        let size = content.size();
        let mut windows = Vec::new();
        match content {
            Content::Nothing { .. } => {}
            Content::Whole { size, block } => {
                windows.push(Window { block: *block, extents: vec![Extent { start: 0, len: *size }] });
            }
            Content::Mapped { .. } => {
                if let Some(map) = object::read_map(store, content)? {
                    map.for_each_window(size, |block, extents| {
                        windows.push(Window { block: *block, extents: extents.to_vec() });
                        Ok::<(), ObjectError>(())
                    })?;
                }
            }
        }
        Ok(Self {
            store,
            size,
            at: 0,
            windows: windows.into_iter(),
            extents: Vec::new().into_iter(),
            extent: None,
            bytes: Vec::new(),
            taken: 0,
        })
    }

    /// Bytes in the file.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Goes on at `offset`, which must not lie before what was read; blocks in between are not fetched.
    ///
    /// # Errors
    /// As reading: the block that holds `offset` is fetched. [`io::ErrorKind::InvalidInput`] for an offset that was
    /// passed or lies beyond the end.
    pub fn skip_to(&mut self, offset: u64) -> io::Result<()> {
        if offset < self.at || offset > self.size {
            let problem = "an offset that was passed, or beyond the end";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        loop {
            if self.extent.is_none() {
                self.extent = self.extents.next();
            }
            if let Some(extent) = self.extent {
                let passed = offset.saturating_sub(extent.start).min(extent.len);
                self.taken += passed as usize;
                let left = Extent { start: extent.start + passed, len: extent.len - passed };
                self.extent = (left.len > 0).then_some(left);
                if left.len > 0 {
                    break;
                }
                continue;
            }
            let ends_before = |window: &Window| window.extents.last().is_none_or(|last| last.end() <= offset);
            while self.windows.as_slice().first().is_some_and(ends_before) {
                self.windows.next();
            }
            let first = self.windows.as_slice().first().and_then(|window| window.extents.first());
            if first.is_none_or(|first| first.start >= offset) {
                break;
            }
            self.data()?;
        }
        self.at = offset;
        Ok(())
    }

    /// Passes over `len` bytes that are known to be a hole.
    pub(crate) fn skip_hole(&mut self, len: u64) -> io::Result<()> {
        let hole = self.data()?.map_or(self.size, |extent| extent.start) - self.at;
        if len > hole {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "data where a hole was expected"));
        }
        self.at += len;
        Ok(())
    }

    /// The next range of data that is not handed out yet; none when only a hole or nothing is left.
    fn data(&mut self) -> io::Result<Option<Extent>> {
        while self.extent.is_none() {
            self.extent = self.extents.next();
            if self.extent.is_none() {
                let Some(window) = self.windows.next() else { return Ok(None) };
                let bytes = self.store.get(&window.block).map_err(invalid)?;
                let len: u64 = window.extents.iter().map(|extent| extent.len).sum();
                if bytes.len() as u64 != len {
                    let problem = "a block has another length than its file says";
                    return Err(invalid(MalformedObject { object: "entry", at: 0, problem }));
                }
                (self.bytes, self.taken) = (bytes, 0);
                self.extents = window.extents.into_iter();
            }
        }
        Ok(self.extent)
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Read for FileReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.size || buffer.is_empty() {
            return Ok(0);
        }
        let data = self.data()?;
        let hole = data.map_or(self.size, |extent| extent.start) - self.at;
        let len = if hole > 0 {
            let len = buffer.len().min(ZEROS.len()).min(usize::try_from(hole).unwrap_or(usize::MAX));
            buffer[..len].copy_from_slice(&ZEROS[..len]);
            len
        } else {
            let extent = data.unwrap_or(Extent { start: self.at, len: 0 });
            let len = buffer.len().min(usize::try_from(extent.len).unwrap_or(usize::MAX));
            buffer[..len].copy_from_slice(&self.bytes[self.taken..self.taken + len]);
            self.taken += len;
            let left = Extent { start: extent.start + len as u64, len: extent.len - len as u64 };
            self.extent = (left.len > 0).then_some(left);
            len
        };
        self.at += len as u64;
        Ok(len)
    }
}
