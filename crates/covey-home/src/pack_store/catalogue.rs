//! Where each block of an org lies, over all packs.
//!
//! What stays true: memory does not grow with the store. Blocks of the packs seen last stand in a table in
//! memory; when that is full, it is written to a sorted segment beside the store, and segments are merged so that
//! there are few. Without a directory for them (memory backends) the table grows. Which packs are alive is said by
//! the store's list alone; a segment may know packs that are gone. What does not belong here: reading packs.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::{self, Debug};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use covey_types::BlockHash;
use rustix::fs::FlockOperation;

use super::mask::Mask;
use super::pack::{Frame, PackIndex};
use super::segment::{Record, Segment, SegmentWriter};
use crate::keys::CacheKey;
use crate::name::{InvalidName, random_bytes, random_name};

/// Blocks in the table in memory at most, where there is a directory for segments: a table of 32,768 places, 2.4 MiB.
const RECENT_BLOCKS_MAX: usize = 28 * 1024;
/// A pack with so many blocks becomes a segment by itself.
const DIRECT_BLOCKS_MIN: usize = 16 * 1024;
/// Packs in the table at most on a local disk, because the next process reads the index of each of them.
const RECENT_PACKS_MAX: usize = 32;
/// Segments at most; one more, and the smaller half of them becomes one.
const SEGMENTS_MAX: usize = 8;
const SEGMENT_SUFFIX: &str = ".segment";
/// Lines about problems that are kept; more of them say nothing new.
const PROBLEMS_MAX: usize = 1000;
/// Blocks known to be damaged that are remembered; of a further one the damage is found out again.
const DAMAGED_MAX: usize = 1_000_000;

/// The name of a pack: 32 hexadecimal digits, chosen at random, so that a name never comes back after its pack
/// was deleted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackName([u8; 16]);

impl PackName {
    pub(crate) fn random() -> Self {
        Self(random_bytes())
    }

    pub(super) const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    pub(super) const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for PackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Debug for PackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PackName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let lower = text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let number = u128::from_str_radix(text, 16).ok().filter(|_| lower);
        number.map(|number| Self(number.to_be_bytes())).ok_or_else(|| InvalidName::of(text))
    }
}

/// Where a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) pack: u32,
    pub(crate) frame: Frame,
    /// In the frame's plain bytes.
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

/// A pack whose index was damaged and made anew.
#[derive(Debug)]
pub(crate) struct IndexProblem {
    pub(crate) detail: String,
    /// Whether every block of the pack was found.
    pub(crate) complete: bool,
}

#[derive(Debug)]
struct Pack {
    name: PackName,
    /// The store lists it.
    alive: bool,
    /// Garbage collection is going to delete it: new states must not need it.
    condemned: bool,
    /// Damage was found in it: new states must not need it either.
    suspect: bool,
}

#[derive(Debug)]
struct Mounted {
    segment: Segment,
    /// The catalogue's number of each of the segment's packs.
    numbers: Vec<u32>,
}

/// See the module's first lines.
#[derive(Debug, Default)]
pub(crate) struct Catalogue {
    dir: Option<PathBuf>,
    /// Segments of an encrypted store are encrypted, too.
    key: Option<CacheKey>,
    /// Never shrinks, so that numbers stay right.
    packs: Vec<Pack>,
    numbers: HashMap<PackName, u32>,
    recent: HashMap<BlockHash, Location>,
    /// Further copies of blocks in `recent`.
    recent_copies: Vec<Record>,
    recent_packs: Vec<u32>,
    segments: Vec<Mounted>,
    damaged: HashSet<BlockHash>,
    /// Of all, also of packs that are not known yet.
    condemned: BTreeSet<PackName>,
    /// The same of those in which damage was found.
    suspects: BTreeSet<PackName>,
    /// Those of them that nobody has written down yet.
    found_damaged: BTreeSet<PackName>,
    problems: Vec<String>,
    /// Packs whose index had to be made anew, and a line about each. They are never written to a segment, so that
    /// the next process finds the damage and names it, too.
    reindexed: HashMap<u32, String>,
    /// Those of them that may hold more blocks than were found.
    incomplete: HashSet<u32>,
}

