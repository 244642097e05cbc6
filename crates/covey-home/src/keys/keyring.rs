//! The key ring of one org: its own keys, wrapped by the master key, in one small file of its store.
//!
//! What stays true: the file is replaced by conditional put only, so of two who change it at once one is told; a key
//! leaves the ring only when no pack is sealed with it, or with the ring as a whole. Bytes: `docs/formats/home-store.md`,
//! section 7.

use std::fmt;

use covey_types::BlockHash;
use ring::aead::{AES_256_GCM, LessSafeKey, UnboundKey};
use serde::Serialize;

use super::master::WRAPPED_BYTES;
use super::names::{CacheKey, NameKeys};
use super::{KeyError, KeyId, MasterKey, from_hex, random, to_hex};
use crate::backend::{Backend, Expected, FileVersion, Key, PutOutcome};
use crate::block::{BlockHasher, StoreError};

const FIRST_LINE: &str = "covey-keys 1";
/// Data keys at most; each rotation adds one, and a collection retires those that no pack is sealed with.
const KEYS_MAX: usize = 64;

/// One of the keys that packs are sealed with.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct DataKey {
    id: KeyId,
    bytes: [u8; 32],
}

impl DataKey {
    pub(crate) const fn id(&self) -> KeyId {
        self.id
    }

    /// The cipher of one file. Its name goes into the key, so a file under another name does not open, and each file
    /// has nonces of its own.
    pub(crate) fn cipher(&self, file: &Key) -> Option<LessSafeKey> {
        let key = derived("covey 2026 store data key, file", &self.bytes, file.as_str().as_bytes());
        Some(LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &key).ok()?))
    }
}

pub(super) fn derived(context: &str, key: &[u8; 32], name: &[u8]) -> [u8; 32] {
    *blake3::Hasher::new_derive_key(context).update(key).update(name).finalize().as_bytes()
}

/// The unwrapped keys of one org.
#[derive(Clone, PartialEq, Eq)]
pub struct OrgKeys {
    master: KeyId,
    /// Block names have a key; false in a store that had blocks before it was encrypted.
    names_are_keyed: bool,
    /// What the key of block names and that of local caches are derived from. Stays for ever.
    secret: [u8; 32],
    /// The newest last; never empty.
    keys: Vec<DataKey>,
}

impl fmt::Debug for OrgKeys {
    /// Without the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OrgKeys")
            .field("master", &self.master)
            .field("keys", &self.ids())
            .finish_non_exhaustive()
    }
}

/// What a key ring says without a master key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeyringReport {
    /// The master key that opens it.
    pub master: KeyId,
    /// Whether names of blocks say nothing without the key.
    pub names_are_keyed: bool,
    /// Keys that packs are or were sealed with, the newest last.
    pub keys: Vec<KeyId>,
}

/// The file's text, without looking into what is wrapped.
struct Text {
    report: KeyringReport,
    secret: Vec<u8>,
    /// As many as `report.keys`.
    wrapped: Vec<Vec<u8>>,
}

impl Text {
    fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        let text = std::str::from_utf8(bytes).map_err(|_| "it is no text")?;
        let body_len = text.rfind("checksum ").ok_or("it has no checksum")?;
        let (body, last) = text.split_at(body_len);
        let sum = last.strip_prefix("checksum ").and_then(|sum| sum.strip_suffix('\n'));
        if sum != Some(BlockHash::of(body.as_bytes()).to_string().as_str()) {
            return Err("its checksum differs");
        }
        let mut lines = body.lines();
        if lines.next() != Some(FIRST_LINE) {
            return Err("it is of a later version; use that version of this program");
        }
        let mut word = |name: &str| -> Option<&str> { lines.next()?.strip_prefix(name)?.strip_prefix(' ') };
        let master =
            word("master").and_then(|id| id.parse().ok()).ok_or("it does not name its master key")?;
        let names_are_keyed = match word("names") {
            Some("keyed") => true,
            Some("plain") => false,
            _ => return Err("it does not say how blocks are named"),
        };
        let wrapped = |text: &str| from_hex(text).filter(|bytes| bytes.len() == WRAPPED_BYTES);
        let secret = word("secret").and_then(wrapped).ok_or("it has no secret")?;
        let mut keys = Vec::new();
        let mut sealed = Vec::new();
        for line in lines {
            let (id, key) = line
                .strip_prefix("key ")
                .and_then(|rest| rest.split_once(' '))
                .and_then(|(id, key)| Some((id.parse().ok()?, wrapped(key)?)))
                .ok_or("a line is no key")?;
            if keys.contains(&id) || keys.len() == KEYS_MAX {
                return Err("it has a key twice, or too many");
            }
            keys.push(id);
            sealed.push(key);
        }
        if keys.is_empty() {
            return Err("it has no key");
        }
        Ok(Self { report: KeyringReport { master, names_are_keyed, keys }, secret, wrapped: sealed })
    }
}

