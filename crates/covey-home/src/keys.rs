//! The keys of an org's store: a master key of the operator wraps the org's own keys, which lie in the store.
//!
//! What stays true: no key is ever written unwrapped, printed or logged; what is wrapped for one org opens as no other
//! org's; who has the store and not the master key learns neither bytes nor names nor lengths of blocks; when the
//! key ring is removed, nobody can read the org's packs again. What does not belong here: what packs look like
//! (`pack_store::files`), and where an operator keeps the master key.

mod keyring;
mod master;
mod names;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use covey_types::Fault;

pub use keyring::{KeyringReport, OrgKeys};
pub use master::MasterKey;
pub use names::NameKeys;

pub(crate) use keyring::DataKey;
pub(crate) use names::CacheKey;

/// Names a key without saying anything about it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId([u8; 8]);

impl KeyId {
    pub(crate) const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }

    pub(crate) const fn as_bytes(&self) -> &[u8; 8] {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for KeyId {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let bytes = from_hex(text).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or(KeyError::NotAnId)
    }
}

impl serde::Serialize for KeyId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Why keys are not to be had.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The store is encrypted and no master key was given.
    #[error(
        "the store at {place} is encrypted with master key {needed}; name its file with --key-file or COVEY_STORE_KEY_FILE"
    )]
    Missing {
        /// Where the store is.
        place: String,
        /// The key that opens it.
        needed: KeyId,
    },
    /// Another master key.
    #[error(
        "the store at {place} is encrypted with master key {needed}, and the given one is {given}; name the right file with --key-file or COVEY_STORE_KEY_FILE"
    )]
    Wrong {
        /// Where the store is.
        place: String,
        /// The key that opens it.
        needed: KeyId,
        /// The key that was given.
        given: KeyId,
    },
    /// There are encrypted packs and no key ring: the org was deleted, or the file was lost.
    #[error(
        "the store at {place} has encrypted packs and no key ring; if the org was not deleted, put `keys/ring` back from a backup"
    )]
    Gone {
        /// Where the store is.
        place: String,
    },
    /// A pack was sealed with a key that the ring does not have.
    #[error(
        "{what} is encrypted with key {key}, which the key ring does not have; put an older `keys/ring` back from a backup"
    )]
    Unknown {
        /// What cannot be read.
        what: String,
        /// The key.
        key: KeyId,
    },
    /// The key ring is not one, or not this org's.
    #[error("the key ring of the store at {place} is damaged: {problem}; put it back from a backup")]
    Damaged {
        /// Where the store is.
        place: String,
        /// How that shows.
        problem: &'static str,
    },
    /// A key file.
    #[error("the key file {} cannot be used", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A file whose content is no key.
    #[error("{} holds no key: expected 64 hexadecimal digits, as `covey store key create` writes them", path.display())]
    NotAKey {
        /// The file.
        path: PathBuf,
    },
    /// A text that is no key's id.
    #[error("that is no key id: expected 16 hexadecimal digits")]
    NotAnId,
    /// Somebody else changed the key ring at the same time.
    #[error("somebody else changed the keys of the store at {place} meanwhile; look at them and try again")]
    Overtaken {
        /// Where the store is.
        place: String,
    },
    /// More data keys than a ring holds.
    #[error("the key ring holds {max} keys already; run a collection, which retires old ones, and try again")]
    TooMany {
        /// The limit.
        max: usize,
    },
    /// The system gives no random numbers.
    #[error("the system gives no random numbers")]
    NoRandom,
}

impl KeyError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Missing { .. } | Self::Wrong { .. } | Self::File { .. } => Fault::Denied,
            Self::Gone { .. } => Fault::NotFound,
            Self::Unknown { .. } | Self::Damaged { .. } => Fault::Corrupt,
            Self::NotAKey { .. } | Self::NotAnId => Fault::Invalid,
            Self::Overtaken { .. } => Fault::Conflict,
            Self::TooMany { .. } => Fault::Limit,
            Self::NoRandom => Fault::Retry,
        }
    }
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Lowercase digits only, so that one key has one text.
pub(crate) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    if !text.len().is_multiple_of(2) {
        return None;
    }
    text.as_bytes().chunks_exact(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}

/// Random bytes for keys: from the system and nothing else.
pub(crate) fn random<const LEN: usize>() -> Result<[u8; LEN], KeyError> {
    use ring::rand::SecureRandom as _;
    let mut bytes = [0; LEN];
    ring::rand::SystemRandom::new().fill(&mut bytes).map_err(|_| KeyError::NoRandom)?;
    Ok(bytes)
}
