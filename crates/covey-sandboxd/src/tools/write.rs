//! `write`: a whole file, new or in place of one that the agent has seen.
//!
//! What does not belong here: partial changes (see `edit`).

use std::fs;
use std::path::{Path, PathBuf};

use covey_wire::tool::ToolResult;
use serde::Deserialize;

use super::file::{self, Files};
use super::{Answer, Refusal, resolve};

#[derive(Debug, Deserialize)]
pub(super) struct WriteInput {
    file_path: String,
    content: String,
}

pub(super) fn run(files: &Files, input: &WriteInput, dir: &Path) -> Answer {
    let path = resolve(&input.file_path, dir)?;
    let is_new = fs::symlink_metadata(&path).is_err();
    let target = if is_new { new_target(&path)? } else { existing_target(files, &path, input)? };
    files.replace(&target, input.content.as_bytes())?;
    let lines = input.content.lines().count();
    let done = if is_new { "created" } else { "replaced" };
    Ok(ToolResult::text(format!("{done} {} ({lines} lines)", path.display()), false))
}

fn new_target(path: &Path) -> Result<PathBuf, Refusal> {
    let failed = |error: std::io::Error| Refusal(format!("cannot create {}: {error}", path.display()));
    let name = path.file_name().ok_or_else(|| Refusal(format!("{} names no file", path.display())))?;
    let parent = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(parent).map_err(failed)?;
    Ok(parent.canonicalize().map_err(failed)?.join(name))
}

fn existing_target(files: &Files, path: &Path, input: &WriteInput) -> Result<PathBuf, Refusal> {
    // A link is followed: the agent means the file, and replacing the link would surprise it.
    let target = path
        .canonicalize()
        .map_err(|error| Refusal(format!("{} is a link that leads nowhere: {error}", path.display())))?;
    let old = file::read_editable(&target)?;
    if old != input.content.as_bytes() {
        files.require_seen(&target, &old)?;
    }
    Ok(target)
}
