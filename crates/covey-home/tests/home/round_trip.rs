//! A tree of every kept kind goes there and back, and the second time costs nothing.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::AtomicBool;

use crate::support::{self, dump, settle};
use covey_home::{
    BlockStore, Excludes, MaterializeRequest, MemoryStore, NoProgress, PackStore, SecureReport,
    SecureRequest, materialize, secure,
};

fn small_tree(dir: &std::path::Path) {
    fs::create_dir(dir).unwrap();
    fs::create_dir_all(dir.join("a/b")).unwrap();
    fs::write(dir.join("a/file"), b"hello").unwrap();
    fs::write(dir.join("a/empty"), b"").unwrap();
    fs::write(dir.join("large"), vec![7_u8; 9 * 1024 * 1024]).unwrap();
    fs::hard_link(dir.join("a/file"), dir.join("a/b/same")).unwrap();
    symlink("nowhere", dir.join("dangling")).unwrap();
    fs::set_permissions(dir.join("a/file"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::set_permissions(dir.join("a/b"), fs::Permissions::from_mode(0o500)).unwrap();
}

fn check_round_trip(store: &dyn BlockStore) {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    small_tree(&home);
    settle();
    let excludes = Excludes::none();
    let cancel = AtomicBool::new(false);
    let cache = scratch.path().join("cache");
    let run = |dir: &std::path::Path, cache: &std::path::Path| -> SecureReport {
        secure(&SecureRequest {
            dir,
            store,
            stat_cache: Some(cache),
            excludes: &excludes,
            previous: None,
            cancel: &cancel,
            progress: &NoProgress,
            threads: 2,
        })
        .unwrap()
    };
    let first = run(&home, &cache);
    assert_eq!((first.files, first.bytes), (4, 9 * 1024 * 1024 + 10));
    assert!(first.warnings.is_empty(), "{:?}", first.warnings);
    let again = run(&home, &cache);
    assert_eq!((again.root, again.bytes_read, again.blocks_new), (first.root, 0, 0));

    let target = scratch.path().join("restored");
    let target_cache = scratch.path().join("restored-cache");
    let request = MaterializeRequest {
        root: first.root,
        dir: &target,
        store,
        stat_cache: Some(&target_cache),
        excludes: &excludes,
        owner: None,
        cancel: &cancel,
        progress: &NoProgress,
        threads: 2,
    };
    let report = materialize(&request).unwrap();
    assert!(report.warnings.is_empty(), "{:?}", report.warnings);
    assert_eq!(dump(&target), dump(&home));
    let restored = run(&target, &target_cache);
    assert_eq!((restored.root, restored.bytes_read, restored.blocks_new), (first.root, 0, 0));
    let nothing = materialize(&request).unwrap();
    assert_eq!((nothing.files_written, nothing.removed), (0, 0));
    assert_eq!(dump(&target), dump(&home));
    let verified = covey_home::verify(store, &first.root).unwrap();
    assert_eq!(verified.problems, Vec::<String>::new());
    support::make_removable(&home);
    support::make_removable(&target);
}

#[test]
fn a_small_home_goes_there_and_back_in_a_directory_store() {
    let scratch = support::scratch();
    let store = PackStore::open_directory(scratch.path(), "org").unwrap();
    check_round_trip(&store);
    assert_eq!(store.verify_packs().unwrap().problems, Vec::<String>::new());
}

#[test]
fn a_small_home_goes_there_and_back_in_memory() {
    check_round_trip(&MemoryStore::new());
}
