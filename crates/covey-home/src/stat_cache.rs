//! The stat cache: what a home looked like when it was last secured or materialized, so that an unchanged file
//! is not read and an unchanged directory not encoded again. Described in `docs/formats/home-store.md`,
//! section 4.
//!
//! What stays true: a cache that is lost, damaged or of another home only costs time, never correctness; an
//! entry whose inode may have been written in the same clock tick is stored dirty and read again; in memory
//! there is a line per directory, never the entries of all. What does not belong here: anything that another
//! host could use; device and inode numbers never enter the manifest.

mod write;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use covey_types::{BlockHash, RootHash};
use rustix::fs::FileType;

use crate::block::BlockStore;
use crate::manifest::{
    Blob, Content, ContentMap, Cursor, Entry, EntryBody, EntryKind, EntryView, MalformedObject,
    NAME_BYTES_MAX, Time,
};
use crate::sys::Stat;

pub(crate) use write::{CacheWriter, RecordBuilder, SealedCache};

const MAGIC: &[u8; 8] = b"COVEYSTC";
const VERSION: u32 = 2;
const HEADER_BYTES: u64 = 8 + 4;
/// Offset of the index, number of directories, device, inode, root, list of excludes, checksum.
const FOOTER_BYTES: u64 = 8 + 4 + 8 + 8 + 32 + 32 + 32;
/// Flags of an entry.
const DIRTY: u8 = 1;
const NAMES_PROVEN: u8 = 2;
const INDEX_ENTRY_BYTES: usize = 8 + 8 + 8 + 4 + 8;
/// A record above this was not written by us: a million entries of the longest kind are less.
const RECORD_BYTES_MAX: u32 = 1 << 30;

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
    pub(crate) dirty: bool,
    /// Of a directory that is not dirty: as long as its inode is as it was, it has the names of its own record and no
    /// others but excluded ones.
    pub(crate) names_proven: bool,
    /// The encoded entry.
    pub(crate) entry: &'a [u8],
}

impl<'a> CachedEntry<'a> {
    fn read(cursor: &mut Cursor<'a>) -> Result<Self, MalformedObject> {
        let flags = cursor.u8()?;
        let (dirty, names_proven) = (flags & DIRTY != 0, flags & NAMES_PROVEN != 0);
        let inode = cursor.u64()?;
        let ctime = Time { seconds: cursor.i64()?, nanoseconds: cursor.u32()? };
        let len = cursor.u32()? as usize;
        let name_len = usize::from(cursor.u8()?).min(NAME_BYTES_MAX);
        let name = cursor.take(name_len)?;
        Ok(Self { name, inode, ctime, dirty, names_proven, entry: cursor.take(len)? })
    }

    /// The encoded entry, looked at.
    pub(crate) fn view(&self) -> Option<EntryView<'a>> {
        EntryView::parse(self.entry).ok()
    }

    /// What the entry says, if the inode is certainly as it was when the entry was made.
    pub(crate) fn unchanged(&self, device: u64, stat: &Stat) -> Option<EntryView<'a>> {
        if self.dirty || self.inode != stat.inode || self.ctime != stat.ctime || device != stat.device {
            return None;
        }
        // ctime alone decides; the rest guards against file systems that keep ctime badly.
        let view = self.view()?;
        let same_kind = match view.kind {
            EntryKind::File => stat.file_type == FileType::RegularFile && view.size == stat.size,
            EntryKind::Directory => stat.file_type == FileType::Directory,
            EntryKind::Symlink => stat.file_type == FileType::Symlink,
            EntryKind::Fifo => stat.file_type == FileType::Fifo,
            EntryKind::Socket => stat.file_type == FileType::Socket,
            EntryKind::CharacterDevice => stat.file_type == FileType::CharacterDevice,
            EntryKind::BlockDevice => stat.file_type == FileType::BlockDevice,
        };
        (same_kind && view.mode == stat.mode && view.mtime == stat.mtime).then_some(view)
    }
}

