//! Copying a store to another backend.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use covey_home::backend::{Backend, DirectoryBackend, Expected, Key, MemoryBackend};
use covey_home::{
    Block, BlockStore as _, CollectOptions, CopyError, CopyReport, Excludes, NoProgress, PackStore, Pointers,
    SecureRequest, check_pack, collect, copy, secure_and_publish, verify,
};
use covey_types::{FencingToken, Generation, RootHash};

/// A directory with files.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.path().join(name), bytes).unwrap();
    }

    fn path(&self) -> &std::path::Path {
        self.0.path()
    }
}

fn copied(from: &Arc<dyn Backend>, to: &Arc<dyn Backend>) -> Result<CopyReport, CopyError> {
    copy(from, to, None, &AtomicBool::new(false), &NoProgress)
}

fn secure(tree: &Tree, backend: &Arc<dyn Backend>) -> RootHash {
    let store = PackStore::open(Arc::clone(backend)).unwrap();
    let request = SecureRequest {
        dir: tree.path(),
        store: &store,
        excludes: &Excludes::none(),
        stat_cache: None,
        previous: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    };
    let pointers = Pointers::on(Arc::clone(backend));
    secure_and_publish(&request, &pointers, "home", FencingToken(1)).unwrap().root
}

fn is_whole(backend: &Arc<dyn Backend>, root: &RootHash) -> bool {
    let store = PackStore::open(Arc::clone(backend)).unwrap();
    verify(&store, root).unwrap().problem_count == 0
}

#[test]
fn a_copy_has_every_state_and_a_second_one_copies_what_has_come_since() {
    let dir = tempfile::tempdir().unwrap();
    let from: Arc<dyn Backend> = Arc::new(DirectoryBackend::open(dir.path(), "org").unwrap());
    let to: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    let tree = Tree::new();
    tree.file("a", b"first");
    let first = secure(&tree, &from);
    let report = copied(&from, &to).unwrap();
    assert_eq!((report.packs, report.packs_copied, report.homes), (1, 1, 1));
    assert!(report.blocks_checked >= 3 && report.bytes_copied > 0 && report.problems.is_empty());
    tree.file("b", b"second");
    let second = secure(&tree, &from);
    let report = copied(&from, &to).unwrap();
    assert_eq!((report.packs, report.packs_copied), (2, 1));
    let kept = Pointers::on(Arc::clone(&to)).snapshots("home").unwrap();
    assert_eq!(kept.iter().map(|pointer| pointer.root).collect::<Vec<_>>(), [first, second]);
    assert!(kept.iter().all(|pointer| is_whole(&to, &pointer.root)));
    assert_eq!(copied(&from, &to).unwrap().packs_copied, 0);
}

#[test]
fn a_target_that_went_its_own_way_is_left_alone() {
    let backends: [Arc<dyn Backend>; 2] = [Arc::new(MemoryBackend::new()), Arc::new(MemoryBackend::new())];
    let [from, to] = &backends;
    let tree = Tree::new();
    tree.file("a", b"here");
    secure(&tree, from);
    tree.file("a", b"there");
    let there = secure(&tree, to);
    let error = copied(from, to).unwrap_err();
    assert!(matches!(error, CopyError::Diverged { here: 1, there: 1, .. }), "{error}");
    assert_eq!(Pointers::on(Arc::clone(to)).current("home").unwrap().unwrap().root, there);
    // Behind, it is carried on.
    let behind: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    copied(from, &behind).unwrap();
    tree.file("b", b"more");
    let newest = secure(&tree, from);
    copied(from, &behind).unwrap();
    assert_eq!(Pointers::on(Arc::clone(&behind)).current("home").unwrap().unwrap().root, newest);
    // And the other way round nothing is moved back.
    assert!(matches!(copied(&behind, from), Ok(report) if report.packs_copied == 0));
}

