//! Telling other servers which journals grew, and hearing it from them.
//!
//! A connection of its own listens, and sends what the commits of this server touched, some at once: a `NOTIFY` inside a
//! commit would make all commits wait for each other (measured: a ninth of the commits at 32 writers). A notice may be
//! lost, with the connection or with a server that dies between commit and notice; so the heads of the sessions that
//! somebody follows here are read every second, too. Who hears a notice reads the journal: it carries no data.
//!
//! The same connection holds the lock that says that a server works on the database; PostgreSQL gives it back when
//! the process dies.

use std::collections::{HashMap, HashSet};
use std::future::poll_fn;
use std::time::Duration;

use covey_types::SessionId;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tokio_postgres::{AsyncMessage, Client, Notification};
use uuid::Uuid;

use super::schema::{LOCK_CLASS, LOCK_SERVER};
use super::{CONNECT_WAIT_MAX, Location, session_settings};
use crate::{DbError, Feed, Result};

/// How long a notice waits for others.
const GATHER: Duration = Duration::from_millis(20);
/// How often the heads of followed sessions are read.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Sessions in one notice; PostgreSQL takes 8000 bytes.
const SESSIONS_MAX: usize = 100;
/// Touched sessions that may wait to be told; more are left to the looks.
const WAITING_MAX: usize = 10_000;
/// Notices heard that may wait.
const HEARD_MAX: usize = 1000;
const RECONNECT_WAIT: Duration = Duration::from_millis(500);
/// How long a new server waits for the lock: the last one's connection may end a moment after its process.
const ALONE_WAIT_MAX: Duration = Duration::from_secs(5);
const ALONE_LOOK_EVERY: Duration = Duration::from_millis(100);
const CHANNEL: &str = "covey_journal";

/// The task with the connection; ended when dropped.
#[derive(Debug)]
pub(super) struct Notices {
    wishes: mpsc::Sender<Wish>,
    _task: JoinSet<()>,
}

#[derive(Debug)]
enum Wish {
    Tell(Vec<SessionId>),
    HoldAlone(oneshot::Sender<Result<bool>>),
}

impl Notices {
    pub(super) fn start(location: Location, feed: Feed) -> Self {
        let (wishes, queue) = mpsc::channel(WAITING_MAX);
        let mut task = JoinSet::new();
        let run = Run {
            location,
            feed,
            sender: Uuid::now_v7().simple().to_string(),
            waiting: HashSet::new(),
            heads: HashMap::new(),
            is_alone: false,
        };
        task.spawn(run.for_ever(queue));
        Self { wishes, _task: task }
    }

    /// Tells other servers, some time soon.
    pub(super) fn tell(&self, sessions: Vec<SessionId>) {
        if !sessions.is_empty() && self.wishes.try_send(Wish::Tell(sessions)).is_err() {
            tracing::debug!("too many notices wait; other servers see the change at their next look");
        }
    }

    /// Takes the lock of the database's one server and keeps it; false when another one has it.
    pub(super) async fn hold_alone(&self) -> Result<bool> {
        let (answer, answered) = oneshot::channel();
        self.wishes.send(Wish::HoldAlone(answer)).await.map_err(|_| DbError::Closed)?;
        answered.await.map_err(|_| DbError::Closed)?
    }
}

struct Run {
    location: Location,
    feed: Feed,
    /// Ours, so that we do not hear ourselves.
    sender: String,
    waiting: HashSet<SessionId>,
    /// Of followed sessions; none for one that is gone.
    heads: HashMap<SessionId, Option<(i64, bool)>>,
    is_alone: bool,
}

/// A connection that listens.
struct Line {
    client: Client,
    heard: mpsc::Receiver<Notification>,
    _task: JoinSet<()>,
}

impl Run {
    async fn for_ever(mut self, mut wishes: mpsc::Receiver<Wish>) {
        loop {
            let line = match self.connect().await {
                Ok(line) => line,
                Err(error) => {
                    tracing::warn!(%error, "no connection for notices; trying again");
                    // Whoever waits for an answer gets this one, and the queue is kept short.
                    tokio::select! {
                        () = sleep(RECONNECT_WAIT) => {}
                        wish = wishes.recv() => match wish {
                            None => return,
                            Some(Wish::Tell(sessions)) => self.waiting.extend(sessions),
                            Some(Wish::HoldAlone(answer)) => {
                                if answer.send(Err(error)).is_err() {
                                    tracing::debug!("nobody waits for the lock any more");
                                }
                            }
                        },
                    }
                    self.waiting.clear();
                    continue;
                }
            };
            match self.serve(line, &mut wishes).await {
                Ok(()) => return,
                Err(error) => tracing::warn!(%error, "the connection for notices was lost"),
            }
        }
    }

