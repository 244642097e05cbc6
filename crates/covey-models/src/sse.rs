//! Server-sent events, read from bytes that arrive in pieces of any size.
//!
//! A piece may end inside a character, between `\r` and `\n`, or inside the byte order mark; what comes out does
//! not depend on where the pieces end. Nothing here knows what the events mean. Invalid UTF-8 becomes U+FFFD, as
//! the grammar asks; the JSON layer then decides.

/// A line longer than this ends the stream: no provider sends one, and a peer that does would fill the memory.
pub const SSE_LINE_BYTES_MAX: usize = 8 * 1024 * 1024;
/// The `data` lines of one event together. Twice as much would only let a broken peer hold twice the memory.
pub const SSE_EVENT_BYTES_MAX: usize = 16 * 1024 * 1024;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// One dispatched event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SseEvent {
    /// The `event` field; none when it was absent or empty.
    pub event: Option<String>,
    /// The `data` lines, joined with `\n`.
    pub data: String,
    /// The last `id` that the stream has set, this event's own or an earlier one's.
    pub id: Option<String>,
}

/// Why a stream cannot be read on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// One line exceeds [`SSE_LINE_BYTES_MAX`].
    #[error("an event stream line exceeds {SSE_LINE_BYTES_MAX} bytes")]
    LineTooLong,
    /// The data of one event exceeds [`SSE_EVENT_BYTES_MAX`].
    #[error("the data of one stream event exceeds {SSE_EVENT_BYTES_MAX} bytes")]
    EventTooLong,
}

/// The state between two pieces.
#[derive(Debug, Default)]
pub struct SseParser {
    line: Vec<u8>,
    past_first_line: bool,
    after_carriage_return: bool,
    event: String,
    data: String,
    has_data: bool,
    id: Option<String>,
}

