//! One hash over everything that a tree is: names, kinds, modes, mtimes, link targets, contents, holes as zeros,
//! extended attributes, and which names share an inode. Written with std and rustix only.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::Outcome;

#[derive(Default)]
struct Digest {
    hasher: blake3::Hasher,
    /// First path of each inode with several names, as a number.
    first: HashMap<(u64, u64), u64>,
    entries: u64,
    bytes: u64,
}

impl Digest {
    fn put(&mut self, bytes: &[u8]) {
        self.hasher.update(&(bytes.len() as u64).to_le_bytes());
        self.hasher.update(bytes);
    }

    fn xattrs(&mut self, path: &Path) -> Outcome<()> {
        let mut list = vec![0; 65_536];
        let len = match rustix::fs::llistxattr(path, list.as_mut_slice()) {
            Ok(len) => len,
            Err(rustix::io::Errno::OPNOTSUPP) => 0,
            Err(error) => return Err(error.into()),
        };
        let mut names: Vec<&[u8]> = list[..len].split(|byte| *byte == 0).filter(|n| !n.is_empty()).collect();
        names.sort_unstable();
        for name in names {
            if name.starts_with(b"security.selinux") {
                continue;
            }
            let mut value = vec![0; 65_536];
            let len = rustix::fs::lgetxattr(path, name, value.as_mut_slice())?;
            self.put(name);
            self.put(&value[..len]);
        }
        Ok(())
    }

    fn entry(&mut self, root: &Path, path: &Path) -> Outcome<bool> {
        let metadata = fs::symlink_metadata(path)?;
        self.entries += 1;
        self.put(path.strip_prefix(root)?.as_os_str().as_bytes());
        self.put(&metadata.mode().to_le_bytes());
        self.put(&metadata.mtime().to_le_bytes());
        self.put(&metadata.mtime_nsec().to_le_bytes());
        let kind = metadata.file_type();
        if !kind.is_dir() && metadata.nlink() > 1 {
            let number = self.entries;
            let first = *self.first.entry((metadata.dev(), metadata.ino())).or_insert(number);
            self.put(&first.to_le_bytes());
        }
        if kind.is_file() {
            self.bytes += metadata.len();
            self.put(&metadata.len().to_le_bytes());
            let mut hasher = blake3::Hasher::new();
            hasher.update_reader(File::open(path)?)?;
            self.put(hasher.finalize().as_bytes());
        } else if kind.is_symlink() {
            self.put(fs::read_link(path)?.as_os_str().as_bytes());
        } else if kind.is_char_device() || kind.is_block_device() {
            self.put(&metadata.rdev().to_le_bytes());
        }
        self.xattrs(path)?;
        Ok(kind.is_dir())
    }
}

pub(crate) fn digest(root: &Path) -> Outcome<Value> {
    let mut digest = Digest::default();
    let mut dirs: Vec<PathBuf> = vec![root.to_owned()];
    digest.entry(root, root)?;
    while let Some(dir) = dirs.pop() {
        let mut paths = fs::read_dir(&dir)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<std::io::Result<Vec<_>>>()?;
        paths.sort_unstable();
        for path in paths {
            if digest.entry(root, &path)? {
                dirs.push(path);
            }
        }
    }
    let hash = digest.hasher.finalize().to_hex().to_string();
    Ok(json!({ "digest": hash, "entries": digest.entries, "bytes": digest.bytes }))
}
