//! The stat cache: what a home looked like when it was last secured or materialized, so that an unchanged file
//! is not read and an unchanged directory not encoded again. Described in `docs/formats/home-store.md`,
//! section 4.
//!
//! What stays true: a cache that is lost, damaged or of another home only costs time, never correctness; an
//! entry whose inode may have been written in the same clock tick is stored dirty and read again. What does
//! not belong here: anything that another host could use; device and inode numbers never enter the manifest.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, SystemTime};

use covey_types::BlockHash;

use crate::block::BlockStore;
use crate::manifest::{
    Blob, Content, ContentMap, Cursor, Entry, EntryBody, MalformedObject, NAME_BYTES_MAX, Time,
};
use crate::sys::Stat;

const MAGIC: &[u8; 8] = b"COVEYSTC";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 8 + 4 + 8 + 8 + 32 + 4;
const CHECKSUM_BYTES: usize = 32;

/// A change that falls into the same tick of the kernel's clock as an earlier one leaves the same ctime. The
/// longest tick is 10 ms (100 Hz); twice that leaves room for a clock that is slewed.
const CLOCK_GRANULARITY: Duration = Duration::from_millis(20);
/// File systems that keep whole seconds (or two) show them by their zero nanoseconds.
const CLOCK_GRANULARITY_COARSE: Duration = Duration::from_secs(2);

/// One name as it was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CachedEntry<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) inode: u64,
    pub(crate) ctime: Time,
    pub(crate) size: u64,
    pub(crate) dirty: bool,
    /// The encoded entry.
    pub(crate) entry: &'a [u8],
}

impl CachedEntry<'_> {
    /// Whether the inode is certainly as it was when the entry was made.
    pub(crate) fn matches(&self, device: u64, stat: &Stat) -> bool {
        if self.dirty || self.inode != stat.inode || self.ctime != stat.ctime || device != stat.device {
            return false;
        }
        // ctime alone decides; the rest guards against file systems that keep ctime badly.
        let mut cursor = Cursor::new(self.entry, "cached entry");
        let same = || -> Result<bool, MalformedObject> {
            let kind = cursor.u8()?;
            let mode = cursor.u16()?;
            let mtime = Time { seconds: cursor.i64()?, nanoseconds: cursor.u32()? };
            use rustix::fs::FileType;
            let same_kind = match kind {
                1 => stat.file_type == FileType::RegularFile && self.size == stat.size,
                2 => stat.file_type == FileType::Directory,
                3 => stat.file_type == FileType::Symlink,
                _ => stat.file_type == FileType::Fifo,
            };
            Ok(same_kind && mode == stat.mode && mtime == stat.mtime)
        };
        let mut same = same;
        same().unwrap_or(false)
    }
}

/// One directory as it was.
#[derive(Debug)]
pub(crate) struct CachedDir<'a> {
    pub(crate) device: u64,
    /// The listing object that names the directory, then the objects below it if it is cut.
    pub(crate) listing: BlockHash,
    pub(crate) pieces: Vec<BlockHash>,
    /// Sorted by name.
    pub(crate) entries: Vec<CachedEntry<'a>>,
}

/// Builds the record of one directory.
#[derive(Debug)]
pub(crate) struct RecordBuilder {
    bytes: Vec<u8>,
}

impl RecordBuilder {
    pub(crate) fn new(
        device: u64,
        inode: u64,
        listing: BlockHash,
        pieces: &[BlockHash],
        entries: usize,
    ) -> Self {
        let mut bytes = Vec::with_capacity(64 + entries * 160);
        bytes.extend_from_slice(&device.to_le_bytes());
        bytes.extend_from_slice(&inode.to_le_bytes());
        bytes.extend_from_slice(listing.as_bytes());
        bytes.extend_from_slice(&(pieces.len() as u32).to_le_bytes());
        pieces.iter().for_each(|piece| bytes.extend_from_slice(piece.as_bytes()));
        bytes.extend_from_slice(&(entries as u32).to_le_bytes());
        Self { bytes }
    }