fn purpose(org: &str, what: &str) -> String {
    // Names of orgs have no blanks.
    format!("{org} {what}")
}

/// Where the ring lies in an org's store.
pub(super) fn ring_key() -> Result<Key, StoreError> {
    Ok(Key::new(&["keys", "ring"])?)
}

impl OrgKeys {
    /// Gives a store that has no keys those of another, so that both name blocks alike: what is copied between them
    /// keeps its names. Keys that are there stay: packs may be sealed with them.
    ///
    /// # Errors
    /// When one of the rings cannot be read or written now.
    pub fn share(from: &dyn Backend, to: &dyn Backend) -> Result<(), StoreError> {
        match Self::ring(from)? {
            None => Ok(()),
            Some(ring) => Self::put_ring(to, &ring),
        }
    }

    /// The ring's bytes, with its keys wrapped; none: the store is not encrypted.
    pub(crate) fn ring(backend: &dyn Backend) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(backend.get(&ring_key()?)?.map(|ring| ring.bytes))
    }

    /// Puts a ring where there is none.
    pub(crate) fn put_ring(backend: &dyn Backend, ring: &[u8]) -> Result<(), StoreError> {
        match backend.put_if(&ring_key()?, ring, &Expected::Absent)? {
            // Somebody else's ring that came first is a ring that is there.
            PutOutcome::Written(_) | PutOutcome::Conflict => Ok(()),
        }
    }

    /// New keys for an org.
    ///
    /// # Errors
    /// When the system gives no random numbers.
    fn generate(master: &MasterKey, names_are_keyed: bool) -> Result<Self, KeyError> {
        let mut keys = Self { master: master.id(), names_are_keyed, secret: random()?, keys: Vec::new() };
        keys.add()?;
        Ok(keys)
    }

    fn add(&mut self) -> Result<KeyId, KeyError> {
        if self.keys.len() >= KEYS_MAX {
            return Err(KeyError::TooMany { max: KEYS_MAX });
        }
        let key = DataKey { id: KeyId::from_bytes(random()?), bytes: random()? };
        let id = key.id;
        self.keys.push(key);
        Ok(id)
    }

    /// How the org's blocks are named.
    pub fn hasher(&self) -> BlockHasher {
        self.name_keys().hasher()
    }

    /// What of them somebody may have who must not open packs.
    pub(crate) fn name_keys(&self) -> NameKeys {
        let names = derived("covey 2026 store secret, names of blocks", &self.secret, b"");
        let cache = derived("covey 2026 store secret, cache behind a link", &self.secret, b"");
        NameKeys::from_bytes(self.names_are_keyed.then_some(names), cache)
    }

    /// Key of what this host keeps of the store and can be made anew.
    pub(crate) const fn cache_key(&self) -> CacheKey {
        CacheKey(self.secret)
    }

    /// What new packs are sealed with.
    pub(crate) fn newest(&self) -> &DataKey {
        &self.keys[self.keys.len() - 1]
    }

    pub(crate) fn find(&self, id: &KeyId) -> Option<&DataKey> {
        self.keys.iter().find(|key| key.id == *id)
    }

    /// Keys that packs are or were sealed with, the newest last.
    pub fn ids(&self) -> Vec<KeyId> {
        self.keys.iter().map(DataKey::id).collect()
    }

    fn encode(&self, org: &str, master: &MasterKey) -> Result<Vec<u8>, KeyError> {
        let names = if self.names_are_keyed { "keyed" } else { "plain" };
        let secret = to_hex(&master.wrap(&purpose(org, "secret"), &self.secret)?);
        let mut body = format!("{FIRST_LINE}\nmaster {}\nnames {names}\nsecret {secret}\n", master.id());
        for key in &self.keys {
            let wrapped = master.wrap(&purpose(org, &format!("key {}", key.id)), &key.bytes)?;
            body.push_str(&format!("key {} {}\n", key.id, to_hex(&wrapped)));
        }
        let checksum = BlockHash::of(body.as_bytes());
        Ok(format!("{body}checksum {checksum}\n").into_bytes())
    }

    pub(super) fn decode(
        bytes: &[u8],
        org: &str,
        master: &MasterKey,
        place: &dyn Fn() -> String,
    ) -> Result<Self, KeyError> {
        let damaged = |problem| KeyError::Damaged { place: place(), problem };
        let text = Text::parse(bytes).map_err(damaged)?;
        let KeyringReport { master: needed, names_are_keyed, keys: ids } = text.report;
        if needed != master.id() {
            return Err(KeyError::Wrong { place: place(), needed, given: master.id() });
        }
        let opened = |what: &str, wrapped: &[u8]| {
            let key = master.unwrap(&purpose(org, what), wrapped);
            key.ok_or_else(|| damaged("a key does not open: it was changed, or is another org's"))
        };
        let secret = opened("secret", &text.secret)?;
        let mut keys = Vec::with_capacity(ids.len());
        for (id, wrapped) in ids.into_iter().zip(&text.wrapped) {
            keys.push(DataKey { id, bytes: opened(&format!("key {id}"), wrapped)? });
        }
        Ok(Self { master: needed, names_are_keyed, secret, keys })
    }

    /// What the ring says without a master key; none: there is no ring.
    ///
    /// # Errors
    /// When it cannot be read or is damaged.
    pub fn report(backend: &dyn Backend) -> Result<Option<KeyringReport>, StoreError> {
        let Some(found) = backend.get(&ring_key()?)? else { return Ok(None) };
        let damaged = |problem| KeyError::Damaged { place: backend.place(), problem };
        Ok(Some(Text::parse(&found.bytes).map_err(damaged)?.report))
    }

    /// The org's keys, which must be there.
    ///
    /// # Errors
    /// When they are not, or do not open with this master key.
    pub fn read(backend: &dyn Backend, org: &str, master: &MasterKey) -> Result<Self, StoreError> {
        Ok(Self::read_versioned(backend, org, master)?.0)
    }

    fn read_versioned(
        backend: &dyn Backend,
        org: &str,
        master: &MasterKey,
    ) -> Result<(Self, FileVersion), StoreError> {
        let place = || backend.place();
        let found = backend.get(&ring_key()?)?.ok_or_else(|| KeyError::Gone { place: place() })?;
        Ok((Self::decode(&found.bytes, org, master, &place)?, found.version))
    }

    /// Makes the org's keys where there are none yet. `names_are_keyed` must be false where the store holds blocks.
    ///
    /// # Errors
    /// When they cannot be written; [`KeyError::Overtaken`] when they are there.
    pub(crate) fn create(
        backend: &dyn Backend,
        org: &str,
        master: &MasterKey,
        names_are_keyed: bool,
    ) -> Result<Self, StoreError> {
        let keys = Self::generate(master, names_are_keyed)?;
        keys.replace(backend, org, master, &Expected::Absent)?;
        Ok(keys)
    }

    fn replace(
        &self,
        backend: &dyn Backend,
        org: &str,
        master: &MasterKey,
        expected: &Expected,
    ) -> Result<(), StoreError> {
        match backend.put_if(&ring_key()?, &self.encode(org, master)?, expected)? {
            PutOutcome::Written(_) => Ok(()),
            PutOutcome::Conflict => Err(KeyError::Overtaken { place: backend.place() }.into()),
        }
    }

    /// Adds a key; packs that are written from now on are sealed with it, and collections write the others anew.
    /// Gives its id.
    ///
    /// # Errors
    /// [`KeyError`]; nothing has changed then.
    pub fn rotate(backend: &dyn Backend, org: &str, master: &MasterKey) -> Result<KeyId, StoreError> {
        let (mut keys, version) = Self::read_versioned(backend, org, master)?;
        let id = keys.add()?;
        keys.replace(backend, org, master, &Expected::Version(version))?;
        Ok(id)
    }

    /// Wraps the org's keys with another master key. No pack is touched.
    ///
    /// # Errors
    /// [`KeyError`]; the old master key still opens the ring then.
    pub fn rewrap(
        backend: &dyn Backend,
        org: &str,
        old: &MasterKey,
        new: &MasterKey,
    ) -> Result<(), StoreError> {
        let (keys, version) = Self::read_versioned(backend, org, old)?;
        keys.replace(backend, org, new, &Expected::Version(version))
    }

    /// Takes keys out of the ring that are not the newest and that no pack is sealed with; gives those taken.
    ///
    /// # Errors
    /// [`KeyError`]; nothing has changed then.
    pub(crate) fn retire(
        backend: &dyn Backend,
        org: &str,
        master: &MasterKey,
        in_use: impl Fn(&KeyId) -> bool,
    ) -> Result<Vec<KeyId>, StoreError> {
        let (mut keys, version) = Self::read_versioned(backend, org, master)?;
        let newest = keys.newest().id;
        let (kept, retired): (Vec<DataKey>, Vec<DataKey>) =
            keys.keys.into_iter().partition(|key| key.id == newest || in_use(&key.id));
        keys.keys = kept;
        if !retired.is_empty() {
            keys.replace(backend, org, master, &Expected::Version(version))?;
        }
        Ok(retired.iter().map(DataKey::id).collect())
    }

    /// Removes the ring: nobody can read the org's packs again, wherever copies of them are. Tells whether there
    /// was one. A backend that keeps old versions of files must be told to forget them, too.
    ///
    /// # Errors
    /// When it is not certain that it is gone.
    pub fn destroy(backend: &dyn Backend) -> Result<bool, StoreError> {
        Ok(backend.remove(&ring_key()?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryBackend;

    fn made() -> (MemoryBackend, MasterKey, OrgKeys) {
        let (backend, master) = (MemoryBackend::new(), MasterKey::generate().unwrap());
        let keys = OrgKeys::create(&backend, "org", &master, true).unwrap();
        (backend, master, keys)
    }

    #[test]
    fn a_ring_opens_with_its_master_key_for_its_org_only() {
        let (backend, master, keys) = made();
        assert_eq!(OrgKeys::read(&backend, "org", &master).unwrap(), keys);
        let error = OrgKeys::read(&backend, "other", &master).unwrap_err();
        assert!(matches!(error, StoreError::Keys(KeyError::Damaged { .. })), "{error}");
        let other = MasterKey::generate().unwrap();
        let error = OrgKeys::read(&backend, "org", &other).unwrap_err().to_string();
        assert!(
            error.contains(&master.id().to_string()) && error.contains(&other.id().to_string()),
            "{error}"
        );
        let again = OrgKeys::create(&backend, "org", &master, true).unwrap_err();
        assert!(matches!(again, StoreError::Keys(KeyError::Overtaken { .. })), "{again}");
    }

    #[test]
    fn rotation_adds_a_key_and_keeps_names_and_retirement_spares_what_is_used() {
        let (backend, master, before) = made();
        let added = OrgKeys::rotate(&backend, "org", &master).unwrap();
        let after = OrgKeys::read(&backend, "org", &master).unwrap();
        assert_eq!(after.newest().id(), added);
        assert_eq!(after.hasher(), before.hasher());
        assert_eq!(after.cache_key(), before.cache_key());
        assert_eq!(after.name_keys(), before.name_keys());
        let first = before.newest().id();
        assert_eq!(OrgKeys::retire(&backend, "org", &master, |id| *id == first).unwrap(), []);
        assert_eq!(OrgKeys::retire(&backend, "org", &master, |_| false).unwrap(), [first]);
        let left = OrgKeys::report(&backend).unwrap().unwrap();
        assert_eq!(left.keys, [added], "the newest is never retired");
    }

    #[test]
    fn another_master_key_takes_over_without_changing_the_orgs_keys() {
        let (backend, old, keys) = made();
        let new = MasterKey::generate().unwrap();
        OrgKeys::rewrap(&backend, "org", &old, &new).unwrap();
        let rewrapped = OrgKeys::read(&backend, "org", &new).unwrap();
        assert_eq!((rewrapped.ids(), rewrapped.hasher()), (keys.ids(), keys.hasher()));
        assert!(OrgKeys::read(&backend, "org", &old).is_err());
        assert!(OrgKeys::destroy(&backend).unwrap());
        let gone = OrgKeys::read(&backend, "org", &new).unwrap_err();
        assert!(matches!(gone, StoreError::Keys(KeyError::Gone { .. })), "{gone}");
    }

    #[test]
    fn every_damage_of_a_ring_is_named() {
        let (backend, master, _) = made();
        let whole = backend.get(&ring_key().unwrap()).unwrap().unwrap().bytes;
        let read = |bytes: &[u8]| OrgKeys::decode(bytes, "org", &master, &|| "here".to_owned());
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert!(read(&changed).is_err(), "byte {at}");
            assert!(read(&whole[..at]).is_err(), "cut at {at}");
        }
        assert!(read(&whole).is_ok());
    }
}
