//! Whether a whole store is as it was written, what damage costs whom, and mending it.
//!
//! What stays true: looking changes nothing; what is said to be right was read and hashed, or the report says that
//! it was not looked at; a lost block is named with the homes and paths that need it; mending puts only bytes whose
//! hash is the block's and deletes nothing (I8). Memory is bounded by the directories of what is kept, not by its
//! files. What does not belong here: one root alone (`crate::verify`), and which snapshots are kept.

mod check;
mod names;
mod record;
mod repair;
mod report;
mod sieve;
mod walk;

use covey_types::{Generation, RootHash};

pub use check::{IntegrityError, StoreCheck, check_store};
pub use names::NEEDS_NAMED_MAX;
pub use repair::{RepairRequest, RepairSource, repair_store};
pub use report::{LOST_NAMED_MAX, LostBlock, LostState, Need, RepairReport, StoreReport};

use crate::block::StoreError;
pub(crate) use walk::Walk;

/// A published or kept state, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedRoot {
    /// The home, for people.
    pub home: String,
    /// Its number within the home.
    pub generation: Generation,
    /// The state.
    pub root: RootHash,
}

/// The states that a store is kept for, and what could not be told of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamedRoots {
    /// The states, in no order.
    pub roots: Vec<NamedRoot>,
    /// Pointers that are damaged, one line each.
    pub problems: Vec<String>,
}

/// Who knows which states a store is kept for.
pub trait RootNames {
    /// All of them. What is damaged is a line in [`NamedRoots::problems`] and no error.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when it cannot be told now.
    fn named_roots(&self) -> Result<NamedRoots, StoreError>;
}

impl RootNames for NamedRoots {
    fn named_roots(&self) -> Result<NamedRoots, StoreError> {
        Ok(self.clone())
    }
}
