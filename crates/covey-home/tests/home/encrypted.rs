//! Encrypted stores: what lies there says nothing, what was changed does not open, and keys change without loss.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use covey_home::backend::{Backend, DirectoryBackend, MemoryBackend};
use covey_home::{
    BlockStore as _, CollectOptions, KeyError, MasterKey, NoProgress, OrgKeys, PackStore, Pointers,
    StoreError, THOROUGH_LEVEL, collect, contract, secure_and_publish, verify,
};
use covey_types::FencingToken;

use crate::support::{self, differences, dump, materialize_dir, noise, secure_dir};

fn open(dir: &Path, org: &str, master: &MasterKey) -> Result<PackStore, StoreError> {
    PackStore::open_directory_with(&dir.join("store"), org, Some(master))
}

fn packs(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let packs = fs::read_dir(dir.join("store/orgs/org/packs")).unwrap();
    packs.map(|entry| entry.unwrap().path()).map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// A home with text and noise of several lengths.
fn home(dir: &Path) -> PathBuf {
    let home = dir.join("home");
    fs::create_dir(&home).unwrap();
    for (name, len) in
        [("short-secret-name", 30), ("middle", 5_000), ("long", 70_000), ("very-long", 3_000_000)]
    {
        fs::write(home.join(name), noise(len as u64, len)).unwrap();
        let line = format!("a secret line of {name}\n");
        fs::write(home.join(format!("{name}.txt")), line.repeat(len / 20)).unwrap();
    }
    home
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

#[test]
fn encrypted_packs_keep_their_promises_on_every_backend() {
    let scratch = support::scratch();
    let directory = DirectoryBackend::open(&scratch.path().join("store"), "org").unwrap();
    let far = MemoryBackend::with_cache_dir(scratch.path().join("cache")).remote();
    let all: [Arc<dyn Backend>; 3] = [Arc::new(MemoryBackend::new()), Arc::new(directory), Arc::new(far)];
    for backend in all {
        contract::check_encrypted_packs(&backend).unwrap();
    }
    let master = MasterKey::generate().unwrap();
    let store = PackStore::open_encrypted(Arc::new(MemoryBackend::new()), "org", &master).unwrap();
    contract::check_blocks(&store).unwrap();
}

#[test]
fn a_home_comes_back_and_nothing_of_it_can_be_seen_in_the_store() {
    let scratch = support::scratch();
    let (dir, home) = (scratch.path(), home(scratch.path()));
    let master = MasterKey::generate().unwrap();
    let store = open(dir, "org", &master).unwrap();
    let report = secure_dir(&home, &store, None).unwrap();
    let again = open(dir, "org", &master).unwrap();
    materialize_dir(report.root, &dir.join("target"), &again, None).unwrap();
    assert_eq!(differences(&dump(&dir.join("target")), &dump(&home)), Vec::<String>::new());

    // The name of a block that anybody could compute from its bytes.
    let known = fs::read(home.join("middle")).unwrap();
    let plain_name = covey_home::BlockHasher::PLAIN.hash(&known);
    assert_ne!(store.hasher().hash(&known), plain_name);
    let mut seen = 0;
    let mut dirs = vec![dir.join("store")];
    while let Some(next) = dirs.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            seen += 1;
            let bytes = fs::read(&path).unwrap();
            for secret in [
                b"a secret line".as_slice(),
                b"secret-name",
                b"FRAM",
                b"COVEYEND",
                plain_name.as_bytes(),
                &known[..64],
            ] {
                assert!(!contains(&bytes, secret), "{} shows {secret:?}", path.display());
            }
        }
    }
    assert!(seen >= 2, "a pack and the key ring");
}

#[test]
fn two_orgs_have_different_names_for_the_same_bytes() {
    let scratch = support::scratch();
    let home = home(scratch.path());
    let master = MasterKey::generate().unwrap();
    let root =
        |org: &str| secure_dir(&home, &open(scratch.path(), org, &master).unwrap(), None).unwrap().root;
    assert_ne!(root("one"), root("other"));
    assert_eq!(root("one"), root("one"), "within an org they are the same");
    // Also who writes to the store cannot make one org's packs another's.
    let orgs = scratch.path().join("store/orgs");
    fs::rename(orgs.join("other"), orgs.join("third")).unwrap();
    let error = open(scratch.path(), "third", &master).unwrap_err();
    assert!(matches!(error, StoreError::Keys(KeyError::Damaged { .. })), "{error}");
}

