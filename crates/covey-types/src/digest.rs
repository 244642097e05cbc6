//! Content addresses.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A text that is not 64 lowercase hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a hash: expected 64 lowercase hexadecimal digits")]
pub struct InvalidHash(String);

macro_rules! hash {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name([u8; 32]);

        impl $name {
            /// Hashes `bytes` with BLAKE3-256.
            pub fn of(bytes: &[u8]) -> Self {
                Self(*blake3::hash(bytes).as_bytes())
            }

            /// Wraps 32 raw bytes.
            pub const fn from_bytes(bytes: [u8; 32]) -> Self {
                Self(bytes)
            }

            /// The 32 raw bytes.
            pub const fn as_bytes(&self) -> &[u8; 32] {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = InvalidHash;

            fn from_str(text: &str) -> Result<Self, InvalidHash> {
                let digit = |b: u8| match b {
                    b'0'..=b'9' => Some(b - b'0'),
                    b'a'..=b'f' => Some(b - b'a' + 10),
                    _ => None,
                };
                let invalid = || InvalidHash(text.chars().take(80).collect());
                let text_bytes = text.as_bytes();
                if text_bytes.len() != 64 {
                    return Err(invalid());
                }
                let mut bytes = [0; 32];
                for (byte, pair) in bytes.iter_mut().zip(text_bytes.chunks_exact(2)) {
                    *byte = digit(pair[0]).zip(digit(pair[1])).map(|(h, l)| h << 4 | l).ok_or_else(invalid)?;
                }
                Ok(Self(bytes))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

hash!(
    /// BLAKE3-256 of a block's plain bytes; together with the org it is the block's only address.
    BlockHash
);
hash!(
    /// The hash of a home's root directory object; it names one state of a whole home.
    RootHash
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_text_round_trips() {
        let hash = BlockHash::of(b"covey");
        assert_eq!(hash.to_string().parse::<BlockHash>(), Ok(hash));
        assert!("00".parse::<BlockHash>().is_err());
        assert!("zz".repeat(32).parse::<BlockHash>().is_err());
    }
}
