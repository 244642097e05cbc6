//! `glob`: file names by pattern, newest first.
//!
//! What does not belong here: file contents (see `grep`).

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use covey_wire::tool::ToolResult;
use globset::GlobBuilder;

use super::walk::{self, Walked};
use super::{Answer, Refusal, SearchInput, resolve};

/// Names returned.
const RESULTS_MAX: usize = 200;
/// Names kept for sorting; more means that the pattern is too wide anyway.
const MATCHES_MAX: usize = 100_000;

pub(super) fn run(input: &SearchInput, dir: &Path, interrupt: &AtomicBool) -> Answer {
    let (root, pattern) = split(input, dir)?;
    let glob = GlobBuilder::new(&pattern)
        .literal_separator(true)
        .build()
        .map_err(|error| Refusal(format!("invalid pattern: {error}")))?
        .compile_matcher();
    let mut found: Vec<((i64, i64), PathBuf)> = Vec::new();
    let walked = walk::files(&root, interrupt, |path, metadata| {
        let relative = path.strip_prefix(&root).unwrap_or(path);
        if glob.is_match(relative) {
            found.push(((metadata.mtime(), metadata.mtime_nsec()), path.to_path_buf()));
        }
        found.len() < MATCHES_MAX
    })?;
    found.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    if found.is_empty() {
        return Ok(ToolResult::text(
            format!("no file matches `{}` in {}", input.pattern, root.display()),
            false,
        ));
    }
    let total = found.len();
    let mut text: String =
        found.iter().take(RESULTS_MAX).map(|(_, path)| format!("{}\n", path.display())).collect();
    if total > RESULTS_MAX {
        text.push_str(&format!("[the newest {RESULTS_MAX} of {total}; narrow the pattern]\n"));
    } else if walked == Walked::Cut {
        text.push_str("[the tree is too large to be looked at whole; give a path]\n");
    }
    Ok(ToolResult::text(text, false))
}

/// The directory to walk and the pattern below it; an absolute pattern brings its own directory.
fn split(input: &SearchInput, dir: &Path) -> Result<(PathBuf, String), Refusal> {
    if input.pattern.starts_with('/') {
        let fixed = input.pattern.split('/').take_while(|part| !part.contains(['*', '?', '[', '{', '\\']));
        let mut root: PathBuf = fixed.collect::<Vec<_>>().join("/").into();
        if root.as_os_str().is_empty() {
            root = "/".into();
        }
        // A pattern without wildcards is one name: walk its directory.
        if root == Path::new(&input.pattern) {
            root = root.parent().map_or_else(|| "/".into(), Path::to_path_buf);
        }
        let length = root.as_os_str().len();
        return Ok((root, input.pattern[length..].trim_start_matches('/').to_owned()));
    }
    let root = match &input.path {
        Some(path) => resolve(path, dir)?,
        None => dir.to_path_buf(),
    };
    Ok((root, input.pattern.trim_start_matches("./").to_owned()))
}
