//! Garbage collection of the homes' stores: what the database names stays, the rest goes.
//!
//! What stays true (I8): the roots are the rows of `snapshot`, read in one transaction; the floor is a column that the
//! transactions of publishes check, so a publish is either among the roots that are read afterwards, or refused. The
//! protocol itself is `covey_home::collect`. One collection of an org at a time in this process; of several servers on
//! one store the slower one gives up by itself. What does not belong here: which snapshots are kept
//! ([`crate::db::retention`]).

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use covey_home::{
    CollectError, CollectOptions, CollectReport, Counters, PackStore, Pointers, Progress, Roots, StoreError,
};
use covey_types::{Fault, OrgId, RootHash};
use serde::Serialize;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::SERVED;
use crate::db::{self, Db, DbError};
use crate::server::Homes;
use crate::stores::Stores;

/// How often it is looked whether a collection is due.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// After the start sessions are taken up and homes woken; a collection that is due waits for so long.
const AFTER_START: Duration = Duration::from_secs(10 * 60);
/// Homes whose snapshots one transaction forgets, so that others need not wait for long.
const FORGET_HOMES_AT_ONCE: usize = 50;
/// After a collection that failed, the next attempt.
const AFTER_FAILURE: Duration = Duration::from_secs(60 * 60);
/// Progress is logged after so many more bytes.
const LOGGED_BYTES: u64 = 4 << 30;

/// When and how hard to collect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectConfig {
    /// From the end of one collection to the next; zero: only when asked.
    pub interval: Duration,
    /// Stored bytes that are read and written in a second at most; 0: as fast as it goes.
    pub bytes_per_second: u64,
    /// Bytes of packs, of what secures have compressed in haste, that one scheduled collection of an org compresses
    /// harder at most; 0: none.
    pub recompress_bytes: u64,
}

impl Default for CollectConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(24 * 60 * 60),
            bytes_per_second: 64 << 20,
            recompress_bytes: 8 << 30,
        }
    }
}

/// What a collection did, or would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Collected {
    /// Snapshots that nothing keeps and that were forgotten first.
    pub snapshots_forgotten: u64,
    /// What became of the packs.
    #[serde(flatten)]
    pub packs: CollectReport,
}

/// Why nothing, or not everything, was collected. Nothing that is needed was deleted.
#[derive(Debug, thiserror::Error)]
pub enum CollectorError {
    /// One is under way in this process.
    #[error("a collection of this org is under way; wait until it has ended")]
    UnderWay,
    /// The collection.
    #[error(transparent)]
    Collect(#[from] CollectError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Somebody else knows what is needed in it.
    #[error(
        "what is needed in the home store at {place} is known to {who}, and not to this server: nothing is deleted; give \
         the server another store, or remove the org's file `gc/owner` there if that is no longer so"
    )]
    Foreign {
        /// Where the store is.
        place: String,
        /// Who it is.
        who: String,
    },
    /// The database.
    #[error(transparent)]
    Db(#[from] DbError),
    /// It ended without a result.
    #[error("the collection panicked")]
    Panicked,
}

impl CollectorError {
    /// What the caller can do about it.
    pub fn fault(&self) -> Fault {
        match self {
            Self::UnderWay | Self::Foreign { .. } => Fault::Conflict,
            Self::Collect(error) => error.fault(),
            Self::Store(error) => error.fault(),
            Self::Db(error) => error.fault(),
            Self::Panicked => Fault::Bug,
        }
    }
}

/// How to collect once.
#[derive(Debug, Clone)]
pub struct CollectRequest {
    /// Whose store.
    pub org: OrgId,
    /// Change nothing, and tell what would be.
    pub dry_run: bool,
    /// As in [`CollectConfig`].
    pub bytes_per_second: u64,
    /// Likewise.
    pub recompress_bytes: u64,
    /// Ends it early when it is set.
    pub cancel: Arc<AtomicBool>,
    /// Counts what is copied.
    pub progress: Arc<Counters>,
}

/// Collects the stores of all orgs. Clones are the same.
#[derive(Debug, Clone)]
pub struct Collector {
    db: Db,
    stores: Stores,
    config: CollectConfig,
    under_way: Arc<Mutex<HashSet<OrgId>>>,
}

