//! The connection that says that this server lives, and looks whether the others do.
//!
//! It holds two advisory locks, which PostgreSQL gives back when the connection ends, that is at once when the process dies:
//! the one of all servers (shared, or exclusively by a server that shares with nobody), and the one of this instance, whose
//! number is its key. Beside them stands the row of `instance` with its term, for when the connection ends on one side only:
//! in a partition nobody gives the lock back, and the term runs out. Only the database's clock is read.
//!
//! Every look takes the rows away whose term is over or whose lock is free; what a row's owner still does is fenced by the
//! epochs. When all connections break at once, as in a restart of the database, everybody needs a moment to take his lock
//! again; in that moment only terms count. What does not belong here: sessions.

mod line;

use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use self::line::{Line, Lock};
use super::Location;
use super::connection::Connection;
use crate::leases::{Instance, InstanceId, ServerPlace, Standing, StandingEvent};
use crate::{DbError, Result};

/// How often the term begins anew.
pub const RENEW_EVERY: Duration = Duration::from_secs(1);
/// How often it is looked whether the other servers live. The sessions of one that died wait for half of it on average.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);
/// So long before the end of the term by our own clock, drivers stop. Long enough for what they began to end first.
pub const TERM_MARGIN: Duration = Duration::from_millis(500);
/// After a connection was made anew, for so long a free lock proves nothing: its owner may be making one, too.
const RELOCK_WAIT: Duration = Duration::from_secs(2);
/// A statement of this connection that takes longer finds a connection that is broken.
const STATEMENT_WAIT: Duration = Duration::from_secs(2);
const RECONNECT_WAIT: Duration = Duration::from_millis(100);
/// How long a new server waits for a lock: the last one's connection may end a moment after its process.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(5);
/// How long a server that is known waits for its own lock, whose last connection it has just ended.
const RELOCK_EACH: Duration = Duration::from_millis(500);
const WISHES_MAX: usize = 16;

/// The task with the connection; ended when dropped.
#[derive(Debug)]
pub(super) struct Membership {
    wishes: mpsc::Sender<Wish>,
    standing: watch::Receiver<Standing>,
    servers: watch::Receiver<Vec<Instance>>,
    left_behind: watch::Receiver<u64>,
    _task: JoinSet<()>,
}

#[derive(Debug)]
enum Wish {
    HoldAlone(oneshot::Sender<Result<bool>>),
    Join(ServerPlace, oneshot::Sender<Result<bool>>),
    Drain(oneshot::Sender<Result<()>>),
    Leave(oneshot::Sender<Result<()>>),
}

impl Membership {
    pub(super) fn start(location: Location) -> Self {
        let (wishes, queue) = mpsc::channel(WISHES_MAX);
        let (standing, servers, left_behind) =
            (watch::Sender::new(Standing::Outside), watch::Sender::new(Vec::new()), watch::Sender::new(0));
        let (told_standing, told_servers, told_left) =
            (standing.subscribe(), servers.subscribe(), left_behind.subscribe());
        let run = Run {
            term: location.lease_term(),
            location,
            standing,
            servers,
            left_behind,
            place: None,
            renewed_at: Instant::now(),
            connection: None,
            is_draining: false,
            is_down: false,
        };
        let mut task = JoinSet::new();
        task.spawn(run.for_ever(queue));
        Self { wishes, standing: told_standing, servers: told_servers, left_behind: told_left, _task: task }
    }

    /// Takes the database for this server and keeps it; false when another one has it.
    pub(super) async fn hold_alone(&self) -> Result<bool> {
        self.ask(Wish::HoldAlone).await
    }

    /// Joins the servers; false when one has the database for itself.
    pub(super) async fn join(&self, place: ServerPlace) -> Result<bool> {
        self.ask(|answer| Wish::Join(place, answer)).await
    }

    pub(super) async fn drain(&self) -> Result<()> {
        self.ask(Wish::Drain).await
    }

    pub(super) async fn leave(&self) -> Result<()> {
        self.ask(Wish::Leave).await
    }

    async fn ask<T>(&self, wish: impl FnOnce(oneshot::Sender<Result<T>>) -> Wish) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        self.wishes.send(wish(answer)).await.map_err(|_| DbError::Closed)?;
        answered.await.map_err(|_| DbError::Closed)?
    }

    pub(super) fn now(&self) -> Standing {
        *self.standing.borrow()
    }

    pub(super) fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }

    pub(super) fn servers(&self) -> watch::Receiver<Vec<Instance>> {
        self.servers.clone()
    }

    pub(super) fn left_behind(&self) -> watch::Receiver<u64> {
        self.left_behind.clone()
    }
}

