//! What blocks are compressed with: tables and memory that cost much to make, so there are as many as processors and
//! they are used again.
//!
//! What stays true: however many threads read and hash, memory for compressing is bounded by the number of presses; a
//! thread that needs one more waits, which costs nothing, because compressing waits for a processor anyway.

use std::fmt;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

use super::pack::{self, Codec};

/// Presses at most, on machines with more processors.
const PRESSES_MAX: usize = 16;

/// Tables of zstd, room for what comes out, and room for the next group of small blocks.
pub(super) struct Press {
    compressor: zstd::bulk::Compressor<'static>,
    packed: Vec<u8>,
    /// Plain bytes of a group while it is compressed; empty between two uses.
    pub(super) group: Vec<u8>,
}

impl fmt::Debug for Press {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Press").finish_non_exhaustive()
    }
}

impl Press {
    /// What is to be stored for `plain`.
    pub(super) fn compress<'a>(&'a mut self, plain: &'a [u8]) -> io::Result<(Codec, &'a [u8])> {
        Self::compress_with(&mut self.compressor, &mut self.packed, plain)
    }

    /// The same for the group that it holds.
    pub(super) fn compress_group(&mut self) -> io::Result<(Codec, &[u8])> {
        Self::compress_with(&mut self.compressor, &mut self.packed, &self.group)
    }

    fn compress_with<'a>(
        compressor: &mut zstd::bulk::Compressor<'static>,
        packed: &'a mut Vec<u8>,
        plain: &'a [u8],
    ) -> io::Result<(Codec, &'a [u8])> {
        let codec = pack::compress(plain, compressor, packed)?;
        Ok((codec, if codec == Codec::Raw { plain } else { packed }))
    }
}

#[derive(Debug, Default)]
struct Idle {
    presses: Vec<Press>,
    made: usize,
}

/// The presses of one upload.
#[derive(Debug)]
pub(super) struct Presses {
    idle: Mutex<Idle>,
    given_back: Condvar,
    level: i32,
    max: usize,
}

impl Presses {
    pub(super) fn new(level: i32) -> Self {
        let max = thread::available_parallelism().map_or(2, usize::from).clamp(1, PRESSES_MAX);
        Self { idle: Mutex::default(), given_back: Condvar::new(), level, max }
    }

    /// One of them, when it is free. Whoever holds one must not ask for another.
    fn take(&self) -> io::Result<Press> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(press) = idle.presses.pop() {
                return Ok(press);
            }
            if idle.made < self.max {
                let compressor = zstd::bulk::Compressor::new(self.level)?;
                idle.made += 1;
                return Ok(Press { compressor, packed: Vec::new(), group: Vec::new() });
            }
            idle = self.given_back.wait(idle).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives one back for the next.
    fn give_back(&self, mut press: Press) {
        press.group.clear();
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).presses.push(press);
        self.given_back.notify_one();
    }

    /// Does `work` with a press.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Press) -> T) -> io::Result<T> {
        let mut press = self.take()?;
        let done = work(&mut press);
        self.give_back(press);
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn there_are_never_more_presses_than_allowed_and_each_is_used_again() {
        let presses = Presses { max: 2, ..Presses::new(1) };
        let (held, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let work = |press: &mut Press| {
                            most.fetch_max(held.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                            let (codec, packed) = press.compress(&[7; 1000]).unwrap();
                            assert!(codec == Codec::Zstd && packed.len() < 100);
                            held.fetch_sub(1, Ordering::SeqCst);
                        };
                        presses.with(work).unwrap();
                    }
                });
            }
        });
        assert!(most.into_inner() <= 2);
        let idle = presses.idle.into_inner().unwrap();
        assert_eq!(idle.presses.len(), idle.made);
    }
}
