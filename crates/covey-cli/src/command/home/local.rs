//! Homes of this machine and a store: secure, materialize, and making a state an agent's own.
//!
//! Excludes are those of the server whose homes these are; without a server they come from `COVEY_HOME_EXCLUDES`. Stat caches stand in the store's directory, one
//! per home and directory, so that a second secure reads nothing that has not changed.

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use covey_bucket::Access;
use covey_home::backend::OpenStore as _;
use covey_home::{
    BlockStore, Excludes, MasterKey, MaterializeReport, MaterializeRequest, PackStore, Pointers,
    SecureReport, SecureRequest,
};
use covey_types::{BlockHash, Fault, FencingToken, RootHash};
use serde_json::{Value, json};

use crate::client::{Client, id_path};
use crate::exit_code::Refusal;
use crate::global::Global;
use crate::output::one_line;
use crate::progress::Progress;
use crate::store_key::{self, StoreKey};
use crate::store_location::{OpenedStore, StoreLocation};

const EXCLUDES_SETTING: &str = "COVEY_HOME_EXCLUDES";
/// So often a directory is offered to a home, each time because a garbage collection has passed.
const IMPORT_TRIES_MAX: usize = 4;

/// A store, opened for one org.
#[derive(Debug)]
pub(crate) struct LocalStore {
    /// Of this host, for what can be made anew.
    local_dir: PathBuf,
    org: String,
    store: PackStore,
    excludes: Excludes,
}

impl LocalStore {
    /// With the excludes of this command's environment: for stores without a server.
    pub(crate) fn open(store: &OpenedStore, org: &str, key: &StoreKey) -> anyhow::Result<Self> {
        let setting = match std::env::var(EXCLUDES_SETTING) {
            Ok(text) => Some(text),
            Err(std::env::VarError::NotPresent) => None,
            Err(error) => return Err(error).context(EXCLUDES_SETTING),
        };
        Self::open_with(store, org, setting.as_deref(), key.read()?.as_ref())
    }

    fn open_with(
        opened: &OpenedStore,
        org: &str,
        excludes: Option<&str>,
        key: Option<&MasterKey>,
    ) -> anyhow::Result<Self> {
        let store = PackStore::open_with(opened.open(org)?, org, key)?;
        for problem in store.problems() {
            eprintln!("warning: {}", one_line(&problem));
        }
        let excludes = Excludes::from_setting(excludes);
        Ok(Self { local_dir: opened.local_dir()?.to_owned(), org: org.to_owned(), store, excludes })
    }

    /// Secures `dir` and makes it the home's current snapshot in this store.
    pub(crate) fn secure_and_publish(
        &self,
        dir: &Path,
        home: &str,
        pointers: &Pointers,
        token: FencingToken,
    ) -> anyhow::Result<SecureReport> {
        self.with_request(dir, home, None, |request| {
            covey_home::secure_and_publish(request, pointers, home, token).map_err(Into::into)
        })
    }

    /// Secures `dir` without publishing anything.
    pub(crate) fn secure(
        &self,
        dir: &Path,
        home: &str,
        previous: Option<RootHash>,
    ) -> anyhow::Result<SecureReport> {
        self.with_request(dir, home, previous, |request| covey_home::secure(request).map_err(Into::into))
    }

    fn with_request(
        &self,
        dir: &Path,
        home: &str,
        previous: Option<RootHash>,
        secure: impl FnOnce(&SecureRequest<'_>) -> anyhow::Result<SecureReport>,
    ) -> anyhow::Result<SecureReport> {
        let stat_cache = self.stat_cache(dir, home)?;
        let progress = Progress::start("securing");
        let report = secure(&SecureRequest {
            dir,
            store: &self.store,
            stat_cache: Some(&stat_cache),
            excludes: &self.excludes,
            previous,
            cancel: &AtomicBool::new(false),
            progress: &progress,
            threads: 0,
        })
        .with_context(|| format!("securing {}", dir.display()))?;
        drop(progress);
        report_to_people(&report);
        self.know(dir, home)?;
        Ok(report)
    }

    /// Whether what is stored is encrypted, so that nothing plain may lie beside it.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.store.newest_key().is_some()
    }

    /// The org's homes.
    pub(crate) fn pointers(&self) -> Pointers {
        Pointers::on(Arc::clone(self.store.backend()))
    }

    /// A directory of this host for what belongs to the store and can be made anew.
    pub(crate) fn local_dir(&self) -> &Path {
        &self.local_dir
    }

    /// The org's blocks.
    pub(crate) fn blocks(&self) -> &dyn BlockStore {
        &self.store
    }

    /// The packs that they lie in.
    pub(crate) const fn packs(&self) -> &PackStore {
        &self.store
    }

    /// What is not kept.
    pub(crate) const fn excludes(&self) -> &Excludes {
        &self.excludes
    }

