//! Reading the upper directory: what each of its names means, and the bytes of changed files.
//!
//! Everything is kept in memory until the merge, so the number of names is limited: a change that is as large as
//! a home is scanned like one.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FileType;

use super::index::ChangedInodes;
use super::known::{Known, KnownFile};
use super::marks::{self, Marks, Opaque, Redirect};
use super::{TrackedError, TrackedRequest};
use crate::anchor::Anchor;
use crate::block::Upload;
use crate::manifest::{DEPTH_MAX, DeviceNumber, Entry, EntryBody, Meta, Xattrs};
use crate::object;
use crate::path::show;
use crate::read_file::{FileReads, ReadError};
use crate::secure::SecureError;
use crate::stat_cache;
use crate::sys::{self, Names, Stat};
use crate::work::Tasks;

/// Names of the upper directory at most. Each costs some 300 bytes until the merge.
pub(super) const NAMES_MAX: usize = 250_000;
/// Files that one task reads, and their bytes.
const BATCH_FILES: usize = 64;
const BATCH_BYTES: u64 = 1024 * 1024;
/// Paths of one kind that a report names; the count goes on.
const REPORTED_MAX: usize = 100;

/// What a name means.
#[derive(Debug)]
pub(super) enum What {
    /// What is below under this name is gone.
    Whiteout,
    /// It is there, hides what is below, and is not kept.
    NotKept,
    Directory {
        /// Its place in [`Upper::dirs`].
        number: usize,
        meta: Meta,
        opaque: bool,
        redirect: Option<Redirect>,
    },
    /// A regular file of which only the metadata is here.
    Metacopy { meta: Meta, redirect: Option<Redirect>, inode: u64, links: u32 },
    /// Anything else.
    Whole(Whole),
}

#[derive(Debug)]
pub(super) struct Whole {
    /// The encoded entry; of a file set when it is read.
    pub(super) entry: Arc<[u8]>,
    /// Of a regular file its size, else none.
    pub(super) file_bytes: Option<u64>,
    pub(super) inode: u64,
    pub(super) links: u32,
}

#[derive(Debug)]
pub(super) struct UpperEntry {
    pub(super) name: Box<[u8]>,
    pub(super) what: What,
}

/// Everything that changed.
#[derive(Debug)]
pub(super) struct Upper {
    /// Entries of each directory, sorted by name; the home's own first.
    pub(super) dirs: Vec<Vec<UpperEntry>>,
    pub(super) root_meta: Meta,
    pub(super) read: Vec<KnownFile>,
    pub(super) files_read: u64,
    pub(super) bytes_read: u64,
    pub(super) warnings: Vec<String>,
    pub(super) skipped: u64,
    pub(super) skipped_paths: Vec<String>,
}

struct ToRead {
    slot: usize,
    name: CString,
    meta: Meta,
    links: u32,
}

enum Task {
    Scan { anchor: Arc<Anchor>, number: usize, opaque: Opaque },
    Read { anchor: Arc<Anchor>, number: usize, files: Vec<ToRead> },
}

type Queue = Tasks<Task, TrackedError>;
/// The entry of an inode with several names, once the first of them is read.
type SharedEntry = Arc<Mutex<Option<(Arc<[u8]>, u64)>>>;

struct Scan<'a> {
    request: &'a TrackedRequest<'a>,
    reads: FileReads<'a>,
    known: &'a Known,
    changed: &'a ChangedInodes,
    upper: Mutex<Upper>,
    shared: Mutex<HashMap<u64, SharedEntry>>,
    names: AtomicUsize,
    files_read: AtomicU64,
    bytes_read: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unreadable(anchor: &Anchor, name: &[u8], source: io::Error) -> TrackedError {
    SecureError::Unreadable { path: show(&anchor.path_of(name)), source }.into()
}

