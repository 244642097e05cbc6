//! Bytes that a program printed become text for a model: cleaned, and cut where they are too many.
//!
//! What stays true: the outcome is valid UTF-8 without NUL, terminal escapes and overwritten progress lines; a cut
//! falls on a line border where one is near, else on a character border, and says how much is missing.
//! What does not belong here: where the full text is kept.

use std::collections::VecDeque;

use covey_types::ByteCount;
use covey_types::size::TOOL_RESULT_BYTES_MAX;

/// Of a result that is cut, this much comes from the start, the rest from the end, where the errors stand.
const HEAD_BYTES_MAX: usize = TOOL_RESULT_BYTES_MAX * 2 / 5;
const TAIL_BYTES_MAX: usize = TOOL_RESULT_BYTES_MAX - HEAD_BYTES_MAX;
/// Raw bytes kept in memory; more than the cleaned limits, since cleaning shrinks.
const RAW_HEAD_BYTES_MAX: usize = HEAD_BYTES_MAX * 3 / 2;
const RAW_TAIL_BYTES_MAX: usize = TAIL_BYTES_MAX * 3 / 2;
/// How far a cut moves to reach a line border; a longer line is cut inside.
const LINE_SEARCH_BYTES_MAX: usize = 4096;

/// The start and the end of a stream of any length.
#[derive(Debug, Default)]
pub(crate) struct HeadTail {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

/// Text for the model.
#[derive(Debug)]
pub(crate) struct Shown {
    /// Cleaned and cut.
    pub(crate) text: String,
    /// Whether anything of the stream is missing or was replaced.
    pub(crate) is_incomplete: bool,
}

impl HeadTail {
    /// Takes the next bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = RAW_HEAD_BYTES_MAX.saturating_sub(self.head.len()).min(bytes.len());
        let (head, tail) = bytes.split_at(room);
        self.head.extend_from_slice(head);
        let keep = &tail[tail.len().saturating_sub(RAW_TAIL_BYTES_MAX)..];
        let overflow = (self.tail.len() + keep.len()).saturating_sub(RAW_TAIL_BYTES_MAX);
        self.tail.drain(..overflow.min(self.tail.len()));
        self.tail.extend(keep);
    }

    /// Bytes that came in all.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Everything that came, while nothing had to be dropped.
    pub(crate) fn whole(&self) -> Option<Vec<u8>> {
        let kept = self.head.len() + self.tail.len();
        (kept as u64 == self.total).then(|| self.head.iter().chain(&self.tail).copied().collect())
    }

    /// Cleans and cuts; `path` is where the note sends the reader.
    pub(crate) fn show(&self, path: &str) -> Shown {
        let (head, tail) = match self.whole() {
            Some(raw) => {
                let cleaned = clean(&raw);
                if cleaned.text.len() <= TOOL_RESULT_BYTES_MAX {
                    return Shown { is_incomplete: cleaned.has_replacements, text: cleaned.text };
                }
                (cleaned.text.clone(), cleaned.text)
            }
            None => {
                let tail: Vec<u8> = self.tail.iter().copied().collect();
                (clean(&self.head).text, clean(&tail).text)
            }
        };
        let head = cut_end(&head, HEAD_BYTES_MAX);
        let tail = cut_start(&tail, TAIL_BYTES_MAX);
        let missing = self.total.saturating_sub((head.len() + tail.len()) as u64);
        let border = if head.ends_with('\n') { "" } else { "\n" };
        let text = format!(
            "{head}{border}[... about {} cut here; the full output is in {path} ...]\n{tail}",
            ByteCount(missing)
        );
        Shown { text, is_incomplete: true }
    }
}

/// The longest start of at most `limit` bytes that ends at a line border, or at least a character border.
pub(crate) fn cut_end(text: &str, limit: usize) -> &str {
    if text.len() <= limit {
        return text;
    }
    let end = text.floor_char_boundary(limit);
    match text[..end].rfind('\n') {
        Some(line) if end - line <= LINE_SEARCH_BYTES_MAX => &text[..=line],
        _ => &text[..end],
    }
}

/// The longest end of at most `limit` bytes that starts at a line border, or at least a character border.
pub(crate) fn cut_start(text: &str, limit: usize) -> &str {
    if text.len() <= limit {
        return text;
    }
    let start = text.ceil_char_boundary(text.len() - limit);
    match text[start..].find('\n') {
        Some(line) if line <= LINE_SEARCH_BYTES_MAX => &text[start + line + 1..],
        _ => &text[start..],
    }
}

/// A cleaned text.
#[derive(Debug)]
pub(crate) struct Cleaned {
    /// The text.
    pub(crate) text: String,
    /// Whether bytes that are no text were replaced.
    pub(crate) has_replacements: bool,
}

