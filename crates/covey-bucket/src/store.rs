//! Stores in a bucket, opened once and used for any number of orgs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use covey_home::backend::Backend;
use covey_home::name::{InvalidName, check_name};
use covey_types::{BlockHash, Fault};
use tokio::runtime::Handle;

use crate::backend::{BucketBackend, path_in};
use crate::client::Client;
use crate::failure::{Failure, FailureKind};
use crate::patience::Patience;
use crate::place::BucketPlace;
use crate::probe::{Etags, MARK};
use crate::runtime;
use crate::settings::{Settings, SettingsError};
use crate::wire::Requests;

/// Why a bucket cannot be used. Each says in one sentence what to do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The settings contradict themselves.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The server, the key, the bucket, the region or the clock.
    #[error("{place} cannot be used: {problem}")]
    Refused {
        /// The bucket.
        place: BucketPlace,
        /// What is wrong, and the remedy.
        problem: String,
    },
    /// It cannot be told now; the same question may be answered later.
    #[error("{place} does not answer: {problem}")]
    Unavailable {
        /// The bucket.
        place: BucketPlace,
        /// The last answer.
        problem: String,
    },
    /// A directory for what this host remembers of the bucket.
    #[error("{} cannot be used", path.display())]
    Local {
        /// The directory or file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl OpenError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Settings(error) => error.fault(),
            Self::Refused { .. } => Fault::Denied,
            Self::Unavailable { .. } | Self::Local { .. } => Fault::Retry,
        }
    }
}

/// What is going to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Nothing is written, not even the mark of a new store.
    Read,
    /// Anything.
    Write,
}

/// How a bucket is opened.
#[derive(Debug, Clone)]
pub struct OpenOptions<'a> {
    /// Endpoint, region and key.
    pub settings: &'a Settings,
    /// What is going to be done.
    pub access: Access,
    /// Limits of every request.
    pub patience: Patience,
    /// A directory of this host for what can be made anew: where blocks lie, and what the last probe found. Without
    /// one everything is asked each time.
    pub local_dir: Option<&'a Path>,
    /// Whether a probe that this host has done before is done again.
    pub probe_again: bool,
}

/// A bucket that holds a store.
#[derive(Debug, Clone)]
pub struct BucketStore {
    client: Arc<Client>,
    runtime: Handle,
    local_dir: Option<PathBuf>,
}

impl BucketStore {
    /// Opens the store at `place` and tries what it needs.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(place: &BucketPlace, options: &OpenOptions<'_>) -> Result<Self, OpenError> {
        let mut client = Client::new(place, options.settings, options.patience.to_open())?;
        let local = |path: &Path| {
            let path = path.to_owned();
            move |source| OpenError::Local { path, source }
        };
        let runtime = runtime::start().map_err(local(Path::new("a thread")))?;
        let local_dir = options.local_dir.map(|dir| dir.join(local_name(&client)));
        if let Some(dir) = &local_dir {
            std::fs::create_dir_all(dir).map_err(local(dir))?;
        }
        probe(&client, &runtime, local_dir.as_deref(), options)?;
        client.patience = options.patience;
        Ok(Self { client: Arc::new(client), runtime, local_dir })
    }

    /// The files of one org.
    ///
    /// # Errors
    /// When the org's name is none.
    pub fn backend(&self, org: &str) -> Result<Arc<dyn Backend>, InvalidName> {
        check_name(org)?;
        Ok(Arc::new(BucketBackend {
            client: Arc::clone(&self.client),
            runtime: self.runtime.clone(),
            org: org.to_owned(),
            cache_dir: self.local_dir.as_ref().map(|dir| dir.join(org)),
        }))
    }

    /// Orgs that have a file in the store.
    ///
    /// # Errors
    /// When not all can be told.
    pub fn orgs(&self) -> Result<Vec<String>, OpenError> {
        let refused = |failure: &Failure| failed(&self.client, failure);
        let dir = path_in(&self.client, "orgs")
            .map_err(|error| refused(&Failure::new(FailureKind::Refused, error.to_string())))?;
        let listed = runtime::wait(&self.runtime, || async { self.client.list(&dir).await });
        Ok(listed.map_err(|failure| refused(&failure))?.1)
    }

    /// What this host remembers of it stands here.
    pub fn local_dir(&self) -> Option<&Path> {
        self.local_dir.as_deref()
    }

    /// Where it is.
    pub fn place(&self) -> &BucketPlace {
        self.client.place()
    }

    /// What has been asked so far, by every org's backend together.
    pub fn requests(&self) -> &Arc<Requests> {
        self.client.requests()
    }
}

fn failed(client: &Client, failure: &Failure) -> OpenError {
    let (place, problem) = (client.place().clone(), failure.to_string());
    if failure.may_pass() {
        OpenError::Unavailable { place, problem }
    } else {
        OpenError::Refused { place, problem }
    }
}

/// Tries the bucket, unless this host has done so before and that is enough.
fn probe(
    client: &Client,
    runtime: &Handle,
    local_dir: Option<&Path>,
    options: &OpenOptions<'_>,
) -> Result<(), OpenError> {
    let remembered = local_dir.map(|dir| dir.join("probed"));
    if let (Some(path), false) = (&remembered, options.probe_again)
        && let Ok(text) = std::fs::read_to_string(path)
    {
        match text.as_str() {
            CHECKSUMS => return Ok(()),
            OPAQUE => {
                client.distrust_etags();
                return Ok(());
            }
            // Of another version, or damaged: as if it were not there.
            _ => {}
        }
    }
    let told = |failure: Failure| failed(client, &failure);
    let mark =
        path_in(client, MARK).map_err(|error| told(Failure::new(FailureKind::Refused, error.to_string())))?;
    let etags = match options.access {
        Access::Read => {
            return runtime::wait(runtime, || async { client.mark(&mark).await }).map(drop).map_err(told);
        }
        Access::Write => runtime::wait(runtime, || async { client.probe(&mark).await }).map_err(told)?,
    };
    if let Some(path) = remembered {
        let text = match etags {
            Etags::Checksums => CHECKSUMS,
            Etags::Opaque => OPAQUE,
        };
        std::fs::write(&path, text).map_err(|source| OpenError::Local { path, source })?;
    }
    Ok(())
}

const CHECKSUMS: &str = "covey-bucket 1\netags checksums\n";
const OPAQUE: &str = "covey-bucket 1\netags opaque\n";

/// One name for a bucket at an endpoint.
fn local_name(client: &Client) -> String {
    let whole = format!("{} {}", client.endpoint(), client.place());
    BlockHash::of(whole.as_bytes()).to_string()[..32].to_owned()
}
