//! Walking a tree: bounded, without following links, without `.git`.
//!
//! What stays true: a link is never descended into, so no loop; the walk keeps its own stack; an interrupted call stops
//! soon. What does not belong here: what is looked for.

use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::Refusal;

/// Entries looked at by one call; about a second of work on a warm cache.
const ENTRIES_MAX: usize = 1_000_000;
/// Never looked into: its content is git's own.
const SKIPPED_DIR: &str = ".git";

/// Whether everything was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Walked {
    /// Every entry was.
    Whole,
    /// The limit was reached, or the visitor had enough.
    Cut,
}

/// Calls `visit` for each entry that is no directory, until it says `false`. Directories that cannot be read are passed by:
/// the agent's own permissions are the reason.
pub(super) fn files(
    root: &Path,
    interrupt: &AtomicBool,
    mut visit: impl FnMut(&Path, &Metadata) -> bool,
) -> Result<Walked, Refusal> {
    let metadata =
        fs::metadata(root).map_err(|error| Refusal(format!("cannot open {}: {error}", root.display())))?;
    if !metadata.is_dir() {
        visit(root, &metadata);
        return Ok(Walked::Whole);
    }
    let mut pending: Vec<PathBuf> = vec![root.to_path_buf()];
    let mut seen = 0;
    while let Some(dir) = pending.pop() {
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries.flatten() {
            if interrupt.load(Ordering::Relaxed) {
                return Err("interrupted".into());
            }
            seen += 1;
            if seen > ENTRIES_MAX {
                return Ok(Walked::Cut);
            }
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_dir() {
                if entry.file_name() != SKIPPED_DIR {
                    pending.push(entry.path());
                }
            } else if !visit(&entry.path(), &metadata) {
                return Ok(Walked::Cut);
            }
        }
    }
    Ok(Walked::Whole)
}
