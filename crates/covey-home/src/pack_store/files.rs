//! Pack files as their plain bytes, whether they lie sealed or plain. Bytes: `docs/formats/home-store.md`, section 2.2.
//!
//! A sealed file is a header of 32 bytes and the plain file in pieces of 64 KiB, each sealed with AES-256-GCM. The key
//! is derived from one of the org's keys and the file's name, the nonce is the piece's number and whether it is the
//! last, and the header is authenticated with every piece. So a file under another name, pieces in another order, a file
//! that was cut, and one of another org do not open.
//!
//! What stays true: bytes of a sealed file are given out only when they are authentic; a key that is not there is
//! "cannot be read now" and never "damaged" (I7). What does not belong here: what is in a pack.

mod unsealed;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ring::aead::{Aad, LessSafeKey, Nonce};

use crate::backend::{Backend, BackendError, Key, NewFile, Tail};
use crate::block::{BlockHasher, StoreError};
use crate::keys::{CacheKey, DataKey, KeyError, KeyId, MasterKey, NameKeys, OrgKeys};

pub use unsealed::Unsealed;

const MAGIC: &[u8; 8] = b"COVEYPCK";
const VERSION: u32 = 1;
/// What a sealed file says where a plain one says 0.
const SEALED: u32 = 1;
const HEADER_BYTES: usize = 32;
const PIECE_BYTES: usize = 64 * 1024;
const TAG_BYTES: usize = 16;
const SEALED_PIECE_BYTES: usize = PIECE_BYTES + TAG_BYTES;
/// Files of which is remembered how they lie; of others that is found out again.
const FORMS_MAX: usize = 4096;

type Header = [u8; HEADER_BYTES];

/// How a file lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Plain,
    Sealed(KeyId),
}

/// Why a pack's bytes are not to be had.
#[derive(Debug)]
pub(crate) enum ReadPackError {
    /// Not there, or not now.
    Backend(BackendError),
    /// They are not what was written.
    Damaged(String),
}

impl From<BackendError> for ReadPackError {
    fn from(error: BackendError) -> Self {
        Self::Backend(error)
    }
}

impl From<KeyError> for ReadPackError {
    fn from(error: KeyError) -> Self {
        Self::Backend(BackendError::unavailable("read a pack", io::Error::other(error)))
    }
}

/// An org's keys, and what it takes to read them again when somebody has added one.
#[derive(Debug)]
struct Vault {
    org: String,
    master: MasterKey,
    keys: RwLock<Arc<OrgKeys>>,
}

impl Vault {
    fn keys(&self) -> Arc<OrgKeys> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn reload(&self, backend: &dyn Backend) -> Result<Arc<OrgKeys>, StoreError> {
        let read = Arc::new(OrgKeys::read(backend, &self.org, &self.master)?);
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&read);
        Ok(read)
    }
}

/// See the module's first lines.
#[derive(Debug)]
pub(crate) struct PackFiles {
    backend: Arc<dyn Backend>,
    vault: Option<Vault>,
    /// Where the backend itself opens and seals packs; there is no vault then.
    names: Option<NameKeys>,
    forms: Mutex<HashMap<Key, Form>>,
}

impl PackFiles {
    /// Files of a backend that opens and seals packs itself.
    pub(super) fn named(backend: Arc<dyn Backend>, names: NameKeys) -> Self {
        Self { backend, vault: None, names: Some(names), forms: Mutex::default() }
    }

    /// Files of a store without keys.
    ///
    /// # Errors
    /// [`KeyError::Missing`] when the store has a key ring.
    pub(super) fn plain(backend: Arc<dyn Backend>) -> Result<Self, StoreError> {
        if let Some(ring) = OrgKeys::report(backend.as_ref())? {
            return Err(KeyError::Missing { place: backend.place(), needed: ring.master }.into());
        }
        Ok(Self { backend, vault: None, names: None, forms: Mutex::default() })
    }

