//! The master key of encrypted stores: named on the command line or by `COVEY_STORE_KEY_FILE`, read from a file.
//!
//! What does not belong here: making and changing keys (`command::store::key`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use covey_home::backend::Backend;
use covey_home::{MasterKey, PackStore};

const SETTING: &str = "COVEY_STORE_KEY_FILE";

/// Which key opens the store.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct StoreKey {
    /// File of the master key that the store is encrypted with; a store that is new becomes encrypted.
    #[arg(long, value_name = "FILE", env = SETTING)]
    key_file: Option<PathBuf>,
}

impl StoreKey {
    /// The key, if one is named.
    pub(crate) fn read(&self) -> anyhow::Result<Option<MasterKey>> {
        self.key_file.as_deref().map(read).transpose()
    }
}

/// The key that the environment names, for commands without the option.
pub(crate) fn from_setting() -> anyhow::Result<Option<MasterKey>> {
    let file = std::env::var_os(SETTING).filter(|file| !file.is_empty());
    file.map(|file| read(Path::new(&file)).context(SETTING)).transpose()
}

/// The store of `org` on a backend, with the key that the environment names.
pub(crate) fn open_on(backend: Arc<dyn Backend>, org: &str) -> anyhow::Result<PackStore> {
    match from_setting()? {
        None => Ok(PackStore::open(backend)?),
        Some(master) => Ok(PackStore::open_encrypted(backend, org, &master)?),
    }
}

/// The key in a file.
pub(crate) fn read(file: &Path) -> anyhow::Result<MasterKey> {
    Ok(MasterKey::read(file)?)
}
