//! The damage matrix: every file of a store × every kind of damage × every operation. Each operation is right or says
//! what is wrong with what, nothing else is lost, verification finds it, and repair mends it where a copy exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use covey_home::integrity::{
    RepairReport, RepairRequest, RepairSource, RootNames as _, StoreCheck, StoreReport, check_store,
    repair_store,
};
use covey_home::manifest::EntryBody;
use covey_home::view::{Snapshot, diff};
use covey_home::{
    Block, BlockStore as _, CollectOptions, Excludes, MaterializeError, NoProgress, PackStore, Pointers,
    SecureRequest, collect, object, restore_path, secure_and_publish,
};
use covey_types::{BlockHash, FencingToken, RootHash};

use crate::support::{self, Dumped, differences, dump, materialize_dir, noise, settle};

const ORG: &str = "org";

/// A store as it was written, with two homes that share blocks.
struct World {
    scratch: tempfile::TempDir,
    /// Every snapshot, the current ones last.
    roots: Vec<(String, RootHash)>,
    /// What each path of each snapshot is made of, its directories' objects included.
    needs: BTreeMap<(RootHash, Vec<u8>), BTreeSet<BlockHash>>,
    /// What each pack holds.
    packs: BTreeMap<String, BTreeSet<BlockHash>>,
    homes: BTreeMap<String, BTreeMap<Vec<u8>, Dumped>>,
}

fn open(store: &Path) -> (PackStore, Pointers) {
    (PackStore::open_directory(store, ORG).unwrap(), Pointers::open(store, ORG).unwrap())
}

fn secure_home(dir: &Path, store: &Path, home: &str, cache: &Path) -> Result<RootHash, String> {
    let text = |error: &dyn std::error::Error| format!("{error}");
    let packs = PackStore::open_directory(store, ORG).map_err(|error| text(&error))?;
    let pointers = Pointers::open(store, ORG).map_err(|error| text(&error))?;
    let request = SecureRequest {
        dir,
        store: &packs,
        stat_cache: Some(cache),
        excludes: &Excludes::none(),
        previous: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    };
    let done = secure_and_publish(&request, &pointers, home, FencingToken(1));
    done.map(|report| report.root).map_err(|error| text(&error))
}

fn check(store: &PackStore, pointers: &Pointers) -> StoreReport {
    check_store(&StoreCheck {
        store,
        roots: pointers,
        sample_percent: 100,
        record: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
    })
    .unwrap()
}