    /// Files of a store with keys, which are made if it has none.
    pub(super) fn sealed_with_any(
        backend: Arc<dyn Backend>,
        org: &str,
        master: &MasterKey,
    ) -> Result<Self, StoreError> {
        let listed = Arc::clone(&backend);
        let any_pack = || {
            let names = listed.list(&super::packs_dir()?)?;
            let name = names.into_iter().find(|name| name.ends_with(super::PACK_SUFFIX));
            name.map(|name| Ok(Key::new(&[super::PACKS_DIR, &name])?)).transpose()
        };
        Self::sealed(backend, org, master, any_pack)
    }

    /// Files of a store with keys, which are made if it has none. `packs`: any pack that is there.
    fn sealed(
        backend: Arc<dyn Backend>,
        org: &str,
        master: &MasterKey,
        packs: impl Fn() -> Result<Option<Key>, StoreError>,
    ) -> Result<Self, StoreError> {
        let keys = match OrgKeys::report(backend.as_ref())? {
            Some(_) => OrgKeys::read(backend.as_ref(), org, master)?,
            None => {
                let pack = packs()?;
                if let Some(pack) = &pack
                    && let Some(Form::Sealed(_)) = form_of(&backend.read(pack, 0, HEADER_BYTES)?)
                {
                    return Err(KeyError::Gone { place: backend.place() }.into());
                }
                // Blocks that are there have names without a key, and manifests name them so.
                match OrgKeys::create(backend.as_ref(), org, master, pack.is_none()) {
                    Err(StoreError::Keys(KeyError::Overtaken { .. })) => {
                        OrgKeys::read(backend.as_ref(), org, master)?
                    }
                    other => other?,
                }
            }
        };
        let vault = Vault { org: org.to_owned(), master: master.clone(), keys: RwLock::new(Arc::new(keys)) };
        Ok(Self { backend, vault: Some(vault), names: None, forms: Mutex::default() })
    }

    /// The same keys over another backend, for what is written to see how long it becomes.
    pub(super) fn on(&self, backend: Arc<dyn Backend>) -> Self {
        let vault = self.vault.as_ref().map(|vault| Vault {
            org: vault.org.clone(),
            master: vault.master.clone(),
            keys: RwLock::new(vault.keys()),
        });
        Self { backend, vault, names: self.names.clone(), forms: Mutex::default() }
    }

    pub(super) fn is_remote(&self) -> bool {
        self.backend.is_remote()
    }

    pub(super) fn keys(&self) -> Option<Arc<OrgKeys>> {
        self.vault.as_ref().map(Vault::keys)
    }

    pub(super) fn hasher(&self) -> BlockHasher {
        let names = self.names.clone().or_else(|| self.keys().map(|keys| keys.name_keys()));
        names.map_or(BlockHasher::PLAIN, |names| names.hasher())
    }

    /// What hides files of this host that can be made anew; none: nothing has to.
    pub(super) fn cache_key(&self) -> Option<CacheKey> {
        let behind_link = self.names.as_ref().map(|names| names.cache_key().clone());
        behind_link.or_else(|| self.keys().map(|keys| keys.cache_key()))
    }

    /// Takes up a key that was added since; called before packs are written.
    pub(super) fn reload_keys(&self) -> Result<(), StoreError> {
        self.vault.as_ref().map_or(Ok(()), |vault| vault.reload(self.backend.as_ref()).map(drop))
    }

    /// Takes keys out of the ring that are not used any more; see [`OrgKeys::retire`].
    pub(super) fn retire_keys(&self, in_use: impl Fn(&KeyId) -> bool) -> Result<Vec<KeyId>, StoreError> {
        let Some(vault) = &self.vault else { return Ok(Vec::new()) };
        let retired = OrgKeys::retire(self.backend.as_ref(), &vault.org, &vault.master, in_use)?;
        vault.reload(self.backend.as_ref())?;
        Ok(retired)
    }

    /// How files are written now.
    pub(super) fn form(&self) -> Form {
        self.keys().map_or(Form::Plain, |keys| Form::Sealed(keys.newest().id()))
    }