    /// Makes `dir` exactly what `root` says.
    pub(crate) fn materialize(
        &self,
        dir: &Path,
        home: &str,
        root: RootHash,
    ) -> anyhow::Result<MaterializeReport> {
        let stat_cache = self.stat_cache(dir, home)?;
        let progress = Progress::start("materializing");
        let report = covey_home::materialize(&MaterializeRequest {
            root,
            dir,
            store: &self.store,
            stat_cache: Some(&stat_cache),
            excludes: &self.excludes,
            owner: owner_to_keep(dir),
            cancel: &AtomicBool::new(false),
            progress: &progress,
            threads: 0,
        })
        .with_context(|| format!("materializing into {}", dir.display()))?;
        drop(progress);
        for warning in &report.warnings {
            eprintln!("warning: {}", one_line(warning));
        }
        self.know(dir, home)?;
        Ok(report)
    }

    /// Notes beside the stat cache that this very directory is a working copy of the home.
    fn know(&self, dir: &Path, home: &str) -> anyhow::Result<()> {
        let path = self.stat_cache(dir, home)?.with_extension("dir");
        let text = identity(dir).with_context(|| format!("{}", dir.display()))?;
        std::fs::write(&path, text).with_context(|| format!("{}", path.display()))
    }

    /// Refuses a directory that holds something and is no working copy that an earlier secure or materialize of this
    /// home has left: materializing would remove what is in it.
    pub(crate) fn refuse_unknown(&self, dir: &Path, home: &str) -> anyhow::Result<()> {
        let is_empty = match std::fs::read_dir(dir) {
            Ok(mut names) => names.next().is_none(),
            // What is missing is made; what else is wrong with it is said by who uses it.
            Err(_) => true,
        };
        let path = self.stat_cache(dir, home)?.with_extension("dir");
        let known = std::fs::read_to_string(path).ok();
        if is_empty || known.is_some_and(|known| identity(dir).is_ok_and(|now| now == known)) {
            return Ok(());
        }
        let text = format!(
            "{} is not empty, and no earlier `secure` or `materialize` of `{home}` has left it: what is in it would \
             be removed; choose another directory, or give --replace",
            dir.display()
        );
        Err(Refusal::new(Fault::Conflict, text).into())
    }

    /// The state that the directory was last known to have, from [`LocalStore::remember`].
    pub(crate) fn remembered(&self, dir: &Path, home: &str) -> Option<RootHash> {
        let path = self.stat_cache(dir, home).ok()?.with_extension("root");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    }

    /// Notes that the directory and this state are the same now.
    pub(crate) fn remember(&self, dir: &Path, home: &str, root: RootHash) -> anyhow::Result<()> {
        let path = self.stat_cache(dir, home)?.with_extension("root");
        std::fs::write(&path, format!("{root}\n")).with_context(|| format!("{}", path.display()))
    }

    /// Beside the org's blocks, never in the home; another directory of the same home has another one. It holds
    /// names of files, so beside an encrypted store there is none: it lies in the user's cache directory then.
    fn stat_cache(&self, dir: &Path, home: &str) -> anyhow::Result<PathBuf> {
        let absolute = std::path::absolute(dir)?;
        let inside = self.local_dir.canonicalize().is_ok_and(|store| store.starts_with(&absolute));
        if inside {
            let text = format!("the store {} lies inside {}", self.local_dir.display(), dir.display());
            return Err(Refusal::new(Fault::Invalid, text).into());
        }
        covey_home::name::check_name(home)?;
        let caches = if self.is_encrypted() { user_caches(&self.local_dir)? } else { self.local_dir.clone() };
        let place = caches.join("stat-caches").join(&self.org).join(home);
        std::fs::create_dir_all(&place).with_context(|| format!("{} cannot be made", place.display()))?;
        let name = BlockHash::of(absolute.as_os_str().as_bytes()).to_string();
        Ok(place.join(&name[..32]))
    }
}

/// Which directory this is, whatever its name: another one in its place has another inode.
fn identity(dir: &Path) -> std::io::Result<String> {
    let metadata = std::fs::metadata(dir)?;
    Ok(format!("{}:{}\n", metadata.dev(), metadata.ino()))
}

/// A directory of this user for what belongs to the store and must not lie in it.
fn user_caches(store: &Path) -> anyhow::Result<PathBuf> {
    let of = |name: &str| std::env::var_os(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let base = of("XDG_CACHE_HOME").or_else(|| of("HOME").map(|home| home.join(".cache")));
    let base = base.context("neither XDG_CACHE_HOME nor HOME says where this user's caches are")?;
    let name = BlockHash::of(std::path::absolute(store)?.as_os_str().as_bytes()).to_string();
    Ok(base.join("covey").join(&name[..32]))
}

/// Says what a secure left out or could not do.
pub(crate) fn report_to_people(report: &SecureReport) {
    for warning in &report.warnings {
        eprintln!("warning: {}", one_line(warning));
    }
    if report.skipped > 0 {
        let paths = one_line(&report.skipped_paths.join(", "));
        eprintln!("warning: {} names are of a kind that is not kept: {paths}", report.skipped);
    }
}

/// Root gives files back to whom the directory belongs; anybody else can only own what they make.
pub(crate) fn owner_to_keep(dir: &Path) -> Option<(u32, u32)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    std::fs::metadata(dir).ok().map(|metadata| (metadata.uid(), metadata.gid()))
}

