//! What goes to stdout: one JSON value, a table, or text that is safe for a terminal.
//!
//! Everything that came from an agent, a model or a file name passes [`printable`] before a terminal sees it:
//! control characters in it could rewrite the screen or the window's title.

use std::io::{self, Write as _};

use serde_json::Value;

/// Writes one line to stdout.
pub(crate) fn line(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.write_all(b"\n")?;
    // Followed sessions are read by other programs as they happen.
    stdout.flush()
}

/// Writes `value` as JSON on one line, or as the text that `text` makes of it.
pub(crate) fn value(json: bool, value: &Value, text: impl FnOnce(&Value) -> String) -> io::Result<()> {
    if json { line(&value.to_string()) } else { line(text(value).trim_end()) }
}

/// Columns under headings, separated by two spaces; cells are made printable.
pub(crate) fn table<const N: usize>(headings: [&str; N], rows: &[[String; N]]) -> String {
    let rows: Vec<[String; N]> = rows.iter().map(|row| row.each_ref().map(|cell| one_line(cell))).collect();
    let mut widths = headings.map(|heading| heading.chars().count());
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in std::iter::once(&headings.map(String::from)).chain(&rows) {
        let mut cells = String::new();
        for (cell, width) in row.iter().zip(widths) {
            cells.push_str(cell);
            cells.extend(std::iter::repeat_n(' ', width - cell.chars().count() + 2));
        }
        text.push_str(cells.trim_end());
        text.push('\n');
    }
    text
}

/// A field as text: strings bare, absent and null as `-`.
pub(crate) fn field(value: &Value, pointer: &str) -> String {
    match value.pointer(pointer) {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// Labels and values under each other.
pub(crate) fn card(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    pairs.iter().map(|(label, value)| format!("{label:width$}  {}\n", one_line(value))).collect()
}

/// Replaces control characters but for line breaks and tabs.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

/// As [`printable`], with line breaks and tabs as spaces.
pub(crate) fn one_line(text: &str) -> String {
    printable(text).replace(['\n', '\t'], " ")
}

/// Whether an error only means that the reader of our stdout has seen enough (`covey … | head`).
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_end_without_spaces() {
        let rows = [["a".into(), "long name".into()], ["bcd".into(), "x".into()]];
        assert_eq!(table(["ID", "NAME"], &rows), "ID   NAME\na    long name\nbcd  x\n");
    }

    #[test]
    fn nothing_printed_can_steer_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\r\n\tc\u{9b}d"), "a\u{fffd}[2Jb\u{fffd}\n\tc\u{fffd}d");
        assert_eq!(one_line("a\nb\tc"), "a b c");
    }
}
