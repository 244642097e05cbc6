//! One name in a directory, with everything that is kept of it.

use covey_types::BlockHash;

use super::content::{Blob, BlobView, Content};
use super::cursor::put_varint;
use super::{Cursor, MalformedObject};

/// Longest name in bytes, as in the kernel.
pub const NAME_BYTES_MAX: usize = 255;
/// Longest target of a symbolic link in bytes (`PATH_MAX` less the NUL).
const TARGET_BYTES_MAX: usize = 4095;
/// Longest value of an extended attribute, as in the kernel.
const XATTR_VALUE_BYTES_MAX: usize = 65_536;
/// Attributes of one inode at most.
const XATTRS_MAX: usize = 65_536;

/// A point in time as file systems keep it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time {
    /// Seconds since 1970, negative before.
    pub seconds: i64,
    /// 0 to 999,999,999, counted forward also before 1970.
    pub nanoseconds: u32,
}

/// Metadata that every inode has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Meta {
    /// Permission bits with setuid, setgid and sticky: 0 to 0o7777.
    pub mode: u16,
    /// Last modification.
    pub mtime: Time,
    /// An encoded [`Xattrs`]; empty when there are none.
    pub xattrs: Blob,
}

impl Meta {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.mode.to_le_bytes());
        out.extend_from_slice(&self.mtime.seconds.to_le_bytes());
        out.extend_from_slice(&self.mtime.nanoseconds.to_le_bytes());
        self.xattrs.encode(out);
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, MalformedObject> {
        let mode = cursor.u16()?;
        if mode > 0o7777 {
            return Err(cursor.malformed("mode bits that are no permission"));
        }
        let mtime = Time { seconds: cursor.i64()?, nanoseconds: cursor.u32()? };
        if mtime.nanoseconds >= 1_000_000_000 {
            return Err(cursor.malformed("nanoseconds of more than a second"));
        }
        let xattrs = Blob::decode(cursor)?;
        if let Blob::Inline(bytes) = &xattrs {
            Xattrs::decode(bytes)?;
        }
        Ok(Self { mode, mtime, xattrs })
    }
}

/// An extended attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Xattr {
    /// With its namespace, for example `user.note`.
    pub name: Vec<u8>,
    /// Any bytes.
    pub value: Vec<u8>,
}

/// The extended attributes of one inode, ACLs and capabilities among them, sorted by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Xattrs(pub Vec<Xattr>);

impl Xattrs {
    /// The set's bytes; none for the empty set.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for xattr in &self.0 {
            put_varint(&mut out, xattr.name.len() as u64);
            out.extend_from_slice(&xattr.name);
            put_varint(&mut out, xattr.value.len() as u64);
            out.extend_from_slice(&xattr.value);
        }
        out
    }

    /// Reads the set's bytes.
    ///
    /// # Errors
    /// When names are not sorted, not of a kept namespace, or anything is too long.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedObject> {
        let mut cursor = Cursor::new(bytes, "extended attributes");
        let mut xattrs: Vec<Xattr> = Vec::new();
        while !cursor.is_at_end() {
            let len = cursor.length(NAME_BYTES_MAX, "an attribute's name that is too long")?;
            let name = cursor.take(len)?;
            if !is_kept_xattr(name) || name.contains(&0) {
                return Err(cursor.malformed("an attribute that is never kept"));
            }
            if xattrs.last().is_some_and(|last| last.name.as_slice() >= name) || xattrs.len() >= XATTRS_MAX {
                return Err(cursor.malformed("attributes that are not sorted, or too many"));
            }
            let len = cursor.length(XATTR_VALUE_BYTES_MAX, "an attribute's value that is too long")?;
            xattrs.push(Xattr { name: name.to_vec(), value: cursor.take(len)?.to_vec() });
        }
        Ok(Self(xattrs))
    }
}

/// Which attributes are kept: the user's own, file capabilities, and POSIX ACLs. Others (`security.selinux`,
/// `trusted.*`) belong to the host and not to the home.
pub(crate) fn is_kept_xattr(name: &[u8]) -> bool {
    (name.starts_with(b"user.") && name.len() > 5)
        || matches!(name, b"security.capability" | b"system.posix_acl_access" | b"system.posix_acl_default")
}

/// Kinds of entries that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EntryKind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Named pipe.
    Fifo,
    /// The inode of a socket; who listened on it is not part of a home.
    Socket,
    /// Character device.
    CharacterDevice,
    /// Block device.
    BlockDevice,
}

impl EntryKind {
    const fn byte(self) -> u8 {
        match self {
            Self::File => 1,
            Self::Directory => 2,
            Self::Symlink => 3,
            Self::Fifo => 4,
            Self::Socket => 5,
            Self::CharacterDevice => 6,
            Self::BlockDevice => 7,
        }
    }

