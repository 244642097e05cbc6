//! The new table of names that share an inode.

use std::collections::HashMap;

use super::index::ChangedInodes;
use super::merge::Merged;
use crate::manifest::{LinkGroup, LinkTable};
use crate::path::join;

/// Groups of the new state; some may have a single name.
pub(super) fn merge(base: &LinkTable, changed: &ChangedInodes, merged: &Merged) -> Vec<LinkGroup> {
    let mut by_inode: HashMap<u64, LinkGroup> = HashMap::new();
    for (inode, path) in &merged.linked {
        by_inode.entry(*inode).or_default().push(path.clone());
    }
    let untouched = base.groups.iter().enumerate().filter(|(number, _)| !changed.groups.contains(number));
    let untouched =
        untouched.map(|(_, group)| group.iter().filter_map(|path| locate(merged, path)).collect());
    by_inode.into_values().chain(untouched).collect()
}

/// Where a lower name that is no directory is seen now.
fn locate(merged: &Merged, path: &[u8]) -> Option<Vec<u8>> {
    let mut end = path.len();
    loop {
        if merged.hidden.contains_key(&path[..end]) {
            return None;
        }
        let Some(slash) = path[..end].iter().rposition(|byte| *byte == b'/') else {
            return Some(path.to_vec());
        };
        if let Some(place) = merged.places.get(&path[..slash]) {
            return Some(join(place, &path[slash + 1..]));
        }
        end = slash;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Blob, Entry, EntryBody, Meta, Time};

    #[test]
    fn a_name_follows_the_directories_above_it() {
        let meta = Meta { mode: 0, mtime: Time { seconds: 0, nanoseconds: 0 }, xattrs: Blob::empty() };
        let gone = Entry { meta, body: EntryBody::Fifo };
        let mut merged = Merged::default();
        for path in [&b"a"[..], b"a/b", b"x/gone"] {
            merged.hidden.insert(path.to_vec(), gone.clone());
        }
        merged.places.insert(b"a/b".to_vec(), b"c/d".to_vec());
        let found = |path: &[u8]| locate(&merged, path);
        assert_eq!(found(b"a/b/e/f").as_deref(), Some(&b"c/d/e/f"[..]));
        assert_eq!(found(b"a/z"), None, "its directory went");
        assert_eq!(found(b"x/gone"), None);
        assert_eq!(found(b"x/here").as_deref(), Some(&b"x/here"[..]));
        assert_eq!(found(b"top").as_deref(), Some(&b"top"[..]));
    }
}
