//! Writing packs: gathered in memory, sent when they are whole.
//!
//! What stays true: an object is visible whole or not at all, because S3 shows neither half a put nor an unfinished
//! multipart upload; what the server has stored is compared with what was sent, part by part, before the object counts
//! as published. A pack is sent in one request, because requests cost money and time; when the link breaks in the
//! middle, the rest of the tries send parts, so that what has arrived need not be sent again. What does not belong
//! here: what is in a pack.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use covey_home::backend::{BackendError, Key, NewFile};
use futures_util::StreamExt as _;
use object_store::multipart::{MultipartStore as _, PartId};
use object_store::path::Path;
use object_store::{GetRange, ObjectStore as _, PutOptions, PutPayload};
use tokio::runtime::Handle;

use crate::client::{Client, checksum, etag_text, hex};
use crate::failure::{Failure, FailureKind};
use crate::runtime;

/// Bytes of a part. S3 takes none below 5 MiB but the last, and 10,000 at most.
pub const PART_BYTES: usize = 8 * 1024 * 1024;
/// A file up to this is first tried in one request: any pack, which ends with the block that takes it above 32 MiB.
pub const WHOLE_BYTES_MAX: usize = 48 * 1024 * 1024;
/// Longest file; it is in memory until it is published.
pub const FILE_BYTES_MAX: usize = 256 * 1024 * 1024;
/// Parts of one file on their way at once.
const PARTS_AT_ONCE: usize = 3;

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct BucketFile {
    client: Arc<Client>,
    runtime: Handle,
    /// What the keys of its org begin with.
    org_dir: String,
    /// Each of [`PART_BYTES`].
    full: Vec<Bytes>,
    filling: BytesMut,
}

impl BucketFile {
    pub(crate) fn new(client: Arc<Client>, runtime: Handle, org_dir: String) -> Self {
        Self { client, runtime, org_dir, full: Vec::new(), filling: BytesMut::new() }
    }

    fn len(&self) -> usize {
        self.full.len() * PART_BYTES + self.filling.len()
    }
}

impl NewFile for BucketFile {
    fn append(&mut self, mut bytes: &[u8]) -> Result<(), BackendError> {
        if self.len() + bytes.len() > FILE_BYTES_MAX {
            let error = std::io::Error::from(std::io::ErrorKind::FileTooLarge);
            return Err(BackendError::unavailable(format!("write to {}", self.client.place()), error));
        }
        while !bytes.is_empty() {
            if self.filling.capacity() == 0 {
                self.filling.reserve(PART_BYTES);
            }
            let (now, later) = bytes.split_at(bytes.len().min(PART_BYTES - self.filling.len()));
            self.filling.extend_from_slice(now);
            bytes = later;
            if self.filling.len() == PART_BYTES {
                self.full.push(std::mem::take(&mut self.filling).freeze());
            }
        }
        Ok(())
    }

    fn publish(mut self: Box<Self>, key: &Key) -> Result<(), BackendError> {
        if !self.filling.is_empty() || self.full.is_empty() {
            self.full.push(std::mem::take(&mut self.filling).freeze());
        }
        let path = crate::backend::path_in(&self.client, &format!("{}/{key}", self.org_dir))?;
        let what = format!("write {path} in {}", self.client.place());
        let (client, parts) = (Arc::clone(&self.client), std::mem::take(&mut self.full));
        let done = runtime::wait(&self.runtime, || async { client.put_file(&path, &parts).await });
        done.map_err(|failure| failure.into_backend(what))
    }
}

/// Whether a put of the whole that failed goes on in parts: the link broke, and there are some. What was stored damaged
/// is replaced as a whole, because parts are seen only when the last has arrived.
fn is_for_parts(failure: &Failure, parts: &[Bytes]) -> bool {
    failure.kind() == FailureKind::Lost && parts.len() > 1 && !failure.leaves_damage()
}

impl Client {
    /// Writes an object of these parts, each of [`PART_BYTES`] but the last.
    ///
    /// # Errors
    /// When it is not certain that it is there, whole and as it was sent.
    pub(crate) async fn put_file(&self, path: &Path, parts: &[Bytes]) -> Result<(), Failure> {
        let len: usize = parts.iter().map(Bytes::len).sum();
        self.note_written(path);
        if len <= WHOLE_BYTES_MAX {
            match self.put_whole(path, parts, len).await {
                Err(failure) if is_for_parts(&failure, parts) => {
                    tracing::debug!(%path, %failure, "the link broke in a put of the whole; going on in parts");
                }
                ended => return ended,
            }
        }
        self.put_parts(path, parts).await
    }