fn repair(store: &PackStore, pointers: &Pointers, sources: &[RepairSource<'_>]) -> RepairReport {
    repair_store(&RepairRequest {
        store,
        roots: pointers,
        pointers: Some(pointers),
        sources,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
    })
    .unwrap()
}

fn gather(store: &Path) -> Result<(), String> {
    let packs = PackStore::open_directory(store, ORG).map_err(|error| error.to_string())?;
    let pointers = Pointers::open(store, ORG).map_err(|error| error.to_string())?;
    let done = collect(&packs, &pointers, &CollectOptions::default(), &AtomicBool::new(false), &NoProgress);
    done.map(drop).map_err(|error| error.to_string())
}

fn put_alone(store: &Path, bytes: &[u8]) {
    let (packs, _) = open(store);
    let upload = packs.upload().unwrap();
    upload.put(&Block::of(bytes).unwrap()).unwrap();
    upload.finish().unwrap();
}

impl World {
    fn new() -> Self {
        let scratch = support::scratch();
        let store = scratch.path().join("store");
        let (one, two) = (scratch.path().join("one"), scratch.path().join("two"));
        for dir in [&one, &two] {
            fs::create_dir(dir).unwrap();
        }
        for number in 0..4_u64 {
            fs::write(two.join(format!("shared-{number}")), noise(number, 30_000)).unwrap();
        }
        fs::write(two.join("own"), b"only two has this").unwrap();
        let cache = |name: &str| scratch.path().join(format!("cache-{name}"));
        settle();
        secure_home(&two, &store, "two", &cache("two")).unwrap();
        // Of what the first home shares with the second, its own packs have the directories' objects only.
        fs::create_dir(one.join("deep")).unwrap();
        for number in 0..4_u64 {
            fs::write(one.join(format!("deep/file-{number}")), noise(number, 30_000)).unwrap();
        }
        secure_home(&one, &store, "one", &cache("one")).unwrap();
        fs::write(one.join("text"), b"a line\n".repeat(900)).unwrap();
        let large = fs::File::create(one.join("large")).unwrap();
        large.set_len(9 << 20).unwrap();
        for at in [0, 6 << 20] {
            std::os::unix::fs::FileExt::write_all_at(&large, &noise(at + 50, 20_000), at).unwrap();
        }
        fs::hard_link(one.join("text"), one.join("deep/linked")).unwrap();
        secure_home(&one, &store, "one", &cache("one")).unwrap();
        // A collection has been, and a damaged pack has been replaced.
        put_alone(&store, &noise(77, 5000));
        gather(&store).unwrap();
        put_alone(&store, &noise(78, 5000));
        let (packs, pointers) = open(&store);
        let known: BTreeSet<_> = packs.packs().unwrap().into_iter().collect();
        put_alone(&store, &noise(79, 5000));
        let fresh = packs.packs().unwrap().into_iter().find(|pack| !known.contains(pack)).unwrap();
        let path = store.join(format!("orgs/{ORG}/packs/{fresh}.pack"));
        let good = fs::read(&path).unwrap();
        flip(&path, 100);
        assert_eq!(repair(&packs, &pointers, &[]).replaced_packs, 1);
        fs::write(&path, good).unwrap();
        fs::write(one.join("last"), b"the last change").unwrap();
        settle();
        secure_home(&one, &store, "one", &cache("one")).unwrap();
        let (packs, pointers) = open(&store);
        assert_eq!(check(&packs, &pointers).problems, Vec::<String>::new());
        let mut world = Self {
            roots: Vec::new(),
            needs: BTreeMap::new(),
            packs: BTreeMap::new(),
            homes: BTreeMap::from([("one".to_owned(), dump(&one)), ("two".to_owned(), dump(&two))]),
            scratch,
        };
        for home in ["one", "two"] {
            for pointer in pointers.snapshots(home).unwrap() {
                world.roots.push((home.to_owned(), pointer.root));
                world.walk(&packs, pointer.root);
            }
        }
        for pack in packs.packs().unwrap() {
            let contents = packs.pack_contents(&pack).unwrap().unwrap();
            let blocks = contents.blocks.iter().map(|block| block.hash).collect();
            world.packs.insert(format!("{pack}.pack"), blocks);
        }
        world
    }

    fn walk(&mut self, store: &PackStore, root: RootHash) {
        let top = object::read_root(store, &root).unwrap();
        let above = BTreeSet::from([BlockHash::from_bytes(*root.as_bytes()), top.listing]);
        let mut waiting = vec![(Vec::new(), top.listing, above.clone())];
        self.needs.insert((root, Vec::new()), above);
        while let Some((path, listing, above)) = waiting.pop() {
            for (name, entry) in object::read_listing(store, &listing).unwrap().entries {
                let child = if path.is_empty() { name } else { [&path[..], b"/", &name].concat() };
                let mut needs = above.clone();
                needs.extend(entry.blocks());
                if let EntryBody::Directory { listing } = entry.body {
                    needs.insert(listing);
                    waiting.push((child.clone(), listing, needs.clone()));
                }
                self.needs.insert((root, child), needs);
            }
        }
    }

    fn store(&self) -> PathBuf {
        self.scratch.path().join("store")
    }

    fn current(&self, home: &str) -> RootHash {
        self.roots.iter().rfind(|(of, _)| of == home).unwrap().1
    }

    /// Every file of the store, from its directory.
    fn files(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut waiting = vec![self.store()];
        while let Some(dir) = waiting.pop() {
            for entry in fs::read_dir(&dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    waiting.push(path);
                } else if path.file_name().is_some_and(|name| name != "lock") {
                    found.push(path.strip_prefix(self.store()).unwrap().to_owned());
                }
            }
        }
        found.sort();
        found
    }

    /// A copy of the store, damaged.
    fn damaged(&self, case: &Case) -> Trial {
        let dir = support::scratch();
        let store = dir.path().join("store");
        copy_tree(&self.store(), &store);
        fs::copy(self.scratch.path().join("cache-one"), dir.path().join("cache")).unwrap();
        case.damage.apply(&store.join(&case.file), case.other.as_ref().map(|other| store.join(other)));
        Trial { dir, store }
    }

    /// Blocks that only the damaged file has.
    fn endangered(&self, case: &Case) -> BTreeSet<BlockHash> {
        let name = case.file.file_name().unwrap().to_str().unwrap();
        let others = self.packs.iter().filter(|(pack, _)| *pack != name).flat_map(|(_, blocks)| blocks);
        let others: BTreeSet<BlockHash> = others.copied().collect();
        let own = self.packs.get(name).cloned().unwrap_or_default();
        own.difference(&others).copied().collect()
    }
}

