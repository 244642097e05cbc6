//! Whether a bucket can hold a store, found out by trying before anything depends on it.
//!
//! What stays true: a store without conditional puts is refused, because two writers of one pointer would overwrite
//! each other; what entity tags mean is found out and not assumed. The object `covey-store` in the prefix says that a
//! store begins here and in which version; it is the only thing that a probe writes. What does not belong here: the
//! sentences about wrong settings (`crate::failure`).

use covey_home::backend::SMALL_FILE_BYTES_MAX;
use object_store::path::Path;
use object_store::{ObjectStore as _, PutOptions};

use crate::client::{Client, Found as Object, is_checksum_of};
use crate::failure::{Failure, FailureKind};
use crate::small::Condition;

/// The mark's name below the prefix.
pub(crate) const MARK: &str = "covey-store";
const MARK_TEXT: &str = "covey-store 1\n";
const MARK_START: &str = "covey-store ";
const VERSION_AT: usize = MARK_START.len();
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
            match self.once(0, self.s3.put_opts(mark, MARK_TEXT.into(), options)).await {
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
        if found.bytes == MARK_TEXT {
            return Ok(Found::Mark(etags));
        }
        // As long, and not a letter more than a few bits away: what a damaged upload of the mark leaves.
        let differing =
            found.bytes.iter().zip(MARK_TEXT.bytes()).filter(|(one, other)| *one != other).count();
        if found.bytes.len() == MARK_TEXT.len() && differing == 1 && found.bytes[VERSION_AT] == b'1' {
            return Ok(Found::Damaged(found.etag.clone()));
        }
        let text = String::from_utf8_lossy(&found.bytes);
        let problem = match text.strip_prefix(MARK_START) {
            Some(version) => format!(
                "the store at {} is of version {:?}, which this program does not know: use a newer one",
                self.place(),
                version.trim().chars().take(20).collect::<String>()
            ),
            None => format!(
                "`{MARK}` at {} is not the mark of a store: choose another prefix, or delete it if nothing needs it",
                self.place()
            ),
        };
        Err(Failure::new(FailureKind::Refused, problem))
    }
}
