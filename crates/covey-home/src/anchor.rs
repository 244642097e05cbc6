//! Directories of a tree by descriptor, however deep: every step down is one `openat` of one name that refuses
//! links, so no path is ever resolved and none can be too long or lead out (I13).
//!
//! A descriptor is kept while its directory is worked on. Below [`KEPT_DEPTH`] it is given back early and
//! opened again from the nearest kept one when a child needs it, so a deep tree does not use up descriptors.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::OFlags;

use crate::sys::{self, Stat};

/// Down to here every directory in work keeps its descriptor; real trees are rarely deeper.
const KEPT_DEPTH: usize = 24;
/// Below, one in this many does. A directory is opened again over at most this many names.
const KEPT_ONE_IN: usize = 32;

/// A directory of the tree.
#[derive(Debug)]
pub(crate) struct Anchor {
    parent: Option<Arc<Anchor>>,
    name: CString,
    depth: usize,
    fd: Mutex<Option<Arc<OwnedFd>>>,
}

impl Anchor {
    pub(crate) fn root(fd: OwnedFd) -> Arc<Self> {
        Arc::new(Self {
            parent: None,
            name: CString::default(),
            depth: 0,
            fd: Mutex::new(Some(Arc::new(fd))),
        })
    }

    /// A directory in `parent`; nothing is opened yet.
    pub(crate) fn child(parent: &Arc<Self>, name: CString) -> Arc<Self> {
        let depth = parent.depth + 1;
        Arc::new(Self { parent: Some(Arc::clone(parent)), name, depth, fd: Mutex::new(None) })
    }

    pub(crate) const fn depth(&self) -> usize {
        self.depth
    }

    pub(crate) fn parent(&self) -> Option<&Arc<Self>> {
        self.parent.as_ref()
    }

    pub(crate) fn name(&self) -> &CString {
        &self.name
    }

    const fn keeps(&self) -> bool {
        self.depth <= KEPT_DEPTH || self.depth.is_multiple_of(KEPT_ONE_IN)
    }

    /// Its descriptor.
    pub(crate) fn open(&self) -> io::Result<Arc<OwnedFd>> {
        let mut slot = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fd) = &*slot {
            return Ok(Arc::clone(fd));
        }
        let parent = self.parent.as_ref().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?.open()?;
        let fd = Arc::new(sys::open_dir_at(parent.as_fd(), &self.name)?);
        if self.keeps() {
            *slot = Some(Arc::clone(&fd));
        }
        Ok(fd)
    }

    /// Gives the descriptor back once the directory and everything below is done.
    pub(crate) fn close(&self) {
        if self.parent.is_some() {
            *self.fd.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// The path from the root, and `name` below it.
    pub(crate) fn path_of(&self, name: &[u8]) -> Vec<u8> {
        let mut names = vec![name];
        let mut at = self;
        while let Some(parent) = &at.parent {
            names.push(at.name.to_bytes());
            at = parent;
        }
        names.reverse();
        names.retain(|name| !name.is_empty());
        names.join(&b'/')
    }

    /// The path from the root.
    pub(crate) fn path(&self) -> Vec<u8> {
        self.path_of(b"")
    }
}

/// Gives the owner the permissions on a directory that are needed to work in it; returns the mode to put back.
/// Root needs none.
pub(crate) fn lift_dir(anchor: &Anchor, stat: &Stat, needed: u16) -> io::Result<Option<u16>> {
    // The mode first: nearly all directories are open to their owner, and asking who we are costs a call each time.
    if stat.mode & needed == needed {
        return Ok(None);
    }
    let euid = rustix::process::geteuid().as_raw();
    if euid == 0 || stat.uid != euid {
        return Ok(None);
    }
    set_dir_mode(anchor, stat.mode | needed)?;
    Ok(Some(stat.mode))
}

pub(crate) fn set_dir_mode(anchor: &Anchor, mode: u16) -> io::Result<()> {
    let Some(parent) = anchor.parent() else {
        let fd = anchor.open()?;
        return Ok(rustix::fs::fchmod(&*fd, rustix::fs::Mode::from_raw_mode(mode.into()))?);
    };
    let parent = parent.open()?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(&*parent, anchor.name().as_c_str(), flags, rustix::fs::Mode::empty())?;
    sys::chmod_path_fd(fd.as_fd(), mode)
}
