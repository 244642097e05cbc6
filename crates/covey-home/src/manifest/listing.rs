//! Listings: the entries of one directory, in one object or, for very many entries, in several below an index.

use covey_types::BlockHash;

use super::cursor::put_varint;
use super::entry::{Entry, check_entry_name};
use super::root::{KIND_INDEX, KIND_LISTING, object_header};
use super::{Cursor, MalformedObject};

/// A directory whose entries encode to more than this is cut in several objects.
const LISTING_BYTES: usize = 1024 * 1024;
/// No object of a cut directory is shorter, but the last.
const LISTING_BYTES_MIN: usize = 128 * 1024;
/// One name in this many ends an object of a cut directory, by its hash: an entry that comes or goes changes
/// one object and leaves the borders of the others where they were.
const BORDER_ONE_IN: u64 = 2048;
/// A listing longer than this was not made by any writer.
const LISTING_OBJECT_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Objects of one directory at most: an index stays below a block, a directory below 60 GiB of entries.
const PIECES_MAX: usize = 100_000;

/// Entries of a directory, or the objects that hold them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListingPart {
    /// Name and entry, sorted by name.
    Entries(Vec<(Vec<u8>, Entry)>),
    /// The directory is cut in these objects.
    Index(Vec<ListingPiece>),
}

/// One object of a cut directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListingPiece {
    /// The object.
    pub listing: BlockHash,
    /// Its entries.
    pub entries: u64,
    /// Name of the first.
    pub first: Vec<u8>,
}

/// Reads a listing or an index object.
///
/// # Errors
/// When the bytes are neither, or names are not sorted, repeated or could leave the directory.
pub fn decode_listing_object(bytes: &[u8]) -> Result<ListingPart, MalformedObject> {
    let mut cursor = Cursor::new(bytes, "listing");
    if bytes.get(5) == Some(&KIND_INDEX) {
        cursor.header(KIND_INDEX)?;
        let count = cursor.length(PIECES_MAX, "too many objects of one directory")?;
        let mut pieces: Vec<ListingPiece> = Vec::new();
        for _ in 0..count {
            let listing = cursor.hash()?;
            let entries = cursor.varint()?;
            let first = decode_name(&mut cursor)?.to_vec();
            if entries == 0 || pieces.last().is_some_and(|last| last.first >= first) {
                return Err(cursor.malformed("objects of one directory that are empty or not sorted"));
            }
            pieces.push(ListingPiece { listing, entries, first });
        }
        if pieces.len() < 2 {
            return Err(cursor.malformed("an index where one listing would do"));
        }
        cursor.end()?;
        return Ok(ListingPart::Index(pieces));
    }
    if bytes.len() > LISTING_OBJECT_BYTES_MAX {
        return Err(cursor.malformed("a listing above its limit"));
    }
    cursor.header(KIND_LISTING)?;
    // The shortest entry has 18 bytes: a count that cannot be true allocates nothing.
    let count = cursor.length(bytes.len() / 18, "more entries than bytes for them")?;
    let mut entries: Vec<(Vec<u8>, Entry)> = Vec::with_capacity(count);
    for _ in 0..count {
        let name = decode_name(&mut cursor)?;
        if entries.last().is_some_and(|(last, _)| last.as_slice() >= name) {
            return Err(cursor.malformed("names that are repeated or not sorted"));
        }
        entries.push((name.to_vec(), Entry::decode(&mut cursor)?));
    }
    cursor.end()?;
    Ok(ListingPart::Entries(entries))
}

fn decode_name<'a>(cursor: &mut Cursor<'a>) -> Result<&'a [u8], MalformedObject> {
    let len = cursor.u8()?;
    let name = cursor.take(usize::from(len))?;
    check_entry_name(name, cursor)?;
    Ok(name)
}

/// Makes the objects of one directory from its entries in the order of their names.
#[derive(Debug, Default)]
pub struct ListingBuilder {
    bytes: Vec<u8>,
    /// For each entry: where it begins, and where its name ends.
    starts: Vec<(usize, usize)>,
}

impl ListingBuilder {
    /// Adds the next name with the bytes of its entry; names ascend.
    pub fn push(&mut self, name: &[u8], entry: &[u8]) {
        debug_assert!(!name.is_empty() && name.len() <= super::NAME_BYTES_MAX, "the kernel gave this name");
        let start = self.bytes.len();
        self.bytes.push(name.len() as u8);
        self.bytes.extend_from_slice(name);
        self.starts.push((start, self.bytes.len()));
        self.bytes.extend_from_slice(entry);
    }

    /// Hands every object to `put`, which returns its hash, and returns the directory's.
    ///
    /// # Errors
    /// The first error of `put`.
    pub fn finish<E>(self, mut put: impl FnMut(&[u8]) -> Result<BlockHash, E>) -> Result<BlockHash, E> {
        let mut object = |from: usize, to: usize| {
            let begin = self.starts.get(from).map_or(self.bytes.len(), |start| start.0);
            let end = self.starts.get(to).map_or(self.bytes.len(), |start| start.0);
            let mut out = object_header(KIND_LISTING);
            put_varint(&mut out, (to - from) as u64);
            out.extend_from_slice(&self.bytes[begin..end]);
            put(&out)
        };
        if self.bytes.len() <= LISTING_BYTES {
            return object(0, self.starts.len());
        }
        let mut pieces = Vec::new();
        let mut from = 0;
        for (number, (start, name_end)) in self.starts.iter().enumerate() {
            let name = &self.bytes[start + 1..*name_end];
            let next = self.starts.get(number + 1).map_or(self.bytes.len(), |start| start.0);
            let len = next - self.starts[from].0;
            let is_last = number + 1 == self.starts.len();
            let border = blake3::hash(name).as_bytes()[..8].iter().fold(0, |n, b| n << 8 | u64::from(*b));
            if is_last || len >= LISTING_BYTES || (len >= LISTING_BYTES_MIN && border % BORDER_ONE_IN == 0) {
                let first = self.starts[from];
                pieces.push(ListingPiece {
                    listing: object(from, number + 1)?,
                    entries: (number + 1 - from) as u64,
                    first: self.bytes[first.0 + 1..first.1].to_vec(),
                });
                from = number + 1;
            }
        }
        if let [only] = pieces.as_slice() {
            return Ok(only.listing);
        }
        let mut index = object_header(KIND_INDEX);
        put_varint(&mut index, pieces.len() as u64);
        for piece in &pieces {
            index.extend_from_slice(piece.listing.as_bytes());
            put_varint(&mut index, piece.entries);
            index.push(piece.first.len() as u8);
            index.extend_from_slice(&piece.first);
        }
        put(&index)
    }
}