/// Strips terminal escapes and control characters, collapses lines overwritten by carriage returns, replaces NUL and
/// invalid UTF-8.
pub(crate) fn clean(raw: &[u8]) -> Cleaned {
    let bytes = strip_escapes(raw);
    let decoded = String::from_utf8_lossy(&bytes);
    let has_replacements = matches!(decoded, std::borrow::Cow::Owned(_)) || bytes.contains(&0);
    let mut text = String::with_capacity(decoded.len());
    for line in decoded.split_inclusive('\n') {
        let (line, end) = match line.strip_suffix('\n') {
            Some(line) => (line.trim_end_matches('\r'), "\n"),
            None => (line, ""),
        };
        // What a terminal would still show: the text after the last return that anything follows.
        let shown = line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default();
        text.extend(shown.chars().filter_map(|c| match c {
            '\0' => Some(char::REPLACEMENT_CHARACTER),
            '\t' => Some(c),
            c if c.is_ascii_control() => None,
            c => Some(c),
        }));
        text.push_str(end);
    }
    Cleaned { text, has_replacements }
}

fn strip_escapes(raw: &[u8]) -> Vec<u8> {
    const ESCAPE: u8 = 0x1b;
    let mut bytes = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(at) = rest.iter().position(|b| *b == ESCAPE) {
        bytes.extend_from_slice(&rest[..at]);
        rest = &rest[at + 1..];
        let length = match rest.first() {
            // Control sequence: parameters, then one final byte.
            Some(b'[') => {
                1 + rest[1..]
                    .iter()
                    .position(|b| !(0x20..=0x3f).contains(b))
                    .map_or(rest.len() - 1, |n| n + 1)
            }
            // Operating system command and its kin: up to BEL or ESC \, on this line.
            Some(b']' | b'P' | b'_' | b'^' | b'X') => {
                let end = rest.iter().position(|b| matches!(*b, 0x07 | ESCAPE | b'\n')).unwrap_or(rest.len());
                match rest.get(end) {
                    Some(0x07) => end + 1,
                    Some(&ESCAPE) if rest.get(end + 1) == Some(&b'\\') => end + 2,
                    _ => end,
                }
            }
            // Two or more bytes: intermediates, then one final byte.
            Some(0x20..=0x2f) => {
                rest.iter().position(|b| !(0x20..=0x2f).contains(b)).map_or(rest.len(), |n| n + 1)
            }
            Some(0x30..=0x7e) => 1,
            _ => 0,
        };
        rest = &rest[length.min(rest.len())..];
    }
    bytes.extend_from_slice(rest);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_progress_lines_nul_and_invalid_utf_8_do_not_reach_the_model() {
        let shown = |raw: &[u8]| clean(raw).text;
        assert_eq!(shown(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07x\x1b(B"), "red x");
        assert_eq!(shown(b"10%\r20%\r100%\r\ndone\r\n"), "100%\ndone\n");
        assert_eq!(shown(b"a\0b\xffc\x07"), "a\u{fffd}b\u{fffd}c");
        assert_eq!(shown(b"cut off \x1b[1"), "cut off ");
        assert_eq!(shown(b"tab\tstays\n"), "tab\tstays\n");
    }

    #[test]
    fn a_long_output_keeps_both_ends_at_line_borders_and_says_what_is_missing() {
        let mut stream = HeadTail::default();
        for n in 0..100_000 {
            stream.push(format!("line {n}\n").as_bytes());
        }
        let shown = stream.show("/outputs/x.txt");
        assert!(shown.is_incomplete);
        assert!(shown.text.len() <= TOOL_RESULT_BYTES_MAX + 200, "{}", shown.text.len());
        assert!(shown.text.starts_with("line 0\nline 1\n"));
        assert!(shown.text.ends_with("line 99998\nline 99999\n"));
        assert!(shown.text.contains("/outputs/x.txt"));
        assert!(shown.text.lines().all(|line| line.starts_with("line ") || line.starts_with("[... about ")));
    }

    #[test]
    fn one_giant_line_is_cut_between_characters() {
        let mut stream = HeadTail::default();
        stream.push("ä".repeat(1 << 20).as_bytes());
        let shown = stream.show("p");
        assert!(shown.text.len() <= TOOL_RESULT_BYTES_MAX + 200);
        assert!(!shown.text.lines().next().unwrap_or_default().contains(char::REPLACEMENT_CHARACTER));
    }

    #[test]
    fn a_short_output_is_whole() {
        let mut stream = HeadTail::default();
        stream.push(b"hi\n");
        let shown = stream.show("p");
        assert_eq!((shown.text.as_str(), shown.is_incomplete), ("hi\n", false));
        assert_eq!(stream.whole().as_deref(), Some(&b"hi\n"[..]));
    }
}
