//! A tar stream becomes a state.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};

use covey_types::size::WHOLE_FILE_BYTES_MAX;
use covey_types::{BlockHash, RootHash};
use serde::Serialize;

use super::stream::{Member, Members};
use super::tree::{Tree, TreeError};
use super::{ArchiveError, ArchiveReport, pax};
use crate::block::{BlockStore, Upload};
use crate::manifest::{
    Content, ContentMap, DEPTH_MAX, DeviceNumber, Entry, EntryBody, Extent, Meta, Time, Xattr, Xattrs,
    for_each_window, is_kept_xattr,
};
use crate::object::{put, put_blob};
use crate::path::show;
use crate::progress::Progress;
use crate::view::components;

/// Names in one archive; each costs some 200 bytes of memory while it is read.
pub const ENTRIES_MAX: u64 = 5_000_000;
/// The longest target of a symbolic link, as in the kernel.
const TARGET_BYTES_MAX: usize = 4095;

/// A state that was made from an archive. Every block that it names is durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Imported {
    /// Names the state.
    pub root: RootHash,
    /// What the archive held.
    #[serde(flatten)]
    pub report: ArchiveReport,
    /// Blocks that the store did not have.
    pub blocks_new: u64,
    /// Their bytes.
    pub bytes_new: u64,
    /// Bytes that the store grew by.
    pub stored_bytes_new: u64,
    /// See [`crate::Upload::epoch`].
    #[serde(skip)]
    pub epoch: u64,
}

/// Reads a tar archive (pax, GNU or ustar, not compressed) and stores it as a state of a home.
///
/// # Errors
/// [`ArchiveError`], [`ArchiveError::Entry`] for an archive that names anything outside the home. Nothing refers
/// to what was stored then.
pub fn import(
    store: &dyn BlockStore,
    archive: &mut dyn Read,
    cancel: &AtomicBool,
    progress: &dyn Progress,
) -> Result<Imported, ArchiveError> {
    let upload = store.upload()?;
    let epoch = upload.epoch();
    let mut reader = Reader {
        upload: upload.as_ref(),
        progress,
        tree: Tree::default(),
        report: ArchiveReport::default(),
        buffer: Vec::new(),
    };
    let mut members = Members::new(archive);
    while let Some(member) = members.next()? {
        if cancel.load(Ordering::Relaxed) {
            return Err(member.wrong("cancelled here"));
        }
        reader.member(&member, &mut members)?;
    }
    let Reader { tree, mut report, .. } = reader;
    report.entries = tree.names + 1;
    let (root, files, bytes) = tree.write(upload.as_ref())?;
    (report.files, report.bytes) = (files, bytes);
    let added = upload.finish()?;
    Ok(Imported {
        root,
        report,
        blocks_new: added.blocks_new,
        bytes_new: added.bytes_new,
        stored_bytes_new: added.stored_bytes_new,
        epoch,
    })
}

struct Reader<'a> {
    upload: &'a dyn Upload,
    progress: &'a dyn Progress,
    tree: Tree,
    report: ArchiveReport,
    /// One window of a file.
    buffer: Vec<u8>,
}

