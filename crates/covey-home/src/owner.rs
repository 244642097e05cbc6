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

/// Says that `who` names what is needed in this store, unless somebody else has said so before; tells who it is. For
/// good: a store is only given to somebody else by removing the file.
///
/// # Errors
/// When that cannot be written down.
pub fn claim(backend: &dyn Backend, who: &str) -> Result<String, StoreError> {
    for _ in 0..TRIES_MAX {
        if let Some(owner) = owner(backend)? {
            return Ok(owner);
        }
        let text = format!("{HEAD}{who}\n");
        // On the condition that nobody has: of two who say so at once, the second one reads the first.
        if let PutOutcome::Written(_) = backend.put_if(&key()?, text.as_bytes(), &Expected::Absent)? {
            return Ok(who.to_owned());
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
    /// Key rings: with it, every copy of a sealed pack that is anywhere became unreadable, unless the ring was copied.
    pub key_rings: u64,
    /// Packs.
    pub packs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Homes whose pointers were there.
    pub homes: u64,
}

/// Removes every file of one org from a store: keys, pointers, packs, and what is kept about them. Nobody may use the
/// store meanwhile. Looks again afterwards, and returns only when nothing is left; may be repeated after a failure.
///
/// # Errors
/// [`StoreError::Unavailable`] when something could not be removed, or is there again.
pub fn destroy(backend: &dyn Backend) -> Result<Destroyed, StoreError> {
    // Keys first: from here on the packs are noise, whatever happens to the rest.
    let key_rings = empty(backend, &Key::new(&["keys"])?)?.files;
    let mut destroyed = Destroyed { key_rings, ..Destroyed::default() };
    // Then pointers: what is left of a store without them is garbage, and not a home with holes.
    for home in backend.list_dirs(&Key::new(&["homes"])?)? {
        let kept = empty(backend, &Key::new(&["homes", &home, "snapshots"])?)?;
        let current = empty(backend, &Key::new(&["homes", &home])?)?;
        destroyed.homes += u64::from(kept.files + current.files > 0);
    }
    let packs = empty(backend, &Key::new(&["packs"])?)?;
    (destroyed.packs, destroyed.bytes) = (packs.files, packs.bytes);
    empty(backend, &Key::new(&["damage"])?)?;
    empty(backend, &Key::new(&["gc"])?)?;
    // Last: until now it can be told which store this was.
    backend.remove(&Key::new(&["identity"])?)?;
    let mut left = Vec::new();
    for dir in ["keys", "packs", "damage", "gc"] {
        let names = backend.list(&Key::new(&[dir])?)?;
        left.extend(names.first().map(|name| format!("{dir}/{name}")));
    }
    match left.first() {
        None => Ok(destroyed),
        Some(file) => {
            let what =
                format!("remove everything: {file} is in {}, somebody uses the store", backend.place());
            Err(StoreError::unavailable(what, std::io::Error::from(std::io::ErrorKind::ResourceBusy)))
        }
    }
}

/// What went from one directory.
#[derive(Default)]
struct Emptied {
    files: u64,
    bytes: u64,
}

fn empty(backend: &dyn Backend, dir: &Key) -> Result<Emptied, StoreError> {
    let mut emptied = Emptied::default();
    for name in backend.list(dir)? {
        let parts: Vec<&str> = dir.as_str().split('/').chain([name.as_str()]).collect();
        let key = Key::new(&parts)?;
        let len = match backend.file_len(&key) {
            Err(BackendError::NotFound { .. }) => continue,
            len => len?,
        };
        if backend.remove(&key)? {
            emptied.files += 1;
            emptied.bytes += len;
        }
    }
    Ok(emptied)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use covey_types::{FencingToken, Generation, RootHash};

    use super::*;
    use crate::backend::MemoryBackend;
    use crate::{Block, BlockStore, MasterKey, NoProgress, PackStore, Pointers};

    #[test]
    fn an_owner_is_read_as_it_was_said_and_a_damaged_one_is_named() {
        let backend = MemoryBackend::default();
        assert_eq!(owner(&backend).unwrap(), None);
        for who in ["a server", "a server", "another"] {
            assert_eq!(
                claim(&backend, who).unwrap(),
                "a server",
                "whoever comes second is told who was first"
            );
        }
        assert_eq!(owner(&backend).unwrap().as_deref(), Some("a server"));
        let PutOutcome::Written(_) = backend.put_if(&key().unwrap(), b"x", &Expected::Any).unwrap() else {
            panic!("not written");
        };
        assert!(matches!(owner(&backend), Err(StoreError::Damaged { .. })));
        assert!(matches!(claim(&backend, "a server"), Err(StoreError::Damaged { .. })));
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
        assert_eq!(destroyed, Destroyed { key_rings: 0, packs: 1, bytes: stored, homes: 1 });
        assert_eq!(pointers.current("h").unwrap(), None);
        assert_eq!(owner(&backend).unwrap(), None);
        let again = destroy(&backend).unwrap();
        assert_eq!(again, Destroyed::default());
        assert_eq!(backend.keys(), Vec::<Key>::new());
        let store = PackStore::open(Arc::new(backend)).unwrap();
        assert!(store.packs().unwrap().is_empty());
        // It can be used like a new one.
        let archive = tar::Builder::new(Vec::new()).into_inner().unwrap();
        let cancel = AtomicBool::new(false);
        crate::archive::import(&store, &mut &archive[..], &cancel, &NoProgress).unwrap();
    }

    #[test]
    fn with_its_keys_gone_a_sealed_pack_that_somebody_kept_cannot_be_read() {
        let backend = MemoryBackend::default();
        let master = MasterKey::generate().unwrap();
        let store = PackStore::open_encrypted(Arc::new(backend.clone()), "o", &master).unwrap();
        let archive = tar::Builder::new(Vec::new()).into_inner().unwrap();
        crate::archive::import(&store, &mut &archive[..], &AtomicBool::new(false), &NoProgress).unwrap();
        let is_pack = |key: &Key| key.as_str().starts_with("packs/");
        let pack = backend.keys().into_iter().find(is_pack).unwrap();
        let len = backend.file_len(&pack).unwrap() as usize;
        let kept = backend.read(&pack, 0, len).unwrap();
        assert_eq!(destroy(&backend).unwrap().key_rings, 1);
        assert_eq!(backend.keys(), Vec::<Key>::new());
        let mut file = backend.create().unwrap();
        file.append(&kept).unwrap();
        file.publish(&pack).unwrap();
        assert!(PackStore::open_encrypted(Arc::new(backend), "o", &master).is_err());
    }
}
