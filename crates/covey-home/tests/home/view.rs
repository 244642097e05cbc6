//! Looking into snapshots, comparing two, and putting one path back.

use std::fs;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;

use covey_home::view::{ChangeKind, Snapshot, ViewError, diff};
use covey_home::{BlockStore, EditError, MemoryStore, restore_path};
use covey_types::RootHash;
use proptest::prelude::*;

use crate::property::{build, tree};
use crate::support::{self, dump, materialize_dir, secure_dir};

fn changes(store: &dyn BlockStore, old: &RootHash, new: &RootHash) -> Vec<(String, ChangeKind)> {
    let mut found = Vec::new();
    diff(store, old, new, &mut |change| {
        found.push((String::from_utf8_lossy(&change.path).into_owned(), change.kind));
        ControlFlow::Continue(())
    })
    .unwrap();
    found
}

fn secured(home: &Path, store: &dyn BlockStore) -> RootHash {
    secure_dir(home, store, None).unwrap().root
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, max_shrink_iters: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_name_is_found_and_reads_as_on_disk(tree in tree(), other in tree()) {
        let scratch = support::scratch();
        let (home, second) = (scratch.path().join("home"), scratch.path().join("second"));
        build(&tree, &home);
        build(&other, &second);
        let store = MemoryStore::new();
        let (root, other_root) = (secured(&home, &store), secured(&second, &store));
        let (here, there) = (dump(&home), dump(&second));
        let snapshot = Snapshot::open(&store, &root).unwrap();
        for (path, dumped) in &here {
            let entry = snapshot.find(path).unwrap();
            prop_assert_eq!((entry.meta.mode, entry.meta.mtime.seconds), (dumped.mode, dumped.mtime.0));
            if dumped.kind == 'f' {
                let mut read = Vec::new();
                snapshot.read(path).unwrap().read_to_end(&mut read).unwrap();
                prop_assert_eq!(read.len() as u64, dumped.size);
                let mut at = 0;
                for (start, end) in dumped.holes.iter().rev() {
                    read.drain(*start as usize..*end as usize);
                    at += end - start;
                }
                prop_assert_eq!(read.len() as u64 + at, dumped.size);
                prop_assert!(read == dumped.content, "{}", path.escape_ascii());
            }
        }
        // The difference is exactly what two dumps say. Link counts are not part of an entry.
        let mut wanted: Vec<String> = Vec::new();
        for path in here.keys().chain(there.keys()) {
            let plain = |dumped: &support::Dumped| support::Dumped { names: Vec::new(), ..dumped.clone() };
            if here.get(path).map(plain) != there.get(path).map(plain) {
                wanted.push(String::from_utf8_lossy(path).into_owned());
            }
        }
        wanted.sort();
        wanted.dedup();
        let mut found: Vec<String> = changes(&store, &root, &other_root).into_iter().map(|(path, _)| path).collect();
        found.sort();
        found.dedup();
        prop_assert_eq!(found, wanted);
        for dir in [&home, &second] {
            support::make_removable(dir);
        }
    }

    #[test]
    fn a_path_comes_back_and_nothing_else_changes(tree in tree(), other in tree(), pick in any::<prop::sample::Index>()) {
        let scratch = support::scratch();
        let (home, second) = (scratch.path().join("home"), scratch.path().join("second"));
        build(&tree, &home);
        build(&other, &second);
        let store = MemoryStore::new();
        let (from, current) = (secured(&home, &store), secured(&second, &store));
        let names: Vec<Vec<u8>> = dump(&home).into_keys().filter(|path| !path.is_empty()).collect();
        prop_assume!(!names.is_empty());
        let path = &names[pick.index(names.len())];
        match restore_path(&store, &current, &from, path) {
            Err(EditError::Blocked { .. }) => {}
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
            Ok(edited) => {
                prop_assert_eq!(covey_home::verify(&store, &edited.root).unwrap().problems, Vec::<String>::new());
                let below = |of: &[u8]| of.strip_prefix(path.as_slice()).is_some_and(|rest| rest.is_empty() || rest[0] == b'/');
                let above = |of: &[u8]| path.starts_with(of);
                prop_assert!(changes(&store, &from, &edited.root).iter().all(|(of, _)| !below(of.as_bytes())));
                diff(&store, &current, &edited.root, &mut |change| {
                    assert!(below(&change.path) || above(&change.path), "{}", change.path.escape_ascii());
                    ControlFlow::Continue(())
                }).unwrap();
            }
        }
        for dir in [&home, &second] {
            support::make_removable(dir);
        }
    }
}

