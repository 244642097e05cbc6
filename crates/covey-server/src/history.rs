//! Looking into snapshots, as the API answers: trees, differences, usage. For the server, and for clients on the
//! machine of a store, which answer alike without a server.
//!
//! Every function blocks and reads nothing but a store; a snapshot is named by its root. What does not belong here:
//! which snapshots there are, HTTP, and how a terminal shows an answer.

mod diff;
mod file;
mod path;
mod tree;
mod usage;

pub use diff::{DiffRequest, diff};
pub use file::{OpenFileError, open_file};
pub use path::{InvalidCursor, PathCursor, PathText, base64_of, path_of};
pub use tree::{TreeRequest, tree};
pub use usage::{UsageRequest, usage};

use covey_types::{Generation, RootHash};
use covey_wire::api::history::SnapshotName;

/// A snapshot that shall be looked into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// Its number, for the answer.
    pub generation: Generation,
    /// The state.
    pub root: RootHash,
}

impl At {
    /// As answers name it.
    pub fn name(&self) -> SnapshotName {
        SnapshotName { generation: self.generation.0, root: self.root.to_string() }
    }
}
