//! Memory to read files into, used again instead of asked for anew: a fresh page costs more than reading into it.
//!
//! What stays true: however many threads read, no more than [`LARGE_BUFFERS_MAX`] large buffers exist; a thread
//! that needs one more waits.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

use crate::block::BLOCK_BYTES_MAX;

/// A file up to this size is read into a small buffer, of which each thread may have one.
const SMALL_BYTES: usize = 256 * 1024;
/// Large buffers at most: they bound the memory of a secure on machines of many processors and while many
/// threads wait for a disk.
const LARGE_BUFFERS_MAX: usize = 4;

#[derive(Debug, Default)]
struct Idle {
    small: Vec<Vec<u8>>,
    large: Vec<Vec<u8>>,
    large_made: usize,
}

/// Buffers that nobody uses at the moment.
#[derive(Debug)]
pub(crate) struct Buffers {
    idle: Mutex<Idle>,
    given_back: Condvar,
    large_max: usize,
}

impl Buffers {
    pub(crate) fn new() -> Self {
        let processors = thread::available_parallelism().map_or(2, usize::from);
        let large_max = processors.clamp(2, LARGE_BUFFERS_MAX);
        Self { idle: Mutex::default(), given_back: Condvar::new(), large_max }
    }

    /// A buffer for up to `len` bytes. Whoever holds one must not ask for another.
    pub(crate) fn take(&self, len: usize) -> Buffer<'_> {
        debug_assert!(len <= BLOCK_BYTES_MAX, "a window is at most a block");
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if len <= SMALL_BYTES {
            // Whole from the beginning: growing it would leave holes in the heap.
            let bytes = idle.small.pop().unwrap_or_else(|| vec![0; SMALL_BYTES]);
            return Buffer { pool: self, bytes, is_large: false };
        }
        loop {
            if let Some(bytes) = idle.large.pop() {
                return Buffer { pool: self, bytes, is_large: true };
            }
            if idle.large_made < self.large_max {
                idle.large_made += 1;
                // Only pages that are read into take memory.
                return Buffer { pool: self, bytes: vec![0; BLOCK_BYTES_MAX], is_large: true };
            }
            idle = self.given_back.wait(idle).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A buffer that goes back when it is dropped.
#[derive(Debug)]
pub(crate) struct Buffer<'p> {
    pool: &'p Buffers,
    bytes: Vec<u8>,
    is_large: bool,
}

impl Buffer<'_> {
    /// Its first `len` bytes, with whatever was in them.
    pub(crate) fn first_bytes(&mut self, len: usize) -> &mut [u8] {
        &mut self.bytes[..len]
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut idle = self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_large {
            idle.large.push(bytes);
            self.pool.given_back.notify_one();
        } else {
            idle.small.push(bytes);
        }
    }
}
