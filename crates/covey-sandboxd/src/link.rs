//! The one live connection to a runner.
//!
//! What stays true: at most one connection is live, and a newer one with the same or a higher fencing token closes the
//! older (I5); a peer that does not read is dropped, so that it never holds up a call. What is lost with a
//! connection is repeated on the next (see [`crate::ledger`]). What does not belong here: what messages mean.

use std::io::Write;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use covey_types::FencingToken;
use covey_wire::frame;
use covey_wire::tool::SandboxToRunner;
use rustix::event::{PollFd, PollFlags};

/// A runner that does not take a message for so long is gone or broken.
const SEND_DEADLINE: Duration = Duration::from_secs(20);
/// How often the orphan watch looks; also what one look counts at most, so that time spent frozen does not count.
const ORPHAN_LOOK: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Current {
    stream: Option<UnixStream>,
    /// Grows with each connection, so that an old reader does not end a newer one.
    number: u64,
    token: FencingToken,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Link {
    current: Mutex<Current>,
    changed: Condvar,
}

impl Link {
    fn lock(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `stream` the live connection and returns its number; refuses a token smaller than the highest seen.
    pub(crate) fn replace(&self, stream: UnixStream, token: FencingToken) -> Result<u64, FencingToken> {
        let mut current = self.lock();
        if token < current.token {
            return Err(current.token);
        }
        if let Err(error) = stream.set_write_timeout(Some(SEND_DEADLINE)) {
            // Only a zero duration is refused; without the timeout a stuck peer would hold calls up.
            debug_assert!(false, "{error}");
        }
        close(current.stream.replace(stream));
        current.token = token;
        current.number += 1;
        self.changed.notify_all();
        Ok(current.number)
    }

    /// Ends connection `number`, if it is still the live one.
    pub(crate) fn end(&self, number: u64) {
        let mut current = self.lock();
        if current.number == number {
            close(current.stream.take());
            self.changed.notify_all();
        }
    }

    /// Sends on the live connection, if there is one. Whatever fails ends the connection: the peer asks again.
    pub(crate) fn send(&self, message: &SandboxToRunner) {
        self.send_all(std::slice::from_ref(message));
    }

    /// As [`Self::send`], in one write.
    pub(crate) fn send_all(&self, messages: &[SandboxToRunner]) {
        let mut bytes = Vec::new();
        for message in messages {
            match frame::encode(message) {
                Ok(frame) => bytes.extend_from_slice(&frame),
                // Every message is bounded far below a frame; one that is not would stay in the ledger, to be asked for.
                Err(_) => return,
            }
        }
        let mut current = self.lock();
        let failed = current.stream.as_mut().is_some_and(|stream| stream.write_all(&bytes).is_err());
        if failed {
            close(current.stream.take());
            self.changed.notify_all();
        }
    }

    /// Sends only if that cannot block: live output is for display and may be lost.
    pub(crate) fn offer(&self, message: &SandboxToRunner) {
        let Ok(mut current) = self.current.try_lock() else { return };
        let Some(stream) = current.stream.as_mut() else { return };
        let mut ready = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::OUT)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let is_ready = rustix::event::poll(&mut ready, Some(&now)).is_ok_and(|n| n > 0)
            && ready[0].revents().contains(PollFlags::OUT);
        if !is_ready {
            return;
        }
        // A writable unix socket has room for far more than one live message, so this does not block.
        if frame::encode(message).is_ok_and(|bytes| stream.write_all(&bytes).is_err()) {
            close(current.stream.take());
            self.changed.notify_all();
        }
    }

    /// Returns once there was no runner for `term` of running time (I14).
    pub(crate) fn wait_orphaned(&self, term: Duration) {
        let mut alone = Duration::ZERO;
        let mut current = self.lock();
        while alone < term {
            let looked = Instant::now();
            let (next, _) =
                self.changed.wait_timeout(current, ORPHAN_LOOK).unwrap_or_else(PoisonError::into_inner);
            current = next;
            if current.stream.is_some() {
                alone = Duration::ZERO;
            } else {
                alone += looked.elapsed().min(ORPHAN_LOOK);
            }
        }
    }
}

fn close(stream: Option<UnixStream>) {
    // Shutting down wakes the reader of that connection; a stream that is already down is as good.
    if let Some(Ok(()) | Err(_)) = stream.map(|stream| stream.shutdown(Shutdown::Both)) {}
}
