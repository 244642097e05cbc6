//! The file `gc/condemned`: which packs a collection is going to delete, under the number of its epoch.

use std::collections::BTreeSet;

use covey_types::BlockHash;

use crate::backend::{Backend, Expected, FileVersion, Key, PutOutcome, Versioned};
use crate::block::StoreError;
use crate::pack_store::PackName;

/// The file as it was read or written.
#[derive(Debug, Clone, Default)]
pub(crate) struct Condemned {
    epoch: u64,
    packs: BTreeSet<PackName>,
    version: Option<FileVersion>,
}

fn key() -> Result<Key, StoreError> {
    Ok(Key::new(&["gc", "condemned"])?)
}

impl Condemned {
    /// Number of the collection; 0 before the first.
    pub(crate) const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The packs.
    pub(crate) const fn packs(&self) -> &BTreeSet<PackName> {
        &self.packs
    }

    /// Reads the file; epoch 0 where there is none and no collection has ever got further.
    pub(crate) fn read(backend: &dyn Backend) -> Result<Self, StoreError> {
        let key = key()?;
        let Some(found) = backend.get(&key)? else {
            // The floor is written after it, and neither is ever removed.
            if backend.get(&Key::new(&["gc", "floor"])?)?.is_none() {
                return Ok(Self::default());
            }
            let gone = || StoreError::damaged(format!("{key} in {}", backend.place()), "it is gone");
            // The first collection may just have begun.
            return match backend.get(&key)? {
                Some(found) => Self::parsed(backend, found),
                None => Err(gone()),
            };
        };
        Self::parsed(backend, found)
    }

    fn parsed(backend: &dyn Backend, found: Versioned) -> Result<Self, StoreError> {
        let key = key()?;
        let parsed = std::str::from_utf8(&found.bytes).ok().and_then(parse);
        let damaged =
            || StoreError::damaged(format!("{key} in {}", backend.place()), "it is not a list of packs");
        let mut condemned = parsed.ok_or_else(damaged)?;
        condemned.version = Some(found.version);
        Ok(condemned)
    }

    /// Writes a damaged file anew: `packs`, which must be all that there are, in the epoch after `least`.
    pub(crate) fn write_anew(
        backend: &dyn Backend,
        least: u64,
        packs: Vec<PackName>,
    ) -> Result<Self, StoreError> {
        if packs.len() > super::CONDEMNED_MAX {
            let what = format!(
                "condemn {} packs in {}; the limit is {}: copy the store to a new one",
                packs.len(),
                backend.place(),
                super::CONDEMNED_MAX
            );
            return Err(StoreError::unavailable(what, std::io::ErrorKind::QuotaExceeded));
        }
        let anew = Self { epoch: least + 1, packs: packs.into_iter().collect(), version: None };
        match backend.put_if(&key()?, text(&anew).as_bytes(), &Expected::Any)? {
            PutOutcome::Written(version) => Ok(Self { version: Some(version), ..anew }),
            PutOutcome::Conflict => {
                Err(StoreError::unavailable(format!("write {}", key()?), std::io::ErrorKind::ResourceBusy))
            }
        }
    }

    /// Condemns `packs` in the next epoch; none when somebody else has written an epoch since this was read.
    pub(crate) fn replace(
        &self,
        backend: &dyn Backend,
        packs: BTreeSet<PackName>,
    ) -> Result<Option<Self>, StoreError> {
        self.write(backend, self.epoch + 1, packs)
    }

    /// Condemns the same packs in a later epoch; none as in [`Condemned::replace`].
    pub(super) fn lift(&self, backend: &dyn Backend, epoch: u64) -> Result<Option<Self>, StoreError> {
        self.write(backend, epoch, self.packs.clone())
    }

    fn write(
        &self,
        backend: &dyn Backend,
        epoch: u64,
        packs: BTreeSet<PackName>,
    ) -> Result<Option<Self>, StoreError> {
        let mut next = Self { epoch, packs, version: None };
        let expected = self.version.clone().map_or(Expected::Absent, Expected::Version);
        match backend.put_if(&key()?, text(&next).as_bytes(), &expected)? {
            PutOutcome::Conflict => Ok(None),
            PutOutcome::Written(version) => {
                next.version = Some(version);
                Ok(Some(next))
            }
        }
    }
}

fn text(condemned: &Condemned) -> String {
    let mut body = format!("covey-condemned 1\nepoch {}\n", condemned.epoch);
    for pack in &condemned.packs {
        body.push_str(&format!("{pack}\n"));
    }
    let checksum = BlockHash::of(body.as_bytes());
    format!("{body}checksum {checksum}\n")
}

fn parse(found: &str) -> Option<Condemned> {
    let mut lines = found.lines();
    if lines.next()? != "covey-condemned 1" {
        return None;
    }
    let epoch = lines.next()?.strip_prefix("epoch ")?.parse().ok()?;
    let packs = lines.take_while(|line| !line.starts_with("checksum "));
    let packs = packs.map(|line| line.parse().ok()).collect::<Option<_>>()?;
    let condemned = Condemned { epoch, packs, version: None };
    // One list has one text, so comparing it checks the checksum and everything else.
    (text(&condemned) == found).then_some(condemned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryBackend;

    #[test]
    fn the_file_is_read_as_it_is_written_and_two_writers_do_not_share_an_epoch() {
        let backend = MemoryBackend::default();
        let none = Condemned::read(&backend).unwrap();
        assert_eq!(none.epoch(), 0);
        let packs: BTreeSet<PackName> =
            (0..super::super::CONDEMNED_MAX).map(|_| PackName::random()).collect();
        let first = none.replace(&backend, packs.clone()).unwrap().unwrap();
        assert_eq!((first.epoch(), first.packs()), (1, &packs));
        assert!(none.replace(&backend, BTreeSet::new()).unwrap().is_none());
        let read = Condemned::read(&backend).unwrap();
        assert_eq!((read.epoch(), read.packs()), (1, &packs));
        assert_eq!(read.replace(&backend, BTreeSet::new()).unwrap().unwrap().epoch(), 2);
    }

    #[test]
    fn a_damaged_file_is_named() {
        let backend = MemoryBackend::default();
        Condemned::default().replace(&backend, BTreeSet::from([PackName::random()])).unwrap().unwrap();
        let good = backend.get(&key().unwrap()).unwrap().unwrap().bytes;
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            let put = backend.put_if(&key().unwrap(), &bad, &Expected::Any).unwrap();
            assert!(matches!(put, PutOutcome::Written(_)));
            assert!(matches!(Condemned::read(&backend), Err(StoreError::Damaged { .. })), "{at}");
        }
    }
}
