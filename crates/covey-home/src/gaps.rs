//! What a materialize could not put back, remembered beside the stat cache, so that a later secure does not take it
//! for deleted.
//!
//! What stays true: as long as nothing stands in a gap's place, a secure keeps the entry that the snapshot had, so a
//! lost block never becomes a file that was never there; when the block is mended, the file is whole again. What an
//! agent puts in the place of a gap counts. Described in `docs/formats/home-store.md`, section 4.1.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::manifest::{
    Cursor, EntryKind, EntryView, LinkGroup, MalformedObject, PATH_BYTES_MAX, Time, put_varint,
};
use crate::sys::Stat;

const MAGIC: &[u8; 8] = b"COVEYGAP";
const VERSION: u32 = 1;
/// Gaps of one home. A home that has lost more is not brought up: its agent would work in ruins.
pub(crate) const GAPS_MAX: usize = 100_000;
/// A file above this was not written by us.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// One name that could not be put back as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GapEntry {
    /// The entry that the snapshot has, encoded.
    pub(crate) entry: Vec<u8>,
    /// Inode and ctime of what was put in its place, for example a file without its attributes; none: nothing.
    pub(crate) instead: Option<(u64, Time)>,
}

impl GapEntry {
    /// Whether what stands there is still only what the materialize has put there.
    pub(crate) fn is_untouched(&self, there: Option<&Stat>) -> bool {
        match (self.instead, there) {
            (None, None) => true,
            (Some(instead), Some(stat)) => instead == (stat.inode, stat.ctime),
            _ => false,
        }
    }

    pub(crate) fn is_directory(&self) -> bool {
        EntryView::parse(&self.entry).is_ok_and(|view| view.kind == EntryKind::Directory)
    }
}

/// The gaps of one working copy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Gaps {
    /// By the path from the home's root.
    pub(crate) entries: BTreeMap<Vec<u8>, GapEntry>,
    /// Names of one inode, all of them gaps.
    pub(crate) links: Vec<LinkGroup>,
    /// Regular files below directories that could not be read, and their bytes, as the root counts them.
    pub(crate) hidden: (u64, u64),
}

/// Where the gaps of the working copy with this stat cache stand.
fn path_beside(stat_cache: &Path) -> PathBuf {
    stat_cache.with_added_extension("gaps")
}

