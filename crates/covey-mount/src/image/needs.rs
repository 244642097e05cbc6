//! Which contents an image refers to, in the order of the tree: a file beside the image, so that the cache can be
//! filled, and trimmed, without reading the manifest again.
//!
//! A content that several files share may stand there several times.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

use covey_home::manifest::{Blob, Content};
use covey_types::BlockHash;

const MAGIC: &[u8; 8] = b"COVEYNDS";
/// An inline content map's limit in the manifest format, with room; guards against a damaged file.
const MAP_BYTES_MAX: u32 = 64 * 1024;
/// Blocks of a content map at most, as in the manifest format (512 MiB of map).
const MAP_BLOCKS_MAX: u32 = 128;

#[derive(Debug)]
pub(super) struct NeedsWriter {
    out: BufWriter<File>,
}

impl NeedsWriter {
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let mut out = BufWriter::with_capacity(128 * 1024, File::create_new(path)?);
        out.write_all(MAGIC)?;
        Ok(Self { out })
    }

    pub(super) fn push(&mut self, content: &Content) -> io::Result<()> {
        match content {
            Content::Nothing { .. } => Ok(()),
            Content::Whole { size, block } => {
                self.out.write_all(&[1])?;
                self.out.write_all(&size.to_le_bytes())?;
                self.out.write_all(block.as_bytes())
            }
            Content::Mapped { size, map: Blob::Inline(bytes) } => {
                self.out.write_all(&[2])?;
                self.out.write_all(&size.to_le_bytes())?;
                self.out.write_all(&(bytes.len() as u32).to_le_bytes())?;
                self.out.write_all(bytes)
            }
            Content::Mapped { size, map: Blob::Blocks { len, blocks } } => {
                self.out.write_all(&[3])?;
                self.out.write_all(&size.to_le_bytes())?;
                self.out.write_all(&len.to_le_bytes())?;
                self.out.write_all(&(blocks.len() as u32).to_le_bytes())?;
                blocks.iter().try_for_each(|block| self.out.write_all(block.as_bytes()))
            }
        }
    }

    pub(super) fn finish(mut self) -> io::Result<()> {
        self.out.write_all(&[0])?;
        self.out.flush()
    }
}

/// The contents that an image refers to, in the order of its tree, not necessarily distinct.
#[derive(Debug)]
pub struct Needs {
    input: BufReader<File>,
    done: bool,
}

impl Needs {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut input = BufReader::with_capacity(128 * 1024, File::open(path)?);
        if array::<8>(&mut input)? != *MAGIC {
            return Err(damaged());
        }
        Ok(Self { input, done: false })
    }

    fn read(&mut self) -> io::Result<Option<Content>> {
        let input = &mut self.input;
        let [kind] = array(input)?;
        if kind == 0 {
            return Ok(None);
        }
        let size = u64::from_le_bytes(array(input)?);
        match kind {
            1 => Ok(Some(Content::Whole { size, block: BlockHash::from_bytes(array(input)?) })),
            2 => {
                let len = u32::from_le_bytes(array(input)?);
                if len > MAP_BYTES_MAX {
                    return Err(damaged());
                }
                let mut bytes = vec![0; len as usize];
                input.read_exact(&mut bytes)?;
                Ok(Some(Content::Mapped { size, map: Blob::Inline(bytes) }))
            }
            3 => {
                let len = u64::from_le_bytes(array(input)?);
                let count = u32::from_le_bytes(array(input)?);
                if count > MAP_BLOCKS_MAX {
                    return Err(damaged());
                }
                let blocks = (0..count)
                    .map(|_| array(input).map(BlockHash::from_bytes))
                    .collect::<io::Result<Vec<_>>>()?;
                Ok(Some(Content::Mapped { size, map: Blob::Blocks { len, blocks } }))
            }
            _ => Err(damaged()),
        }
    }
}

impl Iterator for Needs {
    type Item = io::Result<Content>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let next = self.read().transpose();
        self.done = !matches!(next, Some(Ok(_)));
        next
    }
}

fn array<const N: usize>(input: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the list of needed contents is damaged")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_content_is_read_back_and_a_cut_list_is_an_error() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("needs");
        let block = BlockHash::of(b"x");
        let contents = [
            Content::Whole { size: 1, block },
            Content::Mapped { size: 1 << 40, map: Blob::Inline(vec![7; 100]) },
            Content::Mapped { size: 1 << 50, map: Blob::Blocks { len: 40_000, blocks: vec![block] } },
        ];
        let mut writer = NeedsWriter::create(&path).unwrap();
        contents.iter().for_each(|content| writer.push(content).unwrap());
        writer.push(&Content::Nothing { size: 3 }).unwrap();
        writer.finish().unwrap();
        let read: Vec<Content> = Needs::open(&path).unwrap().map(Result::unwrap).collect();
        assert_eq!(read, contents);
        let len = std::fs::metadata(&path).unwrap().len();
        File::options().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
        assert!(Needs::open(&path).unwrap().any(|content| content.is_err()));
    }
}
