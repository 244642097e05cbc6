//! A snapshot becomes a tar stream.

use std::collections::HashMap;
use std::io::{Read, Write};

use covey_types::RootHash;

use super::{ArchiveError, ArchiveReport, pax};
use crate::block::BlockStore;
use crate::manifest::{Content, DeviceNumber, Entry, EntryBody, Extent, Meta, Time};
use crate::object;
use crate::path::show;
use crate::progress::Progress;
use crate::view::{FileReader, Snapshot, ViewError};

const BLOCK: usize = 512;
/// What a header's octal fields can say; more goes into a pax record.
const OCTAL_SIZE_MAX: u64 = 0o777_7777_7777;
const NAME_FIELD: usize = 100;

/// Writes the snapshot `root` as a tar archive to `out`: the home's own directory first, as `./`.
///
/// # Errors
/// [`ArchiveError`]. What was written until then is not a whole archive: it lacks its end.
pub fn export(
    store: &dyn BlockStore,
    root: &RootHash,
    out: &mut dyn Write,
    progress: &dyn Progress,
) -> Result<ArchiveReport, ArchiveError> {
    let snapshot = Snapshot::open(store, root)?;
    let links = object::read_links(store, snapshot.root());
    let links = links.map_err(|source| ArchiveError::Object { path: String::new(), source })?;
    let mut groups = HashMap::new();
    for (number, group) in links.groups.into_iter().enumerate() {
        groups.extend(group.into_iter().map(|path| (path, number)));
    }
    // The name of each group that was written with its bytes: the order of the walk is not the order of paths.
    let mut written: HashMap<usize, Vec<u8>> = HashMap::new();
    let mut writer = Writer { store, out, progress, report: ArchiveReport::default() };
    let mut waiting = vec![(Vec::new(), snapshot.find(b"")?)];
    while let Some((path, entry)) = waiting.pop() {
        let group = groups.get(&path);
        writer.entry(&path, &entry, group.and_then(|group| written.get(group)))?;
        if let Some(group) = group {
            written.entry(*group).or_insert_with(|| path.clone());
        }
        if let EntryBody::Directory { listing } = &entry.body {
            let found = object::read_listing(store, listing);
            let found = found.map_err(|source| ViewError::Object { path: show(&path), source })?;
            for (name, entry) in found.entries.into_iter().rev() {
                let mut child = path.clone();
                if !child.is_empty() {
                    child.push(b'/');
                }
                child.extend_from_slice(&name);
                waiting.push((child, entry));
            }
        }
    }
    writer.bytes(&[0; 2 * BLOCK])?;
    writer.out.flush().map_err(ArchiveError::Stream)?;
    Ok(writer.report)
}

struct Writer<'a> {
    store: &'a dyn BlockStore,
    out: &'a mut dyn Write,
    progress: &'a dyn Progress,
    report: ArchiveReport,
}

/// What a header says beside the metadata.
struct Head<'a> {
    kind: tar::EntryType,
    /// Bytes that follow.
    size: u64,
    link: &'a [u8],
    /// Size of a sparse file with its holes.
    real_size: Option<u64>,
    /// Of a device node.
    number: DeviceNumber,
}

