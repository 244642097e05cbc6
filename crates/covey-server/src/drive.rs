//! The drivers: one task per session that has something to do, and the supervisor that keeps it so.
//!
//! A session needs a driver when a turn is open or a user event waits; that is a question to the database and
//! nothing else, so nothing is forgotten when a server dies. A driver claims the session first, and stops at
//! once when somebody else does (I5). Of several servers on one database each drives what it claimed; the sessions of one
//! that is gone are claimed by the others, many at once. What does not belong here: what comes next in a session
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
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::db::leases::{InstanceId, Standing};
use crate::db::sessions::Session;
use crate::db::{Db, DbError};
use crate::link::Links;
use crate::model::Model;

pub use driver::{ANSWER_WAIT_MAX, TOOL_WAIT_MAX, WAKE_WAIT_MAX};
pub use live::{Delta, LIVE_DELTAS_MAX, Live};

/// Sessions that are driven at the same time; more wait for one of them to come to rest.
pub const DRIVERS_MAX: usize = 4096;
/// How often it is looked whether any session needs a driver that has none.
const LOOK_PERIOD: Duration = Duration::from_secs(60);
/// The same where several servers share the database: the one that accepted a message may have died before it drove it.
const LOOK_PERIOD_SHARED: Duration = Duration::from_secs(5);
/// After a take-over it is looked once more for sessions that were being appended to while the others were claimed.
const TAKE_AGAIN: Duration = Duration::from_millis(300);
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
    permits: Arc<Semaphore>,
    /// Cancelled when each session shall be given away at its next border.
    draining: CancellationToken,
    /// How many drivers there are.
    drivers: Arc<watch::Sender<usize>>,
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
            permits: Arc::new(Semaphore::new(DRIVERS_MAX)),
            draining: CancellationToken::new(),
            drivers: Arc::new(watch::channel(0).0),
        }
    }

    /// Lets each driver give its session away as soon as no call of a model is under way, and waits until all have. Calls of
    /// tools go on meanwhile: who drives next asks for them.
    pub async fn hand_over(&self) {
        self.draining.cancel();
        let mut drivers = self.drivers.subscribe();
        if drivers.wait_for(|count| *count == 0).await.is_err() {
            tracing::debug!("no supervisor");
        }
    }
}

/// Runs drivers until `stop` is cancelled: first those that the last server left behind, then whoever gets an
/// event. Returns when all have ended.
///
/// # Errors
/// When the database cannot say at the start which sessions need a driver.
pub async fn supervise(context: Context, stop: CancellationToken) -> Result<(), DbError> {
    let (mut standing, mut left_behind) = (context.db.standing(), context.db.left_behind());
    let instance = standing.borrow_and_update().instance();
    let mut supervisor = Supervisor {
        context: context.clone(),
        acting: stop.child_token(),
        stop: stop.clone(),
        instance,
        tasks: JoinSet::new(),
        running: HashMap::new(),
        taken: HashMap::new(),
        by_task: HashMap::new(),
        failures: HashMap::new(),
        due: BTreeSet::new(),
        take_again: None,
    };
    supervisor.take_left_behind().await;
    let left = context.db.sessions_needing_driver(None).await?;
    for (org, session) in left {
        supervisor.start(org, session, None);
    }
    let every = if instance.is_some() { LOOK_PERIOD_SHARED } else { LOOK_PERIOD };
    let mut period = tokio::time::interval_at(Instant::now() + every, every);
    period.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let next_due = supervisor.due.first().map(|(at, ..)| *at);
        let take_again = supervisor.take_again;
        tokio::select! {
            () = stop.cancelled() => break,
            Ok(()) = left_behind.changed() => supervisor.look_at_all().await,
            Ok(()) = standing.changed() => {
                let now = *standing.borrow_and_update();
                supervisor.standing_changed(now).await;
            }
            touched = context.db.feed().touched() => {
                for session in touched {
                    supervisor.look(session).await;
                }
            }
            Some(ended) = supervisor.tasks.join_next_with_id() => supervisor.ended(ended).await,
            () = wait_until(next_due) => supervisor.start_due(),
            () = wait_until(take_again) => supervisor.take_left_behind().await,
            _ = period.tick() => supervisor.look_at_all().await,
        }
        context.drivers.send_if_modified(|count| {
            let changed = *count != supervisor.running.len();
            *count = supervisor.running.len();
            changed
        });
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

/// How a driver ended in good order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The session was given back.
    GaveBack,
    /// Somebody else has it, or it is gone.
    Elsewhere,
}

struct Supervisor {
    context: Context,
    stop: CancellationToken,
    /// Ends the drivers of one life of this server among others.
    acting: CancellationToken,
    instance: Option<InstanceId>,
    tasks: JoinSet<Result<Ended, driver::DriveError>>,
    running: HashMap<SessionId, OrgId>,
    /// Sessions that were taken over while an earlier driver of ours had not ended.
    taken: HashMap<SessionId, (OrgId, Box<Session>)>,
    by_task: HashMap<Id, (OrgId, SessionId)>,
    /// Failures in a row; bounded by the number of sessions that fail.
    failures: HashMap<SessionId, u32>,
    due: BTreeSet<(Instant, SessionId, OrgId)>,
    take_again: Option<Instant>,
}

