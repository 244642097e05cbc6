//! Kinds of entries and metadata that need more than an ordinary user, or are not kept at all; excludes; cancel.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicBool;

use covey_home::{
    Excludes, MaterializeRequest, MemoryStore, NoProgress, SecureError, SecureRequest, materialize, secure,
};
use rustix::fs::XattrFlags;

use crate::support::{self, dump, materialize_dir, secure_dir, settle};

fn set_xattr(path: &std::path::Path, name: &str, value: &[u8]) -> bool {
    match rustix::fs::setxattr(path, name, value, XattrFlags::empty()) {
        Ok(()) => true,
        Err(rustix::io::Errno::PERM | rustix::io::Errno::OPNOTSUPP) => false,
        Err(error) => panic!("{error}"),
    }
}

/// `user::rwx, user:1234:r--, group::r-x, mask::r-x, other::---` in the kernel's form.
const ACL: &[u8] = &[
    2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 4, 0, 210, 4, 0, 0, 4, 0, 5, 0, 255, 255, 255, 255, 16,
    0, 5, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
];
/// `cap_net_raw+ep`, version 2.
const CAPABILITY: &[u8] = &[1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn acls_and_capabilities_survive_where_they_can_be_set() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("dir")).unwrap();
    fs::write(home.join("dir/ping"), b"binary").unwrap();
    fs::write(home.join("shared"), b"shared").unwrap();
    let acls = set_xattr(&home.join("shared"), "system.posix_acl_access", ACL)
        && set_xattr(&home.join("dir"), "system.posix_acl_default", ACL);
    let capabilities = set_xattr(&home.join("dir/ping"), "security.capability", CAPABILITY);
    set_xattr(&home.join("dir"), "user.large", &support::noise(1, 2000));
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let target = scratch.path().join("target");
    for _ in 0..2 {
        let report = materialize_dir(root, &target, &store, None).unwrap();
        assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        let (wanted, found) = (dump(&home), dump(&target));
        assert_eq!(found, wanted);
        assert_eq!(found[&b"dir/ping"[..]].xattrs.contains_key(&b"security.capability"[..]), capabilities);
        assert_eq!(found[&b"dir"[..]].xattrs.contains_key(&b"system.posix_acl_default"[..]), acls);
    }
}

#[test]
fn root_gives_everything_to_the_owner_that_is_asked_for() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("dir")).unwrap();
    fs::write(home.join("dir/file"), b"x").unwrap();
    symlink("nowhere", home.join("link")).unwrap();
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let target = scratch.path().join("target");
    let cache = scratch.path().join("cache");
    let excludes = Excludes::none();
    for owner in [(1234, 2345), (4321, 5432)] {
        materialize(&MaterializeRequest {
            root,
            dir: &target,
            store: &store,
            stat_cache: Some(&cache),
            excludes: &excludes,
            owner: Some(owner),
            cancel: &AtomicBool::new(false),
            progress: &NoProgress,
            threads: 1,
        })
        .unwrap();
        for path in ["", "dir", "dir/file", "link"] {
            let metadata = fs::symlink_metadata(target.join(path)).unwrap();
            assert_eq!((metadata.uid(), metadata.gid()), owner, "{path}");
        }
    }
}

#[test]
fn sockets_come_back_as_inodes_without_a_listener() {
    let scratch = support::scratch();
    let home = scratch.path().join("h");
    fs::create_dir_all(home.join("d")).unwrap();
    let socket = UnixListener::bind(home.join("d/s")).unwrap();
    let store = MemoryStore::new();
    let report = secure_dir(&home, &store, None).unwrap();
    assert_eq!((report.skipped, report.skipped_paths), (0, Vec::new()));
    let target = scratch.path().join("target");
    materialize_dir(report.root, &target, &store, None).unwrap();
    assert_eq!(dump(&target), dump(&home));
    let error = std::os::unix::net::UnixStream::connect(target.join("d/s")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    drop(socket);
}

#[test]
fn excluded_names_are_neither_kept_nor_touched() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("src/__pycache__")).unwrap();
    fs::create_dir_all(home.join(".cache/pip")).unwrap();
    fs::write(home.join("src/__pycache__/x"), b"compiled").unwrap();
    fs::write(home.join("src/a.py"), b"print()").unwrap();
    fs::write(home.join(".cache/pip/wheel"), b"wheel").unwrap();
    let excludes = Excludes::from_setting(None);
    let store = MemoryStore::new();
    let cancel = AtomicBool::new(false);
    let run = || {
        secure(&SecureRequest {
            dir: &home,
            store: &store,
            stat_cache: None,
            excludes: &excludes,
            previous: None,
            cancel: &cancel,
            progress: &NoProgress,
            threads: 1,
        })
        .unwrap()
    };
    let report = run();
    assert_eq!(report.files, 1);
    fs::write(home.join("src/extra"), b"goes").unwrap();
    fs::write(home.join("src/a.py"), b"changed").unwrap();
    materialize(&MaterializeRequest {
        root: report.root,
        dir: &home,
        store: &store,
        stat_cache: None,
        excludes: &excludes,
        owner: None,
        cancel: &cancel,
        progress: &NoProgress,
        threads: 1,
    })
    .unwrap();
    assert_eq!(fs::read(home.join("src/__pycache__/x")).unwrap(), b"compiled");
    assert_eq!(fs::read(home.join(".cache/pip/wheel")).unwrap(), b"wheel");
    assert_eq!(fs::read(home.join("src/a.py")).unwrap(), b"print()");
    assert!(!home.join("src/extra").exists());
    assert_eq!(run().root, report.root);
}

