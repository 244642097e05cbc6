//! The members of a tar stream: headers, long names and records put together, data left in the stream.
//!
//! Headers are read by the `tar` crate; its own iterator is not used, because it reads records line by line and an
//! extended attribute may hold a line's end, and because it has no limit for names and records.

use std::io::{self, Read};

use crate::manifest::{Extent, PATH_BYTES_MAX};

use super::{ArchiveError, pax};

const BLOCK: usize = 512;
/// Bytes of one member's pax records.
const RECORDS_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Bytes of the map of one sparse file.
const SPARSE_MAP_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// Data ranges of one sparse file.
const EXTENTS_MAX: usize = 16 * 1024 * 1024;

/// One member of an archive, before its data.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) header: tar::Header,
    /// As the archive says it.
    pub(super) name: Vec<u8>,
    /// Target of a link.
    pub(super) link: Vec<u8>,
    /// Key and value, in their order.
    pub(super) records: Vec<(Vec<u8>, Vec<u8>)>,
    /// Size of the file with its holes.
    pub(super) size: u64,
    /// Which ranges of it the archive holds; none: all of it.
    pub(super) extents: Option<Vec<Extent>>,
}

impl Member {
    /// A record's value; the last one counts.
    pub(super) fn record(&self, key: &[u8]) -> Option<&[u8]> {
        self.records.iter().rev().find(|(known, _)| known == key).map(|(_, value)| value.as_slice())
    }

    pub(super) fn wrong(&self, problem: impl Into<String>) -> ArchiveError {
        ArchiveError::Entry {
            path: String::from_utf8_lossy(&self.name).into_owned(),
            problem: problem.into(),
        }
    }

    fn number(&self, key: &[u8]) -> Result<Option<u64>, ArchiveError> {
        let Some(value) = self.record(key) else { return Ok(None) };
        let number = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        number.map(Some).ok_or_else(|| self.wrong(format!("`{}` is no number", String::from_utf8_lossy(key))))
    }
}

/// A tar stream. Between two members the data of the first is skipped where it was not read.
pub(super) struct Members<'a> {
    inner: &'a mut dyn Read,
    /// Bytes of the current member's data that are still in the stream, and of its padding.
    left: u64,
    padding: u64,
}

fn cut_off() -> ArchiveError {
    let problem = "the archive ends here without its end mark; it was cut off".to_owned();
    ArchiveError::Entry { path: "(end)".to_owned(), problem }
}

impl<'a> Members<'a> {
    pub(super) fn new(inner: &'a mut dyn Read) -> Self {
        Self { inner, left: 0, padding: 0 }
    }

    /// The next member; none behind the end mark.
    pub(super) fn next(&mut self) -> Result<Option<Member>, ArchiveError> {
        let (mut name, mut link, mut records) = (None, None, Vec::new());
        loop {
            let Some(header) = self.header()? else { return Ok(None) };
            let size = header.entry_size().map_err(|error| named(&header, &error.to_string()))?;
            self.expect(size);
            match header.entry_type() {
                tar::EntryType::GNULongName => name = Some(until_nul(self.small(&header, size)?)),
                tar::EntryType::GNULongLink => link = Some(until_nul(self.small(&header, size)?)),
                // Defaults for what follows; nobody but `git archive` (a comment) is known to write them.
                tar::EntryType::XGlobalHeader => drop(self.small(&header, size)?),
                tar::EntryType::XHeader => {
                    let bytes = self.small(&header, size)?;
                    let parsed = pax::parse(&bytes).ok_or_else(|| named(&header, "malformed pax records"))?;
                    records = parsed.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect();
                }
                _ => {
                    let name = name.unwrap_or_else(|| header.path_bytes().into_owned());
                    let link = link.or_else(|| header.link_name_bytes().map(|link| link.into_owned()));
                    let link = link.unwrap_or_default();
                    return self
                        .member(Member { header, name, link, records, size, extents: None })
                        .map(Some);
                }
            }
        }
    }

    fn member(&mut self, mut member: Member) -> Result<Member, ArchiveError> {
        if let Some(size) = member.number(b"size")? {
            member.size = size;
            self.expect(size);
        }
        if let Some(path) = member.record(b"path") {
            member.name = path.to_vec();
        }
        if let Some(link) = member.record(b"linkpath") {
            member.link = link.to_vec();
        }
        if member.header.entry_type() == tar::EntryType::GNUSparse {
            return self.old_sparse(member);
        }
        match (member.number(b"GNU.sparse.major")?, member.number(b"GNU.sparse.minor")?) {
            (None, None) if member.record(b"GNU.sparse.map").is_none() => {}
            (Some(1), Some(0)) => {
                if let Some(name) = member.record(b"GNU.sparse.name") {
                    member.name = name.to_vec();
                }
                let real = member.number(b"GNU.sparse.realsize")?;
                member.size = real.ok_or_else(|| member.wrong("a sparse file without its size"))?;
                member.extents = Some(self.sparse_map(&member)?);
            }
            _ => {
                return Err(
                    member.wrong("a sparse file of format 0.x; write it with `tar --sparse-version=1.0`")
                );
            }
        }
        self.check_extents(&member)?;
        Ok(member)
    }

    /// What the ranges hold is exactly what is left in the stream, and they lie in the file.
    fn check_extents(&self, member: &Member) -> Result<(), ArchiveError> {
        let Some(extents) = &member.extents else { return Ok(()) };
        let (mut at, mut sum) = (0_u64, 0_u64);
        for extent in extents {
            let end = extent.start.checked_add(extent.len).filter(|end| *end <= member.size);
            let Some(end) = end.filter(|_| extent.start >= at) else {
                return Err(member.wrong("a sparse file whose ranges overlap or leave it"));
            };
            at = end;
            sum += extent.len;
        }
        if sum == self.left {
            return Ok(());
        }
        Err(member.wrong("a sparse file whose ranges are not as long as its data"))
    }

