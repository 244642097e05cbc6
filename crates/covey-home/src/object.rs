//! Reading manifest objects out of a store, and putting them into one.

use covey_types::{BlockHash, RootHash};

use crate::block::{BlockStore, StoreError, Upload};
use crate::manifest::{
    Blob, Content, ContentMap, Entry, LinkTable, ListingPart, MalformedObject, Root, Xattrs,
    decode_listing_object, window_bytes,
};

/// Why an object cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// The store did not give it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its hash is right, but it is no valid object: made by a broken or hostile writer.
    #[error(transparent)]
    Malformed(#[from] MalformedObject),
}

impl ObjectError {
    /// Whether asking again later may help.
    pub const fn is_unavailable(&self) -> bool {
        matches!(self, Self::Store(StoreError::Unavailable { .. }))
    }
}

/// Reads a home's root object.
///
/// # Errors
/// When it is absent, unavailable, damaged or malformed.
pub fn read_root(store: &dyn BlockStore, root: &RootHash) -> Result<Root, ObjectError> {
    Ok(Root::decode(&store.get(&BlockHash::from_bytes(*root.as_bytes()))?)?)
}

/// A directory's entries, and the objects of a cut one.
#[derive(Debug, Default)]
pub struct Listing {
    /// Sorted by name.
    pub entries: Vec<(Vec<u8>, Entry)>,
    /// The objects below the index; none for a directory in one object.
    pub pieces: Vec<BlockHash>,
}

/// Reads one object of a directory: its entries, or the objects that hold them.
///
/// # Errors
/// When it is absent, unavailable, damaged or malformed.
pub fn read_listing_object(store: &dyn BlockStore, listing: &BlockHash) -> Result<ListingPart, ObjectError> {
    Ok(decode_listing_object(&store.get(listing)?)?)
}

pub(crate) const fn index_below_index() -> MalformedObject {
    MalformedObject { object: "listing", at: 0, problem: "an index below an index" }
}

/// Reads a directory's entries, of a cut directory all of them.
///
/// # Errors
/// When an object is absent, unavailable, damaged or malformed.
pub fn read_listing(store: &dyn BlockStore, listing: &BlockHash) -> Result<Listing, ObjectError> {
    let pieces = match decode_listing_object(&store.get(listing)?)? {
        ListingPart::Entries(entries) => return Ok(Listing { entries, pieces: Vec::new() }),
        ListingPart::Index(pieces) => pieces,
    };
    let malformed = |problem| MalformedObject { object: "listing", at: 0, problem };
    let mut all = Listing::default();
    for piece in pieces {
        let ListingPart::Entries(entries) = decode_listing_object(&store.get(&piece.listing)?)? else {
            return Err(malformed("an index below an index").into());
        };
        let ascends = all.entries.last().zip(entries.first()).is_none_or(|(last, first)| last.0 < first.0);
        let first_is_right = entries.first().is_some_and(|first| first.0 == piece.first);
        if !ascends || !first_is_right || entries.len() as u64 != piece.entries {
            return Err(malformed("an index that does not describe its objects").into());
        }
        all.entries.extend(entries);
        all.pieces.push(piece.listing);
    }
    Ok(all)
}

/// Reads a blob's bytes.
///
/// # Errors
/// When a block is absent, unavailable, damaged or of another length than the blob says.
pub fn read_blob(store: &dyn BlockStore, blob: &Blob) -> Result<Vec<u8>, ObjectError> {
    match blob {
        Blob::Inline(bytes) => Ok(bytes.clone()),
        Blob::Blocks { len, blocks } => {
            let mut bytes = Vec::new();
            for block in blocks {
                bytes.extend_from_slice(&store.get(block)?);
                if bytes.len() as u64 > *len {
                    break;
                }
            }
            if bytes.len() as u64 != *len {
                let problem = "its blocks have another length than it says";
                return Err(MalformedObject { object: "blob", at: 0, problem }.into());
            }
            Ok(bytes)
        }
    }
}

/// The attributes of an inode.
///
/// # Errors
/// As [`read_blob`], and when they are malformed.
pub fn read_xattrs(store: &dyn BlockStore, blob: &Blob) -> Result<Xattrs, ObjectError> {
    Ok(Xattrs::decode(&read_blob(store, blob)?)?)
}

/// The table of names that share an inode.
///
/// # Errors
/// As [`read_blob`], and when it is malformed.
pub fn read_links(store: &dyn BlockStore, root: &Root) -> Result<LinkTable, ObjectError> {
    Ok(LinkTable::decode(&read_blob(store, &root.links)?)?)
}

/// The map of a large or sparse file; none for other files.
///
/// # Errors
/// As [`read_blob`], and when it is malformed.
pub fn read_map(store: &dyn BlockStore, content: &Content) -> Result<Option<ContentMap>, ObjectError> {
    let Content::Mapped { size, map } = content else { return Ok(None) };
    Ok(Some(ContentMap::decode(&read_blob(store, map)?, *size)?))
}

/// Puts bytes that are one block; gives its name.
pub(crate) fn put(upload: &dyn Upload, bytes: &[u8]) -> Result<BlockHash, StoreError> {
    let block = upload.hasher().block(bytes)?;
    upload.put(&block)?;
    Ok(block.hash())
}

/// Puts a root object; gives the name of the state.
pub(crate) fn put_root(upload: &dyn Upload, root: &Root) -> Result<RootHash, StoreError> {
    Ok(RootHash::from_bytes(*put(upload, &root.encode())?.as_bytes()))
}

/// Bytes that stand in the object if they are few, else in blocks.
pub(crate) fn put_blob(upload: &dyn Upload, bytes: &[u8]) -> Result<Blob, StoreError> {
    if Blob::fits_inline(bytes.len()) {
        return Ok(Blob::Inline(bytes.to_vec()));
    }
    let len = bytes.len() as u64;
    let parts = bytes.chunks(window_bytes(len) as usize);
    Ok(Blob::Blocks { len, blocks: parts.map(|part| put(upload, part)).collect::<Result<_, _>>()? })
}
