//! Reading one regular file into blocks.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{FileType, SeekFrom};

use super::SecureError;
use super::job::{Job, LinkedEntry, show};
use crate::manifest::{
    Content, ContentMap, Entry, EntryBody, Extent, Meta, Time, Xattrs, for_each_window, window_bytes,
};
use crate::stat_cache;
use crate::sys::{self, Stat};

/// A file that changes while it is read is read this often; then the last reading stands, with a warning, and
/// the file is read again by the next secure.
const READS_MAX: usize = 3;

/// An open file's entry, from its bytes and the descriptor's own metadata.
///
/// `read_start` was taken before the file was opened.
pub(super) fn read(
    job: &Job<'_>,
    opened: OpenFile,
    read_start: Time,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<LinkedEntry, SecureError> {
    let OpenFile { fd, stat: first_stat, xattrs: known_xattrs } = opened;
    let file = File::from(fd);
    let unreadable = |source: io::Error| SecureError::Unreadable { path: show(&path()), source };
    let mut stat = first_stat;
    let mut reads = 0;
    let (content, xattrs, stable) = loop {
        let content = read_content(job, &file, stat.size).map_err(|error| match error {
            ReadError::Io(error) => unreadable(error),
            ReadError::Secure(error) => error,
        })?;
        let xattrs = match &known_xattrs {
            Some(xattrs) => xattrs.clone(),
            None => sys::xattrs_of(&file).map_err(unreadable)?,
        };
        let after = sys::stat_fd(&file).map_err(unreadable)?;
        reads += 1;
        let same = content.is_some()
            && (after.size, after.mtime, after.ctime) == (stat.size, stat.mtime, stat.ctime);
        match content {
            Some(content) if same || reads >= READS_MAX => break (content, xattrs, same),
            None if reads >= 2 * READS_MAX => {
                return Err(unreadable(io::Error::other("it shrinks while it is read")));
            }
            _ => stat = after,
        }
    };
    if !stable {
        job.warn(format!("`{}` changed while it was read", show(&path())));
    }
    let meta = Meta { mode: stat.mode, mtime: stat.mtime, xattrs: job.blob(&xattrs.encode())? };
    Ok(LinkedEntry {
        entry: Entry { meta, body: EntryBody::File(content) }.encode().into(),
        inode: stat.inode,
        ctime: stat.ctime,
        size: stat.size,
        dirty: !stable || stat_cache::is_racy(stat.ctime, read_start),
    })
}

enum ReadError {
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

/// None: the file has become shorter than `size`.
fn read_content(job: &Job<'_>, file: &File, size: u64) -> Result<Option<Content>, ReadError> {
    if size == 0 {
        return Ok(Some(Content::Nothing { size }));
    }
    let extents = data_ranges(file.as_fd(), size)?;
    if extents.is_empty() {
        return Ok(Some(Content::Nothing { size }));
    }
    let mut bytes_read = 0;
    let dense = extents.len() == 1 && extents[0] == Extent { start: 0, len: size };
    let mut blocks = Vec::new();
    let largest = size.min(window_bytes(size)) as usize;
    let mut buffer = job.buffers.take(largest);
    let cut = for_each_window(&extents, size, |parts| {
        job.check_cancel().map_err(ReadError::Secure)?;
        let len = parts.iter().map(|part| part.len).sum::<u64>() as usize;
        let buffer = buffer.first_bytes(len);
        let mut filled = 0;
        for part in parts {
            let part_len = part.len as usize;
            file.read_exact_at(&mut buffer[filled..filled + part_len], part.start)?;
            filled += part_len;
        }
        bytes_read += len as u64;
        blocks.push(job.put(buffer).map_err(|error| ReadError::Secure(error.into()))?);
        Ok(())
    });
    job.count_read(bytes_read);
    match cut {
        Ok(()) => {}
        Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    if let (true, [block]) = (dense && size <= window_bytes(size), blocks.as_slice()) {
        return Ok(Some(Content::Whole { size, block: *block }));
    }
    let map = job
        .blob(&ContentMap { extents, blocks }.encode())
        .map_err(|error| ReadError::Secure(error.into()))?;
    Ok(Some(Content::Mapped { size, map }))
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

/// A regular file that can be read.
pub(super) struct OpenFile {
    fd: OwnedFd,
    pub(super) stat: Stat,
    /// Read already, where the mode forbids it later.
    xattrs: Option<Xattrs>,
}

/// An open file, or what stands in the way.
pub(super) enum Opened {
    File(OpenFile),
    /// Ours, but its mode forbids us to read it.
    Forbidden(io::Error),
    /// Gone, or no longer a regular file.
    Changed,
}

pub(super) fn open(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Opened> {
    let fd = match sys::open_file_at(dir, name) {
        Ok(fd) => fd,
        Err(error) => {
            return match rustix::io::Errno::from_io_error(&error) {
                Some(rustix::io::Errno::ACCESS) => Ok(Opened::Forbidden(error)),
                Some(rustix::io::Errno::NOENT | rustix::io::Errno::LOOP | rustix::io::Errno::NXIO) => {
                    Ok(Opened::Changed)
                }
                _ => Err(error),
            };
        }
    };
    let stat = sys::stat_fd(&fd)?;
    if stat.file_type == FileType::RegularFile {
        Ok(Opened::File(OpenFile { fd, stat, xattrs: None }))
    } else {
        Ok(Opened::Changed)
    }
}

/// Opens a file of ours whose mode forbids it: the mode is lifted for the moment of opening and put back. That
/// moves its ctime, so the returned one is the new.
pub(super) fn open_lifted(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Option<OpenFile>> {
    let path_fd = sys::open_path_at(dir, name)?;
    let before = sys::stat_fd(&path_fd)?;
    if before.file_type != FileType::RegularFile || before.uid != rustix::process::geteuid().as_raw() {
        return Ok(None);
    }
    let (fd, xattrs) = sys::open_lifted(&path_fd, &before)?;
    let stat = sys::stat_fd(&fd)?;
    Ok(Some(OpenFile { fd, stat, xattrs: Some(xattrs) }))
}