    /// Decimal lines: number of ranges, then offset and length of each; padded to a block.
    fn sparse_map(&mut self, member: &Member) -> Result<Vec<Extent>, ArchiveError> {
        let bad = || member.wrong("a sparse file with a malformed map");
        let mut numbers: Vec<u64> = Vec::new();
        let (mut read, mut current) = (0, None);
        loop {
            let mut block = [0; BLOCK];
            self.take_exact(&mut block)?;
            read += BLOCK as u64;
            for byte in block {
                match byte {
                    b'0'..=b'9' => {
                        let digit = u64::from(byte - b'0');
                        let number =
                            current.unwrap_or(0_u64).checked_mul(10).and_then(|n| n.checked_add(digit));
                        current = Some(number.ok_or_else(bad)?);
                    }
                    b'\n' => numbers.push(current.take().ok_or_else(bad)?),
                    _ => return Err(bad()),
                }
                let wanted = numbers.first().map(|count| count.saturating_mul(2).saturating_add(1));
                if wanted.is_some_and(|wanted| wanted == numbers.len() as u64) {
                    return Ok(numbers[1..]
                        .chunks_exact(2)
                        .filter(|pair| pair[1] > 0)
                        .map(|pair| Extent { start: pair[0], len: pair[1] })
                        .collect());
                }
            }
            if read >= SPARSE_MAP_BYTES_MAX || numbers.len() > EXTENTS_MAX * 2 {
                return Err(bad());
            }
        }
    }

    /// GNU tar's older way: ranges in the header and in blocks behind it.
    fn old_sparse(&mut self, mut member: Member) -> Result<Member, ArchiveError> {
        let Some(gnu) = member.header.as_gnu() else {
            return Err(member.wrong("a sparse file without a map"));
        };
        let mut extents = Vec::new();
        let mut add = |blocks: &[tar::GnuSparseHeader]| -> io::Result<()> {
            for block in blocks.iter().filter(|block| !block.is_empty()) {
                let (start, len) = (block.offset()?, block.length()?);
                if len > 0 {
                    extents.push(Extent { start, len });
                }
            }
            Ok(())
        };
        let bad = |error: io::Error| named(&member.header, &error.to_string());
        add(&gnu.sparse).map_err(bad)?;
        let real = gnu.real_size().map_err(bad)?;
        let mut more = gnu.is_extended();
        let mut blocks = 0;
        while more {
            let mut block = tar::GnuExtSparseHeader::new();
            // Not part of the member's data.
            self.inner.read_exact(block.as_mut_bytes()).map_err(broken)?;
            add(block.sparse()).map_err(bad)?;
            more = block.is_extended();
            blocks += 1;
            if blocks > EXTENTS_MAX / 21 {
                return Err(named(&member.header, "a sparse file with too many ranges"));
            }
        }
        (member.size, member.extents) = (real, Some(extents));
        self.check_extents(&member)?;
        Ok(member)
    }

    fn expect(&mut self, size: u64) {
        self.left = size;
        self.padding = size.next_multiple_of(BLOCK as u64).saturating_sub(size);
    }

    fn header(&mut self) -> Result<Option<tar::Header>, ArchiveError> {
        let rest = self.left.saturating_add(self.padding);
        let skipped = io::copy(&mut (&mut *self.inner).take(rest), &mut io::sink());
        if skipped.map_err(ArchiveError::Stream)? < rest {
            return Err(cut_off());
        }
        self.expect(0);
        let mut header = tar::Header::new_old();
        self.inner.read_exact(header.as_mut_bytes()).map_err(broken)?;
        if header.as_bytes().iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let bytes = header.as_bytes();
        let sum: u32 = bytes.iter().map(|byte| u32::from(*byte)).sum();
        let field: u32 = bytes[148..156].iter().map(|byte| u32::from(*byte)).sum();
        if header.cksum().ok() != Some(sum - field + 8 * 32) {
            return Err(named(
                &header,
                "its header is damaged, or this is no tar archive (compressed ones are unpacked first)",
            ));
        }
        Ok(Some(header))
    }

    /// A name or records, which are read whole.
    fn small(&mut self, header: &tar::Header, size: u64) -> Result<Vec<u8>, ArchiveError> {
        let limit = RECORDS_BYTES_MAX.max(PATH_BYTES_MAX as u64);
        if size > limit {
            return Err(named(header, &format!("{size} bytes of names and records; the limit is {limit}")));
        }
        let mut bytes = Vec::new();
        (&mut *self).take(size).read_to_end(&mut bytes).map_err(ArchiveError::Stream)?;
        if (bytes.len() as u64) < size { Err(cut_off()) } else { Ok(bytes) }
    }

    /// Data of the current member.
    pub(super) fn take_exact(&mut self, buffer: &mut [u8]) -> Result<(), ArchiveError> {
        self.read_exact(buffer).map_err(broken)
    }
}

impl Read for Members<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = self.inner.read(&mut buffer[..len])?;
        self.left -= read as u64;
        Ok(read)
    }
}

fn broken(error: io::Error) -> ArchiveError {
    if error.kind() == io::ErrorKind::UnexpectedEof { cut_off() } else { ArchiveError::Stream(error) }
}

fn named(header: &tar::Header, problem: &str) -> ArchiveError {
    let path = String::from_utf8_lossy(&header.path_bytes()).into_owned();
    ArchiveError::Entry { path, problem: problem.to_owned() }
}

fn until_nul(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes.truncate(end);
    bytes
}
