//! A running server: the parts and their end.
//!
//! Starting gives back what the last server held, then drives on every session that it left open. Stopping
//! ends streams, drivers and links; whatever is under way is in the journal and is driven on by the next
//! start. What does not belong here: binding sockets, reading configuration.

use std::sync::Arc;
use std::time::Duration;

use covey_types::{HomeId, OrgId};
use covey_wire::runner::ServerToRunner;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::collect::{self, CollectConfig, CollectorError};
use crate::db::leases::ServerPlace;
use crate::db::{self, Db, DbError};
use crate::drive::{self, Context, Live};
use crate::http::Api;
use crate::link::{self, Links, Trust};
use crate::model::Model;
use crate::stores::Stores;

/// A server that cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The database does not let it.
    #[error("the server cannot take over the database")]
    Db(#[from] DbError),
    /// The home store is somebody else's, who would delete what this server puts there.
    #[error(transparent)]
    Store(CollectorError),
}

/// Where homes are kept, and when what nobody needs goes.
#[derive(Debug, Clone)]
pub struct Homes {
    /// The orgs' stores.
    pub stores: Stores,
    /// When their garbage is collected.
    pub collect: CollectConfig,
}

/// Takes charge of every org's store before anything is put there: a collection that is started beside the server would
/// take all of it for garbage.
async fn take_charge(db: &Db, stores: &Stores) -> Result<(), StartError> {
    for org in db.all_orgs().await? {
        let database = db.clone();
        let taken = stores.with(org, move |store| collect::take_charge(&database, store, org)).await;
        // A store that cannot be reached now must not keep the server from starting: work goes on without it, and the
        // next collection does this again.
        let error = match taken {
            Ok(Ok(())) => continue,
            Ok(Err(error @ CollectorError::Foreign { .. })) => return Err(StartError::Store(error)),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        tracing::warn!(%org, error, "cannot say in the home store that it is a server's");
    }
    Ok(())
}

/// How long a server that ends waits for calls of models, so that their answers are not paid for twice.
pub const HAND_OVER_MAX: Duration = Duration::from_secs(30);

/// Who names what is needed in a store that a server uses.
pub const SERVED: &str = "the database of a server";

/// A running server.
#[derive(Debug)]
pub struct Server {
    org: OrgId,
    api: Api,
    context: Context,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Server {
    /// Takes over the database, starts driving, and keeps the homes' stores free of garbage, if there are any. Needs a
    /// tokio runtime.
    ///
    /// # Errors
    /// When the database fails, or a home store is somebody else's.
    pub async fn start(db: Db, model: Arc<dyn Model>, homes: Option<Homes>) -> Result<Self, StartError> {
        let org = db.take_over().await?;
        Self::start_as(org, db, model, homes).await
    }

    /// As [`start`](Self::start), as one of any number of servers on the database. Their homes must be in one store.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn start_among(
        db: Db,
        model: Arc<dyn Model>,
        homes: Option<Homes>,
        place: &ServerPlace,
    ) -> Result<Self, StartError> {
        let org = db.join(place).await?;
        Self::start_as(org, db, model, homes).await
    }

    async fn start_as(
        org: OrgId,
        db: Db,
        model: Arc<dyn Model>,
        homes: Option<Homes>,
    ) -> Result<Self, StartError> {
        if let Some(homes) = &homes {
            take_charge(&db, &homes.stores).await?;
        }
        let stop = CancellationToken::new();
        let context = Context::new(db.clone(), model, Links::new(db.clone()));
        let tasks = TaskTracker::new();
        let supervised = drive::supervise(context.clone(), stop.clone());
        let failed = stop.clone();
        tasks.spawn(async move {
            if let Err(e) = supervised.await {
                tracing::error!(error = %e, "sessions cannot be driven; the server stops");
                failed.cancel();
            }
        });
        let api = Api::new(db, homes, Some(context.links.clone()), stop.clone());
        if let Some(collector) = api.collector() {
            tasks.spawn(collector.clone().keep_collecting(stop.clone()));
        }
        Ok(Self { org, api, context, stop, tasks })
    }

    /// The org that a fresh installation has.
    pub const fn default_org(&self) -> OrgId {
        self.org
    }

    /// The API, for serving.
    pub const fn api(&self) -> &Api {
        &self.api
    }

    /// The database.
    pub const fn db(&self) -> &Db {
        &self.context.db
    }

    /// What is shown while it happens.
    pub const fn live(&self) -> &Live {
        &self.context.live
    }

    /// Cancelled when the server stops, by [`shutdown`](Self::shutdown) or by itself after an error.
    pub const fn stopping(&self) -> &CancellationToken {
        &self.stop
    }

    /// Where runners of this trust come in.
    pub fn runner_gate(&self, trust: Trust) -> RunnerGate {
        let (links, stop, tasks) = (self.context.links.clone(), self.stop.clone(), self.tasks.clone());
        RunnerGate { links, stop, tasks, trust }
    }

    /// Asks the runner that holds a home to secure it now. False when no connected runner holds it; then what
    /// is published is all there is.
    ///
    /// # Errors
    /// When the database fails or has no such home.
    pub async fn secure_home(&self, org: OrgId, home: HomeId) -> Result<bool, DbError> {
        let row = self.context.db.home(org, home).await?;
        let secure = ServerToRunner::SecureHome { home, token: row.lease_token };
        Ok(self.holder(org, &row).is_some_and(|outbox| outbox.send(secure).is_ok()))
    }

    /// Asks the runner that holds a home to end its sandbox: stop, secure, publish. False when no connected
    /// runner holds it. A call that runs gets an error result; the next one starts a new sandbox.
    ///
    /// # Errors
    /// When the database fails or has no such home.
    pub async fn stop_sandbox(&self, org: OrgId, home: HomeId) -> Result<bool, DbError> {
        let row = self.context.db.home(org, home).await?;
        let stop = ServerToRunner::StopSandbox { home, token: row.lease_token };
        Ok(self.holder(org, &row).is_some_and(|outbox| outbox.send(stop).is_ok()))
    }

    fn holder(&self, org: OrgId, home: &db::homes::Home) -> Option<link::Outbox> {
        self.context.links.holder(org, home.id, home.lease_runner)
    }

    /// Ends streams, drivers and links, and waits for them. Nothing is lost: what is under way is driven on by
    /// the next start, or by another server: if there are any, each session is handed over at its next border first, for
    /// [`HAND_OVER_MAX`] at most.
    pub async fn shutdown(self) {
        let db = &self.context.db;
        if db.standing().borrow().instance().is_some() {
            if let Err(error) = db.drain().await {
                tracing::warn!(%error, "other servers cannot be told that this one ends; they see it when it has");
            }
            if tokio::time::timeout(HAND_OVER_MAX, self.context.hand_over()).await.is_err() {
                tracing::info!(
                    "some calls of models are cut off after {HAND_OVER_MAX:?}; they are made again elsewhere"
                );
            }
        }
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.api.finished().await;
        if let Err(error) = self.context.db.leave().await {
            tracing::debug!(%error, "the lease could not be given back; it ends with the connection");
        }
    }
}

/// Takes runners in; outlives no server: after its end every stream is closed at once.
#[derive(Debug, Clone)]
pub struct RunnerGate {
    links: Links,
    stop: CancellationToken,
    tasks: TaskTracker,
    trust: Trust,
}

impl RunnerGate {
    /// Serves a runner over a byte stream, in the background, until the link or the server ends. Dropping the
    /// other end of the stream ends it.
    pub fn accept<S>(&self, stream: S)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Self { links, stop, tasks, trust } = self.clone();
        tasks.spawn(async move {
            let end = link::serve(stream, &links, trust, &stop).await;
            tracing::debug!(reason = %end, "link served");
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A dropped server must not go on driving behind its owner's back.
        self.stop.cancel();
    }
}
