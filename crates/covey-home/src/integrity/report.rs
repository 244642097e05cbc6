//! What a look at a store found, and what mending it did. The field names are those of `--json`.

use covey_types::{BlockHash, Generation};
use serde::Serialize;

/// Lost blocks that a report names; the count goes on.
pub const LOST_NAMED_MAX: usize = 1000;
/// Other problems that a report names; the count goes on.
const PROBLEMS_NAMED_MAX: usize = 1000;

/// What became of a block that a kept state needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LostState {
    /// No pack has it.
    Missing,
    /// Every copy of it has other bytes than were put there.
    Damaged,
}

impl LostState {
    /// For people.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Damaged => "damaged",
        }
    }
}

/// A place that needs a block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Need {
    /// The home.
    pub home: String,
    /// The snapshot.
    pub generation: Generation,
    /// From the home's root, lossily as text; a directory with a slash at its end stands for everything in it, the
    /// empty path for the whole home.
    pub path: String,
}

/// A block that a kept state needs and the store cannot give.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LostBlock {
    /// Its address.
    pub hash: BlockHash,
    /// Gone or wrong.
    pub state: LostState,
    /// How that shows.
    pub detail: String,
    /// Places that need it.
    pub needed_count: u64,
    /// The first of them.
    pub needed_by: Vec<Need>,
}

/// What a look at a store found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct StoreReport {
    /// Nothing is wrong as far as was looked.
    pub ok: bool,
    /// Where the store is.
    pub place: String,
    /// Packs there are.
    pub packs: u64,
    /// Those that were read whole, by this run.
    pub packs_checked: u64,
    /// Those that an earlier run with the same record has read whole.
    pub packs_resumed: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Blocks whose hash was checked.
    pub blocks: u64,
    /// Homes with a state.
    pub homes: u64,
    /// States that were walked.
    pub roots: u64,
    /// Names in their directories; a directory that states share counts once.
    pub entries: u64,
    /// Copies of blocks that are not what was put there, also where another copy is right or nobody needs it.
    pub damaged_copies: u64,
    /// Blocks that are needed and cannot be had.
    pub lost_count: u64,
    /// The first of them.
    pub lost: Vec<LostBlock>,
    /// Everything else that is not as it was written.
    pub problem_count: u64,
    /// The first of that, one line each.
    pub problems: Vec<String>,
    /// Duration in milliseconds.
    pub elapsed_ms: u64,
}

impl StoreReport {
    pub(super) fn problem(&mut self, line: String) {
        self.problem_count += 1;
        if self.problems.len() < PROBLEMS_NAMED_MAX {
            self.problems.push(line);
        }
    }

    pub(super) const fn judge(&mut self) {
        self.ok = self.problem_count == 0 && self.lost_count == 0 && self.damaged_copies == 0;
    }
}

/// What mending a store did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RepairReport {
    /// Nothing that is needed is lost any more, and nothing is wrong that could be mended.
    pub ok: bool,
    /// What was found at the beginning.
    pub found: StoreReport,
    /// Blocks that were written anew, from a copy in the same store.
    pub mended_here: u64,
    /// From other stores.
    pub mended_from_stores: u64,
    /// From directories.
    pub mended_from_homes: u64,
    /// Their plain bytes.
    pub mended_bytes: u64,
    /// Packs that are known to be damaged now: uploads take nothing in them for stored, so whoever still has a
    /// block of theirs stores it again with its next secure.
    pub suspect_packs: u64,
    /// Those of them that nobody needs any more and the next garbage collection deletes.
    pub replaced_packs: u64,
    /// Packs that were noted as damaged and are right.
    pub cleared_packs: u64,
    /// Small files that were written anew, one line each.
    pub rewritten: Vec<String>,
    /// Blocks that are needed and still cannot be had.
    pub lost_count: u64,
    /// The first of them.
    pub lost: Vec<LostBlock>,
    /// What is still wrong, or was wrong with a source, one line each.
    pub problems: Vec<String>,
    /// Duration in milliseconds.
    pub elapsed_ms: u64,
}
