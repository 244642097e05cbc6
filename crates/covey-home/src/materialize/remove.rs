//! Removing what the snapshot does not have, anchored, however deep it is.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{AtFlags, FileType, RenameFlags};

use crate::sys::{self, Names, Stat};

/// Recursion holds one descriptor per level. Deeper directories are moved up beside the one that is being
/// removed and taken from there, so that no tree needs more.
const LEVELS_MAX: usize = 32;

/// Removes a name of any kind.
pub(super) fn remove(dir: BorrowedFd<'_>, name: &CStr, stat: &Stat) -> io::Result<()> {
    if stat.file_type != FileType::Directory {
        return Ok(rustix::fs::unlinkat(dir, name, AtFlags::empty())?);
    }
    let mut moved = Moved { top: dir, names: Vec::new(), next: 0 };
    remove_dir(dir, name, stat, 0, &mut moved)?;
    while let Some(name) = moved.names.pop() {
        let stat = sys::stat_at(dir, &name)?;
        remove_dir(dir, &name, &stat, 0, &mut moved)?;
    }
    Ok(())
}

struct Moved<'a> {
    top: BorrowedFd<'a>,
    names: Vec<CString>,
    next: u64,
}

impl Moved<'_> {
    fn take_up(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        loop {
            let new = CString::new(format!(".covey-removed-{}", self.next))?;
            self.next += 1;
            match rustix::fs::renameat_with(dir, name, self.top, new.as_c_str(), RenameFlags::NOREPLACE) {
                Ok(()) => {
                    self.names.push(new);
                    return Ok(());
                }
                Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn lift(dir: BorrowedFd<'_>, name: &CStr, stat: &Stat) -> io::Result<()> {
    let euid = rustix::process::geteuid().as_raw();
    if euid != 0 && stat.uid == euid && stat.mode & 0o700 != 0o700 {
        sys::chmod_path_fd(sys::open_path_at(dir, name)?.as_fd(), 0o700)?;
    }
    Ok(())
}

fn remove_dir(
    parent: BorrowedFd<'_>,
    name: &CStr,
    stat: &Stat,
    level: usize,
    moved: &mut Moved<'_>,
) -> io::Result<()> {
    lift(parent, name, stat)?;
    // An empty directory, the usual case at the bottom, needs no descriptor.
    if rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR).is_ok() {
        return Ok(());
    }
    let fd = sys::open_dir_at(parent, name)?;
    let names = Names::read(fd.as_fd())?;
    for child in names.iter() {
        let stat = sys::stat_at(fd.as_fd(), child)?;
        if stat.file_type != FileType::Directory {
            rustix::fs::unlinkat(&fd, child, AtFlags::empty())?;
        } else if level < LEVELS_MAX {
            remove_dir(fd.as_fd(), child, &stat, level + 1, moved)?;
        } else {
            // Renaming a directory writes its `..`, so it needs its owner's permission as well.
            lift(fd.as_fd(), child, &stat)?;
            moved.take_up(fd.as_fd(), child)?;
        }
    }
    Ok(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}
