//! Garbage collection, one at a time: what goes, what stays, and what a dry run says.

use std::io::Cursor;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use covey_home::archive::{Imported, import};
use covey_home::backend::{Backend as _, Key, MemoryBackend};
use covey_home::{
    CollectError, CollectOptions, CollectReport, NoProgress, PackStore, Pointer, PointerError, Pointers,
    collect, fence_uploads, verify,
};
use covey_types::{FencingToken, Generation};

use crate::support::{self, noise};

/// A home with a file for each `(name, seed, length)`.
pub(crate) fn home(files: &[(&str, u64, usize)]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, seed, len) in files {
        let bytes = noise(*seed, *len);
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, name, Cursor::new(bytes)).unwrap();
    }
    archive.into_inner().unwrap()
}

pub(crate) fn stored(
    store: &PackStore,
    archive: &[u8],
) -> Result<Imported, covey_home::archive::ArchiveError> {
    import(store, &mut &*archive, &AtomicBool::new(false), &NoProgress)
}

pub(crate) fn run(
    store: &PackStore,
    pointers: &Pointers,
    dry_run: bool,
) -> Result<CollectReport, CollectError> {
    let options = CollectOptions { dry_run, ..CollectOptions::default() };
    collect(store, pointers, &options, &AtomicBool::new(false), &NoProgress)
}

struct World {
    backend: MemoryBackend,
    store: PackStore,
    pointers: Pointers,
}

impl World {
    fn new() -> Self {
        let backend = MemoryBackend::new();
        let store = PackStore::open(Arc::new(backend.clone())).unwrap();
        let pointers = Pointers::on(Arc::new(backend.clone()));
        Self { backend, store, pointers }
    }

    fn publish(&self, name: &str, files: &[(&str, u64, usize)]) -> Pointer {
        let imported = stored(&self.store, &home(files)).unwrap();
        let base = self.pointers.current(name).unwrap().map_or(Generation(0), |current| current.generation);
        self.pointers.publish(name, imported.root, base, FencingToken(1), imported.epoch).unwrap()
    }

    fn bytes(&self) -> u64 {
        let key = |name: &String| Key::new(&["packs", name]).unwrap();
        let names = self.backend.list(&Key::new(&["packs"]).unwrap()).unwrap();
        names.iter().map(|name| self.backend.file_len(&key(name)).unwrap()).sum()
    }

    fn collect(&self) -> CollectReport {
        let before = self.bytes();
        let planned = run(&self.store, &self.pointers, true).unwrap();
        assert_eq!(self.bytes(), before, "a dry run changes nothing");
        let report = run(&self.store, &self.pointers, false).unwrap();
        assert_eq!(before as i64 - self.bytes() as i64, report.freed_bytes);
        assert_eq!(
            CollectReport { dry_run: false, elapsed_ms: report.elapsed_ms, ..planned },
            report,
            "the dry run said the same"
        );
        self.check();
        report
    }

    /// Every snapshot is whole, also for somebody who opens the store anew.
    fn check(&self) {
        let store = PackStore::open(Arc::new(self.backend.clone())).unwrap();
        for home in self.pointers.homes().unwrap() {
            for pointer in self.pointers.snapshots(&home).unwrap() {
                assert_eq!(verify(&store, &pointer.root).unwrap().problems, Vec::<String>::new());
            }
        }
    }
}

#[test]
fn what_no_snapshot_names_goes_and_everything_else_stays() {
    let world = World::new();
    world.publish("one", &[("a", 1, 300_000), ("b", 2, 1000)]);
    world.publish("two", &[("a", 1, 300_000), ("c", 3, 50_000)]);
    stored(&world.store, &home(&[("unpublished", 4, 200_000)])).unwrap();
    let report = world.collect();
    assert_eq!((report.roots, report.packs, report.packs_removed, report.packs_rewritten), (2, 3, 1, 0));
    assert!(report.freed_bytes > 200_000, "{report:?}");
    let again = world.collect();
    assert_eq!((again.packs, again.packs_removed, again.freed_bytes), (2, 0, 0));
}

