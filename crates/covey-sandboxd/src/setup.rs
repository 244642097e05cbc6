//! The sandbox's end of the setup link, and the error that travels on it.
//!
//! What does not belong here: what is set up.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use covey_wire::setup::{PACKET_BYTES_MAX, SetupPlace, SetupReport, SetupSpec};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};

/// Why the sandbox cannot be set up.
#[derive(Debug)]
pub(crate) struct SetupError {
    place: SetupPlace,
    what: String,
    source: io::Error,
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.source)
    }
}

/// Names what was tried and where, so that the runner can name the remedy.
pub(crate) trait Tried<T> {
    /// Attaches the place and the attempt to an error.
    fn tried(self, place: SetupPlace, what: impl Into<String>) -> Result<T, SetupError>;
}

impl<T, E: Into<io::Error>> Tried<T> for Result<T, E> {
    fn tried(self, place: SetupPlace, what: impl Into<String>) -> Result<T, SetupError> {
        self.map_err(|error| SetupError { place, what: what.into(), source: error.into() })
    }
}

/// The connected socket to the runner.
#[derive(Debug)]
pub(crate) struct SetupLink(OwnedFd);

impl SetupLink {
    /// Takes standard input, which is the link.
    pub(crate) fn from_stdin() -> Result<Self, SetupError> {
        let link = rustix::stdio::stdin().try_clone_to_owned();
        link.map(Self).tried(SetupPlace::Other, "take the setup link from standard input")
    }

    /// Receives the spec and the listening control socket.
    pub(crate) fn receive(&self) -> Result<(SetupSpec, OwnedFd), SetupError> {
        let mut packet = vec![0; PACKET_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut packet)];
        let received = rustix::net::recvmsg(&self.0, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
            .tried(SetupPlace::Other, "receive the spec")?;
        let listener = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let listener = listener
            .ok_or(io::Error::from(io::ErrorKind::InvalidInput))
            .tried(SetupPlace::Other, "receive the control socket")?;
        let spec =
            serde_json::from_slice(&packet[..received.bytes]).tried(SetupPlace::Other, "decode the spec")?;
        Ok((spec, listener))
    }

    /// Sends one report.
    pub(crate) fn report(&self, report: &SetupReport) -> Result<(), SetupError> {
        let packet = serde_json::to_vec(report).tried(SetupPlace::Other, "encode a report")?;
        rustix::net::send(&self.0, &packet, SendFlags::NOSIGNAL)
            .map(|_| ())
            .tried(SetupPlace::Other, "send a report")
    }

    /// Sends the failure; the link may already be gone, and then nobody is left to be told.
    pub(crate) fn report_failure(&self, error: &SetupError) -> Result<(), SetupError> {
        self.report(&SetupReport::Failed {
            place: error.place,
            what: error.to_string(),
            errno: error.source.raw_os_error().unwrap_or(0),
        })
    }

    /// Blocks until the runner says `word`; an error when it is gone.
    pub(crate) fn wait_for(&self, word: &[u8]) -> Result<(), SetupError> {
        let mut packet = [0; 8];
        let (length, _) = rustix::net::recv(self.0.as_fd(), &mut packet[..], RecvFlags::empty())
            .tried(SetupPlace::Other, "wait for the runner")?;
        if &packet[..length] == word {
            return Ok(());
        }
        Err(io::Error::from(io::ErrorKind::UnexpectedEof)).tried(SetupPlace::Other, "wait for the runner")
    }
}