impl SseParser {
    /// Takes the next piece and returns the events that it completes, in order.
    ///
    /// # Errors
    /// When a limit is exceeded; the stream must then be dropped.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<SseEvent>, SseError> {
        let mut events = Vec::new();
        let mut rest = bytes;
        while let Some(&first) = rest.first() {
            // `\r\n` is one line end even when the piece border lies inside it.
            if std::mem::take(&mut self.after_carriage_return) && first == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let end = rest.iter().position(|b| matches!(b, b'\r' | b'\n'));
            let text = &rest[..end.unwrap_or(rest.len())];
            if self.line.len() + text.len() > SSE_LINE_BYTES_MAX {
                return Err(SseError::LineTooLong);
            }
            self.line.extend_from_slice(text);
            let Some(end) = end else { break };
            self.after_carriage_return = rest[end] == b'\r';
            rest = &rest[end + 1..];
            let line = std::mem::take(&mut self.line);
            if let Some(event) = self.end_line(&line)? {
                events.push(event);
            }
            self.line = line;
            self.line.clear();
        }
        Ok(events)
    }

    fn end_line(&mut self, line: &[u8]) -> Result<Option<SseEvent>, SseError> {
        let first = !std::mem::replace(&mut self.past_first_line, true);
        let line = if first { line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line) } else { line };
        if line.is_empty() {
            return Ok(self.dispatch());
        }
        let line = String::from_utf8_lossy(line);
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => self.event = value.to_owned(),
            "data" => {
                if self.data.len() + value.len() + 1 > SSE_EVENT_BYTES_MAX {
                    return Err(SseError::EventTooLong);
                }
                if self.has_data {
                    self.data.push('\n');
                }
                self.has_data = true;
                self.data.push_str(value);
            }
            "id" if !value.contains('\0') => self.id = Some(value.to_owned()),
            // Comments have an empty field name; `retry` and unknown fields are ignored by the grammar.
            _ => {}
        }
        Ok(None)
    }

    fn dispatch(&mut self) -> Option<SseEvent> {
        let event = std::mem::take(&mut self.event);
        let data = std::mem::take(&mut self.data);
        if !std::mem::take(&mut self.has_data) {
            return None;
        }
        Some(SseEvent { event: (!event.is_empty()).then_some(event), data, id: self.id.clone() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(pieces: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Result<Vec<SseEvent>, SseError> {
        let mut parser = SseParser::default();
        let mut events = Vec::new();
        for piece in pieces {
            events.extend(parser.push(piece.as_ref())?);
        }
        Ok(events)
    }

    fn event(event: &str, data: &str, id: &str) -> SseEvent {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        SseEvent { event: some(event), data: data.to_owned(), id: some(id) }
    }

    #[test]
    fn every_way_to_cut_a_stream_in_three_gives_the_same_events() {
        let stream = "\u{feff}: hello\r\nevent: a\r\ndata: ä€🦊\r\ndata:\rid:7\r\r\nevent:b\ndata:  x\nretry: 5\n\n\
                      data\n\nunknown: y\nid: bad\0\ndata: last\r\n\r\nevent: never\n\ndata: unfinished\n";
        let bytes = stream.as_bytes();
        let expected = vec![
            event("a", "ä€🦊\n", "7"),
            event("b", " x", "7"),
            event("", "", "7"),
            event("", "last", "7"),
        ];
        assert_eq!(parse([bytes]).unwrap(), expected);
        assert_eq!(parse(bytes.chunks(1)).unwrap(), expected);
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let pieces = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                assert_eq!(parse(pieces).unwrap(), expected, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn a_line_or_an_event_over_the_limit_ends_the_stream() {
        let mut parser = SseParser::default();
        let piece = vec![b'x'; SSE_LINE_BYTES_MAX];
        assert_eq!(parser.push(&piece), Ok(vec![]));
        assert_eq!(parser.push(b"x"), Err(SseError::LineTooLong));
        let mut line = b"data:".to_vec();
        line.resize(SSE_LINE_BYTES_MAX, b'x');
        line.push(b'\n');
        let mut parser = SseParser::default();
        assert_eq!(parser.push(&line), Ok(vec![]));
        assert_eq!(parser.push(&line), Ok(vec![]));
        assert_eq!(parser.push(&line), Err(SseError::EventTooLong));
    }

    fn written() -> impl Strategy<Value = (SseEvent, &'static str, bool)> {
        let text = "[^\r\n\0]{0,12}";
        let ends = prop::sample::select(vec!["\n", "\r\n", "\r"]);
        ("[a-z_]{1,8}", prop::collection::vec(text, 1..4), "[a-z0-9]{1,6}", ends, any::<bool>()).prop_map(
            |(name, lines, id, end, comment)| {
                (SseEvent { event: Some(name), data: lines.join("\n"), id: Some(id) }, end, comment)
            },
        )
    }

    proptest! {
        #[test]
        fn written_events_come_back_through_any_chunking(
            written in prop::collection::vec(written(), 0..6),
            sizes in prop::collection::vec(1_usize..9, 1..40),
        ) {
            let mut stream = String::new();
            for (event, end, comment) in &written {
                if *comment {
                    stream.push_str(": ping");
                    stream.push_str(end);
                }
                let name = event.event.clone().unwrap();
                stream.push_str(&format!("event: {name}{end}id: {}{end}", event.id.clone().unwrap()));
                for line in event.data.split('\n') {
                    stream.push_str(&format!("data: {line}{end}"));
                }
                stream.push_str(end);
            }
            let mut rest = stream.as_bytes();
            let mut pieces = Vec::new();
            for size in sizes.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, tail) = rest.split_at((*size).min(rest.len()));
                pieces.push(piece);
                rest = tail;
            }
            let expected: Vec<_> = written.into_iter().map(|(event, ..)| event).collect();
            prop_assert_eq!(parse(pieces).unwrap(), expected);
        }

        #[test]
        fn arbitrary_bytes_give_the_same_events_whole_and_byte_by_byte(bytes: Vec<u8>) {
            prop_assert_eq!(parse([&bytes]), parse(bytes.chunks(1)));
        }
    }
}