impl Catalogue {
    /// Takes up the segments in `dir` that others have left; none: everything stays in memory.
    pub(crate) fn open(dir: Option<PathBuf>, key: Option<CacheKey>) -> Self {
        let mut catalogue = Self { dir, key, ..Self::default() };
        catalogue.take_up_segments();
        catalogue
    }

    /// A segment that cannot be read is as good as none: it is deleted, and its packs are read again.
    fn take_up_segments(&mut self) {
        let Some(entries) = self.dir.as_ref().and_then(|dir| fs::read_dir(dir).ok()) else { return };
        let mut found: Vec<Segment> = Vec::new();
        for entry in entries.flatten() {
            let path = entry.path();
            let is_segment = path.to_str().is_some_and(|path| path.ends_with(SEGMENT_SUFFIX));
            match is_segment.then(|| Segment::open(&path, self.key.as_ref())) {
                Some(Ok(segment)) => found.push(segment),
                Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => {}
                Some(Err(_)) => drop(fs::remove_file(&path)),
                None => sweep(&path),
            }
        }
        // The largest first: what two processes have both merged is taken up once.
        found.sort_by_key(|segment| std::cmp::Reverse(segment.packs().len()));
        for segment in found {
            if segment.packs().iter().all(|pack| self.numbers.contains_key(pack)) {
                drop(fs::remove_file(segment.path()));
            } else {
                self.mount(segment);
            }
        }
    }

    fn mount(&mut self, segment: Segment) {
        let numbers = segment.packs().iter().map(|name| self.number_of(*name)).collect();
        self.segments.push(Mounted { segment, numbers });
    }

