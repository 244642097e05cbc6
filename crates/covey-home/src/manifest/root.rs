//! The root object: the metadata of the home's own directory, its listing, and which names share an inode.

use covey_types::BlockHash;

use super::content::Blob;
use super::cursor::put_varint;
use super::entry::Meta;
use super::{Cursor, MalformedObject};

pub(super) const MAGIC: &[u8; 4] = b"CVYO";
pub(super) const VERSION: u8 = 1;
pub(super) const KIND_ROOT: u8 = 1;
pub(super) const KIND_LISTING: u8 = 2;
pub(super) const KIND_INDEX: u8 = 3;

/// The object that a root hash names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// Metadata of the home's own directory.
    pub meta: Meta,
    /// Its entries.
    pub listing: BlockHash,
    /// Names in the tree that are regular files.
    pub files: u64,
    /// Sum of their sizes in bytes, each name counted.
    pub bytes: u64,
    /// The encoded [`super::LinkTable`]; empty when no two names share an inode.
    pub links: Blob,
}

impl Root {
    /// The object's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = object_header(KIND_ROOT);
        self.meta.encode(&mut out);
        out.extend_from_slice(self.listing.as_bytes());
        put_varint(&mut out, self.files);
        put_varint(&mut out, self.bytes);
        self.links.encode(&mut out);
        out
    }

    /// Reads the object's bytes.
    ///
    /// # Errors
    /// When they are not a root object.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedObject> {
        let mut cursor = Cursor::new(bytes, "root object");
        cursor.header(KIND_ROOT)?;
        let meta = Meta::decode(&mut cursor)?;
        let listing = cursor.hash()?;
        let files = cursor.varint()?;
        let total = cursor.varint()?;
        let links = Blob::decode(&mut cursor)?;
        cursor.end()?;
        Ok(Self { meta, listing, files, bytes: total, links })
    }
}

pub(super) fn object_header(kind: u8) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&[VERSION, kind]);
    out
}
