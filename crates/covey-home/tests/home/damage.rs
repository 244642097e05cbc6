//! Every kind of damage to every kind of stored file is said, touches nothing else, and is healed by whoever
//! still has the bytes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use covey_home::{BlockStore, MaterializeError, PackStore, StoreError};
use covey_types::{BlockHash, RootHash};

use crate::support::{self, dump, materialize_dir, noise, secure_dir, settle};

struct Stored {
    scratch: tempfile::TempDir,
    root: RootHash,
    files: BTreeMap<String, Vec<u8>>,
    packs: Vec<PathBuf>,
}

/// A home in two packs: small compressible files in the first, incompressible ones in the second.
fn stored() -> Stored {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    let mut files = BTreeMap::new();
    fs::create_dir(&home).unwrap();
    let packs_dir = scratch.path().join("store/orgs/org/packs");
    let store = PackStore::open_directory(&scratch.path().join("store"), "org").unwrap();
    for (part, seed) in [("text", 0), ("noise", 100)] {
        fs::create_dir(home.join(part)).unwrap();
        for number in 0..5_u64 {
            let bytes =
                if seed == 0 { vec![b'a' + number as u8; 3000] } else { noise(seed + number, 200_000) };
            fs::write(home.join(part).join(number.to_string()), &bytes).unwrap();
            files.insert(format!("{part}/{number}"), bytes);
        }
        secure_dir(&home, &store, None).unwrap();
    }
    settle();
    let root = secure_dir(&home, &store, Some(&scratch.path().join("cache"))).unwrap().root;
    let mut packs: Vec<PathBuf> = fs::read_dir(&packs_dir).unwrap().map(|e| e.unwrap().path()).collect();
    packs.sort();
    assert_eq!(packs.len(), 2);
    Stored { scratch, root, files, packs }
}

fn reopen(stored: &Stored) -> PackStore {
    PackStore::open_directory(&stored.scratch.path().join("store"), "org").unwrap()
}

/// Reads everything under one kind of damage; returns how many files were lost.
fn check_damaged(stored: &Stored, what: &str) -> usize {
    let store = reopen(stored);
    let mut lost = 0;
    for (path, bytes) in &stored.files {
        match store.get(&BlockHash::of(bytes)) {
            Ok(found) => assert_eq!(&found, bytes, "{what}: {path} came back wrong"),
            Err(StoreError::Damaged { .. } | StoreError::Absent { .. }) => lost += 1,
            Err(error) => panic!("{what}: {error}"),
        }
    }
    let target = stored.scratch.path().join("target");
    match materialize_dir(stored.root, &target, &store, None) {
        Ok(_) => assert_eq!(lost, 0, "{what}"),
        // The root object itself.
        Err(MaterializeError::Root { .. }) => {}
        Err(MaterializeError::Incomplete { report }) => {
            for (path, bytes) in &stored.files {
                let is_gap = report.gaps.iter().any(|gap| {
                    path == &gap.path || path.starts_with(&format!("{}/", gap.path)) || gap.path.is_empty()
                });
                match fs::read(target.join(path)) {
                    Ok(found) => assert_eq!(&found, bytes, "{what}: {path}"),
                    Err(_) => assert!(is_gap, "{what}: {path} is lost and not named in {:?}", report.gaps),
                }
            }
        }
        Err(error) => panic!("{what}: {error}"),
    }
    // Whoever still has the home heals the store, although its stat cache says that nothing changed.
    let home = stored.scratch.path().join("home");
    let healed = secure_dir(&home, &store, Some(&stored.scratch.path().join("cache"))).unwrap();
    assert_eq!(healed.root, stored.root, "{what}");
    let problems = covey_home::verify(&store, &stored.root).unwrap().problems;
    assert_eq!(problems, Vec::<String>::new(), "{what}: not healed");
    if target.exists() {
        fs::remove_dir_all(&target).unwrap();
    }
    lost
}

