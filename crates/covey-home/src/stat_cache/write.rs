//! Writing a stat cache while the tree is walked: records go to a file as directories are finished, and only a
//! line for each stays in memory.
//!
//! What stays true: the cache of before is replaced by one rename, and only when the caller says that the blocks
//! are durable; a failure costs the next walk time and nothing else.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use covey_types::{BlockHash, RootHash};

use super::{
    CachedEntry, DIRTY, HEADER_BYTES, IndexEntry, MAGIC, NAMES_PROVEN, RECORD_BYTES_MAX, StatCache, VERSION,
    checksum,
};
use crate::sys::Stat;

const BUFFER_BYTES: usize = 256 * 1024;

/// Builds the record of one directory.
#[derive(Debug)]
pub(crate) struct RecordBuilder {
    device: u64,
    inode: u64,
    bytes: Vec<u8>,
}

impl RecordBuilder {
    /// A directory of exactly `entries` names. `pieces`: the listings below an index.
    pub(crate) fn new(
        (device, inode): (u64, u64),
        listing: BlockHash,
        pieces: &[BlockHash],
        entries: usize,
    ) -> Self {
        let mut bytes = Vec::with_capacity(64 + entries * 112);
        bytes.extend_from_slice(listing.as_bytes());
        bytes.extend_from_slice(&(pieces.len() as u32).to_le_bytes());
        pieces.iter().for_each(|piece| bytes.extend_from_slice(piece.as_bytes()));
        bytes.extend_from_slice(&(entries as u32).to_le_bytes());
        Self { device, inode, bytes }
    }

    /// The next name; names ascend.
    pub(crate) fn push(&mut self, entry: &CachedEntry<'_>) {
        let out = &mut self.bytes;
        out.push((u8::from(entry.dirty) * DIRTY) | (u8::from(entry.names_proven) * NAMES_PROVEN));
        out.extend_from_slice(&entry.inode.to_le_bytes());
        out.extend_from_slice(&entry.ctime.seconds.to_le_bytes());
        out.extend_from_slice(&entry.ctime.nanoseconds.to_le_bytes());
        out.extend_from_slice(&(entry.entry.len() as u32).to_le_bytes());
        out.push(entry.name.len() as u8);
        out.extend_from_slice(entry.name);
        out.extend_from_slice(entry.entry);
    }
}

#[derive(Debug)]
struct Output {
    file: BufWriter<File>,
    at: u64,
    index: Vec<IndexEntry>,
}

impl Output {
    fn append(&mut self, mut entry: IndexEntry, record: &[u8]) -> io::Result<()> {
        self.file.write_all(record)?;
        entry.offset = self.at;
        self.at += record.len() as u64;
        self.index.push(entry);
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Written {
    output: Option<Output>,
    /// Directories of the cache of before that are as they were.
    kept: Vec<u32>,
    failed: Option<io::Error>,
}

/// The next stat cache of a home. Dropped unfinished it leaves the one of before.
#[derive(Debug)]
pub(crate) struct CacheWriter {
    path: PathBuf,
    temporary: PathBuf,
    excludes: BlockHash,
    written: Mutex<Written>,
}

impl CacheWriter {
    /// A cache that will stand at `path`. `excludes`: the fingerprint of the list that the home is read with. Nothing is
    /// written as long as nothing differs from the one of before.
    pub(crate) fn new(path: &Path, excludes: BlockHash) -> Self {
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(OsString::from(format!(".{}.tmp", std::process::id())));
        Self { path: path.to_owned(), temporary: temporary.into(), excludes, written: Mutex::default() }
    }

    /// The directory is as the cache of before has it, at this number.
    pub(crate) fn keep(&self, number: u32) {
        self.written.lock().unwrap_or_else(PoisonError::into_inner).kept.push(number);
    }

    /// A directory that differs. A failure is remembered for [`CacheWriter::seal`].
    pub(crate) fn add(&self, record: &RecordBuilder) {
        let bytes = &record.bytes;
        let entry = IndexEntry {
            device: record.device,
            inode: record.inode,
            offset: 0,
            len: bytes.len() as u32,
            checksum: checksum(bytes),
        };
        if bytes.len() > RECORD_BYTES_MAX as usize {
            return;
        }
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if written.failed.is_some() {
            return;
        }
        let appended = self.output(&mut written.output).and_then(|output| output.append(entry, bytes));
        written.failed = appended.err();
    }

    fn output<'o>(&self, slot: &'o mut Option<Output>) -> io::Result<&'o mut Output> {
        if slot.is_none() {
            // Not flushed to disk: what a power cut damages fails its checksum.
            let mut file = BufWriter::with_capacity(BUFFER_BYTES, File::create(&self.temporary)?);
            file.write_all(MAGIC)?;
            file.write_all(&VERSION.to_le_bytes())?;
            *slot = Some(Output { file, at: HEADER_BYTES, index: Vec::new() });
        }
        slot.as_mut().ok_or_else(|| io::Error::other("no output"))
    }

