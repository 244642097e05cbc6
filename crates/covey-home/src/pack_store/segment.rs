//! A part of the catalogue on disk: where the blocks of many packs lie, sorted by hash, in a file that is written
//! once and never changed.
//!
//! What stays true: memory holds a filter and one number per 32 blocks, both bounded whatever the store's size; a
//! question that the filter lets through costs one read. The file is a cache: whoever finds it damaged deletes it
//! and reads the packs' own indexes again. A bucket is checked against its sum before it proves that a block is in
//! none of the packs (I7). What does not belong here: which packs still exist.
//!
//! Layout, little-endian: records of 60 bytes (hash 32, number of the pack in this file 4, offset of the frame 8,
//! its stored length 4, its plain length 3, codec 1, offset in the frame 4, length 4); names of the packs, 16 bytes
//! each; for each bucket the number of its first record (4) and the start of its BLAKE3 (8), then the number of
//! records (4); the filter; a footer of 64 bytes: number of packs (4), bits of a bucket's number (4), lines of
//! the filter (4), version (4), number of records (8), BLAKE3 of all but the records and this sum (32),
//! `COVEYCAT` (8). Version 1 lies as it is; in version 2, of an encrypted store, all but the footer is hidden
//! (`mask`), and sums are those of the hidden bytes.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use covey_types::BlockHash;

use super::catalogue::{Location, PackName};
use super::mask::Mask;
use super::pack::{Codec, Frame};
use crate::keys::CacheKey;

const MAGIC: &[u8; 8] = b"COVEYCAT";
const VERSION: u32 = 1;
const VERSION_MASKED: u32 = 2;
const RECORD_BYTES: usize = 60;
const PACK_NAME_BYTES: usize = 16;
const BUCKET_BYTES: usize = 12;
const FOOTER_BYTES: usize = 64;
/// Records that share a bucket, on average: about 2 KiB, which is one read.
const BUCKET_RECORDS: u64 = 32;
/// Buckets at most: their table takes 12 MiB of memory, and buckets grow beyond 33 million blocks.
const BUCKET_BITS_MAX: u32 = 20;
/// One line of the filter is one cache line.
const FILTER_LINE_BYTES: usize = 64;
/// At ten bits for each block, one question in a hundred about an absent block costs a read.
const FILTER_BITS_PER_RECORD: u64 = 10;
/// The filter takes at most 8 MiB; beyond 6.7 million blocks it lets more through.
const FILTER_LINES_MAX: u64 = 128 * 1024;
const FILTER_PROBES: u32 = 5;
/// More records than this is no segment of ours: numbers of records have 32 bits.
const RECORDS_MAX: u64 = u32::MAX as u64;
/// Buckets that a question for most of the segment reads at once, of about 2 KiB each.
const BUCKETS_AT_ONCE: usize = 64;
/// Records that a merge reads of each of its sources at once.
const MERGE_RECORDS: usize = 1024;

/// Bits of a block in one line, chosen by bytes of its hash that do not choose the bucket.
#[derive(Debug)]
struct Filter {
    bytes: Vec<u8>,
}

impl Filter {
    fn for_records(records: u64) -> Self {
        let lines = (records * FILTER_BITS_PER_RECORD).div_ceil(FILTER_LINE_BYTES as u64 * 8);
        Self { bytes: vec![0; lines.clamp(1, FILTER_LINES_MAX) as usize * FILTER_LINE_BYTES] }
    }

    fn lines(&self) -> usize {
        self.bytes.len() / FILTER_LINE_BYTES
    }

    /// Byte and mask of each of the block's bits.
    fn bits(&self, hash: &BlockHash) -> impl Iterator<Item = (usize, u8)> + use<> {
        let line = (word(hash, 8) % self.lines() as u64) as usize * FILTER_LINE_BYTES;
        let probes = word(hash, 16);
        (0..FILTER_PROBES).map(move |probe| {
            let bit = (probes >> (probe * 9)) as usize % (FILTER_LINE_BYTES * 8);
            (line + bit / 8, 1_u8 << (bit % 8))
        })
    }

