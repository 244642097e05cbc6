//! Publishes, forks, restores and deletions in the middle of a collection.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use covey_home::{CollectOptions, NoProgress, Roots, StoreError, collect, restore_path, verify};
use covey_server::db::DbError;
use covey_server::db::snapshots::{ForkTarget, Origin, Published, Replacement};
use covey_types::{Generation, RootHash};
use covey_wire::api::history::GenerationName;
use tokio::runtime::Handle;

use super::world::{Worker, World, noise};

/// The steps of a collection between which somebody else may do something: before and after the first look at the
/// roots, before and after the floor is raised, after the last look at the roots and before anything is deleted.
const GAPS: usize = 5;

/// What the server's collection asks of the database, with something that happens in one of the gaps.
struct Interrupted<'a> {
    world: &'a World,
    gap: usize,
    passed: AtomicUsize,
    act: &'a (dyn Fn() + Sync),
}

impl Interrupted<'_> {
    fn pass(&self) {
        if self.passed.fetch_add(1, Ordering::SeqCst) == self.gap {
            (self.act)();
        }
    }
}

impl Roots for Interrupted<'_> {
    fn roots(&self) -> Result<Vec<RootHash>, StoreError> {
        let org = self.world.org;
        if self.passed.load(Ordering::SeqCst) == 0 {
            self.pass();
        }
        let roots = self.world.db.snapshot_roots(org, None, None);
        let roots = Handle::current().block_on(roots).unwrap();
        self.pass();
        Ok(roots)
    }

    fn raise_floor(&self, epoch: u64) -> Result<(), StoreError> {
        let org = self.world.org;
        self.pass();
        let raised = self.world.db.raise_collect_floor(org, epoch);
        Handle::current().block_on(raised).unwrap();
        self.pass();
        Ok(())
    }
}

/// Collects, with `act` in this gap, and tells how many packs went.
fn collect_interrupted(world: &World, gap: usize, act: &(dyn Fn() + Sync)) -> u64 {
    let roots = Interrupted { world, gap, passed: AtomicUsize::new(0), act };
    let (store, cancel) = (world.store(), AtomicBool::new(false));
    let report = collect(&store, &roots, &CollectOptions::default(), &cancel, &NoProgress).unwrap();
    // What was garbage may be needed again since the first gap; then there is nothing to raise a floor for.
    assert!(roots.passed.load(Ordering::SeqCst) > gap, "it came so far");
    report.packs_removed
}

impl World {
    fn release(&self, worker: &Worker) {
        let released = self.db.release_home(self.org, worker.home, worker.session);
        Handle::current().block_on(released).unwrap();
    }

    fn delete(&self, worker: &Worker) {
        self.release(worker);
        Handle::current().block_on(self.db.delete_agent(self.org, worker.agent)).unwrap();
    }
}