pub(super) fn scan(
    request: &TrackedRequest<'_>,
    dir: OwnedFd,
    reads: FileReads<'_>,
    known: &Known,
    changed: &ChangedInodes,
) -> Result<Upper, TrackedError> {
    let home_error = |source| SecureError::Home { dir: request.upper.to_owned(), source };
    let stat = sys::stat_fd(dir.as_fd()).map_err(home_error)?;
    let (xattrs, marks) = marks::read_followed(&sys::fd_path(dir.as_fd())).map_err(home_error)?;
    if !marks.has_origin {
        let problem = "no overlay was mounted on the upper directory";
        return Err(TrackedError::Marks { path: String::new(), problem });
    }
    let root_meta = meta_of(reads.upload, &stat, &xattrs)?;
    let scan = Scan {
        request,
        reads,
        known,
        changed,
        upper: Mutex::new(Upper {
            dirs: vec![Vec::new()],
            root_meta,
            read: Vec::new(),
            files_read: 0,
            bytes_read: 0,
            warnings: Vec::new(),
            skipped: 0,
            skipped_paths: Vec::new(),
        }),
        shared: Mutex::default(),
        names: AtomicUsize::new(0),
        files_read: AtomicU64::new(0),
        bytes_read: AtomicU64::new(0),
    };
    let first = Task::Scan { anchor: Anchor::root(dir), number: 0, opaque: marks.opaque };
    Queue::run(request.threads, first, |task, queue| {
        if request.cancel.load(Ordering::Relaxed) {
            return Err(SecureError::Cancelled.into());
        }
        match task {
            Task::Scan { anchor, number, opaque } => scan.dir(&anchor, number, opaque, queue),
            Task::Read { anchor, number, files } => scan.read_batch(&anchor, number, files),
        }
    })?;
    let mut upper = scan.upper.into_inner().unwrap_or_else(PoisonError::into_inner);
    upper.files_read = scan.files_read.into_inner();
    upper.bytes_read = scan.bytes_read.into_inner();
    Ok(upper)
}

fn meta_of(upload: &dyn Upload, stat: &Stat, xattrs: &Xattrs) -> Result<Meta, TrackedError> {
    Ok(Meta { mode: stat.mode, mtime: stat.mtime, xattrs: object::put_blob(upload, &xattrs.encode())? })
}

