//! Which store: a directory, or the one of the server on this machine.

use std::path::{Path, PathBuf};

use clap::Args;
use covey_home::integrity::{NamedRoot, NamedRoots, RootNames};
use covey_home::{PackStore, Pointers, StoreError};
use covey_types::{Fault, Generation};

use crate::client::{Client, id_path};
use crate::command::home::local::ServerStore;
use crate::exit_code::Refusal;
use crate::global::Global;
use crate::store_key;

/// Which store.
#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// The store's directory [default: that of the server on this machine].
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Only what belongs to this org [default: every org of the directory].
    #[arg(long, requires = "store")]
    org: Option<String>,
}

/// One org's part of a store, and what it is kept for.
#[derive(Debug)]
pub(crate) struct OrgStore {
    pub(crate) org: String,
    pub(crate) store: PackStore,
    pub(crate) roots: Kept,
}

/// Where it stands which states are kept.
#[derive(Debug)]
pub(crate) enum Kept {
    /// In the store.
    Pointers(Pointers),
    /// In the database of a server, asked for when the command began.
    Server(NamedRoots),
}

impl Kept {
    pub(crate) const fn pointers(&self) -> Option<&Pointers> {
        match self {
            Self::Pointers(pointers) => Some(pointers),
            Self::Server(_) => None,
        }
    }
}

impl RootNames for Kept {
    fn named_roots(&self) -> Result<NamedRoots, StoreError> {
        match self {
            Self::Pointers(pointers) => pointers.named_roots(),
            Self::Server(roots) => roots.named_roots(),
        }
    }
}

impl StoreArgs {
    /// Opens what the arguments name.
    pub(crate) async fn open(&self, global: &Global) -> anyhow::Result<Vec<OrgStore>> {
        let Some(dir) = &self.store else {
            let client = Client::new(global)?;
            let server = ServerStore::of(global, &client)?;
            let roots = Kept::Server(roots_of_server(&client).await?);
            let store = server.pack_store()?;
            return Ok(vec![OrgStore { org: server.org, store, roots }]);
        };
        let orgs = match &self.org {
            Some(org) => vec![org.clone()],
            None => orgs_of(dir)?,
        };
        orgs.into_iter()
            .map(|org| {
                let path = dir.join("orgs").join(&org);
                if !path.is_dir() {
                    let text = format!("{} has no org `{org}`", dir.display());
                    return Err(Refusal::new(Fault::NotFound, text).into());
                }
                let store = store_key::open(dir, &org)?;
                let roots = Kept::Pointers(Pointers::open(dir, &org)?);
                Ok(OrgStore { org, store, roots })
            })
            .collect()
    }
}

/// The orgs in a store's directory; there must be one, so that an empty mount point is not taken for a good store.
pub(crate) fn orgs_of(dir: &Path) -> anyhow::Result<Vec<String>> {
    let mut orgs = Vec::new();
    if let Ok(entries) = std::fs::read_dir(dir.join("orgs")) {
        for entry in entries {
            orgs.extend(entry?.file_name().into_string().ok());
        }
    }
    if orgs.is_empty() {
        let text = format!("{} is no store: it has no orgs; is its volume mounted?", dir.display());
        return Err(Refusal::new(Fault::NotFound, text).into());
    }
    orgs.sort_unstable();
    Ok(orgs)
}

/// Every snapshot that the server's database names.
async fn roots_of_server(client: &Client) -> anyhow::Result<NamedRoots> {
    let mut found = NamedRoots::default();
    for home in client.list("/v1/covey/homes", None).await? {
        let id = home["id"].as_str().unwrap_or_default();
        let path = format!("{}/snapshots", id_path("covey/homes", id)?);
        for snapshot in client.list(&path, None).await? {
            let root = snapshot["root"].as_str().and_then(|root| root.parse().ok());
            match (root, snapshot["generation"].as_u64()) {
                (Some(root), Some(generation)) => {
                    let generation = Generation(generation);
                    found.roots.push(NamedRoot { home: id.to_owned(), generation, root });
                }
                _ => found.problems.push(format!("a snapshot of {id} cannot be understood: {snapshot}")),
            }
        }
    }
    Ok(found)
}
