//! From a manifest to an image: depth first, each directory's files first, the directory itself when everything
//! below it is written.
//!
//! What is in memory is the names of the directories above each other and the home's table of links; what a
//! directory's `..` is called is only known when its parent is written, and filled in then.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use covey_home::manifest::{
    Content, DEPTH_MAX, DeviceNumber, Entry, EntryBody, LinkTable, MalformedObject, Meta, PATH_BYTES_MAX,
    Time,
};
use covey_home::object::{self, ObjectError};
use covey_types::BlockHash;

use super::needs::NeedsWriter;
use super::objects::ObjectsWriter;
use super::{ImageError, ImageFacts, ImageRequest, listing};
use crate::content::ContentId;
use crate::erofs::{
    BLOCK_BYTES, Dirents, FileType, INODE_BYTES, InodeHead, InodeXattrs, Layout, METACOPY_SHARED, SLOT_BYTES,
    Segments, Super, TooManyAttributes, chunk_indexes, shared_block,
};

/// A directory's last block or a link's target up to this length stands behind its inode. Above, the gap that
/// is left where it does not fit costs more than a block of its own.
const INLINE_BYTES_MAX: usize = 2048;

const MODE_FILE: u16 = 0o100_000;
const MODE_DIRECTORY: u16 = 0o040_000;
const MODE_SYMLINK: u16 = 0o120_000;
const MODE_FIFO: u16 = 0o010_000;
const MODE_SOCKET: u16 = 0o140_000;
const MODE_CHARACTER: u16 = 0o020_000;
const MODE_BLOCK: u16 = 0o060_000;

/// A directory in work.
struct Frame {
    /// Length of its path.
    path_len: usize,
    meta: Meta,
    dirents: Dirents,
    /// Its directories that are not written yet; the last one is in work or next.
    pending: Vec<Pending>,
    directories: u32,
    /// Where its directories say who their parent is.
    parents_at: Vec<u64>,
}

struct Pending {
    /// Its number in the parent's names.
    number: usize,
    listing: BlockHash,
    meta: Meta,
}

/// An inode with several names.
struct Group {
    /// Its place in the snapshot's link table.
    number: usize,
    names: u32,
    /// Entry and inode of the first name that was met.
    first: Option<(BlockHash, u64)>,
}

struct Writer<'a> {
    request: &'a ImageRequest<'a>,
    segments: Segments,
    needs: NeedsWriter,
    objects: ObjectsWriter,
    /// The directory in work and, below it, the names of shared inodes, by directory.
    path: Vec<u8>,
    linked: HashMap<Vec<u8>, Vec<(Vec<u8>, usize)>>,
    groups: Vec<Group>,
    frames: Vec<Frame>,
    inodes: u64,
    facts: ImageFacts,
}

/// Errors on the way up, which get the path where one is known.
enum Fault {
    Cancelled,
    Object(ObjectError),
    Beyond(&'static str),
    Write(io::Error),
}

impl From<ObjectError> for Fault {
    fn from(error: ObjectError) -> Self {
        Self::Object(error)
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl From<TooManyAttributes> for Fault {
    fn from(_: TooManyAttributes) -> Self {
        Self::Beyond("an attribute of more than 65,535 bytes, or attributes of more than 256 KiB")
    }
}

fn malformed(object: &'static str, problem: &'static str) -> Fault {
    Fault::Object(MalformedObject { object, at: 0, problem }.into())
}

/// A device's number as the kernel packs it: the low eight bits of the minor, the major, the rest of the minor.
const fn device(number: DeviceNumber) -> Layout {
    Layout::Device(number.minor & 0xff | number.major << 8 | (number.minor & !0xff) << 12)
}

/// Writes `draft.erofs`, `draft.needs` and `draft.objects`.
pub(super) fn write(request: &ImageRequest<'_>, draft: &Path) -> Result<ImageFacts, ImageError> {
    let image_path = draft.with_extension("erofs");
    let failed = |source| ImageError::Write { path: image_path.clone(), source };
    let facts =
        ImageFacts { root: request.root, entries: 0, files: 0, bytes: 0, excluded: 0, image_bytes: 0 };
    let file = File::options().read(true).write(true).create_new(true).open(&image_path).map_err(failed)?;
    let mut writer = Writer {
        request,
        segments: Segments::new(file),
        needs: NeedsWriter::create(&draft.with_extension("needs")).map_err(failed)?,
        objects: ObjectsWriter::create(&draft.with_extension("objects")).map_err(failed)?,
        path: Vec::new(),
        linked: HashMap::new(),
        groups: Vec::new(),
        frames: Vec::new(),
        inodes: 0,
        facts,
    };
    let root_nid = writer.run().map_err(|fault| {
        let path = String::from_utf8_lossy(&writer.path).into_owned();
        match fault {
            Fault::Cancelled => ImageError::Cancelled,
            Fault::Object(source) => ImageError::Object { path, source },
            Fault::Beyond(limit) => ImageError::Beyond { path, limit },
            Fault::Write(source) => ImageError::Write { path: image_path.clone(), source },
        }
    })?;
    let Writer { segments, needs, objects, inodes, mut facts, .. } = writer;
    needs.finish().and_then(|()| objects.finish()).map_err(failed)?;
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&super::identity(request).as_bytes()[..16]);
    let head = |blocks| Super { root_nid, inodes, blocks, uuid }.encode();
    let (_, blocks) = segments.finish(head, &shared_block()).map_err(failed)?;
    facts.image_bytes = u64::from(blocks) * BLOCK_BYTES as u64;
    Ok(facts)
}

/// A directory whose entries come in.
struct Opening<'w, 'a> {
    writer: &'w mut Writer<'a>,
    frame: &'w mut Frame,
    linked: &'w [(Vec<u8>, usize)],
}

impl listing::Visitor for Opening<'_, '_> {
    type Error = Fault;

