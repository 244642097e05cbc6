//! An encrypted org's files as if its packs were not sealed: what somebody is shown who must hold none of its keys but
//! those that blocks are named with.
//!
//! What stays true: packs are opened and sealed here, and the key ring is neither shown nor written. Bytes that are not
//! authentic are zeros, which no block's hash takes for its own, so the reader finds the same damage as whoever has the
//! keys (I7).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::{Form, HEADER_BYTES, PIECE_BYTES, PackFiles, ReadPackError, SEALED_PIECE_BYTES, TAG_BYTES};
use crate::backend::{Backend, BackendError, Expected, Key, NewFile, PutOutcome, Tail, Versioned};
use crate::block::StoreError;
use crate::keys::{MasterKey, NameKeys};

const KEYS_DIR: &str = "keys";

/// See the module's first lines.
#[derive(Debug)]
pub struct Unsealed {
    files: Arc<PackFiles>,
    names: NameKeys,
}

impl Unsealed {
    /// The files of `org` on `backend`. An org without keys gets some.
    ///
    /// # Errors
    /// [`StoreError::Keys`] when its keys do not open with this master key.
    pub fn open(backend: Arc<dyn Backend>, org: &str, master: &MasterKey) -> Result<Self, StoreError> {
        let files = PackFiles::sealed_with_any(backend, org, master)?;
        let keys = files.keys().ok_or_else(|| {
            let error = io::Error::other("it has no keys");
            StoreError::unavailable(format!("open the store of {org}"), error)
        })?;
        Ok(Self { names: keys.name_keys(), files: Arc::new(files) })
    }

    fn inner(&self) -> &dyn Backend {
        self.files.backend.as_ref()
    }

    /// Plain bytes, with zeros for those that are not what was sealed.
    fn read_zeroed(&self, key: &Key, offset: u64, len: usize) -> Result<Vec<u8>, BackendError> {
        let end = self.files.plain_len(key)?.min(offset.saturating_add(len as u64));
        let mut bytes = Vec::new();
        let mut at = offset;
        while at < end {
            let piece_end = (at / PIECE_BYTES as u64 + 1) * PIECE_BYTES as u64;
            let wanted = (piece_end.min(end) - at) as usize;
            match self.files.read(key, at, wanted) {
                Ok(piece) => bytes.extend_from_slice(&piece),
                // Whoever reads it finds the damage by its hash, and notes it.
                Err(ReadPackError::Damaged(_)) => {}
                Err(ReadPackError::Backend(error)) => return Err(error),
            }
            at += wanted as u64;
            bytes.resize((at - offset) as usize, 0);
        }
        Ok(bytes)
    }
}

fn is_pack(key: &Key) -> bool {
    key.as_str().split_once('/').is_some_and(|(dir, _)| dir == super::super::PACKS_DIR)
}

fn is_keys(key: &Key) -> bool {
    key.as_str().split('/').next() == Some(KEYS_DIR)
}

impl PackFiles {
    /// Length of a file's plain bytes. Nothing but its header and its length are looked at.
    fn plain_len(&self, key: &Key) -> Result<u64, BackendError> {
        let file_len = self.backend.file_len(key)?;
        let form = match self.known_form(key) {
            Some(form) => form,
            None => match self.form_of_file(key) {
                Ok(form) => form,
                Err(ReadPackError::Damaged(_)) => self.guess(key),
                Err(ReadPackError::Backend(error)) => return Err(error),
            },
        };
        Ok(match form {
            Form::Plain => file_len,
            Form::Sealed(_) => {
                let sealed = file_len.saturating_sub(HEADER_BYTES as u64);
                let tags = sealed.div_ceil(SEALED_PIECE_BYTES as u64) * TAG_BYTES as u64;
                sealed.saturating_sub(tags)
            }
        })
    }
}

impl Backend for Unsealed {
    fn place(&self) -> String {
        self.inner().place()
    }

    fn is_remote(&self) -> bool {
        self.inner().is_remote()
    }

    fn cache_dir(&self) -> Option<PathBuf> {
        self.inner().cache_dir()
    }

    fn name_keys(&self) -> Result<Option<NameKeys>, BackendError> {
        Ok(Some(self.names.clone()))
    }

    fn list(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        if is_keys(dir) { Ok(Vec::new()) } else { self.inner().list(dir) }
    }

