//! The file `damage/suspects`: packs in which damage was found, until they are whole again or gone.
//!
//! What stays true: every upload reads the file when it begins, and to it these packs hold nothing. So whoever
//! still has a block of such a pack stores it again with the next secure, although its stat cache and the pack's
//! index say that it is there. Reads still take what is right in them. A line is only ever taken away for a pack
//! that was read whole and found right, or that is gone. What does not belong here: finding damage, and deleting
//! packs.

use std::collections::{BTreeMap, BTreeSet};

use covey_types::BlockHash;

use super::PackName;
use crate::backend::{Backend, Expected, FileVersion, Key, PutOutcome};
use crate::block::StoreError;

/// Packs that the file names at most, so that it stays a small file. Damage to more is a lost store: copy it from
/// a backup.
pub const SUSPECTS_MAX: usize = 1200;
/// So many lost races for one file are no race any more.
const TRIES_MAX: usize = 32;

/// What is known of a damaged pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SuspectState {
    /// Some of its bytes are not what was written.
    Damaged,
    /// Everything of it that any snapshot needs lies in other packs, too: garbage collection may delete it.
    Replaced,
}

impl SuspectState {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Damaged => "damaged",
            Self::Replaced => "replaced",
        }
    }
}

/// The file as it was read or written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Suspects {
    packs: BTreeMap<PackName, SuspectState>,
    version: Option<FileVersion>,
}

fn key() -> Result<Key, StoreError> {
    Ok(Key::new(&["damage", "suspects"])?)
}

impl Suspects {
    /// The packs.
    pub const fn packs(&self) -> &BTreeMap<PackName, SuspectState> {
        &self.packs
    }

    pub(super) fn names(&self) -> BTreeSet<PackName> {
        self.packs.keys().copied().collect()
    }

    /// Reads the file; nothing is suspect where there is none.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]; a file that cannot be understood is [`StoreError::Damaged`].
    pub(crate) fn read(backend: &dyn Backend) -> Result<Self, StoreError> {
        let key = key()?;
        let Some(found) = backend.get(&key)? else { return Ok(Self::default()) };
        let parsed = std::str::from_utf8(&found.bytes).ok().and_then(parse);
        let place = || format!("{key} in {}", backend.place());
        let packs = parsed.ok_or_else(|| StoreError::damaged(place(), "it is not a list of packs"))?;
        Ok(Self { packs, version: Some(found.version) })
    }

    /// Whether `next` is such a file's text that says no less than `now` and beyond it only that packs are damaged: what
    /// is taken from somebody who reads packs and must not decide which may be deleted. A damaged `now` says nothing.
    pub fn only_adds_damage(now: Option<&[u8]>, next: &[u8]) -> bool {
        let packs = |bytes: &[u8]| std::str::from_utf8(bytes).ok().and_then(parse);
        let Some(next) = packs(next).filter(|next| next.len() <= SUSPECTS_MAX) else { return false };
        let now = now.and_then(packs).unwrap_or_default();
        now.iter().all(|(pack, state)| next.get(pack) == Some(state))
            && next.iter().all(|(pack, state)| now.contains_key(pack) || *state == SuspectState::Damaged)
    }

    /// Whether a key is that of the file.
    pub fn is_key(file: &Key) -> bool {
        key().is_ok_and(|key| key == *file)
    }

    /// Changes the file as a whole; a damaged one is written anew. Gives what stands there then.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`], also when it would name more than [`SUSPECTS_MAX`] packs.
    pub(crate) fn change(
        backend: &dyn Backend,
        change: impl Fn(&mut BTreeMap<PackName, SuspectState>),
    ) -> Result<Self, StoreError> {
        let key = key()?;
        for _ in 0..TRIES_MAX {
            let (found, expected) = match Self::read(backend) {
                Ok(found) => {
                    let expected = found.version.clone().map_or(Expected::Absent, Expected::Version);
                    (found, expected)
                }
                Err(StoreError::Damaged { .. }) => (Self::default(), Expected::Any),
                Err(error) => return Err(error),
            };
            let mut packs = found.packs.clone();
            change(&mut packs);
            if packs == found.packs && expected != Expected::Any {
                return Ok(found);
            }
            if packs.len() > SUSPECTS_MAX {
                let what = format!(
                    "name {} damaged packs in {}; the limit is {SUSPECTS_MAX}: copy the store from a backup",
                    packs.len(),
                    backend.place()
                );
                return Err(StoreError::unavailable(what, std::io::ErrorKind::QuotaExceeded));
            }
            if let PutOutcome::Written(version) = backend.put_if(&key, text(&packs).as_bytes(), &expected)? {
                return Ok(Self { packs, version: Some(version) });
            }
        }
        Err(StoreError::unavailable(format!("change {key}"), std::io::ErrorKind::ResourceBusy))
    }
}

fn text(packs: &BTreeMap<PackName, SuspectState>) -> String {
    let mut body = "covey-suspects 1\n".to_owned();
    for (pack, state) in packs {
        body.push_str(&format!("{pack} {}\n", state.as_str()));
    }
    let checksum = BlockHash::of(body.as_bytes());
    format!("{body}checksum {checksum}\n")
}

fn parse(found: &str) -> Option<BTreeMap<PackName, SuspectState>> {
    let mut lines = found.lines();
    if lines.next()? != "covey-suspects 1" {
        return None;
    }
    let packs = lines.take_while(|line| !line.starts_with("checksum ")).map(|line| {
        let (pack, state) = line.split_once(' ')?;
        let states = [SuspectState::Damaged, SuspectState::Replaced];
        Some((pack.parse().ok()?, states.into_iter().find(|known| known.as_str() == state)?))
    });
    let packs: BTreeMap<PackName, SuspectState> = packs.collect::<Option<_>>()?;
    // One list has one text, so comparing it checks the checksum and everything else.
    (text(&packs) == found).then_some(packs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{MemoryBackend, SMALL_FILE_BYTES_MAX};

    #[test]
    fn the_file_is_read_as_it_is_written_and_a_full_one_is_small() {
        let backend = MemoryBackend::new();
        let wanted: BTreeMap<_, _> =
            (0..SUSPECTS_MAX).map(|_| (PackName::random(), SuspectState::Replaced)).collect();
        let written = Suspects::change(&backend, |packs| *packs = wanted.clone()).unwrap();
        assert_eq!(Suspects::read(&backend).unwrap(), written);
        assert_eq!(written.packs(), &wanted);
        assert!(text(&wanted).len() < SMALL_FILE_BYTES_MAX);
        let more = |packs: &mut BTreeMap<_, _>| {
            packs.insert(PackName::random(), SuspectState::Damaged);
        };
        assert!(Suspects::change(&backend, more).unwrap_err().to_string().contains("from a backup"));
        assert_eq!(Suspects::read(&backend).unwrap().packs(), &wanted);
    }

    #[test]
    fn a_damaged_file_is_named_and_can_be_written_anew() {
        let backend = MemoryBackend::new();
        let pack = PackName::random();
        let put = |packs: &mut BTreeMap<_, _>| {
            packs.insert(pack, SuspectState::Damaged);
        };
        Suspects::change(&backend, put).unwrap();
        backend.tamper(&key().unwrap(), |bytes| bytes[3] ^= 1);
        let error = Suspects::read(&backend).unwrap_err();
        assert!(error.to_string().contains("damage/suspects"), "{error}");
        assert_eq!(Suspects::change(&backend, put).unwrap().packs().len(), 1);
    }
}
