//! Owner, attributes, mode and time of an inode, in the one order that keeps them all.

use std::ffi::CStr;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{Gid, Mode, Uid};

use super::MaterializeError;
use super::job::Job;
use crate::manifest::{Blob, Meta, Xattrs};
use crate::object::{self, ObjectError};
use crate::path::show;
use crate::sys;

/// Whether a file that is created with this mode needs nothing more but its time: no attributes, no other owner,
/// and a mode that the process's mask lets through.
pub(super) fn is_simple(job: &Job<'_>, meta: &Meta) -> bool {
    let mode_is_kept = job.umask.is_some_and(|umask| meta.mode & (umask | 0o7000) == 0);
    mode_is_kept && job.request.owner.is_none() && meta.xattrs == Blob::empty()
}

/// Sets everything on an open file or directory. `existing`: its present attributes, where it had any.
pub(super) fn apply(
    job: &Job<'_>,
    fd: BorrowedFd<'_>,
    meta: &Meta,
    existing: &Xattrs,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<(), MaterializeError> {
    let failed = |error: io::Error| job.target(&path(), error);
    let wanted = wanted_xattrs(job, meta, path)?;
    if let Some((uid, gid)) = job.request.owner {
        let owner = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
        rustix::fs::fchown(fd, owner.0, owner.1).map_err(|error| failed(error.into()))?;
    }
    for old in &existing.0 {
        if !wanted.0.iter().any(|xattr| xattr.name == old.name) {
            sys::remove_xattr(fd, &old.name).map_err(failed)?;
        }
    }
    let is_user = |name: &[u8]| name.starts_with(b"user.");
    let set = |xattr: &crate::manifest::Xattr| {
        if let Err(error) = sys::set_xattr(fd, &xattr.name, &xattr.value) {
            warn(job, path, &xattr.name, &error);
        }
    };
    // Before the mode: its owner may not set them on a read-only file.
    wanted.0.iter().filter(|xattr| is_user(&xattr.name) && !existing.0.contains(xattr)).for_each(set);
    let mode = Mode::from_raw_mode(meta.mode.into());
    rustix::fs::fchmod(fd, mode).map_err(|error| failed(error.into()))?;
    // ACLs after the mode, which would change their mask; then the capability, which a change of owner clears.
    let is_acl = |name: &[u8]| name.starts_with(b"system.");
    wanted.0.iter().filter(|xattr| is_acl(&xattr.name)).for_each(set);
    wanted.0.iter().filter(|xattr| !is_user(&xattr.name) && !is_acl(&xattr.name)).for_each(set);
    sys::set_mtime(fd, meta.mtime).map_err(failed)
}

fn warn(job: &Job<'_>, path: &dyn Fn() -> Vec<u8>, name: &[u8], error: &io::Error) {
    job.warn(format!("`{}`: the attribute {} cannot be set: {error}", show(&path()), show(name)));
}

/// The attributes that the snapshot names; a gap if they cannot be read.
pub(super) fn wanted_xattrs(
    job: &Job<'_>,
    meta: &Meta,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<Xattrs, MaterializeError> {
    match object::read_xattrs(job.request.store, &meta.xattrs) {
        Ok(xattrs) => Ok(xattrs),
        Err(ObjectError::Store(error @ crate::StoreError::Unavailable { .. })) => Err(error.into()),
        Err(error) => {
            job.gap(&path(), error)?;
            job.note_bare(path());
            Ok(Xattrs::default())
        }
    }
}

/// A FIFO's metadata, through a descriptor that names it without opening it.
pub(super) fn apply_to_path_fd(
    job: &Job<'_>,
    (dir, name, fd): (BorrowedFd<'_>, &CStr, BorrowedFd<'_>),
    meta: &Meta,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<(), MaterializeError> {
    let failed = |error: io::Error| job.target(&path(), error);
    let by_fd = sys::fd_path(fd);
    if let Some((uid, gid)) = job.request.owner {
        rustix::fs::chown(by_fd.as_c_str(), Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
            .map_err(|error| failed(error.into()))?;
    }
    sys::chmod_path_fd(fd, meta.mode).map_err(failed)?;
    for xattr in wanted_xattrs(job, meta, path)?.0 {
        if let Err(error) = sys::set_xattr_path_fd(fd, &xattr.name, &xattr.value) {
            warn(job, path, &xattr.name, &error);
        }
    }
    sys::set_mtime_at(dir, name, meta.mtime).map_err(failed)
}