    pub(crate) fn push(&mut self, entry: &CachedEntry<'_>) {
        let out = &mut self.bytes;
        out.push(u8::from(entry.dirty));
        out.extend_from_slice(&entry.inode.to_le_bytes());
        out.extend_from_slice(&entry.ctime.seconds.to_le_bytes());
        out.extend_from_slice(&entry.ctime.nanoseconds.to_le_bytes());
        out.extend_from_slice(&entry.size.to_le_bytes());
        out.extend_from_slice(&(entry.entry.len() as u32).to_le_bytes());
        out.push(entry.name.len() as u8);
        out.extend_from_slice(entry.name);
        out.extend_from_slice(entry.entry);
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

fn decode_dir<'a>(cursor: &mut Cursor<'a>) -> Result<((u64, u64), CachedDir<'a>), MalformedObject> {
    let device = cursor.u64()?;
    let inode = cursor.u64()?;
    let listing = cursor.hash()?;
    let pieces = cursor.u32()?;
    let pieces = (0..pieces).map(|_| cursor.hash()).collect::<Result<_, _>>()?;
    let count = cursor.u32()? as usize;
    let mut entries = Vec::with_capacity(count.min(4096));
    for _ in 0..count {
        let dirty = cursor.u8()? != 0;
        let inode = cursor.u64()?;
        let ctime = Time { seconds: cursor.i64()?, nanoseconds: cursor.u32()? };
        let size = cursor.u64()?;
        let len = cursor.u32()? as usize;
        let name_len = usize::from(cursor.u8()?).min(NAME_BYTES_MAX);
        let name = cursor.take(name_len)?;
        entries.push(CachedEntry { name, inode, ctime, size, dirty, entry: cursor.take(len)? });
    }
    Ok(((device, inode), CachedDir { device, listing, pieces, entries }))
}

/// A loaded cache.
#[derive(Debug)]
pub(crate) struct StatCache {
    bytes: Vec<u8>,
    /// By device and inode of the directory, so that a renamed directory is still known.
    dirs: HashMap<(u64, u64), Range<usize>>,
}

impl StatCache {
    /// Reads the cache of the home whose own directory is `root`.
    ///
    /// # Errors
    /// Why there is none to use; the caller reads everything then.
    pub(crate) fn load(path: &Path, root: &Stat) -> Result<Self, String> {
        let bytes = fs::read(path).map_err(|error| error.to_string())?;
        let body_len = bytes.len().checked_sub(CHECKSUM_BYTES).filter(|len| *len >= HEADER_BYTES);
        let body_len = body_len.ok_or_else(|| "it is too short".to_owned())?;
        if blake3::hash(&bytes[..body_len]).as_bytes()[..] != bytes[body_len..] {
            return Err("its checksum differs".to_owned());
        }
        let mut dirs = HashMap::new();
        let mut cursor = Cursor::new(&bytes[..body_len], "stat cache");
        let mut read = || -> Result<bool, MalformedObject> {
            if cursor.take(8)? != MAGIC || cursor.u32()? != VERSION {
                return Err(cursor.malformed("not a stat cache of this version"));
            }
            if (cursor.u64()?, cursor.u64()?) != (root.device, root.inode) {
                return Ok(false);
            }
            cursor.hash()?;
            let count = cursor.u32()?;
            for _ in 0..count {
                let start = cursor.at();
                let (key, _) = decode_dir(&mut cursor)?;
                dirs.insert(key, start..cursor.at());
            }
            cursor.end()?;
            Ok(true)
        };
        match read() {
            Ok(true) => Ok(Self { bytes, dirs }),
            Ok(false) => Err("it is of another directory".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.dirs.len()
    }

    pub(crate) fn find(&self, device: u64, inode: u64) -> Option<Range<usize>> {
        self.dirs.get(&(device, inode)).cloned()
    }

    pub(crate) fn dir(&self, range: &Range<usize>) -> Option<CachedDir<'_>> {
        let mut cursor = Cursor::new(&self.bytes[range.clone()], "stat cache");
        decode_dir(&mut cursor).ok().map(|(_, dir)| dir)
    }

    pub(crate) fn record(&self, range: &Range<usize>) -> &[u8] {
        &self.bytes[range.clone()]
    }

    /// Every block that an unchanged home would not be read for. A content map that is no longer readable is
    /// named by its own blocks, so that its file is read again.
    pub(crate) fn blocks(&self, store: &dyn BlockStore) -> Vec<BlockHash> {
        let mut blocks = Vec::new();
        for range in self.dirs.values() {
            let Some(dir) = self.dir(range) else { continue };
            blocks.push(dir.listing);
            blocks.extend(&dir.pieces);
            for cached in &dir.entries {
                let Ok(entry) = Entry::decode(&mut Cursor::new(cached.entry, "cached entry")) else {
                    continue;
                };
                blocks.extend(entry.blocks());
                blocks.extend(mapped_blocks(&entry, store));
            }
        }
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }
}

/// The data blocks behind a content map that stands in blocks of its own.
pub(crate) fn mapped_blocks(entry: &Entry, store: &dyn BlockStore) -> Vec<BlockHash> {
    let EntryBody::File(Content::Mapped { size, map: Blob::Blocks { blocks, .. } }) = &entry.body else {
        return Vec::new();
    };
    let mut bytes = Vec::new();
    for block in blocks {
        match store.get(block) {
            Ok(part) => bytes.extend_from_slice(&part),
            Err(_) => return Vec::new(),
        }
    }
    ContentMap::decode(&bytes, *size).map(|map| map.blocks).unwrap_or_default()
}

/// Writes a cache; whoever reads sees the old one or the new one.
pub(crate) fn write<'a>(
    path: &Path,
    root: &Stat,
    root_hash: &BlockHash,
    records: impl ExactSizeIterator<Item = &'a [u8]>,
) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(OsString::from(format!(".{}.tmp", std::process::id())));
    let mut hasher = blake3::Hasher::new();
    // Not flushed to disk: a cache that a power cut damages fails its checksum.
    let mut out = io::BufWriter::with_capacity(256 * 1024, fs::File::create(&temporary)?);
    let mut put = |bytes: &[u8]| -> io::Result<()> {
        hasher.update(bytes);
        out.write_all(bytes)
    };
    put(MAGIC)?;
    put(&VERSION.to_le_bytes())?;
    put(&root.device.to_le_bytes())?;
    put(&root.inode.to_le_bytes())?;
    put(root_hash.as_bytes())?;
    put(&(records.len() as u32).to_le_bytes())?;
    for record in records {
        put(record)?;
    }
    out.write_all(hasher.finalize().as_bytes())?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?;
    fs::rename(&temporary, path)
}