impl Gaps {
    /// Reads what stands beside the stat cache; nothing where there is no file.
    ///
    /// # Errors
    /// When it cannot be read or is damaged: then it is not known what may be taken for deleted.
    pub(crate) fn load(stat_cache: &Path) -> io::Result<Self> {
        let path = path_beside(stat_cache);
        let bytes = match std::fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(error),
            Ok(metadata) if metadata.len() > FILE_BYTES_MAX => return Err(damaged(&path)),
            Ok(_) => std::fs::read(&path)?,
        };
        let (covered, checksum) =
            bytes.split_at_checked(bytes.len().saturating_sub(32)).ok_or_else(|| damaged(&path))?;
        if blake3::hash(covered).as_bytes() != checksum {
            return Err(damaged(&path));
        }
        Self::decode(covered).map_err(|_| damaged(&path))
    }

    /// Writes them durably beside the stat cache; without any, takes the file away.
    pub(crate) fn save(&self, stat_cache: &Path) -> io::Result<()> {
        let path = path_beside(stat_cache);
        let sync = || match path.parent() {
            Some(parent) if parent != Path::new("") => File::open(parent)?.sync_all(),
            _ => File::open(".")?.sync_all(),
        };
        if self.entries.is_empty() {
            return match std::fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                Err(error) => Err(error),
                Ok(()) => sync(),
            };
        }
        let temporary = path.with_added_extension("new");
        let mut bytes = self.encode();
        let checksum = blake3::hash(&bytes);
        bytes.extend_from_slice(checksum.as_bytes());
        let mut file = File::create(&temporary)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, &path)?;
        sync()
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&VERSION.to_le_bytes());
        put_varint(&mut out, self.hidden.0);
        put_varint(&mut out, self.hidden.1);
        put_varint(&mut out, self.entries.len() as u64);
        for (path, gap) in &self.entries {
            put_bytes(&mut out, path);
            put_bytes(&mut out, &gap.entry);
            match gap.instead {
                None => out.push(0),
                Some((inode, ctime)) => {
                    out.push(1);
                    out.extend_from_slice(&inode.to_le_bytes());
                    out.extend_from_slice(&ctime.seconds.to_le_bytes());
                    out.extend_from_slice(&ctime.nanoseconds.to_le_bytes());
                }
            }
        }
        put_varint(&mut out, self.links.len() as u64);
        for group in &self.links {
            put_varint(&mut out, group.len() as u64);
            group.iter().for_each(|path| put_bytes(&mut out, path));
        }
        out
    }

    fn decode(bytes: &[u8]) -> Result<Self, MalformedObject> {
        let mut cursor = Cursor::new(bytes, "record of gaps");
        if cursor.take(8)? != MAGIC || cursor.u32()? != VERSION {
            return Err(cursor.malformed("not a record of gaps"));
        }
        let hidden = (cursor.varint()?, cursor.varint()?);
        let mut gaps = Self { hidden, ..Self::default() };
        for _ in 0..cursor.length(GAPS_MAX, "too many gaps")? {
            let path = take_bytes(&mut cursor)?.to_vec();
            let entry = take_bytes(&mut cursor)?.to_vec();
            let instead = match cursor.u8()? {
                0 => None,
                _ => {
                    let inode = cursor.u64()?;
                    Some((inode, Time { seconds: cursor.i64()?, nanoseconds: cursor.u32()? }))
                }
            };
            gaps.entries.insert(path, GapEntry { entry, instead });
        }
        for _ in 0..cursor.length(GAPS_MAX, "too many groups")? {
            let count = cursor.length(GAPS_MAX, "too many names")?;
            let group = (0..count).map(|_| take_bytes(&mut cursor).map(<[u8]>::to_vec));
            gaps.links.push(group.collect::<Result<_, _>>()?);
        }
        cursor.end()?;
        Ok(gaps)
    }

    /// The gaps directly in a directory, ascending by name.
    pub(crate) fn in_dir<'g>(&'g self, dir: &[u8]) -> Vec<(&'g [u8], &'g GapEntry)> {
        let mut below = dir.to_vec();
        if !dir.is_empty() {
            below.push(b'/');
        }
        let names = self.entries.range(below.clone()..).take_while(|(path, _)| path.starts_with(&below));
        let names = names.map(|(path, gap)| (&path[below.len()..], gap));
        let mut found: Vec<_> = names.filter(|(name, _)| !name.is_empty() && !name.contains(&b'/')).collect();
        found.sort_unstable_by_key(|(name, _)| *name);
        found
    }
}

fn damaged(path: &Path) -> io::Error {
    let text = format!("{} is damaged; materialize the home again", path.display());
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn take_bytes<'a>(cursor: &mut Cursor<'a>) -> Result<&'a [u8], MalformedObject> {
    let len = cursor.length(PATH_BYTES_MAX, "a path or entry that is too long")?;
    cursor.take(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gap(byte: u8, instead: Option<(u64, Time)>) -> GapEntry {
        GapEntry { entry: vec![byte; 40], instead }
    }

    #[test]
    fn a_record_is_read_as_it_is_written_and_damage_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("stat-cache");
        assert_eq!(Gaps::load(&cache).unwrap(), Gaps::default());
        let time = Time { seconds: -5, nanoseconds: 7 };
        let entries = BTreeMap::from([
            (b"a".to_vec(), gap(1, None)),
            (b"d/b\xff".to_vec(), gap(2, Some((9, time)))),
            (b"d/e/f".to_vec(), gap(3, None)),
            (b"d-".to_vec(), gap(4, None)),
        ]);
        let links = vec![vec![b"a".to_vec(), b"d/e/f".to_vec()]];
        let gaps = Gaps { entries, links, hidden: (3, 4000) };
        gaps.save(&cache).unwrap();
        assert_eq!(Gaps::load(&cache).unwrap(), gaps);
        let names = |dir: &[u8]| gaps.in_dir(dir).iter().map(|(name, _)| name.to_vec()).collect::<Vec<_>>();
        assert_eq!(names(b""), [b"a".to_vec(), b"d-".to_vec()]);
        assert_eq!(names(b"d"), [b"b\xff".to_vec()]);
        assert_eq!(names(b"d/e"), [b"f".to_vec()]);
        let path = path_beside(&cache);
        let good = std::fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, bad).unwrap();
            assert!(Gaps::load(&cache).is_err(), "{at}");
        }
        Gaps::default().save(&cache).unwrap();
        assert!(!path.exists());
    }
}