impl Collector {
    /// Over the snapshots of `db`.
    pub fn new(db: Db, homes: Homes) -> Self {
        Self { db, stores: homes.stores, config: homes.collect, under_way: Arc::default() }
    }

    /// When and how hard it collects by itself.
    pub const fn config(&self) -> &CollectConfig {
        &self.config
    }

    /// Forgets what nothing keeps, then deletes what nobody needs.
    ///
    /// # Errors
    /// [`CollectorError`].
    pub async fn run(&self, request: CollectRequest) -> Result<Collected, CollectorError> {
        let under_way = self.begin(request.org)?;
        let (org, dry_run) = (request.org, request.dry_run);
        let snapshots_forgotten = match dry_run {
            true => self.db.forgettable_snapshots(org, db::now()).await?,
            false => self.forget(org).await?,
        };
        let (db, stores) = (self.db.clone(), self.stores.clone());
        let work = tokio::task::spawn_blocking(move || {
            // Also when nobody waits for it any more, it is under way until it has ended.
            let _under_way = under_way;
            collect(db, &stores, &request)
        });
        let packs = work.await.map_err(|_| CollectorError::Panicked)??;
        let collected = Collected { snapshots_forgotten, packs };
        if !dry_run {
            let report =
                serde_json::to_string(&collected).map_err(|error| DbError::Invalid(error.to_string()))?;
            self.db.note_collected(org, &report).await?;
        }
        Ok(collected)
    }

    async fn forget(&self, org: OrgId) -> Result<u64, DbError> {
        let homes = self.db.homes_of_org(org).await?;
        let mut forgotten = 0;
        for some in homes.chunks(FORGET_HOMES_AT_ONCE) {
            forgotten += self.db.forget_snapshots(org, some).await?;
        }
        Ok(forgotten)
    }

    /// Collects whenever it is time, until `stop`.
    pub async fn keep_collecting(self, stop: CancellationToken) {
        let config = self.config;
        if config.interval.is_zero() {
            return;
        }
        let mut not_before: HashMap<OrgId, Instant> = HashMap::new();
        let mut pause = AFTER_START.min(config.interval);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            pause = LOOK_EVERY.min(config.interval);
            let interval = config.interval;
            let due = self.db.orgs_to_collect(db::now(), interval).await;
            let due = due.unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot tell which collections are due");
                Vec::new()
            });
            for org in due {
                if not_before.get(&org).is_some_and(|at| Instant::now() < *at) {
                    continue;
                }
                if !self.collect_in_time(org, &config, &stop).await {
                    not_before.insert(org, Instant::now() + AFTER_FAILURE);
                }
                if stop.is_cancelled() {
                    return;
                }
            }
        }
    }

    /// Whether it succeeded.
    async fn collect_in_time(&self, org: OrgId, config: &CollectConfig, stop: &CancellationToken) -> bool {
        let cancel = Arc::new(AtomicBool::new(false));
        let request = CollectRequest {
            org,
            dry_run: false,
            bytes_per_second: config.bytes_per_second,
            recompress_bytes: config.recompress_bytes,
            cancel: Arc::clone(&cancel),
            progress: Arc::default(),
        };
        let mut running = std::pin::pin!(self.run(request));
        let done = tokio::select! {
            done = &mut running => done,
            () = stop.cancelled() => {
                cancel.store(true, Ordering::Relaxed);
                running.await
            }
        };
        match done {
            Ok(done) => {
                let (removed, freed) = (done.packs.packs_removed, done.packs.freed_bytes);
                tracing::info!(%org, removed, freed, forgotten = done.snapshots_forgotten, "garbage collected");
                true
            }
            Err(CollectorError::UnderWay | CollectorError::Collect(CollectError::Cancelled)) => true,
            Err(error) => {
                tracing::warn!(%org, %error, "garbage not collected; it is tried again");
                false
            }
        }
    }

    fn begin(&self, org: OrgId) -> Result<UnderWay, CollectorError> {
        let mut orgs = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if !orgs.insert(org) {
            return Err(CollectorError::UnderWay);
        }
        Ok(UnderWay { orgs: Arc::clone(&self.under_way), org })
    }
}

