//! Random trees of everything that is kept go there and back, into empty, dirty and older directories.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use covey_home::MemoryStore;
use proptest::prelude::*;
use rustix::fs::{AtFlags, Mode, OFlags, Timespec, Timestamps, XattrFlags};

use crate::support::{self, dump, materialize_dir, secure_dir, settle};

#[derive(Debug, Clone)]
struct Inode {
    mode: u32,
    mtime: (i64, u32),
    xattrs: Vec<(u8, Vec<u8>)>,
    body: Body,
}

#[derive(Debug, Clone)]
enum Body {
    /// Pieces of data (first block of 4 KiB, length, fill) and the size.
    File {
        data: Vec<(u64, usize, u8)>,
        size: u64,
    },
    Large {
        seed: u64,
        len: usize,
    },
    Symlink(Vec<u8>),
    Fifo,
    Dir(Vec<(Vec<u8>, Inode)>),
}

/// A tree, and hard links: from one of its names (by number) into one of its directories (by number).
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    root: Inode,
    links: Vec<(u16, u16, Vec<u8>)>,
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let any_bytes = proptest::collection::vec(any::<u8>(), 1..20);
    let clean = |name: Vec<u8>| -> Vec<u8> {
        name.into_iter().map(|b| if matches!(b, 0 | b'/') { b'_' } else { b }).collect()
    };
    prop_oneof![
        3 => "[a-d]".prop_map(String::into_bytes),
        3 => any_bytes.prop_map(clean),
        1 => any::<u8>().prop_map(move |b| clean(vec![b; 255])),
    ]
    .prop_filter("not a name", |name| name != b"." && name != b"..")
}

fn file() -> impl Strategy<Value = Body> {
    let piece = (0_u64..64, 1_usize..9000, any::<u8>());
    let sparse = (proptest::collection::vec(piece, 0..4), 0_u64..300_000)
        .prop_map(|(data, size)| Body::File { data, size });
    let dense = (1_usize..20_000, any::<u8>())
        .prop_map(|(len, fill)| Body::File { data: vec![(0, len, fill)], size: len as u64 });
    let large = (any::<u64>(), 8_300_000_usize..8_500_000).prop_map(|(seed, len)| Body::Large { seed, len });
    prop_oneof![
        2 => Just(Body::File { data: Vec::new(), size: 0 }),
        8 => dense,
        3 => sparse,
        1 => large,
    ]
}

fn inode(body: impl Strategy<Value = Body>) -> impl Strategy<Value = Inode> {
    let mode = prop_oneof![Just(0o644), Just(0o755), 0_u32..=0o7777];
    let mtime = (-2_000_000_000_i64..8_000_000_000, 0_u32..1_000_000_000);
    let xattr = (b'a'..b'f', proptest::collection::vec(any::<u8>(), 0..40));
    (mode, mtime, proptest::collection::vec(xattr, 0..3), body)
        .prop_map(|(mode, mtime, xattrs, body)| Inode { mode, mtime, xattrs, body })
}

pub(crate) fn tree() -> impl Strategy<Value = Tree> {
    let target = proptest::collection::vec(1_u8..=255, 1..60);
    let leaf = prop_oneof![
        8 => file(),
        2 => target.prop_map(Body::Symlink),
        1 => Just(Body::Fifo),
    ];
    let leaf = inode(leaf).boxed();
    let nested = leaf.prop_recursive(5, 60, 8, |inner| {
        let entries = proptest::collection::vec((name(), inner), 0..8);
        inode(entries.prop_map(Body::Dir)).boxed()
    });
    let root = inode(proptest::collection::vec((name(), nested), 0..10).prop_map(Body::Dir));
    let links = proptest::collection::vec((any::<u16>(), any::<u16>(), name()), 0..6);
    (root, links).prop_map(|(root, links)| Tree { root, links })
}

/// Builds a tree; names that a directory already has are left out.
pub(crate) fn build(tree: &Tree, path: &Path) {
    rustix::fs::mkdir(path, Mode::RWXU).unwrap();
    let root = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    let mut made: Vec<(OwnedFd, CString, Inode)> = Vec::new();
    let mut dirs: Vec<OwnedFd> = vec![rustix::io::dup(&root).unwrap()];
    if let Body::Dir(entries) = &tree.root.body {
        build_entries(root.as_fd(), entries, &mut made, &mut dirs);
    }
    let linkable: Vec<usize> =
        (0..made.len()).filter(|at| !matches!(made[*at].2.body, Body::Dir(_))).collect();
    for (from, to, name) in &tree.links {
        if linkable.is_empty() {
            break;
        }
        let (dir, from_name, _) = &made[linkable[usize::from(*from) % linkable.len()]];
        let target = &dirs[usize::from(*to) % dirs.len()];
        match rustix::fs::linkat(dir, from_name.as_c_str(), target, name.as_slice(), AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => panic!("{error}"),
        }
    }
    for (dir, name, inode) in made.iter().rev() {
        set_meta(dir.as_fd(), name, inode);
    }
    set_meta(root.as_fd(), c".", &tree.root);
}

