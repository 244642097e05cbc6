//! The drivers: one task per session that has something to do, and the supervisor that keeps it so.
//!
//! A session needs a driver when a turn is open or a user event waits; that is a question to the database and
//! nothing else, so nothing is forgotten when a server dies. A driver claims the session first, and stops at
//! once when somebody else does (I5). What does not belong here: what comes next in a session
//! (`covey-harness`), SQL.

mod driver;
mod facts;
mod live;
mod wake;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use covey_types::{OrgId, SessionId};
use tokio::sync::{Semaphore, watch};
use tokio::task::{Id, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::db::{Db, DbError};
use crate::link::Links;
use crate::model::Model;

pub use driver::{ANSWER_WAIT_MAX, TOOL_WAIT_MAX, WAKE_WAIT_MAX};
pub use live::{Delta, LIVE_DELTAS_MAX, Live};

/// Sessions that are driven at the same time; more wait for one of them to come to rest.
pub const DRIVERS_MAX: usize = 4096;
/// How often it is looked whether any session needs a driver that has none.
const LOOK_PERIOD: Duration = Duration::from_secs(60);
/// Wait before a driver that failed is started again; each further failure in a row doubles it.
const RESTART_WAIT_FIRST: Duration = Duration::from_millis(200);
/// The longest of these waits.
const RESTART_WAIT_LONGEST: Duration = Duration::from_secs(30);

/// What the drivers share. Clones are the same.
#[derive(Clone)]
pub struct Context {
    /// The database.
    pub db: Db,
    /// Who answers model calls.
    pub model: Arc<dyn Model>,
    /// The runners.
    pub links: Links,
    /// What is shown while it happens.
    pub live: Live,
    /// Changes when a home's lease is given back.
    released: Arc<watch::Sender<u64>>,
    permits: Arc<Semaphore>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

impl Context {
    /// Puts the parts together.
    pub fn new(db: Db, model: Arc<dyn Model>, links: Links) -> Self {
        Self {
            db,
            model,
            links,
            live: Live::default(),
            released: Arc::new(watch::channel(0).0),
            permits: Arc::new(Semaphore::new(DRIVERS_MAX)),
        }
    }
}

/// Runs drivers until `stop` is cancelled: first those that the last server left behind, then whoever gets an
/// event. Returns when all have ended.
///
/// # Errors
/// When the database cannot say at the start which sessions need a driver.
pub async fn supervise(context: Context, stop: CancellationToken) -> Result<(), DbError> {
    let mut supervisor = Supervisor {
        context: context.clone(),
        stop: stop.clone(),
        tasks: JoinSet::new(),
        running: HashMap::new(),
        by_task: HashMap::new(),
        failures: HashMap::new(),
        due: BTreeSet::new(),
    };
    let left = context.db.sessions_needing_driver(None).await?;
    for (org, session) in left {
        supervisor.start(org, session);
    }
    let mut period = tokio::time::interval_at(Instant::now() + LOOK_PERIOD, LOOK_PERIOD);
    loop {
        let next_due = supervisor.due.first().map(|(at, _)| *at);
        tokio::select! {
            () = stop.cancelled() => break,
            touched = context.db.feed().touched() => {
                for session in touched {
                    supervisor.look(session).await;
                }
            }
            Some(ended) = supervisor.tasks.join_next_with_id() => supervisor.ended(ended).await,
            () = wait_until(next_due) => supervisor.start_due(),
            _ = period.tick() => supervisor.look_at_all().await,
        }
    }
    while supervisor.tasks.join_next().await.is_some() {}
    Ok(())
}

async fn wait_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

struct Supervisor {
    context: Context,
    stop: CancellationToken,
    tasks: JoinSet<Result<(), driver::DriveError>>,
    running: HashMap<SessionId, OrgId>,
    by_task: HashMap<Id, (OrgId, SessionId)>,
    /// Failures in a row; bounded by the number of sessions that fail.
    failures: HashMap<SessionId, u32>,
    due: BTreeSet<(Instant, SessionId)>,
}

impl Supervisor {
    fn start(&mut self, org: OrgId, session: SessionId) {
        if self.running.contains_key(&session) || self.due.iter().any(|(_, s)| *s == session) {
            return;
        }
        self.running.insert(session, org);
        let (context, stop) = (self.context.clone(), self.stop.clone());
        let task = self.tasks.spawn(async move {
            tokio::select! {
                permit = context.permits.acquire() => {
                    // Nobody closes the semaphore, so this is a permit.
                    let _permit = permit;
                    driver::drive(&context, org, session, &stop).await
                }
                () = stop.cancelled() => Ok(()),
            }
        });
        self.by_task.insert(task.id(), (org, session));
    }

    /// Starts a driver when the session needs one and has none.
    async fn look(&mut self, session: SessionId) {
        if self.running.contains_key(&session) {
            return;
        }
        match self.context.db.sessions_needing_driver(Some(session)).await {
            Ok(found) => found.into_iter().for_each(|(org, session)| self.start(org, session)),
            Err(e) => {
                tracing::error!(%session, error = %e, "cannot see whether the session needs a driver");
                self.later(session);
            }
        }
    }

    /// Starts drivers for all sessions that need one and have none: those whose calls have waited too long for a client,
    /// and those whose wake-up was lost.
    async fn look_at_all(&mut self) {
        match self.context.db.sessions_needing_driver(None).await {
            Ok(found) => found.into_iter().for_each(|(org, session)| self.start(org, session)),
            Err(e) => tracing::error!(error = %e, "cannot see which sessions need a driver"),
        }
    }

    async fn ended(&mut self, ended: Result<(Id, Result<(), driver::DriveError>), tokio::task::JoinError>) {
        let (task, result) = match ended {
            Ok((task, result)) => (task, result.map_err(|e| e.to_string())),
            Err(e) => (e.id(), Err(format!("the driver panicked: {e}"))),
        };
        let Some((org, session)) = self.by_task.remove(&task) else { return };
        self.running.remove(&session);
        match result {
            Ok(()) => {
                self.failures.remove(&session);
                // An event that came while the driver was leaving was announced to nobody.
                self.look(session).await;
            }
            Err(reason) => {
                tracing::error!(%org, %session, reason, "a driver failed; it is started again");
                let given_back = self.context.db.release_home_of(org, session);
                if let Err(e) = given_back.await {
                    tracing::error!(%session, error = %e, "cannot give back the lease of a failed driver");
                }
                self.context.released.send_modify(|n| *n += 1);
                self.later(session);
            }
        }
    }

    fn later(&mut self, session: SessionId) {
        let failures = self.failures.entry(session).or_default();
        let wait = RESTART_WAIT_FIRST.saturating_mul(1 << (*failures).min(10)).min(RESTART_WAIT_LONGEST);
        *failures += 1;
        self.due.insert((Instant::now() + wait, session));
    }

    fn start_due(&mut self) {
        let now = Instant::now();
        let later = self.due.split_off(&(now, SessionId::from_uuid(uuid::Uuid::max())));
        let due = std::mem::replace(&mut self.due, later);
        // Announced like an append, so that there is one way in: the look that asks the database.
        due.into_iter().for_each(|(_, session)| self.context.db.feed().announce(session));
    }
}
