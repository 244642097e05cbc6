//! The manifest's objects of one image in a local file, so that a secure of the mounted home asks no store for
//! what it merges with: the store may be far away, and may have collected the base meanwhile.
//!
//! What stays true: what is read is checked against its hash; a file that is lost or damaged only means that the
//! store is asked.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use covey_home::{BlockHasher, BlockStore, StoreError, Upload};
use covey_types::BlockHash;

const MAGIC: &[u8; 8] = b"COVEYOBJ";
const END: &[u8; 8] = b"COVEYEND";
/// Hash, offset, length.
const RECORD_BYTES: usize = 32 + 8 + 4;
const FOOTER_BYTES: u64 = 8 + 8 + 8;

#[derive(Debug)]
pub(super) struct ObjectsWriter {
    out: BufWriter<File>,
    at: u64,
    index: Vec<(BlockHash, u64, u32)>,
}

impl ObjectsWriter {
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let mut out = BufWriter::with_capacity(128 * 1024, File::create_new(path)?);
        out.write_all(MAGIC)?;
        Ok(Self { out, at: MAGIC.len() as u64, index: Vec::new() })
    }

    pub(super) fn push(&mut self, hash: BlockHash, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.index.push((hash, self.at, bytes.len() as u32));
        self.at += bytes.len() as u64;
        Ok(())
    }

    pub(super) fn finish(mut self) -> io::Result<()> {
        self.index.sort_unstable();
        self.index.dedup_by_key(|record| record.0);
        for (hash, offset, len) in &self.index {
            self.out.write_all(hash.as_bytes())?;
            self.out.write_all(&offset.to_le_bytes())?;
            self.out.write_all(&len.to_le_bytes())?;
        }
        self.out.write_all(&self.at.to_le_bytes())?;
        self.out.write_all(&(self.index.len() as u64).to_le_bytes())?;
        self.out.write_all(END)?;
        self.out.flush()
    }
}

/// A store that answers for an image's objects from the file beside the image, and asks `inner` for all else.
#[derive(Debug)]
pub struct ObjectsFirst<'a> {
    file: Option<(File, u64, u64)>,
    inner: &'a dyn BlockStore,
}

impl<'a> ObjectsFirst<'a> {
    pub(super) fn open(path: &Path, inner: &'a dyn BlockStore) -> Self {
        Self { file: open(path).ok(), inner }
    }

    fn find(&self, hash: &BlockHash) -> Option<Vec<u8>> {
        let (file, index_at, count) = self.file.as_ref()?;
        let (mut low, mut high) = (0, *count);
        while low < high {
            let middle = low + (high - low) / 2;
            let mut record = [0; RECORD_BYTES];
            file.read_exact_at(&mut record, index_at + middle * RECORD_BYTES as u64).ok()?;
            let (found, place) = record.split_at(32);
            match found.cmp(hash.as_bytes().as_slice()) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => {
                    let (offset, len) = place.split_at(8);
                    let offset = u64::from_le_bytes(offset.try_into().ok()?);
                    let len = u32::from_le_bytes(len.try_into().ok()?);
                    let mut bytes = vec![0; (len as usize).min(covey_home::BLOCK_BYTES_MAX)];
                    file.read_exact_at(&mut bytes, offset).ok()?;
                    return (self.inner.hasher().hash(&bytes) == *hash).then_some(bytes);
                }
            }
        }
        None
    }
}

fn open(path: &Path) -> io::Result<(File, u64, u64)> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let damaged = || io::Error::from(io::ErrorKind::InvalidData);
    let mut footer = [0; FOOTER_BYTES as usize];
    file.read_exact_at(&mut footer, len.checked_sub(FOOTER_BYTES).ok_or_else(damaged)?)?;
    let number = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&footer[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let (index_at, count) = (number(0), number(8));
    let fits = count.checked_mul(RECORD_BYTES as u64).and_then(|index| index.checked_add(index_at));
    if footer[16..] != *END || fits != Some(len - FOOTER_BYTES) {
        return Err(damaged());
    }
    Ok((file, index_at, count))
}

impl BlockStore for ObjectsFirst<'_> {
    fn hasher(&self) -> &BlockHasher {
        self.inner.hasher()
    }

    fn get(&self, hash: &BlockHash) -> Result<Vec<u8>, StoreError> {
        self.find(hash).map_or_else(|| self.inner.get(hash), Ok)
    }

    fn missing(&self, hashes: &[BlockHash]) -> Result<Vec<BlockHash>, StoreError> {
        self.inner.missing(hashes)
    }

    fn upload(&self) -> Result<Box<dyn Upload + '_>, StoreError> {
        self.inner.upload()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use covey_home::MemoryStore;

    #[test]
    fn objects_are_found_and_a_damaged_one_is_asked_of_the_store() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("objects");
        let objects: Vec<Vec<u8>> = (0_u32..300).map(|n| n.to_le_bytes().repeat(9)).collect();
        let mut writer = ObjectsWriter::create(&path).unwrap();
        for object in objects.iter().chain(&objects[..3]) {
            writer.push(BlockHash::of(object), object).unwrap();
        }
        writer.finish().unwrap();
        let store = MemoryStore::new();
        let first = ObjectsFirst::open(&path, &store);
        for object in &objects {
            assert_eq!(first.get(&BlockHash::of(object)).unwrap(), *object);
        }
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"!", 8).unwrap();
        let absent = first.get(&BlockHash::of(&objects[0])).unwrap_err();
        assert!(matches!(absent, StoreError::Absent { .. }), "{absent}");
        file.set_len(100).unwrap();
        assert!(ObjectsFirst::open(&path, &store).get(&BlockHash::of(&objects[5])).is_err());
    }
}
