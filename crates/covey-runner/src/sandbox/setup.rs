//! The runner's end of the setup link (see `covey_wire::setup`).
//!
//! What stays true: every wait has a deadline. What does not belong here: what is set up.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use covey_wire::setup::{PACKET_BYTES_MAX, SetupReport, SetupSpec};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// From the start of stage 0 to the finished isolation; milliseconds on a quiet machine.
const SETUP_DEADLINE: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug)]
pub(super) struct SetupLink {
    socket: OwnedFd,
    deadline: Instant,
}

impl SetupLink {
    /// Makes the pair; the second end is stage 0's standard input.
    pub(super) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self { socket: ours, deadline: Instant::now() + SETUP_DEADLINE }, theirs))
    }

    /// Sends the spec with the listening control socket.
    pub(super) fn send(&self, spec: &SetupSpec, listener: BorrowedFd<'_>) -> io::Result<()> {
        let packet = serde_json::to_vec(spec)?;
        if packet.len() > PACKET_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the paths of the spec are too long"));
        }
        let fds = [listener];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::Error::other("no room for one descriptor"));
        }
        rustix::net::sendmsg(&self.socket, &[IoSlice::new(&packet)], &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Lets the new process go on.
    pub(super) fn say(&self, word: &[u8]) -> io::Result<()> {
        rustix::net::send(&self.socket, word, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// The next report; an error at the end of the link or the deadline.
    pub(super) fn receive(&self) -> io::Result<SetupReport> {
        loop {
            let left = self.deadline.checked_duration_since(Instant::now());
            let left =
                left.ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "the setup takes too long"))?;
            let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let mut fds = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)];
            match rustix::event::poll(&mut fds, Some(&wait)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => break,
                Err(error) => return Err(error.into()),
            }
        }
        let mut packet = vec![0; PACKET_BYTES_MAX];
        let (length, _) = rustix::net::recv(&self.socket, &mut packet[..], RecvFlags::empty())?;
        if length == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "sandboxd ended during the setup"));
        }
        Ok(serde_json::from_slice(&packet[..length])?)
    }
}