#[test]
fn a_cancelled_secure_says_so() {
    let scratch = support::scratch();
    let store = MemoryStore::new();
    let excludes = Excludes::none();
    let result = secure(&SecureRequest {
        dir: scratch.path(),
        store: &store,
        stat_cache: None,
        excludes: &excludes,
        previous: None,
        cancel: &AtomicBool::new(true),
        progress: &NoProgress,
        threads: 1,
    });
    assert!(matches!(result, Err(SecureError::Cancelled)));
    assert!(store.is_empty());
}

#[test]
fn a_directory_of_very_many_entries_is_cut_and_a_change_costs_one_piece() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    for number in 0..20_000 {
        fs::write(home.join(format!("an entry with a name of some length {number:06}")), b"").unwrap();
    }
    let store = MemoryStore::new();
    let first = secure_dir(&home, &store, None).unwrap();
    assert!(first.blocks_new > 4, "one listing for all: {first:?}");
    fs::write(home.join("an entry with a name of some length 010000x"), b"").unwrap();
    let second = secure_dir(&home, &store, None).unwrap();
    assert!(second.bytes_new < first.bytes_new / 2, "{} of {}", second.bytes_new, first.bytes_new);
    let target = scratch.path().join("target");
    materialize_dir(second.root, &target, &store, None).unwrap();
    assert_eq!(fs::read_dir(&target).unwrap().count(), 20_001);
    assert_eq!(secure_dir(&target, &store, None).unwrap().root, second.root);
}

#[test]
fn a_content_change_with_the_old_size_and_mtime_is_seen() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    let file = home.join("file");
    fs::write(&file, b"old").unwrap();
    let mtime = fs::metadata(&file).unwrap().modified().unwrap();
    settle();
    let (store, cache) = (MemoryStore::new(), scratch.path().join("cache"));
    let first = secure_dir(&home, &store, Some(&cache)).unwrap();
    fs::write(&file, b"new").unwrap();
    fs::File::options().write(true).open(&file).unwrap().set_modified(mtime).unwrap();
    let second = secure_dir(&home, &store, Some(&cache)).unwrap();
    assert_ne!(second.root, first.root);
}

#[test]
fn a_file_written_in_the_tick_of_the_secure_is_read_again() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    let (store, cache) = (MemoryStore::new(), scratch.path().join("cache"));
    fs::write(home.join("file"), b"12345").unwrap();
    secure_dir(&home, &store, Some(&cache)).unwrap();
    let again = secure_dir(&home, &store, Some(&cache)).unwrap();
    assert!(matches!(again.bytes_read, 0 | 5), "dirty, unless the machine was slow: {again:?}");
    settle();
    secure_dir(&home, &store, Some(&cache)).unwrap();
    assert_eq!(secure_dir(&home, &store, Some(&cache)).unwrap().bytes_read, 0);
}

#[test]
fn a_lost_damaged_or_foreign_cache_costs_a_full_reading_and_nothing_else() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("file"), b"12345").unwrap();
    settle();
    let (store, cache) = (MemoryStore::new(), scratch.path().join("cache"));
    let root = secure_dir(&home, &store, Some(&cache)).unwrap().root;
    let good = fs::read(&cache).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&cache, &bad).unwrap();
        let report = secure_dir(&home, &store, Some(&cache)).unwrap();
        assert_eq!((report.root, report.bytes_read), (root, 5), "byte {at}");
    }
    fs::write(&cache, &good[..good.len() / 2]).unwrap();
    assert_eq!(secure_dir(&home, &store, Some(&cache)).unwrap().root, root);
    // Another home with the cache of this one.
    let other = scratch.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("file"), b"54321").unwrap();
    fs::write(&cache, &good).unwrap();
    let report = secure_dir(&other, &store, Some(&cache)).unwrap();
    assert_eq!(report.bytes_read, 5);
    assert_ne!(report.root, root);
}

