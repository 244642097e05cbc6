//! Reading one open regular file into blocks: its content as a manifest names it.
//!
//! What stays true: a file that changes while it is read is read again, a few times, and then said to be unstable;
//! holes stay holes and zeros that were written are data; memory is one window. What does not belong here: how the
//! file was found and opened, and what is known of it without reading.

mod buffer;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::SeekFrom;

pub(crate) use buffer::Buffers;

use crate::block::Upload;
use crate::manifest::{Content, ContentMap, Extent, for_each_window, window_bytes};
use crate::object::{put, put_blob};
use crate::secure::SecureError;
use crate::sys::{self, Stat};

/// A file that changes while it is read is read this often; then the last reading stands, with a warning, and
/// the file is read again by the next secure.
const READS_MAX: usize = 3;

/// What all files of one secure are read with.
#[derive(Clone, Copy)]
pub(crate) struct FileReads<'a> {
    pub(crate) upload: &'a dyn Upload,
    pub(crate) cancel: &'a AtomicBool,
    pub(crate) buffers: &'a Buffers,
}

/// A file as it was read.
pub(crate) struct ReadFile<T> {
    pub(crate) content: Content,
    /// What the caller read beside the content.
    pub(crate) beside: T,
    /// From before the reading that stands.
    pub(crate) stat: Stat,
    /// Of all readings.
    pub(crate) bytes_read: u64,
    /// It did not change meanwhile.
    pub(crate) stable: bool,
}

pub(crate) enum ReadError {
    Io(io::Error),
    Secure(SecureError),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<crate::block::StoreError> for ReadError {
    fn from(error: crate::block::StoreError) -> Self {
        Self::Secure(error.into())
    }
}

impl FileReads<'_> {
    /// Puts the blocks of `file`, whose metadata was `stat`; `beside` reads what has to be of the same moment.
    pub(crate) fn read<T>(
        &self,
        file: &File,
        mut stat: Stat,
        beside: impl Fn() -> io::Result<T>,
    ) -> Result<ReadFile<T>, ReadError> {
        let (mut reads, mut bytes_read) = (0, 0);
        loop {
            let content = self.content(file, stat.size, &mut bytes_read)?;
            let found = beside()?;
            let after = sys::stat_fd(file.as_fd())?;
            reads += 1;
            let same = (after.size, after.mtime, after.ctime) == (stat.size, stat.mtime, stat.ctime);
            match content {
                Some(content) if same || reads >= READS_MAX => {
                    return Ok(ReadFile { content, beside: found, stat, bytes_read, stable: same });
                }
                None if reads >= 2 * READS_MAX => {
                    return Err(io::Error::other("it shrinks while it is read").into());
                }
                _ => stat = after,
            }
        }
    }

    /// None: the file has become shorter than `size`.
    fn content(&self, file: &File, size: u64, bytes_read: &mut u64) -> Result<Option<Content>, ReadError> {
        if size == 0 {
            return Ok(Some(Content::Nothing { size }));
        }
        let extents = data_ranges(file.as_fd(), size)?;
        if extents.is_empty() {
            return Ok(Some(Content::Nothing { size }));
        }
        let dense = extents.len() == 1 && extents[0] == Extent { start: 0, len: size };
        let mut blocks = Vec::new();
        let largest = size.min(window_bytes(size)) as usize;
        let mut buffer = self.buffers.take(largest);
        let cut = for_each_window(&extents, size, |parts| {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(ReadError::Secure(SecureError::Cancelled));
            }
            let len = parts.iter().map(|part| part.len).sum::<u64>() as usize;
            let buffer = buffer.first_bytes(len);
            let mut filled = 0;
            for part in parts {
                let end = filled + part.len as usize;
                file.read_exact_at(&mut buffer[filled..end], part.start)?;
                filled = end;
            }
            *bytes_read += len as u64;
            blocks.push(put(self.upload, buffer)?);
            Ok(())
        });
        match cut {
            Ok(()) => {}
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        if let (true, [block]) = (dense && size <= window_bytes(size), blocks.as_slice()) {
            return Ok(Some(Content::Whole { size, block: *block }));
        }
        let map = put_blob(self.upload, &ContentMap { extents, blocks }.encode())?;
        Ok(Some(Content::Mapped { size, map }))
    }
}

/// The ranges of a file that are not holes. Zeros that were written are data.
fn data_ranges(fd: BorrowedFd<'_>, size: u64) -> io::Result<Vec<Extent>> {
    let whole = || vec![Extent { start: 0, len: size }];
    // A file system without holes answers with the file's end, or refuses.
    match rustix::fs::seek(fd, SeekFrom::Hole(0)) {
        Ok(hole) if hole >= size => return Ok(whole()),
        Ok(_) => {}
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => return Ok(whole()),
        Err(rustix::io::Errno::NXIO) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    }
    let mut extents = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        if start >= size {
            break;
        }
        let end = match rustix::fs::seek(fd, SeekFrom::Hole(start)) {
            Ok(end) => end.min(size),
            Err(rustix::io::Errno::NXIO) => size,
            Err(error) => return Err(error.into()),
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
