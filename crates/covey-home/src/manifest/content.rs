//! What a file contains: which ranges are data, and the blocks that hold them.

use covey_types::BlockHash;
use covey_types::size::{PIECE_BYTES, WHOLE_FILE_BYTES_MAX};

use super::cursor::put_varint;
use super::{Cursor, MalformedObject};

/// A blob up to this length stands in the object that names it; a longer one is blocks of its own. A listing
/// entry stays far below a listing object's size this way.
const BLOB_INLINE_BYTES_MAX: usize = 32 * 1024;
/// Longest blob; it bounds the memory that one hostile number can ask for.
const BLOB_BYTES_MAX: u64 = 512 * 1024 * 1024;
/// Largest file size, as in the kernel (`loff_t`).
const FILE_BYTES_MAX: u64 = i64::MAX as u64;
/// Data ranges of one sparse file at most.
const EXTENTS_MAX: usize = 16 * 1024 * 1024;

/// Length of the windows that a file of `size` bytes is cut in: the whole of a file up to 8 MiB, else 4 MiB.
pub const fn window_bytes(size: u64) -> u64 {
    if size <= WHOLE_FILE_BYTES_MAX { WHOLE_FILE_BYTES_MAX } else { PIECE_BYTES }
}

/// Bytes of an object that may be too many for it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Blob {
    /// Here.
    Inline(Vec<u8>),
    /// In blocks, cut like a file.
    Blocks {
        /// Length in bytes.
        len: u64,
        /// In order.
        blocks: Vec<BlockHash>,
    },
}

/// A blob in its encoding.
#[derive(Debug, Clone, Copy)]
pub(super) enum BlobView<'a> {
    Inline(&'a [u8]),
    /// The hashes.
    Blocks(&'a [u8]),
}

impl<'a> BlobView<'a> {
    pub(super) const fn hashes(&self) -> &'a [u8] {
        match self {
            Self::Inline(_) => &[],
            Self::Blocks(hashes) => hashes,
        }
    }
}

impl Blob {
    /// The empty blob.
    pub const fn empty() -> Self {
        Self::Inline(Vec::new())
    }

    /// Whether `bytes` stand in the object itself.
    pub(crate) const fn fits_inline(len: usize) -> bool {
        len <= BLOB_INLINE_BYTES_MAX
    }

    /// The blocks it needs.
    pub fn blocks(&self) -> &[BlockHash] {
        match self {
            Self::Inline(_) => &[],
            Self::Blocks { blocks, .. } => blocks,
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Inline(bytes) => {
                put_varint(out, bytes.len() as u64);
                out.extend_from_slice(bytes);
            }
            Self::Blocks { len, blocks } => {
                put_varint(out, *len);
                blocks.iter().for_each(|hash| out.extend_from_slice(hash.as_bytes()));
            }
        }
    }

    /// Looks at a blob in place.
    pub(super) fn view<'a>(cursor: &mut Cursor<'a>) -> Result<BlobView<'a>, MalformedObject> {
        let len = cursor.varint()?;
        if len <= BLOB_INLINE_BYTES_MAX as u64 {
            return Ok(BlobView::Inline(cursor.take(len as usize)?));
        }
        if len > BLOB_BYTES_MAX {
            return Err(cursor.malformed("a blob above its limit"));
        }
        Ok(BlobView::Blocks(cursor.take(len.div_ceil(window_bytes(len)) as usize * 32)?))
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, MalformedObject> {
        let len = cursor.varint()?;
        if len <= BLOB_INLINE_BYTES_MAX as u64 {
            return Ok(Self::Inline(cursor.take(len as usize)?.to_vec()));
        }
        if len > BLOB_BYTES_MAX {
            return Err(cursor.malformed("a blob above its limit"));
        }
        let count = len.div_ceil(window_bytes(len)) as usize;
        let blocks = (0..count).map(|_| cursor.hash()).collect::<Result<_, _>>()?;
        Ok(Self::Blocks { len, blocks })
    }
}

/// A range of a file that is data; what lies between is a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// First byte.
    pub start: u64,
    /// Length, at least 1.
    pub len: u64,
}

impl Extent {
    /// First byte behind.
    pub const fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// A file's size and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Content {
    /// No data: an empty file (size 0), or one hole.
    Nothing {
        /// Size in bytes.
        size: u64,
    },
    /// One block holds the file from its first to its last byte.
    Whole {
        /// Size in bytes, 1 to 8 MiB.
        size: u64,
        /// The block.
        block: BlockHash,
    },
    /// A large or sparse file.
    Mapped {
        /// Size in bytes.
        size: u64,
        /// An encoded [`ContentMap`].
        map: Blob,
    },
}

