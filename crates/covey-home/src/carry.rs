//! Carrying states from one store to another: every block that they name and the other does not have. What a backup
//! and its restore are made of.
//!
//! What stays true: when this returns, the other store has the states whole and durable, each block checked by its
//! hash; what is there is not read again, so a second time costs what changed; memory is that of a walk. What does
//! not belong here: pointers, which the caller moves afterwards.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use covey_types::{BlockHash, Fault, RootHash};

use crate::block::{BlockStore as _, StoreError, UploadReport};
use crate::integrity::Walk;
use crate::pack_store::PackStore;
use crate::progress::Progress;

/// Why states were not carried over; the other store may have gained blocks that nobody names.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// The caller's flag.
    #[error("cancelled")]
    Cancelled,
    /// The states are not whole where they come from.
    #[error(
        "block {hash} cannot be carried over: {detail}; repair the store, or let go of the states that need it"
    )]
    Lost {
        /// The first such block.
        hash: BlockHash,
        /// How that shows.
        detail: String,
    },
    /// One of the stores.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl CarryError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Cancelled => Fault::Retry,
            Self::Lost { .. } => Fault::Corrupt,
            Self::Store(error) => error.fault(),
        }
    }
}

/// Makes `to` have everything that `roots` name. Progress counts blocks as files.
///
/// # Errors
/// [`CarryError`]; nothing may then rely on the states being there.
pub fn carry_states(
    from: &PackStore,
    to: &PackStore,
    roots: &[RootHash],
    cancel: &AtomicBool,
    progress: &dyn Progress,
) -> Result<UploadReport, CarryError> {
    let upload = to.upload()?;
    let go_on = || !cancel.load(Ordering::Relaxed);
    let carry = |hashes: &[BlockHash]| -> Result<Vec<BlockHash>, StoreError> {
        for hash in to.missing(hashes)? {
            if !go_on() {
                break;
            }
            let bytes = from.get(&hash)?;
            upload.put(&upload.hasher().block(&bytes)?)?;
            progress.files_done(1);
            progress.bytes_done(bytes.len() as u64);
        }
        Ok(Vec::new())
    };
    let nothing = BTreeMap::new();
    let mut walk = Walk::new(from, &carry, &nothing, &go_on);
    let lost = |error| match error {
        StoreError::Absent { hash } => CarryError::Lost { hash, detail: "no pack has it".to_owned() },
        error => error.into(),
    };
    for root in roots {
        if !walk.root(root).map_err(lost)? {
            return Err(CarryError::Cancelled);
        }
    }
    walk.end().map_err(lost)?;
    if !go_on() {
        return Err(CarryError::Cancelled);
    }
    if let Some((hash, (_, detail))) = walk.lost.pop_first() {
        return Err(CarryError::Lost { hash, detail });
    }
    drop(walk);
    Ok(upload.finish()?)
}
