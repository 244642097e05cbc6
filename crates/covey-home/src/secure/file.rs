//! One regular file of a scan: opening it, and its entry.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::FileType;

use super::SecureError;
use super::job::{Job, LinkedEntry};
use crate::manifest::{Entry, EntryBody, Meta, Time, Xattrs};
use crate::path::show;
use crate::read_file::ReadError;
use crate::stat_cache;
use crate::sys::{self, Stat};

/// An open file's entry, from its bytes and the descriptor's own metadata.
///
/// `read_start` was taken before the file was opened.
pub(super) fn read(
    job: &Job<'_>,
    opened: OpenFile,
    read_start: Time,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<LinkedEntry, SecureError> {
    let OpenFile { fd, stat, xattrs: known_xattrs } = opened;
    let file = File::from(fd);
    let xattrs = || match &known_xattrs {
        Some(xattrs) => Ok(xattrs.clone()),
        None => sys::xattrs_of(&file),
    };
    let read = job.file_reads().read(&file, stat, xattrs).map_err(|error| match error {
        ReadError::Io(source) => SecureError::Unreadable { path: show(&path()), source },
        ReadError::Secure(error) => error,
    })?;
    if stat.size > 0 {
        job.count_read(read.bytes_read);
    }
    let (stat, stable) = (read.stat, read.stable);
    if !stable {
        job.warn(format!("`{}` changed while it was read", show(&path())));
    }
    let meta = Meta { mode: stat.mode, mtime: stat.mtime, xattrs: job.blob(&read.beside.encode())? };
    Ok(LinkedEntry {
        entry: Entry { meta, body: EntryBody::File(read.content) }.encode().into(),
        inode: stat.inode,
        ctime: stat.ctime,
        size: stat.size,
        dirty: !stable || stat_cache::is_racy(stat.ctime, read_start),
        names_proven: false,
    })
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