    fn add(&mut self, hash: &BlockHash) {
        for (byte, mask) in self.bits(hash) {
            self.bytes[byte] |= mask;
        }
    }

    fn may_have(&self, hash: &BlockHash) -> bool {
        self.bits(hash).all(|(byte, mask)| self.bytes[byte] & mask != 0)
    }
}

fn word(hash: &BlockHash, at: usize) -> u64 {
    hash.as_bytes()[at..at + 8].iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

fn bucket_of(hash: &BlockHash, bits: u32) -> usize {
    // A shift by 64 is none that the machine knows.
    word(hash, 0).checked_shr(64 - bits).unwrap_or(0) as usize
}

fn bucket_bits(records: u64) -> u32 {
    (records / BUCKET_RECORDS).checked_ilog2().unwrap_or(0).min(BUCKET_BITS_MAX)
}

/// One block in one pack; the pack's number is the segment's own.
pub(super) type Record = (BlockHash, Location);

fn encode(record: &Record) -> [u8; RECORD_BYTES] {
    let (hash, place) = record;
    let mut out = [0; RECORD_BYTES];
    out[..32].copy_from_slice(hash.as_bytes());
    out[32..36].copy_from_slice(&place.pack.to_le_bytes());
    out[36..44].copy_from_slice(&place.frame.offset.to_le_bytes());
    out[44..48].copy_from_slice(&place.frame.stored_len.to_le_bytes());
    out[48..51].copy_from_slice(&place.frame.plain_len.to_le_bytes()[..3]);
    out[51] = place.frame.codec.byte();
    out[52..56].copy_from_slice(&place.offset.to_le_bytes());
    out[56..].copy_from_slice(&place.len.to_le_bytes());
    out
}

fn decode(bytes: &[u8]) -> Option<Record> {
    let mut hash = [0; 32];
    hash.copy_from_slice(&bytes[..32]);
    let frame = Frame {
        offset: u64_at(bytes, 36),
        stored_len: u32_at(bytes, 44),
        plain_len: u32_at(bytes, 48) & 0x00ff_ffff,
        codec: Codec::from_byte(bytes[51])?,
    };
    let place =
        Location { pack: u32_at(bytes, 32), frame, offset: u32_at(bytes, 52), len: u32_at(bytes, 56) };
    Some((BlockHash::from_bytes(hash), place))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// A sorted part of the catalogue; see the module's first lines.
#[derive(Debug)]
pub(super) struct Segment {
    file: File,
    mask: Option<Mask>,
    path: PathBuf,
    packs: Vec<PackName>,
    bits: u32,
    starts: Vec<u32>,
    sums: Vec<[u8; 8]>,
    filter: Filter,
    records: u64,
}

impl Segment {
    /// Opens a segment and checks everything but its records.
    ///
    /// # Errors
    /// When it cannot be read or is damaged; it is of no use then.
    pub(super) fn open(path: &Path, key: Option<&CacheKey>) -> io::Result<Self> {
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        let mask = key.map(|key| Mask::new(key, name));
        let file = File::open(path)?;
        let file_len = file.metadata()?.len();
        let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let footer_at = file_len.checked_sub(FOOTER_BYTES as u64).ok_or_else(|| bad("too short"))?;
        let mut footer = [0; FOOTER_BYTES];
        file.read_exact_at(&mut footer, footer_at)?;
        let (packs, bits, lines) = (u32_at(&footer, 0), u32_at(&footer, 4), u32_at(&footer, 8));
        let records = u64_at(&footer, 16);
        if &footer[56..] != MAGIC || u32_at(&footer, 12) != version(mask.as_ref()) || bits > BUCKET_BITS_MAX {
            return Err(bad("no segment of this version"));
        }
        if u64::from(lines) > FILTER_LINES_MAX || records > RECORDS_MAX {
            return Err(bad("above a limit"));
        }
        let (names_len, table_len) = (packs as usize * PACK_NAME_BYTES, (BUCKET_BYTES << bits) + 4);
        let meta_len = names_len + table_len + lines as usize * FILTER_LINE_BYTES;
        let records_len = records * RECORD_BYTES as u64;
        if records_len + meta_len as u64 != footer_at {
            return Err(bad("its lengths do not fit the file"));
        }
        let mut meta = vec![0; meta_len];
        file.read_exact_at(&mut meta, records_len)?;
        let sum = blake3::Hasher::new().update(&meta).update(&footer[..24]).finalize();
        if sum.as_bytes()[..] != footer[24..56] {
            return Err(bad("its checksum differs"));
        }
        if let Some(mask) = &mask {
            mask.apply(records_len, &mut meta);
        }
        let (names, rest) = meta.split_at(names_len);
        let (table, filter) = rest.split_at(table_len);
        let mut starts: Vec<u32> = table.chunks_exact(BUCKET_BYTES).map(|bucket| u32_at(bucket, 0)).collect();
        starts.push(u32_at(table, table_len - 4));
        let sums =
            table.chunks_exact(BUCKET_BYTES).map(|bucket| std::array::from_fn(|at| bucket[4 + at])).collect();
        let packs = names
            .chunks_exact(PACK_NAME_BYTES)
            .map(|name| PackName::from_bytes(std::array::from_fn(|at| name[at])))
            .collect();
        let filter = Filter { bytes: filter.to_vec() };
        Ok(Self { file, mask, path: path.to_owned(), packs, bits, starts, sums, filter, records })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn packs(&self) -> &[PackName] {
        &self.packs
    }

    pub(super) fn len(&self) -> u64 {
        self.records
    }

    /// Gives `take` every place of the block. `proof`: an answer of "nowhere" is checked against the bucket's sum.
    ///
    /// # Errors
    /// When the file cannot be read, or is damaged where the answer stands.
    pub(super) fn find(
        &self,
        hash: &BlockHash,
        proof: bool,
        mut take: impl FnMut(Location),
    ) -> io::Result<()> {
        if !self.filter.may_have(hash) {
            return Ok(());
        }
        let bucket = bucket_of(hash, self.bits);
        let (start, end) = (self.starts[bucket], self.starts[bucket + 1]);
        let mut bytes = vec![0; end.saturating_sub(start) as usize * RECORD_BYTES];
        self.file.read_exact_at(&mut bytes, u64::from(start) * RECORD_BYTES as u64)?;
        if proof && sum_of(&bytes) != self.sums[bucket] {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a bucket's checksum differs"));
        }
        self.show(u64::from(start), &mut bytes);
        for record in bytes.chunks_exact(RECORD_BYTES) {
            if record[..32] == hash.as_bytes()[..]
                && let Some((_, place)) = decode(record)
                && (place.pack as usize) < self.packs.len()
            {
                take(place);
            }
        }
        Ok(())
    }

    /// Gives `take` every place of each of `hashes`, which ascend, with the number of the hash. Neighbours share a
    /// read, so a question for most of the store reads it once from front to back.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(super) fn find_sorted(
        &self,
        hashes: &[BlockHash],
        mut take: impl FnMut(usize, Location),
    ) -> io::Result<()> {
        let buckets = self.sums.len();
        // Whoever asks for about every bucket reads many at once.
        let at_once = if hashes.len() * 4 >= buckets { BUCKETS_AT_ONCE } else { 1 };
        let (mut first, mut loaded) = (0, 0);
        let mut bytes = Vec::new();
        for (number, hash) in hashes.iter().enumerate() {
            if !self.filter.may_have(hash) {
                continue;
            }
            let bucket = bucket_of(hash, self.bits);
            if !(first..first + loaded).contains(&bucket) {
                (first, loaded) = (bucket, at_once.min(buckets - bucket));
                let (start, end) = (self.starts[first], self.starts[first + loaded]);
                bytes.resize(end.saturating_sub(start) as usize * RECORD_BYTES, 0);
                self.file.read_exact_at(&mut bytes, u64::from(start) * RECORD_BYTES as u64)?;
                self.show(u64::from(start), &mut bytes);
            }
            let at = |bucket: usize| {
                self.starts[bucket].saturating_sub(self.starts[first]) as usize * RECORD_BYTES
            };
            let records = bytes.get(at(bucket)..at(bucket + 1)).unwrap_or_default();
            for record in records.chunks_exact(RECORD_BYTES) {
                if record[..32] == hash.as_bytes()[..]
                    && let Some((_, place)) = decode(record)
                    && (place.pack as usize) < self.packs.len()
                {
                    take(number, place);
                }
            }
        }
        Ok(())
    }

    /// Makes records readable that begin with this number.
    fn show(&self, first: u64, records: &mut [u8]) {
        if let Some(mask) = &self.mask {
            mask.apply(first * RECORD_BYTES as u64, records);
        }
    }

    /// Every record, in order, a few at a time.
    pub(super) fn records(&self) -> Records<'_> {
        Records { segment: self, next: 0, buffer: Vec::new().into_iter() }
    }
}

const fn version(mask: Option<&Mask>) -> u32 {
    if mask.is_some() { VERSION_MASKED } else { VERSION }
}

fn sum_of(bytes: &[u8]) -> [u8; 8] {
    let sum = blake3::hash(bytes);
    std::array::from_fn(|at| sum.as_bytes()[at])
}

/// See [`Segment::records`].
#[derive(Debug)]
pub(super) struct Records<'a> {
    segment: &'a Segment,
    next: u64,
    buffer: std::vec::IntoIter<Record>,
}