fn build_entries(
    dir: BorrowedFd<'_>,
    entries: &[(Vec<u8>, Inode)],
    made: &mut Vec<(OwnedFd, CString, Inode)>,
    dirs: &mut Vec<OwnedFd>,
) {
    for (name, inode) in entries {
        let name = CString::new(name.clone()).unwrap();
        if rustix::fs::statat(dir, name.as_c_str(), AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            continue;
        }
        made.push((rustix::io::dup(dir).unwrap(), name.clone(), inode.clone()));
        match &inode.body {
            Body::File { data, size } => {
                let file = create(dir, &name);
                for (block, len, fill) in data {
                    rustix::io::pwrite(&file, &vec![*fill; *len], block * 4096).unwrap();
                }
                let end = data.iter().map(|(block, len, _)| block * 4096 + *len as u64).max().unwrap_or(0);
                rustix::fs::ftruncate(&file, end.max(*size)).unwrap();
            }
            Body::Large { seed, len } => {
                let file = std::fs::File::from(create(dir, &name));
                std::os::unix::fs::FileExt::write_all_at(&file, &support::noise(*seed, *len), 0).unwrap();
            }
            Body::Symlink(target) => rustix::fs::symlinkat(target.as_slice(), dir, name.as_c_str()).unwrap(),
            Body::Fifo => {
                rustix::fs::mknodat(dir, name.as_c_str(), rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
            }
            Body::Dir(children) => {
                rustix::fs::mkdirat(dir, name.as_c_str(), Mode::RWXU).unwrap();
                let flags = OFlags::RDONLY | OFlags::DIRECTORY;
                let child = rustix::fs::openat(dir, name.as_c_str(), flags, Mode::empty()).unwrap();
                dirs.push(rustix::io::dup(&child).unwrap());
                build_entries(child.as_fd(), children, made, dirs);
            }
        }
    }
}

fn create(dir: BorrowedFd<'_>, name: &CString) -> OwnedFd {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    rustix::fs::openat(dir, name.as_c_str(), flags, Mode::RWXU).unwrap()
}

fn set_meta(dir: BorrowedFd<'_>, name: &std::ffi::CStr, inode: &Inode) {
    let times = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        last_modification: Timespec { tv_sec: inode.mtime.0, tv_nsec: inode.mtime.1.into() },
    };
    let has_attributes = matches!(inode.body, Body::File { .. } | Body::Large { .. } | Body::Dir(_));
    if has_attributes {
        let fd = rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::NOFOLLOW, Mode::empty());
        // Through another name of the inode its mode may have been set already.
        if let Ok(fd) = fd {
            for (key, value) in &inode.xattrs {
                let key = format!("user.{}", char::from(*key));
                match rustix::fs::fsetxattr(&fd, key.as_str(), value, XattrFlags::empty()) {
                    Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ACCESS) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
    // Before the mode: without search permission `.` cannot be named.
    rustix::fs::utimensat(dir, name, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    if !matches!(inode.body, Body::Symlink(_)) {
        rustix::fs::chmodat(dir, name, Mode::from_raw_mode(inode.mode), AtFlags::empty()).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_goes_there_and_back(tree in tree(), other in tree()) {
        let scratch = support::scratch();
        let (home, target) = (scratch.path().join("home"), scratch.path().join("target"));
        let (home_cache, target_cache) = (scratch.path().join("home.cache"), scratch.path().join("target.cache"));
        build(&tree, &home);
        build(&other, &target);
        let (wanted, other_wanted) = (dump(&home), dump(&target));
        settle();
        let store = MemoryStore::new();
        let first = secure_dir(&home, &store, Some(&home_cache)).unwrap();
        prop_assert!(first.warnings.is_empty(), "{:?}", first.warnings);
        let again = secure_dir(&home, &store, Some(&home_cache)).unwrap();
        prop_assert_eq!((again.root, again.bytes_read, again.blocks_new), (first.root, 0, 0));
        let blind = secure_dir(&home, &store, None).unwrap();
        prop_assert_eq!((blind.root, blind.blocks_new), (first.root, 0));
        let verified = covey_home::verify(&store, &first.root).unwrap();
        prop_assert_eq!(verified.problems, Vec::<String>::new());

        // Into a directory that holds another tree, known to a stat cache.
        let other_root = secure_dir(&target, &store, Some(&target_cache)).unwrap().root;
        let report = materialize_dir(first.root, &target, &store, Some(&target_cache)).unwrap();
        prop_assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        let restored = secure_dir(&target, &store, Some(&target_cache)).unwrap();
        prop_assert_eq!((restored.root, restored.bytes_read, restored.blocks_new), (first.root, 0, 0));
        prop_assert_eq!(support::differences(&dump(&target), &wanted), Vec::<String>::new());
        // Back again, without the cache, then into nothing.
        materialize_dir(other_root, &target, &store, None).unwrap();
        prop_assert_eq!(support::differences(&dump(&target), &other_wanted), Vec::<String>::new());
        let fresh = scratch.path().join("fresh");
        materialize_dir(first.root, &fresh, &store, None).unwrap();
        prop_assert_eq!(support::differences(&dump(&fresh), &wanted), Vec::<String>::new());
        for dir in [&home, &target, &fresh] {
            support::make_removable(dir);
        }
    }
}
