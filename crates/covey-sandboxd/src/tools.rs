//! The tools that need no process: `read write edit glob grep`.
//!
//! What stays true: only regular files are opened (a FIFO or device never hangs a call), every answer is bounded, every
//! refusal says what to do instead. Relative paths start at the shell's directory. All that is visible is the
//! sandbox's own, so a path needs no check beyond the kernel's. What does not belong here: `bash`.

mod edit;
mod file;
mod glob;
mod grep;
mod read;
mod walk;
mod write;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use covey_wire::tool::ToolResult;
use serde::Deserialize;
use serde::de::DeserializeOwned;

pub(crate) use file::Files;

/// What the model is told when a tool cannot do it.
#[derive(Debug)]
pub(crate) struct Refusal(String);

impl<T: Into<String>> From<T> for Refusal {
    fn from(text: T) -> Self {
        Self(text.into())
    }
}

type Answer = Result<ToolResult, Refusal>;

/// Runs one tool.
pub(crate) fn run(files: &Files, name: &str, input: &str, dir: &Path, interrupt: &AtomicBool) -> ToolResult {
    let answer = match name {
        "read" => parse(name, input).and_then(|input| read::run(files, &input, dir)),
        "write" => parse(name, input).and_then(|input| write::run(files, &input, dir)),
        "edit" => parse(name, input).and_then(|input| edit::run(files, &input, dir)),
        "glob" => parse(name, input).and_then(|input| glob::run(&input, dir, interrupt)),
        "grep" => parse(name, input).and_then(|input| grep::run(&input, dir, interrupt)),
        _ => Err(Refusal(format!(
            "there is no tool `{name}`; there are bash, read, write, edit, glob and grep"
        ))),
    };
    answer.unwrap_or_else(|Refusal(text)| ToolResult::text(text, true))
}

fn parse<T: DeserializeOwned>(name: &str, input: &str) -> Result<T, Refusal> {
    serde_json::from_str(input).map_err(|error| Refusal(format!("invalid input for {name}: {error}")))
}

/// The input of `glob` and `grep`.
#[derive(Debug, Deserialize)]
struct SearchInput {
    pattern: String,
    #[serde(default)]
    path: Option<String>,
}

/// Where a path given by the model points.
fn resolve(path: &str, dir: &Path) -> Result<PathBuf, Refusal> {
    if path.is_empty() || path.contains('\0') {
        return Err("the path is empty or contains a NUL byte".into());
    }
    let path =
        path.strip_prefix("~/").map_or_else(|| dir.join(path), |rest| Path::new("/home/agent").join(rest));
    Ok(path)
}