impl Records<'_> {
    fn fill(&mut self) -> io::Result<()> {
        let count = (self.segment.records - self.next).min(MERGE_RECORDS as u64) as usize;
        let mut bytes = vec![0; count * RECORD_BYTES];
        self.segment.file.read_exact_at(&mut bytes, self.next * RECORD_BYTES as u64)?;
        self.segment.show(self.next, &mut bytes);
        self.next += count as u64;
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "a record is damaged");
        let records: Option<Vec<Record>> = bytes
            .chunks_exact(RECORD_BYTES)
            .map(|bytes| decode(bytes).filter(|(_, at)| (at.pack as usize) < self.segment.packs.len()))
            .collect();
        self.buffer = records.ok_or_else(bad)?.into_iter();
        Ok(())
    }
}

impl Iterator for Records<'_> {
    type Item = io::Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.buffer.len() == 0 {
            if self.next >= self.segment.records {
                return None;
            }
            if let Err(error) = self.fill() {
                self.next = self.segment.records;
                return Some(Err(error));
            }
        }
        self.buffer.next().map(Ok)
    }
}

/// Writes a segment; records come in ascending order of their hashes.
#[derive(Debug)]
pub(super) struct SegmentWriter {
    out: BufWriter<File>,
    mask: Option<Mask>,
    bits: u32,
    starts: Vec<u32>,
    sums: Vec<[u8; 8]>,
    bucket: Vec<u8>,
    filter: Filter,
    records: u64,
}