impl Content {
    /// Size in bytes.
    pub const fn size(&self) -> u64 {
        match self {
            Self::Nothing { size } | Self::Whole { size, .. } | Self::Mapped { size, .. } => *size,
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        put_varint(out, self.size());
        match self {
            Self::Nothing { .. } => out.push(0),
            Self::Whole { block, .. } => {
                out.push(1);
                out.extend_from_slice(block.as_bytes());
            }
            Self::Mapped { map, .. } => {
                out.push(2);
                map.encode(out);
            }
        }
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, MalformedObject> {
        let size = cursor.varint()?;
        if size > FILE_BYTES_MAX {
            return Err(cursor.malformed("a file size above the limit"));
        }
        match cursor.u8()? {
            0 => Ok(Self::Nothing { size }),
            1 if (1..=WHOLE_FILE_BYTES_MAX).contains(&size) => {
                Ok(Self::Whole { size, block: cursor.hash()? })
            }
            1 => Err(cursor.malformed("a whole file of a size that is never whole")),
            2 => {
                let map = Blob::decode(cursor)?;
                if let Blob::Inline(bytes) = &map {
                    ContentMap::decode(bytes, size)?;
                }
                Ok(Self::Mapped { size, map })
            }
            _ => Err(cursor.malformed("an unknown kind of content")),
        }
    }
}

/// The data ranges and blocks of a large or sparse file. Each window (see [`window_bytes`]) that has data has
/// one block: the window's data ranges, joined. A block's length therefore follows from the ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentMap {
    /// Ascending, apart from each other, none empty.
    pub extents: Vec<Extent>,
    /// One for each window with data, ascending.
    pub blocks: Vec<BlockHash>,
}

impl ContentMap {
    /// The map's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.blocks.len() * 32 + self.extents.len() * 4 + 8);
        put_varint(&mut out, self.extents.len() as u64);
        let mut at = 0;
        for extent in &self.extents {
            put_varint(&mut out, extent.start - at);
            put_varint(&mut out, extent.len);
            at = extent.end();
        }
        self.blocks.iter().for_each(|hash| out.extend_from_slice(hash.as_bytes()));
        out
    }

    /// Reads the map of a file of `size` bytes.
    ///
    /// # Errors
    /// When ranges overlap, touch, are empty or leave the file, or the number of blocks does not fit them.
    pub fn decode(bytes: &[u8], size: u64) -> Result<Self, MalformedObject> {
        let mut cursor = Cursor::new(bytes, "content map");
        let count = cursor.length(EXTENTS_MAX, "too many data ranges")?;
        let mut extents: Vec<Extent> = Vec::with_capacity(count.min(bytes.len() / 2));
        let mut at = 0_u64;
        for index in 0..count {
            let gap = cursor.varint()?;
            let len = cursor.varint()?;
            if len == 0 || (gap == 0 && index != 0) {
                return Err(cursor.malformed("an empty range"));
            }
            let start = at.checked_add(gap);
            let end = start.and_then(|start| start.checked_add(len)).filter(|end| *end <= size);
            let (Some(start), Some(end)) = (start, end) else {
                return Err(cursor.malformed("a data range behind the file's end"));
            };
            extents.push(Extent { start, len });
            at = end;
        }
        if extents.is_empty() {
            return Err(cursor.malformed("a map without data"));
        }
        let dense = extents.len() == 1 && extents[0] == Extent { start: 0, len: size };
        if dense && size <= WHOLE_FILE_BYTES_MAX {
            return Err(cursor.malformed("a map where one block would do"));
        }
        let left = bytes.len() - cursor.at();
        let blocks_expected = windows_with_data(&extents, size);
        if blocks_expected.checked_mul(32) != Some(left as u64) {
            return Err(cursor.malformed("the number of blocks does not fit the ranges"));
        }
        let blocks = (0..blocks_expected).map(|_| cursor.hash()).collect::<Result<_, _>>()?;
        Ok(Self { extents, blocks })
    }

