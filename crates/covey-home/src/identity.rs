//! Which store this is: a name that is made once and stays, so that another store in its place is noticed, for
//! example the empty directory below a volume that is not mounted.

use std::fmt;
use std::str::FromStr;

use covey_types::BlockHash;

use crate::backend::{Backend, Expected, Key, PutOutcome};
use crate::block::StoreError;
use crate::name::{InvalidName, random_name};

/// The name of one org's store: 32 hexadecimal digits, chosen at random.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreIdentity(String);

impl fmt::Display for StoreIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for StoreIdentity {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let is_name = text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        is_name.then(|| Self(text.to_owned())).ok_or_else(|| InvalidName::of(text))
    }
}

fn key() -> Result<Key, StoreError> {
    Ok(Key::new(&["identity"])?)
}

fn text(identity: &StoreIdentity) -> String {
    let body = format!("covey-store 1\nidentity {identity}\n");
    let checksum = BlockHash::of(body.as_bytes());
    format!("{body}checksum {checksum}\n")
}

fn parse(found: &str) -> Option<StoreIdentity> {
    let mut lines = found.lines();
    (lines.next()? == "covey-store 1").then_some(())?;
    let identity = lines.next()?.strip_prefix("identity ")?.parse().ok()?;
    (text(&identity) == found).then_some(identity)
}

impl StoreIdentity {
    /// Reads it; none where the store has none.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]; a file that cannot be understood is [`StoreError::Damaged`].
    pub fn read(backend: &dyn Backend) -> Result<Option<Self>, StoreError> {
        let key = key()?;
        let Some(found) = backend.get(&key)? else { return Ok(None) };
        let parsed = std::str::from_utf8(&found.bytes).ok().and_then(parse);
        let place = || format!("{key} in {}", backend.place());
        parsed.map(Some).ok_or_else(|| StoreError::damaged(place(), "it is no name of a store"))
    }

    /// Reads it, and gives the store one where it has none; of many who try at once, all get the same.
    ///
    /// # Errors
    /// As [`StoreIdentity::read`], and when it cannot be written.
    pub fn establish(backend: &dyn Backend) -> Result<Self, StoreError> {
        if let Some(known) = Self::read(backend)? {
            return Ok(known);
        }
        let made = Self(random_name());
        match backend.put_if(&key()?, text(&made).as_bytes(), &Expected::Absent)? {
            PutOutcome::Written(_) => Ok(made),
            PutOutcome::Conflict => Self::read(backend)?.ok_or_else(|| {
                StoreError::unavailable(format!("name {}", backend.place()), std::io::ErrorKind::ResourceBusy)
            }),
        }
    }

    /// Gives a copy the name of its source, unless it has one: a server that moves to the copy finds the store it knows.
    pub(crate) fn carry(from: &dyn Backend, to: &dyn Backend) -> Result<(), StoreError> {
        let Some(known) = Self::read(from)? else { return Ok(()) };
        match to.put_if(&key()?, text(&known).as_bytes(), &Expected::Absent)? {
            PutOutcome::Written(_) | PutOutcome::Conflict => Ok(()),
        }
    }

    /// Writes a damaged one anew.
    pub(crate) fn write_anew(backend: &dyn Backend) -> Result<Self, StoreError> {
        let made = Self(random_name());
        match backend.put_if(&key()?, text(&made).as_bytes(), &Expected::Any)? {
            PutOutcome::Written(_) => Ok(made),
            PutOutcome::Conflict => Err(StoreError::unavailable(
                format!("name {}", backend.place()),
                std::io::ErrorKind::ResourceBusy,
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryBackend;

    #[test]
    fn a_store_gets_one_name_and_damage_to_it_is_said() {
        let backend = MemoryBackend::new();
        assert_eq!(StoreIdentity::read(&backend).unwrap(), None);
        let made = StoreIdentity::establish(&backend).unwrap();
        assert_eq!(StoreIdentity::establish(&backend).unwrap(), made);
        assert_eq!(StoreIdentity::read(&backend).unwrap(), Some(made.clone()));
        assert_ne!(StoreIdentity::establish(&MemoryBackend::new()).unwrap(), made);
        backend.tamper(&key().unwrap(), |bytes| bytes[30] ^= 1);
        assert!(matches!(StoreIdentity::establish(&backend), Err(StoreError::Damaged { .. })));
    }
}