impl SegmentWriter {
    /// Begins a segment of at most `records_max` records in `file`.
    pub(super) fn new(file: File, records_max: u64, mask: Option<Mask>) -> Self {
        Self {
            out: BufWriter::with_capacity(256 * 1024, file),
            mask,
            bits: bucket_bits(records_max),
            starts: vec![0],
            sums: Vec::new(),
            bucket: Vec::new(),
            filter: Filter::for_records(records_max),
            records: 0,
        }
    }

    /// # Errors
    /// When it cannot be written, or the order is wrong.
    pub(super) fn push(&mut self, record: &Record) -> io::Result<()> {
        let bucket = bucket_of(&record.0, self.bits);
        if bucket < self.sums.len() || self.records >= RECORDS_MAX {
            return Err(io::Error::other("records out of order, or too many"));
        }
        self.close_buckets(bucket);
        let mut bytes = encode(record);
        if let Some(mask) = &self.mask {
            mask.apply(self.records * RECORD_BYTES as u64, &mut bytes);
        }
        self.filter.add(&record.0);
        self.bucket.extend_from_slice(&bytes);
        self.records += 1;
        self.out.write_all(&bytes)
    }

    /// Ends the buckets before `until`.
    fn close_buckets(&mut self, until: usize) {
        while self.sums.len() < until {
            self.sums.push(sum_of(&self.bucket));
            self.bucket.clear();
            self.starts.push(self.records as u32);
        }
    }

