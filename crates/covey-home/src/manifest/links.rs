//! Which names of a home share an inode. Kept once per home and not in the listings, so that a listing depends
//! on nothing outside its directory and a renamed directory keeps the objects below it.

use super::cursor::put_varint;
use super::entry::check_entry_name;
use super::{Cursor, MalformedObject, PATH_BYTES_MAX};

/// Paths of one inode, from the home's root, sorted, at least two.
pub type LinkGroup = Vec<Vec<u8>>;

/// All groups of a home, sorted by their first path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkTable {
    /// No path stands in two groups.
    pub groups: Vec<LinkGroup>,
}

impl LinkTable {
    /// Sorts groups and paths and drops groups of a single path.
    pub fn new(groups: impl IntoIterator<Item = LinkGroup>) -> Self {
        let mut groups: Vec<LinkGroup> = groups
            .into_iter()
            .filter(|group| group.len() > 1)
            .map(|mut group| {
                group.sort_unstable();
                group
            })
            .collect();
        groups.sort_unstable();
        Self { groups }
    }

    /// The table's bytes; none for the empty table.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for group in &self.groups {
            put_varint(&mut out, group.len() as u64);
            for path in group {
                put_varint(&mut out, path.len() as u64);
                out.extend_from_slice(path);
            }
        }
        out
    }

    /// Reads the table's bytes.
    ///
    /// # Errors
    /// When anything is not sorted, a group is no group, or a path could leave the home.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedObject> {
        let mut cursor = Cursor::new(bytes, "link table");
        let mut groups: Vec<LinkGroup> = Vec::new();
        while !cursor.is_at_end() {
            let count = cursor.length(bytes.len(), "more paths than bytes for them")?;
            let mut group: LinkGroup = Vec::new();
            for _ in 0..count {
                let len = cursor.length(PATH_BYTES_MAX, "a path that is too long")?;
                let path = cursor.take(len)?;
                for component in path.split(|byte| *byte == b'/') {
                    check_entry_name(component, &cursor)?;
                }
                if group.last().is_some_and(|last| last.as_slice() >= path) {
                    return Err(cursor.malformed("paths that are repeated or not sorted"));
                }
                group.push(path.to_vec());
            }
            if group.len() < 2 || groups.last().is_some_and(|last| last[0] >= group[0]) {
                return Err(cursor.malformed("a group of one path, or groups that are not sorted"));
            }
            groups.push(group);
        }
        let mut all: Vec<&[u8]> = groups.iter().flatten().map(Vec::as_slice).collect();
        all.sort_unstable();
        if all.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(cursor.malformed("a path in two groups"));
        }
        Ok(Self { groups })
    }
}