impl Reader<'_> {
    fn member(&mut self, member: &Member, data: &mut Members<'_>) -> Result<(), ArchiveError> {
        let names = names(member, &member.name)?;
        if names.len() > DEPTH_MAX {
            return Err(member.wrong(format!("deeper than {DEPTH_MAX} directories")));
        }
        if self.tree.names >= ENTRIES_MAX {
            return Err(member.wrong(format!("more than {ENTRIES_MAX} names")));
        }
        let kind = member.header.entry_type();
        // The oldest archives have no kind for directories.
        let is_directory = kind == tar::EntryType::Directory
            || kind.as_byte() == b'D'
            || (kind == tar::EntryType::Regular && member.name.ends_with(b"/"));
        if is_directory {
            let meta = self.meta(member)?;
            return self.tree.add_directory(&names, meta).map_err(|error| refused(member, &error));
        }
        let body = match kind {
            tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse => {
                EntryBody::File(self.content(member, data)?)
            }
            tar::EntryType::Link => {
                let target = self::names(member, &member.link)?;
                return self.tree.link(&names, &target).map_err(|error| match error {
                    TreeError::NotFound => member
                        .wrong(format!("a link to `{}`, which did not come before it", show(&member.link))),
                    error => refused(member, &error),
                });
            }
            tar::EntryType::Symlink => {
                let target = member.link.clone();
                if target.is_empty() || target.len() > TARGET_BYTES_MAX || target.contains(&0) {
                    return Err(
                        member.wrong("a symbolic link whose target is empty, too long or contains NUL")
                    );
                }
                EntryBody::Symlink { target }
            }
            tar::EntryType::Fifo => EntryBody::Fifo,
            tar::EntryType::Char => EntryBody::CharacterDevice(number(member)?),
            tar::EntryType::Block => EntryBody::BlockDevice(number(member)?),
            other => {
                let kind = char::from(other.as_byte()).escape_default();
                return Err(member.wrong(format!("a member of the unknown kind `{kind}`")));
            }
        };
        let entry = Entry { meta: self.meta(member)?, body };
        self.tree.add(&names, entry).map_err(|error| refused(member, &error))
    }

    fn meta(&self, member: &Member) -> Result<Meta, ArchiveError> {
        let mode = member.header.mode().map_err(|error| member.wrong(error.to_string()))?;
        let mtime = match member.record(b"mtime") {
            Some(text) => decimal(text).ok_or_else(|| member.wrong("a time that is no number"))?,
            None => {
                let seconds = member.header.mtime().map_err(|error| member.wrong(error.to_string()))?;
                // Base 256 may say a negative number, which the header's type cannot.
                Time { seconds: seconds as i64, nanoseconds: 0 }
            }
        };
        let mut xattrs: Vec<Xattr> = Vec::new();
        for (key, value) in &member.records {
            let Some(name) = key.strip_prefix(b"SCHILY.xattr.") else { continue };
            let name = pax::unescape(name);
            // What belongs to the host it came from is left out, as a secure leaves it out.
            if is_kept_xattr(&name) && !name.contains(&0) {
                xattrs.retain(|known| known.name != name);
                xattrs.push(Xattr { name, value: value.clone() });
            }
        }
        xattrs.sort_by(|one, other| one.name.cmp(&other.name));
        let encoded = Xattrs(xattrs).encode();
        Xattrs::decode(&encoded).map_err(|error| member.wrong(error.to_string()))?;
        Ok(Meta { mode: (mode & 0o7777) as u16, mtime, xattrs: put_blob(self.upload, &encoded)? })
    }

    fn content(&mut self, member: &Member, data: &mut Members<'_>) -> Result<Content, ArchiveError> {
        let size = member.size;
        if i64::try_from(size).is_err() {
            return Err(member.wrong("a file larger than any file system keeps"));
        }
        let extents = match &member.extents {
            None if size == 0 => Vec::new(),
            None => vec![Extent { start: 0, len: size }],
            Some(extents) => joined(extents),
        };
        let mut blocks: Vec<BlockHash> = Vec::new();
        let (upload, progress, buffer) = (self.upload, self.progress, &mut self.buffer);
        for_each_window(&extents, size, |parts| {
            let len = parts.iter().map(|part| part.len).sum::<u64>() as usize;
            buffer.resize(len, 0);
            data.take_exact(buffer)?;
            blocks.push(put(upload, buffer)?);
            progress.bytes_done(len as u64);
            Ok::<(), ArchiveError>(())
        })?;
        let dense = extents == [Extent { start: 0, len: size }];
        Ok(match blocks.as_slice() {
            [] => Content::Nothing { size },
            [block] if dense && size <= WHOLE_FILE_BYTES_MAX => Content::Whole { size, block: *block },
            _ => {
                let map = ContentMap { extents, blocks }.encode();
                Content::Mapped { size, map: put_blob(self.upload, &map)? }
            }
        })
    }
}