    /// Writes the rest of the cache of a home whose own directory is `home` and whose state is `root`; none when the one of
    /// before is right. It does not stand in its place yet.
    ///
    /// # Errors
    /// When it could not be written; the one of before stands then.
    pub(crate) fn seal(
        mut self,
        before: Option<&StatCache>,
        home: &Stat,
        root: &RootHash,
    ) -> io::Result<Option<SealedCache>> {
        let mut written = std::mem::take(self.written.get_mut().unwrap_or_else(PoisonError::into_inner));
        let same = |before: &StatCache| {
            before.len() == written.kept.len() && before.root() == *root && before.excludes() == self.excludes
        };
        if written.failed.is_none() && written.output.is_none() && before.is_some_and(same) {
            return Ok(None);
        }
        // Removes the file when it is dropped, so also when it is not whole.
        let sealed = SealedCache { temporary: self.temporary.clone(), path: self.path.clone() };
        self.complete(&mut written, before, home, root)?;
        Ok(Some(sealed))
    }

    /// Seals the cache and puts it in place: for whoever has everything that `root` names already.
    ///
    /// # Errors
    /// As [`CacheWriter::seal`].
    pub(crate) fn finish(self, before: Option<&StatCache>, home: &Stat, root: &RootHash) -> io::Result<()> {
        self.seal(before, home, root)?.map_or(Ok(()), SealedCache::put_in_place)
    }

    fn complete(
        &self,
        written: &mut Written,
        before: Option<&StatCache>,
        home: &Stat,
        root: &RootHash,
    ) -> io::Result<()> {
        if let Some(error) = written.failed.take() {
            return Err(error);
        }
        let output = self.output(&mut written.output)?;
        if let Some(before) = before {
            copy_kept(before, std::mem::take(&mut written.kept), output)?;
        }
        output.index.sort_unstable_by_key(IndexEntry::key);
        // Two mounts of one directory can show it twice; the second is read anew each time.
        output.index.dedup_by_key(|entry| entry.key());
        let mut tail = Vec::with_capacity(output.index.len() * super::INDEX_ENTRY_BYTES + 128);
        output.index.iter().for_each(|entry| entry.encode(&mut tail));
        tail.extend_from_slice(&output.at.to_le_bytes());
        tail.extend_from_slice(&(output.index.len() as u32).to_le_bytes());
        tail.extend_from_slice(&home.device.to_le_bytes());
        tail.extend_from_slice(&home.inode.to_le_bytes());
        tail.extend_from_slice(root.as_bytes());
        tail.extend_from_slice(self.excludes.as_bytes());
        let mut hasher = blake3::Hasher::new();
        hasher.update(MAGIC).update(&VERSION.to_le_bytes()).update(&tail);
        output.file.write_all(&tail)?;
        output.file.write_all(hasher.finalize().as_bytes())?;
        output.file.flush()
    }
}

/// A whole stat cache beside its place. Dropped it is gone, and the one of before stands.
#[derive(Debug)]
pub(crate) struct SealedCache {
    temporary: PathBuf,
    path: PathBuf,
}

impl SealedCache {
    /// Puts it in its place. Only after everything that its root names is durable: the cache must not promise what the
    /// store does not have.
    ///
    /// # Errors
    /// When it cannot be renamed; the one of before stands then.
    pub(crate) fn put_in_place(self) -> io::Result<()> {
        fs::rename(&self.temporary, &self.path)
    }
}

impl Drop for SealedCache {
    fn drop(&mut self) {
        // After a rename there is none; a leftover is overwritten by the next process of this number.
        drop(fs::remove_file(&self.temporary));
    }
}

impl Drop for CacheWriter {
    fn drop(&mut self) {
        let written = self.written.get_mut().unwrap_or_else(PoisonError::into_inner);
        if written.output.is_some() {
            // A leftover is overwritten by the next process of this number.
            drop(fs::remove_file(&self.temporary));
        }
    }
}

/// Copies records of the cache of before in the order in which they lie, neighbours in one piece.
fn copy_kept(before: &StatCache, kept: Vec<u32>, output: &mut Output) -> io::Result<()> {
    let mut entries: Vec<IndexEntry> =
        kept.into_iter().filter_map(|number| before.index.get(number as usize).copied()).collect();
    entries.sort_unstable_by_key(|entry| entry.offset);
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut rest = entries.as_slice();
    while let Some(first) = rest.first() {
        let mut end = first.offset;
        let run = rest
            .iter()
            .take_while(|entry| {
                let joins = entry.offset == end;
                end += u64::from(entry.len);
                joins
            })
            .count();
        let (these, behind) = rest.split_at(run);
        rest = behind;
        for entry in these {
            let offset = output.at + (entry.offset - first.offset);
            output.index.push(IndexEntry { offset, ..*entry });
        }
        let len: u64 = these.iter().map(|entry| u64::from(entry.len)).sum();
        let mut copied = 0;
        while copied < len {
            let part = (len - copied).min(BUFFER_BYTES as u64) as usize;
            before.file.read_exact_at(&mut buffer[..part], first.offset + copied)?;
            output.file.write_all(&buffer[..part])?;
            copied += part as u64;
        }
        output.at += len;
    }
    Ok(())
}
