//! How far a secure or materialize is, for people who wait.

use std::sync::atomic::{AtomicU64, Ordering};

/// Receives counts from several threads; must not block.
pub trait Progress: Send + Sync {
    /// So many more files are done (looked at, or put in place).
    fn files_done(&self, files: u64);
    /// So many more bytes were read from the home, or written to it.
    fn bytes_done(&self, bytes: u64);
}

/// Nobody waits.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn files_done(&self, _: u64) {}
    fn bytes_done(&self, _: u64) {}
}

/// Sums that another thread reads at will.
#[derive(Debug, Default)]
pub struct Counters {
    files: AtomicU64,
    bytes: AtomicU64,
}

impl Counters {
    /// Files so far.
    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Progress for Counters {
    fn files_done(&self, files: u64) {
        self.files.fetch_add(files, Ordering::Relaxed);
    }
    fn bytes_done(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}
