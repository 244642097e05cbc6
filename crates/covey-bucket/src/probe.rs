//! Whether a bucket can hold a store, found out by trying before anything depends on it.
//!
//! What stays true: a store without conditional puts is refused, because two writers of one pointer would overwrite
//! each other; what entity tags mean is found out and not assumed. The object `covey-store` in the prefix says that a
//! store begins here and in which version; it is the only thing that a probe writes. What does not belong here: the
//! sentences about wrong settings (`crate::failure`).

use covey_home::backend::SMALL_FILE_BYTES_MAX;
use covey_types::BlockHash;
use object_store::path::Path;
use object_store::{ObjectStore as _, PutOptions};

use crate::client::{Client, Found as Object, is_checksum_of};
use crate::failure::{Failure, FailureKind};
use crate::small::Condition;

/// The mark's name below the prefix.
pub(crate) const MARK: &str = "covey-store";
/// The version of what lies in a bucket.
const VERSION: u32 = 1;
/// A mark that differs from ours in so few bytes was ours.
const DAMAGED_BYTES_MAX: usize = 2;
/// So often the mark is read or written before it is given up.
const MARK_TRIES_MAX: usize = 6;
/// A tag that no object has: as long as one, and of no bytes.
const NO_ETAG: &str = "\"00000000000000000000000000000000\"";

/// What entity tags of objects that were put in one piece are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Etags {
    /// The MD5 of the object.
    Checksums,
    /// Something else.
    Opaque,
}

/// What stands where the mark should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    /// The mark.
    Mark(Etags),
    /// No store begins here.
    Nothing,
    /// The mark, written by a put that arrived damaged; with its entity tag.
    Damaged(String),
}

impl Client {
    /// Tries everything that a store needs for reading and writing.
    ///
    /// # Errors
    /// A sentence with the remedy.
    pub(crate) async fn probe(&self, mark: &Path) -> Result<Etags, Failure> {
        let mut condition = Condition::Absent;
        let mut etags = self.mark(mark).await?;
        for _ in 0..MARK_TRIES_MAX {
            if let Found::Mark(etags) = etags {
                return self.probe_conditions(mark).await.map(|()| etags);
            }
            if let Found::Damaged(etag) = etags {
                condition = Condition::Etag(etag);
            }
            // Somebody else may be faster, with the same text.
            self.put_mark(mark, condition.clone()).await?;
            etags = self.mark(mark).await?;
        }
        Err(Failure::new(
            FailureKind::Refused,
            format!("{} does not keep what is written to it", self.endpoint()),
        ))
    }

    async fn probe_conditions(&self, mark: &Path) -> Result<(), Failure> {
        for condition in [Condition::Absent, Condition::Etag(NO_ETAG.to_owned())] {
            if self.put_mark(mark, condition).await? {
                return Err(Failure::new(
                    FailureKind::Refused,
                    format!(
                        "{} ignores If-Match or If-None-Match, so two writers of one home would overwrite each other: \
                         use a server that has conditional puts (Amazon S3, SeaweedFS, MinIO, Ceph)",
                        self.endpoint()
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Writes the mark; tells whether the condition was met.
    async fn put_mark(&self, mark: &Path, condition: Condition) -> Result<bool, Failure> {
        let ask = |_| async {
            let options = PutOptions { mode: condition.mode(), ..PutOptions::default() };
            match self.once(0, self.s3.put_opts(mark, Mark::text(VERSION).into(), options)).await {
                Ok(_) => Ok(true),
                Err(failure) if failure.kind() == FailureKind::Condition => Ok(false),
                // So do servers that have nothing to compare with.
                Err(failure) if failure.kind() == FailureKind::Absent && condition != Condition::None => {
                    Ok(false)
                }
                Err(failure) => Err(failure),
            }
        };
        self.patience.persist(ask).await
    }

    /// Reads the mark, and finds out from it what entity tags are.
    ///
    /// # Errors
    /// When there is something else, or it cannot be told.
    pub(crate) async fn mark(&self, mark: &Path) -> Result<Found, Failure> {
        let read = async || self.whole_unchecked(mark, SMALL_FILE_BYTES_MAX as u64).await;
        let mut last: Option<Object> = None;
        for _ in 0..MARK_TRIES_MAX {
            let found = match read().await {
                Ok(found) => found,
                Err(failure) if failure.kind() == FailureKind::Absent => return Ok(Found::Nothing),
                Err(failure) => return Err(failure),
            };
            if is_checksum_of(&found.etag, &found.bytes) {
                return self.marked(&found, Etags::Checksums);
            }
            // One that differs was changed on its way. Twice the same was not, so the tag is no checksum.
            if last.as_ref().is_some_and(|last| last.bytes == found.bytes && last.etag == found.etag) {
                self.distrust_etags();
                return self.marked(&found, Etags::Opaque);
            }
            last = Some(found);
        }
        Err(Failure::new(FailureKind::Damaged, "the same small object is read differently each time"))
    }

    fn marked(&self, found: &Object, etags: Etags) -> Result<Found, Failure> {
        let problem = match Mark::read(&found.bytes) {
            Mark::Ours => return Ok(Found::Mark(etags)),
            Mark::Damaged => return Ok(Found::Damaged(found.etag.clone())),
            Mark::OfVersion(version) => format!(
                "the store at {} is of version {version}, which this program does not know: use a newer one",
                self.place()
            ),
            Mark::Foreign => format!(
                "`{MARK}` at {} is not the mark of a store: choose another prefix, or delete it if nothing needs it",
                self.place()
            ),
        };
        Err(Failure::new(FailureKind::Refused, problem))
    }
}

/// What an object with the mark's name says.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Mark {
    Ours,
    /// What a put of ours that arrived damaged leaves.
    Damaged,
    OfVersion(u32),
    Foreign,
}

impl Mark {
    /// The mark of a version. It checks itself: a flipped bit must not make another version of it.
    fn text(version: u32) -> String {
        let body = format!("{MARK} {version}\n");
        let checksum = BlockHash::of(body.as_bytes());
        format!("{body}checksum {checksum}\n")
    }

    fn read(bytes: &[u8]) -> Self {
        let ours = Self::text(VERSION);
        if bytes == ours.as_bytes() {
            return Self::Ours;
        }
        let version = || {
            let first = std::str::from_utf8(bytes).ok()?.lines().next()?;
            let version = first.strip_prefix(MARK)?.strip_prefix(' ')?.parse().ok()?;
            (Self::text(version).as_bytes() == bytes).then_some(version)
        };
        if let Some(version) = version() {
            return Self::OfVersion(version);
        }
        let differing = bytes.iter().zip(ours.bytes()).filter(|(one, other)| *one != other).count();
        if bytes.len() == ours.len() && differing <= DAMAGED_BYTES_MAX {
            Self::Damaged
        } else {
            Self::Foreign
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_never_makes_another_version_or_a_foreign_object_of_the_mark() {
        let mark = Mark::text(VERSION).into_bytes();
        assert_eq!(Mark::read(&mark), Mark::Ours);
        for bit in 0..mark.len() * 8 {
            let mut damaged = mark.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Mark::read(&damaged), Mark::Damaged, "bit {bit}");
        }
    }

    #[test]
    fn another_version_and_what_is_no_mark_are_told_apart() {
        assert_eq!(Mark::read(Mark::text(12).as_bytes()), Mark::OfVersion(12));
        for other in [&b""[..], b"hello", b"covey-store 2\n", b"covey-store x\n", &[0; 87]] {
            assert_eq!(Mark::read(other), Mark::Foreign, "{other:?}");
        }
    }
}