    fn number_of(&mut self, name: PackName) -> u32 {
        match self.numbers.entry(name) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                let number = self.packs.len() as u32;
                let condemned = self.condemned.contains(&name);
                let suspect = self.suspects.contains(&name) || self.found_damaged.contains(&name);
                self.packs.push(Pack { name, alive: false, condemned, suspect });
                *entry.insert(number)
            }
        }
    }

    /// Takes the list for what is alive. Returns the packs whose index must be read, and those that were alive
    /// and are not in the list; these stay alive until [`Catalogue::bury`].
    pub(crate) fn compare(&mut self, listed: &[PackName]) -> (Vec<PackName>, Vec<PackName>) {
        let mut new = Vec::new();
        for name in listed {
            match self.numbers.get(name) {
                Some(number) => self.packs[*number as usize].alive = true,
                None => new.push(*name),
            }
        }
        let listed: HashSet<&PackName> = listed.iter().collect();
        let alive = self.packs.iter().filter(|pack| pack.alive && !listed.contains(&pack.name));
        (new, alive.map(|pack| pack.name).collect())
    }

    /// A pack is proven to be gone. Should it be listed again, it is new: a merge may have dropped what it held.
    pub(crate) fn bury(&mut self, name: &PackName) {
        if let Some(number) = self.numbers.remove(name) {
            self.packs[number as usize].alive = false;
            self.reindexed.remove(&number);
            self.incomplete.remove(&number);
            self.found_damaged.remove(name);
        }
    }

    /// Adds a sealed pack.
    pub(crate) fn add(&mut self, name: PackName, index: &PackIndex, problem: Option<IndexProblem>) {
        if self.numbers.contains_key(&name) {
            return;
        }
        let pack = self.number_of(name);
        self.packs[pack as usize].alive = true;
        if let Some(IndexProblem { detail, complete }) = problem {
            let outcome = if complete { "every block is still readable" } else { "blocks are lost" };
            let line = format!("pack {name}: {detail}; {outcome}");
            self.reindexed.insert(pack, line);
            if !complete {
                self.incomplete.insert(pack);
            }
            self.note_damaged(name);
        }
        if index.blocks.len() >= DIRECT_BLOCKS_MIN
            && !self.reindexed.contains_key(&pack)
            && self.add_directly(name, index)
        {
            return;
        }
        self.recent_packs.push(pack);
        for block in &index.blocks {
            let frame = index.frames[block.frame as usize];
            let place = Location { pack, frame, offset: block.offset, len: block.len };
            // A copy that comes later was put where the first was found damaged, or lies in a pack that replaces
            // another: it is asked first.
            if let Some(earlier) = self.recent.insert(block.hash, place) {
                self.recent_copies.push((block.hash, earlier));
            }
            self.damaged.remove(&block.hash);
        }
        if self.recent.len() + self.recent_copies.len() > RECENT_BLOCKS_MAX {
            self.spill();
        }
    }

    /// Makes a segment of a pack with so many blocks that they should not pass through the table. False: it could
    /// not be written.
    fn add_directly(&mut self, name: PackName, index: &PackIndex) -> bool {
        let Some(dir) = self.dir.clone() else { return false };
        let records = index.blocks.iter().map(|block| {
            let frame = index.frames[block.frame as usize];
            Ok((block.hash, Location { pack: 0, frame, offset: block.offset, len: block.len }))
        });
        let count = index.blocks.len() as u64;
        match write_segment(&dir, self.key.as_ref(), count, &[name], records) {
            Ok(segment) => {
                for block in &index.blocks {
                    self.damaged.remove(&block.hash);
                }
                self.mount(segment);
                self.merge_if_many();
                true
            }
            Err(error) => {
                self.problem(format!("{} cannot be written: {error}", dir.display()));
                false
            }
        }
    }

    fn merge_if_many(&mut self) {
        if self.segments.len() > SEGMENTS_MAX {
            self.merge();
        }
    }

    /// Writes the table to a segment if it holds more packs than the next process should have to read, and drops
    /// segments of which nothing lives.
    pub(crate) fn settle(&mut self, is_remote: bool) {
        let packs = &self.packs;
        self.segments.retain(|mounted| {
            let lives = mounted.numbers.iter().any(|number| packs[*number as usize].alive);
            if !lives {
                drop(fs::remove_file(mounted.segment.path()));
            }
            lives
        });
        let packs_max = if is_remote { 0 } else { RECENT_PACKS_MAX };
        if self.recent_packs.len() > packs_max {
            self.spill();
        }
    }

    /// Turns the table into a segment. Where that fails, it stays in memory: the catalogue is a cache, and a full
    /// disk must not keep anybody from reading.
    fn spill(&mut self) {
        let Some(dir) = self.dir.clone() else { return };
        let mut local = HashMap::new();
        let mut names = Vec::new();
        for pack in self.recent_packs.iter().filter(|pack| !self.reindexed.contains_key(*pack)) {
            local.insert(*pack, names.len() as u32);
            names.push(self.packs[*pack as usize].name);
        }
        if names.is_empty() {
            return;
        }
        let all =
            self.recent.iter().map(|(hash, place)| (*hash, *place)).chain(self.recent_copies.iter().copied());
        let mut records: Vec<Record> = all
            .filter_map(|(hash, place)| Some((hash, Location { pack: *local.get(&place.pack)?, ..place })))
            .collect();
        records.sort_unstable_by_key(|(hash, place)| (*hash, place.pack));
        let count = records.len() as u64;
        match write_segment(&dir, self.key.as_ref(), count, &names, records.into_iter().map(Ok)) {
            Ok(segment) => {
                self.mount(segment);
                self.forget_recent(|pack| local.contains_key(&pack));
            }
            Err(error) => self.problem(format!("{} cannot be written: {error}", dir.display())),
        }
        self.merge_if_many();
    }

    fn forget_recent(&mut self, written: impl Fn(u32) -> bool) {
        self.recent_packs.retain(|pack| !written(*pack));
        let kept =
            std::mem::take(&mut self.recent_copies).into_iter().filter(|(_, place)| !written(place.pack));
        let kept: Vec<Record> = kept.collect();
        // Made anew, so that it gives its memory back.
        let all = std::mem::take(&mut self.recent);
        self.recent = all.into_iter().filter(|(_, place)| !written(place.pack)).collect();
        for (hash, place) in kept {
            if let Some(earlier) = self.recent.insert(hash, place) {
                self.recent_copies.push((hash, earlier));
            }
        }
    }

    /// Makes one segment of the smaller half of them, without the packs that are gone.
    fn merge(&mut self) {
        let Some(dir) = self.dir.clone() else { return };
        self.segments.sort_by_key(|mounted| std::cmp::Reverse(mounted.segment.len()));
        let merged: Vec<Mounted> = self.segments.split_off(self.segments.len() / 2);
        match self.merged(&dir, &merged) {
            Ok(segment) => {
                self.mount(segment);
                for old in merged {
                    drop(fs::remove_file(old.segment.path()));
                }
            }
            Err(error) => {
                self.problem(format!("segments in {} cannot be merged: {error}", dir.display()));
                self.segments.extend(merged);
            }
        }
    }

    fn merged(&self, dir: &std::path::Path, sources: &[Mounted]) -> io::Result<Segment> {
        let mut local: HashMap<u32, u32> = HashMap::new();
        let mut names = Vec::new();
        for number in sources.iter().flat_map(|source| &source.numbers) {
            if self.packs[*number as usize].alive && !local.contains_key(number) {
                local.insert(*number, names.len() as u32);
                names.push(self.packs[*number as usize].name);
            }
        }
        let mut heads = Vec::new();
        for source in sources {
            let mut records = source.segment.records();
            heads.push((records.next().transpose()?, records, &source.numbers));
        }
        let mut last: Option<Record> = None;
        let next = || -> Option<io::Result<Record>> {
            loop {
                let least = heads
                    .iter_mut()
                    .filter(|(head, ..)| head.is_some())
                    .min_by_key(|(head, ..)| head.as_ref().map(|(hash, _)| *hash))?;
                let (hash, place) = least.0.take()?;
                match least.1.next().transpose() {
                    Ok(following) => least.0 = following,
                    Err(error) => return Some(Err(error)),
                }
                let Some(pack) = local.get(&least.2[place.pack as usize]) else { continue };
                let record = (hash, Location { pack: *pack, ..place });
                // Two segments may know the same pack.
                if last.replace(record) != Some(record) {
                    return Some(Ok(record));
                }
            }
        };
        let count = sources.iter().map(|source| source.segment.len()).sum();
        write_segment(dir, self.key.as_ref(), count, &names, std::iter::from_fn(next))
    }

    /// Every place of the block in packs that are alive, the newest first. `proof`: an empty answer is certain.
    ///
    /// # Errors
    /// When a segment cannot be read; [`Catalogue::distrust`] makes that good.
    pub(crate) fn copies(&self, hash: &BlockHash, proof: bool) -> io::Result<Vec<Location>> {
        let mut places: Vec<Location> = Vec::new();
        let mut take = |place: Location| {
            if self.packs[place.pack as usize].alive && !places.contains(&place) {
                places.push(place);
            }
        };
        if let Some(place) = self.recent.get(hash) {
            take(*place);
            self.recent_copies
                .iter()
                .rev()
                .filter(|(copy, _)| copy == hash)
                .for_each(|(_, place)| take(*place));
        }
        for mounted in self.segments.iter().rev() {
            mounted.segment.find(hash, proof, |place| {
                take(Location { pack: mounted.numbers[place.pack as usize], ..place })
            })?;
        }
        Ok(places)
    }

    /// Marks these packs, and no others, as condemned.
    pub(crate) fn condemn(&mut self, names: &BTreeSet<PackName>) {
        // One that is not known yet must stay unknown, or its index would never be read.
        self.packs.iter_mut().for_each(|pack| pack.condemned = names.contains(&pack.name));
        self.condemned = names.clone();
    }

    /// Takes these packs, and no others, for damaged; what was found damaged here is written down now.
    pub(crate) fn suspect(&mut self, names: BTreeSet<PackName>) {
        // What a reader has found since the caller looked stays.
        self.found_damaged.retain(|pack| !names.contains(pack));
        let found = &self.found_damaged;
        let is_suspect = |name: &PackName| names.contains(name) || found.contains(name);
        self.packs.iter_mut().for_each(|pack| pack.suspect = is_suspect(&pack.name));
        self.suspects = names;
    }

    /// Damage was found in the pack.
    pub(crate) fn note_damaged(&mut self, name: PackName) {
        if let Some(number) = self.numbers.get(&name)
            && !self.suspects.contains(&name)
        {
            self.packs[*number as usize].suspect = true;
            self.found_damaged.insert(name);
        }
    }

    /// Packs in which damage was found here and that nobody has written down yet.
    pub(crate) const fn found_damaged(&self) -> &BTreeSet<PackName> {
        &self.found_damaged
    }

    /// Living packs whose index had to be made anew.
    pub(crate) fn reindexed(&self) -> Vec<PackName> {
        let alive = self.reindexed.keys().map(|number| &self.packs[*number as usize]);
        alive.filter(|pack| pack.alive).map(|pack| pack.name).collect()
    }

    /// Whether a new state may rely on what the pack holds.
    fn is_trusted(&self, pack: u32) -> bool {
        let pack = &self.packs[pack as usize];
        pack.alive && !pack.condemned && !pack.suspect
    }

    /// Whether the block is there to stay: in a pack that is not condemned nor suspect, and not known to be damaged. A segment
    /// that cannot be read counts as empty: storing a block twice harms nobody.
    pub(crate) fn has(&self, hash: &BlockHash) -> bool {
        if self.damaged.contains(hash) {
            return false;
        }
        let recent = self.recent.get(hash).is_some_and(|place| {
            self.is_trusted(place.pack)
                || self.recent_copies.iter().any(|(copy, place)| copy == hash && self.is_trusted(place.pack))
        });
        recent
            || self.segments.iter().any(|mounted| {
                let mut found = false;
                let read = mounted.segment.find(hash, false, |place| {
                    found |= self.is_trusted(mounted.numbers[place.pack as usize]);
                });
                read.is_ok() && found
            })
    }

    /// Those of `hashes` of which [`Catalogue::has`] says no, ascending; many at once cost little more than a few.
    pub(crate) fn lacking(&self, hashes: &[BlockHash]) -> Vec<BlockHash> {
        let is_recent = |hash: &BlockHash| {
            self.recent.get(hash).is_some_and(|place| {
                self.is_trusted(place.pack)
                    || self
                        .recent_copies
                        .iter()
                        .any(|(copy, place)| copy == hash && self.is_trusted(place.pack))
            })
        };
        let (damaged, rest): (Vec<BlockHash>, Vec<BlockHash>) =
            hashes.iter().partition(|hash| self.damaged.contains(*hash));
        let mut open: Vec<BlockHash> = rest.into_iter().filter(|hash| !is_recent(hash)).collect();
        open.sort_unstable();
        for mounted in &self.segments {
            let mut found = vec![false; open.len()];
            let read = mounted.segment.find_sorted(&open, |number, place| {
                found[number] |= self.is_trusted(mounted.numbers[place.pack as usize]);
            });
            if read.is_ok() {
                let mut found = found.into_iter();
                open.retain(|_| found.next() == Some(false));
            }
        }
        open.extend(damaged);
        open.sort_unstable();
        open
    }

    /// Throws all segments away, because one of them is damaged; their packs are new at the next compare.
    pub(crate) fn distrust(&mut self) {
        for mounted in std::mem::take(&mut self.segments) {
            drop(fs::remove_file(mounted.segment.path()));
        }
        let known: HashSet<u32> = self.recent_packs.iter().copied().collect();
        self.numbers.retain(|_, number| known.contains(number));
        for (number, pack) in self.packs.iter_mut().enumerate() {
            pack.alive &= known.contains(&(number as u32));
        }
    }

    /// Forgets where everything lies, because packs were exchanged; all of them are new at the next compare.
    pub(crate) fn forget_all(&mut self) {
        self.recent.clear();
        self.recent_copies.clear();
        self.recent_packs.clear();
        self.reindexed.clear();
        self.incomplete.clear();
        self.distrust();
    }

    /// Whether damage is known of the pack.
    pub(crate) fn is_suspect(&self, pack: u32) -> bool {
        self.packs[pack as usize].suspect
    }

    /// Remembers that the block must be uploaded again.
    pub(crate) fn mark_damaged(&mut self, hash: BlockHash) {
        if self.damaged.len() < DAMAGED_MAX {
            self.damaged.insert(hash);
        }
    }

    /// Whether the block was found damaged.
    pub(crate) fn is_marked_damaged(&self, hash: &BlockHash) -> bool {
        !self.damaged.is_empty() && self.damaged.contains(hash)
    }

    /// The block was read and is right: somebody has mended its pack.
    pub(crate) fn unmark_damaged(&mut self, hash: &BlockHash) {
        self.damaged.remove(hash);
    }

    pub(crate) fn name(&self, pack: u32) -> PackName {
        self.packs[pack as usize].name
    }

    pub(crate) fn problems(&self) -> Vec<String> {
        self.problems.iter().chain(self.reindexed.values()).cloned().collect()
    }

    pub(crate) fn problem(&mut self, line: String) {
        if self.problems.len() < PROBLEMS_MAX && !self.problems.contains(&line) {
            self.problems.push(line);
        }
    }

    /// A living pack that may hold more blocks than could be found in it.
    pub(crate) fn incomplete(&self) -> Option<&str> {
        self.incomplete.iter().find_map(|pack| self.reindexed.get(pack)).map(String::as_str)
    }
}

