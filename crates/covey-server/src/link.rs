//! Server side of the runner link: who is connected, which messages go to whom.
//!
//! A message of a home goes to the driver that acts on the home, in order; without one, what needs an answer
//! is answered from the database. Nothing is assumed delivered: when a link ends, the drivers that relied on
//! it see it ([`Outbox::ended`]) and ask again. What does not belong here: what a message means to a session.

mod serve;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use covey_types::{HomeId, OrgId, RunnerId};
use covey_wire::runner::{FORGOTTEN_HOMES_MAX, HomePresence, RunnerToServer, ServerToRunner};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::db::Db;

pub use serve::{HEARTBEAT, LinkError, Trust, serve};
pub(crate) use serve::{answer_undriven, publish};

/// Messages that may wait for a runner's link; a runner that takes none for so long is lost.
pub const OUTBOX_MAX: usize = 1024;
/// The version of the link from which on a runner understands that homes were deleted.
const FORGET_SINCE: u32 = 3;
/// The version of the link from which on a runner dials every server.
const SERVERS_SINCE: u32 = 4;
/// Messages that may wait for a driver. Live output above it is dropped; anything else ends the link, after
/// which everything is asked for again.
pub const MAILBOX_MAX: usize = 1024;

/// One runner, as the choice sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The runner.
    pub runner: RunnerId,
    /// Whom it belongs to.
    pub org: OrgId,
    /// Whether the home's last token was given to it: it has the working copy, and perhaps what is in no snapshot yet.
    pub had_home_last: bool,
    /// Whether it holds the home's sandbox or working copy, as far as this server was told.
    pub holds_home: bool,
    /// Homes it acts on already.
    pub homes: usize,
}

/// Chooses the runner for a home of `org`: the one that had it last, else one that holds it, else the least busy one; ties
/// go to the smaller id, so that the choice can be repeated (I9).
pub fn choose(org: OrgId, candidates: &[Candidate]) -> Option<RunnerId> {
    candidates
        .iter()
        .filter(|c| c.org == org)
        .min_by_key(|c| (!c.had_home_last, !c.holds_home, c.homes, c.runner))
        .map(|c| c.runner)
}

/// The outbound side of one link.
#[derive(Debug, Clone)]
pub struct Outbox {
    runner: RunnerId,
    version: u32,
    number: u64,
    queue: mpsc::Sender<ServerToRunner>,
    stop: CancellationToken,
}

/// The link ended before the message was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the link to the runner has ended")]
pub struct LinkEnded;

impl Outbox {
    /// Which runner this is.
    pub const fn runner(&self) -> RunnerId {
        self.runner
    }

    /// The version of the link that both sides speak.
    pub const fn version(&self) -> u32 {
        self.version
    }

    /// Waits until the link has ended; nothing that was not answered can be relied on then.
    pub async fn ended(&self) {
        self.queue.closed().await;
    }

    /// Tells the runner that these homes were deleted, if it understands that.
    fn forget(&self, homes: &[HomeId]) {
        if self.version < FORGET_SINCE {
            return;
        }
        for some in homes.chunks(FORGOTTEN_HOMES_MAX) {
            if self.send(ServerToRunner::ForgetHomes { homes: some.to_vec() }).is_err() {
                tracing::debug!(runner = %self.runner, "the link ended; the runner is told when it dials in");
                return;
            }
        }
    }

    /// Queues a message, in order.
    ///
    /// # Errors
    /// When the link has ended, or ends now because its queue is full.
    pub fn send(&self, message: ServerToRunner) -> Result<(), LinkEnded> {
        self.queue.try_send(message).map_err(|e| {
            if matches!(e, mpsc::error::TrySendError::Full(_)) {
                tracing::warn!(runner = %self.runner, "takes no messages; its link is ended");
                self.stop.cancel();
            }
            LinkEnded
        })
    }
}

#[derive(Debug)]
struct Connected {
    org: OrgId,
    outbox: Outbox,
    homes: HashMap<HomeId, HomePresence>,
}

#[derive(Debug)]
struct Route {
    number: u64,
    mailbox: mpsc::Sender<RunnerToServer>,
}

#[derive(Debug)]
struct Inner {
    connected: HashMap<RunnerId, Connected>,
    routes: HashMap<HomeId, Route>,
    next_number: u64,
}

/// Everything known of runners and of who listens to them. Clones are the same.
#[derive(Debug, Clone)]
pub struct Links {
    db: Db,
    inner: Arc<Mutex<Inner>>,
    changed: Arc<watch::Sender<u64>>,
}

