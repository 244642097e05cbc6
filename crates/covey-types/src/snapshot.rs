//! A published state of a home.

use serde::{Deserialize, Serialize};

use crate::{Generation, RootHash, StepId, Timestamp};

/// How still the home was when the snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// No process of the sandbox was alive.
    Quiesced,
    /// Processes lived but were frozen for the part that must be atomic (I12).
    Frozen,
}

impl SnapshotKind {
    /// Every kind, for tables and CHECK lists.
    pub const ALL: [Self; 2] = [Self::Quiesced, Self::Frozen];

    /// The one text form, as stored and sent.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Quiesced => "quiesced",
            Self::Frozen => "frozen",
        }
    }
}

/// A published manifest root of a home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Number within the home, from 1, without gaps.
    pub generation: Generation,
    /// The state itself.
    pub root: RootHash,
    /// How still the home was.
    pub kind: SnapshotKind,
    /// The last finished step whose files it contains; none before the first step or after an import.
    pub step: Option<StepId>,
    /// When it was published, by the server's clock.
    pub published_at: Timestamp,
}