#[test]
fn what_is_damaged_is_named_and_what_is_whole_beside_it_is_copied() {
    let memory = MemoryBackend::new();
    let (from, to): (Arc<dyn Backend>, Arc<dyn Backend>) =
        (Arc::new(memory.clone()), Arc::new(MemoryBackend::new()));
    let tree = Tree::new();
    tree.file("a", &[7; 600_000]);
    tree.file("b", &noise(700_000));
    secure(&tree, &from);
    let pack = memory.keys().into_iter().find(|key| key.as_str().starts_with("packs/")).unwrap();
    // In the middle of what does not compress.
    memory.tamper(&pack, |bytes| {
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
    });
    let report = copied(&from, &to).unwrap();
    assert_eq!((report.packs_copied, report.problems.len()), (1, 1), "{report:?}");
    let store = PackStore::open(Arc::clone(&to)).unwrap();
    let text = covey_types::BlockHash::of(&[7; 600_000]);
    assert_eq!(store.get(&text).unwrap(), [7; 600_000]);
}

#[test]
fn a_copy_after_a_collection_takes_publishes() {
    let from: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    let tree = Tree::new();
    for number in 0..3_u8 {
        tree.file("a", &[number; 5000]);
        secure(&tree, &from);
    }
    let pointers = Pointers::on(Arc::clone(&from));
    pointers.retain("home", &|_| false).unwrap();
    let store = PackStore::open(Arc::clone(&from)).unwrap();
    let options = CollectOptions { rewrite_below_percent: 100, ..CollectOptions::default() };
    let collected = collect(&store, &pointers, &options, &AtomicBool::new(false), &NoProgress).unwrap();
    assert!(collected.packs_removed > 0, "{collected:?}");
    let to: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    copied(&from, &to).unwrap();
    tree.file("b", b"after");
    let root = secure(&tree, &to);
    let current = Pointers::on(Arc::clone(&to)).current("home").unwrap().unwrap();
    assert_eq!((current.root, current.generation), (root, Generation(4)));
    assert!(is_whole(&to, &root));
}

#[test]
fn a_pack_from_somebody_else_is_checked_as_a_whole() {
    let memory = MemoryBackend::new();
    let store = PackStore::open(Arc::new(memory.clone())).unwrap();
    let upload = store.upload().unwrap();
    upload.put(&Block::of(b"a block").unwrap()).unwrap();
    upload.finish().unwrap();
    let key = memory.keys().into_iter().find(|key| key.as_str().starts_with("packs/")).unwrap();
    let bytes = memory.read(&key, 0, 1 << 20).unwrap();
    assert_eq!(check_pack(&key, &bytes, None), Ok(1));
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        assert!(check_pack(&key, &damaged, None).is_err(), "{at}");
        assert!(check_pack(&key, &bytes[..at], None).is_err(), "{at}");
    }
    let elsewhere = Key::new(&["packs", "odd"]).unwrap();
    assert!(check_pack(&elsewhere, &bytes, None).is_err());
}

#[test]
fn a_cancelled_copy_goes_on_later() {
    let from: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    let to: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    let tree = Tree::new();
    tree.file("a", b"x");
    let root = secure(&tree, &from);
    let stopped = copy(&from, &to, None, &AtomicBool::new(true), &NoProgress);
    assert!(matches!(stopped, Err(CopyError::Cancelled)));
    assert_eq!(Pointers::on(Arc::clone(&to)).current("home").unwrap(), None, "no pointer before its blocks");
    // A pointer that is damaged is not carried on.
    copied(&from, &to).unwrap();
    assert!(is_whole(&to, &root));
    let current = Key::new(&["homes", "home", "current"]).unwrap();
    let put = from.put_if(&current, b"nonsense", &Expected::Any).unwrap();
    assert!(matches!(put, covey_home::backend::PutOutcome::Written(_)));
    assert!(matches!(copied(&from, &to), Err(CopyError::Pointer(_))));
}

fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().finalize_xof().fill(&mut bytes);
    bytes
}