impl Writer<'_> {
    fn bytes(&mut self, bytes: &[u8]) -> Result<(), ArchiveError> {
        self.out.write_all(bytes).map_err(ArchiveError::Stream)
    }

    fn pad(&mut self, len: u64) -> Result<(), ArchiveError> {
        let over = (len % BLOCK as u64) as usize;
        if over == 0 { Ok(()) } else { self.bytes(&[0; BLOCK][over..]) }
    }

    fn entry(&mut self, path: &[u8], entry: &Entry, first: Option<&Vec<u8>>) -> Result<(), ArchiveError> {
        self.report.entries += 1;
        let head = |kind| Head { kind, size: 0, link: b"", real_size: None, number: DeviceNumber::NONE };
        if let EntryBody::File(content) = &entry.body {
            self.report.files += 1;
            self.report.bytes += content.size();
        }
        if matches!(entry.body, EntryBody::Socket) {
            // An archive has no kind for it.
            self.report.skip(path);
            return Ok(());
        }
        if let Some(first) = first {
            let head = Head { link: first, ..head(tar::EntryType::Link) };
            return self.head(path, &entry.meta, &head);
        }
        match &entry.body {
            EntryBody::Directory { .. } => self.head(path, &entry.meta, &head(tar::EntryType::Directory)),
            EntryBody::Symlink { target } => {
                self.head(path, &entry.meta, &Head { link: target, ..head(tar::EntryType::Symlink) })
            }
            EntryBody::Fifo => self.head(path, &entry.meta, &head(tar::EntryType::Fifo)),
            EntryBody::CharacterDevice(number) => {
                self.head(path, &entry.meta, &Head { number: *number, ..head(tar::EntryType::Char) })
            }
            EntryBody::BlockDevice(number) => {
                self.head(path, &entry.meta, &Head { number: *number, ..head(tar::EntryType::Block) })
            }
            EntryBody::Socket => Ok(()),
            EntryBody::File(content) => self.file(path, &entry.meta, content),
        }
    }

    fn file(&mut self, path: &[u8], meta: &Meta, content: &Content) -> Result<(), ArchiveError> {
        let source = |source| ArchiveError::Object { path: show(path), source };
        let size = content.size();
        let kind = tar::EntryType::Regular;
        let head = Head { kind, size, link: b"", real_size: None, number: DeviceNumber::NONE };
        let extents = match content {
            Content::Nothing { size: 0 } | Content::Whole { .. } => None,
            Content::Nothing { .. } => Some(Vec::new()),
            Content::Mapped { .. } => {
                let map = object::read_map(self.store, content).map_err(source)?;
                map.map(|map| map.extents).filter(|extents| *extents != [Extent { start: 0, len: size }])
            }
        };
        let mut reader = FileReader::new(self.store, content).map_err(source)?;
        let Some(extents) = extents else {
            self.head(path, meta, &head)?;
            self.copy(path, &mut reader, size)?;
            return self.pad(size);
        };
        // GNU.sparse 1.0: the map in decimal lines, padded to a block, then the data ranges.
        // Readers take the end of the last range for the file's end: an empty one stands behind a last hole.
        let end = extents.last().map_or(0, Extent::end);
        let last = (end < size).then_some(Extent { start: size, len: 0 });
        let mut map = format!("{}\n", extents.len() + usize::from(last.is_some()));
        for extent in extents.iter().chain(&last) {
            map.push_str(&format!("{}\n{}\n", extent.start, extent.len));
        }
        let map_len = map.len().next_multiple_of(BLOCK);
        let stored = map_len as u64 + extents.iter().map(|extent| extent.len).sum::<u64>();
        self.head(path, meta, &Head { size: stored, real_size: Some(size), ..head })?;
        self.bytes(map.as_bytes())?;
        self.pad(map.len() as u64)?;
        let mut at = 0;
        for extent in &extents {
            reader.skip_hole(extent.start - at).map_err(ArchiveError::Stream)?;
            self.copy(path, &mut reader, extent.len)?;
            at = extent.end();
        }
        self.pad(stored)
    }

    fn copy(&mut self, path: &[u8], reader: &mut FileReader<'_>, mut len: u64) -> Result<(), ArchiveError> {
        let mut buffer = vec![0; 64 * 1024];
        while len > 0 {
            let want = buffer.len().min(usize::try_from(len).unwrap_or(usize::MAX));
            let read = reader.read(&mut buffer[..want]).map_err(ArchiveError::Stream)?;
            if read == 0 {
                let problem = "its blocks end before its size".to_owned();
                return Err(ArchiveError::Entry { path: show(path), problem });
            }
            self.bytes(&buffer[..read])?;
            self.progress.bytes_done(read as u64);
            len -= read as u64;
        }
        Ok(())
    }

    fn head(&mut self, path: &[u8], meta: &Meta, head: &Head<'_>) -> Result<(), ArchiveError> {
        let mut name = b"./".to_vec();
        name.extend_from_slice(path);
        if head.kind == tar::EntryType::Directory && !path.is_empty() {
            name.push(b'/');
        }
        let mut link = head.link.to_vec();
        if head.kind == tar::EntryType::Link {
            link.splice(..0, *b"./");
        }
        let mut records = Vec::new();
        if [&name, &link].into_iter().any(|text| std::str::from_utf8(text).is_err()) {
            pax::push(&mut records, b"hdrcharset", b"BINARY");
        }
        if let Some(real) = head.real_size {
            pax::push(&mut records, b"GNU.sparse.major", b"1");
            pax::push(&mut records, b"GNU.sparse.minor", b"0");
            pax::push(&mut records, b"GNU.sparse.name", &name);
            pax::push(&mut records, b"GNU.sparse.realsize", real.to_string().as_bytes());
        } else if name.len() > NAME_FIELD {
            pax::push(&mut records, b"path", &name);
        }
        if link.len() > NAME_FIELD {
            pax::push(&mut records, b"linkpath", &link);
        }
        if head.size > OCTAL_SIZE_MAX {
            pax::push(&mut records, b"size", head.size.to_string().as_bytes());
        }
        let mtime = meta.mtime;
        let plain = u64::try_from(mtime.seconds).ok().filter(|seconds| *seconds <= OCTAL_SIZE_MAX);
        if mtime.nanoseconds != 0 || plain.is_none() {
            pax::push(&mut records, b"mtime", decimal(mtime).as_bytes());
        }
        if head.kind != tar::EntryType::Link {
            let xattrs = object::read_xattrs(self.store, &meta.xattrs);
            let xattrs = xattrs.map_err(|source| ArchiveError::Object { path: show(path), source })?;
            for xattr in xattrs.0 {
                let key = [b"SCHILY.xattr.".as_slice(), &pax::escape(&xattr.name)].concat();
                pax::push(&mut records, &key, &xattr.value);
            }
        }
        if !records.is_empty() {
            let mut header = tar::Header::new_ustar();
            header.set_entry_type(tar::EntryType::XHeader);
            put_name(&mut header, b"./PaxHeaders/entry", b"");
            header.set_mode(0o644);
            header.set_size(records.len() as u64);
            header.set_cksum();
            self.bytes(header.as_bytes())?;
            self.bytes(&records)?;
            self.pad(records.len() as u64)?;
        }
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(head.kind);
        put_name(&mut header, &name, &link);
        header.set_mode(u32::from(meta.mode));
        header.set_uid(super::OWNER);
        header.set_gid(super::OWNER);
        header.set_size(head.size.min(OCTAL_SIZE_MAX));
        header.set_mtime(plain.unwrap_or(0));
        if matches!(head.kind, tar::EntryType::Char | tar::EntryType::Block) {
            let DeviceNumber { major, minor } = head.number;
            let wrong =
                |error: std::io::Error| ArchiveError::Entry { path: show(path), problem: error.to_string() };
            header.set_device_major(major).map_err(wrong)?;
            header.set_device_minor(minor).map_err(wrong)?;
        }
        header.set_cksum();
        self.bytes(header.as_bytes())
    }
}

/// The fields are bytes: the crate's setters refuse what is not a portable path.
fn put_name(header: &mut tar::Header, name: &[u8], link: &[u8]) {
    let fields = header.as_old_mut();
    for (field, text) in [(&mut fields.name, name), (&mut fields.linkname, link)] {
        let len = text.len().min(field.len());
        field[..len].copy_from_slice(&text[..len]);
    }
}

/// Seconds with nine decimals; before 1970 the whole number is negative, as GNU tar writes it.
fn decimal(time: Time) -> String {
    if time.seconds >= 0 || time.nanoseconds == 0 {
        return format!("{}.{:09}", time.seconds, time.nanoseconds);
    }
    // -1.25 is second -2 and 750,000,000 nanoseconds.
    let whole = (time.seconds + 1).unsigned_abs();
    format!("-{whole}.{:09}", 1_000_000_000 - time.nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_decimal_numbers() {
        let text = |seconds, nanoseconds| decimal(Time { seconds, nanoseconds });
        assert_eq!(text(5, 7), "5.000000007");
        assert_eq!(text(-2, 750_000_000), "-1.250000000");
        assert_eq!(text(-1, 500_000_000), "-0.500000000");
        assert_eq!(text(-3, 0), "-3.000000000");
    }
}
