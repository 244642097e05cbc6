//! What is in a home's snapshots: trees, files, differences, usage.

use std::io::{self, Read as _, Write as _};

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use covey_home::usage::shares;
use covey_home::view::FileReader;
use covey_types::{Fault, Generation, HomeId, OrgId, SessionId};
use covey_wire::api::history::{
    Diff, GenerationName, Tree, USAGE_DEPTH_MAX, USAGE_PARTS_DEFAULT, USAGE_PARTS_MAX, Usage,
};
use tokio::sync::oneshot;

use super::error::{ApiError, Result};
use super::extract::{Caller, IdInPath};
use super::fields::Query;
use super::homes::generation_of;
use super::{Api, page, pieces};
use crate::history::{self, At, DiffRequest, PathCursor, TreeRequest, UsageRequest, path_of};

pub(super) async fn tree(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    query: Query,
) -> Result<Json<Tree>> {
    let (path, recursive) = (path_in(&query)?, query.flag("recursive")?);
    let (limit, after) = (page::limit(&query)?, page::after::<PathCursor>(&query)?);
    let at = snapshot(&api, caller.org, id, generation(&query, "generation")?).await?;
    let looked = move |store: &covey_home::PackStore| {
        let request = TreeRequest { path: &path, recursive, after: after.as_ref(), limit };
        history::tree(store, &at, &request)
    };
    Ok(Json(api.stores()?.with(caller.org, looked).await??))
}

pub(super) async fn diff(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    query: Query,
) -> Result<Json<Diff>> {
    let (path, texts) = (path_in(&query)?, query.flag("texts")?);
    let (limit, after) = (page::limit(&query)?, page::after::<PathCursor>(&query)?);
    let (from, to) = match query.one("session") {
        Some(session) => {
            if query.one("from").is_some() || query.one("to").is_some() {
                return Err(ApiError::invalid("give `session`, or `from` and `to`, not both"));
            }
            let session =
                session.parse().map_err(|error| ApiError::invalid(format!("`session`: {error}")))?;
            of_session(&api, caller.org, id, session).await?
        }
        None => {
            let from = match query.one("from") {
                None => GenerationName::Before(1),
                Some(_) => generation(&query, "from")?,
            };
            let from = match from {
                GenerationName::Number(0) => None,
                from => Some(snapshot(&api, caller.org, id, from).await?),
            };
            (from, snapshot(&api, caller.org, id, generation(&query, "to")?).await?)
        }
    };
    let compared = move |store: &covey_home::PackStore| {
        let request = DiffRequest { path: &path, texts, after: after.as_ref(), limit };
        history::diff(store, from.as_ref(), &to, &request)
    };
    Ok(Json(api.stores()?.with(caller.org, compared).await??))
}

/// What a session did: from the snapshot that it found to the last that it made.
async fn of_session(api: &Api, org: OrgId, id: HomeId, session: SessionId) -> Result<(Option<At>, At)> {
    let read = api.inner.db.home_span(org, session);
    let (home, base, last) = read.await?;
    if home != id {
        return Err(ApiError::invalid(format!("session {session} works in {home}, not in {id}")));
    }
    let (Some(base), Some(last)) = (base, last) else {
        let text = format!("session {session} has published nothing in {id}; there is nothing to compare");
        return Err(ApiError::new(Fault::NotFound, text));
    };
    let from = match base {
        Generation(0) => None,
        base => Some(snapshot(api, org, id, GenerationName::Number(base.0)).await?),
    };
    Ok((from, snapshot(api, org, id, GenerationName::Number(last.0)).await?))
}

pub(super) async fn usage(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    query: Query,
) -> Result<Json<Usage>> {
    let (path, wants_shares) = (path_in(&query)?, query.flag("shares")?);
    let depth = number(&query, "depth", 1)?.clamp(1, USAGE_DEPTH_MAX);
    let parts = number(&query, "parts", USAGE_PARTS_DEFAULT)?.min(USAGE_PARTS_MAX);
    let (org, at) = (caller.org, snapshot(&api, caller.org, id, generation(&query, "generation")?).await?);
    let db = &api.inner.db;
    let snapshots = db.count_snapshots(org, id).await?;
    let (own, others) = match wants_shares {
        true => {
            (db.snapshot_roots(org, Some(id), None).await?, db.snapshot_roots(org, None, Some(id)).await?)
        }
        false => (Vec::new(), Vec::new()),
    };
    let counted = move |store: &covey_home::PackStore| -> Result<Usage> {
        let shares = match wants_shares {
            true => Some(shares(store, &own, &others).map_err(|error| ApiError::of(error.fault(), &error))?),
            false => None,
        };
        let request = UsageRequest { path: &path, depth, parts, snapshots, shares };
        Ok(history::usage(store, &at, &request)?)
    };
    Ok(Json(api.stores()?.with(org, counted).await??))
}

