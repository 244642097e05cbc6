//! The operator's key: 32 bytes in a file that only its owner may read.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use super::{KeyError, KeyId, from_hex, random, to_hex};

const KEY_BYTES: usize = 32;
const SALT_BYTES: usize = 16;
const TAG_BYTES: usize = 16;
/// A key that is wrapped: salt, ciphertext, tag.
pub(super) const WRAPPED_BYTES: usize = SALT_BYTES + KEY_BYTES + TAG_BYTES;
/// More than this is no key file.
const FILE_BYTES_MAX: u64 = 4096;

/// Wraps the keys of orgs; see the module's first line.
#[derive(Clone, PartialEq, Eq)]
pub struct MasterKey {
    bytes: [u8; KEY_BYTES],
}

impl fmt::Debug for MasterKey {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MasterKey({})", self.id())
    }
}

impl MasterKey {
    /// A new one.
    ///
    /// # Errors
    /// When the system gives no random numbers.
    pub fn generate() -> Result<Self, KeyError> {
        Ok(Self { bytes: random()? })
    }

    /// From its text, 64 hexadecimal digits with white space around them.
    pub fn from_text(text: &str) -> Option<Self> {
        Some(Self { bytes: from_hex(text.trim())?.try_into().ok()? })
    }

    /// From a file.
    ///
    /// # Errors
    /// When it cannot be read, others may read it, or it holds no key.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let failed = |source| KeyError::File { path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).open(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.mode();
        if mode & 0o077 != 0 {
            let why = format!("its mode {:04o} lets others use it; run `chmod 600` on it", mode & 0o7777);
            return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, why)));
        }
        let mut text = String::new();
        file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
        Self::from_text(&text).ok_or_else(|| KeyError::NotAKey { path: path.to_owned() })
    }

    /// Makes a key and writes it to a new file that only its owner may read.
    ///
    /// # Errors
    /// When the file is there already or cannot be written.
    pub fn create(path: &Path) -> Result<Self, KeyError> {
        let failed = |source| KeyError::File { path: path.to_owned(), source };
        let key = Self::generate()?;
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
        let text = format!("{}\n", to_hex(&key.bytes));
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
        Ok(key)
    }

    /// Says which key it is, and nothing about it.
    pub fn id(&self) -> KeyId {
        let hash = blake3::derive_key("covey 2026 store master key, id", &self.bytes);
        KeyId::from_bytes(std::array::from_fn(|at| hash[at]))
    }

    /// Only this master key opens it, and only for the same `purpose`.
    pub(super) fn wrap(&self, purpose: &str, key: &[u8; KEY_BYTES]) -> Result<Vec<u8>, KeyError> {
        let salt: [u8; SALT_BYTES] = random()?;
        let mut sealed = key.to_vec();
        let cipher = self.cipher(&salt).ok_or(KeyError::NoRandom)?;
        let aad = Aad::from(purpose.as_bytes());
        cipher.seal_in_place_append_tag(nonce(), aad, &mut sealed).map_err(|_| KeyError::NoRandom)?;
        Ok([salt.as_slice(), &sealed].concat())
    }

    /// None: it was wrapped by another master key or for another purpose, or was changed.
    pub(super) fn unwrap(&self, purpose: &str, wrapped: &[u8]) -> Option<[u8; KEY_BYTES]> {
        let (salt, sealed) =
            wrapped.split_at_checked(SALT_BYTES).filter(|_| wrapped.len() == WRAPPED_BYTES)?;
        let mut sealed = sealed.to_vec();
        let aad = Aad::from(purpose.as_bytes());
        let key = self.cipher(salt)?.open_in_place(nonce(), aad, &mut sealed).ok()?;
        (&*key).try_into().ok()
    }

    /// A key of its own for each wrapping, so that there is no nonce that could be used twice.
    fn cipher(&self, salt: &[u8]) -> Option<LessSafeKey> {
        let mut hasher = blake3::Hasher::new_derive_key("covey 2026 store master key, wrapping");
        hasher.update(&self.bytes).update(salt);
        Some(LessSafeKey::new(UnboundKey::new(&AES_256_GCM, hasher.finalize().as_bytes()).ok()?))
    }
}

fn nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; 12])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn what_is_wrapped_opens_with_the_same_key_for_the_same_purpose_only() {
        let (one, other) = (MasterKey::generate().unwrap(), MasterKey::generate().unwrap());
        let wrapped = one.wrap("org a", &[7; 32]).unwrap();
        assert_eq!(one.unwrap("org a", &wrapped), Some([7; 32]));
        assert_eq!(one.unwrap("org b", &wrapped), None);
        assert_eq!(other.unwrap("org a", &wrapped), None);
        for at in 0..wrapped.len() {
            let mut changed = wrapped.clone();
            changed[at] ^= 1;
            assert_eq!(one.unwrap("org a", &changed), None, "byte {at}");
        }
        assert_eq!(one.unwrap("org a", &wrapped[1..]), None);
        assert_ne!(one.id(), other.id());
    }

    #[test]
    fn a_key_file_is_private_and_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let key = MasterKey::create(&path).unwrap();
        assert_eq!(MasterKey::read(&path).unwrap(), key);
        assert!(matches!(MasterKey::create(&path), Err(KeyError::File { .. })));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = MasterKey::read(&path).unwrap_err();
        assert!(format!("{error:?}").contains("chmod 600"), "{error:?}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, "not a key").unwrap();
        assert!(matches!(MasterKey::read(&path), Err(KeyError::NotAKey { .. })));
        assert!(!format!("{key:?}").contains(&to_hex(&key.bytes)));
    }
}