struct Trial {
    dir: tempfile::TempDir,
    store: PathBuf,
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = at.min(bytes.len() - 1);
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Damage {
    /// To so many thousandths of its length.
    Truncated(usize),
    /// A bit at so many thousandths.
    Flipped(usize),
    Removed,
    Emptied,
    /// With another file of its kind, or with some other where there is none.
    Swapped,
}

const DAMAGES: [Damage; 11] = [
    Damage::Truncated(500),
    Damage::Truncated(999),
    Damage::Flipped(0),
    Damage::Flipped(10),
    Damage::Flipped(250),
    Damage::Flipped(600),
    Damage::Flipped(990),
    Damage::Flipped(1000),
    Damage::Removed,
    Damage::Emptied,
    Damage::Swapped,
];

impl Damage {
    fn apply(self, path: &Path, other: Option<PathBuf>) {
        let len = fs::metadata(path).unwrap().len() as usize;
        match self {
            Self::Truncated(thousandths) => {
                let file = fs::OpenOptions::new().write(true).open(path).unwrap();
                file.set_len((len * thousandths / 1000) as u64).unwrap();
            }
            Self::Flipped(thousandths) => flip(path, len * thousandths / 1000),
            Self::Removed => fs::remove_file(path).unwrap(),
            Self::Emptied => fs::write(path, b"").unwrap(),
            Self::Swapped => {
                let other = other.unwrap();
                let (mine, its) = (fs::read(path).unwrap(), fs::read(&other).unwrap());
                fs::write(path, its).unwrap();
                fs::write(other, mine).unwrap();
            }
        }
    }
}

#[derive(Debug, Clone)]
struct Case {
    file: PathBuf,
    damage: Damage,
    other: Option<PathBuf>,
}

/// What kind of file this is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Pack,
    Pointer,
    PointerCopy,
    Kept,
    Condemned,
    Floor,
    Suspects,
    Identity,
    Cache,
}

fn kind(file: &Path) -> Kind {
    let text = file.to_str().unwrap();
    let parts: Vec<&str> = text.split('/').collect();
    match parts[2..] {
        ["packs", _] => Kind::Pack,
        ["homes", _, "current"] => Kind::Pointer,
        ["homes", _, "current.copy"] => Kind::PointerCopy,
        ["homes", _, "snapshots", _] => Kind::Kept,
        ["gc", "condemned"] => Kind::Condemned,
        ["gc", "floor"] => Kind::Floor,
        ["damage", "suspects"] => Kind::Suspects,
        ["identity"] => Kind::Identity,
        ["cache", _] => Kind::Cache,
        _ => panic!("a file of no kind: {text}"),
    }
}

impl Case {
    /// Damage that leaves a store as it could be without damage, or that costs nothing.
    fn is_harmless(&self) -> bool {
        match (kind(&self.file), self.damage) {
            // Where blocks lie is read from the packs; which pack has which name means nothing.
            (Kind::Cache, _) | (Kind::Pack, Damage::Swapped) => true,
            // As before the first damage, as after a crash before it was written, as after it was forgotten.
            (Kind::Suspects | Kind::Floor | Kind::PointerCopy | Kind::Kept, Damage::Removed) => true,
            // A store from before stores had names; the server compares.
            (Kind::Identity, Damage::Removed) => true,
            _ => false,
        }
    }