fn write_segment(
    dir: &std::path::Path,
    key: Option<&CacheKey>,
    records_max: u64,
    packs: &[PackName],
    records: impl Iterator<Item = io::Result<Record>>,
) -> io::Result<Segment> {
    fs::create_dir_all(dir)?;
    let name = random_name();
    let unfinished = dir.join(format!("{name}.tmp"));
    let path = dir.join(format!("{name}{SEGMENT_SUFFIX}"));
    let file = OpenOptions::new().write(true).create_new(true).open(&unfinished)?;
    // Tells an opener that the file has a writer.
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    let lock = file.try_clone()?;
    let mut writer = SegmentWriter::new(file, records_max, key.map(|key| Mask::new(key, &name)));
    let write = || -> io::Result<()> {
        for record in records {
            writer.push(&record?)?;
        }
        writer.finish(packs)?;
        fs::rename(&unfinished, &path)
    };
    if let Err(error) = write() {
        drop(fs::remove_file(&unfinished));
        return Err(error);
    }
    drop(lock);
    Segment::open(&path, key)
}

/// Removes what a process that died has left unfinished.
fn sweep(path: &std::path::Path) {
    if path.extension().is_some_and(|extension| extension == "tmp")
        && let Ok(file) = File::open(path)
        && rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
    {
        drop(fs::remove_file(path));
    }
}

