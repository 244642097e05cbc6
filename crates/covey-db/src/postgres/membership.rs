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

use std::future::Future;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_postgres::{Client, Statement};

use super::schema::{LOCK_CLASS, LOCK_SERVER, connect_alone};
use super::{Location, session_settings};
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
const LOCK_LOOK_EVERY: Duration = Duration::from_millis(50);
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
    /// No connection was had at the last try.
    is_down: bool,
}

/// A connection with its statements.
struct Line {
    client: Client,
    renew: Statement,
    look: Statement,
    /// Until then only terms count.
    relocked_by: Instant,
    _task: JoinSet<()>,
}

const RENEW: &str =
    "UPDATE instance SET expires_at = clock_timestamp() + $2::float8 * interval '1 second' WHERE id = $1";

/// One statement looks at all and takes away what is over. A lock that can be had is nobody's; it is given back with the
/// statement. Of two servers that look at once, one has it.
const LOOK: &str = "WITH gone AS (
         DELETE FROM instance
         WHERE id <> $1 AND (expires_at < clock_timestamp() OR CASE WHEN $2 THEN pg_try_advisory_xact_lock(id) END)
         RETURNING id)
     SELECT id, coalesce(address, ''), version, draining, id IN (SELECT id FROM gone) FROM instance ORDER BY id";

const ENTER: &str = "INSERT INTO instance (id, address, version, expires_at)
     VALUES ($1, $2, $3, clock_timestamp() + $4::float8 * interval '1 second')";

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
        // Our own limit: the lease runs meanwhile.
        let connected = timeout(self.patience(), connect_alone(&self.location)).await;
        let (client, task) = connected.map_err(|_| broken())??;
        let (renew, look) = within(self.patience(), async {
            client.batch_execute(&session_settings()).await?;
            Ok((client.prepare(RENEW).await?, client.prepare(LOOK).await?))
        })
        .await?;
        let relocked_by =
            Instant::now() + if self.connection.is_some() { RELOCK_WAIT } else { Duration::ZERO };
        let line = Line { client, renew, look, relocked_by, _task: task };
        let standing = *self.standing.borrow();
        if let Some((earlier, began)) = &self.connection
            && standing != Standing::Outside
        {
            // Of a connection that only we know to be broken, the database still holds the locks.
            let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                       WHERE pid = $1 AND backend_start::text = $2";
            within(self.patience(), async { Ok(line.client.execute(end, &[earlier, began]).await?) }).await?;
        }
        let own = "SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()";
        let row = within(self.patience(), async { Ok(line.client.query_one(own, &[]).await?) }).await?;
        self.connection = Some((row.try_get(0)?, row.try_get(1)?));
        match standing {
            Standing::Outside => {}
            Standing::Alone => {
                if !lock(&line.client, TRY_ALONE, LOCK_WAIT_MAX).await? {
                    // The epochs fence; what is lost is only that a second server is refused.
                    tracing::error!("while the connection was lost, another server has taken this database");
                }
            }
            Standing::Over(_) => self.enter(&line).await.map(drop)?,
            Standing::Member(id) | Standing::Silent(id) | Standing::Draining(id) => {
                let mut is_locked = lock(&line.client, TRY_SHARED, RELOCK_EACH).await?;
                is_locked = is_locked && lock_instance(&line.client, id, RELOCK_EACH).await?;
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
    async fn serve(&mut self, mut line: Line, wishes: &mut mpsc::Receiver<Wish>) -> Result<()> {
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
                _ = looks.tick(), if self.place.is_some() => self.look(&mut line).await?,
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
                    Standing::Outside => lock(&line.client, TRY_ALONE, LOCK_WAIT_MAX).await,
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
                self.tell(StandingEvent::DrainAsked);
                let id = self.standing.borrow().instance();
                let drained = match id {
                    Some(id) => {
                        let sql = "UPDATE instance SET draining = TRUE WHERE id = $1";
                        within(self.patience(), async { Ok(line.client.execute(sql, &[&id.0]).await?) })
                            .await
                            .map(drop)
                    }
                    None => Ok(()),
                };
                answered(answer, drained);
            }
            Wish::Leave(answer) => {
                self.place = None;
                let id = self.standing.borrow().instance();
                let left = match id {
                    Some(id) => {
                        let sql = "DELETE FROM instance WHERE id = $1";
                        within(self.patience(), async {
                            line.client.execute(sql, &[&id.0]).await?;
                            Ok(line.client.execute("SELECT pg_advisory_unlock_all()", &[]).await?)
                        })
                        .await
                        .map(drop)
                    }
                    None => Ok(()),
                };
                self.tell(StandingEvent::Left);
                answered(answer, left);
            }
        }
        Ok(())
    }

    /// Makes a new instance of this server; false when another one has the database for itself.
    async fn enter(&mut self, line: &Line) -> Result<bool> {
        let Some(place) = self.place.clone() else { return Ok(false) };
        if !lock(&line.client, TRY_SHARED, LOCK_WAIT_MAX).await? {
            return Ok(false);
        }
        // The lock before the row: a row without one is taken for a dead server's.
        let id = fresh_id()?;
        if !lock_instance(&line.client, id, LOCK_WAIT_MAX).await? {
            return Ok(false);
        }
        let sent = Instant::now();
        within(self.patience(), async {
            let term = self.term.as_secs_f64();
            Ok(line.client.execute(ENTER, &[&id.0, &place.address, &place.version, &term]).await?)
        })
        .await?;
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
        let term = self.term.as_secs_f64();
        let renewed =
            within(self.patience(), async { Ok(line.client.execute(&line.renew, &[&id.0, &term]).await?) })
                .await?;
        if renewed == 0 {
            self.tell(StandingEvent::RowGone);
            return self.enter(line).await.map(drop);
        }
        self.renewed_at = sent;
        self.tell(StandingEvent::Renewed);
        Ok(())
    }

    async fn look(&mut self, line: &mut Line) -> Result<()> {
        self.note_silence();
        let Some(own) = self.standing.borrow().instance() else { return Ok(()) };
        let locks_count = Instant::now() >= line.relocked_by;
        let rows = within(self.patience(), async {
            Ok(line.client.query(&line.look, &[&own.0, &locks_count]).await?)
        })
        .await?;
        let mut living = Vec::new();
        let mut is_gone = false;
        for row in rows {
            if row.try_get(4)? {
                is_gone = true;
                continue;
            }
            living.push(Instance {
                id: InstanceId(row.try_get(0)?),
                address: row.try_get(1)?,
                version: row.try_get(2)?,
                draining: row.try_get(3)?,
            });
        }
        if !living.iter().any(|server| server.id == own) {
            self.tell(StandingEvent::RowGone);
            self.enter(line).await?;
        }
        // Also when another server was faster and took the row away.
        is_gone |=
            self.servers.borrow().iter().any(|known| !living.iter().any(|server| server.id == known.id));
        self.servers.send_if_modified(|known| {
            let changed = *known != living;
            *known = living;
            changed
        });
        if is_gone {
            self.left_behind.send_modify(|n| *n += 1);
        }
        Ok(())
    }
}

