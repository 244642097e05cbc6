//! `read`: a text file with line numbers, or a picture.
//!
//! Lines are shown as a number right-aligned to six columns, a tab, the line: the numbers that `view_range` takes.
//! What does not belong here: directories (glob, bash) and changes.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use covey_types::ByteCount;
use covey_wire::tool::{ToolContent, ToolResult};
use serde::Deserialize;

use super::file::{self, EDIT_FILE_BYTES_MAX, Files};
use super::{Answer, Refusal, resolve};
use crate::text;

/// Text that one call returns. A larger file needs a range.
pub(super) const READ_BYTES_MAX: u64 = 256 * 1024;
/// A picture is sent whole or not at all.
const IMAGE_BYTES_MAX: u64 = 5 << 20;
/// A NUL among so many first bytes means that it is no text.
const SNIFF_BYTES: usize = 8 * 1024;
/// A line longer than this is cut; the rest of the file is still shown.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// The input of `read`.
#[derive(Debug, Deserialize)]
pub(super) struct ReadInput {
    pub(super) file_path: String,
    #[serde(default)]
    view_range: Option<(i64, i64)>,
}

pub(super) fn run(files: &Files, input: &ReadInput, dir: &Path) -> Answer {
    let path = resolve(&input.file_path, dir)?;
    let (file, metadata) = file::open(&path)?;
    let failed = |error: std::io::Error| Refusal(format!("cannot read {}: {error}", path.display()));
    let canonical = file::real_path(&file).map_err(failed)?;
    let mut reader = BufReader::with_capacity(SNIFF_BYTES, file);
    let start = reader.fill_buf().map_err(failed)?;
    if let Some(media_type) = image_type(start) {
        return picture(&path, media_type, reader, metadata.len());
    }
    if start.contains(&0) {
        return Err(format!(
            "{} is a binary file of {}; look at it with bash (`file`, `xxd`)",
            path.display(),
            ByteCount(metadata.len())
        )
        .into());
    }
    if metadata.len() > EDIT_FILE_BYTES_MAX {
        // Too large to be edited, so nothing is remembered of it.
        let Some(range) = input.view_range else { return Err(too_large(&path, metadata.len())) };
        return number_lines(&path, reader, range);
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize + 1);
    reader.take(EDIT_FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    if input.view_range.is_none() && bytes.len() as u64 > READ_BYTES_MAX {
        return Err(too_large(&path, bytes.len() as u64));
    }
    files.remember(&canonical, &bytes);
    number_lines(&path, &bytes[..], input.view_range.unwrap_or((1, -1)))
}

fn too_large(path: &Path, length: u64) -> Refusal {
    let (length, limit) = (ByteCount(length), ByteCount(READ_BYTES_MAX));
    format!(
        "{} has {length}, more than the {limit} of one read: give view_range [first, last], or use grep",
        path.display()
    )
    .into()
}

fn number_lines(path: &Path, mut reader: impl BufRead, (first, last): (i64, i64)) -> Answer {
    if first < 1 || (last != -1 && last < first) {
        return Err(format!(
            "view_range [{first}, {last}] is not [first, last] with 1 <= first <= last, or last = -1"
        )
        .into());
    }
    let mut shown = String::new();
    let mut line = Vec::new();
    let mut number = 0_i64;
    while last == -1 || number < last {
        line.clear();
        let length = (&mut reader)
            .take(LINE_BYTES_MAX as u64)
            .read_until(b'\n', &mut line)
            .map_err(|error| Refusal(format!("cannot read {}: {error}", path.display())))?;
        if length == 0 {
            break;
        }
        number += 1;
        let is_whole = line.ends_with(b"\n") || length < LINE_BYTES_MAX;
        if !is_whole {
            reader
                .skip_until(b'\n')
                .map_err(|error| Refusal(format!("cannot read {}: {error}", path.display())))?;
        }
        if number < first {
            continue;
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        let text = text.strip_suffix('\r').unwrap_or(text).replace('\0', "\u{fffd}");
        let note = if is_whole { "" } else { " [... rest of the line cut ...]" };
        shown.push_str(&format!("{number:>6}\t{text}{note}\n"));
        if shown.len() as u64 > READ_BYTES_MAX * 2 {
            shown = text::cut_end(&shown, READ_BYTES_MAX as usize).to_owned();
            shown.push_str(&format!("[... cut before line {number}; read on with view_range ...]\n"));
            break;
        }
    }
    if shown.is_empty() {
        let why = if number == 0 { "is empty".to_owned() } else { format!("has only {number} lines") };
        return Ok(ToolResult::text(format!("[{} {why}]", path.display()), false));
    }
    Ok(ToolResult::text(shown, false))
}

fn picture(path: &Path, media_type: &str, reader: impl Read, length: u64) -> Answer {
    let mut data = Vec::new();
    reader
        .take(IMAGE_BYTES_MAX + 1)
        .read_to_end(&mut data)
        .map_err(|error| Refusal(format!("cannot read {}: {error}", path.display())))?;
    if data.len() as u64 > IMAGE_BYTES_MAX {
        let (length, limit) = (ByteCount(length), ByteCount(IMAGE_BYTES_MAX));
        return Err(format!(
            "{} is a picture of {length}, at most {limit} are shown; make it smaller first",
            path.display()
        )
        .into());
    }
    let mut result = ToolResult::text(String::new(), false);
    result.content = vec![ToolContent::Image { media_type: media_type.to_owned(), data }];
    Ok(result)
}

fn image_type(start: &[u8]) -> Option<&'static str> {
    match start {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some("image/png"),
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some("image/gif"),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some("image/webp"),
        _ => None,
    }
}
