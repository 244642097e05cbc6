//! Creating one name that is not a directory.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use covey_types::BlockHash;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};

use super::MaterializeError;
use super::job::Job;
use super::meta;
use crate::manifest::{Content, DeviceNumber, Entry, EntryBody, Extent, MalformedObject, Meta, Xattrs};
use crate::object::{self, ObjectError};
use crate::path::show;
use crate::sys::{self, Stat};

/// From this size on a file shares its blocks: below, asking for that costs more than writing.
const SHARED_BYTES_MIN: u64 = 64 * 1024;

/// A file that was under the name before, open, with the content that the stat cache proves.
#[derive(Debug)]
pub(super) struct Old {
    file: File,
    pub(super) content: Content,
    /// Its windows, where it has several.
    windows: HashMap<BlockHash, Vec<Extent>>,
}

impl Old {
    /// None: it cannot be opened, or is not what it was.
    pub(super) fn open(
        job: &Job<'_>,
        dir: BorrowedFd<'_>,
        name: &CStr,
        stat: &Stat,
        content: Content,
    ) -> Option<Self> {
        let file = File::from(sys::open_file_at(dir, name).ok()?);
        let now = sys::stat_fd(&file).ok()?;
        if (now.device, now.inode, now.ctime, now.links) != (stat.device, stat.inode, stat.ctime, 1) {
            return None;
        }
        let mut windows = HashMap::new();
        if let Ok(Some(map)) = object::read_map(job.request.store, &content) {
            map.for_each_window(content.size(), |block, extents| {
                windows.insert(*block, extents.to_vec());
                Ok::<_, std::convert::Infallible>(())
            })
            .ok()?;
        }
        Some(Self { file, content, windows })
    }

    /// A window's bytes out of the old file, if it has them at the same place; their hash is checked.
    fn read(&self, job: &Job<'_>, block: &BlockHash, extents: &[Extent]) -> Option<Vec<u8>> {
        self.windows.get(block).filter(|old| old.as_slice() == extents)?;
        let mut bytes = vec![0; extents.iter().map(|extent| extent.len).sum::<u64>() as usize];
        let mut filled = 0;
        for extent in extents {
            let end = filled + extent.len as usize;
            self.file.read_exact_at(&mut bytes[filled..end], extent.start).ok()?;
            filled = end;
        }
        (job.request.store.hasher().hash(&bytes) == *block).then_some(bytes)
    }
}

/// Gives a file whose content is right its metadata.
pub(super) fn set_metadata(
    job: &Job<'_>,
    old: &Old,
    wanted: &Meta,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<Stat, MaterializeError> {
    let failed = |error: io::Error| job.target(&path(), error);
    let existing = sys::xattrs_of(&old.file).map_err(failed)?;
    meta::apply(job, old.file.as_fd(), wanted, &existing, path)?;
    sys::stat_fd(&old.file).map_err(failed)
}

/// Where a name is created.
pub(super) struct Place<'a> {
    pub(super) dir: BorrowedFd<'a>,
    pub(super) name: &'a CStr,
    /// What was there, already without a name.
    pub(super) old: Option<Old>,
}