    fn object(&mut self, hash: BlockHash, bytes: &[u8]) -> Result<(), Fault> {
        Ok(self.writer.objects.push(hash, bytes)?)
    }

    fn entry(&mut self, name: Vec<u8>, entry: Entry) -> Result<(), Fault> {
        self.writer.entry(self.frame, self.linked, &name, entry)
    }
}

impl Writer<'_> {
    fn run(&mut self) -> Result<u16, Fault> {
        let store = self.request.store;
        let hash = BlockHash::from_bytes(*self.request.root.as_bytes());
        let bytes = store.get(&hash).map_err(ObjectError::from)?;
        self.objects.push(hash, &bytes)?;
        let root = covey_home::manifest::Root::decode(&bytes).map_err(ObjectError::from)?;
        let links = object::read_links(store, &root)?;
        for block in root.links.blocks() {
            let bytes = store.get(block).map_err(ObjectError::from)?;
            self.objects.push(*block, &bytes)?;
        }
        self.note_links(&links);
        // First of all inodes: the superblock has sixteen bits for its number.
        let xattrs = self.xattrs(&root.meta)?;
        let at = self.segments.place_inode(INODE_BYTES + xattrs.len(), None)?;
        self.open(&root.listing, root.meta)?;
        loop {
            if self.request.cancel.load(Ordering::Relaxed) {
                return Err(Fault::Cancelled);
            }
            let Some(frame) = self.frames.last_mut() else {
                return Err(malformed("root object", "no directory"));
            };
            if let Some(next) = frame.pending.last() {
                let name = frame.dirents.name(next.number).to_vec();
                let (listing, meta) = (next.listing, next.meta.clone());
                self.enter(&name)?;
                self.open(&listing, meta)?;
            } else if self.frames.len() > 1 {
                self.close()?;
            } else {
                break;
            }
        }
        self.finish_root(at, &xattrs)
    }

    fn enter(&mut self, name: &[u8]) -> Result<(), Fault> {
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name);
        if self.path.len() > PATH_BYTES_MAX {
            return Err(malformed("listing", "a path that is too long"));
        }
        if self.frames.len() > DEPTH_MAX {
            return Err(malformed("listing", "directories below each other beyond the limit"));
        }
        Ok(())
    }

    /// Which names of shared inodes are in the image.
    fn note_links(&mut self, table: &LinkTable) {
        let excludes = self.request.excludes;
        for (number, group) in table.groups.iter().enumerate() {
            let kept: Vec<&Vec<u8>> = group.iter().filter(|path| !excludes.excludes_path(path)).collect();
            if kept.len() < 2 {
                continue;
            }
            for path in &kept {
                let (dir, name) = match path.iter().rposition(|byte| *byte == b'/') {
                    Some(slash) => (&path[..slash], &path[slash + 1..]),
                    None => (&[][..], path.as_slice()),
                };
                self.linked.entry(dir.to_vec()).or_default().push((name.to_vec(), self.groups.len()));
            }
            self.groups.push(Group { number, names: kept.len() as u32, first: None });
        }
    }

    /// Writes everything of a directory but its directories, and makes it the one in work.
    fn open(&mut self, listing: &BlockHash, meta: Meta) -> Result<(), Fault> {
        let store = self.request.store;
        let mut frame = Frame {
            path_len: self.path.len(),
            meta,
            dirents: Dirents::default(),
            pending: Vec::new(),
            directories: 0,
            parents_at: Vec::new(),
        };
        let linked = self.linked.remove(&self.path).unwrap_or_default();
        listing::read(store, listing, &mut Opening { writer: self, frame: &mut frame, linked: &linked })?;
        // The next one is taken from the end; in the order of their names they are near each other.
        frame.pending.reverse();
        self.frames.push(frame);
        Ok(())
    }

