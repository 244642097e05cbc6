//! A directory tree as data, to compare two homes byte for byte.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result};

/// One name in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// Type and permission bits.
    mode: u32,
    /// BLAKE3 of a file's content or a symlink's target.
    content: Option<blake3::Hash>,
    length: u64,
    /// The first name of the same inode, when there are several.
    linked_to: Option<Vec<u8>>,
    mtime_ns: i128,
}

/// Every name below a directory, by path.
pub(super) type Tree = BTreeMap<Vec<u8>, Entry>;

/// Reads a whole tree. Unreadable files of ours are made readable for the moment: call it on copies only.
pub(super) fn read(dir: &Path) -> Result<Tree> {
    let mut tree = Tree::new();
    let mut inodes = BTreeMap::new();
    descend(dir, Vec::new(), &mut tree, &mut inodes)?;
    Ok(tree)
}

fn descend(
    dir: &Path,
    prefix: Vec<u8>,
    tree: &mut Tree,
    inodes: &mut BTreeMap<(u64, u64), Vec<u8>>,
) -> Result<()> {
    let mut names = fs::read_dir(dir)
        .with_context(|| format!("cannot read {}", dir.display()))?
        .map(|entry| entry.map(|e| e.file_name()))
        .collect::<io::Result<Vec<_>>>()?;
    names.sort();
    for name in names {
        let path = dir.join(&name);
        let key = join(&prefix, &name);
        let metadata = fs::symlink_metadata(&path)?;
        let kind = metadata.file_type();
        let content = if kind.is_file() {
            Some(
                hash_file(&path, metadata.mode())
                    .with_context(|| format!("cannot read {}", path.display()))?,
            )
        } else if kind.is_symlink() {
            Some(blake3::hash(fs::read_link(&path)?.as_os_str().as_bytes()))
        } else {
            None
        };
        let linked_to = (!kind.is_dir() && metadata.nlink() > 1)
            .then(|| inodes.entry((metadata.dev(), metadata.ino())).or_insert_with(|| key.clone()).clone());
        let length = if kind.is_file() { metadata.len() } else { 0 };
        let mtime_ns = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
        tree.insert(key.clone(), Entry { mode: metadata.mode(), content, length, linked_to, mtime_ns });
        if kind.is_dir() {
            descend(&path, key, tree, inodes)?;
        }
    }
    Ok(())
}

fn join(prefix: &[u8], name: &OsStr) -> Vec<u8> {
    let mut path = prefix.to_vec();
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name.as_bytes());
    path
}

fn hash_file(path: &Path, mode: u32) -> io::Result<blake3::Hash> {
    let opened = match fs::File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
            let opened = fs::File::open(path);
            fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777))?;
            opened
        }
        opened => opened,
    };
    let mut hasher = blake3::Hasher::new();
    let mut file = opened?;
    let mut buffer = vec![0; 128 * 1024];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finalize()),
            n => hasher.update(&buffer[..n]),
        };
    }
}

/// Where two runs' homes differ from each other, or from the home that both began with. Times are compared where
/// neither run changed anything: what a tool wrote, it wrote at another moment.
pub(super) fn differences(template: &Tree, reference: &Tree, lossy: &Tree) -> Vec<String> {
    let mut found = Vec::new();
    let names: std::collections::BTreeSet<&Vec<u8>> = reference.keys().chain(lossy.keys()).collect();
    for name in names {
        let shown = name.escape_ascii().to_string();
        let (Some(a), Some(b)) = (reference.get(name), lossy.get(name)) else {
            found.push(format!("{shown}: only in one of the two homes"));
            continue;
        };
        let untouched = template.get(name).is_some_and(|t| same_but_time(t, a));
        if !same_but_time(a, b) {
            found.push(format!("{shown}: content, mode or links differ"));
        } else if untouched && !is_directory(a) {
            let began = template.get(name).map(|t| t.mtime_ns);
            if began != Some(a.mtime_ns) || began != Some(b.mtime_ns) {
                found.push(format!("{shown}: the time of an untouched file changed"));
            }
        }
    }
    found
}

fn is_directory(entry: &Entry) -> bool {
    entry.mode & 0o170_000 == 0o040_000
}

fn same_but_time(a: &Entry, b: &Entry) -> bool {
    (a.mode, a.content, a.length, &a.linked_to) == (b.mode, b.content, b.length, &b.linked_to)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree_of(dir: &Path, content: &str) -> Tree {
        fs::create_dir_all(dir.join("d")).unwrap();
        fs::write(dir.join("d/same"), "same").unwrap();
        fs::hard_link(dir.join("d/same"), dir.join("d/twin")).unwrap();
        fs::write(dir.join("changed"), content).unwrap();
        let time = std::time::UNIX_EPOCH + std::time::Duration::new(1, 5);
        fs::File::options().append(true).open(dir.join("d/same")).unwrap().set_modified(time).unwrap();
        read(dir).unwrap()
    }

    #[test]
    fn content_links_and_times_of_untouched_files_are_compared() {
        let dir = tempfile::tempdir().unwrap();
        let began = tree_of(&dir.path().join("0"), "before");
        let a = tree_of(&dir.path().join("a"), "after");
        let b = tree_of(&dir.path().join("b"), "after");
        assert_eq!(differences(&began, &a, &b), Vec::<String>::new());
        let c = tree_of(&dir.path().join("c"), "other");
        assert_eq!(differences(&began, &a, &c), ["changed: content, mode or links differ"]);
        let mut late = b.clone();
        late.get_mut(&b"d/same"[..]).unwrap().mtime_ns += 1;
        assert_eq!(differences(&began, &a, &late), ["d/same: the time of an untouched file changed"]);
        let mut unlinked = b;
        unlinked.remove(&b"d/twin"[..]);
        assert_eq!(differences(&began, &a, &unlinked), ["d/twin: only in one of the two homes"]);
    }
}
