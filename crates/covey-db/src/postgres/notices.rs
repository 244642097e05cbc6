//! Telling other servers which journals grew, and hearing it from them.
//!
//! A connection of its own listens, and sends what the commits of this server touched, some at once: a `NOTIFY` inside a
//! commit would make all commits wait for each other (measured: a ninth of the commits at 32 writers). A notice may be
//! lost, with the connection or with a server that dies between commit and notice; so the heads of the sessions that
//! somebody follows here are read every second, too. Who hears a notice reads the journal: it carries no data.
//!
//! The same connection tells which sessions were handed over, and that homes were given back, so that who waits tries again.

use std::collections::{HashMap, HashSet};
use std::future::poll_fn;
use std::time::Duration;

use covey_types::SessionId;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tokio_postgres::{AsyncMessage, Client, Notification};
use uuid::Uuid;

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
const CHANNEL: &str = "covey_journal";
/// As the other one, for sessions that shall be taken; none for a home that was given back.
const FREED_CHANNEL: &str = "covey_freed";

/// The task with the connection; ended when dropped.
#[derive(Debug)]
pub(super) struct Notices {
    wishes: mpsc::Sender<Wish>,
    _task: JoinSet<()>,
}

#[derive(Debug)]
enum Wish {
    Tell(Vec<SessionId>),
    Freed(Option<SessionId>),
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
            freed: None,
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

    /// Tells other servers that a home was given back, and which session is handed over.
    pub(super) fn tell_freed(&self, handed_over: Option<SessionId>) {
        if self.wishes.try_send(Wish::Freed(handed_over)).is_err() {
            tracing::debug!("too many notices wait; who waits for a home looks again by himself");
        }
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
    /// Homes were given back, and these sessions are to be taken.
    freed: Option<HashSet<SessionId>>,
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
                    // The queue is kept short: what is not told is seen at the next look.
                    tokio::select! {
                        () = sleep(RECONNECT_WAIT) => {}
                        wish = wishes.recv() => match wish {
                            None => return,
                            Some(Wish::Tell(sessions)) => self.waiting.extend(sessions),
                            Some(Wish::Freed(_)) => {}
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
        client.batch_execute(&format!("LISTEN {CHANNEL}; LISTEN {FREED_CHANNEL}")).await?;
        self.feed.free();
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
                    Some(Wish::Freed(handed_over)) => {
                        self.freed.get_or_insert_default().extend(handed_over);
                        tell_at = tell_at.or_else(|| Some(Instant::now() + GATHER));
                    }
                },
                heard = line.heard.recv() => match heard {
                    None => return Err(DbError::Closed),
                    Some(notice) => self.hear(&notice),
                },
                () = until(tell_at), if tell_at.is_some() => {
                    tell_at = None;
                    self.tell(&line.client).await?;
                }
                _ = looks.tick() => self.look(&line.client).await?,
            }
        }
    }

    fn hear(&self, notice: &Notification) {
        let Some((sender, sessions)) = notice.payload().split_once(' ') else { return };
        if sender == self.sender {
            return;
        }
        let was_freed = notice.channel() == FREED_CHANNEL;
        for session in sessions.split(',').filter_map(|text| text.parse().ok()) {
            match was_freed {
                // Somebody must drive it: the supervisor looks.
                true => self.feed.announce(session),
                false => self.feed.wake_followers(session),
            }
        }
        if was_freed {
            self.feed.free();
        }
    }

    async fn tell(&mut self, client: &Client) -> Result<()> {
        let sessions: Vec<String> = self.waiting.drain().map(|session| session.to_string()).collect();
        for some in sessions.chunks(SESSIONS_MAX) {
            self.notify(client, CHANNEL, some).await?;
        }
        let Some(freed) = self.freed.take() else { return Ok(()) };
        let freed: Vec<String> = freed.iter().map(SessionId::to_string).collect();
        for some in freed.chunks(SESSIONS_MAX) {
            self.notify(client, FREED_CHANNEL, some).await?;
        }
        if freed.is_empty() { self.notify(client, FREED_CHANNEL, &[]).await } else { Ok(()) }
    }

    async fn notify(&self, client: &Client, channel: &str, sessions: &[String]) -> Result<()> {
        let payload = format!("{} {}", self.sender, sessions.join(","));
        client.execute("SELECT pg_notify($1, $2)", &[&channel, &payload]).await?;
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