    /// Calls `each` for every window with data: its block and the data ranges in it, in order.
    ///
    /// # Errors
    /// The first error of `each`.
    pub fn for_each_window<E>(
        &self,
        size: u64,
        mut each: impl FnMut(&BlockHash, &[Extent]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut blocks = self.blocks.iter();
        for_each_window(&self.extents, size, |extents| match blocks.next() {
            Some(hash) => each(hash, extents),
            None => Ok(()),
        })
    }
}

/// The hashes of an encoded map's blocks, in place; none if it is malformed.
pub(super) fn hashes_of_map(bytes: &[u8]) -> &[u8] {
    let mut cursor = Cursor::new(bytes, "content map");
    let mut skip = || -> Result<(), MalformedObject> {
        for _ in 0..cursor.length(EXTENTS_MAX, "too many data ranges")? {
            cursor.varint()?;
            cursor.varint()?;
        }
        Ok(())
    };
    match skip() {
        Ok(()) => &bytes[cursor.at()..],
        Err(_) => &[],
    }
}

/// Cuts data ranges at window borders and calls `each` once per window that has data.
pub(crate) fn for_each_window<E>(
    extents: &[Extent],
    size: u64,
    mut each: impl FnMut(&[Extent]) -> Result<(), E>,
) -> Result<(), E> {
    let window = window_bytes(size);
    let mut current: Vec<Extent> = Vec::new();
    let mut number = 0;
    for extent in extents {
        let mut start = extent.start;
        while start < extent.end() {
            let here = start / window;
            if here != number && !current.is_empty() {
                each(&current)?;
                current.clear();
            }
            number = here;
            // Saturating: the last window of the largest possible file ends behind 2^63, never behind 2^64.
            let end = extent.end().min((here + 1).saturating_mul(window));
            current.push(Extent { start, len: end - start });
            start = end;
        }
    }
    if current.is_empty() { Ok(()) } else { each(&current) }
}

fn windows_with_data(extents: &[Extent], size: u64) -> u64 {
    let window = window_bytes(size);
    let mut count = 0;
    let mut last = None;
    for extent in extents {
        let (first, end) = (extent.start / window, (extent.end() - 1) / window);
        count += end - first + u64::from(last != Some(first));
        last = Some(end);
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Entry, EntryBody, EntryView, Meta, Time};

    #[test]
    fn an_entry_looked_at_in_place_names_the_same_blocks() {
        let hash = |n: u64| BlockHash::of(&n.to_le_bytes());
        let map = ContentMap {
            extents: vec![Extent { start: 5, len: 10 }, Extent { start: 100 << 20, len: 1 }],
            blocks: vec![hash(1), hash(2)],
        };
        let in_blocks = Blob::Blocks { len: 9 << 20, blocks: vec![hash(3), hash(4), hash(5)] };
        let bodies = [
            EntryBody::File(Content::Nothing { size: 70_000 }),
            EntryBody::File(Content::Whole { size: 300, block: hash(6) }),
            EntryBody::File(Content::Mapped { size: 1 << 40, map: Blob::Inline(map.encode()) }),
            EntryBody::File(Content::Mapped { size: 1 << 50, map: in_blocks.clone() }),
            EntryBody::Directory { listing: hash(7) },
            EntryBody::Symlink { target: b"x".to_vec() },
            EntryBody::Fifo,
        ];
        for (body, xattrs) in
            bodies.iter().flat_map(|body| [(body, Blob::empty()), (body, in_blocks.clone())])
        {
            let mtime = Time { seconds: -3, nanoseconds: 4 };
            let entry = Entry { meta: Meta { mode: 0o4711, mtime, xattrs }, body: body.clone() };
            let bytes = entry.encode();
            let view = EntryView::parse(&bytes).unwrap();
            assert_eq!(view.blocks().collect::<Vec<_>>(), entry.blocks());
            assert_eq!(view.xattrs().unwrap(), entry.meta.xattrs);
            assert_eq!((view.kind, view.mode, view.mtime), (entry.kind(), 0o4711, mtime));
            let size = if let EntryBody::File(content) = body { content.size() } else { 0 };
            assert_eq!(view.size, size);
        }
    }

    #[test]
    fn windows_are_counted_as_they_are_cut() {
        const MIB: u64 = 1024 * 1024;
        let extent = |start, len| Extent { start, len };
        let cases = [
            (vec![extent(0, 9 * MIB)], 9 * MIB),
            (vec![extent(0, 1), extent(3, 4 * MIB), extent(5 * MIB, 1)], 20 * MIB),
            (vec![extent(100, 5), extent(200, 5)], 300),
            (vec![extent(4 * MIB - 1, 2), extent(16 * MIB, 4 * MIB)], 1 << 40),
        ];
        for (extents, size) in cases {
            let mut cut = 0;
            let mut bytes = 0;
            for_each_window::<()>(&extents, size, |parts| {
                cut += 1;
                bytes += parts.iter().map(|part| part.len).sum::<u64>();
                Ok(())
            })
            .unwrap();
            assert_eq!(cut, windows_with_data(&extents, size));
            assert_eq!(bytes, extents.iter().map(|extent| extent.len).sum::<u64>());
            let blocks = (0..cut).map(|n| BlockHash::of(&n.to_le_bytes())).collect();
            let map = ContentMap { extents, blocks };
            assert_eq!(ContentMap::decode(&map.encode(), size), Ok(map));
        }
    }
}