/// The home store of a server on this machine.
#[derive(Debug)]
pub(crate) struct ServerStore {
    pub(crate) location: StoreLocation,
    pub(crate) org: String,
    opened: OpenedStore,
    excludes: Option<String>,
}

impl ServerStore {
    /// Where the client's server keeps homes, if that can be reached from this machine: a bucket through the server, as
    /// long as it runs.
    pub(crate) fn of(global: &Global, client: &Client) -> anyhow::Result<Self> {
        Self::open(global, client, |location, data_dir| {
            let socket = crate::host::store_socket(data_dir);
            match location {
                StoreLocation::Bucket(_) if socket.exists() => OpenedStore::through_server(socket, data_dir),
                _ => location.open(data_dir, Access::Write, false),
            }
        })
    }

    /// The same, never through the server, for what the server lets nobody else do; a bucket's key is needed.
    pub(crate) fn beside_server(global: &Global, client: &Client) -> anyhow::Result<Self> {
        Self::open(global, client, |location, data_dir| location.open(data_dir, Access::Write, false))
    }

    fn open(
        global: &Global,
        client: &Client,
        way: impl FnOnce(&StoreLocation, &Path) -> anyhow::Result<OpenedStore>,
    ) -> anyhow::Result<Self> {
        let server = client.server();
        let is_here = |location: &StoreLocation| match location {
            StoreLocation::Directory(path) => path.is_dir(),
            StoreLocation::Bucket(_) => true,
        };
        match (&server.store, &server.org) {
            (Some(location), Some(org)) if is_here(location) => {
                let opened = way(location, &global.data_dir()?)?;
                let (location, org) = (location.clone(), org.clone());
                Ok(Self { location, org, opened, excludes: server.excludes.clone() })
            }
            _ => {
                let text = "the server's home store is not on this machine: run this where `covey up` runs, \
                            with its --data-dir";
                Err(Refusal::new(Fault::Invalid, text).into())
            }
        }
    }

    /// Its blocks, for what looks at the store and at no home.
    pub(crate) fn pack_store(&self) -> anyhow::Result<PackStore> {
        let key = store_key::from_setting()?;
        Ok(PackStore::open_with(self.opened.open(&self.org)?, &self.org, key.as_ref())?)
    }

    pub(crate) fn local(&self) -> anyhow::Result<LocalStore> {
        LocalStore::open_with(
            &self.opened,
            &self.org,
            self.excludes.as_deref(),
            store_key::from_setting()?.as_ref(),
        )
    }
}

/// Secures the whole of `dir` for the home, or refuses.
pub(crate) fn secured(
    store: &LocalStore,
    dir: &Path,
    home: &str,
    previous: Option<RootHash>,
) -> anyhow::Result<SecureReport> {
    let report = store.secure(dir, home, previous)?;
    if report.partial {
        let text = format!("{} is not taken: something in it could not be read", dir.display());
        return Err(Refusal::new(Fault::Denied, text).into());
    }
    Ok(report)
}

/// Makes what was secured the current state of the home that `current` describes; refused when that home has
/// moved on since. When a garbage collection has passed since the secure, it is secured with `again` and offered once
/// more; gives what was offered last.
pub(crate) async fn import(
    client: &Client,
    current: &Value,
    mut report: SecureReport,
    again: &dyn Fn() -> anyhow::Result<SecureReport>,
) -> anyhow::Result<(Value, SecureReport)> {
    let id = current["id"].as_str().context("the server sent a home without id")?;
    let path = format!("{}/import", id_path("covey/homes", id)?);
    for tried in 1.. {
        let body = json!({
            "root": report.root, "base_generation": current["generation"],
            "files": report.files, "bytes": report.bytes, "epoch": report.epoch,
        });
        let refused = match client.post(&path, &body).await {
            Ok(imported) => return Ok((imported, report)),
            Err(refused) => refused,
        };
        if refused.fault() != Fault::Conflict || tried == IMPORT_TRIES_MAX {
            return Err(refused.into());
        }
        // What else is in the way, another try does not mend.
        let store = client.get("/v1/covey/store").await?;
        if store["epoch_floor"].as_u64().is_none_or(|floor| floor <= report.epoch) {
            return Err(refused.into());
        }
        eprintln!("a garbage collection has passed meanwhile; securing again");
        report = again()?;
    }
    anyhow::bail!("no try was made")
}
