//! Framing: a little-endian `u32` length, then that many bytes of MessagePack.
//!
//! The peer may be hostile (a sandbox's daemon shares its uid with the agent): a length above
//! [`FRAME_BYTES_MAX`] ends the link before anything is allocated, a frame that does not decode is an error
//! and never a panic, and buffered bytes never exceed one frame.

use std::io::{self, Read, Write};

use covey_types::size::FRAME_BYTES_MAX;
use serde::Serialize;
use serde::de::DeserializeOwned;

const LENGTH_BYTES: usize = 4;

/// Why a frame cannot be read or written. Every variant ends the link.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer announced, or we were asked to send, more than the limit.
    #[error("a frame of {length} bytes exceeds the limit of {FRAME_BYTES_MAX}")]
    TooLong {
        /// The announced length.
        length: usize,
    },
    /// The bytes are not the expected message.
    #[error("a frame does not decode: {detail}")]
    Malformed {
        /// The decoder's words.
        detail: String,
    },
    /// The message does not encode: our own fault.
    #[error("a message does not encode")]
    Encode(#[source] rmp_serde::encode::Error),
    /// The transport failed.
    #[error("the link failed")]
    Io(#[source] io::Error),
}

/// Encodes one message with its length in front.
///
/// # Errors
/// When the message exceeds [`FRAME_BYTES_MAX`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; LENGTH_BYTES];
    let mut serializer = rmp_serde::Serializer::new(&mut frame).with_struct_map();
    message.serialize(&mut serializer).map_err(FrameError::Encode)?;
    let length = frame.len() - LENGTH_BYTES;
    if length > FRAME_BYTES_MAX {
        return Err(FrameError::TooLong { length });
    }
    // FRAME_BYTES_MAX is far below u32::MAX, so the cast is exact.
    frame[..LENGTH_BYTES].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// Decodes the body of one frame.
///
/// # Errors
/// When the bytes are not a `T`, or carry anything behind it.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    let malformed = |detail: String| FrameError::Malformed { detail };
    let mut rest = body;
    let message = rmp_serde::from_read(&mut rest).map_err(|e| malformed(e.to_string()))?;
    if rest.is_empty() { Ok(message) } else { Err(malformed(format!("{} bytes too many", rest.len()))) }
}

/// Writes one message.
///
/// # Errors
/// When it does not encode or the transport fails.
pub fn write<T: Serialize>(sink: &mut impl Write, message: &T) -> Result<(), FrameError> {
    sink.write_all(&encode(message)?).map_err(FrameError::Io)
}

/// Reads one message, blocking; `None` at the end of the stream between two frames.
///
/// # Errors
/// When the peer sent too much, something else, or half a frame.
pub fn read<T: DeserializeOwned>(source: &mut impl Read) -> Result<Option<T>, FrameError> {
    let mut length = [0; LENGTH_BYTES];
    let mut filled = 0;
    while filled < LENGTH_BYTES {
        match source.read(&mut length[filled..]) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(FrameError::Io(e)),
        }
    }
    let length = checked_length(length)?;
    let mut body = Vec::new();
    // `take` + `read_to_end` grows with what really arrives, so a lying length costs nothing.
    let got = source.take(length as u64).read_to_end(&mut body).map_err(FrameError::Io)?;
    if got < length {
        return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    decode(&body).map(Some)
}

fn checked_length(bytes: [u8; LENGTH_BYTES]) -> Result<usize, FrameError> {
    let length = u32::from_le_bytes(bytes) as usize;
    if length > FRAME_BYTES_MAX { Err(FrameError::TooLong { length }) } else { Ok(length) }
}

/// Cuts a byte stream, arriving in pieces of any size, into messages: for asynchronous transports.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    /// Appends bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Takes the next whole message, if there is one. Call until `None` after each [`push`](Self::push), so
    /// that the buffer never holds more than one frame and one read.
    ///
    /// # Errors
    /// When the peer sent too much or something else; the link must then be closed.
    #[expect(
        clippy::should_implement_trait,
        reason = "generic over the message; an iterator has one item type"
    )]
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let Some(length) = self.buffer.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = checked_length(*length)?;
        let end = LENGTH_BYTES + length;
        if self.buffer.len() < end {
            return Ok(None);
        }
        let message = decode(&self.buffer[LENGTH_BYTES..end])?;
        self.buffer.drain(..end);
        Ok(Some(message))
    }

    /// Whether the stream may end here: no half frame is buffered.
    pub fn is_at_border(&self) -> bool {
        self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_survive_any_chunking(messages: Vec<(u32, String)>, chunk in 1_usize..64) {
            let stream: Vec<u8> = messages.iter().flat_map(|m| encode(m).unwrap()).collect();
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            for piece in stream.chunks(chunk) {
                decoder.push(piece);
                while let Some(message) = decoder.next::<(u32, String)>().unwrap() {
                    seen.push(message);
                }
            }
            prop_assert!(decoder.is_at_border());
            prop_assert_eq!(seen, messages);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next::<crate::tool::SandboxToRunner>() {}
        }
    }

    #[test]
    fn a_frame_over_the_limit_is_refused_before_it_is_read() {
        let mut stream: &[u8] = &[0xff, 0xff, 0xff, 0xff, 1, 2, 3];
        assert!(matches!(read::<u32>(&mut stream), Err(FrameError::TooLong { .. })));
        let mut decoder = Decoder::default();
        decoder.push(&[0xff, 0xff, 0xff, 0xff]);
        assert!(matches!(decoder.next::<u32>(), Err(FrameError::TooLong { .. })));
    }

    #[test]
    fn the_end_of_the_stream_is_clean_only_between_frames() {
        let frame = encode(&7_u32).unwrap();
        assert!(matches!(read::<u32>(&mut &frame[..0]), Ok(None)));
        assert!(matches!(read::<u32>(&mut &frame[..2]), Err(FrameError::Io(_))));
        assert!(matches!(read::<u32>(&mut &frame[..4]), Err(FrameError::Io(_))));
        assert!(matches!(read::<u32>(&mut &frame[..]), Ok(Some(7))));
    }
}
