//! Changed inodes that have several names below.
//!
//! With its index switched on, overlayfs keeps such an inode whole: when one of its names is written, chmoded or
//! removed, the inode moves to the upper layer once, is entered in the index, and is seen under all its lower
//! names from then on, also in directories that the upper directory does not even mention.

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{FileType, Mode, OFlags};

use super::known::{Known, KnownFile};
use super::lower::Lower;
use super::{TrackedError, TrackedRequest, marks};
use crate::manifest::{DeviceNumber, Entry, EntryBody, LinkTable, Meta};
use crate::object;
use crate::path::show;
use crate::read_file::{FileReads, ReadError};
use crate::stat_cache;
use crate::sys::{self, Names};

/// One changed inode.
#[derive(Debug)]
pub(super) struct Changed {
    /// In the upper layer.
    pub(super) inode: u64,
    /// The encoded entry of all its names.
    pub(super) entry: Box<[u8]>,
    /// Of a regular file its size, else none.
    pub(super) file_bytes: Option<u64>,
}

/// All of them, and where below their names are.
#[derive(Debug, Default)]
pub(super) struct ChangedInodes {
    pub(super) all: Vec<Changed>,
    pub(super) by_inode: HashMap<u64, usize>,
    /// Groups of the base's link table that they are.
    pub(super) groups: HashSet<usize>,
    /// By lower directory: name, and which one.
    names: HashMap<Vec<u8>, HashMap<Vec<u8>, usize>>,
    /// Lower directories that have such a name somewhere below.
    above: HashSet<Vec<u8>>,
    /// What was read for them.
    pub(super) read: Vec<KnownFile>,
    pub(super) files_read: u64,
    pub(super) bytes_read: u64,
}

impl ChangedInodes {
    /// The changed inode at a lower path.
    pub(super) fn at(&self, dir: &[u8], name: &[u8]) -> Option<&Changed> {
        if self.all.is_empty() {
            return None;
        }
        self.names.get(dir)?.get(name).and_then(|number| self.all.get(*number))
    }

    /// Whether the lower directory has such a name in it or below.
    pub(super) fn are_below(&self, dir: &[u8]) -> bool {
        !self.above.is_empty() && self.above.contains(dir)
    }

    fn add_name(&mut self, path: &[u8], number: usize) {
        let (dir, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&[][..], path),
        };
        self.names.entry(dir.to_vec()).or_default().insert(name.to_vec(), number);
        let mut above = dir;
        loop {
            if !self.above.insert(above.to_vec()) || above.is_empty() {
                return;
            }
            above = above.iter().rposition(|byte| *byte == b'/').map_or(&[][..], |slash| &above[..slash]);
        }
    }
}

pub(super) fn read(
    request: &TrackedRequest<'_>,
    lower: &Lower<'_>,
    reads: FileReads<'_>,
    known: &Known,
    links: &LinkTable,
) -> Result<ChangedInodes, TrackedError> {
    let failed = |path: &std::path::Path| {
        let path = path.to_owned();
        move |source| TrackedError::Index { path, source }
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = match rustix::fs::open(request.index, flags, Mode::empty()) {
        Ok(dir) => dir,
        Err(rustix::io::Errno::NOENT) => return Ok(ChangedInodes::default()),
        Err(error) => return Err(failed(request.index)(error.into())),
    };
    let mut found = ChangedInodes::default();
    let names = Names::read(dir.as_fd()).map_err(failed(request.index))?;
    for name in names.iter() {
        let path = request.index.join(std::ffi::OsStr::from_bytes(name.to_bytes()));
        let stat = sys::stat_at(dir.as_fd(), name).map_err(failed(&path))?;
        let is_whiteout = stat.file_type == FileType::CharacterDevice && stat.number == DeviceNumber::NONE;
        // The kernel's own temporary names begin with `#`; directories and whiteouts are not of interest here.
        if stat.file_type == FileType::Directory || is_whiteout || name.to_bytes().starts_with(b"#") {
            continue;
        }
        let c_path = CString::new(path.as_os_str().as_bytes())
            .map_err(|error| failed(&path)(std::io::Error::other(error)))?;
        let (xattrs, marks) = marks::read(&c_path).map_err(failed(&path))?;
        let number = marks.group.filter(|number| *number < links.groups.len());
        let Some(number) = number else {
            let problem = "it is in the index and does not say which names it has";
            return Err(TrackedError::Marks { path: path.display().to_string(), problem });
        };
        let group = &links.groups[number];
        let xattrs = if stat.file_type == FileType::Symlink { Vec::new() } else { xattrs.encode() };
        let meta =
            Meta { mode: stat.mode, mtime: stat.mtime, xattrs: object::put_blob(reads.upload, &xattrs)? };
        let body = match stat.file_type {
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&dir, name, Vec::new());
                let target = target.map_err(|error| failed(&path)(error.into()))?;
                EntryBody::Symlink { target: target.into_bytes() }
            }
            FileType::Fifo => EntryBody::Fifo,
            FileType::Socket => EntryBody::Socket,
            FileType::CharacterDevice => EntryBody::CharacterDevice(stat.number),
            FileType::BlockDevice => EntryBody::BlockDevice(stat.number),
            _ if marks.metacopy => {
                let below = lower.entry(&group[0])?.map(|entry| entry.body);
                let Some(body @ EntryBody::File(_)) = below else {
                    let problem = "only its metadata was changed, and there is no file below";
                    return Err(TrackedError::Marks { path: show(&group[0]), problem });
                };
                body
            }
            _ => match known.find(&stat) {
                Some(file) => {
                    found.read.push(file.clone());
                    found.add(&stat, file.entry.clone(), Some(stat.size), number, group);
                    continue;
                }
                None => {
                    let start = stat_cache::now();
                    let opened = File::from(sys::open_file_at(dir.as_fd(), name).map_err(failed(&path))?);
                    let before = sys::stat_fd(opened.as_fd()).map_err(failed(&path))?;
                    let read = reads.read(&opened, before, || Ok(())).map_err(|error| match error {
                        ReadError::Io(error) => failed(&path)(error),
                        ReadError::Secure(error) => error.into(),
                    })?;
                    found.files_read += 1;
                    found.bytes_read += read.bytes_read;
                    let entry = Entry { meta: meta.clone(), body: EntryBody::File(read.content.clone()) };
                    if read.stable && !stat_cache::is_racy(stat.ctime, start) {
                        let (inode, ctime, size) = (stat.inode, stat.ctime, stat.size);
                        found.read.push(KnownFile { inode, ctime, size, entry: entry.encode().into() });
                    }
                    entry.body
                }
            },
        };
        let file_bytes = match &body {
            EntryBody::File(content) => Some(content.size()),
            _ => None,
        };
        found.add(&stat, Entry { meta, body }.encode().into(), file_bytes, number, group);
    }
    Ok(found)
}

impl ChangedInodes {
    fn add(
        &mut self,
        stat: &sys::Stat,
        entry: Box<[u8]>,
        file_bytes: Option<u64>,
        number: usize,
        group: &[Vec<u8>],
    ) {
        let at = self.all.len();
        self.all.push(Changed { inode: stat.inode, entry, file_bytes });
        self.by_inode.insert(stat.inode, at);
        self.groups.insert(number);
        group.iter().for_each(|path| self.add_name(path, at));
    }
}