#[test]
fn after_copying_ahead_only_what_changed_since_is_read() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("dir")).unwrap();
    for number in 0..10 {
        fs::write(home.join(format!("dir/{number}")), support::noise(number, 1000)).unwrap();
    }
    settle();
    let (store, cache) = (MemoryStore::new(), scratch.path().join("cache"));
    let excludes = Excludes::none();
    let ahead = covey_home::prepare(&SecureRequest {
        dir: &home,
        store: &store,
        stat_cache: Some(&cache),
        excludes: &excludes,
        previous: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    })
    .unwrap();
    assert_eq!((ahead.files_read, ahead.bytes_read), (10, 10_000));
    fs::write(home.join("dir/3"), support::noise(99, 700)).unwrap();
    let secured = secure_dir(&home, &store, Some(&cache)).unwrap();
    assert_eq!((secured.files_read, secured.bytes_read), (1, 700));
    assert_eq!(secured.root, secure_dir(&home, &MemoryStore::new(), None).unwrap().root);
}

#[test]
fn a_name_that_only_its_path_excludes_is_kept_once_the_directory_has_another() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("a/left")).unwrap();
    fs::write(home.join("a/left/out"), b"12345").unwrap();
    fs::write(home.join("a/left/kept"), b"123").unwrap();
    settle();
    let (store, cache) = (MemoryStore::new(), scratch.path().join("cache"));
    let secure = |store: &MemoryStore, cache, excludes: &str| {
        support::secure_excluding(&home, store, cache, &Excludes::parse(excludes)).unwrap()
    };
    for _ in 0..2 {
        assert_eq!(secure(&store, Some(&*cache), "a/left/out").files, 1);
    }
    fs::rename(home.join("a"), home.join("b")).unwrap();
    let moved = secure(&store, Some(&cache), "a/left/out");
    assert_eq!((moved.files, moved.root), (2, secure(&MemoryStore::new(), None, "a/left/out").root));
    // The other way round, and by another list: nothing that was proven with one list counts with another.
    for excludes in ["b/left/kept", "out", "none-of-them", "*t"] {
        let found = secure(&store, Some(&cache), excludes);
        let wanted = secure(&MemoryStore::new(), None, excludes);
        assert_eq!((found.root, found.files), (wanted.root, wanted.files), "{excludes}");
    }
}

#[test]
fn names_that_come_and_go_in_a_directory_that_was_proven_are_seen() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("dir/deep")).unwrap();
    fs::write(home.join("dir/deep/first"), b"1").unwrap();
    settle();
    let (store, cache) = (MemoryStore::new(), scratch.path().join("cache"));
    let secured_files = || {
        let secured = secure_dir(&home, &store, Some(&cache)).unwrap();
        assert_eq!(secured.root, secure_dir(&home, &MemoryStore::new(), None).unwrap().root);
        settle();
        secured.files
    };
    let deep = home.join("dir/deep");
    assert_eq!((secured_files(), secured_files()), (1, 1));
    fs::write(deep.join("second"), b"2").unwrap();
    assert_eq!((secured_files(), secured_files()), (2, 2));
    fs::rename(deep.join("first"), home.join("dir/first")).unwrap();
    assert_eq!((secured_files(), secured_files()), (2, 2));
    fs::remove_file(deep.join("second")).unwrap();
    fs::hard_link(home.join("dir/first"), deep.join("linked")).unwrap();
    assert_eq!((secured_files(), secured_files()), (2, 2));
    fs::remove_file(deep.join("linked")).unwrap();
    assert_eq!((secured_files(), secured_files()), (1, 1));
}

#[test]
fn a_renamed_directory_is_not_read_again() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("old/deep")).unwrap();
    fs::write(home.join("old/deep/file"), b"12345").unwrap();
    settle();
    let (store, cache) = (MemoryStore::new(), scratch.path().join("cache"));
    secure_dir(&home, &store, Some(&cache)).unwrap();
    fs::rename(home.join("old"), home.join("new")).unwrap();
    let report = secure_dir(&home, &store, Some(&cache)).unwrap();
    assert_eq!(report.bytes_read, 0);
    assert_eq!(report.root, secure_dir(&home, &MemoryStore::new(), None).unwrap().root);
}