    fn entry(
        &mut self,
        frame: &mut Frame,
        linked: &[(Vec<u8>, usize)],
        name: &[u8],
        entry: Entry,
    ) -> Result<(), Fault> {
        let is_dir = matches!(entry.body, EntryBody::Directory { .. });
        if self.request.excludes.excludes(&self.path, name, is_dir) {
            self.facts.excluded += 1;
            return Ok(());
        }
        self.facts.entries += 1;
        self.request.progress.files_done(1);
        let file_type = match &entry.body {
            EntryBody::Directory { listing } => {
                let number = frame.dirents.push(name, FileType::Directory, 0);
                frame.directories += 1;
                frame.pending.push(Pending { number, listing: *listing, meta: entry.meta });
                return Ok(());
            }
            EntryBody::File(content) => {
                self.facts.files += 1;
                self.facts.bytes += content.size();
                FileType::File
            }
            EntryBody::Symlink { .. } => FileType::Symlink,
            EntryBody::Fifo => FileType::Fifo,
            EntryBody::Socket => FileType::Socket,
            EntryBody::CharacterDevice(_) => FileType::CharacterDevice,
            EntryBody::BlockDevice(_) => FileType::BlockDevice,
        };
        let group = linked.iter().find(|(linked, _)| linked == name).map(|(_, group)| *group);
        let inode = self.inode(&entry, group).inspect_err(|_| {
            // For the message only; the work ends here.
            self.path.extend_from_slice(if self.path.is_empty() { b"" } else { b"/" });
            self.path.extend_from_slice(name);
        })?;
        frame.dirents.push(name, file_type, inode);
        Ok(())
    }

    /// The inode of a name that is no directory: a new one, or that of its group.
    fn inode(&mut self, entry: &Entry, group: Option<usize>) -> Result<u64, Fault> {
        let Some(group) = group else { return self.new_inode(entry, 1, None) };
        let hash = BlockHash::of(&entry.encode());
        let Group { number, names, first } = self.groups[group];
        match first {
            Some((first, inode)) if first == hash => Ok(inode),
            Some(_) => Err(malformed("link table", "two names of one inode differ")),
            None => {
                let inode = self.new_inode(entry, names, Some(number))?;
                self.groups[group].first = Some((hash, inode));
                Ok(inode)
            }
        }
    }

    fn new_inode(&mut self, entry: &Entry, links: u32, group: Option<usize>) -> Result<u64, Fault> {
        let mut xattrs = self.xattrs(&entry.meta)?;
        if let Some(number) = group {
            xattrs.push(covey_home::tracked::GROUP_ATTRIBUTE, number.to_string().as_bytes())?;
        }
        let mut tail = Vec::new();
        let (kind, layout, size, tail_is_whole) = match &entry.body {
            EntryBody::File(content) => {
                let beyond = Fault::Beyond("a file of more than 32 PiB");
                let (layout, indexes) = chunk_indexes(content.size()).ok_or(beyond)?;
                tail = indexes;
                self.refer(content, &mut xattrs)?;
                (MODE_FILE, layout, content.size(), false)
            }
            EntryBody::Symlink { target } if target.len() <= INLINE_BYTES_MAX => {
                tail.clone_from(target);
                (MODE_SYMLINK, Layout::Inline(0), target.len() as u64, true)
            }
            EntryBody::Symlink { target } => {
                let block = self.segments.put_blocks(target)?;
                (MODE_SYMLINK, Layout::Plain(block), target.len() as u64, false)
            }
            EntryBody::Fifo => (MODE_FIFO, Layout::Plain(0), 0, false),
            EntryBody::Socket => (MODE_SOCKET, Layout::Plain(0), 0, false),
            EntryBody::CharacterDevice(DeviceNumber::NONE) => {
                return Err(Fault::Beyond(
                    "a character device 0/0, which an overlay takes for a removed name",
                ));
            }
            EntryBody::CharacterDevice(number) => (MODE_CHARACTER, device(*number), 0, false),
            EntryBody::BlockDevice(number) => (MODE_BLOCK, device(*number), 0, false),
            EntryBody::Directory { .. } => return Err(malformed("link table", "a directory")),
        };
        let head = self.head(&xattrs, kind, &entry.meta, layout, size, links)?;
        let start = INODE_BYTES + xattrs.len();
        let whole = tail_is_whole.then_some((start, tail.len()));
        let at = self.segments.place_inode(start + tail.len(), whole)?;
        let mut bytes = Vec::with_capacity(start + tail.len());
        head.encode(&mut bytes);
        xattrs.encode(&mut bytes);
        bytes.extend_from_slice(&tail);
        self.segments.patch(at, &bytes)?;
        Ok(at / SLOT_BYTES)
    }

