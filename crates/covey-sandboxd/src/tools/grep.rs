//! `grep`: lines by regular expression, as `path:line:text`.
//!
//! What stays true: binary files and `.git` are skipped, FIFOs and devices are not opened, the answer is bounded.
//! What does not belong here: replacing.

use std::io::Read;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_wire::tool::ToolResult;
use regex::bytes::Regex;

use super::walk::{self, Walked};
use super::{Answer, Refusal, SearchInput, file, resolve};
use crate::text;

/// Text of one answer.
const ANSWER_BYTES_MAX: usize = 100 * 1024;
/// Of one line.
const LINE_BYTES_MAX: usize = 2000;
/// Larger files are passed by, and the answer says so.
const FILE_BYTES_MAX: u64 = 64 << 20;
const SNIFF_BYTES: usize = 8 * 1024;

pub(super) fn run(input: &SearchInput, dir: &Path, interrupt: &AtomicBool) -> Answer {
    let pattern = Regex::new(&input.pattern).map_err(|error| Refusal(format!("invalid pattern: {error}")))?;
    let root = match &input.path {
        Some(path) => resolve(path, dir)?,
        None => dir.to_path_buf(),
    };
    let mut answer = String::new();
    let mut too_large = 0;
    let walked = walk::files(&root, interrupt, |path, metadata| {
        if !metadata.is_file() {
            return true;
        }
        if metadata.len() > FILE_BYTES_MAX {
            too_large += 1;
            return true;
        }
        search(path, &pattern, &mut answer);
        answer.len() < ANSWER_BYTES_MAX
    })?;
    if answer.is_empty() {
        answer = format!("no line matches `{}` in {}\n", input.pattern, root.display());
    }
    if answer.len() > ANSWER_BYTES_MAX {
        answer = text::cut_end(&answer, ANSWER_BYTES_MAX).to_owned();
    }
    if walked == Walked::Cut {
        answer.push_str("[there is more; narrow the pattern or give a path]\n");
    }
    if too_large > 0 {
        answer.push_str(&format!("[{too_large} file(s) above 64 MiB were not searched]\n"));
    }
    Ok(ToolResult::text(answer, false))
}

/// Appends the matching lines of one file. A file that cannot be read is passed by, as every grep does.
fn search(path: &Path, pattern: &Regex, answer: &mut String) {
    let Ok((opened, _)) = file::open(path) else { return };
    let mut bytes = Vec::new();
    if opened.take(FILE_BYTES_MAX).read_to_end(&mut bytes).is_err() {
        return;
    }
    if bytes[..bytes.len().min(SNIFF_BYTES)].contains(&0) {
        return;
    }
    for (index, line) in bytes.split(|b| *b == b'\n').enumerate() {
        if !pattern.is_match(line) {
            continue;
        }
        let line = String::from_utf8_lossy(line);
        let line = line.strip_suffix('\r').unwrap_or(&line).replace('\0', "\u{fffd}");
        let shown = text::cut_end(&line, LINE_BYTES_MAX);
        let note = if shown.len() < line.len() { " [... line cut ...]" } else { "" };
        answer.push_str(&format!("{}:{}:{shown}{note}\n", path.display(), index + 1));
        if answer.len() >= ANSWER_BYTES_MAX {
            return;
        }
    }
}