struct Run {
    location: Location,
    term: Duration,
    standing: watch::Sender<Standing>,
    servers: watch::Sender<Vec<Instance>>,
    left_behind: watch::Sender<u64>,
    /// Set once this server shares the database.
    place: Option<ServerPlace>,
    /// When the last renewal that came through was sent, by our own clock.
    renewed_at: Instant,
    /// The database's number of our last connection, which may outlive it on the other side, and when that began: numbers
    /// are used again.
    connection: Option<(i32, String)>,
    /// This server ends: it enters no more.
    is_draining: bool,
    /// No connection was had at the last try.
    is_down: bool,
}

impl Run {
    async fn for_ever(mut self, mut wishes: mpsc::Receiver<Wish>) {
        loop {
            let line = match self.connect().await {
                Ok(line) => line,
                Err(error) => {
                    // Once, and not for each of the many tries.
                    if !std::mem::replace(&mut self.is_down, true) {
                        tracing::warn!(%error, "no connection that says that this server lives; trying again");
                    }
                    self.note_silence();
                    tokio::select! {
                        () = sleep(RECONNECT_WAIT) => {}
                        wish = wishes.recv() => match wish {
                            None => return,
                            Some(wish) => refuse(wish, error),
                        },
                    }
                    continue;
                }
            };
            self.is_down = false;
            match self.serve(line, &mut wishes).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(%error, "the connection that says that this server lives was lost");
                    self.note_silence();
                }
            }
        }
    }

    fn tell(&self, event: StandingEvent) {
        self.standing.send_if_modified(|standing| {
            let next = standing.after(event);
            let changed = next != *standing;
            if changed {
                tracing::info!(from = ?*standing, to = ?next, "this server's standing");
            }
            *standing = next;
            changed
        });
    }

    fn note_silence(&self) {
        if self.until_silent().is_zero() {
            self.tell(StandingEvent::TermNearlyOver);
        }
    }

    fn until_silent(&self) -> Duration {
        self.term.saturating_sub(TERM_MARGIN).saturating_sub(self.renewed_at.elapsed())
    }

    /// How long a statement may take: whoever waits longer does not notice that the term ends.
    fn patience(&self) -> Duration {
        let until_silent = self.until_silent();
        match self.standing.borrow().instance() {
            Some(_) if !until_silent.is_zero() => until_silent.min(STATEMENT_WAIT),
            _ => STATEMENT_WAIT,
        }
    }

    async fn connect(&mut self) -> Result<Line> {
        let mut line = Line::open(&self.location, self.patience()).await?;
        let standing = *self.standing.borrow();
        if let Some(earlier) = &self.connection {
            // Its owner may be making a new one as well: a free lock proves nothing for a while.
            line.relocked_by = Instant::now() + RELOCK_WAIT;
            if standing != Standing::Outside {
                line.end(earlier, self.patience()).await?;
            }
        }
        self.connection = Some(line.name(self.patience()).await?);
        match standing {
            Standing::Outside => {}
            Standing::Alone => {
                if !line.lock(Lock::Alone, LOCK_WAIT_MAX).await? {
                    // The epochs fence; what is lost is only that a second server is refused.
                    tracing::error!("while the connection was lost, another server has taken this database");
                }
            }
            Standing::Over(_) => self.enter(&line).await.map(drop)?,
            Standing::Member(id) | Standing::Silent(id) | Standing::Draining(id) => {
                let mut is_locked = line.lock(Lock::Shared, RELOCK_EACH).await?;
                is_locked = is_locked && line.lock(Lock::Instance(id), RELOCK_EACH).await?;
                // Also without the lock: the term is what others go by then.
                self.renew(&line).await?;
                if !is_locked && self.standing.borrow().instance() == Some(id) {
                    return Err(DbError::Busy { name: "lease lock", seconds: RELOCK_EACH.as_secs() });
                }
            }
        }
        Ok(line)
    }

    /// Until the connection is lost (an error) or nobody has a handle any more.
    async fn serve(&mut self, line: Line, wishes: &mut mpsc::Receiver<Wish>) -> Result<()> {
        let (mut renewals, mut looks) = (interval(RENEW_EVERY), interval(LOOK_EVERY));
        renewals.set_missed_tick_behavior(MissedTickBehavior::Delay);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                wish = wishes.recv() => match wish {
                    None => return Ok(()),
                    Some(wish) => self.grant(&line, wish).await?,
                },
                _ = renewals.tick(), if self.place.is_some() => self.renew(&line).await?,
                _ = looks.tick(), if self.place.is_some() => self.look(&line).await?,
            }
        }
    }

    /// An error is one of the connection; what the database refuses is answered.
    async fn grant(&mut self, line: &Line, wish: Wish) -> Result<()> {
        match wish {
            Wish::HoldAlone(answer) => {
                let standing = *self.standing.borrow();
                let held = match standing {
                    Standing::Alone => Ok(true),
                    Standing::Outside => line.lock(Lock::Alone, LOCK_WAIT_MAX).await,
                    _ => Ok(false),
                };
                if let Ok(true) = held {
                    self.tell(StandingEvent::TookAlone);
                }
                answered(answer, held);
            }
            Wish::Join(place, answer) => {
                let standing = *self.standing.borrow();
                let joined = match standing {
                    Standing::Outside => {
                        self.place = Some(place);
                        self.enter(line).await
                    }
                    Standing::Alone => Ok(false),
                    _ => Ok(true),
                };
                if !matches!(joined, Ok(true)) {
                    self.place = None;
                }
                answered(answer, joined);
            }
            Wish::Drain(answer) => {
                self.is_draining = true;
                self.tell(StandingEvent::DrainAsked);
                let id = self.standing.borrow().instance();
                let drained = match id {
                    Some(id) => line.drain(id, self.patience()).await,
                    None => Ok(()),
                };
                answered(answer, drained);
            }
            Wish::Leave(answer) => {
                self.place = None;
                let id = self.standing.borrow().instance();
                let left = match id {
                    Some(id) => line.leave(id, self.patience()).await,
                    None => Ok(()),
                };
                self.tell(StandingEvent::Left);
                answered(answer, left);
            }
        }
        Ok(())
    }

    /// Makes a new instance of this server; false when another one has the database for itself, or this one ends.
    async fn enter(&mut self, line: &Line) -> Result<bool> {
        let Some(place) = self.place.clone().filter(|_| !self.is_draining) else { return Ok(false) };
        if !line.lock(Lock::Shared, LOCK_WAIT_MAX).await? {
            return Ok(false);
        }
        // The lock before the row: a row without one is taken for a dead server's.
        let id = fresh_id()?;
        if !line.lock(Lock::Instance(id), LOCK_WAIT_MAX).await? {
            return Ok(false);
        }
        let sent = Instant::now();
        line.enter(id, &place, self.term, self.patience()).await?;
        self.renewed_at = sent;
        self.tell(StandingEvent::Joined(id));
        Ok(true)
    }

    async fn renew(&mut self, line: &Line) -> Result<()> {
        let standing = *self.standing.borrow();
        if let Standing::Over(_) = standing {
            return self.enter(line).await.map(drop);
        }
        let Some(id) = standing.instance() else { return Ok(()) };
        // Before it is sent: the term begins when the database has it, which is later, so ours ends first.
        let sent = Instant::now();
        if !line.renew(id, self.term, self.patience()).await? {
            self.tell(StandingEvent::RowGone);
            return self.enter(line).await.map(drop);
        }
        self.renewed_at = sent;
        self.tell(StandingEvent::Renewed);
        Ok(())
    }

    async fn look(&mut self, line: &Line) -> Result<()> {
        self.note_silence();
        let Some(own) = self.standing.borrow().instance() else { return Ok(()) };
        let seen = line.look(own, self.patience()).await?;
        if !seen.living.iter().any(|server| server.id == own) {
            self.tell(StandingEvent::RowGone);
            self.enter(line).await?;
        }
        let is_missing = |known: &Instance| !seen.living.iter().any(|server| server.id == known.id);
        // Also when another server was faster and took the row away.
        let is_gone = seen.is_gone || self.servers.borrow().iter().any(is_missing);
        self.servers.send_if_modified(|known| {
            let changed = *known != seen.living;
            *known = seen.living;
            changed
        });
        if is_gone {
            self.left_behind.send_modify(|n| *n += 1);
        }
        Ok(())
    }
}