impl Links {
    /// No runner, no driver.
    pub fn new(db: Db) -> Self {
        let inner = Inner { connected: HashMap::new(), routes: HashMap::new(), next_number: 1 };
        Self { db, inner: Arc::new(Mutex::new(inner)), changed: Arc::new(watch::channel(0).0) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Every critical section is a few map operations without a panic in between.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes when a runner comes or goes.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Whether a link to the runner stands here.
    pub fn is_connected(&self, runner: RunnerId) -> bool {
        self.inner().connected.contains_key(&runner)
    }

    /// Chooses the runner for a home that `last` had last, as the database knows: whichever server that was on.
    pub fn place(&self, org: OrgId, home: HomeId, last: Option<RunnerId>) -> Option<Outbox> {
        let mut inner = self.inner();
        let candidates: Vec<Candidate> = inner
            .connected
            .iter()
            .map(|(runner, c)| Candidate {
                runner: *runner,
                org: c.org,
                had_home_last: last == Some(*runner),
                holds_home: c.homes.contains_key(&home),
                homes: c.homes.len(),
            })
            .collect();
        let runner = choose(org, &candidates)?;
        let connected = inner.connected.get_mut(&runner)?;
        connected.homes.entry(home).or_insert_with(|| HomePresence {
            home,
            generation: covey_types::Generation(0),
            sandbox: None,
        });
        Some(connected.outbox.clone())
    }

    /// The link to the runner that holds a home, if it stands; for requests that no driver makes. `last` as in
    /// [`place`](Self::place).
    pub fn holder(&self, org: OrgId, home: HomeId, last: Option<RunnerId>) -> Option<Outbox> {
        let inner = self.inner();
        if let Some(connected) = last.and_then(|last| inner.connected.get(&last)).filter(|c| c.org == org) {
            return Some(connected.outbox.clone());
        }
        let mut holders = inner.connected.values().filter(|c| c.org == org && c.homes.contains_key(&home));
        holders.next().map(|c| c.outbox.clone())
    }

    /// Tells every runner of the org that these homes were deleted. Those that are not there now are told when they
    /// dial in.
    pub fn forget(&self, org: OrgId, homes: &[HomeId]) {
        let mut inner = self.inner();
        for connected in inner.connected.values_mut().filter(|c| c.org == org) {
            connected.homes.retain(|home, _| !homes.contains(home));
            connected.outbox.forget(homes);
        }
    }

    /// Sends the messages of a home to the returned mailbox until the guard is dropped. An earlier driver's
    /// mailbox gets nothing more.
    pub fn route(&self, home: HomeId) -> (RouteGuard, mpsc::Receiver<RunnerToServer>) {
        let (mailbox, mail) = mpsc::channel(MAILBOX_MAX);
        let mut inner = self.inner();
        let number = inner.next_number;
        inner.next_number += 1;
        inner.routes.insert(home, Route { number, mailbox });
        (RouteGuard { links: self.clone(), home, number }, mail)
    }
}

/// Keeps a driver's mailbox registered.
#[derive(Debug)]
pub struct RouteGuard {
    links: Links,
    home: HomeId,
    number: u64,
}

impl Drop for RouteGuard {
    fn drop(&mut self) {
        let mut inner = self.links.inner();
        if inner.routes.get(&self.home).is_some_and(|r| r.number == self.number) {
            inner.routes.remove(&self.home);
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn the_holder_of_the_home_is_chosen_then_the_least_busy_and_never_a_foreign_one() {
        let (ours, theirs) = (OrgId::from_uuid(Uuid::from_u128(1)), OrgId::from_uuid(Uuid::from_u128(2)));
        let runner = |n: u128| RunnerId::from_uuid(Uuid::from_u128(n));
        let candidate = |n: u128, org, holds_home, homes| Candidate {
            runner: runner(n),
            org,
            had_home_last: false,
            holds_home,
            homes,
        };
        let busy_holder = candidate(1, ours, true, 9);
        let free = candidate(2, ours, false, 0);
        let foreign = candidate(3, theirs, true, 0);
        assert_eq!(choose(ours, &[free.clone(), foreign.clone(), busy_holder.clone()]), Some(runner(1)));
        let last = Candidate { had_home_last: true, ..candidate(7, ours, false, 9) };
        assert_eq!(
            choose(ours, &[free.clone(), busy_holder, last]),
            Some(runner(7)),
            "what it has counts most"
        );
        assert_eq!(choose(ours, &[candidate(5, ours, false, 1), free]), Some(runner(2)));
        assert_eq!(choose(ours, &[foreign]), None);
    }
}