/// One directory as it was.
#[derive(Debug)]
pub(crate) struct CachedDir {
    pub(crate) device: u64,
    /// The listing object that names the directory, then the objects below it if it is cut.
    pub(crate) listing: BlockHash,
    pub(crate) pieces: Vec<BlockHash>,
    bytes: Vec<u8>,
    /// Where each entry begins, in the order of their names.
    starts: Vec<u32>,
}

impl CachedDir {
    fn decode(device: u64, bytes: Vec<u8>) -> Result<Self, MalformedObject> {
        let mut cursor = Cursor::new(&bytes, "stat cache");
        let listing = cursor.hash()?;
        let pieces = cursor.u32()?;
        let pieces = (0..pieces).map(|_| cursor.hash()).collect::<Result<_, _>>()?;
        let count = cursor.u32()? as usize;
        let mut starts = Vec::with_capacity(count.min(bytes.len()));
        for _ in 0..count {
            starts.push(cursor.at() as u32);
            CachedEntry::read(&mut cursor)?;
        }
        cursor.end()?;
        Ok(Self { device, listing, pieces, bytes, starts })
    }

    pub(crate) fn len(&self) -> usize {
        self.starts.len()
    }

    pub(crate) fn entry(&self, at: usize) -> Option<CachedEntry<'_>> {
        let start = *self.starts.get(at)? as usize;
        CachedEntry::read(&mut Cursor::new(&self.bytes[start..], "stat cache")).ok()
    }

    /// Its names, ascending.
    pub(crate) fn names(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).filter_map(|at| self.entry(at)).map(|entry| entry.name)
    }

    /// Where `name` stands; `at` moves forward with the sorted names that are asked for.
    pub(crate) fn position(&self, name: &[u8], at: &mut usize) -> Option<u32> {
        while let Some(entry) = self.entry(*at) {
            match entry.name.cmp(name) {
                std::cmp::Ordering::Less => *at += 1,
                std::cmp::Ordering::Equal => return Some(*at as u32),
                std::cmp::Ordering::Greater => return None,
            }
        }
        None
    }
}

/// Where the record of one directory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct IndexEntry {
    device: u64,
    inode: u64,
    offset: u64,
    len: u32,
    checksum: [u8; 8],
}

impl IndexEntry {
    const fn key(&self) -> (u64, u64) {
        (self.device, self.inode)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.device.to_le_bytes());
        out.extend_from_slice(&self.inode.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        out.extend_from_slice(&self.checksum);
    }

    fn decode(cursor: &mut Cursor<'_>) -> Result<Self, MalformedObject> {
        Ok(Self {
            device: cursor.u64()?,
            inode: cursor.u64()?,
            offset: cursor.u64()?,
            len: cursor.u32()?,
            checksum: cursor.u64()?.to_le_bytes(),
        })
    }
}

fn checksum(record: &[u8]) -> [u8; 8] {
    blake3::hash(record).as_bytes().first_chunk().copied().unwrap_or_default()
}

/// What stands at the end of a cache.
struct Footer {
    root: RootHash,
    excludes: BlockHash,
    /// Device and inode of the home's own directory.
    of: (u64, u64),
    index: Vec<IndexEntry>,
}

/// An opened cache.
#[derive(Debug)]
pub(crate) struct StatCache {
    file: File,
    root: RootHash,
    /// The list of excludes that it was written with.
    excludes: BlockHash,
    /// Ascending by device and inode, so that a renamed directory is still known.
    index: Vec<IndexEntry>,
}