#[test]
fn without_the_right_key_the_error_names_it() {
    let scratch = support::scratch();
    let (master, other) = (MasterKey::generate().unwrap(), MasterKey::generate().unwrap());
    drop(open(scratch.path(), "org", &master).unwrap());
    let missing = PackStore::open_directory(&scratch.path().join("store"), "org").unwrap_err().to_string();
    assert!(missing.contains(&master.id().to_string()) && missing.contains("--key-file"), "{missing}");
    let wrong = open(scratch.path(), "org", &other).unwrap_err().to_string();
    assert!(wrong.contains(&master.id().to_string()) && wrong.contains(&other.id().to_string()), "{wrong}");
}

#[test]
fn what_was_flipped_cut_or_swapped_is_damage_and_heals() {
    let scratch = support::scratch();
    let (dir, home) = (scratch.path(), home(scratch.path()));
    let master = MasterKey::generate().unwrap();
    let store = open(dir, "org", &master).unwrap();
    secure_dir(&home, &store, None).unwrap();
    fs::write(home.join("more"), noise(77, 400_000)).unwrap();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let good = packs(dir);
    assert_eq!(good.len(), 2);
    let check = |what: &str| {
        // One store for all: what it has found damaged is stored again. Behind a damaged listing more may be.
        let store = open(dir, "org", &master).unwrap();
        let problems = || {
            let found = verify(&store, &root);
            found.map_or_else(|error| vec![error.to_string()], |report| report.problems)
        };
        assert!(!problems().is_empty(), "{what}: nobody noticed");
        for _ in 0..4 {
            assert_eq!(secure_dir(&home, &store, None).unwrap().root, root);
            if problems().is_empty() {
                break;
            }
        }
        let healed = verify(&open(dir, "org", &master).unwrap(), &root).unwrap().problems;
        assert_eq!(healed, Vec::<String>::new(), "{what}");
        for path in packs(dir).into_keys() {
            fs::remove_file(path).unwrap();
        }
        good.iter().for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
    };
    for (path, bytes) in &good {
        let len = bytes.len();
        for at in [33, 40, 70_000, len / 2, len - 17, len - 1] {
            let mut bad = bytes.clone();
            bad[at.min(len - 1)] ^= 0x20;
            fs::write(path, bad).unwrap();
            check(&format!("a flipped bit at {at} of {len}"));
        }
        // The last two are cuts at the border of a piece.
        for keep in [0, 31, 32, len / 2, len - 1, 32 + 65_552, 32 + 2 * 65_552] {
            fs::write(path, &bytes[..keep.min(len - 1)]).unwrap();
            check(&format!("cut at {keep} of {len}"));
        }
    }
    let (one, other) = (good.keys().next().unwrap(), good.keys().next_back().unwrap());
    fs::write(one, &good[other]).unwrap();
    fs::write(other, &good[one]).unwrap();
    check("two packs have each other's names");
    // Two pieces of one pack change their places.
    let mut bad = good[one].clone();
    let (first, second) = (32..32 + 65_552, 32 + 65_552..32 + 2 * 65_552);
    if bad.len() > second.end {
        let piece = bad[first.clone()].to_vec();
        bad.copy_within(second.clone(), first.start);
        bad[second].copy_from_slice(&piece);
        fs::write(one, bad).unwrap();
        check("two pieces have changed places");
    }
}

fn published(dir: &Path, store: &PackStore, home: &Path, name: &str) -> Pointers {
    let pointers = Pointers::open(&dir.join("store"), "org").unwrap();
    let excludes = covey_home::Excludes::none();
    let request = covey_home::SecureRequest {
        dir: home,
        store,
        stat_cache: None,
        excludes: &excludes,
        previous: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    };
    secure_and_publish(&request, &pointers, name, FencingToken(1)).unwrap();
    pointers
}