/// Ranges that touch are one: a state has one encoding.
fn joined(extents: &[Extent]) -> Vec<Extent> {
    let mut out: Vec<Extent> = Vec::with_capacity(extents.len());
    for extent in extents {
        match out.last_mut() {
            Some(last) if last.end() == extent.start => last.len += extent.len,
            _ => out.push(*extent),
        }
    }
    out
}

/// The components of a name in an archive: `./` before it does not count, everything else must stay in the home.
fn names<'m>(member: &Member, name: &'m [u8]) -> Result<Vec<&'m [u8]>, ArchiveError> {
    let mut inner = name;
    while let Some(rest) = inner.strip_prefix(b"./") {
        inner = rest.trim_start_slashes();
    }
    if inner == b"." {
        inner = b"";
    }
    if inner.starts_with(b"/") {
        return Err(member.wrong("an absolute name; pack the home with `tar -C HOME .`"));
    }
    components(inner).map_err(|_| member.wrong("a name that leaves the home, is malformed or is too long"))
}

trait TrimSlashes {
    fn trim_start_slashes(&self) -> &Self;
}

impl TrimSlashes for [u8] {
    fn trim_start_slashes(&self) -> &Self {
        let from = self.iter().position(|byte| *byte != b'/').unwrap_or(self.len());
        &self[from..]
    }
}

/// The number of a device node; an archive that says none means none.
fn number(member: &Member) -> Result<DeviceNumber, ArchiveError> {
    let field = |value: std::io::Result<Option<u32>>, at: usize| {
        let blank = member.header.as_bytes()[at..at + 8].iter().all(|byte| matches!(byte, 0 | b' '));
        let value = if blank { Ok(None) } else { value };
        value.map(Option::unwrap_or_default).map_err(|error| member.wrong(error.to_string()))
    };
    // Where the fields stand in a header.
    let major = field(member.header.device_major(), 329)?;
    let minor = field(member.header.device_minor(), 337)?;
    let number = DeviceNumber { major, minor };
    if number.is_possible() { Ok(number) } else { Err(member.wrong("a device number that no kernel has")) }
}

fn refused(member: &Member, error: &TreeError) -> ArchiveError {
    member.wrong(match error {
        TreeError::ParentIsNoDirectory => "something above it is not a directory in the archive",
        TreeError::KindsDiffer => {
            "it is a directory in one place of the archive and something else in another"
        }
        TreeError::NotFound => "a link to a name that did not come before it",
        TreeError::IsDirectory => "a hard link to a directory",
    })
}

/// A decimal number of seconds with up to any number of decimals, of which nine count.
fn decimal(text: &[u8]) -> Option<Time> {
    let text = std::str::from_utf8(text).ok()?;
    let (is_negative, digits) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    if !whole.bytes().chain(fraction.bytes()).all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let whole: i64 = whole.parse().ok()?;
    let fraction: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanoseconds: u32 = fraction.parse().ok()?;
    Some(match (is_negative, nanoseconds) {
        (false, _) => Time { seconds: whole, nanoseconds },
        (true, 0) => Time { seconds: -whole, nanoseconds },
        (true, _) => Time { seconds: -whole - 1, nanoseconds: 1_000_000_000 - nanoseconds },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_are_written() {
        let time = |text: &str| decimal(text.as_bytes()).map(|time| (time.seconds, time.nanoseconds));
        assert_eq!(time("5.000000007"), Some((5, 7)));
        assert_eq!(time("5.0000000079"), Some((5, 7)));
        assert_eq!(time("-1.250000000"), Some((-2, 750_000_000)));
        assert_eq!(time("-0.5"), Some((-1, 500_000_000)));
        assert_eq!(time("-3"), Some((-3, 0)));
        for bad in ["", "-", "x", "1.x", "1e3", "--1", "99999999999999999999"] {
            assert_eq!(time(bad), None, "{bad}");
        }
    }
}
