//! Output of processes that outlived their call: read on, into the call's file, so that they never block on a full pipe.
//!
//! What stays true: one thread for all; a file never grows above its limit, the rest is read and dropped.
//! What does not belong here: output of a running call.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags};

use super::call::OUTPUT_FILE_BYTES_MAX;
use super::lock;

/// Outputs followed at one time. The oldest is given up for a new one; its writer then gets SIGPIPE.
const FOLLOWED_MAX: usize = 256;
const READ_BYTES: usize = 64 * 1024;

#[derive(Debug)]
struct Leftover {
    fifo: File,
    /// Gone once writing failed; reading goes on.
    file: Option<File>,
    written: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Leftovers {
    arrived: Mutex<Vec<Leftover>>,
    wake: OwnedFd,
}

impl Leftovers {
    pub(super) fn new() -> io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { arrived: Mutex::default(), wake })
    }

    /// Follows `fifo` from now on.
    pub(super) fn add(&self, fifo: File, file: File, written: u64) {
        lock(&self.arrived).push(Leftover { fifo, file: Some(file), written });
        match rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
            // A full counter wakes as well.
            Ok(_) | Err(_) => {}
        }
    }

    /// Never returns.
    pub(super) fn pump(&self) {
        let mut followed: Vec<Leftover> = Vec::new();
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let ready = {
                let mut fds = vec![PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)];
                fds.extend(followed.iter().map(|l| PollFd::from_borrowed_fd(l.fifo.as_fd(), PollFlags::IN)));
                if rustix::event::poll(&mut fds, None).is_err() {
                    // Out of memory for the moment; the descriptors are ours and valid.
                    thread::sleep(Duration::from_millis(10));
                    continue;
                }
                fds.iter().map(|fd| !fd.revents().is_empty()).collect::<Vec<bool>>()
            };
            let mut is_ready = ready[1..].iter();
            followed.retain_mut(|leftover| {
                !is_ready.next().is_some_and(|ready| *ready) || leftover.read_on(&mut buffer)
            });
            if ready[0] {
                let mut counter = [0; 8];
                match rustix::io::read(&self.wake, &mut counter) {
                    Ok(_) | Err(_) => {}
                }
                followed.append(&mut lock(&self.arrived));
                let excess = followed.len().saturating_sub(FOLLOWED_MAX);
                followed.drain(..excess);
            }
        }
    }
}

impl Leftover {
    /// Moves one piece; `false` once every writer is gone.
    fn read_on(&mut self, buffer: &mut [u8]) -> bool {
        match self.fifo.read(buffer) {
            Ok(0) => false,
            Ok(length) => {
                let room = OUTPUT_FILE_BYTES_MAX.saturating_sub(self.written).min(length as u64);
                if let Some(file) = self.file.as_mut() {
                    if file.write_all(&buffer[..room as usize]).is_ok() {
                        self.written += room;
                    } else {
                        self.file = None;
                    }
                }
                true
            }
            Err(error) => matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
    }
}