    fn list_dirs(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        if is_keys(dir) { Ok(Vec::new()) } else { self.inner().list_dirs(dir) }
    }

    fn file_len(&self, key: &Key) -> Result<u64, BackendError> {
        refuse_keys("look at", key)?;
        if is_pack(key) { self.files.plain_len(key) } else { self.inner().file_len(key) }
    }

    fn read(&self, key: &Key, offset: u64, len: usize) -> Result<Vec<u8>, BackendError> {
        refuse_keys("read", key)?;
        if !is_pack(key) || len == 0 {
            return self.inner().read(key, offset, len);
        }
        match self.files.read(key, offset, len) {
            Ok(bytes) => Ok(bytes),
            Err(ReadPackError::Damaged(_)) => self.read_zeroed(key, offset, len),
            Err(ReadPackError::Backend(error)) => Err(error),
        }
    }

    fn read_tail(&self, key: &Key, len: usize) -> Result<Tail, BackendError> {
        refuse_keys("read", key)?;
        if !is_pack(key) {
            return self.inner().read_tail(key, len);
        }
        match self.files.read_tail(key, len) {
            Ok(tail) => Ok(tail),
            Err(ReadPackError::Damaged(_)) => {
                let file_len = self.files.plain_len(key)?;
                let start = file_len.saturating_sub(len as u64);
                Ok(Tail { bytes: self.read_zeroed(key, start, len)?, file_len })
            }
            Err(ReadPackError::Backend(error)) => Err(error),
        }
    }

    fn create(&self) -> Result<Box<dyn NewFile>, BackendError> {
        Ok(Box::new(Unsent { files: Arc::clone(&self.files), bytes: Vec::new() }))
    }

    fn flush(&self, dir: &Key) -> Result<(), BackendError> {
        self.inner().flush(dir)
    }

    fn remove(&self, key: &Key) -> Result<bool, BackendError> {
        refuse_keys("remove", key)?;
        self.inner().remove(key)
    }

    fn get(&self, key: &Key) -> Result<Option<Versioned>, BackendError> {
        if is_keys(key) { Ok(None) } else { self.inner().get(key) }
    }

    fn put_if(&self, key: &Key, bytes: &[u8], expected: &Expected) -> Result<PutOutcome, BackendError> {
        refuse_keys("write", key)?;
        self.inner().put_if(key, bytes, expected)
    }
}

fn refuse_keys(what: &str, key: &Key) -> Result<(), BackendError> {
    if is_keys(key) {
        let error = io::Error::new(io::ErrorKind::PermissionDenied, "keys are not shown here");
        return Err(BackendError::unavailable(format!("{what} {key}"), error));
    }
    Ok(())
}

/// A file on its way. How it is sealed depends on its name, which comes last.
#[derive(Debug)]
struct Unsent {
    files: Arc<PackFiles>,
    bytes: Vec<u8>,
}

