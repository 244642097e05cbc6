//! Reading a changed file into blocks.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use covey_types::BlockHash;
use rustix::fs::SeekFrom;

use crate::block::{Block, StoreError, Upload};
use crate::manifest::{Blob, Content, ContentMap, Extent, for_each_window, window_bytes};
use crate::secure::SecureError;
use crate::sys::{self, Stat};

/// A file that changes while it is read is read this often; then the last reading stands, with a warning.
const READS_MAX: usize = 3;

pub(super) fn put(upload: &dyn Upload, bytes: &[u8]) -> Result<BlockHash, StoreError> {
    let block = Block::of(bytes)?;
    upload.put(&block)?;
    Ok(block.hash())
}

/// Bytes that stand in the object if they are few, else in blocks.
pub(super) fn blob(upload: &dyn Upload, bytes: &[u8]) -> Result<Blob, StoreError> {
    if Blob::fits_inline(bytes.len()) {
        return Ok(Blob::Inline(bytes.to_vec()));
    }
    let len = bytes.len() as u64;
    let blocks =
        bytes.chunks(window_bytes(len) as usize).map(|part| put(upload, part)).collect::<Result<_, _>>()?;
    Ok(Blob::Blocks { len, blocks })
}

/// A file's content as it was read.
pub(super) struct ReadFile {
    pub(super) content: Content,
    pub(super) stat: Stat,
    pub(super) bytes_read: u64,
    /// It did not change meanwhile.
    pub(super) stable: bool,
}

pub(super) enum ReadError {
    Io(io::Error),
    Secure(SecureError),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<rustix::io::Errno> for ReadError {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Io(error.into())
    }
}

pub(super) fn read(upload: &dyn Upload, cancel: &AtomicBool, file: &File) -> Result<ReadFile, ReadError> {
    let mut stat = sys::stat_fd(file.as_fd())?;
    let mut bytes_read = 0;
    for reads in 1.. {
        let content = match read_content(upload, cancel, file, stat.size, &mut bytes_read) {
            Err(ReadError::Io(error))
                if error.kind() == io::ErrorKind::UnexpectedEof && reads < READS_MAX =>
            {
                None
            }
            other => Some(other?),
        };
        let after = sys::stat_fd(file.as_fd())?;
        let stable = (after.size, after.mtime, after.ctime) == (stat.size, stat.mtime, stat.ctime);
        match content {
            Some(content) if stable || reads >= READS_MAX => {
                return Ok(ReadFile { content, stat, bytes_read, stable });
            }
            _ => stat = after,
        }
    }
    Err(ReadError::Io(io::Error::other("it changes while it is read")))
}

fn read_content(
    upload: &dyn Upload,
    cancel: &AtomicBool,
    file: &File,
    size: u64,
    bytes_read: &mut u64,
) -> Result<Content, ReadError> {
    let extents = data_ranges(file, size)?;
    if extents.is_empty() {
        return Ok(Content::Nothing { size });
    }
    let dense = extents.len() == 1 && extents[0] == Extent { start: 0, len: size };
    let store_error = |error: StoreError| ReadError::Secure(error.into());
    let mut blocks = Vec::new();
    let mut buffer = Vec::new();
    for_each_window(&extents, size, |parts| {
        if cancel.load(Ordering::Relaxed) {
            return Err(ReadError::Secure(SecureError::Cancelled));
        }
        let len = parts.iter().map(|part| part.len).sum::<u64>() as usize;
        buffer.resize(len, 0);
        let mut filled = 0;
        for part in parts {
            let end = filled + part.len as usize;
            file.read_exact_at(&mut buffer[filled..end], part.start)?;
            filled = end;
        }
        *bytes_read += len as u64;
        blocks.push(put(upload, &buffer).map_err(store_error)?);
        Ok(())
    })?;
    if let (true, [block]) = (dense && size <= window_bytes(size), blocks.as_slice()) {
        return Ok(Content::Whole { size, block: *block });
    }
    let map = blob(upload, &ContentMap { extents, blocks }.encode()).map_err(store_error)?;
    Ok(Content::Mapped { size, map })
}

/// The ranges of a file that are not holes. Zeros that were written are data.
fn data_ranges(file: &File, size: u64) -> rustix::io::Result<Vec<Extent>> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            // A file system without holes refuses.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => {
                return Ok(vec![Extent { start: 0, len: size }]);
            }
            Err(error) => return Err(error),
        };
        if start >= size {
            break;
        }
        let end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
            Ok(end) => end.min(size),
            Err(rustix::io::Errno::NXIO) => size,
            Err(error) => return Err(error),
        };
        if end <= start {
            break;
        }
        match extents.last_mut() {
            // A range that was written between two questions.
            Some(Extent { start: last, len }) if *last + *len == start => *len = end - *last,
            _ => extents.push(Extent { start, len: end - start }),
        }
        at = end;
    }
    Ok(extents)
}
