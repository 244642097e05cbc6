//! What of the upper directory was read before: a file beside it, so that a secure at each step reads only what
//! changed since the last one and not since the mount.
//!
//! `COVEYTRK`, version (4, 1), device (8) and inode (8) of the upper directory, base (32), number (4); for each
//! file inode (8), ctime seconds (8) and nanoseconds (4), size (8), length of the entry (4), entry; BLAKE3 of all
//! before (32). If it is lost, damaged or of another mount, everything is read again.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use covey_types::{BlockHash, RootHash};

use crate::block::{BlockStore, StoreError};
use crate::manifest::{Cursor, Entry, EntryBody, MalformedObject, Time};
use crate::object;
use crate::sys::Stat;

const MAGIC: &[u8; 8] = b"COVEYTRK";
const VERSION: u32 = 1;
const CHECKSUM_BYTES: usize = 32;
/// Hashes in one question to the store.
const HASHES_PER_QUESTION: usize = 16_384;

/// A file as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KnownFile {
    pub(super) inode: u64,
    pub(super) ctime: Time,
    pub(super) size: u64,
    /// The encoded entry.
    pub(super) entry: Box<[u8]>,
}

#[derive(Debug, Default)]
pub(super) struct Known {
    files: HashMap<u64, KnownFile>,
}

impl Known {
    /// Reads what is remembered; of it only what the store still has.
    ///
    /// # Errors
    /// Outside why there is nothing to use, inside what the store answered.
    pub(super) fn load(
        path: &Path,
        upper: &Stat,
        base: &RootHash,
        store: &dyn BlockStore,
    ) -> Result<Result<Self, StoreError>, String> {
        let bytes = fs::read(path).map_err(|error| error.to_string())?;
        let body_len = bytes.len().checked_sub(CHECKSUM_BYTES).ok_or("it is too short")?;
        if blake3::hash(&bytes[..body_len]).as_bytes()[..] != bytes[body_len..] {
            return Err("its checksum differs".to_owned());
        }
        let files = decode(&bytes[..body_len], upper, base).map_err(|error| error.to_string())?;
        let files = files.ok_or("it is of another mount")?;
        Ok(Self { files }.without_missing(store))
    }

    fn without_missing(mut self, store: &dyn BlockStore) -> Result<Self, StoreError> {
        let blocks: HashMap<u64, Vec<BlockHash>> =
            self.files.values().map(|file| (file.inode, blocks_of(file, store))).collect();
        let mut all: Vec<BlockHash> = blocks.values().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        let mut missing = HashSet::new();
        for batch in all.chunks(HASHES_PER_QUESTION) {
            missing.extend(store.missing(batch)?);
        }
        if !missing.is_empty() {
            self.files.retain(|inode, _| {
                blocks.get(inode).is_some_and(|of_file| of_file.iter().all(|block| !missing.contains(block)))
            });
        }
        Ok(self)
    }

    /// The file's entry, if it certainly did not change.
    pub(super) fn find(&self, stat: &Stat) -> Option<&KnownFile> {
        self.files.get(&stat.inode).filter(|file| file.ctime == stat.ctime && file.size == stat.size)
    }
}

/// All blocks that the file needs; of a map that cannot be read its own, which are then found missing.
fn blocks_of(file: &KnownFile, store: &dyn BlockStore) -> Vec<BlockHash> {
    let Ok(entry) = Entry::decode(&mut Cursor::new(&file.entry, "remembered entry")) else {
        return Vec::new();
    };
    let mut blocks = entry.blocks();
    if let EntryBody::File(content) = &entry.body
        && let Ok(Some(map)) = object::read_map(store, content)
    {
        blocks.extend(map.blocks);
    }
    blocks
}

fn decode(
    bytes: &[u8],
    upper: &Stat,
    base: &RootHash,
) -> Result<Option<HashMap<u64, KnownFile>>, MalformedObject> {
    let mut cursor = Cursor::new(bytes, "remembered files");
    if cursor.take(8)? != MAGIC || cursor.u32()? != VERSION {
        return Err(cursor.malformed("not of this version"));
    }
    let of = (cursor.u64()?, cursor.u64()?, cursor.hash()?);
    if of != (upper.device, upper.inode, BlockHash::from_bytes(*base.as_bytes())) {
        return Ok(None);
    }
    let count = cursor.u32()?;
    let mut files = HashMap::new();
    for _ in 0..count {
        let inode = cursor.u64()?;
        let ctime = Time { seconds: cursor.i64()?, nanoseconds: cursor.u32()? };
        let size = cursor.u64()?;
        let len = cursor.u32()? as usize;
        let entry = cursor.take(len)?.into();
        files.insert(inode, KnownFile { inode, ctime, size, entry });
    }
    cursor.end()?;
    Ok(Some(files))
}

/// Writes what was read; whoever reads it sees the old or the new.
pub(super) fn write<'a>(
    path: &Path,
    upper: &Stat,
    base: &RootHash,
    files: impl Iterator<Item = &'a KnownFile> + Clone,
) -> io::Result<()> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&upper.device.to_le_bytes());
    bytes.extend_from_slice(&upper.inode.to_le_bytes());
    bytes.extend_from_slice(base.as_bytes());
    bytes.extend_from_slice(&(files.clone().count() as u32).to_le_bytes());
    for file in files {
        bytes.extend_from_slice(&file.inode.to_le_bytes());
        bytes.extend_from_slice(&file.ctime.seconds.to_le_bytes());
        bytes.extend_from_slice(&file.ctime.nanoseconds.to_le_bytes());
        bytes.extend_from_slice(&file.size.to_le_bytes());
        bytes.extend_from_slice(&(file.entry.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&file.entry);
    }
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(checksum.as_bytes());
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{}.tmp", std::process::id()));
    // Not flushed: a file that a power cut damages fails its checksum.
    fs::File::create(&draft)?.write_all(&bytes)?;
    fs::rename(&draft, path)
}