fn put_back(stored: &Stored, good: &BTreeMap<PathBuf, Vec<u8>>) {
    for entry in fs::read_dir(stored.packs[0].parent().unwrap()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    for (path, bytes) in good {
        fs::write(path, bytes).unwrap();
    }
}

#[test]
fn the_damage_matrix() {
    let stored = stored();
    let good: BTreeMap<PathBuf, Vec<u8>> =
        stored.packs.iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    for (path, bytes) in &good {
        let len = bytes.len();
        let mut places: Vec<usize> =
            vec![0, 9, 16, 20, 24, 28, 32, 36, 40, len - 1, len - 20, len - 50, len - 70];
        places.extend((0..40).map(|n| n * len / 40));
        for at in places {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            fs::write(path, &bad).unwrap();
            let lost = check_damaged(&stored, &format!("a flipped bit at {at} of {len}"));
            assert!(lost <= 6, "one bit cost {lost} files");
            put_back(&stored, &good);
        }
        for keep in [0, 5, 16, 30, len / 2, len - 56, len - 1] {
            fs::write(path, &bytes[..keep]).unwrap();
            check_damaged(&stored, &format!("cut at {keep} of {len}"));
            put_back(&stored, &good);
        }
        fs::remove_file(path).unwrap();
        check_damaged(&stored, "deleted");
        put_back(&stored, &good);
    }
}

#[test]
fn a_pack_whose_index_is_damaged_loses_nothing() {
    let stored = stored();
    for path in &stored.packs {
        let mut bad = fs::read(path).unwrap();
        let len = bad.len();
        bad[len - 70] ^= 1;
        fs::write(path, &bad).unwrap();
    }
    let store = reopen(&stored);
    assert_eq!(store.problems().len(), 2);
    for bytes in stored.files.values() {
        assert_eq!(&store.get(&BlockHash::of(bytes)).unwrap(), bytes);
    }
    let target = stored.scratch.path().join("target");
    materialize_dir(stored.root, &target, &store, None).unwrap();
    assert_eq!(dump(&target), dump(&stored.scratch.path().join("home")));
}

#[test]
fn an_unreadable_directory_is_unavailable_and_not_empty() {
    let stored = stored();
    let store = reopen(&stored);
    let packs: &Path = stored.packs[0].parent().unwrap();
    let aside = stored.scratch.path().join("aside");
    fs::rename(packs, &aside).unwrap();
    let absent = BlockHash::of(b"never there");
    assert!(matches!(store.get(&absent), Err(StoreError::Unavailable { .. })));
    assert!(matches!(store.missing(&[absent]), Err(StoreError::Unavailable { .. })));
    fs::rename(&aside, packs).unwrap();
    assert!(matches!(store.get(&absent), Err(StoreError::Absent { .. })));
}

#[test]
fn a_full_disk_costs_the_secure_and_nothing_that_was_published() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let scratch = support::scratch();
    let disk = scratch.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mount = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"])
        .arg(&disk)
        .status();
    if !mount.is_ok_and(|status| status.success()) {
        return;
    }
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("small"), b"small").unwrap();
    let outcome = std::panic::catch_unwind(|| {
        let store = PackStore::open_directory(&disk, "org").unwrap();
        let before = secure_dir(&home, &store, None).unwrap().root;
        fs::write(home.join("large"), noise(1, 12 << 20)).unwrap();
        let error = secure_dir(&home, &store, None).unwrap_err();
        assert_eq!(error.fault(), covey_types::Fault::Retry, "{error}");
        let store = PackStore::open_directory(&disk, "org").unwrap();
        assert_eq!(covey_home::verify(&store, &before).unwrap().problems, Vec::<String>::new());
        fs::remove_file(home.join("large")).unwrap();
        fs::write(home.join("other"), b"other").unwrap();
        secure_dir(&home, &store, None).unwrap();
    });
    let unmounted = std::process::Command::new("umount").arg(&disk).status().unwrap();
    assert!(unmounted.success());
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}
