//! The data plane: sandboxes, working copies of homes, runner side of the link.
//!
//! Reason for a crate: **artifact**. What does not belong here: SQL, models, the journal, the API.
//!
//! [`Runner::run`] dials the server and keeps one actor per home (`home`); an actor owns the home's working
//! copy, its sandbox and its secures, and everything that happens to a home is one message in its queue, so
//! messages of one home are in order and one home's long work never delays another's.

mod evict;
mod home;
mod link;
mod mark;
pub mod sandbox;
mod store_link;
mod tool_link;
mod working_copy;

use std::collections::HashMap;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use covey_home::backend::{DirectoryStore, OpenStore};
use covey_home::{Excludes, MasterKey, PackStore, StoreError};
use covey_types::{HomeId, OrgId};
use tokio_util::sync::CancellationToken;

pub use link::{Dial, DialFuture, LinkStream};
pub use store_link::StoreLink;

use crate::mark::HomeDir;
use crate::sandbox::SandboxBackend;

/// First uid on the host that a runner started as root gives to homes; one for each home, so that on the
/// host, too, one agent cannot touch another's files. Inside it is always 1000.
const HOST_UID_FIRST: u32 = 200_000;

/// What a runner needs to know.
#[derive(Debug, Clone)]
pub struct RunnerConfig {
    /// Working copies, stat caches, records and sockets of sandboxes. Local disk.
    pub data_dir: PathBuf,
    /// The home store; none when it is turned off (`COVEY_HOME_STORE=false`). A runner is given a way to it, and no key.
    pub store: Option<Arc<dyn OpenStore>>,
    /// Opens the store's keys; none: the store is not encrypted.
    pub store_key: Option<MasterKey>,
    /// Bytes that working copies may take that nothing runs on and that hold nothing unpublished; beyond it those
    /// used longest ago go.
    pub copies_limit: u64,
    /// Shown to people.
    pub name: String,
    /// What of a home is left out of snapshots.
    pub excludes: Excludes,
    /// A sandbox without a step for this long is stopped and its home secured once more.
    pub warm_limit: Duration,
    /// A sandbox ends after this long without a server (I14).
    pub orphan_term: Duration,
}

/// What working copies that rest may take where nothing else is said.
const COPIES_LIMIT_BYTES: u64 = 64 << 30;

impl RunnerConfig {
    /// The defaults of design section 5, for a runner that keeps its data in `data_dir` and homes in the directory
    /// `store_dir`.
    pub fn new(data_dir: PathBuf, store_dir: Option<PathBuf>) -> Self {
        Self {
            data_dir,
            store: store_dir.map(|dir| Arc::new(DirectoryStore(dir)) as Arc<dyn OpenStore>),
            store_key: None,
            copies_limit: COPIES_LIMIT_BYTES,
            name: "local".to_owned(),
            excludes: Excludes::from_setting(None),
            warm_limit: Duration::from_secs(30 * 60),
            orphan_term: Duration::from_secs(120),
        }
    }
}

/// A runner on this host.
#[derive(Debug)]
pub struct Runner {
    config: RunnerConfig,
    backend: Arc<dyn SandboxBackend>,
    stores: Mutex<HashMap<OrgId, Arc<PackStore>>>,
    /// The next host uid to give away; see [`HOST_UID_FIRST`].
    next_uid: AtomicU32,
    is_root: bool,
    /// Held while a copy begins to be used, or is evicted.
    copies: Mutex<()>,
    /// Two runners on one data directory would each take the other's sandboxes and working copies (I5). The kernel
    /// gives the lock back when the process dies.
    _lock: File,
}

