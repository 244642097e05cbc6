//! Walking a snapshot from any name on, reading a file from any byte on, and what a home takes.

use std::fs;
use std::io::Read;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

use covey_home::usage::{Shares, UsageOptions, shares, usage};
use covey_home::view::{FileReader, Snapshot, ViewError, WalkOptions, is_behind};
use covey_home::{BlockHasher, BlockStore, MemoryStore, PackStore, StoreError, Upload};
use covey_types::BlockHash;
use proptest::prelude::*;

use crate::collect::{home as archive, stored};
use crate::property::{build, tree};
use crate::support::{self, dump, secure_dir};

fn walked(snapshot: &Snapshot<'_>, path: &[u8], options: &WalkOptions<'_>) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    snapshot
        .walk(path, options, &mut |path, _| {
            found.push(path.to_vec());
            ControlFlow::Continue(())
        })
        .unwrap();
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, max_shrink_iters: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_walk_goes_on_behind_any_name_and_files_read_on_from_any_byte(tree in tree(), offset in any::<prop::sample::Index>()) {
        let scratch = support::scratch();
        let dir = scratch.path().join("home");
        build(&tree, &dir);
        let store = MemoryStore::new();
        let root = secure_dir(&dir, &store, None).unwrap().root;
        let here = dump(&dir);
        let snapshot = Snapshot::open(&store, &root).unwrap();

        let all = walked(&snapshot, b"", &WalkOptions { recursive: true, after: None });
        prop_assert_eq!(all.len(), here.len() - 1, "every name but the home's own");
        prop_assert!(all.windows(2).all(|pair| is_behind(&pair[1], &pair[0])));
        for (at, path) in all.iter().enumerate() {
            let rest = walked(&snapshot, b"", &WalkOptions { recursive: true, after: Some(path) });
            prop_assert_eq!(&rest[..], &all[at + 1..]);
        }
        for (path, dumped) in &here {
            if dumped.kind == 'd' {
                let inside: Vec<_> = all.iter().filter(|other| {
                    let below = if path.is_empty() { Some(other.as_slice()) } else {
                        other.strip_prefix(path.as_slice()).and_then(|rest| rest.strip_prefix(b"/"))
                    };
                    below.is_some_and(|below| !below.contains(&b'/'))
                }).cloned().collect();
                prop_assert_eq!(&walked(&snapshot, path, &WalkOptions::default()), &inside);
            }
            if dumped.kind == 'f' {
                let mut whole = Vec::new();
                snapshot.read(path).unwrap().read_to_end(&mut whole).unwrap();
                let offset = offset.index(whole.len() + 1);
                let mut reader = snapshot.read(path).unwrap();
                let mut start = vec![0; offset / 2];
                reader.read_exact(&mut start).unwrap();
                prop_assert_eq!(&start[..], &whole[..offset / 2]);
                reader.skip_to(offset as u64).unwrap();
                let mut rest = Vec::new();
                reader.read_to_end(&mut rest).unwrap();
                prop_assert!(rest == whole[offset..], "{}", path.escape_ascii());
                prop_assert!(reader.skip_to(whole.len() as u64 + 1).is_err());
            }
        }
        // What a usage counts is what the walk and the files say.
        let options = UsageOptions { depth: usize::MAX, parts_max: usize::MAX };
        let counted = usage(&store, &root, b"", &options).unwrap();
        let files: Vec<_> = here.values().filter(|dumped| dumped.kind == 'f').collect();
        prop_assert_eq!(counted.entries as usize, all.len());
        prop_assert_eq!(counted.files as usize, files.len());
        prop_assert_eq!(counted.bytes, files.iter().map(|dumped| dumped.size).sum::<u64>());
        prop_assert_eq!(counted.largest_directories.len() as u64, counted.directories);
        for part in &counted.largest_directories {
            let below = |path: &&Vec<u8>| path.strip_prefix(part.path.as_slice()).is_some_and(|rest| rest.starts_with(b"/"));
            prop_assert_eq!(part.entries as usize, 1 + all.iter().filter(below).count());
        }
        support::make_removable(&dir);
    }
}

/// Counts what is read.
#[derive(Debug, Default)]
struct Counting {
    inner: MemoryStore,
    gets: AtomicUsize,
}

impl BlockStore for Counting {
    fn hasher(&self) -> &BlockHasher {
        self.inner.hasher()
    }

