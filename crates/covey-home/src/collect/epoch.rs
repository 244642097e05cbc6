//! Bringing a store's epoch and a floor that is kept elsewhere together.
//!
//! They come apart when one of the two is put back from a backup without the other, or a server gets another store. With
//! a floor above the store's epoch every publish would be refused, and with one below it a publish would be accepted
//! whose blocks a collection may have deleted. What does not belong here: where the floor is kept.

use crate::backend::Backend;
use crate::block::StoreError;

use super::Condemned;

/// So many lost races for one file are no race any more.
const TRIES_MAX: usize = 32;

/// Lifts the store's epoch to `floor` if it is lower, and tells what it is then: the least floor that is safe. Uploads
/// that begin from now on name at least `floor`. A collection that is under way gives up.
///
/// # Errors
/// When the epoch cannot be read or written.
pub fn meet_floor(backend: &dyn Backend, floor: u64) -> Result<u64, StoreError> {
    for _ in 0..TRIES_MAX {
        let condemned = Condemned::read(backend)?;
        if condemned.epoch() >= floor {
            return Ok(condemned.epoch());
        }
        // The packs stay condemned: whoever began to delete them may still do so.
        if condemned.lift(backend, floor)?.is_some() {
            return Ok(floor);
        }
    }
    Err(StoreError::unavailable("lift the epoch", std::io::Error::from(std::io::ErrorKind::ResourceBusy)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use crate::BlockStore as _;
    use crate::backend::MemoryBackend;
    use crate::pack_store::{PackName, PackStore};

    #[test]
    fn an_epoch_never_falls_and_what_was_condemned_stays_so() {
        let backend = MemoryBackend::default();
        assert_eq!(meet_floor(&backend, 0).unwrap(), 0);
        assert_eq!(backend.keys().len(), 0, "nothing has to be written for a store that is as it should be");
        let packs = BTreeSet::from([PackName::random()]);
        let condemned = Condemned::read(&backend).unwrap().replace(&backend, packs.clone()).unwrap().unwrap();
        assert_eq!(meet_floor(&backend, 7).unwrap(), 7);
        let lifted = Condemned::read(&backend).unwrap();
        assert_eq!((lifted.epoch(), lifted.packs()), (7, &packs));
        assert_eq!(meet_floor(&backend, 3).unwrap(), 7, "a floor from an older backup has to be raised");
        assert!(condemned.replace(&backend, BTreeSet::new()).unwrap().is_none(), "it was overtaken");
        let store = PackStore::open(Arc::new(backend)).unwrap();
        assert_eq!(store.upload().unwrap().epoch(), 7);
    }
}
