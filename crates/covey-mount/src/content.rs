//! Names of contents in the block cache.
//!
//! A mounted file needs its content as one plain file. A content of one block is named by that block's hash; one
//! of several blocks, or with holes, by a hash over what the manifest says of it. Two files of the same content
//! share one cached file; two different contents never do.

use std::fmt;

use covey_home::manifest::{Blob, Content};
use covey_types::BlockHash;

/// Keeps the names of mapped contents apart from hashes of anything else.
const MAPPED_CONTEXT: &str = "covey 2026 mounted home, content of several blocks";

/// Which plain file of the cache holds a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentId {
    hash: BlockHash,
    mapped: bool,
}

impl ContentId {
    /// The content's name; none for a content without data, which needs no file.
    pub fn of(content: &Content) -> Option<Self> {
        match content {
            Content::Nothing { .. } => None,
            Content::Whole { block, .. } => Some(Self { hash: *block, mapped: false }),
            Content::Mapped { size, map } => {
                let mut hasher = blake3::Hasher::new_derive_key(MAPPED_CONTEXT);
                hasher.update(&size.to_le_bytes());
                match map {
                    Blob::Inline(bytes) => {
                        hasher.update(&[0]).update(bytes);
                    }
                    Blob::Blocks { len, blocks } => {
                        hasher.update(&[1]).update(&len.to_le_bytes());
                        for block in blocks {
                            hasher.update(block.as_bytes());
                        }
                    }
                }
                let hash = BlockHash::from_bytes(*hasher.finalize().as_bytes());
                Some(Self { hash, mapped: true })
            }
        }
    }

    /// For a cached file by its place: the directory (two digits) and the name in it.
    pub(crate) fn parse(dir: &str, name: &str) -> Option<Self> {
        let (rest, mapped) = name.strip_suffix(".m").map_or((name, false), |rest| (rest, true));
        (dir.len() == 2).then_some(())?;
        Some(Self { hash: format!("{dir}{rest}").parse().ok()?, mapped })
    }

    /// The file's path in the layer of contents, as an overlay's redirect names it.
    pub(crate) fn redirect(&self) -> Vec<u8> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut out = Vec::with_capacity(68);
        for (at, byte) in self.hash.as_bytes().iter().enumerate() {
            if at < 2 {
                out.push(b'/');
            }
            out.push(DIGITS[usize::from(byte >> 4)]);
            out.push(DIGITS[usize::from(byte & 15)]);
        }
        if self.mapped {
            out.extend_from_slice(b".m");
        }
        out
    }

    /// Whether the name is the hash of the file's bytes.
    pub(crate) const fn is_plain_hash(&self) -> bool {
        !self.mapped
    }

    pub(crate) const fn hash(&self) -> BlockHash {
        self.hash
    }
}

/// The place below the cache's directory of contents: two hexadecimal digits, `/`, the other 62, and `.m` for a
/// content of several blocks.
impl fmt::Display for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.redirect()).map_or("", |path| path.trim_start_matches('/')))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_back_and_contents_are_told_apart() {
        let block = BlockHash::of(b"x");
        let whole = ContentId::of(&Content::Whole { size: 1, block }).unwrap();
        let map = |size| ContentId::of(&Content::Mapped { size, map: Blob::Inline(vec![1]) }).unwrap();
        assert_ne!(map(5), map(6));
        for id in [whole, map(5)] {
            let text = id.to_string();
            assert_eq!(id.redirect(), format!("/{text}").into_bytes());
            assert!(text.replace('/', "").starts_with(&id.hash().to_string()));
            let (dir, name) = text.split_once('/').unwrap();
            assert_eq!(ContentId::parse(dir, name), Some(id));
        }
        assert_eq!(ContentId::of(&Content::Nothing { size: 9 }), None);
        assert_eq!(ContentId::parse("ab", "cd"), None);
    }
}
