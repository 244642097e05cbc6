//! The tree that an archive describes, gathered in memory, because archives name things in any order.

use std::collections::BTreeMap;

use covey_types::{BlockHash, RootHash};

use crate::block::{StoreError, Upload};
use crate::manifest::{Blob, Content, Entry, EntryBody, LinkTable, ListingBuilder, Meta, Root, Time};
use crate::object::{put, put_blob, put_root};

/// An inode that several names may have.
pub(super) type Inode = usize;

/// What stands under a name.
#[derive(Debug)]
enum Node {
    Directory { meta: Meta, names: BTreeMap<Vec<u8>, Node> },
    Inode(Inode),
}

/// A home while it is read.
#[derive(Debug)]
pub(super) struct Tree {
    top: Node,
    /// Entries of everything but directories.
    inodes: Vec<Entry>,
    /// Names so far.
    pub(super) names: u64,
}

/// Why a name was refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TreeError {
    /// Something above it is not a directory.
    ParentIsNoDirectory,
    /// A directory would be replaced by something else, or the reverse.
    KindsDiffer,
    /// No such name so far.
    NotFound,
    /// A directory cannot have two names.
    IsDirectory,
}

/// Metadata of directories that an archive does not name.
fn unnamed() -> Meta {
    Meta { mode: 0o755, mtime: Time { seconds: 0, nanoseconds: 0 }, xattrs: Blob::empty() }
}

impl Default for Tree {
    fn default() -> Self {
        Self {
            top: Node::Directory { meta: unnamed(), names: BTreeMap::new() },
            inodes: Vec::new(),
            names: 0,
        }
    }
}

impl Tree {
    /// The directory at `names`, made with those above it where it is missing.
    fn directory(&mut self, names: &[&[u8]]) -> Result<(&mut Meta, &mut BTreeMap<Vec<u8>, Node>), TreeError> {
        let mut at = &mut self.top;
        for name in names {
            let Node::Directory { names: children, .. } = at else {
                return Err(TreeError::ParentIsNoDirectory);
            };
            at = children.entry(name.to_vec()).or_insert_with(|| {
                self.names += 1;
                Node::Directory { meta: unnamed(), names: BTreeMap::new() }
            });
        }
        match at {
            Node::Directory { meta, names } => Ok((meta, names)),
            Node::Inode(_) => Err(TreeError::ParentIsNoDirectory),
        }
    }

    /// Names a directory; a second time its metadata is replaced.
    pub(super) fn add_directory(&mut self, names: &[&[u8]], meta: Meta) -> Result<(), TreeError> {
        if self.find(names).is_ok() {
            return Err(TreeError::KindsDiffer);
        }
        *self.directory(names)?.0 = meta;
        Ok(())
    }

    /// Adds something that is not a directory; what had the name is replaced, as by tar.
    pub(super) fn add(&mut self, names: &[&[u8]], entry: Entry) -> Result<(), TreeError> {
        self.inodes.push(entry);
        self.name(names, self.inodes.len() - 1)
    }

    /// Gives an inode one more name.
    pub(super) fn link(&mut self, names: &[&[u8]], target: &[&[u8]]) -> Result<(), TreeError> {
        let inode = self.find(target)?;
        self.name(names, inode)
    }

    fn name(&mut self, names: &[&[u8]], inode: Inode) -> Result<(), TreeError> {
        let Some((last, above)) = names.split_last() else { return Err(TreeError::KindsDiffer) };
        let (_, children) = self.directory(above)?;
        match children.insert(last.to_vec(), Node::Inode(inode)) {
            None => self.names += 1,
            Some(Node::Inode(_)) => {}
            Some(directory) => {
                children.insert(last.to_vec(), directory);
                return Err(TreeError::KindsDiffer);
            }
        }
        Ok(())
    }

    fn find(&self, names: &[&[u8]]) -> Result<Inode, TreeError> {
        let mut at = &self.top;
        for name in names {
            let Node::Directory { names: children, .. } = at else { return Err(TreeError::NotFound) };
            at = children.get(*name).ok_or(TreeError::NotFound)?;
        }
        match at {
            Node::Inode(inode) => Ok(*inode),
            Node::Directory { .. } => Err(TreeError::IsDirectory),
        }
    }

    /// Writes listings and root; gives the root, the number of files and their bytes.
    pub(super) fn write(self, upload: &dyn Upload) -> Result<(RootHash, u64, u64), StoreError> {
        let mut writer = Writer { upload, inodes: self.inodes, groups: BTreeMap::new(), files: 0, bytes: 0 };
        let Node::Directory { meta, names } = self.top else { return Err(StoreError::UploadFailed) };
        let listing = writer.directories(names)?;
        let links = LinkTable::new(writer.groups.into_values());
        let root = Root {
            meta,
            listing,
            files: writer.files,
            bytes: writer.bytes,
            links: put_blob(upload, &links.encode())?,
        };
        Ok((put_root(upload, &root)?, root.files, root.bytes))
    }
}

struct Writer<'a> {
    upload: &'a dyn Upload,
    inodes: Vec<Entry>,
    groups: BTreeMap<Inode, Vec<Vec<u8>>>,
    files: u64,
    bytes: u64,
}

/// A directory of which some names are written.
struct Open {
    path: Vec<u8>,
    name: Vec<u8>,
    meta: Meta,
    rest: std::collections::btree_map::IntoIter<Vec<u8>, Node>,
    builder: ListingBuilder,
}

impl Writer<'_> {
    /// With a stack of its own: archives may be deeper than a thread's stack.
    fn directories(&mut self, names: BTreeMap<Vec<u8>, Node>) -> Result<BlockHash, StoreError> {
        let open = |path, name, meta, names: BTreeMap<Vec<u8>, Node>| Open {
            path,
            name,
            meta,
            rest: names.into_iter(),
            builder: ListingBuilder::default(),
        };
        let mut above: Vec<Open> = Vec::new();
        let mut here = open(Vec::new(), Vec::new(), unnamed(), names);
        loop {
            match here.rest.next() {
                Some((name, Node::Inode(inode))) => self.inode(&mut here, &name, inode),
                Some((name, Node::Directory { meta, names })) => {
                    let path = joined(&here.path, &name);
                    above.push(std::mem::replace(&mut here, open(path, name, meta, names)));
                }
                None => {
                    let listing = here.builder.finish(|object| put(self.upload, object))?;
                    let Some(parent) = above.pop() else { return Ok(listing) };
                    let entry = Entry { meta: here.meta, body: EntryBody::Directory { listing } };
                    let name = here.name;
                    here = parent;
                    here.builder.push(&name, &entry.encode());
                }
            }
        }
    }

    fn inode(&mut self, here: &mut Open, name: &[u8], inode: Inode) {
        let entry = &self.inodes[inode];
        if let EntryBody::File(content) = &entry.body {
            self.files += 1;
            self.bytes = self.bytes.saturating_add(Content::size(content));
        }
        here.builder.push(name, &entry.encode());
        self.groups.entry(inode).or_default().push(joined(&here.path, name));
    }
}

fn joined(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() }
}
