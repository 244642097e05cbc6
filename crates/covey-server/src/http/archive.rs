//! `/v1/covey/homes/{id}/archive`: a snapshot as a tar stream, out and in.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use covey_home::NoProgress;
use covey_home::archive::{self, ArchiveError};
use covey_home::object::read_root;
use covey_home::view::ViewError;
use covey_types::{Fault, Generation, HomeId};
use covey_wire::api::history::ArchiveImported;
use tokio::sync::oneshot;

use super::contents::{generation, snapshot};
use super::error::{ApiError, Result};
use super::extract::{Caller, IdInPath};
use super::fields::Query;
use super::homes::replaced;
use super::{Api, pieces};
use crate::db::snapshots::{Origin, Replacement};

/// Of what follows an archive's end mark, so much is read.
const PADDING_BYTES_MAX: u64 = 64 * 1024 * 1024;

pub(super) async fn export(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    query: Query,
) -> Result<Response> {
    let org = caller.org;
    let at = snapshot(&api, org, id, generation(&query, "generation")?).await?;
    let stores = api.stores()?.clone();
    let (mut writer, body) = pieces::body();
    let (begun, begins) = oneshot::channel();
    // Not waited for: it feeds the body and ends with it.
    tokio::spawn(async move {
        let written = stores.with(org, move |store| {
            // What cannot even begin is answered in words; later on, only breaking off is left.
            let root = read_root(store, &at.root).map(|_| ());
            let is_readable = root.is_ok();
            let root = root.map_err(|source| ViewError::Object { path: String::new(), source });
            if begun.send(root).is_err() || !is_readable {
                return;
            }
            let exported = archive::export(store, &at.root, &mut writer, &NoProgress);
            if let Err(error) = &exported {
                tracing::warn!(%error, "an archive of a home is not sent to its end");
            }
            writer.end(exported.map(|_| ()).map_err(std::io::Error::other));
        });
        if let Err(error) = written.await {
            tracing::warn!(%error, "an archive of a home is not written");
        }
    });
    let gone = |_| ApiError::new(Fault::Retry, "the home store cannot be read now; try again");
    begins.await.map_err(gone)??;
    let mut response = body.into_response();
    let head = response.headers_mut();
    head.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar"));
    head.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment; filename=\"home.tar\""));
    head.insert("covey-generation", HeaderValue::from(at.generation.0));
    Ok(response)
}

/// Ends what nobody waits for any more.
struct Cancel(Arc<AtomicBool>);

impl Drop for Cancel {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub(super) async fn import(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    query: Query,
    body: Body,
) -> Result<Json<ArchiveImported>> {
    let (org, force) = (caller.org, query.flag("force")?);
    let wrong = |_| ApiError::invalid("`base_generation`: expected a whole number of at least 0");
    let base =
        query.one("base_generation").map(|text| text.parse().map(Generation).map_err(wrong)).transpose()?;
    let home = api.inner.db.home(org, id).await?;
    if home.lease_held {
        // Said before everything is sent; it is asked again when the pointer moves.
        let session = home.lease_session.map_or_else(String::new, |session| format!(" {session}"));
        let text = format!("session{session} acts on home {id}; wait until it is idle, then try again");
        return Err(ApiError::new(Fault::Conflict, text));
    }
    let base = base.unwrap_or(home.generation);
    let (mut reader, forward) = pieces::reader();
    let cancel = Cancel(Arc::default());
    let cancelled = Arc::clone(&cancel.0);
    let imported = api.stores()?.with(org, move |store| {
        let imported = archive::import(store, &mut reader, &cancelled, &NoProgress)?;
        // What follows the archive's end mark is padding; a body that breaks off there is not whole either.
        std::io::copy(&mut reader.take(PADDING_BYTES_MAX), &mut std::io::sink())
            .map_err(ArchiveError::Stream)?;
        Ok::<_, ArchiveError>(imported)
    });
    let ((), imported) = tokio::join!(forward.run(body), imported);
    let imported = imported?.map_err(|error| match &error {
        ArchiveError::Stream(_) => ApiError::of(Fault::Invalid, &error),
        error => ApiError::of(error.fault(), error),
    })?;
    drop(cancel);
    let (root, report) = (imported.root, imported.report);
    let with = Replacement {
        base: Some(base),
        root,
        files: report.files,
        bytes: report.bytes,
        epoch: Some(imported.epoch),
        origin: Origin::Imported,
        from: None,
        over_unsecured: force,
    };
    let generation = api.inner.db.replace_home(org, id, &with).await?;
    Ok(Json(ArchiveImported {
        home: replaced(id, generation, root, report.files, report.bytes),
        entries: report.entries,
        skipped: report.skipped,
        skipped_paths: report.skipped_paths,
    }))
}
