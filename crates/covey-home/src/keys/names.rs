//! What of an org's keys somebody may have who must not open its packs: how blocks are named, and a key for what that
//! host keeps of them.
//!
//! What stays true: from these keys neither the org's secret nor a key of a pack can be had.

use std::fmt;

use super::keyring::derived;
use crate::block::BlockHasher;

/// For somebody who reads and adds packs through another process, which opens and seals them.
#[derive(Clone, PartialEq, Eq)]
pub struct NameKeys {
    names: Option<[u8; 32]>,
    cache: CacheKey,
}

impl NameKeys {
    /// From their bytes; `names` is none where blocks are named without a key.
    pub const fn from_bytes(names: Option<[u8; 32]>, cache: [u8; 32]) -> Self {
        Self { names, cache: CacheKey(cache) }
    }

    /// The key of block names.
    pub const fn names(&self) -> Option<&[u8; 32]> {
        self.names.as_ref()
    }

    /// The key of what is kept on a host and can be made anew.
    pub const fn cache(&self) -> &[u8; 32] {
        &self.cache.0
    }

    /// How the org's blocks are named.
    pub fn hasher(&self) -> BlockHasher {
        self.names.map_or(BlockHasher::PLAIN, BlockHasher::keyed)
    }

    pub(crate) const fn cache_key(&self) -> &CacheKey {
        &self.cache
    }
}

impl fmt::Debug for NameKeys {
    /// Without the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NameKeys")
    }
}

/// Hides files of a host that can be made anew from an encrypted store.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct CacheKey(pub(super) [u8; 32]);

impl CacheKey {
    /// The key of the file of this name.
    pub(crate) fn of_file(&self, name: &str) -> [u8; 32] {
        derived("covey 2026 store secret, local cache", &self.0, name.as_bytes())
    }
}

impl fmt::Debug for CacheKey {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CacheKey")
    }
}