impl Runner {
    /// Prepares the data directory.
    ///
    /// # Errors
    /// When a directory cannot be made or read; the error names it.
    pub fn new(config: RunnerConfig, backend: Arc<dyn SandboxBackend>) -> io::Result<Arc<Self>> {
        let is_root = rustix::process::geteuid().is_root();
        make_private_dir(&config.data_dir)?;
        let lock = lock_data_dir(&config.data_dir)?;
        let runner = Self {
            config,
            backend,
            stores: Mutex::default(),
            next_uid: AtomicU32::new(HOST_UID_FIRST),
            is_root,
            copies: Mutex::default(),
            _lock: lock,
        };
        for dir in [runner.homes_dir(), runner.run_dir()] {
            make_private_dir(&dir)?;
        }
        let used = mark::all(&runner.homes_dir())?.into_iter().map(|(_, mark)| mark.host_uid).max();
        if let Some(used) = used {
            runner.next_uid.store(HOST_UID_FIRST.max(used + 1), Ordering::Relaxed);
        }
        Ok(Arc::new(runner))
    }

    /// Serves homes until `shutdown`, reconnecting through `dial` as often as the link is lost. Sandboxes are
    /// left alive: the next runner on this data directory adopts them.
    ///
    /// # Errors
    /// When the records of earlier sandboxes cannot be read.
    pub async fn run(self: Arc<Self>, dial: Arc<dyn Dial>, shutdown: CancellationToken) -> io::Result<()> {
        link::run(self, dial, shutdown).await
    }

    fn lock_copies(&self) -> MutexGuard<'_, ()> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes working copies beyond the limit. Blocks.
    fn keep_copies_within_limit(&self) {
        let evicted = {
            let _copies = self.lock_copies();
            evict::evict(&self.homes_dir(), self.config.copies_limit)
        };
        match evicted {
            Ok(evicted) if evicted.homes.is_empty() => {}
            Ok(evicted) => {
                let (homes, bytes) = (evicted.homes.len(), evicted.bytes);
                tracing::info!(
                    homes,
                    bytes,
                    "working copies beyond the limit are removed; wakes put them back"
                );
            }
            Err(error) => tracing::warn!(%error, "the size of working copies cannot be told"),
        }
        // What an earlier runner has left is deleted, too.
        if let Err(error) = evict::delete_evicted(&self.homes_dir()) {
            tracing::warn!(%error, "an evicted working copy cannot be deleted");
        }
    }

    fn homes_dir(&self) -> PathBuf {
        self.config.data_dir.join("homes")
    }

    fn home_dir(&self, home: HomeId) -> HomeDir {
        HomeDir::new(&self.homes_dir(), home)
    }

    fn run_dir(&self) -> PathBuf {
        self.config.data_dir.join("sandboxes")
    }

    /// The org's store, opened at most once.
    fn store(&self, org: OrgId) -> Result<Option<Arc<PackStore>>, StoreError> {
        let Some(opener) = &self.config.store else { return Ok(None) };
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = stores.get(&org) {
            return Ok(Some(Arc::clone(store)));
        }
        let (org_name, key) = (org.to_string(), self.config.store_key.as_ref());
        let store = Arc::new(PackStore::open_with(opener.open(&org_name)?, &org_name, key)?);
        stores.insert(org, Arc::clone(&store));
        Ok(Some(store))
    }

    /// The uid and gid on the host for a home's files.
    fn host_owner(&self, marked: Option<u32>) -> u32 {
        match (self.is_root, marked) {
            (false, _) => rustix::process::geteuid().as_raw(),
            (true, Some(uid)) if uid >= HOST_UID_FIRST => uid,
            (true, _) => self.next_uid.fetch_add(1, Ordering::Relaxed),
        }
    }
}

fn lock_data_dir(data_dir: &Path) -> io::Result<File> {
    let path = data_dir.join("lock");
    let named = |kind, what: String| io::Error::new(kind, format!("{}: {what}", path.display()));
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(|error| named(error.kind(), error.to_string()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            let what = "another runner works on this data directory; end it, or use another --data-dir";
            Err(named(io::ErrorKind::ResourceBusy, what.to_owned()))
        }
        Err(TryLockError::Error(error)) => Err(named(error.kind(), error.to_string())),
    }
}

/// Makes a directory that only its owner can enter, and its parents.
fn make_private_dir(dir: &std::path::Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|e| io::Error::new(e.kind(), format!("cannot make the directory {}: {e}", dir.display())))
}
