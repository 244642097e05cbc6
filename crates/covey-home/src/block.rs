//! Blocks and the store they live in.
//!
//! What stays true: a [`Block`] can only be made by hashing its bytes, so no store ever takes a hash on trust;
//! a read returns bytes whose hash was checked, or one of three different answers (I7). What does not belong
//! here: how a store lays blocks out, and what a block means.

use std::fmt::{self, Debug};
use std::io;

use covey_types::{BlockHash, Fault};

use crate::keys::KeyError;
use crate::name::InvalidName;

/// Longest block in bytes. A declared length is compared with it before anything is allocated.
pub const BLOCK_BYTES_MAX: usize = 8 * 1024 * 1024;

/// How the blocks of one org are named: by the plain hash of their bytes, or by a hash with a key that only the
/// org has, so that nobody without the key can tell from a name what is in the block, and two orgs have different
/// names for the same bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockHasher {
    key: Option<[u8; 32]>,
}

impl BlockHasher {
    /// Without a key.
    pub const PLAIN: Self = Self { key: None };

    /// With the org's key.
    pub const fn keyed(key: [u8; 32]) -> Self {
        Self { key: Some(key) }
    }

    /// The name of a block with these bytes.
    pub fn hash(&self, bytes: &[u8]) -> BlockHash {
        match &self.key {
            None => BlockHash::of(bytes),
            Some(key) => BlockHash::from_bytes(*blake3::keyed_hash(key, bytes).as_bytes()),
        }
    }

    /// Hashes `bytes`.
    ///
    /// # Errors
    /// [`StoreError::TooLarge`] above [`BLOCK_BYTES_MAX`].
    pub fn block<'a>(&self, bytes: &'a [u8]) -> Result<Block<'a>, StoreError> {
        if bytes.len() > BLOCK_BYTES_MAX {
            return Err(StoreError::TooLarge { bytes: bytes.len() as u64 });
        }
        Ok(Block { hash: self.hash(bytes), bytes, hasher: *self })
    }
}

impl Debug for BlockHasher {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.key.is_some() { "BlockHasher(keyed)" } else { "BlockHasher(plain)" })
    }
}

/// Bytes together with the hash that was computed from them.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    hash: BlockHash,
    bytes: &'a [u8],
    hasher: BlockHasher,
}

impl<'a> Block<'a> {
    /// Hashes `bytes` without a key. For a store that may have one: [`BlockHasher::block`] of its
    /// [`BlockStore::hasher`].
    ///
    /// # Errors
    /// [`StoreError::TooLarge`] above [`BLOCK_BYTES_MAX`].
    pub fn of(bytes: &'a [u8]) -> Result<Self, StoreError> {
        BlockHasher::PLAIN.block(bytes)
    }

    /// Fails unless the block was hashed as the store's blocks are: under another name nobody would find it.
    ///
    /// # Errors
    /// [`StoreError::OtherHasher`].
    pub fn check_hasher(&self, of_store: &BlockHasher) -> Result<(), StoreError> {
        if self.hasher == *of_store { Ok(()) } else { Err(StoreError::OtherHasher { hash: self.hash }) }
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
    /// The block was hashed with another key than the store's, or with one where it has none.
    #[error("block {hash} was not hashed with this store's key; hash it with the store's hasher")]
    OtherHasher {
        /// As it was named.
        hash: BlockHash,
    },
    /// The store's keys are not to be had.
    #[error(transparent)]
    Keys(#[from] KeyError),
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
            Self::Name(_) | Self::OtherHasher { .. } => Fault::Invalid,
            Self::Keys(error) => error.fault(),
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
    /// How its blocks are named. Whoever computes a hash to compare it with a block's uses this.
    fn hasher(&self) -> &BlockHasher;

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
    /// That of the store: blocks that are put are hashed with it.
    fn hasher(&self) -> &BlockHasher;

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
