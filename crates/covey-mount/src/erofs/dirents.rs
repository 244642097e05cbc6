//! A directory's blocks: in each, twelve bytes per name and then the names; sorted by bytes over all of them,
//! `.` and `..` among the others.

use super::BLOCK_BYTES;

const DIRENT_BYTES: usize = 12;

/// Kinds of names as the format numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum FileType {
    File = 1,
    Directory = 2,
    CharacterDevice = 3,
    BlockDevice = 4,
    Fifo = 5,
    Socket = 6,
    Symlink = 7,
}

#[derive(Debug)]
struct Dirent {
    inode: u64,
    file_type: FileType,
    name: std::ops::Range<u32>,
}

/// Names of one directory, added in the order of their bytes.
#[derive(Debug, Default)]
pub(crate) struct Dirents {
    names: Vec<u8>,
    entries: Vec<Dirent>,
}

/// A directory's bytes and where in them the inodes of itself and of its parent stand.
#[derive(Debug)]
pub(crate) struct EncodedDir {
    pub(crate) bytes: Vec<u8>,
    pub(crate) own_at: usize,
    pub(crate) parent_at: usize,
}

impl Dirents {
    /// Adds the next name; returns its number, by which its inode can be set later.
    pub(crate) fn push(&mut self, name: &[u8], file_type: FileType, inode: u64) -> usize {
        let start = self.names.len() as u32;
        self.names.extend_from_slice(name);
        self.entries.push(Dirent { inode, file_type, name: start..self.names.len() as u32 });
        self.entries.len() - 1
    }

    pub(crate) fn set_inode(&mut self, number: usize, inode: u64) {
        if let Some(entry) = self.entries.get_mut(number) {
            entry.inode = inode;
        }
    }

    pub(crate) fn name(&self, number: usize) -> &[u8] {
        self.entries
            .get(number)
            .map_or(&[], |entry| &self.names[entry.name.start as usize..entry.name.end as usize])
    }

    /// The directory's bytes; `.` and `..` name inode 0 until they are filled in.
    pub(crate) fn encode(&self) -> EncodedDir {
        let dots = [b".".as_slice(), b".."];
        let mut all: Vec<(&[u8], FileType, u64)> = Vec::with_capacity(self.entries.len() + 2);
        let mut next_dot = 0;
        for (number, entry) in self.entries.iter().enumerate() {
            let name = self.name(number);
            while next_dot < dots.len() && dots[next_dot] < name {
                all.push((dots[next_dot], FileType::Directory, 0));
                next_dot += 1;
            }
            all.push((name, entry.file_type, entry.inode));
        }
        all.extend(dots[next_dot..].iter().map(|dot| (*dot, FileType::Directory, 0)));
        let mut encoded = EncodedDir { bytes: Vec::new(), own_at: 0, parent_at: 0 };
        let mut rest = all.as_slice();
        while !rest.is_empty() {
            let mut used = 0;
            let fits = |(name, ..): &&(&[u8], FileType, u64)| {
                used += DIRENT_BYTES + name.len();
                used <= BLOCK_BYTES
            };
            let (block, behind) = rest.split_at(rest.iter().take_while(fits).count());
            encoded.bytes.resize(encoded.bytes.len().next_multiple_of(BLOCK_BYTES), 0);
            put_block(block, &mut encoded);
            rest = behind;
        }
        encoded
    }
}

fn put_block(block: &[(&[u8], FileType, u64)], out: &mut EncodedDir) {
    let mut name_at = block.len() * DIRENT_BYTES;
    for (name, file_type, inode) in block {
        match *name {
            b"." => out.own_at = out.bytes.len(),
            b".." => out.parent_at = out.bytes.len(),
            _ => {}
        }
        out.bytes.extend_from_slice(&inode.to_le_bytes());
        out.bytes.extend_from_slice(&(name_at as u16).to_le_bytes());
        out.bytes.extend_from_slice(&[*file_type as u8, 0]);
        name_at += name.len();
    }
    block.iter().for_each(|(name, ..)| out.bytes.extend_from_slice(name));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_with_the_dots_among_them_and_blocks_are_full() {
        let mut dirents = Dirents::default();
        dirents.push(b"+a", FileType::File, 1);
        for number in 0..400 {
            dirents.push(format!("name-{number:04}").as_bytes(), FileType::File, 2);
        }
        let encoded = dirents.encode();
        let name_at = |at: usize| {
            let block = at - at % BLOCK_BYTES;
            let offset = u16::from_le_bytes([encoded.bytes[at + 8], encoded.bytes[at + 9]]);
            block + usize::from(offset)
        };
        assert_eq!(encoded.own_at, 12, "`.` sorts behind `+a`");
        assert_eq!(encoded.bytes[name_at(encoded.own_at)], b'.');
        assert_eq!(&encoded.bytes[name_at(encoded.parent_at)..][..2], b"..");
        assert_eq!(encoded.bytes.len() / BLOCK_BYTES, 2);
        let first_of_second = name_at(BLOCK_BYTES);
        assert_eq!(&encoded.bytes[first_of_second..][..5], b"name-");
    }

    #[test]
    fn an_empty_directory_has_its_dots() {
        let encoded = Dirents::default().encode();
        assert_eq!((encoded.own_at, encoded.parent_at, encoded.bytes.len()), (0, 12, 27));
    }
}
