//! Where each block of an org lies: one compact table in memory over all packs.
//!
//! A block costs about 40 bytes here. Its key is a 64-bit fingerprint under a random key of this process, so
//! nobody can construct two blocks that share one; by accident it happens for one block in 10^13 of a store of
//! a million. A read checks the real hash and finds the right copy on disk if it does. What does not belong
//! here: any I/O.

use std::collections::hash_map::{Entry, RandomState};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};

use covey_types::BlockHash;

use super::pack::{Frame, PackIndex};

/// Where a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) pack: u32,
    pub(crate) frame: u32,
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

#[derive(Debug)]
struct Pack {
    name: String,
    frames: Vec<Frame>,
}

/// The fingerprint is random already; hashing it again would only cost time.
#[derive(Debug, Default)]
struct Unchanged(u64);

impl Hasher for Unchanged {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {}
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// See the module's first lines.
#[derive(Debug, Default)]
pub(crate) struct Catalogue {
    key: RandomState,
    packs: Vec<Pack>,
    names: HashSet<String>,
    blocks: HashMap<u64, Location, BuildHasherDefault<Unchanged>>,
    damaged: HashSet<BlockHash>,
    problems: Vec<String>,
    incomplete: Option<String>,
}

impl Catalogue {
    fn fingerprint(&self, hash: &BlockHash) -> u64 {
        self.key.hash_one(hash.as_bytes())
    }

    pub(crate) fn knows(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Adds a sealed pack. `problem`: its index was damaged and rebuilt, completely or not.
    pub(crate) fn add(&mut self, name: &str, index: &PackIndex, problem: Option<(String, bool)>) {
        if !self.names.insert(name.to_owned()) {
            return;
        }
        let pack = self.packs.len() as u32;
        self.packs.push(Pack { name: name.to_owned(), frames: index.frames.clone() });
        if let Some((detail, complete)) = problem {
            let outcome = if complete { "every block is still readable" } else { "blocks are lost" };
            let line = format!("pack {name}: {detail}; {outcome}");
            if !complete {
                self.incomplete = Some(line.clone());
            }
            self.problems.push(line);
        }
        self.blocks.reserve(index.blocks.len());
        for block in &index.blocks {
            let place = Location { pack, frame: block.frame, offset: block.offset, len: block.len };
            let fingerprint = self.fingerprint(&block.hash);
            match self.blocks.entry(fingerprint) {
                Entry::Vacant(entry) => {
                    entry.insert(place);
                }
                Entry::Occupied(mut entry) => {
                    // A second copy is only written where the first was found damaged.
                    if self.damaged.remove(&block.hash) {
                        entry.insert(place);
                    }
                }
            }
        }
    }

    pub(crate) fn find(&self, hash: &BlockHash) -> Option<Location> {
        self.blocks.get(&self.fingerprint(hash)).copied()
    }

    /// Whether the block is there and not known to be damaged.
    pub(crate) fn has(&self, hash: &BlockHash) -> bool {
        self.blocks.contains_key(&self.fingerprint(hash)) && !self.damaged.contains(hash)
    }

    pub(crate) fn replace(&mut self, hash: &BlockHash, place: Location) {
        let fingerprint = self.fingerprint(hash);
        self.blocks.insert(fingerprint, place);
    }

    /// Remembers that the block must be uploaded again.
    pub(crate) fn mark_damaged(&mut self, hash: BlockHash) {
        self.damaged.insert(hash);
    }

    pub(crate) fn pack_count(&self) -> u32 {
        self.packs.len() as u32
    }

    pub(crate) fn name(&self, pack: u32) -> &str {
        &self.packs[pack as usize].name
    }

    pub(crate) fn frame(&self, place: &Location) -> Frame {
        self.packs[place.pack as usize].frames[place.frame as usize]
    }

    pub(crate) fn problems(&self) -> &[String] {
        &self.problems
    }

    /// A pack that may hold more blocks than could be found in it.
    pub(crate) fn incomplete(&self) -> Option<&str> {
        self.incomplete.as_deref()
    }
}