/// Gives the org's turn back.
struct UnderWay {
    orgs: Arc<Mutex<HashSet<OrgId>>>,
    org: OrgId,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.orgs.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.org);
    }
}

/// Says in the store that this database names what is needed in it, and brings the store's epoch and the database's
/// floor together. For the start of a server and of a collection; blocks.
///
/// # Errors
/// [`CollectorError::Foreign`], and when the store or the database cannot be used now.
pub(crate) fn take_charge(db: &Db, store: &PackStore, org: OrgId) -> Result<(), CollectorError> {
    let backend = store.backend().as_ref();
    let who = covey_home::claim(backend, SERVED)?;
    if who != SERVED {
        return Err(CollectorError::Foreign { place: backend.place(), who });
    }
    let runtime = Handle::current();
    let floor = runtime.block_on(db.collect_floor(org))?;
    let epoch = covey_home::meet_floor(backend, floor)?;
    if epoch > floor {
        runtime.block_on(db.raise_collect_floor(org, epoch))?;
    }
    Ok(())
}

fn collect(db: Db, stores: &Stores, request: &CollectRequest) -> Result<CollectReport, CollectorError> {
    let store = stores.of(request.org)?;
    match (request.dry_run, covey_home::owner(store.backend().as_ref())?) {
        (true, Some(who)) if who != SERVED => {
            return Err(CollectorError::Foreign { place: store.backend().place(), who });
        }
        (true, _) => {}
        (false, _) => take_charge(&db, &store, request.org)?,
    }
    let roots = DbRoots {
        db,
        org: request.org,
        only_kept: request.dry_run,
        beside: Pointers::on(Arc::clone(store.backend())),
        runtime: Handle::current(),
    };
    let options = CollectOptions {
        dry_run: request.dry_run,
        bytes_per_second: request.bytes_per_second,
        recompress_bytes: request.recompress_bytes,
        ..CollectOptions::default()
    };
    let progress = Logged { counters: &request.progress, org: request.org };
    Ok(covey_home::collect(&store, &roots, &options, &request.cancel, &progress)?)
}

/// Says now and then in the log how far it is.
struct Logged<'a> {
    counters: &'a Counters,
    org: OrgId,
}

impl Progress for Logged<'_> {
    fn files_done(&self, files: u64) {
        self.counters.files_done(files);
    }

    fn bytes_done(&self, bytes: u64) {
        let before = self.counters.bytes();
        self.counters.bytes_done(bytes);
        if before / LOGGED_BYTES != (before + bytes) / LOGGED_BYTES {
            tracing::info!(org = %self.org, bytes = before + bytes, "a collection copies what is still needed");
        }
    }
}

/// What the database names, and what was secured into the same store without the server.
#[derive(Debug)]
struct DbRoots {
    db: Db,
    org: OrgId,
    /// Of a dry run: as if what nothing keeps were forgotten.
    only_kept: bool,
    beside: Pointers,
    runtime: Handle,
}

impl DbRoots {
    fn failed(what: &str, error: &DbError) -> StoreError {
        let source = std::io::Error::other(error.to_string());
        StoreError::Unavailable { what: what.to_owned(), source }
    }
}

impl Roots for DbRoots {
    fn roots(&self) -> Result<Vec<RootHash>, StoreError> {
        let (org, only_kept) = (self.org, self.only_kept);
        let named = self.runtime.block_on(match only_kept {
            true => self.db.kept_roots(org, db::now()),
            false => self.db.snapshot_roots(org, None, None),
        });
        let mut roots = named.map_err(|error| Self::failed("read which snapshots there are", &error))?;
        roots.extend(self.beside.roots()?);
        Ok(roots)
    }

    fn raise_floor(&self, epoch: u64) -> Result<(), StoreError> {
        let org = self.org;
        let raised = self.db.raise_collect_floor(org, epoch);
        self.runtime.block_on(raised).map_err(|error| Self::failed("raise the floor", &error))?;
        self.beside.raise_floor(epoch)
    }
}
