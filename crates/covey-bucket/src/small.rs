//! Small objects that are replaced under a condition: pointers and marks.
//!
//! What stays true: of many who replace the same version one succeeds, and each knows whether it was the one, also
//! when answers get lost: a put carries a name of its own, which is read back when it is not certain how it ended.
//! What the server has stored is compared with what was meant before anybody is told that it is written; a put that
//! arrived damaged is repaired, on the condition that nobody has replaced it meanwhile. What does not belong here:
//! what the objects say.

use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use covey_home::backend::SMALL_FILE_BYTES_MAX;
use object_store::path::Path;
use object_store::{Attribute, Attributes, ObjectStore as _, PutMode, PutOptions, UpdateVersion};

use crate::client::{Client, Found, REPLACES_ATTRIBUTE, WRITE_ATTRIBUTE, etag_text, is_checksum_of};
use crate::failure::{Failure, FailureKind};

/// What must be there for the put to happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Condition {
    /// Nothing.
    Absent,
    /// The object with this entity tag.
    Etag(String),
    /// Anything.
    None,
}

impl Condition {
    /// For [`REPLACES_ATTRIBUTE`].
    fn replaces(&self) -> String {
        match self {
            Self::Absent => "nothing".to_owned(),
            Self::Etag(etag) => etag_text(etag),
            Self::None => "anything".to_owned(),
        }
    }

    pub(crate) fn mode(&self) -> PutMode {
        match self {
            Self::Absent => PutMode::Create,
            Self::Etag(etag) => PutMode::Update(UpdateVersion { e_tag: Some(etag.clone()), version: None }),
            Self::None => PutMode::Overwrite,
        }
    }
}

/// How a put ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Put {
    /// It is there, with this entity tag.
    Written(String),
    /// The condition was not met, and nothing was changed.
    Conflict,
}

/// What earlier tries of one put have left behind.
#[derive(Debug)]
struct Tries {
    condition: Condition,
    /// One of them may have been carried out without our knowing.
    unsure: bool,
}

impl Client {
    /// Writes a small object as a whole.
    ///
    /// # Errors
    /// When it is not certain how it ended.
    pub(crate) async fn put_small(
        &self,
        path: &Path,
        bytes: Bytes,
        condition: Condition,
    ) -> Result<Put, Failure> {
        let write = covey_home::name::random_name();
        let tries = Mutex::new(Tries { condition, unsure: false });
        let (write, tries, bytes) = (write.as_str(), &tries, &bytes);
        self.patience.persist(|_| async move { self.try_put(path, bytes, write, tries).await }).await.map_err(
            |failure| {
                let unsure = tries.lock().unwrap_or_else(PoisonError::into_inner).unsure;
                let text = format!("{failure}; it may have been written all the same");
                if unsure { Failure::new(failure.kind(), text) } else { failure }
            },
        )
    }

    async fn try_put(
        &self,
        path: &Path,
        bytes: &Bytes,
        write: &str,
        tries: &Mutex<Tries>,
    ) -> Result<Put, Failure> {
        let (condition, was_unsure) = {
            let mut tries = tries.lock().unwrap_or_else(PoisonError::into_inner);
            // Until there is an answer; a try that is given up in the middle may arrive.
            (tries.condition.clone(), std::mem::replace(&mut tries.unsure, true))
        };
        let mut attributes = Attributes::new();
        attributes.insert(Attribute::Metadata(WRITE_ATTRIBUTE.into()), write.to_owned().into());
        attributes.insert(Attribute::Metadata(REPLACES_ATTRIBUTE.into()), condition.replaces().into());
        let options = PutOptions { mode: condition.mode(), attributes, ..PutOptions::default() };
        self.note_written(path);
        let put = self.once(bytes.len(), self.s3.put_opts(path, bytes.clone().into(), options)).await;
        let is_certain = |tries: &Mutex<Tries>| {
            tries.lock().unwrap_or_else(PoisonError::into_inner).unsure = was_unsure;
        };
        match put {
            Ok((put, _)) => {
                let etag = put.e_tag.unwrap_or_default();
                if self.trusts_etags() && is_checksum_of(&etag, bytes) {
                    return Ok(Put::Written(etag));
                }
                let is_other = self.trusts_etags();
                let settled = self.settle(path, bytes, write, tries, &condition, Some(etag)).await;
                settled.map_err(|failure| failure.leaving_damage(is_other))
            }
            // The answer of a server that finds nothing to compare with, or something else.
            Err(failure) if matches!(failure.kind(), FailureKind::Condition | FailureKind::Absent) => {
                if was_unsure {
                    self.settle(path, bytes, write, tries, &condition, None).await
                } else {
                    Ok(Put::Conflict)
                }
            }
            Err(failure) => {
                if matches!(failure.kind(), FailureKind::Refused | FailureKind::Damaged) {
                    is_certain(tries);
                }
                Err(failure)
            }
        }
    }

    /// Finds out by reading what a put under `condition` has done. `put` is the entity tag that the server gave for it;
    /// none: the condition was not met, after an earlier try had ended without an answer.
    async fn settle(
        &self,
        path: &Path,
        bytes: &Bytes,
        write: &str,
        tries: &Mutex<Tries>,
        condition: &Condition,
        put: Option<String>,
    ) -> Result<Put, Failure> {
        let found = match self.whole(path, SMALL_FILE_BYTES_MAX as u64).await {
            Ok(found) => Some(found),
            Err(failure) if failure.kind() == FailureKind::Absent => None,
            Err(failure) => return Err(failure),
        };
        let is_ours =
            |found: &Found| found.write.as_deref() == Some(write) || put.as_ref() == Some(&found.etag);
        let (Some(found), put) = (found, put.clone()) else {
            // Nothing of ours is there; whatever removed it came last.
            return Ok(put.map_or(Put::Conflict, Put::Written));
        };
        if is_ours(&found) && found.bytes == *bytes {
            return Ok(Put::Written(found.etag));
        }
        if is_ours(&found) {
            // Nobody can have read it and gone on from it, so nobody replaces it either.
            tries.lock().unwrap_or_else(PoisonError::into_inner).condition = Condition::Etag(found.etag);
            let text = "it was stored with other bytes than were sent";
            return Err(Failure::new(FailureKind::Damaged, text).leaving_damage(true));
        }
        // Of those who replace the same version one succeeds, and that was somebody else; also where a server lets two,
        // and has kept the other's.
        if *condition != Condition::None && found.replaces == Some(condition.replaces()) {
            return Ok(Put::Conflict);
        }
        // Else it was written and has been replaced since.
        put.map(Put::Written).ok_or_else(|| {
            let text = "it is not certain whether it was written and replaced, or never written";
            Failure::new(FailureKind::Refused, text)
        })
    }
}
