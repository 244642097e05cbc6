//! Collecting the stores of a server: what an agent had goes with it, what others need stays, and a publish that races
//! a collection is refused and comes again with nothing lost.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use covey_home::{
    Excludes, MaterializeRequest, NoProgress, PackStore, SecureReport, SecureRequest, materialize, secure,
    verify,
};
use covey_server::collect::{CollectRequest, Collected, Collector};
use covey_server::db::Db;
use covey_server::db::homes::Claim;
use covey_server::db::sessions::NewSession;
use covey_server::db::snapshots::{Publish, Published};
use covey_server::stores::Stores;
use covey_types::{
    AgentId, FencingToken, Generation, HomeId, OrgId, RootHash, RunnerId, SessionId, SnapshotKind,
};
use serde_json::json;
use uuid::Uuid;

struct World {
    dir: tempfile::TempDir,
    db: Db,
    org: OrgId,
    stores: Stores,
    collector: Collector,
}

/// An agent at work: its home is leased to a runner, whose working copy is a directory.
struct Worker {
    agent: AgentId,
    home: HomeId,
    session: SessionId,
    token: FencingToken,
    dir: PathBuf,
}

impl World {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("covey.db")).unwrap();
        let org = db.ensure_default_org().await.unwrap();
        let stores = Stores::in_directory(dir.path().join("store"), None);
        let collector = Collector::new(db.clone(), stores.clone());
        Self { dir, db, org, stores, collector }
    }

    async fn worker(&self, name: &'static str) -> Worker {
        let org = self.org;
        let agent = self.db.create_agent(org, name, &json!({"model": "m"})).await.unwrap();
        let new = NewSession {
            agent: agent.id,
            agent_version: None,
            agent_snapshot: None,
            environment: self.db.create_environment(org, name, &json!({})).await.unwrap().id,
            title: None,
            metadata: json!({}),
            extra: json!({}),
        };
        let session = self.db.create_session(org, &new, vec![]).await.unwrap().id;
        let runner = RunnerId::from_uuid(Uuid::nil());
        let claimed = self.db.claim_home(org, agent.home, session, runner).await.unwrap();
        let Claim::Granted(token) = claimed else { panic!("a new home is held") };
        let dir = self.dir.path().join(name);
        fs::create_dir(&dir).unwrap();
        Worker { agent: agent.id, home: agent.home, session, token, dir }
    }

    /// The runner's own view of the store: another process, as far as the store can tell.
    fn store(&self) -> PackStore {
        PackStore::open_directory(&self.dir.path().join("store"), &self.org.to_string()).unwrap()
    }

    fn secure(&self, worker: &Worker, store: &PackStore) -> SecureReport {
        let cache = self.dir.path().join(format!("{}.cache", worker.home));
        secure(&SecureRequest {
            dir: &worker.dir,
            store,
            stat_cache: Some(&cache),
            excludes: &Excludes::none(),
            previous: None,
            cancel: &AtomicBool::new(false),
            progress: &NoProgress,
            threads: 1,
        })
        .unwrap()
    }

    async fn offer(&self, worker: &Worker, report: &SecureReport) -> Published {
        let (org, home) = (self.org, worker.home);
        let row = self.db.home(org, home).await.unwrap();
        let offer = Publish {
            token: worker.token,
            base: row.generation,
            root: report.root,
            kind: SnapshotKind::Frozen,
            step: None,
            files: report.files,
            bytes: report.bytes,
            epoch: report.epoch,
        };
        self.db.publish(home, &offer).await.unwrap()
    }

    async fn publish(&self, worker: &Worker) -> RootHash {
        let report = self.secure(worker, &self.store());
        assert!(matches!(self.offer(worker, &report).await, Published::Current(_)));
        report.root
    }

    async fn run(&self, dry_run: bool) -> Collected {
        let request = CollectRequest {
            org: self.org,
            dry_run,
            bytes_per_second: 0,
            cancel: Arc::default(),
            progress: Arc::default(),
        };
        self.collector.run(request).await.unwrap()
    }

    fn packs_bytes(&self) -> i64 {
        let packs = self.dir.path().join("store/orgs").join(self.org.to_string()).join("packs");
        fs::read_dir(packs).unwrap().map(|pack| pack.unwrap().metadata().unwrap().len() as i64).sum()
    }

    /// What a dry run says is what is freed, to the byte.
    async fn collect(&self) -> Collected {
        let before = self.packs_bytes();
        let planned = self.run(true).await;
        assert_eq!(self.packs_bytes(), before, "a dry run changes nothing");
        let done = self.run(false).await;
        assert_eq!(before - self.packs_bytes(), done.packs.freed_bytes);
        assert_eq!(planned.packs.freed_bytes, done.packs.freed_bytes);
        assert_eq!(planned.packs.packs_removed, done.packs.packs_removed);
        assert_eq!(planned.snapshots_forgotten, done.snapshots_forgotten);
        done
    }

    /// An empty host puts the state back, and every byte is there.
    fn comes_back(&self, worker: &Worker, root: RootHash) {
        let store = self.store();
        assert_eq!(verify(&store, &root).unwrap().problems, Vec::<String>::new());
        let target = self.dir.path().join("target");
        materialize(&MaterializeRequest {
            root,
            dir: &target,
            store: &store,
            stat_cache: None,
            excludes: &Excludes::none(),
            owner: None,
            cancel: &AtomicBool::new(false),
            progress: &NoProgress,
            threads: 1,
        })
        .unwrap();
        for name in fs::read_dir(&worker.dir).unwrap().map(|name| name.unwrap().file_name()) {
            assert!(
                fs::read(worker.dir.join(&name)).unwrap() == fs::read(target.join(&name)).unwrap(),
                "{name:?}"
            );
        }
        fs::remove_dir_all(&target).unwrap();
    }
}

/// Bytes that do not compress.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_had_goes_with_it_and_what_others_need_stays() {
    let world = World::new().await;
    let (one, two) = (world.worker("one").await, world.worker("two").await);
    let shared = noise(1, 3 << 20);
    for (worker, seed) in [(&one, 2), (&two, 3)] {
        fs::write(worker.dir.join("shared"), &shared).unwrap();
        fs::write(worker.dir.join("own"), noise(seed, 5 << 20)).unwrap();
    }
    let first = world.publish(&one).await;
    let second = world.publish(&two).await;
    assert_eq!(world.collect().await.packs.packs_removed, 0, "everything is needed");
    let (org, agent, home, session) = (world.org, one.agent, one.home, one.session);
    let busy = world.db.delete_agent(org, agent).await.unwrap_err().to_string();
    assert!(busy.contains("at work"), "{busy}");
    world.db.release_home(org, home, session).await.unwrap();
    let deleted = world.db.delete_agent(org, agent).await.unwrap();
    assert_eq!((deleted.sessions, deleted.snapshots), (1, 1));
    let done = world.collect().await;
    let freed = done.packs.freed_bytes;
    assert!((5 << 20..6 << 20).contains(&freed), "its own five megabytes, and not the shared three: {freed}");
    world.comes_back(&two, second);
    let store = world.store();
    assert!(!verify(&store, &first).unwrap().problems.is_empty(), "what nobody names is gone");
    assert_eq!(world.collect().await.packs.freed_bytes, 0, "there is nothing left to do");
    let last = world.db.last_collection(org).await.unwrap().unwrap();
    assert_eq!(last.report["freed_bytes"], 0);
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
