//! Server-sent events, decoded from pieces that may be cut anywhere.

/// An event longer than this is not one of ours; a tool result that reaches a client is far smaller.
const EVENT_BYTES_MAX: usize = 32 * 1024 * 1024;

/// The stream sent an event without end.
#[derive(Debug, thiserror::Error)]
#[error("an event of more than {EVENT_BYTES_MAX} bytes")]
pub(crate) struct Oversized;

/// Holds what has arrived of an unfinished event.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    after_cr: bool,
}

impl Decoder {
    /// Takes the next piece and returns the `data` of every event that it completes.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<Vec<String>, Oversized> {
        let mut events = Vec::new();
        for &byte in piece {
            // A line ends with CR, LF or both; the LF of a pair may come with the next piece.
            let second_of_pair = self.after_cr && byte == b'\n';
            self.after_cr = byte == b'\r';
            if second_of_pair {
                continue;
            }
            if byte == b'\n' || byte == b'\r' {
                events.extend(self.end_of_line());
            } else {
                self.line.push(byte);
                if self.line.len() + self.data.len() > EVENT_BYTES_MAX {
                    return Err(Oversized);
                }
            }
        }
        Ok(events)
    }

    fn end_of_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            return std::mem::take(&mut self.has_data).then(|| String::from_utf8_lossy(&data).into_owned());
        }
        // Comments (heartbeats), names and ids are not needed: the data says itself what it is.
        if let Some(value) = line.strip_prefix(b"data:") {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.has_data = true;
            self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] =
        b": hello\n\nevent: x\r\nid: 1\r\ndata: {\"a\":1}\r\n\r\ndata:two\ndata: lines\n\ndata: cut off";

    #[test]
    fn events_are_the_same_wherever_the_stream_is_cut() {
        for size in 1..STREAM.len() {
            let mut decoder = Decoder::default();
            let mut events = Vec::new();
            for piece in STREAM.chunks(size) {
                events.extend(decoder.push(piece).unwrap());
            }
            assert_eq!(events, ["{\"a\":1}", "two\nlines"], "pieces of {size}");
        }
    }

    #[test]
    fn an_event_without_end_is_refused() {
        let mut decoder = Decoder::default();
        let piece = vec![b'x'; 1024 * 1024];
        let pushed: Result<Vec<_>, _> = (0..33).map(|_| decoder.push(&piece)).collect();
        assert!(pushed.is_err());
    }
}
