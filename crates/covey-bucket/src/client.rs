//! Requests to one bucket: each tried as often as makes sense, each answer checked.
//!
//! What stays true: an object is said not to be there only when two different questions agree (its own name, and the
//! list of names); a whole object is compared with its entity tag, a range with the length that was asked for. What
//! does not belong here: what objects mean, and writing them (`crate::small`, `crate::upload`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use md5::{Digest as _, Md5};
use object_store::aws::AmazonS3;
use object_store::list::{PaginatedListOptions, PaginatedListStore as _};
use object_store::path::Path;
use object_store::{
    Attribute, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore as _, ObjectStoreExt as _,
};
use tokio::time::Instant;

use crate::failure::{Failure, FailureKind, Told};
use crate::patience::Patience;
use crate::place::BucketPlace;
use crate::settings::{Settings, SettingsError, shown};
use crate::wire::{Answer, Connector, Requests, seen};
use crate::witness::{NAMES_MAX, NamesShown, Witness};

/// Where pointers lie, below an org.
const HOMES_DIR: &str = "homes/";
/// Metadata of a small object that names the one put that wrote it.
pub(crate) const WRITE_ATTRIBUTE: &str = "covey-write";
/// And what it has replaced: the entity tag without quotes, or `nothing`, or `anything`.
pub(crate) const REPLACES_ATTRIBUTE: &str = "covey-replaces";

/// A small object as it was read.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) bytes: Bytes,
    /// The entity tag, as the server writes it.
    pub(crate) etag: String,
    /// Which put wrote it, if it says so.
    pub(crate) write: Option<String>,
    /// What that put has replaced, if it says so.
    pub(crate) replaces: Option<String>,
}

/// See the module's first lines.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) s3: AmazonS3,
    pub(crate) patience: Patience,
    place: BucketPlace,
    endpoint: String,
    region: String,
    key_id: Option<String>,
    requests: Arc<Requests>,
    /// Entity tags of this bucket are no checksums (it encrypts with keys of its own).
    opaque_etags: AtomicBool,
    witness: Mutex<Witness>,
}

impl Client {
    pub(crate) fn new(
        place: &BucketPlace,
        settings: &Settings,
        patience: Patience,
    ) -> Result<Self, SettingsError> {
        let endpoint = settings.endpoint(place)?;
        let requests = Arc::new(Requests::default());
        let connector = Connector::new(&endpoint, Arc::clone(&requests))
            .map_err(|problem| SettingsError::Library { place: place.clone(), problem })?;
        Ok(Self {
            s3: settings.build(place, &endpoint, connector)?,
            patience,
            place: place.clone(),
            endpoint: shown(&endpoint),
            region: settings.region().to_owned(),
            key_id: settings.key.as_ref().map(|key| key.id.clone()),
            requests,
            opaque_etags: AtomicBool::new(false),
            witness: Mutex::default(),
        })
    }

