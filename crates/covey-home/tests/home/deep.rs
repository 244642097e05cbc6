//! Trees that no path can name.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;

use covey_home::MemoryStore;
use rustix::fs::{AtFlags, Mode, OFlags};

use crate::support::{self, materialize_dir, secure_dir, settle};

fn open_dir(dir: &OwnedFd, name: &str) -> OwnedFd {
    rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap()
}

fn open_root(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap()
}

fn write_file(dir: &OwnedFd, name: &str, bytes: &[u8]) {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    let mut file = File::from(rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR).unwrap());
    file.write_all(bytes).unwrap();
}

/// A chain of directories with a file in each hundredth, and the first file linked into the last directory.
fn build(root: &Path, name: &str, depth: usize) {
    std::fs::create_dir(root).unwrap();
    let top = open_root(root);
    write_file(&top, "linked", b"one inode");
    let mut dir = open_root(root);
    for level in 1..=depth {
        rustix::fs::mkdirat(&dir, name, Mode::RWXU).unwrap();
        dir = open_dir(&dir, name);
        if level % 100 == 0 {
            write_file(&dir, "file", format!("level {level}").as_bytes());
        }
    }
    rustix::fs::linkat(&top, "linked", &dir, "linked", AtFlags::empty()).unwrap();
}

fn check(root: &Path, name: &str, depth: usize) {
    let top = open_root(root);
    let mut dir = open_root(root);
    for level in 1..=depth {
        dir = open_dir(&dir, name);
        if level % 100 == 0 {
            let file = rustix::fs::openat(&dir, "file", OFlags::RDONLY, Mode::empty()).unwrap();
            assert_eq!(std::io::read_to_string(File::from(file)).unwrap(), format!("level {level}"));
        }
    }
    let inode = |dir: &OwnedFd| rustix::fs::statat(dir, "linked", AtFlags::SYMLINK_NOFOLLOW).unwrap().st_ino;
    assert_eq!(inode(&top), inode(&dir));
}

fn round_trip(name: &str, depth: usize) {
    let scratch = support::scratch();
    let (home, target) = (scratch.path().join("home"), scratch.path().join("target"));
    build(&home, name, depth);
    settle();
    let store = MemoryStore::new();
    let cache = scratch.path().join("cache");
    let first = secure_dir(&home, &store, Some(&cache)).unwrap();
    let again = secure_dir(&home, &store, Some(&cache)).unwrap();
    assert_eq!((again.root, again.bytes_read), (first.root, 0));
    assert_eq!(covey_home::verify(&store, &first.root).unwrap().problems, Vec::<String>::new());
    materialize_dir(first.root, &target, &store, None).unwrap();
    check(&target, name, depth);
    // An empty home over it: everything is removed, however deep.
    let empty = scratch.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let nothing = secure_dir(&empty, &store, None).unwrap();
    for dir in [&target, &home] {
        materialize_dir(nothing.root, dir, &store, None).unwrap();
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0);
    }
}

#[test]
fn a_path_far_above_path_max_goes_there_and_back() {
    round_trip(&"n".repeat(255), 300);
}

#[test]
fn two_thousand_directories_below_each_other_go_there_and_back() {
    round_trip("d", 2000);
}
