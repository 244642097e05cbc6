//! The names of a snapshot in their order, from any name on.

use std::ops::ControlFlow;

use super::{Snapshot, ViewError, components};
use crate::manifest::{Entry, EntryBody};

/// What a walk visits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WalkOptions<'a> {
    /// Begin behind this path, from the home's root; none: at the beginning.
    pub after: Option<&'a [u8]>,
    /// Directories below as well.
    pub recursive: bool,
}

/// Whether `path` comes behind `other` in the order of a walk: a directory before what is in it, names by their
/// bytes. Both are paths from the home's root without slashes at the ends.
pub fn is_behind(path: &[u8], other: &[u8]) -> bool {
    match (path.is_empty(), other.is_empty()) {
        (true, _) => false,
        (false, true) => true,
        (false, false) => path.split(|byte| *byte == b'/').gt(other.split(|byte| *byte == b'/')),
    }
}

impl Snapshot<'_> {
    /// Calls `each` with path and entry for what is in the directory `path`, until it breaks. Memory is that of the
    /// listings from `path` down to the name that is visited.
    ///
    /// # Errors
    /// [`ViewError`].
    pub fn walk(
        &self,
        path: &[u8],
        options: &WalkOptions<'_>,
        each: &mut dyn FnMut(&[u8], &Entry) -> ControlFlow<()>,
    ) -> Result<(), ViewError> {
        let top = components(path)?.join(&b'/');
        let after = options.after.map(components).transpose()?;
        // What of it lies below `path`; a path beside it begins behind nothing or behind everything.
        let mut after: Option<&[&[u8]]> = after.as_deref();
        if let Some(names) = after {
            let depth = components(path)?.len();
            let (above, below) = names.split_at(depth.min(names.len()));
            match above.join(&b'/') {
                above if above == top && !below.is_empty() => after = Some(below),
                above if is_behind(&above, &top) => return Ok(()),
                _ => after = None,
            }
        }
        let mut dirs = vec![self.level(top, after)?];
        while let Some(level) = dirs.last_mut() {
            let Some((name, entry)) = level.entries.next() else {
                dirs.pop();
                continue;
            };
            let resumed = level.after.take_if(|(first, _)| *first == name.as_slice());
            level.after = None;
            let path = joined(&level.path, &name);
            if resumed.is_none() && each(&path, &entry).is_break() {
                return Ok(());
            }
            if options.recursive && matches!(entry.body, EntryBody::Directory { .. }) {
                let below = resumed.map(|(_, below)| below).filter(|below| !below.is_empty());
                dirs.push(self.level(path, below)?);
            }
        }
        Ok(())
    }

    fn level<'a>(&self, path: Vec<u8>, after: Option<&'a [&'a [u8]]>) -> Result<Level<'a>, ViewError> {
        let mut entries = self.list(&path)?;
        let after = after.and_then(|names| names.split_first());
        if let Some((first, _)) = &after {
            let begin = entries.partition_point(|(name, _)| name.as_slice() < **first);
            entries.drain(..begin);
        }
        Ok(Level { path, entries: entries.into_iter(), after: after.map(|(first, below)| (*first, below)) })
    }
}

/// A directory that is being walked.
struct Level<'a> {
    path: Vec<u8>,
    entries: std::vec::IntoIter<(Vec<u8>, Entry)>,
    /// The name in it that was visited last, and the names below that one.
    after: Option<(&'a [u8], &'a [&'a [u8]])>,
}

fn joined(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut joined = path.to_vec();
    if !joined.is_empty() {
        joined.push(b'/');
    }
    joined.extend_from_slice(name);
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_comes_before_what_is_in_it_and_that_before_the_next_name() {
        let order: [&[u8]; 6] = [b"", b"a", b"a/b", b"a/b/c", b"a-b", b"b"];
        for (at, path) in order.iter().enumerate() {
            for (other_at, other) in order.iter().enumerate() {
                assert_eq!(is_behind(path, other), at > other_at, "{path:?} {other:?}");
            }
        }
    }
}
