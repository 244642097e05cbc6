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
    BlockStore, Excludes, MaterializeReport, MaterializeRequest, PackStore, Pointers, SecureReport,
    SecureRequest,
};
use covey_types::{BlockHash, Fault, FencingToken, RootHash};
use serde_json::{Value, json};

use crate::client::{Client, id_path};
use crate::exit_code::Refusal;
use crate::global::Global;
use crate::output::one_line;
use crate::progress::Progress;
use crate::store_location::{OpenedStore, StoreLocation};

const EXCLUDES_SETTING: &str = "COVEY_HOME_EXCLUDES";

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
    pub(crate) fn open(store: &OpenedStore, org: &str) -> anyhow::Result<Self> {
        let setting = match std::env::var(EXCLUDES_SETTING) {
            Ok(text) => Some(text),
            Err(std::env::VarError::NotPresent) => None,
            Err(error) => return Err(error).context(EXCLUDES_SETTING),
        };
        Self::open_with(store, org, setting.as_deref())
    }

    fn open_with(opened: &OpenedStore, org: &str, excludes: Option<&str>) -> anyhow::Result<Self> {
        let store = PackStore::open(opened.open(org)?)?;
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
        Ok(report)
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
        Ok(report)
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

    /// Beside the org's blocks, never in the home; another directory of the same home has another one.
    fn stat_cache(&self, dir: &Path, home: &str) -> anyhow::Result<PathBuf> {
        let absolute = std::path::absolute(dir)?;
        let inside = self.local_dir.canonicalize().is_ok_and(|store| store.starts_with(&absolute));
        if inside {
            let text = format!("the store {} lies inside {}", self.local_dir.display(), dir.display());
            return Err(Refusal::new(Fault::Invalid, text).into());
        }
        covey_home::name::check_name(home)?;
        let place = self.local_dir.join("stat-caches").join(&self.org).join(home);
        std::fs::create_dir_all(&place).with_context(|| format!("{} cannot be made", place.display()))?;
        let name = BlockHash::of(absolute.as_os_str().as_bytes()).to_string();
        Ok(place.join(&name[..32]))
    }
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
    /// Where the client's server keeps homes, if that can be reached from this machine.
    pub(crate) fn of(global: &Global, client: &Client) -> anyhow::Result<Self> {
        let server = client.server();
        let is_here = |location: &StoreLocation| match location {
            StoreLocation::Directory(path) => path.is_dir(),
            StoreLocation::Bucket(_) => true,
        };
        match (&server.store, &server.org) {
            (Some(location), Some(org)) if is_here(location) => {
                let data_dir = global.data_dir()?;
                let socket = crate::host::store_socket(&data_dir);
                let opened = match location {
                    StoreLocation::Bucket(_) if socket.exists() => {
                        OpenedStore::through_server(socket, &data_dir)?
                    }
                    _ => location.open(&data_dir, Access::Write, false)?,
                };
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

    pub(crate) fn local(&self) -> anyhow::Result<LocalStore> {
        LocalStore::open_with(&self.opened, &self.org, self.excludes.as_deref())
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
/// moved on since.
pub(crate) async fn import(client: &Client, current: &Value, report: &SecureReport) -> anyhow::Result<Value> {
    let id = current["id"].as_str().context("the server sent a home without id")?;
    let body = json!({
        "root": report.root, "base_generation": current["generation"],
        "files": report.files, "bytes": report.bytes,
    });
    Ok(client.post(&format!("{}/import", id_path("covey/homes", id)?), &body).await?)
}