impl Scan<'_> {
    fn dir(
        &self,
        anchor: &Arc<Anchor>,
        number: usize,
        opaque: Opaque,
        queue: &Queue,
    ) -> Result<(), TrackedError> {
        let dir = anchor.open().map_err(|error| unreadable(anchor, b"", error))?;
        let names = Names::read(dir.as_fd()).map_err(|error| unreadable(anchor, b"", error))?;
        if self.names.fetch_add(names.len(), Ordering::Relaxed) + names.len() > NAMES_MAX {
            return Err(TrackedError::TooMany);
        }
        let path = if self.request.excludes.needs_path() { anchor.path() } else { Vec::new() };
        // One prefix for all names: attributes are asked for by path, also of what cannot be opened.
        let prefix = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
        let mut entries = Vec::with_capacity(names.len());
        let mut to_read: Vec<(u64, ToRead)> = Vec::new();
        let mut children = Vec::new();
        for name in names.iter() {
            let bytes = name.to_bytes();
            let stat = sys::stat_at(dir.as_fd(), name).map_err(|error| unreadable(anchor, bytes, error))?;
            let is_dir = stat.file_type == FileType::Directory;
            let marks_of = || -> Result<(Xattrs, Marks), TrackedError> {
                let full = [prefix.as_slice(), name.to_bytes_with_nul()].concat();
                let full = CStr::from_bytes_with_nul(&full).map_err(io::Error::other);
                full.and_then(marks::read).map_err(|error| unreadable(anchor, bytes, error))
            };
            let what = if is_whiteout(&stat) {
                What::Whiteout
            } else if self.request.excludes.excludes(&path, bytes, is_dir) {
                What::NotKept
            } else {
                match stat.file_type {
                    FileType::Directory => {
                        let (xattrs, marks) = marks_of()?;
                        children.push((entries.len(), name.to_owned(), marks.opaque));
                        What::Directory {
                            number: 0,
                            meta: meta_of(self.reads.upload, &stat, &xattrs)?,
                            opaque: marks.opaque == Opaque::Yes,
                            redirect: marks.redirect,
                        }
                    }
                    FileType::RegularFile => {
                        let (xattrs, marks) = marks_of()?;
                        let meta = meta_of(self.reads.upload, &stat, &xattrs)?;
                        if opaque == Opaque::HoldsWhiteouts && marks.whiteout && stat.size == 0 {
                            What::Whiteout
                        } else if marks.metacopy && !self.changed.by_inode.contains_key(&stat.inode) {
                            let (inode, links) = (stat.inode, stat.links);
                            What::Metacopy { meta, redirect: marks.redirect, inode, links }
                        } else {
                            self.file(&stat, meta, name, entries.len(), &mut to_read)
                        }
                    }
                    FileType::Symlink => {
                        let target = rustix::fs::readlinkat(&*dir, name, Vec::new());
                        let target = target.map_err(|error| unreadable(anchor, bytes, error.into()))?;
                        let meta = meta_of(self.reads.upload, &stat, &Xattrs::default())?;
                        special(&stat, meta, EntryBody::Symlink { target: target.into_bytes() })
                    }
                    FileType::Fifo | FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice => {
                        let (xattrs, _) = marks_of()?;
                        let body = match stat.file_type {
                            FileType::Socket => EntryBody::Socket,
                            FileType::CharacterDevice => EntryBody::CharacterDevice(stat.number),
                            FileType::BlockDevice => EntryBody::BlockDevice(stat.number),
                            _ => EntryBody::Fifo,
                        };
                        special(&stat, meta_of(self.reads.upload, &stat, &xattrs)?, body)
                    }
                    _ => {
                        let mut upper = lock(&self.upper);
                        upper.skipped += 1;
                        if upper.skipped_paths.len() < REPORTED_MAX {
                            upper.skipped_paths.push(show(&anchor.path_of(bytes)));
                        }
                        What::NotKept
                    }
                }
            };
            self.request.progress.files_done(1);
            entries.push(UpperEntry { name: bytes.into(), what });
        }
        let mut tasks = batches(anchor, number, to_read);
        if !children.is_empty() && anchor.depth() >= DEPTH_MAX {
            let limit = "directories below each other";
            return Err(SecureError::Limit { path: show(&anchor.path()), limit }.into());
        }
        let mut upper = lock(&self.upper);
        for (slot, name, opaque) in children {
            let child = upper.dirs.len();
            upper.dirs.push(Vec::new());
            if let What::Directory { number, .. } = &mut entries[slot].what {
                *number = child;
            }
            tasks.push(Task::Scan { anchor: Anchor::child(anchor, name), number: child, opaque });
        }
        upper.dirs[number] = entries;
        drop(upper);
        queue.extend(tasks);
        Ok(())
    }

    fn file(
        &self,
        stat: &Stat,
        meta: Meta,
        name: &CStr,
        slot: usize,
        to_read: &mut Vec<(u64, ToRead)>,
    ) -> What {
        let (inode, links) = (stat.inode, stat.links);
        let mut whole = Whole { entry: Arc::default(), file_bytes: Some(stat.size), inode, links };
        if let Some(number) = self.changed.by_inode.get(&inode) {
            let changed = &self.changed.all[*number];
            whole.entry = Arc::from(&*changed.entry);
            whole.file_bytes = changed.file_bytes;
        } else if let Some(known) = self.known.find(stat) {
            whole.entry = Arc::from(&*known.entry);
            lock(&self.upper).read.push(known.clone());
        } else {
            to_read.push((stat.size, ToRead { slot, name: name.to_owned(), meta, links }));
        }
        What::Whole(whole)
    }

    fn read_batch(&self, anchor: &Anchor, number: usize, files: Vec<ToRead>) -> Result<(), TrackedError> {
        let dir = anchor.open().map_err(|error| unreadable(anchor, b"", error))?;
        for to_read in files {
            let slot = to_read.slot;
            let (entry, size) = self.read_one(anchor, dir.as_fd(), to_read)?;
            let mut upper = lock(&self.upper);
            if let Some(What::Whole(whole)) = upper.dirs[number].get_mut(slot).map(|found| &mut found.what) {
                whole.entry = entry;
                whole.file_bytes = Some(size);
            }
        }
        Ok(())
    }

    fn read_one(
        &self,
        anchor: &Anchor,
        dir: BorrowedFd<'_>,
        to_read: ToRead,
    ) -> Result<(Arc<[u8]>, u64), TrackedError> {
        let name = to_read.name.to_bytes();
        let failed = |error: io::Error| unreadable(anchor, name, error);
        let start = stat_cache::now();
        let file = File::from(sys::open_file_at(dir, &to_read.name).map_err(failed)?);
        let stat = sys::stat_fd(file.as_fd()).map_err(failed)?;
        if stat.file_type != FileType::RegularFile {
            return Err(failed(io::Error::other("it becomes something else while it is looked at")));
        }
        let shared =
            (to_read.links > 1).then(|| Arc::clone(lock(&self.shared).entry(stat.inode).or_default()));
        let mut slot = shared.as_ref().map(|shared| lock(shared));
        if let Some(done) = slot.as_ref().and_then(|slot| (**slot).clone()) {
            return Ok(done);
        }
        let read = self.reads.read(&file, stat, || Ok(())).map_err(|error| match error {
            ReadError::Io(error) => failed(error),
            ReadError::Secure(error) => error.into(),
        })?;
        self.files_read.fetch_add(1, Ordering::Relaxed);
        self.bytes_read.fetch_add(read.bytes_read, Ordering::Relaxed);
        self.request.progress.bytes_done(read.bytes_read);
        let meta = Meta { mode: read.stat.mode, mtime: read.stat.mtime, xattrs: to_read.meta.xattrs };
        let size = read.content.size();
        let entry: Arc<[u8]> = Entry { meta, body: EntryBody::File(read.content) }.encode().into();
        let mut upper = lock(&self.upper);
        if !read.stable {
            upper.warnings.push(format!("`{}` changed while it was read", show(&anchor.path_of(name))));
        } else if !stat_cache::is_racy(read.stat.ctime, start) {
            let (inode, ctime) = (read.stat.inode, read.stat.ctime);
            upper.read.push(KnownFile { inode, ctime, size, entry: (*entry).into() });
        }
        drop(upper);
        if let Some(slot) = &mut slot {
            **slot = Some((Arc::clone(&entry), size));
        }
        Ok((entry, size))
    }
}

fn special(stat: &Stat, meta: Meta, body: EntryBody) -> What {
    let entry = Entry { meta, body }.encode().into();
    What::Whole(Whole { entry, file_bytes: None, inode: stat.inode, links: stat.links })
}

/// Overlayfs says "gone" with a character device without a number.
fn is_whiteout(stat: &Stat) -> bool {
    stat.file_type == FileType::CharacterDevice && stat.number == DeviceNumber::NONE
}

fn batches(anchor: &Arc<Anchor>, number: usize, to_read: Vec<(u64, ToRead)>) -> Vec<Task> {
    let mut tasks = Vec::new();
    let mut files = Vec::new();
    let mut bytes = 0;
    for (size, file) in to_read {
        files.push(file);
        bytes += size;
        if files.len() == BATCH_FILES || bytes >= BATCH_BYTES {
            let files = std::mem::take(&mut files);
            tasks.push(Task::Read { anchor: Arc::clone(anchor), number, files });
            bytes = 0;
        }
    }
    if !files.is_empty() {
        tasks.push(Task::Read { anchor: Arc::clone(anchor), number, files });
    }
    tasks
}