    fn of_byte(byte: u8, cursor: &Cursor<'_>) -> Result<Self, MalformedObject> {
        Ok(match byte {
            1 => Self::File,
            2 => Self::Directory,
            3 => Self::Symlink,
            4 => Self::Fifo,
            5 => Self::Socket,
            6 => Self::CharacterDevice,
            7 => Self::BlockDevice,
            _ => return Err(cursor.malformed("an unknown kind of entry")),
        })
    }
}

/// Number of a device node: major and minor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceNumber {
    /// Which driver.
    pub major: u32,
    /// Which of its devices.
    pub minor: u32,
}

impl DeviceNumber {
    /// The number of no device. A character device with it is what an overlay calls a whiteout; anybody may
    /// create one, and opening it reaches nothing.
    pub const NONE: Self = Self { major: 0, minor: 0 };

    /// Whether a kernel can have it: 12 bits for the driver and 20 for the device.
    pub const fn is_possible(self) -> bool {
        self.major < 1 << 12 && self.minor < 1 << 20
    }

    fn encode(self, out: &mut Vec<u8>) {
        put_varint(out, self.major.into());
        put_varint(out, self.minor.into());
    }

    fn decode(cursor: &mut Cursor<'_>) -> Result<Self, MalformedObject> {
        let max = u32::MAX as usize;
        let major = cursor.length(max, "a device number that no kernel has")? as u32;
        let minor = cursor.length(max, "a device number that no kernel has")? as u32;
        let number = Self { major, minor };
        if number.is_possible() {
            Ok(number)
        } else {
            Err(cursor.malformed("a device number that no kernel has"))
        }
    }
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EntryBody {
    /// Regular file.
    File(Content),
    /// Directory, by its listing object.
    Directory {
        /// The listing.
        listing: BlockHash,
    },
    /// Symbolic link; the target is any bytes but NUL.
    Symlink {
        /// 1 to 4095 bytes.
        target: Vec<u8>,
    },
    /// Named pipe.
    Fifo,
    /// Socket.
    Socket,
    /// Character device.
    CharacterDevice(DeviceNumber),
    /// Block device.
    BlockDevice(DeviceNumber),
}

/// Everything that is kept of a name's inode. Two names of one inode have equal entries.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Common metadata.
    pub meta: Meta,
    /// The rest.
    pub body: EntryBody,
}

impl Entry {
    /// Which kind it is.
    pub const fn kind(&self) -> EntryKind {
        match self.body {
            EntryBody::File(_) => EntryKind::File,
            EntryBody::Directory { .. } => EntryKind::Directory,
            EntryBody::Symlink { .. } => EntryKind::Symlink,
            EntryBody::Fifo => EntryKind::Fifo,
            EntryBody::Socket => EntryKind::Socket,
            EntryBody::CharacterDevice(_) => EntryKind::CharacterDevice,
            EntryBody::BlockDevice(_) => EntryKind::BlockDevice,
        }
    }

    /// The entry's bytes without its name.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        out.push(self.kind().byte());
        self.meta.encode(&mut out);
        match &self.body {
            EntryBody::File(content) => content.encode(&mut out),
            EntryBody::Directory { listing } => out.extend_from_slice(listing.as_bytes()),
            EntryBody::Symlink { target } => {
                put_varint(&mut out, target.len() as u64);
                out.extend_from_slice(target);
            }
            EntryBody::Fifo | EntryBody::Socket => {}
            EntryBody::CharacterDevice(number) | EntryBody::BlockDevice(number) => number.encode(&mut out),
        }
        out
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, MalformedObject> {
        let kind = EntryKind::of_byte(cursor.u8()?, cursor)?;
        let meta = Meta::decode(cursor)?;
        let body = match kind {
            EntryKind::File => EntryBody::File(Content::decode(cursor)?),
            EntryKind::Directory => EntryBody::Directory { listing: cursor.hash()? },
            EntryKind::Symlink => {
                let len = cursor.length(TARGET_BYTES_MAX, "a link target that is too long")?;
                let target = cursor.take(len)?;
                if target.is_empty() || target.contains(&0) {
                    return Err(cursor.malformed("a link target that is empty or contains NUL"));
                }
                EntryBody::Symlink { target: target.to_vec() }
            }
            EntryKind::Fifo => EntryBody::Fifo,
            EntryKind::Socket => EntryBody::Socket,
            EntryKind::CharacterDevice => EntryBody::CharacterDevice(DeviceNumber::decode(cursor)?),
            EntryKind::BlockDevice => EntryBody::BlockDevice(DeviceNumber::decode(cursor)?),
        };
        Ok(Self { meta, body })
    }

