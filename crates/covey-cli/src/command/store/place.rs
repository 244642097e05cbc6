//! Which store: a directory, a bucket, or the one of the server on this machine.

use std::sync::Arc;

use clap::Args;
use covey_bucket::Access;
use covey_home::backend::Backend;
use covey_home::integrity::{NamedRoot, NamedRoots, RootNames};
use covey_home::{PackStore, Pointers, StoreError};
use covey_types::{Fault, Generation};

use crate::client::{Client, id_path};
use crate::command::home::local::ServerStore;
use crate::exit_code::Refusal;
use crate::global::Global;
use crate::store_key;
use crate::store_location::{OpenedStore, StoreLocation};

/// Which store.
#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// The store: a directory or s3://BUCKET/PREFIX [default: that of the server on this machine].
    #[arg(long, value_name = "PLACE", value_parser = StoreLocation::parser())]
    store: Option<StoreLocation>,
    /// Only what belongs to this org [default: every org of the store].
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
    /// Opens what the arguments name, for looking at it or for mending it.
    pub(crate) async fn open(&self, global: &Global, access: Access) -> anyhow::Result<Vec<OrgStore>> {
        let Some(location) = &self.store else {
            let client = Client::new(global)?;
            let server = match access {
                Access::Read => ServerStore::of(global, &client)?,
                // Its server lets nobody else replace a file.
                Access::Write => ServerStore::beside_server(global, &client)?,
            };
            let roots = Kept::Server(roots_of_server(&client).await?);
            let store = server.pack_store()?;
            return Ok(vec![OrgStore { org: server.org, store, roots }]);
        };
        let opened = location.open(&global.data_dir()?, access, false)?;
        let orgs = match &self.org {
            Some(org) => vec![org.clone()],
            None => orgs_of(&opened, location)?,
        };
        orgs.into_iter()
            .map(|org| {
                let backend = existing(&opened, location, &org)?;
                let store = store_key::open_on(Arc::clone(&backend), &org)?;
                Ok(OrgStore { org, store, roots: Kept::Pointers(Pointers::on(backend)) })
            })
            .collect()
    }
}

/// The files of an org that must be there.
pub(super) fn existing(
    opened: &OpenedStore,
    location: &StoreLocation,
    org: &str,
) -> anyhow::Result<Arc<dyn Backend>> {
    let absent = || Refusal::new(Fault::NotFound, format!("{location} has no org `{org}`")).into();
    opened.open_existing(org)?.ok_or_else(absent)
}

/// The orgs in a store; there must be one, so that an empty mount point is not taken for a good store.
fn orgs_of(opened: &OpenedStore, location: &StoreLocation) -> anyhow::Result<Vec<String>> {
    let orgs = opened.orgs()?;
    if orgs.is_empty() {
        let why = match location {
            StoreLocation::Directory(_) => "is its volume mounted?",
            StoreLocation::Bucket(_) => "are prefix and endpoint right?",
        };
        let text = format!("{location} is no store: it has no orgs; {why}");
        return Err(Refusal::new(Fault::NotFound, text).into());
    }
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