    /// There is no second place from which it could be mended.
    fn has_no_copy(&self) -> bool {
        kind(&self.file) == Kind::Kept
    }
}

fn cases(world: &World, wanted: &[Kind]) -> Vec<Case> {
    let files = world.files();
    let mut cases = Vec::new();
    for file in files.iter().filter(|file| wanted.contains(&kind(file))) {
        for damage in DAMAGES {
            let is_alone = |file: &Path| files.iter().filter(|other| kind(other) == kind(file)).count() == 1;
            if damage == Damage::Swapped && kind(file) == Kind::Cache && is_alone(file) {
                continue;
            }
            let same = files.iter().rfind(|other| kind(other) == kind(file) && *other != file);
            let other = same.or_else(|| files.iter().find(|other| *other != file));
            let other = (damage == Damage::Swapped).then(|| other.unwrap().clone());
            cases.push(Case { file: file.clone(), damage, other });
        }
    }
    cases
}

/// What a home came up as: everything that does not need an endangered block, and each name that is missing is named.
fn materialize_all(world: &World, trial: &Trial, case: &Case) {
    let endangered = world.endangered(case);
    let (packs, _) = open(&trial.store);
    for home in ["one", "two"] {
        let (root, target) = (world.current(home), trial.dir.path().join(format!("up-{home}")));
        let report = match materialize_dir(root, &target, &packs, None) {
            Ok(_) => {
                assert_eq!(differences(&dump(&target), &world.homes[home]), Vec::<String>::new(), "{case:?}");
                continue;
            }
            Err(MaterializeError::Incomplete { report }) => report,
            Err(error @ MaterializeError::Root { .. }) => {
                let needs = &world.needs[&(root, Vec::new())];
                assert!(needs.iter().any(|block| endangered.contains(block)), "{case:?}: {error}");
                continue;
            }
            Err(error) => panic!("{case:?}: {error}"),
        };
        let came_up = dump(&target);
        for (path, wanted) in &world.homes[home] {
            let is_hit = world.needs[&(root, path.clone())].iter().any(|block| endangered.contains(block));
            match came_up.get(path) {
                Some(found) => assert_eq!(found.content, wanted.content, "{case:?}: {path:?}"),
                None => {
                    let text = String::from_utf8_lossy(path).into_owned();
                    let is_named = report.gaps.iter().any(|gap| {
                        gap.path == text || text.starts_with(&format!("{}/", gap.path)) || gap.path.is_empty()
                    });
                    assert!(is_named && is_hit, "{case:?}: `{text}` is lost, gaps {:?}", report.gaps);
                }
            }
        }
    }
}

/// Every file of every snapshot reads right or fails with a name; and two snapshots can be compared or it is said why.
fn look_at_all(world: &World, trial: &Trial, case: &Case) {
    let endangered = world.endangered(case);
    let (packs, _) = open(&trial.store);
    for ((root, path), needs) in &world.needs {
        let is_hit = needs.iter().any(|block| endangered.contains(block));
        let found = Snapshot::open(&packs, root).and_then(|snapshot| {
            let entry = snapshot.find(path)?;
            if let EntryBody::File(_) = entry.body {
                let mut bytes = Vec::new();
                let mut reader = snapshot.read(path)?;
                if let Err(error) = std::io::Read::read_to_end(&mut reader, &mut bytes) {
                    assert!(is_hit, "{case:?}: {path:?}: {error}");
                }
            }
            Ok(())
        });
        if let Err(error) = found {
            assert!(is_hit, "{case:?}: {path:?} is not hit: {error}");
            let detail =
                std::error::Error::source(&error).map_or_else(String::new, |source| source.to_string());
            assert!(detail.contains("block"), "{case:?}: `{error}`: `{detail}` names no block");
        }
    }
    let (first, last) = (world.roots[0].1, world.current("one"));
    if let Err(error) = diff(&packs, &first, &last, &mut |_| ControlFlow::Continue(())) {
        assert!(!endangered.is_empty(), "{case:?}: {error}");
    }
}