#[cfg(test)]
mod tests {
    use super::super::pack::{BlockRecord, Codec};
    use super::*;

    fn index(blocks: std::ops::Range<u32>) -> PackIndex {
        let frame = Frame { offset: 16, stored_len: 1000, plain_len: 1000, codec: Codec::Raw };
        let mut blocks: Vec<BlockRecord> =
            blocks.map(|n| BlockRecord { hash: hash(n), frame: 0, offset: n, len: 1 }).collect();
        blocks.sort_unstable_by_key(|block| block.hash);
        PackIndex { thorough: false, frames: vec![frame], blocks }
    }

    fn hash(number: u32) -> BlockHash {
        BlockHash::of(&number.to_le_bytes())
    }

    fn name(number: u8) -> PackName {
        PackName::from_bytes([number; 16])
    }

    #[test]
    fn a_catalogue_is_the_same_in_memory_on_disk_and_after_a_merge() {
        let dir = tempfile::tempdir().unwrap();
        let mut memory = Catalogue::default();
        let mut disk = Catalogue::open(Some(dir.path().to_owned()), None);
        for pack in 0..40_u8 {
            // Overlapping, so that some blocks have several copies.
            let index = index(u32::from(pack) * 90..u32::from(pack) * 90 + 100);
            memory.add(name(pack), &index, None);
            disk.add(name(pack), &index, None);
            disk.settle(true);
        }
        assert!(disk.segments.len() <= SEGMENTS_MAX && disk.recent.is_empty());
        memory.bury(&name(7));
        disk.bury(&name(7));
        let mut reopened = Catalogue::open(Some(dir.path().to_owned()), None);
        let alive: Vec<PackName> = (0..40).filter(|n| *n != 7).map(name).collect();
        assert_eq!(reopened.compare(&alive), (vec![], vec![]));
        let places = |catalogue: &Catalogue, n| {
            let mut found: Vec<_> = catalogue
                .copies(&hash(n), true)
                .unwrap()
                .into_iter()
                .map(|place| (catalogue.name(place.pack), place.frame, place.offset, place.len))
                .collect();
            found.sort_unstable_by_key(|place| place.0);
            assert_eq!(catalogue.has(&hash(n)), !found.is_empty());
            found
        };
        for n in 0..4000 {
            assert_eq!(places(&disk, n), places(&memory, n), "{n}");
            assert_eq!(places(&reopened, n), places(&memory, n), "{n} reopened");
        }
    }