#[test]
fn a_difference_is_told_by_kind_and_reads_only_what_differs() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    for dir in 0..50 {
        fs::create_dir_all(home.join(format!("same/{dir}"))).unwrap();
        fs::write(home.join(format!("same/{dir}/file")), format!("{dir}")).unwrap();
    }
    for name in ["removed", "modified", "touched", "kind"] {
        fs::write(home.join(name), name).unwrap();
    }
    let store = MemoryStore::new();
    let old = secured(&home, &store);
    fs::remove_file(home.join("removed")).unwrap();
    fs::write(home.join("modified"), "other").unwrap();
    fs::set_permissions(home.join("touched"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::remove_file(home.join("kind")).unwrap();
    fs::create_dir(home.join("kind")).unwrap();
    fs::write(home.join("kind/added"), "added").unwrap();
    let new = secured(&home, &store);
    let told = |path: &str, kind| (path.to_owned(), kind);
    let all = changes(&store, &old, &new);
    let mut expected = vec![
        told("kind", ChangeKind::Modified),
        told("kind/added", ChangeKind::Added),
        told("modified", ChangeKind::Modified),
        told("removed", ChangeKind::Removed),
        told("touched", ChangeKind::Metadata),
    ];
    expected.insert(0, told("", ChangeKind::Metadata));
    assert_eq!(all, expected);
    let mut calls = 0;
    diff(&store, &old, &new, &mut |_| {
        calls += 1;
        ControlFlow::Break(())
    })
    .unwrap();
    assert_eq!(calls, 1);
}

#[test]
fn a_cut_directory_is_searched_and_compared_by_its_objects() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    for number in 0..20_000 {
        fs::write(home.join(format!("a-rather-long-name-of-a-file-{number:06}")), "").unwrap();
    }
    let store = MemoryStore::new();
    let old = secured(&home, &store);
    fs::write(home.join("a-rather-long-name-of-a-file-010000"), "x").unwrap();
    fs::remove_file(home.join("a-rather-long-name-of-a-file-019999")).unwrap();
    let new = secured(&home, &store);
    let snapshot = Snapshot::open(&store, &new).unwrap();
    assert_eq!(snapshot.list(b"").unwrap().len(), 19_999);
    for number in [0, 1, 9_999, 10_000, 19_998] {
        snapshot.find(format!("a-rather-long-name-of-a-file-{number:06}").as_bytes()).unwrap();
    }
    for absent in ["a", "a-rather-long-name-of-a-file-019999", "z"] {
        assert!(matches!(snapshot.find(absent.as_bytes()), Err(ViewError::NotFound { .. })), "{absent}");
    }
    let found = changes(&store, &old, &new);
    assert_eq!(found.len(), 3, "{found:?}");
}

#[test]
fn a_restored_file_comes_with_the_directories_above_it_and_its_links() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("a/b")).unwrap();
    fs::write(home.join("a/b/one"), "bytes").unwrap();
    fs::hard_link(home.join("a/b/one"), home.join("a/b/two")).unwrap();
    fs::hard_link(home.join("a/b/one"), home.join("outside")).unwrap();
    let store = MemoryStore::new();
    let old = secured(&home, &store);
    fs::remove_dir_all(home.join("a")).unwrap();
    let new = secured(&home, &store);
    let edited = restore_path(&store, &new, &old, b"/a/b").unwrap();
    assert_eq!((edited.files, edited.bytes), (3, 15));
    let target = scratch.path().join("target");
    materialize_dir(edited.root, &target, &store, None).unwrap();
    let dumped = dump(&target);
    assert_eq!(dumped[&b"a/b/one"[..]].names, [b"a/b/one".to_vec(), b"a/b/two".to_vec()]);
    assert_eq!(dumped[&b"outside"[..]].names, [b"outside".to_vec()]);
    assert!(matches!(
        restore_path(&store, &new, &old, b"nothing"),
        Err(EditError::View(ViewError::NotFound { .. }))
    ));
    assert!(matches!(restore_path(&store, &new, &old, b"/"), Err(EditError::WholeHome)));
    assert!(matches!(
        restore_path(&store, &old, &edited.root, b"outside/x"),
        Err(EditError::View(ViewError::NotADirectory { .. }))
    ));
}