/// The wall clock as file systems use it.
pub(crate) fn now() -> Time {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Time { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
}

fn granularity(ctime: Time) -> Duration {
    if ctime.nanoseconds == 0 { CLOCK_GRANULARITY_COARSE } else { CLOCK_GRANULARITY }
}

fn distance(earlier: Time, later: Time) -> Option<Duration> {
    let nanoseconds = |time: Time| i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds);
    let between = nanoseconds(later) - nanoseconds(earlier);
    Some(Duration::from_nanos(u64::try_from(between).ok()?))
}

/// Whether an inode with this ctime, looked at from `read_start` on, could be written once more without its
/// ctime moving.
pub(crate) fn is_racy(ctime: Time, read_start: Time) -> bool {
    distance(ctime, read_start).is_none_or(|between| between <= granularity(ctime))
}

/// Waits until the clock has left `ctime` behind, so that any later change shows; at most the granularity.
pub(crate) fn settle(ctime: Time) {
    let start = now();
    let left = match distance(ctime, start) {
        Some(past) => granularity(ctime).saturating_sub(past),
        // In the future by clock or by mischief: waiting for it has no bound, so the entry stays dirty.
        None => return,
    };
    if is_racy(ctime, start) {
        std::thread::sleep(left + Duration::from_millis(1));
    }
}