#[test]
fn a_pack_that_is_mostly_garbage_is_written_anew() {
    let world = World::new();
    world.publish("one", &[("kept", 1, 20_000), ("dropped", 2, 400_000)]);
    world.publish("one", &[("kept", 1, 20_000)]);
    assert_eq!(world.collect().packs_removed, 0, "the earlier snapshot is kept");
    assert_eq!(world.pointers.retain("one", &|_| false).unwrap(), 1);
    let report = world.collect();
    assert_eq!((report.packs_removed, report.packs_rewritten), (1, 1));
    assert!(report.freed_bytes > 390_000, "{report:?}");
}

#[test]
fn an_upload_that_began_before_a_collection_is_refused_and_comes_again() {
    let world = World::new();
    world.publish("one", &[("a", 1, 1000)]);
    let early = stored(&world.store, &home(&[("b", 2, 100_000)])).unwrap();
    world.collect();
    let publish = |imported: &Imported| {
        world.pointers.publish("new", imported.root, Generation(0), FencingToken(1), imported.epoch)
    };
    assert!(matches!(publish(&early), Err(PointerError::Collected { epoch: 0, floor: 1 })));
    let again = stored(&world.store, &home(&[("b", 2, 100_000)])).unwrap();
    assert!(again.blocks_new > 0, "what was collected is stored again");
    publish(&again).unwrap();
    world.check();
}

/// A collection that dies after it has condemned and before it deletes.
fn condemn_and_die(world: &World) {
    struct Dying<'a>(&'a Pointers);
    impl covey_home::Roots for Dying<'_> {
        fn roots(&self) -> Result<Vec<covey_types::RootHash>, covey_home::StoreError> {
            self.0.roots()
        }
        fn raise_floor(&self, _epoch: u64) -> Result<(), covey_home::StoreError> {
            Err(covey_home::StoreError::UploadFailed)
        }
    }
    let options = CollectOptions::default();
    let died = collect(&world.store, &Dying(&world.pointers), &options, &AtomicBool::new(false), &NoProgress);
    died.unwrap_err();
}

#[test]
fn a_condemned_pack_is_not_relied_upon_even_if_it_is_still_there() {
    let world = World::new();
    stored(&world.store, &home(&[("a", 1, 100_000)])).unwrap();
    let condemned = world.backend.list(&Key::new(&["packs"]).unwrap()).unwrap();
    let backend = world.backend.clone();
    condemn_and_die(&world);
    let elsewhere = PackStore::open(Arc::new(backend.clone())).unwrap();
    for store in [&world.store, &elsewhere] {
        let again = stored(store, &home(&[("a", 1, 100_000)])).unwrap();
        world.pointers.publish("one", again.root, Generation(0), FencingToken(1), again.epoch).unwrap();
    }
    // Even the paused collection's late deletion harms nobody.
    for name in condemned {
        assert!(backend.remove(&Key::new(&["packs", &name]).unwrap()).unwrap());
    }
    world.check();
}

#[test]
fn a_stat_cache_does_not_make_a_condemned_pack_good() {
    let world = World::new();
    let scratch = support::scratch();
    let (dir, cache) = (scratch.path().join("home"), scratch.path().join("cache"));
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("a"), noise(1, 100_000)).unwrap();
    support::settle();
    // Secured and not published, as when a call arrives meanwhile.
    let first = support::secure_dir(&dir, &world.store, Some(&cache)).unwrap();
    let condemned = world.backend.list(&Key::new(&["packs"]).unwrap()).unwrap();
    condemn_and_die(&world);
    let again = support::secure_dir(&dir, &world.store, Some(&cache)).unwrap();
    assert_eq!((again.root, again.files_read), (first.root, 1), "what is condemned is stored again");
    world.pointers.publish("one", again.root, Generation(0), FencingToken(1), again.epoch).unwrap();
    for name in condemned {
        assert!(world.backend.remove(&Key::new(&["packs", &name]).unwrap()).unwrap());
    }
    world.check();
}

