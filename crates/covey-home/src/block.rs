//! Blocks and the store they live in.
//!
//! What stays true: a [`Block`] can only be made by hashing its bytes, so no store ever takes a hash on trust;
//! a read returns bytes whose hash was checked, or one of three different answers (I7). What does not belong
//! here: how a store lays blocks out, and what a block means.

use std::fmt::Debug;
use std::io;

use covey_types::{BlockHash, Fault};

use crate::name::InvalidName;

/// Longest block in bytes. A declared length is compared with it before anything is allocated.
pub const BLOCK_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Bytes together with the hash that was computed from them.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    hash: BlockHash,
    bytes: &'a [u8],
}

impl<'a> Block<'a> {
    /// Hashes `bytes`.
    ///
    /// # Errors
    /// [`StoreError::TooLarge`] above [`BLOCK_BYTES_MAX`].
    pub fn of(bytes: &'a [u8]) -> Result<Self, StoreError> {
        if bytes.len() > BLOCK_BYTES_MAX {
            return Err(StoreError::TooLarge { bytes: bytes.len() as u64 });
        }
        Ok(Self { hash: BlockHash::of(bytes), bytes })
    }

    /// The address within an org.
    pub const fn hash(&self) -> BlockHash {
        self.hash
    }

    /// The plain bytes.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// Why a store did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Proven not to be there. No other failure is ever reported as this one.
    #[error("block {hash} is not in the store")]
    Absent {
        /// The block.
        hash: BlockHash,
    },
    /// It cannot be told now; the same question may be answered later.
    #[error("the store cannot be used: {what}")]
    Unavailable {
        /// What was tried, on which path.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// Something is stored, but not what was put there.
    #[error("the store is damaged: {what}: {detail}")]
    Damaged {
        /// The block or file.
        what: String,
        /// How that shows.
        detail: String,
    },
    /// More than [`BLOCK_BYTES_MAX`].
    #[error("a block of {bytes} bytes; the limit is {BLOCK_BYTES_MAX}")]
    TooLarge {
        /// Its length.
        bytes: u64,
    },
    /// An earlier `put` of this upload failed, so it can no longer be finished.
    #[error("an earlier block of this upload was not stored; start a new upload")]
    UploadFailed,
    /// The org's or home's name.
    #[error(transparent)]
    Name(#[from] InvalidName),
}

impl StoreError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Absent { .. } => Fault::NotFound,
            Self::Unavailable { .. } | Self::UploadFailed => Fault::Retry,
            Self::Damaged { .. } => Fault::Corrupt,
            Self::TooLarge { .. } => Fault::Limit,
            Self::Name(_) => Fault::Invalid,
        }
    }

    pub(crate) fn unavailable(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Unavailable { what: what.into(), source: source.into() }
    }

    pub(crate) fn damaged(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Damaged { what: what.into(), detail: detail.into() }
    }
}

/// What an upload added.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UploadReport {
    /// Blocks that the store did not have.
    pub blocks_new: u64,
    /// Their plain bytes.
    pub bytes_new: u64,
    /// Bytes that the store grew by, after compression and with its own framing.
    pub stored_bytes_new: u64,
}

/// The blocks of one org.
///
/// Every method blocks. Implementations pass the contract tests in `tests/store_contract.rs`.
pub trait BlockStore: Send + Sync + Debug {
    /// Reads a block and checks its hash.
    ///
    /// # Errors
    /// [`StoreError::Absent`], [`StoreError::Unavailable`] or [`StoreError::Damaged`], never one for another.
    fn get(&self, hash: &BlockHash) -> Result<Vec<u8>, StoreError>;

    /// Those of `hashes` that would have to be uploaded: absent, or known to be damaged. One question for many
    /// blocks, because a store may be far away.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when it cannot be told.
    fn missing(&self, hashes: &[BlockHash]) -> Result<Vec<BlockHash>, StoreError>;

    /// Begins to add blocks.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the store cannot be written.
    fn upload(&self) -> Result<Box<dyn Upload + '_>, StoreError>;
}

/// Blocks on their way into a store. Dropped unfinished, it leaves nothing or some whole blocks that nobody
/// refers to, never a broken one.
pub trait Upload: Send + Sync + Debug {
    /// Number of the garbage collection that the store knew of when this upload began; a publish of what was
    /// uploaded names it, and is refused when a later one has passed (`crate::collect`). 0 in stores that collect
    /// nothing.
    fn epoch(&self) -> u64 {
        0
    }

    /// Adds a block unless the store or this upload has it; tells whether it was new. Readers see it only
    /// after [`Upload::finish`].
    ///
    /// # Errors
    /// When it could not be written; the upload cannot be finished then.
    fn put(&self, block: &Block<'_>) -> Result<bool, StoreError>;

    /// Makes everything durable (one flush for all blocks) and visible. Only after this may a pointer name
    /// the blocks (I6).
    ///
    /// # Errors
    /// When that is not certain; nothing may then refer to the blocks.
    fn finish(self: Box<Self>) -> Result<UploadReport, StoreError>;
}
