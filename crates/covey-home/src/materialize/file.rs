//! Creating one name that is not a directory.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};

use super::MaterializeError;
use super::job::Job;
use super::meta;
use crate::manifest::{Content, Entry, EntryBody, MalformedObject, Xattrs};
use crate::object::{self, ObjectError};
use crate::sys;

/// Creates the name, which does not exist. False: it is a gap now, and there is nothing under the name.
pub(super) fn create(
    job: &Job<'_>,
    dir: BorrowedFd<'_>,
    name: &CStr,
    entry: &Entry,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<bool, MaterializeError> {
    let failed = |error: io::Error| match error.kind() {
        // We have just made sure that it does not exist: the file system folds names.
        io::ErrorKind::AlreadyExists => MaterializeError::NamesCollide { path: super::job::show(&path()) },
        _ => job.target(&path(), error),
    };
    match &entry.body {
        EntryBody::Directory { .. } => Ok(false),
        EntryBody::Symlink { target } => {
            let target = sys::c_name(target).map_err(failed)?;
            rustix::fs::symlinkat(target.as_c_str(), dir, name).map_err(|error| failed(error.into()))?;
            if let Some((uid, gid)) = job.request.owner {
                let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
                rustix::fs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(|error| failed(error.into()))?;
            }
            sys::set_mtime_at(dir, name, entry.meta.mtime).map_err(failed)?;
            Ok(true)
        }
        EntryBody::Fifo => {
            rustix::fs::mknodat(dir, name, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
                .map_err(|error| failed(error.into()))?;
            let fd = sys::open_path_at(dir, name).map_err(failed)?;
            meta::apply_to_path_fd(job, (dir, name, fd.as_fd()), &entry.meta, path)?;
            Ok(true)
        }
        EntryBody::File(content) => {
            // The first block before the file: the usual gap then leaves nothing to clean up.
            let whole = match content {
                Content::Whole { size, block } => match fetch(job, block, *size) {
                    Ok(bytes) => Some(bytes),
                    Err(error) => {
                        job.gap(&path(), error)?;
                        return Ok(false);
                    }
                },
                Content::Nothing { .. } | Content::Mapped { .. } => None,
            };
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR)
                .map_err(|error| failed(error.into()))?;
            let file = File::from(file);
            let written = match whole {
                Some(bytes) => {
                    file.write_all_at(&bytes, 0).map(|()| bytes.len() as u64).map_err(WriteError::Target)
                }
                None => write_mapped(job, &file, content),
            };
            match written {
                Ok(bytes) => job.count_written(bytes),
                Err(WriteError::Target(error)) => return Err(failed(error)),
                Err(WriteError::Cancelled(error)) => return Err(error),
                Err(WriteError::Object(error)) => {
                    rustix::fs::unlinkat(dir, name, AtFlags::empty())
                        .map_err(|error| failed(error.into()))?;
                    job.gap(&path(), error)?;
                    return Ok(false);
                }
            }
            let inherited = sys::xattrs_of(&file).unwrap_or_default();
            meta::apply(job, file.as_fd(), &entry.meta, &inherited, path)?;
            Ok(true)
        }
    }
}

enum WriteError {
    Target(io::Error),
    Object(ObjectError),
    Cancelled(MaterializeError),
}

fn fetch(job: &Job<'_>, block: &covey_types::BlockHash, len: u64) -> Result<Vec<u8>, ObjectError> {
    let bytes = job.request.store.get(block)?;
    if bytes.len() as u64 != len {
        let problem = "a block has another length than its file says";
        return Err(MalformedObject { object: "entry", at: 0, problem }.into());
    }
    Ok(bytes)
}

fn write_mapped(job: &Job<'_>, file: &File, content: &Content) -> Result<u64, WriteError> {
    let size = content.size();
    rustix::fs::ftruncate(file, size).map_err(|error| WriteError::Target(error.into()))?;
    let Some(map) = object::read_map(job.request.store, content).map_err(WriteError::Object)? else {
        return Ok(0);
    };
    let mut written = 0;
    map.for_each_window(size, |block, extents| {
        job.check_cancel().map_err(WriteError::Cancelled)?;
        let len = extents.iter().map(|extent| extent.len).sum();
        let bytes = fetch(job, block, len).map_err(WriteError::Object)?;
        let mut rest = bytes.as_slice();
        for extent in extents {
            let (part, behind) = rest.split_at(extent.len as usize);
            file.write_all_at(part, extent.start).map_err(WriteError::Target)?;
            rest = behind;
        }
        written += len;
        Ok(())
    })?;
    Ok(written)
}

/// What a file or directory has before anything was set; only ACLs can be inherited.
pub(super) fn attributes_of(fd: BorrowedFd<'_>) -> Xattrs {
    sys::xattrs_of(fd).unwrap_or_default()
}
