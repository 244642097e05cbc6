//! Checking that everything a root names is there and right, by reading it.

use std::collections::HashSet;

use covey_types::{BlockHash, RootHash};

use crate::block::{BlockStore, StoreError};
use crate::manifest::{Content, Entry, EntryBody, LinkTable, MalformedObject, PATH_BYTES_MAX};
use crate::object::{self, ObjectError};

/// Problems that a report names; the count goes on.
const PROBLEMS_MAX: usize = 100;

/// What a verification found.
#[derive(Debug, Clone, Default)]
pub struct VerifyReport {
    /// Names in the tree.
    pub entries: u64,
    /// Different blocks that were read, objects among them.
    pub blocks: u64,
    /// What is missing, damaged or contradictory.
    pub problem_count: u64,
    /// The first of them: path and problem.
    pub problems: Vec<String>,
}

impl VerifyReport {
    fn add(&mut self, path: &[u8], problem: &dyn std::fmt::Display) {
        self.problem_count += 1;
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(format!("`{}`: {problem}", String::from_utf8_lossy(path)));
        }
    }
}

struct Walk<'a> {
    store: &'a dyn BlockStore,
    links: LinkTable,
    linked: HashSet<Vec<u8>>,
    linked_entries: std::collections::HashMap<Vec<u8>, Vec<u8>>,
    seen: HashSet<BlockHash>,
    files: u64,
    bytes: u64,
    report: VerifyReport,
}

/// Reads everything that `root` names and checks every hash and every length.
///
/// # Errors
/// [`StoreError::Unavailable`] when it cannot be told; all else is in the report.
pub fn verify(store: &dyn BlockStore, root: &RootHash) -> Result<VerifyReport, StoreError> {
    let mut report = VerifyReport::default();
    let top = match object::read_root(store, root) {
        Ok(top) => top,
        Err(error) => {
            note(&mut report, b"", error)?;
            return Ok(report);
        }
    };
    let links = match object::read_links(store, &top) {
        Ok(links) => links,
        Err(error) => {
            note(&mut report, b"", error)?;
            LinkTable::default()
        }
    };
    let linked = links.groups.iter().flatten().cloned().collect();
    let mut walk = Walk {
        store,
        links,
        linked,
        linked_entries: Default::default(),
        seen: HashSet::new(),
        files: 0,
        bytes: 0,
        report,
    };
    walk.xattrs(b"", &top.meta)?;
    let mut dirs = vec![(Vec::new(), top.listing)];
    while let Some((path, listing)) = dirs.pop() {
        walk.dir(&path, &listing, &mut dirs)?;
    }
    walk.links();
    if (walk.files, walk.bytes) != (top.files, top.bytes) && walk.report.problem_count == 0 {
        walk.report.add(b"", &"the root counts other files than the tree has");
    }
    walk.report.blocks += walk.seen.len() as u64;
    Ok(walk.report)
}

fn note(report: &mut VerifyReport, path: &[u8], error: ObjectError) -> Result<(), StoreError> {
    match error {
        ObjectError::Store(error @ StoreError::Unavailable { .. }) => Err(error),
        error => {
            report.add(path, &error);
            Ok(())
        }
    }
}

impl Walk<'_> {
    fn dir(
        &mut self,
        path: &[u8],
        listing: &BlockHash,
        dirs: &mut Vec<(Vec<u8>, BlockHash)>,
    ) -> Result<(), StoreError> {
        let found = match object::read_listing(self.store, listing) {
            Ok(found) => found,
            Err(error) => return note(&mut self.report, path, error),
        };
        self.seen.insert(*listing);
        self.seen.extend(&found.pieces);
        for (name, entry) in found.entries {
            self.report.entries += 1;
            let mut child = path.to_vec();
            if !child.is_empty() {
                child.push(b'/');
            }
            child.extend_from_slice(&name);
            if child.len() > PATH_BYTES_MAX {
                self.report.add(path, &"a path that is too long");
                continue;
            }
            self.xattrs(&child, &entry.meta)?;
            self.entry(child, entry, dirs)?;
        }
        Ok(())
    }

    fn xattrs(&mut self, path: &[u8], meta: &crate::manifest::Meta) -> Result<(), StoreError> {
        self.seen.extend(meta.xattrs.blocks());
        match object::read_xattrs(self.store, &meta.xattrs) {
            Ok(_) => Ok(()),
            Err(error) => note(&mut self.report, path, error),
        }
    }

    fn entry(
        &mut self,
        path: Vec<u8>,
        entry: Entry,
        dirs: &mut Vec<(Vec<u8>, BlockHash)>,
    ) -> Result<(), StoreError> {
        if self.linked.contains(&path) {
            self.linked_entries.insert(path.clone(), entry.encode());
        }
        match &entry.body {
            EntryBody::Directory { listing } => dirs.push((path, *listing)),
            EntryBody::Symlink { .. }
            | EntryBody::Fifo
            | EntryBody::Socket
            | EntryBody::CharacterDevice(_)
            | EntryBody::BlockDevice(_) => {}
            EntryBody::File(content) => {
                self.files += 1;
                self.bytes += content.size();
                if let Content::Whole { size, block } = content {
                    self.block(&path, block, *size)?;
                } else {
                    match object::read_map(self.store, content) {
                        Err(error) => note(&mut self.report, &path, error)?,
                        Ok(None) => {}
                        Ok(Some(map)) => {
                            if let Content::Mapped { map, .. } = content {
                                self.seen.extend(map.blocks());
                            }
                            map.for_each_window(content.size(), |block, extents| {
                                self.block(&path, block, extents.iter().map(|extent| extent.len).sum())
                            })?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn block(&mut self, path: &[u8], block: &BlockHash, len: u64) -> Result<(), StoreError> {
        if !self.seen.insert(*block) {
            return Ok(());
        }
        match self.store.get(block) {
            Ok(bytes) if bytes.len() as u64 == len => Ok(()),
            Ok(_) => {
                let problem = "a block has another length than its file says";
                note(&mut self.report, path, MalformedObject { object: "entry", at: 0, problem }.into())
            }
            Err(error) => note(&mut self.report, path, error.into()),
        }
    }

    fn links(&mut self) {
        for group in std::mem::take(&mut self.links.groups) {
            let entries: Vec<_> = group.iter().map(|path| self.linked_entries.get(path)).collect();
            if entries.iter().any(|entry| entry.is_none() || *entry != entries[0]) {
                self.report.add(&group[0], &"its names are not one inode, or not there");
            }
        }
    }
}