/// What of the snapshots can be read.
fn readable(world: &World, store: &Path) -> BTreeSet<BlockHash> {
    let (packs, _) = open(store);
    let all: BTreeSet<BlockHash> = world.needs.values().flatten().copied().collect();
    all.into_iter().filter(|block| packs.get(block).is_ok()).collect()
}

fn verify_finds_it(world: &World, trial: &Trial, case: &Case) {
    let endangered = world.endangered(case);
    let is_needed = world.needs.values().flatten().any(|block| endangered.contains(block));
    // What nobody needs may go.
    let is_garbage = case.damage == Damage::Removed && kind(&case.file) == Kind::Pack && !is_needed;
    let (packs, pointers) = open(&trial.store);
    let report = check(&packs, &pointers);
    assert_eq!(report.ok, case.is_harmless() || is_garbage, "{case:?}: {report:?}");
    let (again, _) = open(&trial.store);
    assert_eq!(check(&again, &pointers).ok, report.ok, "{case:?}: looking changed something");
}

/// A secure either fails and says of what, or makes a state that is whole, of which nothing is known to be lost.
fn secure_heals(world: &World, trial: &Trial, case: &Case) {
    let dir = world.scratch.path().join("one");
    let before = readable(world, &trial.store);
    // Somebody has read what is there, so that damage is known, and written it down.
    let (packs, pointers) = open(&trial.store);
    repair(&packs, &pointers, &[]);
    match secure_home(&dir, &trial.store, "one", &trial.dir.path().join("cache")) {
        Ok(root) => {
            assert_eq!(root, world.current("one"), "{case:?}");
            let (packs, _) = open(&trial.store);
            let problems = covey_home::verify(&packs, &root).unwrap().problems;
            assert_eq!(problems, Vec::<String>::new(), "{case:?}: the home was there, and is not whole");
        }
        Err(error) => panic!("{case:?}: a home that is there is not secured: {error}"),
    }
    let after = readable(world, &trial.store);
    assert!(before.is_subset(&after), "{case:?}: a secure lost blocks");
}

fn restore_is_right_or_says_why(world: &World, trial: &Trial, case: &Case) {
    let endangered = world.endangered(case);
    let (packs, _) = open(&trial.store);
    let (current, from) = (world.current("one"), world.roots[0].1);
    match restore_path(&packs, &current, &from, b"deep") {
        Ok(edited) => drop(Snapshot::open(&packs, &edited.root).unwrap()),
        Err(error) => {
            assert!(!endangered.is_empty(), "{case:?}: {error}")
        }
    }
}

fn collection_loses_nothing(world: &World, trial: &Trial, case: &Case) {
    let before = readable(world, &trial.store);
    if let Err(error) = gather(&trial.store) {
        assert!(!case.is_harmless(), "{case:?}: {error}");
    }
    let lost: Vec<_> = before.difference(&readable(world, &trial.store)).copied().collect();
    // A generation whose pointer is gone is not kept any more.
    let forgotten = kind(&case.file) == Kind::Kept && case.damage == Damage::Removed;
    assert!(forgotten || lost.is_empty(), "{case:?}: a collection lost {lost:?}");
}

fn repair_mends(world: &World, trial: &Trial, case: &Case) {
    let before = readable(world, &trial.store);
    let backup = PackStore::open_directory(&world.scratch.path().join("backup"), ORG).unwrap();
    let (packs, pointers) = open(&trial.store);
    let name = "a backup";
    let report = repair(&packs, &pointers, &[RepairSource::Store { name, store: &backup }]);
    assert!(before.is_subset(&readable(world, &trial.store)), "{case:?}: a repair lost blocks");
    if case.has_no_copy() && !case.is_harmless() {
        assert!(!report.ok && !report.problems.is_empty(), "{case:?}: {report:?}");
        return;
    }
    assert!(report.ok, "{case:?}: {report:?}");
    let mut left = check(&packs, &pointers);
    if left.lost_count == 0 && !left.ok {
        // The damaged pack itself is still there; garbage collection takes it.
        gather(&trial.store).unwrap();
        let (packs, pointers) = open(&trial.store);
        left = check(&packs, &pointers);
    }
    assert!(left.ok, "{case:?}: {left:?}");
    let wanted: BTreeSet<RootHash> = world.roots.iter().map(|(_, root)| *root).collect();
    let kept: BTreeSet<RootHash> =
        pointers.named_roots().unwrap().roots.into_iter().map(|named| named.root).collect();
    assert!(case.is_harmless() || kept == wanted, "{case:?}: {kept:?}");
    let (packs, _) = open(&trial.store);
    for root in kept {
        assert_eq!(covey_home::verify(&packs, &root).unwrap().problems, Vec::<String>::new(), "{case:?}");
    }
}