    async fn connect(&mut self) -> Result<Line> {
        let connecting = self.location.config().connect(self.location.tls()?);
        let connected = tokio::time::timeout(CONNECT_WAIT_MAX, connecting).await;
        let connected =
            connected.map_err(|_| DbError::Busy { name: "notices", seconds: CONNECT_WAIT_MAX.as_secs() })?;
        let (client, mut connection) =
            connected.map_err(|error| super::connect_error(&self.location, &error))?;
        let (hear, heard) = mpsc::channel(HEARD_MAX);
        let mut task = JoinSet::new();
        task.spawn(async move {
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                let AsyncMessage::Notification(notice) = message else { continue };
                if hear.send(notice).await.is_err() {
                    return;
                }
            }
        });
        client.batch_execute(&session_settings()).await?;
        client.batch_execute(&format!("LISTEN {CHANNEL}")).await?;
        if self.is_alone && !try_lock(&client).await? {
            // The epochs fence; what is lost is only that a second server is refused.
            tracing::error!("while the connection was lost, another server has taken this database");
        }
        // What was said meanwhile was not heard.
        for session in self.feed.followed() {
            self.feed.wake_followers(session);
        }
        Ok(Line { client, heard, _task: task })
    }

    /// Until the connection is lost (an error) or nobody has a handle any more.
    async fn serve(&mut self, mut line: Line, wishes: &mut mpsc::Receiver<Wish>) -> Result<()> {
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut tell_at: Option<Instant> = None;
        loop {
            tokio::select! {
                wish = wishes.recv() => match wish {
                    None => return Ok(()),
                    Some(Wish::Tell(sessions)) => {
                        self.waiting.extend(sessions);
                        tell_at = tell_at.or_else(|| Some(Instant::now() + GATHER));
                    }
                    Some(Wish::HoldAlone(answer)) => {
                        let held = hold(&line.client).await;
                        self.is_alone = matches!(held, Ok(true));
                        if answer.send(held).is_err() {
                            tracing::debug!("nobody waits for the lock any more");
                        }
                    }
                },
                heard = line.heard.recv() => match heard {
                    None => return Err(DbError::Closed),
                    Some(notice) => self.hear(notice.payload()),
                },
                () = until(tell_at), if tell_at.is_some() => {
                    tell_at = None;
                    self.tell(&line.client).await?;
                }
                _ = looks.tick() => self.look(&line.client).await?,
            }
        }
    }

    fn hear(&self, payload: &str) {
        let Some((sender, sessions)) = payload.split_once(' ') else { return };
        if sender == self.sender {
            return;
        }
        for session in sessions.split(',').filter_map(|text| text.parse().ok()) {
            self.feed.wake_followers(session);
        }
    }

    async fn tell(&mut self, client: &Client) -> Result<()> {
        let sessions: Vec<String> = self.waiting.drain().map(|session| session.to_string()).collect();
        for some in sessions.chunks(SESSIONS_MAX) {
            let payload = format!("{} {}", self.sender, some.join(","));
            client.execute("SELECT pg_notify($1, $2)", &[&CHANNEL, &payload]).await?;
        }
        Ok(())
    }

    async fn look(&mut self, client: &Client) -> Result<()> {
        let followed = self.feed.followed();
        if followed.is_empty() {
            self.heads.clear();
            return Ok(());
        }
        let ids: Vec<String> = followed.iter().map(SessionId::to_string).collect();
        let sql = "SELECT id, head, archived_at IS NOT NULL FROM session WHERE id = ANY($1::text[])";
        let mut found = HashMap::new();
        for row in client.query(sql, &[&ids]).await? {
            found.insert(row.try_get::<_, String>(0)?, (row.try_get(1)?, row.try_get(2)?));
        }
        let mut heads = HashMap::new();
        for (session, id) in followed.into_iter().zip(ids) {
            let now = found.get(&id).copied();
            // At the first look nothing is known: whoever follows has looked by himself, perhaps before the append.
            if self.heads.get(&session) != Some(&now) {
                self.feed.wake_followers(session);
            }
            heads.insert(session, now);
        }
        self.heads = heads;
        Ok(())
    }
}

async fn until(at: Option<Instant>) {
    if let Some(at) = at {
        tokio::time::sleep_until(at).await;
    }
}

async fn hold(client: &Client) -> Result<bool> {
    let until = Instant::now() + ALONE_WAIT_MAX;
    loop {
        if try_lock(client).await? {
            return Ok(true);
        }
        if Instant::now() > until {
            return Ok(false);
        }
        sleep(ALONE_LOOK_EVERY).await;
    }
}

/// A session that has the lock gets it again.
async fn try_lock(client: &Client) -> Result<bool> {
    let row = client.query_one("SELECT pg_try_advisory_lock($1, $2)", &[&LOCK_CLASS, &LOCK_SERVER]).await?;
    Ok(row.try_get(0)?)
}