/// The bytes of a regular file. A symbolic link is not followed: the answer says where it points to.
pub(super) async fn file(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    query: Query,
    headers: HeaderMap,
) -> Result<Response> {
    let (path, org) = (path_in(&query)?, caller.org);
    let at = snapshot(&api, org, id, generation(&query, "generation")?).await?;
    let stores = api.stores()?.clone();
    let range = headers.get(header::RANGE).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let (mut writer, body) = pieces::body();
    let (size_known, size) = oneshot::channel();
    // Not waited for: it feeds the body and ends with it.
    tokio::spawn(async move {
        let read = stores.with(org, move |store| {
            let opened = history::open_file(store, &at, &path).map_err(ApiError::from);
            let opened = opened.and_then(|reader| Ok((Part::of(range.as_deref(), reader.size())?, reader)));
            let (opened, reader) = match opened {
                Ok((part, reader)) => (Ok(part), Some((reader, part))),
                Err(error) => (Err(error), None),
            };
            // Nobody listens any more: then nobody reads either.
            let (true, Some((mut reader, part))) = (size_known.send(opened).is_ok(), reader) else { return };
            let copied = copy(&mut reader, &part, &mut writer);
            if let Err(error) = &copied {
                tracing::info!(%error, "a file of a home is not sent to its end");
            }
            writer.end(copied);
        });
        if let Err(error) = read.await {
            tracing::warn!(%error, "a file of a home is not read");
        }
    });
    let gone = |_| ApiError::new(Fault::Retry, "the home store cannot be read now; try again");
    let part = size.await.map_err(gone)??;
    let mut response = (part.status(), body).into_response();
    let head = response.headers_mut();
    head.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    // Whatever an agent wrote is data, also to a browser that believes to know better.
    head.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    head.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    head.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    head.insert(header::CONTENT_LENGTH, HeaderValue::from(part.len));
    if let Some(range) = part.content_range() {
        head.insert(header::CONTENT_RANGE, range);
    }
    head.insert("covey-generation", HeaderValue::from(at.generation.0));
    Ok(response)
}

fn copy(reader: &mut FileReader<'_>, part: &Part, out: &mut pieces::PieceWriter) -> io::Result<()> {
    reader.skip_to(part.start)?;
    let copied = io::copy(&mut reader.take(part.len), out)?;
    if copied != part.len {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    out.flush()
}

/// Which bytes of a file are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    start: u64,
    len: u64,
    size: u64,
    is_whole: bool,
}

impl Part {
    /// One range of bytes; several, other units and what cannot be understood are answered with the whole file, as
    /// HTTP has it.
    fn of(range: Option<&str>, size: u64) -> Result<Self> {
        let whole = Self { start: 0, len: size, size, is_whole: true };
        let Some((first, last)) = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'))
        else {
            return Ok(whole);
        };
        let (start, end) = match (first.trim().parse::<u64>(), last.trim().parse::<u64>()) {
            (Ok(first), Ok(last)) if first <= last => (first, last.saturating_add(1).min(size)),
            (Ok(first), Err(_)) if last.trim().is_empty() => (first, size),
            (Err(_), Ok(last)) if first.trim().is_empty() && last > 0 => (size.saturating_sub(last), size),
            _ => return Ok(whole),
        };
        if start >= size {
            return Err(ApiError::beyond_the_end(size));
        }
        Ok(Self { start, len: end - start, size, is_whole: false })
    }

    const fn status(&self) -> StatusCode {
        if self.is_whole { StatusCode::OK } else { StatusCode::PARTIAL_CONTENT }
    }

    fn content_range(&self) -> Option<HeaderValue> {
        let text =
            format!("bytes {}-{}/{}", self.start, (self.start + self.len).saturating_sub(1), self.size);
        HeaderValue::try_from(text).ok().filter(|_| !self.is_whole)
    }
}

/// The path that a query names.
fn path_in(query: &Query) -> Result<Vec<u8>> {
    path_of(query.one("path"), query.one("path_base64")).map_err(ApiError::invalid)
}

fn number(query: &Query, name: &str, default: usize) -> Result<usize> {
    let Some(text) = query.one(name) else { return Ok(default) };
    text.parse().map_err(|_| ApiError::invalid(format!("`{name}`: expected a whole number")))
}

pub(super) fn generation(query: &Query, name: &str) -> Result<GenerationName> {
    generation_of(query.one(name), None)
}

/// The snapshot that is meant.
pub(super) async fn snapshot(api: &Api, org: OrgId, id: HomeId, name: GenerationName) -> Result<At> {
    let found = api.inner.db.snapshot(org, id, name).await?;
    Ok(At { generation: found.snapshot.generation, root: found.snapshot.root })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_to_the_file_and_a_strange_one_is_the_whole() {
        let part = |range: &str| {
            Part::of(Some(range), 100).map(|part| (part.start, part.len, part.status().as_u16())).ok()
        };
        assert_eq!(part("bytes=0-9"), Some((0, 10, 206)));
        assert_eq!(part("bytes=90-"), Some((90, 10, 206)));
        assert_eq!(part("bytes=90-500"), Some((90, 10, 206)));
        assert_eq!(part("bytes=-30"), Some((70, 30, 206)));
        assert_eq!(part("bytes=-300"), Some((0, 100, 206)));
        for whole in ["bytes=9-3", "bytes=0-1,3-4", "lines=0-1", "bytes=x-y", "bytes=-0", "bytes"] {
            assert_eq!(part(whole), Some((0, 100, 200)), "{whole}");
        }
        assert_eq!(part("bytes=100-"), None);
        assert_eq!(Part::of(Some("bytes=0-0"), 0).ok(), None);
        let range = Part::of(Some("bytes=0-9"), 100).unwrap().content_range().unwrap();
        assert_eq!(range, "bytes 0-9/100");
    }
}