    fn get(&self, hash: &BlockHash) -> Result<Vec<u8>, StoreError> {
        self.gets.fetch_add(1, Ordering::Relaxed);
        self.inner.get(hash)
    }

    fn missing(&self, hashes: &[BlockHash]) -> Result<Vec<BlockHash>, StoreError> {
        self.inner.missing(hashes)
    }

    fn upload(&self) -> Result<Box<dyn Upload + '_>, StoreError> {
        self.inner.upload()
    }
}

#[test]
fn a_read_that_begins_far_in_fetches_no_block_before() {
    let scratch = support::scratch();
    let dir = scratch.path().join("home");
    fs::create_dir(&dir).unwrap();
    // Five pieces of 4 MiB.
    let bytes = support::noise(1, 20 << 20);
    fs::write(dir.join("large"), &bytes).unwrap();
    let store = Counting::default();
    let root = secure_dir(&dir, &store, None).unwrap().root;
    let mut reader = Snapshot::open(&store, &root).unwrap().read(b"large").unwrap();
    let fetched = |offset: usize, reader: &mut FileReader<'_>| {
        let before = store.gets.load(Ordering::Relaxed);
        reader.skip_to(offset as u64).unwrap();
        let mut found = vec![0; 10.min(bytes.len() - offset)];
        reader.read_exact(&mut found).unwrap();
        assert_eq!(found, bytes[offset..offset + found.len()]);
        store.gets.load(Ordering::Relaxed) - before
    };
    assert_eq!(fetched(9 << 20, &mut reader), 1);
    assert_eq!(fetched(10 << 20, &mut reader), 0, "the same piece");
    assert_eq!(fetched(16 << 20, &mut reader), 1, "the first byte of a piece");
    assert_eq!(fetched(20 << 20, &mut reader), 0, "the end needs nothing");
}

#[test]
fn bytes_that_nobody_else_needs_are_told_apart() {
    let scratch = support::scratch();
    let store = PackStore::open_directory(&scratch.path().join("store"), "o").unwrap();
    let root = |files: &[(&str, u64, usize)]| stored(&store, &archive(files)).unwrap().root;
    let one = root(&[("shared", 1, 1 << 20), ("own", 2, 3 << 20)]);
    let two = root(&[("shared", 1, 1 << 20), ("other", 3, 5 << 20)]);
    let found = shares(&store, &[one], &[two]).unwrap();
    let about = |bytes: u64, mib: u64| (mib << 20..(mib << 20) + 8192).contains(&bytes);
    assert!(about(found.exclusive_bytes, 3) && about(found.shared_bytes, 1), "{found:?}");
    let alone = shares(&store, &[one, two], &[]).unwrap();
    assert!(about(alone.exclusive_bytes, 9) && alone.shared_bytes == 0, "{alone:?}");
    assert_eq!(shares(&store, &[], &[one]).unwrap(), Shares::default());
}

#[test]
fn usage_names_the_largest_and_counts_below_one_directory() {
    let scratch = support::scratch();
    let dir = scratch.path().join("home");
    for (path, len) in [("a/x/one", 100), ("a/two", 20), ("b/three", 50), ("four", 7)] {
        fs::create_dir_all(dir.join(path).parent().unwrap()).unwrap();
        fs::write(dir.join(path), vec![0; len]).unwrap();
    }
    let store = MemoryStore::new();
    let root = secure_dir(&dir, &store, None).unwrap().root;
    let options = UsageOptions { depth: 1, parts_max: 2 };
    let all = usage(&store, &root, b"", &options).unwrap();
    let names = |parts: &[covey_home::usage::Part]| {
        parts.iter().map(|p| (String::from_utf8_lossy(&p.path).into_owned(), p.bytes)).collect::<Vec<_>>()
    };
    assert_eq!((all.entries, all.files, all.directories, all.bytes), (7, 4, 3, 177));
    assert_eq!(names(&all.largest_directories), [("a".to_owned(), 120), ("b".to_owned(), 50)]);
    assert_eq!(names(&all.largest_files), [("a/x/one".to_owned(), 100), ("b/three".to_owned(), 50)]);
    let below = usage(&store, &root, b"a/", &options).unwrap();
    assert_eq!((below.entries, below.bytes), (3, 120));
    assert_eq!(names(&below.largest_directories), [("a/x".to_owned(), 100)]);
    assert!(matches!(usage(&store, &root, b"four", &options), Err(ViewError::NotADirectory { .. })));
}