    /// How a file lies.
    pub(super) fn form_of_file(&self, key: &Key) -> Result<Form, ReadPackError> {
        let header = self.backend.read(key, 0, HEADER_BYTES)?;
        let form =
            form_of(&header).ok_or_else(|| ReadPackError::Damaged("the header is not a pack's".into()))?;
        self.remember(key, form);
        Ok(form)
    }

    fn remember(&self, key: &Key, form: Form) {
        let mut forms = self.forms.lock().unwrap_or_else(PoisonError::into_inner);
        if forms.len() >= FORMS_MAX {
            forms.clear();
        }
        forms.insert(key.clone(), form);
    }

    /// How the file lies, if that was found out before.
    pub(super) fn known_form(&self, key: &Key) -> Option<Form> {
        self.forms.lock().unwrap_or_else(PoisonError::into_inner).get(key).copied()
    }

    /// How the file most likely lies; most are as new ones are.
    fn guess(&self, key: &Key) -> Form {
        self.known_form(key).unwrap_or_else(|| self.form())
    }

    fn opener(&self, key: &Key, id: KeyId) -> Result<Opener, ReadPackError> {
        let unknown = || KeyError::Unknown { what: key.to_string(), key: id };
        let Some(vault) = &self.vault else { return Err(unknown().into()) };
        let opener = |keys: &OrgKeys| keys.find(&id).and_then(|found| Opener::new(found, key));
        if let Some(opener) = opener(&vault.keys()) {
            return Ok(opener);
        }
        let unavailable = |error| BackendError::unavailable("read the key ring", io::Error::other(error));
        let keys = vault.reload(self.backend.as_ref()).map_err(unavailable)?;
        Ok(opener(&keys).ok_or_else(unknown)?)
    }

    /// Answers with the guessed form; where that shows to be wrong, with the one that the file's header says.
    fn read_guessed<T>(
        &self,
        key: &Key,
        read: impl Fn(Form) -> Result<T, ReadPackError>,
    ) -> Result<T, ReadPackError> {
        let guess = self.guess(key);
        let first = read(guess);
        if self.vault.is_none() {
            return first;
        }
        let Err(ReadPackError::Damaged(_)) = &first else {
            // A sealed file that opens lies as guessed; of a plain one only its end tells.
            if first.is_ok() && matches!(guess, Form::Sealed(_)) {
                self.remember(key, guess);
            }
            return first;
        };
        match self.form_of_file(key) {
            Ok(form) if form != guess => read(form),
            Ok(_) | Err(ReadPackError::Damaged(_)) => first,
            Err(error) => Err(error),
        }
    }

    /// Plain bytes from `offset` on. Fewer than `len` only where the file ends.
    pub(super) fn read(&self, key: &Key, offset: u64, len: usize) -> Result<Vec<u8>, ReadPackError> {
        if len == 0 {
            return Ok(Vec::new());
        }
        self.read_guessed(key, |form| match form {
            Form::Plain => Ok(self.backend.read(key, offset, len)?),
            Form::Sealed(id) => self.read_sealed(&self.opener(key, id)?, key, offset, len),
        })
    }

    fn read_sealed(
        &self,
        opener: &Opener,
        key: &Key,
        offset: u64,
        len: usize,
    ) -> Result<Vec<u8>, ReadPackError> {
        let first = offset / PIECE_BYTES as u64;
        let skip = (offset % PIECE_BYTES as u64) as usize;
        let pieces = (skip + len).div_ceil(PIECE_BYTES);
        let start = HEADER_BYTES as u64 + first * SEALED_PIECE_BYTES as u64;
        // One byte more tells whether the last of these pieces is the file's last.
        let wanted = pieces * SEALED_PIECE_BYTES;
        let mut sealed = self.backend.read(key, start, wanted + 1)?;
        let ends_here = sealed.len() <= wanted;
        sealed.truncate(wanted);
        let mut plain = opener.open(first, &mut sealed, ends_here)?;
        plain.drain(..skip.min(plain.len()));
        plain.truncate(len);
        Ok(plain)
    }