    /// One request. When the link breaks and there are parts, it is not tried again.
    async fn put_whole(&self, path: &Path, parts: &[Bytes], len: usize) -> Result<(), Failure> {
        let expected = hex(&checksum(parts));
        let ask = |_| async {
            let payload: PutPayload = parts.iter().cloned().collect();
            let put = self.once(len, self.s3.put_opts(path, payload, PutOptions::default())).await?.0;
            if !self.trusts_etags() {
                let is_damaged = |failure: Failure| {
                    let is = failure.kind() == FailureKind::Damaged;
                    failure.leaving_damage(is)
                };
                return self.read_back(path, parts).await.map_err(is_damaged);
            }
            match put.e_tag.as_deref().map(etag_text) {
                Some(etag) if etag == expected => Ok(()),
                _ => {
                    let text = "it was stored with other bytes than were sent";
                    Err(Failure::new(FailureKind::Damaged, text).leaving_damage(true))
                }
            }
        };
        let is_enough = |failure: &Failure| !failure.may_pass() || is_for_parts(failure, parts);
        self.patience.persist_until(is_enough, ask).await
    }

    async fn put_parts(&self, path: &Path, parts: &[Bytes]) -> Result<(), Failure> {
        let ask = |_| async { Ok(self.once(0, self.s3.create_multipart(path)).await?.0) };
        let id = self.patience.persist(ask).await?;
        let done = self.put_parts_of(path, &id, parts).await;
        if done.is_err() {
            // It costs nothing but room, until the bucket's own rule clears it away.
            let abort = self.once(0, self.s3.abort_multipart(path, &id)).await;
            if let Err(failure) = abort {
                tracing::warn!(%path, %failure, "an unfinished upload stays in the bucket");
            }
        }
        done
    }

    async fn put_parts_of(&self, path: &Path, id: &String, parts: &[Bytes]) -> Result<(), Failure> {
        let sent = futures_util::stream::iter(parts.iter().enumerate())
            .map(|(number, part)| self.put_part(path, id, number, part))
            .buffered(PARTS_AT_ONCE);
        let mut ids: Vec<PartId> = Vec::with_capacity(parts.len());
        let mut sent = std::pin::pin!(sent);
        while let Some(id) = sent.next().await {
            ids.push(id?);
        }
        let sums: Vec<u8> = parts.iter().flat_map(|part| checksum([part])).collect();
        let expected = format!("{}-{}", hex(&checksum([&Bytes::from(sums)])), parts.len());
        let len: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let ask = |number| {
            let ids = ids.clone();
            async move {
                match self.once(0, self.s3.complete_multipart(path, id, ids)).await {
                    Ok((put, _)) => Ok(put.e_tag),
                    // An earlier try may have completed it.
                    Err(failure) if number > 1 && failure.kind() == FailureKind::Absent => {
                        let meta = self.head(path).await?;
                        if meta.size == len { Ok(meta.e_tag) } else { Err(failure) }
                    }
                    Err(failure) => Err(failure),
                }
            }
        };
        let etag = self.patience.persist(ask).await?;
        if self.trusts_etags() && etag.as_deref().map(etag_text).is_some_and(|etag| etag == expected) {
            return Ok(());
        }
        // Each part was compared; servers write the tag of the whole in their own ways.
        self.read_back(path, parts).await
    }

    async fn read_back(&self, path: &Path, parts: &[Bytes]) -> Result<(), Failure> {
        let mut at = 0;
        for part in parts {
            let end = at + part.len() as u64;
            let ask = |_| async {
                let (stored, _) = self.range(path, GetRange::Bounded(at..end)).await?;
                let damaged = || Failure::new(FailureKind::Damaged, "it does not read back as it was sent");
                if stored == *part { Ok(()) } else { Err(damaged()) }
            };
            self.patience.persist(ask).await?;
            at = end;
        }
        Ok(())
    }

    async fn put_part(
        &self,
        path: &Path,
        id: &String,
        number: usize,
        part: &Bytes,
    ) -> Result<PartId, Failure> {
        let expected = hex(&checksum([part]));
        let ask = |_| async {
            let payload: PutPayload = part.clone().into();
            let (sent, answer) = self.once(part.len(), self.s3.put_part(path, id, number, payload)).await?;
            let etag = answer.etag.as_deref().map(etag_text);
            if self.trusts_etags() && etag.as_ref() != Some(&expected) {
                return Err(Failure::new(
                    FailureKind::Damaged,
                    "a part was stored with other bytes than sent",
                ));
            }
            Ok(sent)
        };
        self.patience.persist(ask).await
    }
}