impl Supervisor {
    /// Starts a driver; `taken`: of a session that is claimed already.
    fn start(&mut self, org: OrgId, session: SessionId, taken: Option<Box<Session>>) {
        if self.running.contains_key(&session) {
            if let Some(taken) = taken {
                self.taken.insert(session, (org, taken));
            }
            return;
        }
        if taken.is_none() && self.due.iter().any(|(_, s, _)| *s == session) {
            return;
        }
        self.running.insert(session, org);
        let (context, stop) = (self.context.clone(), self.acting.clone());
        let task = self.tasks.spawn(async move {
            tokio::select! {
                permit = context.permits.acquire() => {
                    // Nobody closes the semaphore, so this is a permit.
                    let _permit = permit;
                    driver::drive(&context, org, session, taken, &stop).await
                }
                () = stop.cancelled() => Ok(Ended::Elsewhere),
            }
        });
        self.by_task.insert(task.id(), (org, session));
    }

    /// Starts a driver when the session needs one and has none.
    async fn look(&mut self, session: SessionId) {
        let draining = self.context.draining.is_cancelled();
        if self.running.contains_key(&session) || !(draining || self.may_claim()) {
            return;
        }
        match self.context.db.sessions_needing_driver(Some(session)).await {
            Ok(found) if draining => {
                found.into_iter().for_each(|(_, session)| self.context.db.offer_session(session));
            }
            Ok(found) => found.into_iter().for_each(|(org, session)| self.start(org, session, None)),
            // The look at all finds it.
            Err(e) => {
                tracing::error!(%session, error = %e, "cannot see whether the session needs a driver");
            }
        }
    }

    /// Starts drivers for all sessions that need one and have none: those whose calls have waited too long for a client,
    /// and those whose wake-up was lost.
    async fn look_at_all(&mut self) {
        if !self.may_claim() {
            return;
        }
        self.take_left_behind().await;
        match self.context.db.sessions_needing_driver(None).await {
            Ok(found) => found.into_iter().for_each(|(org, session)| self.start(org, session, None)),
            Err(e) => tracing::error!(error = %e, "cannot see which sessions need a driver"),
        }
    }

    fn may_claim(&self) -> bool {
        let standing = *self.context.db.standing().borrow();
        !self.context.draining.is_cancelled() && (standing.may_claim() || standing == Standing::Outside)
    }

    /// Takes what servers that are gone have left, and starts each as soon as it is claimed.
    async fn take_left_behind(&mut self) {
        self.take_again = None;
        let mut count = 0;
        loop {
            let taken = match self.context.db.take_left_behind().await {
                Ok(taken) => taken,
                Err(e) => {
                    tracing::error!(error = %e, "sessions of a server that is gone cannot be taken; trying again");
                    self.take_again = Some(Instant::now() + TAKE_AGAIN);
                    return;
                }
            };
            if taken.is_empty() {
                break;
            }
            count += taken.len();
            for (org, session) in taken {
                self.start(org, session.id, Some(Box::new(session)));
            }
        }
        if count > 0 {
            tracing::info!(count, "took over sessions of a server that is gone");
            self.take_again = Some(Instant::now() + TAKE_AGAIN);
        }
    }

    /// Drivers of a life that is over, or that others may be ending, stop; what is still ours is found again.
    async fn standing_changed(&mut self, now: Standing) {
        let is_another = now.instance().is_some() && now.instance() != self.instance;
        if is_another || !now.may_act() {
            self.acting.cancel();
            self.acting = self.stop.child_token();
        }
        if now.instance().is_some() {
            self.instance = now.instance();
        }
        self.look_at_all().await;
    }

    async fn ended(
        &mut self,
        ended: Result<(Id, Result<Ended, driver::DriveError>), tokio::task::JoinError>,
    ) {
        let (task, result) = match ended {
            Ok((task, result)) => (task, result.map_err(|e| e.to_string())),
            Err(e) => (e.id(), Err(format!("the driver panicked: {e}"))),
        };
        let Some((org, session)) = self.by_task.remove(&task) else { return };
        self.running.remove(&session);
        if let Some((org, taken)) = self.taken.remove(&session) {
            self.start(org, session, Some(taken));
            return;
        }
        match result {
            Ok(Ended::GaveBack) => {
                self.failures.remove(&session);
                // An event that came while the driver was leaving was announced to nobody.
                self.look(session).await;
            }
            Ok(Ended::Elsewhere) => {
                self.failures.remove(&session);
            }
            Err(reason) => {
                tracing::error!(%org, %session, reason, "a driver failed; it is started again");
                self.later(org, session);
            }
        }
    }

    fn later(&mut self, org: OrgId, session: SessionId) {
        let failures = self.failures.entry(session).or_default();
        let wait = RESTART_WAIT_FIRST.saturating_mul(1 << (*failures).min(10)).min(RESTART_WAIT_LONGEST);
        *failures += 1;
        self.due.insert((Instant::now() + wait, session, org));
    }

    fn start_due(&mut self) {
        let now = Instant::now();
        let (session, org) = (SessionId::from_uuid(uuid::Uuid::max()), OrgId::from_uuid(uuid::Uuid::max()));
        let later = self.due.split_off(&(now, session, org));
        let due = std::mem::replace(&mut self.due, later);
        // Whether it needs one or not: a driver that failed may have given nothing back, and one that rests does.
        due.into_iter().for_each(|(_, session, org)| self.start(org, session, None));
    }
}