    pub(crate) const fn place(&self) -> &BucketPlace {
        &self.place
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub(crate) const fn requests(&self) -> &Arc<Requests> {
        &self.requests
    }

    /// Entity tags are taken for checksums until this is said.
    pub(crate) fn distrust_etags(&self) {
        self.opaque_etags.store(true, Ordering::Relaxed);
    }

    pub(crate) fn trusts_etags(&self) -> bool {
        !self.opaque_etags.load(Ordering::Relaxed)
    }

    pub(crate) fn judge(&self, error: &object_store::Error, answer: &Answer) -> Failure {
        let at = Told {
            endpoint: &self.endpoint,
            bucket: self.place.bucket(),
            region: &self.region,
            key_id: self.key_id.as_deref(),
        };
        Failure::judge(answer, &innermost(error), &at)
    }

    /// One try of a request, in which `bytes` are transferred.
    pub(crate) async fn once<T>(
        &self,
        bytes: usize,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<(T, Answer), Failure> {
        let (done, answer) = self.patience.within(bytes, seen(request)).await?;
        match done {
            Ok(done) => Ok((done, answer)),
            Err(error) => Err(self.judge(&error, &answer)),
        }
    }

    /// All names that begin with `prefix`, up to the next slash: first those of objects, then those of folders.
    ///
    /// # Errors
    /// When not all can be told.
    pub(crate) async fn list(&self, prefix: &Path) -> Result<(Vec<String>, Vec<String>), Failure> {
        let text = format!("{prefix}/");
        let (mut objects, mut folders) = (Vec::new(), Vec::new());
        let mut page = None;
        loop {
            let found = self.page(&text, Some("/"), page.take(), None).await?;
            // An empty folder that was one may still be shown, under its own name.
            let name = |path: &Path| Some(path.as_ref().strip_prefix(&text)?.to_owned());
            objects.extend(found.result.objects.iter().filter_map(|object| name(&object.location)));
            folders.extend(found.result.common_prefixes.iter().filter_map(name));
            match found.page_token {
                Some(next) => page = Some(next),
                None => return Ok((objects, folders)),
            }
        }
    }

    /// One page of a list.
    async fn page(
        &self,
        prefix: &str,
        delimiter: Option<&'static str>,
        page_token: Option<String>,
        max_keys: Option<usize>,
    ) -> Result<object_store::list::PaginatedListResult, Failure> {
        let ask = |_| async {
            let options = PaginatedListOptions {
                delimiter: delimiter.map(Into::into),
                page_token: page_token.clone(),
                max_keys,
                ..PaginatedListOptions::default()
            };
            self.once(0, self.s3.list_paginated(Some(prefix), options)).await.map_err(|failure| {
                // A list has no name that could be absent: the server is confused, or is none.
                match failure.kind() {
                    FailureKind::Absent => Failure::new(FailureKind::Busy, failure.to_string()),
                    _ => failure,
                }
            })
        };
        Ok(self.patience.persist(ask).await?.0)
    }

    /// This process is about to write it.
    pub(crate) fn note_written(&self, path: &Path) {
        self.witness().note_written(path);
    }

    fn witness(&self) -> MutexGuard<'_, Witness> {
        self.witness.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the list of names shows this one.
    async fn is_listed(&self, path: &Path) -> Result<bool, Failure> {
        let prefix = self.org_prefix(path);
        // A pointer that is taken for absent costs a home, so an earlier list is no witness for one.
        let is_of_home = prefix.as_ref().is_some_and(|org| {
            path.as_ref().strip_prefix(org.as_str()).is_some_and(|key| key.starts_with(HOMES_DIR))
        });
        if !is_of_home && self.witness().lacks(path) {
            return Ok(false);
        }
        if let Some(prefix) = prefix {
            let writes_before = self.witness().writes();
            let taken = Instant::now();
            let found = self.page(&prefix, None, None, Some(NAMES_MAX)).await?;
            let names = found.result.objects.iter().map(|object| object.location.to_string()).collect();
            let shown = NamesShown::new(taken, prefix, names, found.page_token.is_some());
            let is_shown = shown.shows(path);
            self.witness().keep(shown, writes_before);
            if let Some(is_shown) = is_shown {
                return Ok(is_shown);
            }
        }
        let found = self.page(path.as_ref(), None, None, Some(1)).await?;
        Ok(found.result.objects.iter().any(|object| object.location == *path))
    }

    /// What the names of all files of the org begin with that `path` belongs to.
    fn org_prefix(&self, path: &Path) -> Option<String> {
        let prefix = self.place.prefix();
        let start = if prefix.is_empty() { "orgs/".to_owned() } else { format!("{prefix}/orgs/") };
        let (org, _) = path.as_ref().strip_prefix(&start)?.split_once('/')?;
        Some(format!("{start}{org}/"))
    }

    /// Asks again as long as the answer "not there" is contradicted by the list; absent only when both say so.
    async fn unless_listed<T>(
        &self,
        path: &Path,
        attempt: impl AsyncFn() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let attempt = &attempt;
        let ask = |_| async move {
            match attempt().await {
                Err(failure) if failure.kind() == FailureKind::Absent => match self.is_listed(path).await? {
                    false => Err(failure),
                    true => {
                        let text = "it is listed, and said not to be there".to_owned();
                        Err(Failure::new(FailureKind::Busy, text))
                    }
                },
                other => other,
            }
        };
        self.patience.persist(ask).await
    }

    /// What is known of an object without reading it.
    pub(crate) async fn head(&self, path: &Path) -> Result<ObjectMeta, Failure> {
        self.unless_listed(path, async || Ok(self.once(0, self.s3.head(path)).await?.0)).await
    }

    /// A range of an object; shorter only where the object ends. The second value is the object's length.
    pub(crate) async fn range(&self, path: &Path, range: GetRange) -> Result<(Bytes, u64), Failure> {
        let wanted = match &range {
            GetRange::Bounded(range) => range.end - range.start,
            GetRange::Suffix(len) => *len,
            GetRange::Offset(_) => 0,
        };
        self.unless_listed(path, async || {
            let options = GetOptions { range: Some(range.clone()), ..GetOptions::default() };
            let read = async {
                let got = self.s3.get_opts(path, options).await?;
                let (size, sent) = (got.meta.size, got.range.clone());
                Ok((got.bytes().await?, size, sent))
            };
            let ((bytes, size, sent), _) = self.once(wanted as usize, read).await?;
            let right = match &range {
                GetRange::Bounded(range) => range.start..range.end.min(size),
                GetRange::Suffix(len) => size.saturating_sub(*len)..size,
                GetRange::Offset(start) => *start..size,
            };
            if sent != right || bytes.len() as u64 != right.end.saturating_sub(right.start) {
                return Err(Failure::new(
                    FailureKind::Damaged,
                    "the answer is another range than was asked for",
                ));
            }
            Ok((bytes, size))
        })
        .await
    }

    /// All of a small object; `limit` is in bytes.
    pub(crate) async fn whole(&self, path: &Path, limit: u64) -> Result<Found, Failure> {
        self.unless_listed(path, async || {
            let found = self.whole_once(path, limit).await?;
            if self.trusts_etags() && !is_checksum_of(&found.etag, &found.bytes) {
                let text = "the answer does not have the checksum of its ETag";
                return Err(Failure::new(FailureKind::Damaged, text));
            }
            Ok(found)
        })
        .await
    }

    /// The same, where it is not known yet what entity tags are, and where the next step is a put under the condition that
    /// the object is not there: so "not there" needs no second witness.
    pub(crate) async fn whole_unchecked(&self, path: &Path, limit: u64) -> Result<Found, Failure> {
        self.patience.persist(|_| self.whole_once(path, limit)).await
    }

    async fn whole_once(&self, path: &Path, limit: u64) -> Result<Found, Failure> {
        let read = async {
            let got: GetResult = self.s3.get_opts(path, GetOptions::default()).await?;
            let (meta, attributes) = (got.meta.clone(), got.attributes.clone());
            let bytes = if meta.size > limit { Bytes::new() } else { got.bytes().await? };
            Ok((meta, attributes, bytes))
        };
        let ((meta, attributes, bytes), _) = self.once(limit as usize, read).await?;
        if meta.size > limit {
            let text = format!("it has {} bytes, and {limit} are allowed", meta.size);
            return Err(Failure::new(FailureKind::Refused, text));
        }
        if bytes.len() as u64 != meta.size {
            return Err(Failure::new(FailureKind::Damaged, "the answer breaks off"));
        }
        let etag = meta.e_tag.ok_or_else(|| {
            Failure::new(FailureKind::Refused, "the server sends no ETag, so writers could not be told apart")
        })?;
        let said = |name: &'static str| {
            attributes.get(&Attribute::Metadata(name.into())).map(|value| value.to_string())
        };
        Ok(Found { bytes, etag, write: said(WRITE_ATTRIBUTE), replaces: said(REPLACES_ATTRIBUTE) })
    }

    /// Deletes an object, whether it is there or not.
    pub(crate) async fn delete(&self, path: &Path) -> Result<(), Failure> {
        let ask = |_| async {
            match self.once(0, self.s3.delete(path)).await {
                Ok(((), _)) => Ok(()),
                Err(failure) if failure.kind() == FailureKind::Absent => Ok(()),
                Err(failure) => Err(failure),
            }
        };
        self.patience.persist(ask).await
    }
}

/// The MD5 that S3 uses as the entity tag of an object that was put in one piece.
pub(crate) fn checksum<'a>(pieces: impl IntoIterator<Item = &'a Bytes>) -> [u8; 16] {
    let mut hasher = Md5::new();
    pieces.into_iter().for_each(|piece| hasher.update(piece));
    hasher.finalize().into()
}

/// A checksum as an entity tag writes it, without quotes.
pub(crate) fn hex(checksum: &[u8]) -> String {
    checksum.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn is_checksum_of(etag: &str, bytes: &Bytes) -> bool {
    etag_text(etag) == hex(&checksum([bytes]))
}

/// An entity tag without its quotes.
pub(crate) fn etag_text(etag: &str) -> String {
    etag.trim_matches('"').to_ascii_lowercase()
}

/// The last cause says what happened; those before it say where.
fn innermost(error: &object_store::Error) -> String {
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        words = inner.to_string();
        cause = inner.source();
    }
    words
}
