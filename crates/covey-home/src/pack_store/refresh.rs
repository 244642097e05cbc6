//! Finding out which packs there are.
//!
//! What stays true: the list of the backend is the truth about what is new, but no proof that something is gone:
//! a pack that it leaves out is asked for by name, too. A pack whose index cannot be read now is remembered, and
//! until it can be, no block is said to be absent. What does not belong here: looking for blocks.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::catalogue::{IndexProblem, PackName};
use super::files::ReadPackError;
use super::pack::PackIndex;
use super::{PACK_SUFFIX, PackStore};
use crate::backend::BackendError;
use crate::block::StoreError;
use crate::identity::StoreIdentity;

/// Indexes that are fetched at once from a backend that is far away.
const INDEX_READERS_REMOTE: usize = 16;
/// So many packs that vanished are asked for one by one; of more, a second list must be enough.
const VANISHED_ASKED_MAX: usize = 32;
/// Packs with a damaged index that are looked at again; of more, a restart takes up the rest.
const DAMAGED_LOOKED_AT_MAX: usize = 32;
/// A pack that is listed, but not there when it is read, was deleted in between, unless it is still listed then.
const LISTS_MAX: usize = 3;

/// Packs that are listed and could not be read, and why.
pub(super) type Unread = Vec<(PackName, String)>;

enum Indexed {
    Read(PackIndex, Option<IndexProblem>),
    Gone,
    Unread(String),
}

impl PackStore {
    pub(super) fn list_packs(&self) -> Result<Vec<PackName>, StoreError> {
        let names = self.backend.list(&self.packs_dir)?;
        // What is named otherwise is no pack.
        Ok(names.iter().filter_map(|name| name.strip_suffix(PACK_SUFFIX)?.parse().ok()).collect())
    }

    /// Takes up packs that were sealed since, and drops those that are gone; tells whether anything changed.
    pub(super) fn refresh(&self) -> Result<bool, StoreError> {
        // One at a time: two would read the same indexes.
        let mut unread = self.refresh.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = false;
        for round in 1..=LISTS_MAX {
            let listed = self.list_packs()?;
            let (new, vanished) = self.catalogue_mut().compare(&listed);
            changed |= self.bury_those_gone(&vanished)?;
            unread.clear();
            let mut gone = false;
            self.read_indexes(&new, |name, indexed| match indexed {
                Indexed::Read(index, problem) => {
                    changed = true;
                    self.catalogue_mut().add(name, &index, problem);
                }
                Indexed::Gone if round < LISTS_MAX => gone = true,
                Indexed::Gone => unread.push((name, "it is listed, and said not to be there".to_owned())),
                Indexed::Unread(why) => unread.push((name, why)),
            });
            if !gone {
                break;
            }
        }
        changed |= self.take_up_mended();
        self.catalogue_mut().settle(self.backend.is_remote());
        Ok(changed)
    }

    /// A pack whose index was damaged may have been put back whole since, under the same name.
    fn take_up_mended(&self) -> bool {
        let damaged = self.catalogue().reindexed();
        let mut mended = false;
        for name in damaged.into_iter().take(DAMAGED_LOOKED_AT_MAX) {
            let Ok(key) = self.key_of(&name) else { continue };
            if let Ok(index) = PackIndex::read(&self.files, &key) {
                let mut catalogue = self.catalogue_mut();
                catalogue.bury(&name);
                catalogue.add(name, &index, None);
                mended = true;
            }
        }
        mended
    }

    /// Packs of which it is not known what they hold, one line each.
    pub(super) fn unread(&self) -> Vec<String> {
        let unread = self.refresh.lock().unwrap_or_else(PoisonError::into_inner);
        unread.iter().map(|(name, why)| format!("pack {name} cannot be read now: {why}")).collect()
    }

    /// Before packs are taken for gone: another store in the place of this one proves nothing about it.
    fn check_identity(&self) -> Result<(), StoreError> {
        let Some(opened) = &self.identity else { return Ok(()) };
        let found = match StoreIdentity::read(self.backend.as_ref()) {
            Ok(found) if found.as_ref() == Some(opened) => return Ok(()),
            // Damage to this one file does not make it another store.
            Err(StoreError::Damaged { .. }) => return Ok(()),
            Ok(found) => {
                found.map_or_else(|| "a store without a name".to_owned(), |found| format!("store {found}"))
            }
            Err(error) => return Err(error),
        };
        let what = format!(
            "use {}: it was store {opened} when it was opened, and is {found} now; is its volume mounted?",
            self.backend.place()
        );
        Err(StoreError::unavailable(what, std::io::ErrorKind::StaleNetworkFileHandle))
    }

    fn bury_those_gone(&self, vanished: &[PackName]) -> Result<bool, StoreError> {
        if vanished.is_empty() {
            return Ok(false);
        }
        self.check_identity()?;
        let mut gone = Vec::new();
        if vanished.len() > VANISHED_ASKED_MAX {
            let listed: std::collections::HashSet<PackName> = self.list_packs()?.into_iter().collect();
            gone.extend(vanished.iter().filter(|name| !listed.contains(*name)));
        } else {
            for name in vanished {
                match self.backend.file_len(&self.key_of(name)?) {
                    Ok(_) => {}
                    Err(BackendError::NotFound { .. }) => gone.push(*name),
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let mut catalogue = self.catalogue_mut();
        gone.iter().for_each(|name| catalogue.bury(name));
        Ok(!gone.is_empty())
    }

    /// Reads the indexes of `names`; `take` gets them one at a time, in no order.
    fn read_indexes(&self, names: &[PackName], mut take: impl FnMut(PackName, Indexed)) {
        let readers = if self.backend.is_remote() { INDEX_READERS_REMOTE.min(names.len()) } else { 1 };
        if readers <= 1 {
            names.iter().for_each(|name| take(*name, self.read_index(name)));
            return;
        }
        let next = AtomicUsize::new(0);
        // Readers wait when as many indexes as readers are not taken yet.
        let (sender, receiver) = std::sync::mpsc::sync_channel(readers);
        std::thread::scope(|scope| {
            for _ in 0..readers {
                let (sender, next) = (sender.clone(), &next);
                scope.spawn(move || {
                    while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if sender.send((*name, self.read_index(name))).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(sender);
            for (name, indexed) in receiver {
                take(name, indexed);
            }
        });
    }

    fn read_index(&self, name: &PackName) -> Indexed {
        let failed = |error: BackendError| match error {
            BackendError::NotFound { .. } => Indexed::Gone,
            error @ BackendError::Unavailable { .. } => Indexed::Unread(error.to_string()),
        };
        let key = match self.key_of(name) {
            Ok(key) => key,
            Err(error) => return Indexed::Unread(error.to_string()),
        };
        match self.index_of(&key) {
            Ok(index) => Indexed::Read(index, None),
            Err(ReadPackError::Backend(error)) => failed(error),
            Err(ReadPackError::Damaged(detail)) => {
                match PackIndex::rebuild(&self.files, &key, &self.hasher) {
                    Ok((index, complete)) => Indexed::Read(index, Some(IndexProblem { detail, complete })),
                    Err(error) => failed(error),
                }
            }
        }
    }
}
