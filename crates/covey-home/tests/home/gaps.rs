//! What the store has lost when a home comes up: the rest comes up, and no secure that follows makes the loss final.

use std::fs;
use std::path::{Path, PathBuf};

use covey_home::manifest::EntryBody;
use covey_home::view::Snapshot;
use covey_home::{MaterializeError, MemoryStore, object};
use covey_types::{BlockHash, RootHash};

use crate::support::{self, differences, dump, materialize_dir, secure_dir, settle};

struct World {
    scratch: tempfile::TempDir,
    store: MemoryStore,
    root: RootHash,
}

impl World {
    fn new() -> Self {
        let scratch = support::scratch();
        let home = scratch.path().join("home");
        fs::create_dir_all(home.join("dir/below")).unwrap();
        for name in ["first", "dir/second", "dir/third", "dir/below/fourth"] {
            fs::write(home.join(name), name.repeat(20)).unwrap();
        }
        fs::hard_link(home.join("dir/second"), home.join("linked")).unwrap();
        let store = MemoryStore::new();
        let root = secure_dir(&home, &store, None).unwrap().root;
        Self { scratch, store, root }
    }

    fn home(&self) -> PathBuf {
        self.scratch.path().join("home")
    }

    fn cache(&self) -> PathBuf {
        self.scratch.path().join("cache")
    }

    /// The home comes up without what was lost; gives the gaps.
    fn come_up(&self, copy: &Path) -> Vec<String> {
        match materialize_dir(self.root, copy, &self.store, Some(&self.cache())) {
            Err(MaterializeError::Incomplete { report }) => {
                report.gaps.into_iter().map(|gap| gap.path).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    fn secure(&self, copy: &Path) -> RootHash {
        let report = secure_dir(copy, &self.store, Some(&self.cache())).unwrap();
        assert!(!report.partial);
        report.root
    }

    /// Somebody has mended the store.
    fn mend(&self) {
        assert_eq!(secure_dir(&self.home(), &self.store, None).unwrap().root, self.root);
    }

    fn block(&self, name: &str) -> BlockHash {
        BlockHash::of(&fs::read(self.home().join(name)).unwrap())
    }

    fn listing(&self, path: &[u8]) -> BlockHash {
        match Snapshot::open(&self.store, &self.root).unwrap().find(path).unwrap().body {
            EntryBody::Directory { listing } => listing,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_lost_file_stays_in_the_states_that_follow_and_comes_back() {
    let world = World::new();
    let copy = world.scratch.path().join("copy");
    assert!(world.store.remove(&world.block("dir/third")));
    assert_eq!(world.come_up(&copy), ["dir/third"]);
    assert_eq!(world.secure(&copy), world.root, "nothing has changed");
    assert_eq!(world.secure(&copy), world.root, "also when the stat cache knows it");
    fs::write(copy.join("dir/new"), "new").unwrap();
    let later = world.secure(&copy);
    assert_ne!(later, world.root);
    world.mend();
    let whole = world.scratch.path().join("whole");
    materialize_dir(later, &whole, &world.store, None).unwrap();
    assert_eq!(fs::read(whole.join("dir/third")).unwrap(), fs::read(world.home().join("dir/third")).unwrap());
    assert_eq!(fs::read(whole.join("dir/new")).unwrap(), b"new");
    assert_eq!(covey_home::verify(&world.store, &later).unwrap().problems, Vec::<String>::new());
}

#[test]
fn what_is_put_in_the_place_of_a_gap_counts_and_so_does_its_deletion() {
    let world = World::new();
    let copy = world.scratch.path().join("copy");
    assert!(world.store.remove(&world.block("first")));
    assert_eq!(world.come_up(&copy), ["first"]);
    fs::write(copy.join("first"), "the agent's").unwrap();
    let written = world.secure(&copy);
    let read = |root: &RootHash| Snapshot::open(&world.store, root).unwrap().find(b"first").map(|_| ());
    read(&written).unwrap();
    fs::remove_file(copy.join("first")).unwrap();
    assert!(read(&world.secure(&copy)).is_err(), "deleted, and not kept as a gap");
}

#[test]
fn a_lost_directory_stays_whole_in_the_states_that_follow() {
    let world = World::new();
    let copy = world.scratch.path().join("copy");
    settle();
    assert!(world.store.remove(&world.listing(b"dir/below")));
    assert_eq!(world.come_up(&copy), ["dir/below"]);
    assert!(!copy.join("dir/below").exists(), "an empty one would be taken for what the home has");
    assert_eq!(world.secure(&copy), world.root);
    fs::write(copy.join("dir/third"), "changed").unwrap();
    let later = world.secure(&copy);
    world.mend();
    let whole = world.scratch.path().join("whole");
    materialize_dir(later, &whole, &world.store, None).unwrap();
    assert_eq!(
        fs::read(whole.join("dir/below/fourth")).unwrap(),
        fs::read(world.home().join("dir/below/fourth")).unwrap()
    );
    assert_eq!(covey_home::verify(&world.store, &later).unwrap().problems, Vec::<String>::new());
    // A directory of the agent's own in its place counts.
    assert!(world.store.remove(&world.listing(b"dir/below")));
    let other = world.scratch.path().join("other");
    assert_eq!(world.come_up(&other), ["dir/below"]);
    fs::create_dir(other.join("dir/below")).unwrap();
    let listed = world.secure(&other);
    assert!(Snapshot::open(&world.store, &listed).unwrap().list(b"dir/below").unwrap().is_empty());
}

#[test]
fn lost_names_of_one_inode_stay_one_inode() {
    let world = World::new();
    let copy = world.scratch.path().join("copy");
    assert!(world.store.remove(&world.block("linked")));
    assert_eq!(world.come_up(&copy), ["dir/second", "linked"]);
    let root = world.secure(&copy);
    assert_eq!(root, world.root);
    world.mend();
    materialize_dir(root, &copy, &world.store, Some(&world.cache())).unwrap();
    assert_eq!(differences(&dump(&copy), &dump(&world.home())), Vec::<String>::new());
    assert_eq!(object::read_root(&world.store, &root).unwrap().files, 5);
}

#[test]
fn without_the_record_of_gaps_nothing_is_secured() {
    let world = World::new();
    let copy = world.scratch.path().join("copy");
    assert!(world.store.remove(&world.block("first")));
    world.come_up(&copy);
    let record = world.scratch.path().join("cache.gaps");
    let mut bytes = fs::read(&record).unwrap();
    bytes[20] ^= 1;
    fs::write(&record, bytes).unwrap();
    let error = secure_dir(&copy, &world.store, Some(&world.cache())).unwrap_err().to_string();
    assert!(error.contains("cache.gaps"), "{error}");
    world.mend();
    materialize_dir(world.root, &copy, &world.store, Some(&world.cache())).unwrap();
    assert!(!record.exists());
    assert_eq!(world.secure(&copy), world.root);
}