/// A world with a store that has something to collect: what an agent had that is deleted. One more agent is at work.
async fn with_garbage() -> (World, Worker) {
    let world = World::new().await;
    let (gone, worker) = (world.worker("gone").await, world.worker("one").await);
    fs::write(gone.dir.join("a"), noise(7, 600_000)).unwrap();
    world.publish(&gone).await;
    fs::write(worker.dir.join("a"), noise(8, 600_000)).unwrap();
    world.publish(&worker).await;
    tokio::task::block_in_place(|| world.delete(&gone));
    (world, worker)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_in_any_gap_of_a_collection_is_refused_or_stays_whole() {
    let mut refused = 0;
    for gap in 0..GAPS {
        let (world, worker) = with_garbage().await;
        // The same bytes as the garbage: nothing of them is uploaded before the collection.
        fs::write(worker.dir.join("a"), noise(7, 600_000)).unwrap();
        let report = world.secure(&worker, &world.store());
        let offered = std::sync::Mutex::new(None);
        tokio::task::block_in_place(|| {
            collect_interrupted(&world, gap, &|| {
                let answer = Handle::current().block_on(world.offer(&worker, &report));
                *offered.lock().unwrap() = Some(answer);
            });
        });
        let root = match offered.into_inner().unwrap().unwrap() {
            Published::Current(_) => report.root,
            Published::Collected { .. } => {
                refused += 1;
                world.publish(&worker).await
            }
            other @ Published::OverQuota(_) => panic!("{other:?}"),
        };
        world.comes_back(&worker, root);
        world.collect().await;
        world.comes_back(&worker, root);
    }
    assert_eq!(refused, 2, "from the floor on");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_in_any_gap_of_a_collection_is_refused_or_stays_whole() {
    let mut refused = 0;
    for gap in 0..GAPS {
        let (world, worker) = with_garbage().await;
        fs::write(worker.dir.join("a"), noise(7, 600_000)).unwrap();
        let report = world.secure(&worker, &world.store());
        let with = |epoch| Replacement {
            base: Some(Generation(1)),
            root: report.root,
            files: report.files,
            bytes: report.bytes,
            epoch: Some(epoch),
            origin: Origin::Imported,
            from: None,
            over_unsecured: true,
        };
        let (org, home) = (world.org, worker.home);
        let import = |with: Replacement| Handle::current().block_on(world.db.replace_home(org, home, &with));
        tokio::task::block_in_place(|| {
            world.release(&worker);
            let imported = std::sync::Mutex::new(None);
            collect_interrupted(&world, gap, &|| {
                *imported.lock().unwrap() = Some(import(with(report.epoch)))
            });
            match imported.into_inner().unwrap().unwrap() {
                Ok(_) => {}
                Err(DbError::Conflict(text)) => {
                    assert!(text.contains("store it again"), "{text}");
                    refused += 1;
                    import(with(world.secure(&worker, &world.store()).epoch)).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        });
        world.comes_back(&worker, report.root);
        world.collect().await;
        world.comes_back(&worker, report.root);
    }
    assert_eq!(refused, 2, "from the floor on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_in_any_gap_of_a_collection_keeps_what_its_origin_loses_at_once() {
    for gap in 0..GAPS {
        let (world, worker) = with_garbage().await;
        let target = world.worker("fork").await;
        let (org, source, home) = (world.org, worker.home, target.home);
        fs::copy(worker.dir.join("a"), target.dir.join("a")).unwrap();
        let removed = tokio::task::block_in_place(|| {
            world.release(&target);
            collect_interrupted(&world, gap, &|| {
                let into = ForkTarget::Agent(target.agent);
                let fork = world.db.fork_home(org, source, GenerationName::Current, &into, false);
                Handle::current().block_on(fork).unwrap();
                world.delete(&worker);
            })
        });
        assert!(removed > 0, "the garbage went");
        let row = world.db.home(org, home).await.unwrap();
        let root = row.root.unwrap();
        world.comes_back(&target, root);
        world.collect().await;
        world.comes_back(&target, root);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_is_not_put_back_from_a_snapshot_that_was_forgotten_meanwhile() {
    let mut refused = 0;
    for gap in 0..GAPS {
        let (world, worker) = with_garbage().await;
        fs::write(worker.dir.join("a"), noise(9, 600_000)).unwrap();
        fs::write(worker.dir.join("b"), b"stays").unwrap();
        let current = world.publish(&worker).await;
        let (org, home) = (world.org, worker.home);
        // What a request does first: it looks the snapshot up.
        let first = GenerationName::Number(1);
        let from = world.db.snapshot(org, home, first).await.unwrap();
        // Then a collection begins by forgetting it.
        let forgotten = world.db.forget_snapshots(org, &[home]).await.unwrap();
        assert_eq!(forgotten, 1);
        let edited = std::sync::Mutex::new(None);
        let put_back = tokio::task::block_in_place(|| {
            world.release(&worker);
            collect_interrupted(&world, gap, &|| {
                let made = restore_path(&world.store(), &current, &from.snapshot.root, b"a").unwrap();
                *edited.lock().unwrap() = Some(made);
            });
            let edited = edited.into_inner().unwrap().unwrap();
            let with = Replacement {
                base: Some(Generation(2)),
                root: edited.root,
                files: edited.files,
                bytes: edited.bytes,
                epoch: Some(edited.epoch),
                origin: Origin::Restored,
                from: Some((None, from.snapshot.generation)),
                over_unsecured: false,
            };
            let named = edited.epoch;
            let put_back = Handle::current().block_on(world.db.replace_edited_home(org, home, &with));
            let floor = Handle::current().block_on(world.db.collect_floor(org)).unwrap();
            refused += usize::from(named >= floor);
            put_back
        });
        assert!(matches!(put_back, Err(DbError::NotFound { .. })), "gap {gap}: {put_back:?}");
        world.comes_back(&worker, current);
    }
    assert!(refused > 0, "at least once the floor alone would have let it through");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_secured_beside_the_server_is_kept_too() {
    let (world, worker) = with_garbage().await;
    fs::write(worker.dir.join("a"), noise(5, 600_000)).unwrap();
    let store = world.store();
    let report = world.secure(&worker, &store);
    let pointers = covey_home::Pointers::on(Arc::clone(store.backend()));
    let token = covey_types::FencingToken(1);
    pointers.publish("mine", report.root, Generation(0), token, report.epoch).unwrap();
    assert!(world.collect().await.packs.packs_removed > 0);
    world.comes_back(&worker, report.root);
    // And a publish there that began before the collection is refused like any other.
    let late = pointers.publish("mine", RootHash::of(b"late"), Generation(1), token, report.epoch);
    assert!(late.is_err(), "{late:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_races_a_collection_is_refused_and_comes_again_with_nothing_lost() {
    let world = World::new().await;
    let worker = world.worker("one").await;
    fs::write(worker.dir.join("a"), noise(1, 4 << 20)).unwrap();
    let first = world.publish(&worker).await;
    // The next state needs what only the last but one had: nothing of it is uploaded, because it is there.
    fs::write(worker.dir.join("a"), noise(2, 4 << 20)).unwrap();
    let second = world.publish(&worker).await;
    fs::write(worker.dir.join("a"), noise(1, 4 << 20)).unwrap();
    fs::write(worker.dir.join("b"), b"new").unwrap();
    let store = world.store();
    let report = world.secure(&worker, &store);
    // The rules keep the current one only; the collection comes between the upload and its publish.
    let (org, session) = (world.org, worker.session);
    world.db.archive_session(org, session).await.unwrap();
    let done = world.collect().await;
    assert_eq!(done.snapshots_forgotten, 1);
    assert!(done.packs.packs_removed > 0, "{done:?}");
    assert!(!verify(&world.store(), &first).unwrap().problems.is_empty());
    let refused = world.offer(&worker, &report).await;
    assert_eq!(refused, Published::Collected { floor: 1 });
    let row = world.db.home(org, worker.home).await.unwrap();
    assert_eq!((row.generation, row.root), (Generation(2), Some(second)));
    // With the same open store and stat cache, as the runner has them.
    let again = world.secure(&worker, &store);
    assert_eq!(again.root, report.root);
    assert_eq!(world.offer(&worker, &again).await, Published::Current(Generation(3)));
    world.comes_back(&worker, again.root);
    world.collect().await;
    world.comes_back(&worker, again.root);
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_that_work_while_it_is_collected_lose_nothing() {
    let world = Arc::new(World::new().await);
    let mut workers = Vec::new();
    for (name, seed) in [("one", 10_u64), ("two", 20), ("three", 30)] {
        let (world, worker) = (Arc::clone(&world), world.worker(name).await);
        workers.push(tokio::spawn(async move {
            let mut root = None;
            for round in 0..8 {
                // Half of it comes back again and again, after it was garbage.
                fs::write(worker.dir.join("a"), noise(seed + round % 2, 1 << 20)).unwrap();
                fs::write(worker.dir.join("b"), noise(seed * 100 + round, 1 << 18)).unwrap();
                let store = world.store();
                // Each collection refuses it at most once.
                loop {
                    let report = tokio::task::block_in_place(|| world.secure(&worker, &store));
                    match world.offer(&worker, &report).await {
                        Published::Current(_) => break root = Some(report.root),
                        Published::Collected { .. } => {}
                        other @ Published::OverQuota(_) => panic!("{other:?}"),
                    }
                }
            }
            (worker, root.unwrap())
        }));
    }
    let mut collections = 0;
    while workers.iter().any(|worker| !worker.is_finished()) {
        world.run(false).await;
        collections += 1;
    }
    assert!(collections > 0);
    for worker in workers {
        let (worker, root) = worker.await.unwrap();
        tokio::task::block_in_place(|| world.comes_back(&worker, root));
    }
    world.run(false).await;
    assert_eq!(world.stores.of(world.org).unwrap().verify_packs().unwrap().problems, Vec::<String>::new());
}
