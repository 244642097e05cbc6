//! Who names what is needed in a store, and taking the whole of it away.
//!
//! The pointers beside the packs are one who does; a server's database is another. A collection that asks the wrong
//! one would take everything for garbage, so a server says in the store that it is the one. What does not belong here:
//! collecting.

use serde::Serialize;

use crate::backend::{Backend, BackendError, Expected, Key, PutOutcome};
use crate::block::StoreError;

/// First line of the file.
const HEAD: &str = "covey-owner 1\n";
/// So many lost races for one file are no race any more.
const TRIES_MAX: usize = 32;

fn key() -> Result<Key, StoreError> {
    Ok(Key::new(&["gc", "owner"])?)
}

/// Says that `who` names what is needed in this store. For good: an empty store has to be made for somebody else.
///
/// # Errors
/// When that cannot be written down.
pub fn claim(backend: &dyn Backend, who: &str) -> Result<(), StoreError> {
    for _ in 0..TRIES_MAX {
        if owner(backend)?.is_some_and(|owner| owner == who) {
            return Ok(());
        }
        let text = format!("{HEAD}{who}\n");
        if let PutOutcome::Written(_) = backend.put_if(&key()?, text.as_bytes(), &Expected::Any)? {
            return Ok(());
        }
    }
    let error = std::io::Error::from(std::io::ErrorKind::ResourceBusy);
    Err(StoreError::unavailable("say whose the store is", error))
}

/// Who names what is needed in this store; none: the pointers beside its packs.
///
/// # Errors
/// When that cannot be told.
pub fn owner(backend: &dyn Backend) -> Result<Option<String>, StoreError> {
    let Some(found) = backend.get(&key()?)? else { return Ok(None) };
    let text = std::str::from_utf8(&found.bytes).ok();
    let who = text.and_then(|text| text.strip_prefix(HEAD)?.strip_suffix('\n'));
    let place = || format!("{} in {}", "gc/owner", backend.place());
    Ok(Some(who.ok_or_else(|| StoreError::damaged(place(), "it names no owner"))?.to_owned()))
}

/// What [`destroy`] removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Destroyed {
    /// Packs.
    pub packs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Homes whose pointers were there.
    pub homes: u64,
}

/// Removes every file of one org from a store: packs, pointers, and what collections keep. Nobody may use the store
/// meanwhile. Looks again afterwards, and returns only when nothing is left; may be repeated after a failure.
///
/// # Errors
/// [`StoreError::Unavailable`] when something could not be removed, or is there again.
pub fn destroy(backend: &dyn Backend) -> Result<Destroyed, StoreError> {
    let mut destroyed = Destroyed::default();
    // Pointers first: what is left of a store without them is garbage, and not a home with holes.
    for home in backend.list_dirs(&Key::new(&["homes"])?)? {
        destroyed.homes += 1;
        empty(backend, &Key::new(&["homes", &home, "snapshots"])?)?;
        empty(backend, &Key::new(&["homes", &home])?)?;
    }
    let packs = Key::new(&["packs"])?;
    for name in backend.list(&packs)? {
        let key = Key::new(&["packs", &name])?;
        let len = match backend.file_len(&key) {
            Err(BackendError::NotFound { .. }) => continue,
            len => len?,
        };
        if backend.remove(&key)? {
            destroyed.packs += 1;
            destroyed.bytes += len;
        }
    }
    empty(backend, &Key::new(&["gc"])?)?;
    let left = backend.list(&packs)?.len();
    if left > 0 {
        let error = std::io::Error::from(std::io::ErrorKind::ResourceBusy);
        let what =
            format!("remove everything: {left} packs are in {}, somebody uses the store", backend.place());
        return Err(StoreError::unavailable(what, error));
    }
    Ok(destroyed)
}

fn empty(backend: &dyn Backend, dir: &Key) -> Result<(), StoreError> {
    for name in backend.list(dir)? {
        let parts: Vec<&str> = dir.as_str().split('/').chain([name.as_str()]).collect();
        backend.remove(&Key::new(&parts)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use covey_types::{FencingToken, Generation, RootHash};

    use super::*;
    use crate::backend::MemoryBackend;
    use crate::{Block, BlockStore, NoProgress, PackStore, Pointers};

    #[test]
    fn an_owner_is_read_as_it_was_said_and_a_damaged_one_is_named() {
        let backend = MemoryBackend::default();
        assert_eq!(owner(&backend).unwrap(), None);
        for who in ["a server", "a server", "another"] {
            claim(&backend, who).unwrap();
            assert_eq!(owner(&backend).unwrap().as_deref(), Some(who));
        }
        let PutOutcome::Written(_) = backend.put_if(&key().unwrap(), b"x", &Expected::Any).unwrap() else {
            panic!("not written");
        };
        assert!(matches!(owner(&backend), Err(StoreError::Damaged { .. })));
    }

    #[test]
    fn what_is_destroyed_is_gone_and_a_second_time_there_is_nothing() {
        let backend = MemoryBackend::default();
        let shared = Arc::new(backend.clone());
        let store = PackStore::open(shared.clone()).unwrap();
        let upload = store.upload().unwrap();
        upload.put(&Block::of(b"block").unwrap()).unwrap();
        let (epoch, stored) = (upload.epoch(), upload.finish().unwrap().stored_bytes_new);
        let pointers = Pointers::on(shared);
        for (base, state) in [(0, b"1"), (1, b"2")] {
            pointers.publish("h", RootHash::of(state), Generation(base), FencingToken(1), epoch).unwrap();
        }
        claim(&backend, "x").unwrap();
        let destroyed = destroy(&backend).unwrap();
        assert_eq!(destroyed, Destroyed { packs: 1, bytes: stored, homes: 1 });
        assert_eq!(pointers.current("h").unwrap(), None);
        assert_eq!(owner(&backend).unwrap(), None);
        let again = destroy(&backend).unwrap();
        assert_eq!((again.packs, again.bytes), (0, 0));
        let store = PackStore::open(Arc::new(backend)).unwrap();
        assert!(store.packs().unwrap().is_empty());
        // It can be used like a new one.
        let archive = tar::Builder::new(Vec::new()).into_inner().unwrap();
        let cancel = AtomicBool::new(false);
        crate::archive::import(&store, &mut &archive[..], &cancel, &NoProgress).unwrap();
    }
}