const TRY_ALONE: &str = "SELECT pg_try_advisory_lock($1, $2)";
const TRY_SHARED: &str = "SELECT pg_try_advisory_lock_shared($1, $2)";

/// The lock of all servers; one that has it gets it again.
async fn lock(client: &Client, sql: &str, wait: Duration) -> Result<bool> {
    until_locked(wait, || async {
        Ok(client.query_one(sql, &[&LOCK_CLASS, &LOCK_SERVER]).await?.try_get(0)?)
    })
    .await
}

async fn lock_instance(client: &Client, id: InstanceId, wait: Duration) -> Result<bool> {
    let sql = "SELECT pg_try_advisory_lock($1::bigint)";
    until_locked(wait, || async { Ok(client.query_one(sql, &[&id.0]).await?.try_get(0)?) }).await
}

async fn until_locked<F: Future<Output = Result<bool>>>(
    wait: Duration,
    attempt: impl Fn() -> F,
) -> Result<bool> {
    let until = Instant::now() + wait;
    loop {
        if within(STATEMENT_WAIT, attempt()).await? {
            return Ok(true);
        }
        if Instant::now() > until {
            return Ok(false);
        }
        sleep(LOCK_LOOK_EVERY).await;
    }
}

async fn within<T>(patience: Duration, statement: impl Future<Output = Result<T>>) -> Result<T> {
    timeout(patience, statement).await.map_err(|_| broken())?
}

fn broken() -> DbError {
    DbError::Busy { name: "lease", seconds: STATEMENT_WAIT.as_secs() }
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
pub(super) async fn release_unowned(tx: &super::connection::Connection) -> Result<()> {
    let sql = "UPDATE home SET lease_held = FALSE
               WHERE lease_held AND (SELECT count(*) FROM instance) = 1
                 AND NOT EXISTS (SELECT FROM session WHERE session.id = home.lease_session AND owner IS NOT NULL)";
    tx.execute(sql, &[]).await?;
    Ok(())
}

/// Rows that a server which has the database for itself finds are of servers that are gone.
pub(super) async fn forget_all(tx: &super::connection::Connection) -> Result<()> {
    tx.execute("DELETE FROM instance", &[]).await?;
    Ok(())
}
