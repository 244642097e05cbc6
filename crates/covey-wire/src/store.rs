//! The store link: a runner's way to the home store through the server, for runners that must not hold a key for the
//! place where it lies.
//!
//! Order: [`StoreRequest::Open`] first, then any; one answer for each request, in order. What [`StoreRequest::Append`]
//! has brought belongs to the link and is gone when it ends. A runner can add packs, say in which packs it has found
//! damage, and read; it can remove nothing and move no pointer, because those are the server's. Keys of files are those of the org that was opened, names joined by `/`.

use serde::{Deserialize, Serialize};

/// The first version of the link in which packs may be sealed behind it.
pub const STORE_SEALED_MIN: u32 = 2;
/// Longest piece of a file in one message, in bytes.
pub const STORE_PIECE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Runner to server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum StoreRequest {
    /// The first message.
    Open {
        /// Oldest version of the link that the runner speaks.
        version_min: u32,
        /// Newest.
        version: u32,
        /// Whose files.
        org: String,
    },
    /// Names of the files directly in a directory.
    List {
        /// The directory.
        dir: String,
    },
    /// Names of the directories directly in a directory.
    ListDirs {
        /// The directory.
        dir: String,
    },
    /// Length of a file.
    FileLen {
        /// The file.
        key: String,
    },
    /// Bytes of a file; fewer only where it ends.
    Read {
        /// The file.
        key: String,
        /// From here on.
        offset: u64,
        /// At most [`STORE_PIECE_BYTES_MAX`].
        len: u64,
    },
    /// The last bytes of a file, and how long it is.
    ReadTail {
        /// The file.
        key: String,
        /// At most [`STORE_PIECE_BYTES_MAX`].
        len: u64,
    },
    /// A small file as a whole.
    Get {
        /// The file.
        key: String,
    },
    /// The next bytes of the pack that this link is about to publish.
    Append {
        /// At most [`STORE_PIECE_BYTES_MAX`].
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// Checks what was appended block by block, and makes it durable and visible as a pack.
    Publish {
        /// `packs/<name>.pack`.
        key: String,
    },
    /// Makes certain that what is visible in a directory stays.
    Flush {
        /// The directory.
        dir: String,
    },
    /// Replaces a small file under a condition. The server takes only additions to the list of packs in which damage
    /// was found.
    PutIf {
        /// The file.
        key: String,
        /// All of it.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
        /// What must be there.
        expected: StoreExpected,
    },
}

/// What must be there for a conditional put to happen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "expected", rename_all = "snake_case")]
pub enum StoreExpected {
    /// No such file.
    Absent,
    /// The file as it was read.
    Version {
        /// From [`StoreAnswer::File`].
        version: String,
    },
    /// Anything.
    Any,
}

/// A key of 32 bytes, which is shown to nobody.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StoreKey(#[serde(with = "serde_bytes")] pub [u8; 32]);

impl std::fmt::Debug for StoreKey {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StoreKey")
    }
}

/// Server to runner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum StoreAnswer {
    /// It is done.
    Done,
    /// To `Open`, where the store is encrypted: the server opens and seals packs, and the runner names blocks as the org
    /// does. It gets no key that opens anything.
    Opened {
        /// Names blocks; none: they are named without a key.
        names: Option<StoreKey>,
        /// Hides what the runner keeps of the store and can make anew.
        cache: StoreKey,
    },
    /// To lists.
    Names {
        /// In no order.
        names: Vec<String>,
    },
    /// To `FileLen`.
    Len {
        /// In bytes.
        len: u64,
    },
    /// To `Read`.
    Bytes {
        /// Fewer than asked for only where the file ends.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// To `ReadTail`.
    Tail {
        /// The last bytes.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
        /// Length of the whole file.
        file_len: u64,
    },
    /// To `Get`.
    File {
        /// All of it.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
        /// What the store tells versions apart by.
        version: String,
    },
    /// To `PutIf`: it is there.
    Written {
        /// What the store tells versions apart by.
        version: String,
    },
    /// To `PutIf`: something else was there than expected, and still is.
    Conflict,
    /// The place has answered that there is no such file.
    NotFound {
        /// The file, with its place.
        file: String,
    },
    /// It cannot be told or done now.
    Unavailable {
        /// What was tried, on which file.
        what: String,
        /// The answer.
        reason: String,
    },
    /// It will not be done: the request is wrong, or what was appended is damaged. Ends the link.
    Refused {
        /// Why.
        reason: String,
    },
}