#[test]
fn a_state_that_cannot_be_read_stops_the_collection() {
    let world = World::new();
    world.publish("one", &[("a", 1, 1000)]);
    stored(&world.store, &home(&[("unpublished", 2, 200_000)])).unwrap();
    let names = world.backend.list(&Key::new(&["packs"]).unwrap()).unwrap();
    for name in &names {
        // The last blocks before the index: listing and root.
        world.backend.tamper(&Key::new(&["packs", name]).unwrap(), |bytes| {
            let end = bytes.len();
            bytes[end - 300..end - 220].fill(7);
        });
    }
    let store = PackStore::open(Arc::new(world.backend.clone())).unwrap();
    let error = run(&store, &world.pointers, false).unwrap_err().to_string();
    assert!(error.contains("nothing is deleted"), "{error}");
    assert_eq!(world.backend.list(&Key::new(&["packs"]).unwrap()).unwrap(), names);
}

#[test]
fn of_two_collections_at_once_one_gives_up() {
    let world = World::new();
    stored(&world.store, &home(&[("a", 1, 100_000)])).unwrap();
    struct Meanwhile<'a>(&'a World);
    impl covey_home::Roots for Meanwhile<'_> {
        fn roots(&self) -> Result<Vec<covey_types::RootHash>, covey_home::StoreError> {
            let other = PackStore::open(Arc::new(self.0.backend.clone())).unwrap();
            run(&other, &self.0.pointers, false).unwrap();
            self.0.pointers.roots()
        }
        fn raise_floor(&self, epoch: u64) -> Result<(), covey_home::StoreError> {
            self.0.pointers.raise_floor(epoch)
        }
    }
    stored(&world.store, &home(&[("b", 2, 100_000)])).unwrap();
    let options = CollectOptions::default();
    let slower = collect(&world.store, &Meanwhile(&world), &options, &AtomicBool::new(false), &NoProgress);
    match slower {
        Err(CollectError::Overtaken) => {}
        // The faster one left nothing to do.
        Ok(report) => assert_eq!(report.packs_removed, 0),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn many_small_packs_become_one() {
    let world = World::new();
    for step in 0..40 {
        world.publish("one", &[("a", 1, 1000), ("step", 100 + step, 300)]);
    }
    let report = world.collect();
    assert_eq!((report.packs, report.packs_removed, report.packs_rewritten), (40, 40, 40));
    assert!(report.freed_bytes > 0, "{report:?}");
    let again = world.collect();
    assert_eq!((again.packs, again.packs_removed), (1, 0));
}

#[test]
fn behind_a_fence_what_was_begun_before_is_refused_and_nothing_goes() {
    let world = World::new();
    let publish = |home: &str, imported: &Imported| {
        world.pointers.publish(home, imported.root, Generation(0), FencingToken(1), imported.epoch)
    };
    stored(&world.store, &home(&[("garbage", 1, 100_000)])).unwrap();
    // What a collection has condemned stays condemned behind a fence.
    world.collect();
    let early = stored(&world.store, &home(&[("a", 2, 100_000)])).unwrap();
    let accepted = stored(&world.store, &home(&[("b", 3, 1000)])).unwrap();
    publish("accepted", &accepted).unwrap();
    let before = world.bytes();
    fence_uploads(&world.store, &world.pointers).unwrap();
    assert_eq!(world.bytes(), before);
    let refused = publish("early", &early).unwrap_err();
    assert!(matches!(refused, PointerError::Collected { .. }), "{refused}");
    let late = stored(&world.store, &home(&[("a", 2, 100_000)])).unwrap();
    assert_eq!(late.root, early.root);
    publish("late", &late).unwrap();
    world.check();
}

#[test]
fn a_home_that_is_forgotten_needs_nothing_and_begins_anew() {
    let world = World::new();
    world.publish("one", &[("a", 1, 300_000)]);
    world.publish("one", &[("a", 1, 300_000), ("b", 2, 1000)]);
    world.publish("two", &[("c", 3, 1000)]);
    assert!(world.pointers.forget("one").unwrap());
    assert!(!world.pointers.forget("one").unwrap());
    assert_eq!(world.pointers.current("one").unwrap(), None);
    assert_eq!(world.pointers.snapshots("one").unwrap(), []);
    let report = world.collect();
    assert_eq!((report.roots, report.packs_removed), (1, 2));
    assert_eq!(world.publish("one", &[("d", 4, 1000)]).generation, Generation(1));
    world.check();
}