impl NewFile for Unsent {
    fn append(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn publish(self: Box<Self>, key: &Key) -> Result<(), BackendError> {
        if !is_pack(key) {
            refuse_keys("write", key)?;
            let mut file = self.files.backend.create()?;
            file.append(&self.bytes)?;
            return file.publish(key);
        }
        let unavailable =
            |error: StoreError| BackendError::unavailable(format!("seal {key}"), io::Error::other(error));
        // An upload over this may have begun before a key was added that retires the others.
        self.files.reload_keys().map_err(unavailable)?;
        let mut file = self.files.create(key.clone()).map_err(unavailable)?;
        file.append(&self.bytes)?;
        file.close()?;
        file.publish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryBackend;
    use crate::block::{Block, BlockStore as _};
    use crate::contract::{check_backend, check_blocks, check_packs, check_pointers};
    use crate::keys::OrgKeys;
    use crate::pack_store::PackStore;

    struct World {
        backend: MemoryBackend,
        master: MasterKey,
    }

    impl World {
        fn new() -> Self {
            Self { backend: MemoryBackend::new(), master: MasterKey::generate().unwrap() }
        }

        fn unsealed(&self) -> Arc<dyn Backend> {
            let backend = Arc::new(self.backend.clone());
            Arc::new(Unsealed::open(backend, "org", &self.master).unwrap())
        }

        fn behind(&self) -> PackStore {
            PackStore::open(self.unsealed()).unwrap()
        }

        fn with_keys(&self) -> PackStore {
            PackStore::open_encrypted(Arc::new(self.backend.clone()), "org", &self.master).unwrap()
        }
    }

    fn put(store: &PackStore, bytes: &[u8]) -> covey_types::BlockHash {
        let upload = store.upload().unwrap();
        let hash = upload.put(&upload.hasher().block(bytes).unwrap()).map(|_| upload.hasher().hash(bytes));
        upload.finish().unwrap();
        hash.unwrap()
    }

    #[test]
    fn it_keeps_the_contract_of_a_backend() {
        let fresh = || World::new().unsealed();
        check_backend(&fresh()).unwrap();
        check_packs(&fresh()).unwrap();
        check_pointers(&fresh()).unwrap();
        check_blocks(&PackStore::open(fresh()).unwrap()).unwrap();
    }

    #[test]
    fn what_is_put_behind_it_is_sealed_and_what_is_sealed_is_read_behind_it() {
        let world = World::new();
        let (behind, with_keys) = (world.behind(), world.with_keys());
        let long: Vec<u8> = (0..900_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for (writer, reader) in [(&behind, &with_keys), (&with_keys, &behind)] {
            let bytes = [&long[..], format!("{writer:p}").as_bytes()].concat();
            let hash = put(writer, &bytes);
            assert_eq!(reader.get(&hash).unwrap(), bytes);
        }
        for key in world.backend.keys().into_iter().filter(is_pack) {
            let header = world.backend.read(&key, 0, HEADER_BYTES).unwrap();
            assert!(matches!(super::super::form_of(&header), Some(Form::Sealed(_))), "{key}");
        }
        // Somebody without any key cannot name a block as the org does.
        let foreign = Block::of(b"x").unwrap();
        assert!(behind.upload().unwrap().put(&foreign).is_err());
    }

    #[test]
    fn the_ring_is_not_shown_and_a_key_that_was_added_is_taken_up() {
        let world = World::new();
        let (unsealed, behind) = (world.unsealed(), world.behind());
        let ring = Key::new(&["keys", "ring"]).unwrap();
        assert!(unsealed.get(&ring).unwrap().is_none() && unsealed.read(&ring, 0, 9).is_err());
        assert!(unsealed.put_if(&ring, b"x", &Expected::Any).is_err() && unsealed.remove(&ring).is_err());
        assert!(unsealed.list(&Key::new(&["keys"]).unwrap()).unwrap().is_empty());
        let upload = behind.upload().unwrap();
        let added = OrgKeys::rotate(&world.backend, "org", &world.master).unwrap();
        upload.put(&upload.hasher().block(b"late").unwrap()).unwrap();
        upload.finish().unwrap();
        let sealed_with = world
            .backend
            .keys()
            .into_iter()
            .filter(is_pack)
            .map(|key| super::super::form_of(&world.backend.read(&key, 0, HEADER_BYTES).unwrap()));
        assert_eq!(sealed_with.collect::<Vec<_>>(), [Some(Form::Sealed(added))]);
    }

    #[test]
    fn damage_is_damage_behind_it_too_and_what_is_right_is_read() {
        let world = World::new();
        let noise = |seed: u32| -> Vec<u8> {
            (0..700_000_u32).map(|n| (n.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 9) as u8).collect()
        };
        let with_keys = world.with_keys();
        let upload = with_keys.upload().unwrap();
        let blocks = [noise(1), noise(999_999)];
        for block in &blocks {
            upload.put(&upload.hasher().block(block).unwrap()).unwrap();
        }
        upload.finish().unwrap();
        let pack = world.backend.keys().into_iter().find(is_pack).unwrap();
        world.backend.tamper(&pack, |bytes| bytes[100] ^= 1);
        let behind = world.behind();
        let hasher = *behind.hasher();
        let answers = blocks.each_ref().map(|block| behind.get(&hasher.hash(block)));
        let damaged = answers.iter().filter(|answer| matches!(answer, Err(StoreError::Damaged { .. })));
        assert_eq!(damaged.count(), 1, "{answers:?}");
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1, "{answers:?}");
        assert_eq!(
            behind.verify_packs().unwrap().problems.len(),
            with_keys.verify_packs().unwrap().problems.len()
        );
    }
}
