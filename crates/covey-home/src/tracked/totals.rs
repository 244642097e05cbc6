//! How many files the new state has, and how many bytes: those of the base, with what came, without what went.

use covey_types::BlockHash;

use super::TrackedError;
use super::lower::Lower;
use super::merge::Merged;
use crate::manifest::{Entry, EntryBody, MalformedObject, Root};
use crate::object::ObjectError;
use crate::path::join;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) files: u64,
    pub(super) bytes: u64,
}

impl Totals {
    fn add(&mut self, entry: &Entry) {
        if let EntryBody::File(content) = &entry.body {
            self.files += 1;
            self.bytes += content.size();
        }
    }
}

pub(super) fn sum(lower: &Lower<'_>, base: &Root, merged: &Merged) -> Result<Totals, TrackedError> {
    let mut gone = Totals { files: 0, bytes: merged.bytes_replaced };
    for (path, entry) in &merged.hidden {
        // A directory that is seen elsewhere took what is in it along.
        if merged.places.contains_key(path) {
            continue;
        }
        gone.add(entry);
        if let EntryBody::Directory { listing } = &entry.body {
            below(lower, path.clone(), *listing, merged, &mut gone)?;
        }
    }
    let left = |base: u64, added: u64, gone: u64| (base + added).checked_sub(gone);
    match (left(base.files, merged.files_added, gone.files), left(base.bytes, merged.bytes_added, gone.bytes))
    {
        (Some(files), Some(bytes)) => Ok(Totals { files, bytes }),
        _ => {
            let problem = "it counts fewer files than it has";
            let error = MalformedObject { object: "root object", at: 0, problem };
            Err(lower.error(ObjectError::Malformed(error)))
        }
    }
}

/// Everything below a lower directory that went, but for directories that were taken out of it before.
fn below(
    lower: &Lower<'_>,
    path: Vec<u8>,
    listing: BlockHash,
    merged: &Merged,
    gone: &mut Totals,
) -> Result<(), TrackedError> {
    let mut dirs = vec![(path, listing)];
    while let Some((path, listing)) = dirs.pop() {
        for (name, entry) in &lower.listing(&listing)?.entries {
            gone.add(entry);
            if let EntryBody::Directory { listing } = &entry.body {
                let path = join(&path, name);
                if !merged.places.contains_key(&path) {
                    dirs.push((path, *listing));
                }
            }
        }
    }
    Ok(())
}