fn play(wanted: &[Kind]) {
    let world = World::new();
    copy_tree(&world.store(), &world.scratch.path().join("backup"));
    let cases = cases(&world, wanted);
    assert!(cases.len() >= DAMAGES.len() * wanted.len());
    // Most of the time is waiting for flushes.
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    play_one(&world, case);
                }
            });
        }
    });
}

fn play_one(world: &World, case: &Case) {
    let trial = world.damaged(case);
    // Blocks are read without pointers and the files of collections.
    if kind(&case.file) == Kind::Pack {
        materialize_all(world, &trial, case);
        look_at_all(world, &trial, case);
        restore_is_right_or_says_why(world, &world.damaged(case), case);
    }
    if !case.has_no_copy() {
        secure_heals(world, &world.damaged(case), case);
    }
    verify_finds_it(world, &trial, case);
    collection_loses_nothing(world, &world.damaged(case), case);
    repair_mends(world, &world.damaged(case), case);
}

#[test]
fn packs() {
    play(&[Kind::Pack]);
}

#[test]
fn pointers() {
    play(&[Kind::Pointer, Kind::PointerCopy, Kind::Kept]);
}

#[test]
fn small_files() {
    play(&[Kind::Condemned, Kind::Floor, Kind::Suspects, Kind::Identity]);
}

#[test]
fn a_damaged_stat_cache_costs_time_only() {
    let world = World::new();
    let (good, dir) = (world.scratch.path().join("cache-one"), world.scratch.path().join("one"));
    for damage in DAMAGES {
        let trial = support::scratch();
        let (cache, other) = (trial.path().join("cache"), trial.path().join("other"));
        fs::copy(&good, &cache).unwrap();
        fs::copy(world.scratch.path().join("cache-two"), &other).unwrap();
        damage.apply(&cache, Some(other));
        let root = secure_home(&dir, &world.store(), "one", &cache).unwrap();
        assert_eq!(root, world.current("one"), "{damage:?}");
    }
}

#[test]
fn damaged_segments_cost_time_only() {
    let world = World::new();
    for number in 0..40 {
        put_alone(&world.store(), &noise(1000 + number, 100));
    }
    copy_tree(&world.store(), &world.scratch.path().join("backup"));
    let cases = cases(&world, &[Kind::Cache]);
    assert!(!cases.is_empty(), "there is a segment");
    for case in cases {
        let trial = world.damaged(&case);
        materialize_all(&world, &trial, &case);
        look_at_all(&world, &trial, &case);
        verify_finds_it(&world, &world.damaged(&case), &case);
        collection_loses_nothing(&world, &world.damaged(&case), &case);
    }
}

#[test]
fn a_directory_mends_what_it_still_has() {
    let world = World::new();
    let packs_of = |kind_of| world.files().into_iter().filter(move |file| kind(file) == kind_of);
    for file in packs_of(Kind::Pack) {
        let case = Case { file, damage: Damage::Emptied, other: None };
        let trial = world.damaged(&case);
        let (packs, pointers) = open(&trial.store);
        let (one, two) = (world.scratch.path().join("one"), world.scratch.path().join("two"));
        let none = Excludes::none();
        let sources = [&one, &two].map(|dir| RepairSource::Home { dir, excludes: &none });
        let report = repair(&packs, &pointers, &sources);
        for home in ["one", "two"] {
            let problems = covey_home::verify(&packs, &world.current(home)).unwrap().problems;
            assert_eq!(problems, Vec::<String>::new(), "{case:?}: {report:?}");
        }
    }
}
