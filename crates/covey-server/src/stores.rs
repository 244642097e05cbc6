//! The orgs' block stores, for those in the server who look into homes.
//!
//! Every call on a store blocks, so work on one runs on a blocking thread, and only so much of it at a time. What does
//! not belong here: what is read.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use covey_home::backend::{DirectoryStore, OpenStore};
use covey_home::{MasterKey, PackStore, StoreError};
use covey_types::{Fault, OrgId};
use tokio::sync::Semaphore;

/// Requests that read stores at the same time; more wait.
pub const STORE_READS_MAX: usize = 16;

/// Why there was no answer from a store.
#[derive(Debug, thiserror::Error)]
pub enum StoresError {
    /// The store.
    #[error("the home store cannot be opened: {0}")]
    Store(#[from] StoreError),
    /// The work ended without an answer.
    #[error("the work on the home store panicked")]
    Panicked,
}

impl StoresError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Store(error) => error.fault(),
            Self::Panicked => Fault::Bug,
        }
    }
}

/// The opened stores. Clones are the same.
#[derive(Debug, Clone)]
pub struct Stores {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    open: Arc<dyn OpenStore>,
    /// Opens the orgs' keys; none: the stores are not encrypted.
    key: Option<MasterKey>,
    opened: Mutex<HashMap<OrgId, Arc<PackStore>>>,
    reads: Semaphore,
}

impl Stores {
    /// Opens each org's store with `open` when it is first needed, and with `key` if they are encrypted.
    pub fn new(open: Arc<dyn OpenStore>, key: Option<MasterKey>) -> Self {
        let reads = Semaphore::new(STORE_READS_MAX);
        Self { inner: Arc::new(Inner { open, key, opened: Mutex::default(), reads }) }
    }

    /// Stores in a directory of this host, opened with `key` if they are encrypted.
    pub fn in_directory(path: PathBuf, key: Option<MasterKey>) -> Self {
        Self::new(Arc::new(DirectoryStore(path)), key)
    }

    /// The org's store, opened at most once; blocks.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn of(&self, org: OrgId) -> Result<Arc<PackStore>, StoreError> {
        // Held while it opens: two openings at once would read the same indexes twice.
        let mut opened = self.inner.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = opened.get(&org) {
            return Ok(Arc::clone(store));
        }
        let name = org.to_string();
        let backend = self.inner.open.open(&name)?;
        let store = Arc::new(PackStore::open_with(backend, &name, self.inner.key.as_ref())?);
        opened.insert(org, Arc::clone(&store));
        Ok(store)
    }

    /// Runs `work` on the org's store, off the async threads, when its turn has come. A caller that goes away does not
    /// end it: it holds its turn until it has ended.
    ///
    /// # Errors
    /// When the store cannot be opened, or `work` panics.
    pub async fn with<T, F>(&self, org: OrgId, work: F) -> Result<T, StoresError>
    where
        T: Send + 'static,
        F: FnOnce(&PackStore) -> T + Send + 'static,
    {
        let inner = Arc::clone(&self.inner);
        // A closed semaphore is impossible: nobody closes it.
        let turn = inner.reads.acquire().await.map_err(|_| StoresError::Panicked)?;
        turn.forget();
        let stores = self.clone();
        let done = tokio::task::spawn_blocking(move || {
            let _turn = Turn(&stores.inner.reads);
            Ok(work(stores.of(org)?.as_ref()))
        });
        done.await.map_err(|_| StoresError::Panicked)?
    }
}

/// Gives a turn back, also when the work panics.
struct Turn<'a>(&'a Semaphore);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.add_permits(1);
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[tokio::test]
    async fn a_panic_gives_its_turn_back_and_each_org_has_its_own_store() {
        let dir = tempfile::tempdir().unwrap();
        let stores = Stores::in_directory(dir.path().to_owned(), None);
        let org = |n| OrgId::from_uuid(Uuid::from_u128(n));
        for _ in 0..STORE_READS_MAX + 1 {
            let panicked = stores.with(org(1), |_| panic!("on purpose")).await;
            assert!(matches!(panicked, Err(StoresError::Panicked)));
        }
        stores.with(org(1), |_| ()).await.unwrap();
        assert!(Arc::ptr_eq(&stores.of(org(1)).unwrap(), &stores.of(org(1)).unwrap()));
        assert!(!Arc::ptr_eq(&stores.of(org(1)).unwrap(), &stores.of(org(2)).unwrap()));
    }
}