#[test]
fn a_new_key_takes_over_and_the_old_one_is_retired_when_nothing_needs_it() {
    let scratch = support::scratch();
    let (dir, home) = (scratch.path(), home(scratch.path()));
    let master = MasterKey::generate().unwrap();
    let store = open(dir, "org", &master).unwrap();
    let pointers = published(dir, &store, &home, "home");
    let first = store.newest_key().unwrap();
    let backend = DirectoryBackend::open(&dir.join("store"), "org").unwrap();
    let second = OrgKeys::rotate(&backend, "org", &master).unwrap();
    fs::write(home.join("after"), noise(5, 100_000)).unwrap();
    // The store that was open before takes the new key up.
    published(dir, &store, &home, "home");
    assert_eq!(store.newest_key(), Some(second));
    let key_of = |name| store.pack_contents(&name).unwrap().unwrap().key;
    let mut keys: Vec<_> = store.packs().unwrap().into_iter().map(key_of).collect();
    keys.sort();
    let mut both = vec![Some(first), Some(second)];
    both.sort();
    assert_eq!(keys, both);
    let report =
        collect(&store, &pointers, &CollectOptions::default(), &AtomicBool::new(false), &NoProgress).unwrap();
    assert_eq!((report.keys_retired, report.packs_improved), (vec![first], 1));
    assert_eq!(OrgKeys::report(&backend).unwrap().unwrap().keys, [second]);
    let root = pointers.current("home").unwrap().unwrap().root;
    let again = open(dir, "org", &master).unwrap();
    assert_eq!(verify(&again, &root).unwrap().problems, Vec::<String>::new());
    // The org is deleted: its packs may still lie somewhere, and nobody reads them.
    assert!(OrgKeys::destroy(&backend).unwrap());
    let gone = open(dir, "org", &master).unwrap_err();
    assert!(matches!(gone, StoreError::Keys(KeyError::Gone { .. })), "{gone}");
}

#[test]
fn a_plain_store_becomes_an_encrypted_one_by_collecting() {
    let scratch = support::scratch();
    let (dir, home) = (scratch.path(), home(scratch.path()));
    let plain = PackStore::open_directory(&dir.join("store"), "org").unwrap();
    let pointers = published(dir, &plain, &home, "home");
    let root = pointers.current("home").unwrap().unwrap().root;
    drop(plain);
    let master = MasterKey::generate().unwrap();
    let store = open(dir, "org", &master).unwrap();
    assert_eq!(verify(&store, &root).unwrap().problems, Vec::<String>::new());
    let report =
        collect(&store, &pointers, &CollectOptions::default(), &AtomicBool::new(false), &NoProgress).unwrap();
    assert_eq!(report.packs_improved, 1, "{report:?}");
    for (path, bytes) in packs(dir) {
        assert!(!contains(&bytes, b"COVEYEND"), "{} is plain", path.display());
    }
    let again = open(dir, "org", &master).unwrap();
    assert_eq!(verify(&again, &root).unwrap().problems, Vec::<String>::new());
    // Its names stay as they are in the manifests that name them.
    assert!(!again.keyring().unwrap().unwrap().names_are_keyed);
}

#[test]
fn what_was_packed_in_haste_is_packed_harder_once_and_not_again() {
    let scratch = support::scratch();
    let (dir, home) = (scratch.path(), home(scratch.path()));
    // Text as homes have it: a harder search finds more of it again.
    let sources = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src");
    for name in ["collect.rs", "pointer.rs", "pack_store.rs", "pack_store/pack.rs", "pack_store/catalogue.rs"]
    {
        fs::copy(sources.join(name), home.join(name.replace('/', "-"))).unwrap();
    }
    let store = PackStore::open_directory(&dir.join("store"), "org").unwrap();
    let pointers = published(dir, &store, &home, "home");
    let run = |recompress_bytes| {
        let options = CollectOptions { recompress_bytes, level: THOROUGH_LEVEL, ..CollectOptions::default() };
        let dry = CollectOptions { dry_run: true, ..options };
        let planned = collect(&store, &pointers, &dry, &AtomicBool::new(false), &NoProgress).unwrap();
        let done = collect(&store, &pointers, &options, &AtomicBool::new(false), &NoProgress).unwrap();
        assert_eq!(planned.freed_bytes, done.freed_bytes);
        done
    };
    assert_eq!(run(0).packs_improved, 0);
    assert_eq!(run(1000).packs_improved, 0, "the pack is larger than what one run may do");
    let done = run(u64::MAX);
    assert!(done.packs_improved == 1 && done.freed_bytes > 0, "{done:?}");
    assert_eq!(run(u64::MAX).packs_improved, 0);
    let root = pointers.current("home").unwrap().unwrap().root;
    assert_eq!(verify(&store, &root).unwrap().problems, Vec::<String>::new());
}