impl StatCache {
    /// Opens the cache of the home whose own directory is `home`.
    ///
    /// # Errors
    /// Why there is none to use; the caller reads everything then.
    pub(crate) fn load(path: &Path, home: &Stat) -> Result<Self, String> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let found = Self::read_index(&file).map_err(|error| error.to_string())?;
        let Footer { root, excludes, of, index } =
            found.ok_or_else(|| "it is not a stat cache, or damaged".to_owned())?;
        if of != (home.device, home.inode) {
            return Err("it is of another directory".to_owned());
        }
        // Its records are read in another order than they lie; on a cold disk that costs a seek each otherwise.
        // Only advice: without it reading is slower.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed).ok();
        Ok(Self { file, root, excludes, index })
    }

    fn read_index(file: &File) -> io::Result<Option<Footer>> {
        let len = file.metadata()?.len();
        if len < HEADER_BYTES + FOOTER_BYTES {
            return Ok(None);
        }
        let mut footer = [0; FOOTER_BYTES as usize];
        file.read_exact_at(&mut footer, len - FOOTER_BYTES)?;
        let mut cursor = Cursor::new(&footer, "stat cache");
        let mut parse = || -> Result<_, MalformedObject> {
            let at = cursor.u64()?;
            let count = cursor.u32()?;
            let of = (cursor.u64()?, cursor.u64()?);
            let root = RootHash::from_bytes(*cursor.hash()?.as_bytes());
            Ok((at, count, of, (root, cursor.hash()?), cursor.hash()?))
        };
        let Ok((at, count, of, (root, excludes), wanted)) = parse() else { return Ok(None) };
        let index_len = count as usize * INDEX_ENTRY_BYTES;
        let end = at.checked_add(index_len as u64).and_then(|end| end.checked_add(FOOTER_BYTES));
        if at < HEADER_BYTES || end != Some(len) {
            return Ok(None);
        }
        let mut header = [0; HEADER_BYTES as usize];
        file.read_exact_at(&mut header, 0)?;
        let mut bytes = vec![0; index_len];
        file.read_exact_at(&mut bytes, at)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&header).update(&bytes).update(&footer[..footer.len() - 32]);
        let version_known = header[..8] == *MAGIC && header[8..] == VERSION.to_le_bytes();
        if !version_known || hasher.finalize().as_bytes() != wanted.as_bytes() {
            return Ok(None);
        }
        let mut cursor = Cursor::new(&bytes, "stat cache");
        let index: Result<Vec<_>, _> = (0..count).map(|_| IndexEntry::decode(&mut cursor)).collect();
        let fits = |entry: &IndexEntry| {
            entry.len <= RECORD_BYTES_MAX
                && entry.offset >= HEADER_BYTES
                && entry.offset.checked_add(entry.len.into()).is_some_and(|end| end <= at)
        };
        let index = index.ok().filter(|index| index.iter().all(fits));
        Ok(index.map(|index| Footer { root, excludes, of, index }))
    }

    /// Directories that it knows.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    /// The state that it was written for.
    pub(crate) const fn root(&self) -> RootHash {
        self.root
    }

    /// The fingerprint of the list of excludes that it was written with.
    pub(crate) const fn excludes(&self) -> BlockHash {
        self.excludes
    }

    /// Which directory this is, if it is known.
    pub(crate) fn find(&self, device: u64, inode: u64) -> Option<u32> {
        self.index.binary_search_by_key(&(device, inode), IndexEntry::key).ok().map(|at| at as u32)
    }

    /// The directory as it was; none if its record is damaged or cannot be read, which only costs time.
    pub(crate) fn dir(&self, number: u32) -> Option<CachedDir> {
        let entry = self.index.get(number as usize)?;
        let mut bytes = vec![0; entry.len as usize];
        self.file.read_exact_at(&mut bytes, entry.offset).ok()?;
        if checksum(&bytes) != entry.checksum {
            return None;
        }
        CachedDir::decode(entry.device, bytes).ok()
    }
}

/// The data blocks behind a content map that stands in blocks of its own; none if it can no longer be read, so
/// that its own blocks decide.
pub(crate) fn mapped_blocks(entry: &[u8], store: &dyn BlockStore) -> Vec<BlockHash> {
    let Ok(entry) = Entry::decode(&mut Cursor::new(entry, "cached entry")) else { return Vec::new() };
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