    /// Makes the inode say where its bytes are.
    fn refer(&mut self, content: &Content, xattrs: &mut InodeXattrs) -> Result<(), Fault> {
        if let Some(id) = ContentId::of(content) {
            xattrs.share(METACOPY_SHARED);
            xattrs.push(b"trusted.overlay.redirect", &id.redirect())?;
            self.needs.push(content)?;
        }
        Ok(())
    }

    fn xattrs(&self, meta: &Meta) -> Result<InodeXattrs, Fault> {
        let mut xattrs = InodeXattrs::default();
        for xattr in object::read_xattrs(self.request.store, &meta.xattrs)?.0 {
            xattrs.push(&xattr.name, &xattr.value)?;
        }
        Ok(xattrs)
    }

    fn head(
        &mut self,
        xattrs: &InodeXattrs,
        kind: u16,
        meta: &Meta,
        layout: Layout,
        size: u64,
        links: u32,
    ) -> Result<InodeHead, Fault> {
        self.inodes += 1;
        let Time { seconds, nanoseconds } = meta.mtime;
        Ok(InodeHead {
            layout,
            xattr_count: xattrs.count()?,
            mode: kind | meta.mode,
            size,
            number: self.inodes as u32,
            owner: self.request.owner,
            mtime: Time { seconds, nanoseconds },
            links,
        })
    }

    /// Writes the directory in work, and tells its parent.
    fn close(&mut self) -> Result<(), Fault> {
        let Some(frame) = self.frames.pop() else { return Ok(()) };
        let xattrs = self.xattrs(&frame.meta)?;
        let mut dir = frame.dirents.encode();
        let start = INODE_BYTES + xattrs.len();
        let whole_blocks = dir.bytes.len() / BLOCK_BYTES * BLOCK_BYTES;
        let mut tail_len = dir.bytes.len() - whole_blocks;
        if tail_len > INLINE_BYTES_MAX {
            tail_len = 0;
        }
        let at = self.segments.place_inode(start + tail_len, Some((start, tail_len)))?;
        let own = at / SLOT_BYTES;
        dir.bytes[dir.own_at..dir.own_at + 8].copy_from_slice(&own.to_le_bytes());
        let (blocks, tail) = dir.bytes.split_at(dir.bytes.len() - tail_len);
        let first = if blocks.is_empty() { 0 } else { self.segments.put_blocks(blocks)? };
        let layout = if tail_len == 0 { Layout::Plain(first) } else { Layout::Inline(first) };
        let size = dir.bytes.len() as u64;
        let head = self.head(
            &xattrs,
            MODE_DIRECTORY,
            &frame.meta,
            layout,
            size,
            frame.directories.saturating_add(2),
        )?;
        let mut bytes = Vec::with_capacity(start + tail_len);
        head.encode(&mut bytes);
        xattrs.encode(&mut bytes);
        bytes.extend_from_slice(tail);
        self.segments.patch(at, &bytes)?;
        for parent_at in &frame.parents_at {
            self.segments.patch(*parent_at, &own.to_le_bytes())?;
        }
        let parent_at = match dir.parent_at.checked_sub(blocks.len()) {
            Some(within) => at + (start + within) as u64,
            None => u64::from(first) * BLOCK_BYTES as u64 + dir.parent_at as u64,
        };
        if let Some(parent) = self.frames.last_mut() {
            if let Some(done) = parent.pending.pop() {
                parent.dirents.set_inode(done.number, own);
            }
            parent.parents_at.push(parent_at);
            self.path.truncate(parent.path_len);
        }
        Ok(())
    }

    fn finish_root(&mut self, at: u64, xattrs: &InodeXattrs) -> Result<u16, Fault> {
        let Some(frame) = self.frames.pop() else { return Err(malformed("root object", "no directory")) };
        let mut dir = frame.dirents.encode();
        let own = at / SLOT_BYTES;
        for place in [dir.own_at, dir.parent_at] {
            dir.bytes[place..place + 8].copy_from_slice(&own.to_le_bytes());
        }
        let layout = Layout::Plain(self.segments.put_blocks(&dir.bytes)?);
        let (size, links) = (dir.bytes.len() as u64, frame.directories.saturating_add(2));
        let head = self.head(xattrs, MODE_DIRECTORY, &frame.meta, layout, size, links)?;
        let mut bytes = Vec::new();
        head.encode(&mut bytes);
        xattrs.encode(&mut bytes);
        self.segments.patch(at, &bytes)?;
        for parent_at in &frame.parents_at {
            self.segments.patch(*parent_at, &own.to_le_bytes())?;
        }
        u16::try_from(own).map_err(|_| Fault::Beyond("attributes of the home's own directory"))
    }
}