    /// The last plain bytes, at most `len`, with the length of the whole plain file, in one request.
    pub(super) fn read_tail(&self, key: &Key, len: usize) -> Result<Tail, ReadPackError> {
        self.read_guessed(key, |form| match form {
            Form::Plain => {
                let tail = self.backend.read_tail(key, len)?;
                // A sealed file ends in bytes that say nothing.
                if self.vault.is_some() && !super::pack::is_footer(&tail.bytes) {
                    return Err(ReadPackError::Damaged("no footer".to_owned()));
                }
                Ok(tail)
            }
            Form::Sealed(id) => self.read_sealed_tail(&self.opener(key, id)?, key, len),
        })
    }

    fn read_sealed_tail(&self, opener: &Opener, key: &Key, len: usize) -> Result<Tail, ReadPackError> {
        let wanted = (len / PIECE_BYTES + 2) * SEALED_PIECE_BYTES;
        let Tail { bytes: mut sealed, file_len } = self.backend.read_tail(key, wanted)?;
        let sealed_len = file_len.saturating_sub(HEADER_BYTES as u64);
        let pieces = sealed_len.div_ceil(SEALED_PIECE_BYTES as u64);
        let plain_len = sealed_len.saturating_sub(pieces * TAG_BYTES as u64);
        let start = file_len.saturating_sub(sealed.len() as u64);
        let first = start.saturating_sub(HEADER_BYTES as u64).div_ceil(SEALED_PIECE_BYTES as u64);
        let first_at = HEADER_BYTES as u64 + first * SEALED_PIECE_BYTES as u64;
        if first_at < start || first_at >= file_len {
            return Err(ReadPackError::Damaged("shorter than a header".to_owned()));
        }
        sealed.drain(..(first_at - start) as usize);
        let mut bytes = opener.open(first, &mut sealed, true)?;
        bytes.drain(..bytes.len().saturating_sub(len));
        Ok(Tail { bytes, file_len: plain_len })
    }

    /// The whole plain file as far as it can be read, with zeros for what cannot, and whether all of it could.
    pub(super) fn read_lossy(
        &self,
        key: &Key,
        len_max: u64,
    ) -> Result<Option<(Vec<u8>, bool)>, ReadPackError> {
        let file_len = self.backend.file_len(key)?;
        if file_len > len_max {
            return Ok(None);
        }
        let mut file = self.backend.read(key, 0, file_len as usize)?;
        let form = form_of(&file).unwrap_or_else(|| self.guess(key));
        let Form::Sealed(id) = form else { return Ok(Some((file, true))) };
        let opener = self.opener(key, id)?;
        let mut plain = Vec::with_capacity(file.len());
        let mut whole = true;
        let sealed = file.get_mut(HEADER_BYTES..).unwrap_or_default();
        let pieces = sealed.len().div_ceil(SEALED_PIECE_BYTES);
        for (number, piece) in sealed.chunks_mut(SEALED_PIECE_BYTES).enumerate() {
            let is_last = number + 1 == pieces;
            // Where the file was cut, what is last now was not.
            let opened = opener.open(number as u64, &mut piece.to_vec(), is_last);
            match opened
                .or_else(|error| if is_last { opener.open(number as u64, piece, false) } else { Err(error) })
            {
                Ok(bytes) => plain.extend_from_slice(&bytes),
                Err(_) => plain.resize(plain.len() + piece.len().saturating_sub(TAG_BYTES), 0),
            }
            whole &= plain.len() == (number * PIECE_BYTES) + piece.len().saturating_sub(TAG_BYTES);
        }
        Ok(Some((plain, whole)))
    }

    /// Begins a file that is going to have this name.
    pub(super) fn create(&self, key: Key) -> Result<NewPack, StoreError> {
        let file = self.backend.create()?;
        let mut new = NewPack { file, key, plain_len: 0, file_len: 0, seal: None };
        if let Some(keys) = self.keys() {
            let opener = Opener::new(keys.newest(), &new.key).ok_or(KeyError::NoRandom)?;
            new.write(&opener.header)?;
            new.seal = Some(Seal { opener, pending: Vec::with_capacity(SEALED_PIECE_BYTES), number: 0 });
        }
        Ok(new)
    }
}

