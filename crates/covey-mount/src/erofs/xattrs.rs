//! An inode's extended attributes, behind its fixed part.

use super::BLOCK_BYTES;

const INDEX_USER: u8 = 1;
const INDEX_ACL_ACCESS: u8 = 2;
const INDEX_ACL_DEFAULT: u8 = 3;
const INDEX_TRUSTED: u8 = 4;
const INDEX_SECURITY: u8 = 6;

const HEADER_BYTES: usize = 12;

/// Number of the shared attribute `trusted.overlay.metacopy`, without a value: the file's bytes are elsewhere.
pub(crate) const METACOPY_SHARED: u32 = 0;

/// An inode has more or larger attributes than the format can name: a value above 65,535 bytes, or about
/// 256 KiB in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooManyAttributes;

/// The block of shared attributes.
pub(crate) fn shared_block() -> [u8; BLOCK_BYTES] {
    let mut bytes = Vec::new();
    entry(&mut bytes, INDEX_TRUSTED, b"overlay.metacopy", b"");
    let mut block = [0; BLOCK_BYTES];
    block[..bytes.len()].copy_from_slice(&bytes);
    block
}

/// Attributes of one inode.
#[derive(Debug, Default)]
pub(crate) struct InodeXattrs {
    shared: Vec<u32>,
    inline: Vec<u8>,
}

impl InodeXattrs {
    pub(crate) fn share(&mut self, number: u32) {
        self.shared.push(number);
    }

    /// Adds an attribute by its full name.
    pub(crate) fn push(&mut self, name: &[u8], value: &[u8]) -> Result<(), TooManyAttributes> {
        const PREFIXES: [(&[u8], u8); 3] =
            [(b"user.", INDEX_USER), (b"trusted.", INDEX_TRUSTED), (b"security.", INDEX_SECURITY)];
        let found = match name {
            b"system.posix_acl_access" => Some((INDEX_ACL_ACCESS, &b""[..])),
            b"system.posix_acl_default" => Some((INDEX_ACL_DEFAULT, &b""[..])),
            _ => PREFIXES
                .iter()
                .find_map(|(prefix, index)| name.strip_prefix(*prefix).map(|rest| (*index, rest))),
        };
        let (index, rest) = found.ok_or(TooManyAttributes)?;
        if rest.len() > usize::from(u8::MAX) || value.len() > usize::from(u16::MAX) {
            return Err(TooManyAttributes);
        }
        entry(&mut self.inline, index, rest, value);
        self.count().map(|_| ())
    }

    /// Bytes that they take.
    pub(crate) fn len(&self) -> usize {
        if self.shared.is_empty() && self.inline.is_empty() {
            return 0;
        }
        HEADER_BYTES + self.shared.len() * 4 + self.inline.len()
    }

    /// The same as the inode says it: 0 for none, else one more than the words of four bytes behind the header.
    pub(crate) fn count(&self) -> Result<u16, TooManyAttributes> {
        let words = self.len().checked_sub(HEADER_BYTES).map_or(0, |bytes| bytes / 4 + 1);
        u16::try_from(words).map_err(|_| TooManyAttributes)
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        if self.len() == 0 {
            return;
        }
        out.extend_from_slice(&[0; 4]);
        out.push(self.shared.len() as u8);
        out.extend_from_slice(&[0; 7]);
        self.shared.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        out.extend_from_slice(&self.inline);
    }
}

fn entry(out: &mut Vec<u8>, index: u8, name: &[u8], value: &[u8]) {
    out.push(name.len() as u8);
    out.push(index);
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(name);
    out.extend_from_slice(value);
    out.resize(out.len().next_multiple_of(4), 0);
}