/// Creates the name, which does not exist; returns its inode as it is in the end. None: it is a gap now, or was
/// refused, and there is nothing under the name.
pub(super) fn create(
    job: &Job<'_>,
    Place { dir, name, old }: Place<'_>,
    entry: &Entry,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<Option<Stat>, MaterializeError> {
    let failed = |error: io::Error| match error.kind() {
        // We have just made sure that it does not exist: the file system folds names.
        io::ErrorKind::AlreadyExists => MaterializeError::NamesCollide { path: show(&path()) },
        _ => job.target(&path(), error),
    };
    match &entry.body {
        EntryBody::Directory { .. } => Ok(None),
        EntryBody::Symlink { target } => {
            let target = sys::c_name(target).map_err(failed)?;
            rustix::fs::symlinkat(target.as_c_str(), dir, name).map_err(|error| failed(error.into()))?;
            if let Some((uid, gid)) = job.request.owner {
                let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
                rustix::fs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(|error| failed(error.into()))?;
            }
            sys::set_mtime_at(dir, name, entry.meta.mtime).map_err(failed)?;
            sys::stat_at(dir, name).map(Some).map_err(failed)
        }
        EntryBody::Fifo | EntryBody::Socket | EntryBody::CharacterDevice(_) | EntryBody::BlockDevice(_) => {
            let (kind, number) = node_of(&entry.body);
            if let Some(reason) = refusal(job, number) {
                job.warn(format!("`{}`: a device node is not created {reason}", show(&path())));
                return Ok(None);
            }
            let number = rustix::fs::makedev(number.major, number.minor);
            match rustix::fs::mknodat(dir, name, kind, Mode::RUSR | Mode::WUSR, number) {
                Ok(()) => {}
                Err(rustix::io::Errno::PERM) if number != 0 => {
                    let path = show(&path());
                    job.warn(format!("`{path}`: a device node is not created: no permission"));
                    return Ok(None);
                }
                Err(error) => return Err(failed(error.into())),
            }
            let fd = sys::open_path_at(dir, name).map_err(failed)?;
            meta::apply_to_path_fd(job, (dir, name, fd.as_fd()), &entry.meta, path)?;
            sys::stat_at(dir, name).map(Some).map_err(failed)
        }
        EntryBody::File(content) => {
            let here = if content.size() >= SHARED_BYTES_MIN { job.content_here(content) } else { None };
            // The first block before the file: the usual gap then leaves nothing to clean up.
            let whole = match content {
                Content::Whole { size, block } if here.is_none() => match fetch(job, block, *size) {
                    Ok(bytes) => Some(bytes),
                    Err(error) => {
                        job.gap_of(path(), entry.encode(), error)?;
                        return Ok(None);
                    }
                },
                Content::Nothing { .. } | Content::Mapped { .. } | Content::Whole { .. } => None,
            };
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let simple = meta::is_simple(job, &entry.meta);
            let mode =
                if simple { Mode::from_raw_mode(entry.meta.mode.into()) } else { Mode::RUSR | Mode::WUSR };
            let file = rustix::fs::openat(dir, name, flags, mode).map_err(|error| failed(error.into()))?;
            let file = File::from(file);
            let shared = match here {
                Some(here) => share(job, &file, &here, content).map_err(failed)?,
                None => false,
            };
            let written = match whole {
                _ if shared => Ok(content.size()),
                Some(bytes) => {
                    file.write_all_at(&bytes, 0).map(|()| bytes.len() as u64).map_err(WriteError::Target)
                }
                None => write_mapped(job, &file, content, old.as_ref()),
            };
            match written {
                Ok(bytes) => job.count_written(bytes),
                Err(WriteError::Target(error)) => return Err(failed(error)),
                Err(WriteError::Cancelled(error)) => return Err(error),
                Err(WriteError::Object(error)) => {
                    rustix::fs::unlinkat(dir, name, AtFlags::empty())
                        .map_err(|error| failed(error.into()))?;
                    job.gap_of(path(), entry.encode(), error)?;
                    return Ok(None);
                }
            }
            if simple {
                sys::set_mtime(&file, entry.meta.mtime).map_err(failed)?;
            } else {
                // Nothing is inherited: no directory that is being filled has a default ACL.
                meta::apply(job, file.as_fd(), &entry.meta, &Xattrs::default(), path)?;
            }
            sys::stat_fd(&file).map(Some).map_err(failed)
        }
    }
}

fn node_of(body: &EntryBody) -> (FileType, DeviceNumber) {
    match body {
        EntryBody::CharacterDevice(number) => (FileType::CharacterDevice, *number),
        EntryBody::BlockDevice(number) => (FileType::BlockDevice, *number),
        EntryBody::Socket => (FileType::Socket, DeviceNumber::NONE),
        _ => (FileType::Fifo, DeviceNumber::NONE),
    }
}

/// Why a device node is not created. It is a door into the kernel and a manifest is hostile input, so root
/// opens it only for itself: a home that is given to somebody else never gets one (I13).
fn refusal(job: &Job<'_>, number: DeviceNumber) -> Option<&'static str> {
    if number == DeviceNumber::NONE {
        return None;
    }
    if !rustix::process::geteuid().is_root() {
        return Some("for an ordinary user");
    }
    let of_another = job.request.owner.is_some_and(|(uid, _)| uid != 0);
    of_another.then_some("in a home that is given to another user than who restores it")
}

enum WriteError {
    Target(io::Error),
    Object(ObjectError),
    Cancelled(MaterializeError),
}

fn fetch(job: &Job<'_>, block: &BlockHash, len: u64) -> Result<Vec<u8>, ObjectError> {
    let bytes = job.request.store.get(block)?;
    job.count_fetched(bytes.len() as u64);
    if bytes.len() as u64 != len {
        let problem = "a block has another length than its file says";
        return Err(MalformedObject { object: "entry", at: 0, problem }.into());
    }
    Ok(bytes)
}

/// Makes the new file share the blocks of one that is here; false: the file is as empty as it was.
fn share(job: &Job<'_>, file: &File, here: &File, content: &Content) -> io::Result<bool> {
    if rustix::fs::ioctl_ficlone(file, here).is_err() {
        // Not on this file system, or not across two of them.
        job.share_nothing();
        return Ok(false);
    }
    let is_whole = sys::stat_fd(file)?.size == content.size();
    if is_whole {
        job.count_shared(content.size());
    } else {
        // Whatever it was, it was not the content.
        rustix::fs::ftruncate(file, 0)?;
    }
    Ok(is_whole)
}

fn write_mapped(job: &Job<'_>, file: &File, content: &Content, old: Option<&Old>) -> Result<u64, WriteError> {
    let size = content.size();
    if let Content::Whole { block, .. } = content {
        let bytes = fetch(job, block, size).map_err(WriteError::Object)?;
        return file.write_all_at(&bytes, 0).map(|()| size).map_err(WriteError::Target);
    }
    rustix::fs::ftruncate(file, size).map_err(|error| WriteError::Target(error.into()))?;
    let Some(map) = object::read_map(job.request.store, content).map_err(WriteError::Object)? else {
        return Ok(0);
    };
    let mut written = 0;
    map.for_each_window(size, |block, extents| {
        job.check_cancel().map_err(WriteError::Cancelled)?;
        let len = extents.iter().map(|extent| extent.len).sum();
        let bytes = match old.and_then(|old| old.read(job, block, extents)) {
            Some(bytes) => bytes,
            None => fetch(job, block, len).map_err(WriteError::Object)?,
        };
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
