//! What a home takes.

use covey_home::BlockStore;
use covey_home::usage::{Part, Shares, UsageOptions};
use covey_home::view::ViewError;
use covey_wire::api::history::{Usage, UsagePart};

use super::{At, PathText};

/// What to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsageRequest<'a> {
    /// At and below this directory.
    pub path: &'a [u8],
    /// Directories so far below it are told of.
    pub depth: usize,
    /// So many of the largest directories, and of the largest files.
    pub parts: usize,
    /// Snapshots of the home that are kept, for the answer.
    pub snapshots: u64,
    /// Whose the stored bytes are, when somebody has counted them.
    pub shares: Option<Shares>,
}

/// Counts what a directory of a snapshot holds.
///
/// # Errors
/// [`ViewError`].
pub fn usage(store: &dyn BlockStore, at: &At, request: &UsageRequest<'_>) -> Result<Usage, ViewError> {
    let options = UsageOptions { depth: request.depth, parts_max: request.parts };
    let found = covey_home::usage::usage(store, &at.root, request.path, &options)?;
    let part = |part: Part| {
        let path = PathText::of(&part.path);
        UsagePart { path: path.text, path_base64: path.base64, bytes: part.bytes, entries: part.entries }
    };
    Ok(Usage {
        snapshot: at.name(),
        path: PathText::of(&covey_home::view::components(request.path)?.join(&b'/')).text,
        entries: found.entries,
        files: found.files,
        directories: found.directories,
        bytes: found.bytes,
        largest_directories: found.largest_directories.into_iter().map(part).collect(),
        largest_files: found.largest_files.into_iter().map(part).collect(),
        snapshots: request.snapshots,
        exclusive_bytes: request.shares.map(|shares| shares.exclusive_bytes),
        shared_bytes: request.shares.map(|shares| shares.shared_bytes),
    })
}
