//! The public HTTP API: the routes of the Managed Agents API that a full loop needs, and Covey's own under
//! `/v1/covey/`.
//!
//! Handlers are thin: they read the request, run one named database operation, and write the answer. The org comes
//! from the token and goes into every query, so what belongs to another org does not exist here. What does not
//! belong here: SQL, what follows from an event, and anything that waits for a model or a sandbox.

mod agents;
mod archive;
mod contents;
mod covey;
mod environments;
mod error;
mod events;
mod extract;
mod fields;
mod homes;
mod page;
mod pieces;
mod rules;
mod runner_link;
mod sessions;
mod store;
mod stream;
mod tokens;

use std::collections::HashMap;
use std::future::IntoFuture as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::http::HeaderValue;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use covey_types::TokenId;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::error::{ApiError, REQUEST_ID};
use crate::collect::Collector;
use crate::db::Db;
use crate::link::Links;
use crate::server::Homes;
use crate::stores::Stores;

/// Event streams that may be open at the same time; more are refused with 429.
pub const STREAMS_MAX: usize = 1024;

/// How long a stopping server waits for open requests. A client that reads nothing must not keep it alive; whoever
/// is cut off finds everything in the journal.
pub const DRAIN_TIME_MAX: Duration = Duration::from_secs(5);

/// What the handlers share. Clones are the same API.
#[derive(Debug, Clone)]
pub struct Api {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    db: Db,
    stop: CancellationToken,
    tasks: TaskTracker,
    streams: Arc<Semaphore>,
    /// None when the server keeps no homes.
    stores: Option<Stores>,
    /// Likewise.
    collector: Option<Collector>,
    /// None where no runner dials in.
    links: Option<Links>,
    /// When a token's use was last written down; one entry per valid token that was seen.
    token_uses: Mutex<HashMap<TokenId, Instant>>,
}

impl Api {
    /// Makes an API over `db` and the homes' stores, if there are any. When `stop` is cancelled, open event streams
    /// end.
    pub fn new(db: Db, homes: Option<Homes>, links: Option<Links>, stop: CancellationToken) -> Self {
        let (streams, tasks) = (Arc::new(Semaphore::new(STREAMS_MAX)), TaskTracker::new());
        let stores = homes.as_ref().map(|homes| homes.stores.clone());
        let collector = homes.map(|homes| Collector::new(db.clone(), homes));
        let token_uses = Mutex::default();
        let inner = Inner { db, stop, tasks, streams, stores, collector, links, token_uses };
        Self { inner: Arc::new(inner) }
    }

    /// The homes' stores.
    fn stores(&self) -> Result<&Stores, ApiError> {
        let text = "this server keeps no homes (COVEY_HOME_STORE=false), so there is nothing to look into";
        self.inner.stores.as_ref().ok_or_else(|| ApiError::invalid(text))
    }

    /// What collects the homes' stores.
    pub(crate) fn collector(&self) -> Option<&Collector> {
        self.inner.collector.as_ref()
    }

    /// The routes, to be served or merged with others.
    pub fn router(&self) -> Router {
        let agents = Router::new()
            .route("/", get(agents::list).post(agents::create))
            .route("/{agent}", get(agents::get).post(agents::update).delete(agents::delete))
            .route("/{agent}/archive", post(agents::archive))
            .route("/{agent}/versions", get(agents::versions));
        let environments = Router::new()
            .route("/", get(environments::list).post(environments::create))
            .route(
                "/{environment}",
                get(environments::get).post(environments::update).delete(environments::delete),
            )
            .route("/{environment}/archive", post(environments::archive));
        let sessions = Router::new()
            .route("/", get(sessions::list).post(sessions::create))
            .route("/{session}", get(sessions::get).post(sessions::update).delete(sessions::delete))
            .route("/{session}/archive", post(sessions::archive))
            .route("/{session}/events", get(events::list).post(events::send))
            .route("/{session}/events/stream", get(events::stream));
        let covey = Router::new()
            .route("/homes", get(homes::list))
            .route("/homes/{home}", get(homes::get))
            .route("/homes/{home}/snapshots", get(homes::snapshots))
            .route("/homes/{home}/import", post(homes::import))
            .route("/homes/{home}/restore", post(homes::restore))
            .route("/homes/{home}/fork", post(homes::fork))
            .route("/homes/{home}/tree", get(contents::tree))
            .route("/homes/{home}/file", get(contents::file))
            .route("/homes/{home}/diff", get(contents::diff))
            .route("/homes/{home}/usage", get(contents::usage))
            .route("/homes/{home}/archive", get(archive::export).put(archive::import))
            .route("/homes/{home}/rules", get(rules::of_home).put(rules::set_home))
            .route("/rules", get(rules::of_org).put(rules::set_org))
            .route("/store", get(store::get))
            .route("/store/collect", post(store::collect))
            .route("/runners", get(covey::runners))
            .route("/runners/link", get(runner_link::take_in))
            .route("/tokens", get(tokens::list).post(tokens::create))
            .route("/tokens/{token}/revoke", post(tokens::revoke))
            .route("/sessions/{session}/records", get(covey::records));
        Router::new()
            .route("/healthz", get(covey::health))
            .nest("/v1/agents", agents)
            .nest("/v1/environments", environments)
            .nest("/v1/sessions", sessions)
            .nest("/v1/covey", covey)
            .fallback(no_route)
            .method_not_allowed_fallback(no_method)
            .layer(middleware::from_fn(with_request_id))
            .with_state(self.clone())
    }

    /// Waits until every event stream has ended; call after `stop` was cancelled.
    pub async fn finished(&self) {
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }
}

/// Serves `router` on `listener` until the API's `stop` is cancelled; then ends its streams and waits for open
/// requests, but not longer than [`DRAIN_TIME_MAX`].
///
/// # Errors
/// When the listener fails.
pub async fn serve(listener: TcpListener, router: Router, api: &Api) -> std::io::Result<()> {
    let stop = &api.inner.stop;
    let serving = axum::serve(listener, router).with_graceful_shutdown(stop.clone().cancelled_owned());
    let too_long = async {
        stop.cancelled().await;
        tokio::time::sleep(DRAIN_TIME_MAX).await;
    };
    let served = tokio::select! {
        served = serving.into_future() => served,
        () = too_long => {
            tracing::info!("stopped with open connections: a client did not read or send for {DRAIN_TIME_MAX:?}");
            Ok(())
        }
    };
    api.finished().await;
    served
}

async fn no_route(request: Request) -> ApiError {
    ApiError::not_found("route", request.uri().path())
}

async fn no_method(request: Request) -> ApiError {
    ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
}

async fn with_request_id(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if !response.headers().contains_key(REQUEST_ID)
        && let Ok(id) = HeaderValue::try_from(format!("req_{}", uuid::Uuid::now_v7().simple()))
    {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}
