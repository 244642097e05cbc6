//! The tree of odd inodes goes there and back, several times over the same target; as root all of it, as an
//! ordinary user all that such a user can own.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_home::{Excludes, MaterializeRequest, MemoryStore, NoProgress, materialize};

use crate::odd_tree;
use crate::support::{self, differences, dump, materialize_dir, secure_dir, settle};

fn nothing_differs(found: &Path, wanted: &Path) {
    assert_eq!(differences(&dump(found), &dump(wanted)), Vec::<String>::new());
}

#[test]
fn every_odd_inode_comes_back_also_over_what_is_there() {
    let scratch = support::scratch();
    let (home, target, cache) =
        (scratch.path().join("home"), scratch.path().join("target"), scratch.path().join("cache"));
    let left_out = odd_tree::build(&home);
    let is_root = rustix::process::geteuid().is_root();
    assert!(!is_root || left_out.is_empty(), "root may make everything: {left_out:?}");
    settle();
    let before = dump(&home);
    let inodes: BTreeSet<_> = before.values().map(|dumped| dumped.names.clone()).collect();
    assert!(inodes.len() >= if is_root { 70 } else { 60 }, "{} inodes", inodes.len());
    let store = MemoryStore::new();
    let secured = secure_dir(&home, &store, None).unwrap();
    assert!(!secured.partial && secured.skipped == 0, "{secured:?}");
    assert_eq!(differences(&dump(&home), &before), Vec::<String>::new(), "securing changed the home");
    for stat_cache in [None, Some(cache.as_path()), Some(cache.as_path()), None] {
        let report = materialize_dir(secured.root, &target, &store, stat_cache).unwrap();
        assert_eq!(report.warnings, Vec::<String>::new());
        nothing_differs(&target, &home);
    }
    assert_eq!(secure_dir(&target, &store, None).unwrap().root, secured.root);
    support::make_removable(&home);
    support::make_removable(&target);
}

#[test]
fn an_odd_tree_replaces_a_plain_one_and_the_other_way_round() {
    let scratch = support::scratch();
    let at = |name: &str| scratch.path().join(name);
    odd_tree::build(&at("odd"));
    fs::create_dir(at("plain")).unwrap();
    // Names of the odd tree as other kinds.
    for name in ["fifo", "sock", "ln", "sticky", "hard", "chr"] {
        fs::write(at("plain").join(name), b"a file").unwrap();
    }
    for name in ["plain", "dangling", "emptyfile"] {
        fs::create_dir_all(at("plain").join(name).join("below")).unwrap();
    }
    settle();
    let store = MemoryStore::new();
    let odd = secure_dir(&at("odd"), &store, None).unwrap().root;
    let plain = secure_dir(&at("plain"), &store, None).unwrap().root;
    for (root, wanted) in [(odd, "odd"), (plain, "plain"), (odd, "odd"), (plain, "plain")] {
        materialize_dir(root, &at("target"), &store, Some(&at("cache"))).unwrap();
        nothing_differs(&at("target"), &at(wanted));
    }
    support::make_removable(&at("odd"));
}

#[test]
fn a_device_node_is_not_made_for_somebody_else_and_the_rest_comes_up() {
    let scratch = support::scratch();
    let (home, target) = (scratch.path().join("home"), scratch.path().join("target"));
    let left_out = odd_tree::build(&home);
    settle();
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let is_root = rustix::process::geteuid().is_root();
    let report = materialize(&MaterializeRequest {
        root,
        dir: &target,
        store: &store,
        stat_cache: None,
        excludes: &Excludes::none(),
        owner: is_root.then_some((1234, 1234)),
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    })
    .unwrap();
    let refused: Vec<_> = report.warnings.iter().filter(|warning| warning.contains("device node")).collect();
    let devices = ["chr", "blk"].iter().filter(|name| !left_out.contains(name)).count();
    assert_eq!(refused.len(), devices, "{:?}", report.warnings);
    assert!(target.join("chr").symlink_metadata().is_err() && target.join("blk").symlink_metadata().is_err());
    assert_eq!(fs::read(target.join("plain")).unwrap(), fs::read(home.join("plain")).unwrap());
    support::make_removable(&home);
    support::make_removable(&target);
}