/// Random and positive, so that it is never another's, and no two-number lock's.
fn fresh_id() -> Result<InstanceId> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| DbError::Invalid(format!("no random number: {error}")))?;
    Ok(InstanceId(i64::from_le_bytes(bytes) & i64::MAX))
}

fn answered<T>(answer: oneshot::Sender<T>, with: T) {
    if answer.send(with).is_err() {
        tracing::debug!("nobody waits for the answer any more");
    }
}

fn refuse(wish: Wish, error: DbError) {
    match wish {
        Wish::HoldAlone(answer) | Wish::Join(_, answer) => answered(answer, Err(error)),
        Wish::Drain(answer) | Wish::Leave(answer) => answered(answer, Err(error)),
    }
}

/// What a server that joins finds while it is the only one: homes that are held for sessions that nobody drives, as an
/// earlier version left them.
pub(super) async fn release_unowned(tx: &Connection) -> Result<()> {
    let sql = "UPDATE home SET lease_held = FALSE
               WHERE lease_held AND (SELECT count(*) FROM instance) = 1
                 AND NOT EXISTS (SELECT FROM session WHERE session.id = home.lease_session AND owner IS NOT NULL)";
    tx.execute(sql, &[]).await?;
    Ok(())
}

/// Rows that a server which has the database for itself finds are of servers that are gone.
pub(super) async fn forget_all(tx: &Connection) -> Result<()> {
    tx.execute("DELETE FROM instance", &[]).await?;
    Ok(())
}
