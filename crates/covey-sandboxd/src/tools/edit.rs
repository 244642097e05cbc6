//! `edit`: one text for another, where it stands exactly once or everywhere.
//!
//! What stays true: the file's byte order mark and line ends are kept; nothing is changed on any doubt.
//! What does not belong here: fuzzy matching.

use std::path::Path;

use covey_wire::tool::ToolResult;
use serde::Deserialize;

use super::file::{self, Files};
use super::{Answer, Refusal, resolve};

/// Places named when a text is not unique.
const PLACES_NAMED_MAX: usize = 20;

#[derive(Debug, Deserialize)]
pub(super) struct EditInput {
    file_path: String,
    old_string: String,
    new_string: String,
    #[serde(default)]
    replace_all: bool,
}

pub(super) fn run(files: &Files, input: &EditInput, dir: &Path) -> Answer {
    let path = resolve(&input.file_path, dir)?;
    let bytes = file::read_editable(&path)?;
    let target =
        path.canonicalize().map_err(|error| Refusal(format!("cannot open {}: {error}", path.display())))?;
    files.require_seen(&target, &bytes)?;
    let (new, places) =
        replace(&bytes, input).map_err(|Refusal(why)| Refusal(format!("{}: {why}", path.display())))?;
    files.replace(&target, &new)?;
    let lines: Vec<String> = places.iter().take(PLACES_NAMED_MAX).map(usize::to_string).collect();
    let (count, lines) = (places.len(), lines.join(", "));
    Ok(ToolResult::text(format!("replaced {count} place(s) in {} (line {lines})", path.display()), false))
}

/// The new content and the line numbers of the places.
fn replace(bytes: &[u8], input: &EditInput) -> Result<(Vec<u8>, Vec<usize>), Refusal> {
    if input.old_string.is_empty() {
        return Err("old_string is empty; give the text to replace, or use write".into());
    }
    if input.old_string == input.new_string {
        return Err("old_string and new_string are the same".into());
    }
    let exact = (input.old_string.clone(), input.new_string.clone());
    let unix = (exact.0.replace("\r\n", "\n"), exact.1.replace("\r\n", "\n"));
    let dos = (unix.0.replace('\n', "\r\n"), unix.1.replace('\n', "\r\n"));
    let found = [exact, dos, unix].into_iter().find_map(|(old, new)| {
        let offsets = offsets(bytes, old.as_bytes());
        (!offsets.is_empty()).then_some((old, new, offsets))
    });
    let Some((old, new, offsets)) = found else {
        return Err("old_string does not occur; read the file again and copy it exactly".into());
    };
    let lines: Vec<usize> = offsets.iter().map(|offset| line_number(bytes, *offset)).collect();
    if offsets.len() > 1 && !input.replace_all {
        let named: Vec<String> = lines.iter().take(PLACES_NAMED_MAX).map(usize::to_string).collect();
        return Err(format!(
            "old_string occurs {} times (lines {}); make it longer so that it is unique, or set replace_all",
            offsets.len(),
            named.join(", ")
        )
        .into());
    }
    let mut changed = Vec::with_capacity(bytes.len());
    let mut rest = 0;
    for offset in offsets {
        changed.extend_from_slice(&bytes[rest..offset]);
        changed.extend_from_slice(new.as_bytes());
        rest = offset + old.len();
    }
    changed.extend_from_slice(&bytes[rest..]);
    Ok((changed, lines))
}

/// Where `needle` stands, without overlaps.
fn offsets(bytes: &[u8], needle: &[u8]) -> Vec<usize> {
    let Ok(pattern) = regex::bytes::Regex::new(&literal(needle)) else { return Vec::new() };
    pattern.find_iter(bytes).map(|found| found.start()).collect()
}

/// A pattern that matches exactly these bytes. `needle` comes from JSON, so it is text.
fn literal(needle: &[u8]) -> String {
    format!("(?s-u:{})", regex::escape(&String::from_utf8_lossy(needle)))
}

fn line_number(bytes: &[u8], offset: usize) -> usize {
    bytes[..offset].iter().filter(|b| **b == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edit(content: &str, old: &str, new: &str, replace_all: bool) -> Result<String, String> {
        let input = EditInput {
            file_path: String::new(),
            old_string: old.into(),
            new_string: new.into(),
            replace_all,
        };
        let changed = replace(content.as_bytes(), &input).map_err(|Refusal(text)| text)?;
        Ok(String::from_utf8(changed.0).expect("utf-8"))
    }

    #[test]
    fn a_unique_text_is_replaced_and_everything_else_stays() {
        assert_eq!(edit("\u{feff}a\nb\nc", "b", "x$1", false).as_deref(), Ok("\u{feff}a\nx$1\nc"));
        assert_eq!(edit("a.c abc", "a.c", "é", false).as_deref(), Ok("é abc"));
        assert_eq!(edit("é ü é", "ü", "", false).as_deref(), Ok("é  é"));
    }

    #[test]
    fn line_ends_of_the_file_win_over_those_of_the_call() {
        assert_eq!(edit("a\r\nb\r\nc\r\n", "a\nb", "x\ny", false).as_deref(), Ok("x\r\ny\r\nc\r\n"));
        assert_eq!(edit("a\nb\nc\n", "a\r\nb", "x\r\ny", false).as_deref(), Ok("x\ny\nc\n"));
    }

    #[test]
    fn an_ambiguous_text_is_refused_with_its_lines_unless_all_are_meant() {
        let error = edit("x\ny\nx\n", "x", "z", false).unwrap_err();
        assert!(error.contains("2 times") && error.contains("1, 3"), "{error}");
        assert_eq!(edit("x\ny\nx\n", "x", "z", true).as_deref(), Ok("z\ny\nz\n"));
    }

    #[test]
    fn nothing_is_changed_when_the_text_is_not_there() {
        assert!(edit("abc", "abd", "x", false).is_err());
        assert!(edit("abc", "", "x", false).is_err());
        assert!(edit("abc", "a", "a", false).is_err());
    }
}