    /// The blocks that the entry itself names: content, content map, attributes or listing. Blocks behind a
    /// content map that is not inline are not among them.
    pub fn blocks(&self) -> Vec<BlockHash> {
        let mut blocks = self.meta.xattrs.blocks().to_vec();
        match &self.body {
            EntryBody::File(Content::Whole { block, .. }) => blocks.push(*block),
            EntryBody::File(Content::Mapped { size, map }) => match map {
                Blob::Inline(bytes) => {
                    blocks.extend(
                        super::ContentMap::decode(bytes, *size).into_iter().flat_map(|map| map.blocks),
                    );
                }
                Blob::Blocks { blocks: of_map, .. } => blocks.extend(of_map),
            },
            EntryBody::Directory { listing } => blocks.push(*listing),
            EntryBody::File(Content::Nothing { .. })
            | EntryBody::Symlink { .. }
            | EntryBody::Fifo
            | EntryBody::Socket
            | EntryBody::CharacterDevice(_)
            | EntryBody::BlockDevice(_) => {}
        }
        blocks
    }
}

/// An encoded entry looked at in place, without an allocation: what a walk over an unchanged tree asks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntryView<'a> {
    pub(crate) kind: EntryKind,
    pub(crate) mode: u16,
    pub(crate) mtime: Time,
    /// Of a regular file; 0 for all else.
    pub(crate) size: u64,
    xattrs_bytes: &'a [u8],
    xattrs: BlobView<'a>,
    body: BodyView<'a>,
}

#[derive(Debug, Clone, Copy)]
enum BodyView<'a> {
    /// No blocks.
    Plain,
    /// The hash of one block: a whole file, a directory's listing.
    One(&'a [u8]),
    /// An encoded content map.
    Map(&'a [u8]),
    /// Hashes of the blocks that hold a content map.
    MapInBlocks(&'a [u8]),
}

impl<'a> EntryView<'a> {
    /// Looks at an entry that this program has encoded; what it does not need is not checked.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, MalformedObject> {
        let mut cursor = Cursor::new(bytes, "entry");
        let kind = EntryKind::of_byte(cursor.u8()?, &cursor)?;
        let mode = cursor.u16()?;
        let mtime = Time { seconds: cursor.i64()?, nanoseconds: cursor.u32()? };
        let start = cursor.at();
        let xattrs = Blob::view(&mut cursor)?;
        let xattrs_bytes = &bytes[start..cursor.at()];
        let mut size = 0;
        let body = match kind {
            EntryKind::File => {
                size = cursor.varint()?;
                match cursor.u8()? {
                    1 => BodyView::One(cursor.take(32)?),
                    2 => match Blob::view(&mut cursor)? {
                        BlobView::Inline(map) => BodyView::Map(map),
                        BlobView::Blocks(hashes) => BodyView::MapInBlocks(hashes),
                    },
                    _ => BodyView::Plain,
                }
            }
            EntryKind::Directory => BodyView::One(cursor.take(32)?),
            _ => BodyView::Plain,
        };
        Ok(Self { kind, mode, mtime, size, xattrs_bytes, xattrs, body })
    }

    /// Whether the blocks behind it are named by blocks of their own.
    pub(crate) const fn is_mapped_in_blocks(&self) -> bool {
        matches!(self.body, BodyView::MapInBlocks(_))
    }

    /// The attributes.
    pub(crate) fn xattrs(&self) -> Result<Blob, MalformedObject> {
        Blob::decode(&mut Cursor::new(self.xattrs_bytes, "entry"))
    }

    /// Blocks that hold the attributes.
    pub(crate) fn xattr_blocks(&self) -> impl Iterator<Item = BlockHash> + use<'a> {
        hashes(self.xattrs.hashes())
    }

    /// The blocks that [`Entry::blocks`] names.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockHash> + use<'a> {
        let of_body = match self.body {
            BodyView::Plain => &[],
            BodyView::One(hashes) | BodyView::MapInBlocks(hashes) => hashes,
            BodyView::Map(map) => super::content::hashes_of_map(map),
        };
        self.xattr_blocks().chain(hashes(of_body))
    }
}

fn hashes(bytes: &[u8]) -> impl Iterator<Item = BlockHash> + use<'_> {
    bytes.as_chunks::<32>().0.iter().map(|hash| BlockHash::from_bytes(*hash))
}

/// Checks a name: one component that cannot leave its directory.
pub(crate) fn check_entry_name(name: &[u8], cursor: &Cursor<'_>) -> Result<(), MalformedObject> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(cursor.malformed("a name that is empty or too long"));
    }
    if name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0) {
        return Err(cursor.malformed("a name that is `.` or `..` or contains `/` or NUL"));
    }
    Ok(())
}
