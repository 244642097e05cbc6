//! The floor: `getdents` and `statx` of every entry of a tree, with nothing made of the answers.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, StatxFlags};
use serde_json::{Value, json};

use crate::Outcome;

const DIR: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const BUFFER_BYTES: usize = 32 * 1024;

type Dir = (Option<Arc<OwnedFd>>, CString);

struct Walk {
    waiting: Mutex<Vec<Dir>>,
    changed: Condvar,
    /// Directories that are waiting or being read.
    open: AtomicUsize,
    entries: AtomicU64,
    failed: AtomicU64,
}

impl Walk {
    fn next(&self) -> Option<Dir> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(dir) = waiting.pop() {
                return Some(dir);
            }
            if self.open.load(Ordering::SeqCst) == 0 {
                return None;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn read(&self, (parent, name): Dir) -> rustix::io::Result<()> {
        let fd = match &parent {
            Some(parent) => rustix::fs::openat(&**parent, name.as_c_str(), DIR, Mode::empty())?,
            None => rustix::fs::open(name.as_c_str(), DIR, Mode::empty())?,
        };
        let fd = Arc::new(fd);
        let mut children = Vec::new();
        let mut buffer = [MaybeUninit::<u8>::uninit(); BUFFER_BYTES];
        let mut names = RawDir::new(&*fd, &mut buffer);
        let mut entries = 0;
        while let Some(entry) = names.next() {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
            std::hint::black_box(rustix::fs::statx(&*fd, name, flags, StatxFlags::BASIC_STATS)?);
            entries += 1;
            if entry.file_type() == FileType::Directory {
                children.push((Some(Arc::clone(&fd)), name.to_owned()));
            }
        }
        self.entries.fetch_add(entries, Ordering::Relaxed);
        if !children.is_empty() {
            self.open.fetch_add(children.len(), Ordering::SeqCst);
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner).extend(children);
            self.changed.notify_all();
        }
        Ok(())
    }

    fn work(&self) {
        while let Some(dir) = self.next() {
            if self.read(dir).is_err() {
                self.failed.fetch_add(1, Ordering::Relaxed);
            }
            if self.open.fetch_sub(1, Ordering::SeqCst) == 1 {
                drop(self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
                self.changed.notify_all();
            }
        }
    }
}

pub(crate) fn walk(dir: &Path, threads: usize) -> Outcome<Value> {
    use std::os::unix::ffi::OsStrExt as _;
    let first = (None, CString::new(dir.as_os_str().as_bytes())?);
    let walk = Walk {
        waiting: Mutex::new(vec![first]),
        changed: Condvar::new(),
        open: AtomicUsize::new(1),
        entries: AtomicU64::new(0),
        failed: AtomicU64::new(0),
    };
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| walk.work());
        }
    });
    Ok(json!({ "entries": walk.entries.into_inner(), "failed": walk.failed.into_inner() }))
}