    #[test]
    fn a_damaged_segment_makes_its_packs_new_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut catalogue = Catalogue::open(Some(dir.path().to_owned()), None);
        catalogue.add(name(1), &index(0..500), None);
        catalogue.settle(true);
        let path = catalogue.segments[0].segment.path().to_owned();
        let mut bytes = fs::read(&path).unwrap();
        bytes[..30_000].fill(0);
        fs::write(&path, bytes).unwrap();
        assert!((0..500).any(|n| catalogue.copies(&hash(n), true).is_err()));
        catalogue.distrust();
        assert_eq!(catalogue.compare(&[name(1)]), (vec![name(1)], vec![]));
        catalogue.add(name(1), &index(0..500), None);
        assert!((0..500).all(|n| catalogue.has(&hash(n))));
    }

    #[test]
    fn a_pack_that_was_condemned_before_it_was_known_is_read_and_holds_nothing_for_uploads() {
        let mut catalogue = Catalogue::default();
        catalogue.condemn(&BTreeSet::from([name(1)]));
        assert_eq!(catalogue.compare(&[name(1)]), (vec![name(1)], vec![]));
        catalogue.add(name(1), &index(0..5), None);
        assert!(!catalogue.has(&hash(0)));
        assert_eq!(catalogue.copies(&hash(0), true).unwrap().len(), 1);
    }

    #[test]
    fn a_pack_that_is_not_listed_stays_until_it_is_proven_gone() {
        let mut catalogue = Catalogue::default();
        catalogue.add(name(1), &index(0..5), None);
        assert_eq!(catalogue.compare(&[]), (vec![], vec![name(1)]));
        assert!(catalogue.has(&hash(0)));
        catalogue.bury(&name(1));
        assert!(!catalogue.has(&hash(0)));
        assert_eq!(catalogue.compare(&[name(1)]), (vec![name(1)], vec![]), "what comes back is read again");
    }
}
