//! A server's database and stores without a server, and agents at work on them: each is a directory and a lease.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use covey_home::{
    Excludes, MaterializeRequest, NoProgress, PackStore, SecureReport, SecureRequest, materialize, secure,
    verify,
};
use covey_server::Homes;
use covey_server::collect::{CollectConfig, CollectRequest, Collected, Collector, CollectorError};
use covey_server::db::Db;
use covey_server::db::homes::Claim;
use covey_server::db::sessions::NewSession;
use covey_server::db::snapshots::{Publish, Published};
use covey_server::stores::Stores;
use covey_types::{AgentId, FencingToken, HomeId, OrgId, RootHash, RunnerId, SessionId, SnapshotKind};
use serde_json::json;
use uuid::Uuid;

pub(crate) struct World {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) db: Db,
    pub(crate) org: OrgId,
    pub(crate) stores: Stores,
    pub(crate) collector: Collector,
    pub(crate) bytes_per_second: u64,
}

/// An agent at work: its home is leased to a runner, whose working copy is a directory.
pub(crate) struct Worker {
    pub(crate) agent: AgentId,
    pub(crate) home: HomeId,
    pub(crate) session: SessionId,
    pub(crate) token: FencingToken,
    pub(crate) dir: PathBuf,
}

impl World {
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("covey.db")).unwrap();
        let org = db.ensure_default_org().await.unwrap();
        let stores = Stores::in_directory(dir.path().join("store"), None);
        let homes = Homes { stores: stores.clone(), collect: CollectConfig::default() };
        let collector = Collector::new(db.clone(), homes);
        Self { dir, db, org, stores, collector, bytes_per_second: 0 }
    }

    pub(crate) fn homes(&self) -> Homes {
        Homes { stores: self.stores.clone(), collect: CollectConfig::default() }
    }

    /// One of its own, that collects by itself.
    pub(crate) fn collector_with(&self, collect: CollectConfig) -> Collector {
        Collector::new(self.db.clone(), Homes { collect, ..self.homes() })
    }

    pub(crate) async fn worker(&self, name: &'static str) -> Worker {
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
        let claimed = self.db.claim_home(org, agent.home, session, None, runner).await.unwrap();
        let Claim::Granted(token) = claimed else { panic!("a new home is held") };
        let dir = self.dir.path().join(name);
        fs::create_dir(&dir).unwrap();
        Worker { agent: agent.id, home: agent.home, session, token, dir }
    }

    /// The runner's own view of the store: another process, as far as the store can tell.
    pub(crate) fn store(&self) -> PackStore {
        PackStore::open_directory(&self.dir.path().join("store"), &self.org.to_string()).unwrap()
    }

    pub(crate) fn secure(&self, worker: &Worker, store: &PackStore) -> SecureReport {
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

    pub(crate) async fn offer(&self, worker: &Worker, report: &SecureReport) -> Published {
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

    pub(crate) async fn publish(&self, worker: &Worker) -> RootHash {
        let report = self.secure(worker, &self.store());
        assert!(matches!(self.offer(worker, &report).await, Published::Current(_)));
        report.root
    }

    pub(crate) async fn run(&self, dry_run: bool) -> Collected {
        self.try_run(dry_run).await.unwrap()
    }

    pub(crate) async fn try_run(&self, dry_run: bool) -> Result<Collected, CollectorError> {
        let request = CollectRequest {
            org: self.org,
            dry_run,
            bytes_per_second: self.bytes_per_second,
            recompress_bytes: 0,
            cancel: Arc::default(),
            progress: Arc::default(),
        };
        self.collector.run(request).await
    }

    pub(crate) fn packs_bytes(&self) -> i64 {
        let packs = self.dir.path().join("store/orgs").join(self.org.to_string()).join("packs");
        fs::read_dir(packs).unwrap().map(|pack| pack.unwrap().metadata().unwrap().len() as i64).sum()
    }

    /// What a dry run says is what is freed, to the byte.
    pub(crate) async fn collect(&self) -> Collected {
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
    pub(crate) fn comes_back(&self, worker: &Worker, root: RootHash) {
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
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}