fn header(id: &KeyId) -> Header {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&SEALED.to_le_bytes());
    header[16..24].copy_from_slice(id.as_bytes());
    header
}

/// None: it is no pack's header.
fn form_of(start: &[u8]) -> Option<Form> {
    if super::pack::is_header(start) {
        return Some(Form::Plain);
    }
    let id = KeyId::from_bytes(start.get(16..24)?.try_into().ok()?);
    (start.get(..HEADER_BYTES)? == header(&id)).then_some(Form::Sealed(id))
}

fn nonce(number: u64, is_last: bool) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8] = u8::from(is_last);
    Nonce::assume_unique_for_key(bytes)
}

/// The cipher of one file.
#[derive(Debug)]
struct Opener {
    cipher: LessSafeKey,
    header: Header,
}

impl Opener {
    fn new(key: &DataKey, file: &Key) -> Option<Self> {
        Some(Self { cipher: key.cipher(file)?, header: header(&key.id()) })
    }

    /// Opens pieces that follow each other, the first of which has this number.
    fn open(&self, first: u64, sealed: &mut [u8], ends_file: bool) -> Result<Vec<u8>, ReadPackError> {
        let mut plain = Vec::with_capacity(sealed.len());
        let pieces = sealed.len().div_ceil(SEALED_PIECE_BYTES);
        for (at, piece) in sealed.chunks_mut(SEALED_PIECE_BYTES).enumerate() {
            let number = first + at as u64;
            let is_last = ends_file && at + 1 == pieces;
            let opened = self.cipher.open_in_place(nonce(number, is_last), Aad::from(&self.header), piece);
            match opened {
                Ok(bytes) => plain.extend_from_slice(bytes),
                Err(_) => {
                    let detail = format!("piece {number} is not what was sealed");
                    return Err(ReadPackError::Damaged(detail));
                }
            }
        }
        Ok(plain)
    }
}

#[derive(Debug)]
struct Seal {
    opener: Opener,
    /// Never sealed while it could be the last piece.
    pending: Vec<u8>,
    number: u64,
}

/// A pack that is being written.
#[derive(Debug)]
pub(super) struct NewPack {
    file: Box<dyn NewFile>,
    key: Key,
    plain_len: u64,
    file_len: u64,
    seal: Option<Seal>,
}

impl NewPack {
    /// Plain bytes so far.
    pub(super) const fn plain_len(&self) -> u64 {
        self.plain_len
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        self.file.append(bytes)?;
        self.file_len += bytes.len() as u64;
        Ok(())
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        self.plain_len += bytes.len() as u64;
        let Some(mut seal) = self.seal.take() else { return self.write(bytes) };
        let mut rest = bytes;
        while !rest.is_empty() {
            if seal.pending.len() == PIECE_BYTES {
                self.seal_piece(&mut seal, false)?;
            }
            let (now, later) = rest.split_at(rest.len().min(PIECE_BYTES - seal.pending.len()));
            seal.pending.extend_from_slice(now);
            rest = later;
        }
        self.seal = Some(seal);
        Ok(())
    }

    fn seal_piece(&mut self, seal: &mut Seal, is_last: bool) -> Result<(), BackendError> {
        let (nonce, aad) = (nonce(seal.number, is_last), Aad::from(&seal.opener.header));
        let sealed = seal.opener.cipher.seal_in_place_append_tag(nonce, aad, &mut seal.pending);
        sealed
            .map_err(|_| BackendError::unavailable("encrypt a pack", io::Error::other("a piece too long")))?;
        seal.number += 1;
        self.write(&seal.pending)?;
        seal.pending.clear();
        Ok(())
    }

    /// Nothing follows. Gives the length of the file as it lies.
    pub(super) fn close(&mut self) -> Result<u64, BackendError> {
        if let Some(mut seal) = self.seal.take() {
            self.seal_piece(&mut seal, true)?;
        }
        Ok(self.file_len)
    }

    /// After [`NewPack::close`]; see [`NewFile::publish`].
    pub(super) fn publish(self) -> Result<(), BackendError> {
        self.file.publish(&self.key)
    }
}