    /// Writes the rest. It is not flushed to the disk: a segment that a power cut spoils is made again.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn finish(mut self, packs: &[PackName]) -> io::Result<()> {
        self.close_buckets(1 << self.bits);
        let mut meta = Vec::new();
        for name in packs {
            meta.extend_from_slice(name.as_bytes());
        }
        for (start, sum) in self.starts.iter().zip(&self.sums) {
            meta.extend_from_slice(&start.to_le_bytes());
            meta.extend_from_slice(sum);
        }
        meta.extend_from_slice(&(self.records as u32).to_le_bytes());
        meta.extend_from_slice(&self.filter.bytes);
        if let Some(mask) = &self.mask {
            mask.apply(self.records * RECORD_BYTES as u64, &mut meta);
        }
        let mut footer = Vec::with_capacity(FOOTER_BYTES);
        for number in [packs.len() as u32, self.bits, self.filter.lines() as u32, version(self.mask.as_ref())]
        {
            footer.extend_from_slice(&number.to_le_bytes());
        }
        footer.extend_from_slice(&self.records.to_le_bytes());
        let sum = blake3::Hasher::new().update(&meta).update(&footer).finalize();
        footer.extend_from_slice(sum.as_bytes());
        footer.extend_from_slice(MAGIC);
        self.out.write_all(&meta)?;
        self.out.write_all(&footer)?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    fn record(number: u32) -> Record {
        let hash = BlockHash::of(&number.to_le_bytes());
        let frame =
            Frame { offset: u64::from(number) << 7, stored_len: 9, plain_len: 8 << 20, codec: Codec::Zstd };
        (hash, Location { pack: number % 3, frame, offset: number, len: 7 })
    }

    fn written(dir: &Path, count: u32) -> Segment {
        let path = dir.join("segment");
        let mut records: Vec<Record> = (0..count).map(record).collect();
        records.sort_unstable_by_key(|record| record.0);
        let mut writer = SegmentWriter::new(File::create(&path).unwrap(), u64::from(count), None);
        for record in &records {
            writer.push(record).unwrap();
        }
        writer.finish(&[0_u8, 1, 2].map(|n| PackName::from_bytes([n; 16]))).unwrap();
        let segment = Segment::open(&path, None).unwrap();
        let read: Vec<Record> = segment.records().map(Result::unwrap).collect();
        assert_eq!(read, records);
        segment
    }

    fn found(segment: &Segment, hash: &BlockHash) -> io::Result<Vec<Location>> {
        let mut places = Vec::new();
        segment.find(hash, true, |place| places.push(place))?;
        Ok(places)
    }

    #[test]
    fn every_record_is_found_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        for count in [0, 1, 31, 32, 5000] {
            let segment = written(dir.path(), count);
            for number in 0..count {
                let (hash, place) = record(number);
                assert_eq!(found(&segment, &hash).unwrap(), [place], "{number} of {count}");
            }
            let let_through = (count..count + 2000)
                .filter(|number| {
                    let hash = record(*number).0;
                    assert_eq!(found(&segment, &hash).unwrap(), []);
                    segment.filter.may_have(&hash)
                })
                .count();
            assert!(let_through < 80, "the filter lets {let_through} of 2000 through");
        }
    }

    #[test]
    fn every_damage_is_noticed_before_something_is_said_to_be_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let segment = written(dir.path(), 500);
        let path = segment.path().to_owned();
        let len = std::fs::metadata(&path).unwrap().len();
        for at in (0..len).step_by(97) {
            let mut byte = [0];
            segment.file.read_exact_at(&mut byte, at).unwrap();
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
            if let Ok(opened) = Segment::open(&path, None) {
                for number in 0..500 {
                    let (hash, place) = record(number);
                    assert!(found(&opened, &hash).is_err() || found(&opened, &hash).unwrap() == [place]);
                }
            }
            file.write_all_at(&byte, at).unwrap();
        }
        for cut in [0, 10, 64, len - 1] {
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(cut).unwrap();
            assert!(Segment::open(&path, None).is_err());
        }
    }
}
