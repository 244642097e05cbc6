//! Announcements: which session's journal grew.
//!
//! An announcement carries no data, so none can be lost: whoever is woken reads the journal behind its own
//! cursor. What does not belong here: live deltas, which are never in the journal.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use covey_types::{OrgId, SessionId};
use serde_json::Value;
use tokio::sync::{Notify, watch};

use crate::{Db, DbError, Order, Result};

/// Events in one piece of [`Follower::next`].
const FOLLOW_EVENTS_MAX: usize = 200;

/// Who waits for which journal.
#[derive(Debug, Clone, Default)]
pub struct Feed {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    followers: Mutex<HashMap<SessionId, watch::Sender<u64>>>,
    touched: Mutex<HashSet<SessionId>>,
    any: Notify,
    freed: watch::Sender<u64>,
}

fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Both maps are valid after every single statement, so a panic elsewhere cannot leave them half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Feed {
    /// Wakes followers and the supervisor of the drivers: this process appended, or wants a session looked at.
    pub fn announce(&self, session: SessionId) {
        self.wake_followers(session);
        unpoisoned(&self.inner.touched).insert(session);
        self.inner.any.notify_one();
    }

    /// Wakes followers alone: another server appended, whose drivers it is.
    pub(crate) fn wake_followers(&self, session: SessionId) {
        let mut followers = unpoisoned(&self.inner.followers);
        if let Some(sender) = followers.get(&session) {
            if sender.receiver_count() == 0 {
                followers.remove(&session);
            } else {
                sender.send_modify(|n| *n += 1);
            }
        }
    }

    /// A session, and the home that it held, were given back, here or by another server: who waits for a home tries again.
    pub fn free(&self) {
        self.inner.freed.send_modify(|n| *n += 1);
    }

    /// Changes with each [`free`](Self::free).
    pub fn freed(&self) -> watch::Receiver<u64> {
        self.inner.freed.subscribe()
    }

    /// Sessions that somebody follows; who follows no more is forgotten.
    pub(crate) fn followed(&self) -> Vec<SessionId> {
        let mut followers = unpoisoned(&self.inner.followers);
        followers.retain(|_, sender| sender.receiver_count() > 0);
        followers.keys().copied().collect()
    }

    /// A receiver that changes with each append to the session.
    pub fn watch(&self, session: SessionId) -> watch::Receiver<u64> {
        unpoisoned(&self.inner.followers).entry(session).or_insert_with(|| watch::channel(0).0).subscribe()
    }

    /// Waits until some journal grew and returns which; for the one supervisor of the drivers.
    pub async fn touched(&self) -> HashSet<SessionId> {
        loop {
            let notified = self.inner.any.notified();
            let touched = std::mem::take(&mut *unpoisoned(&self.inner.touched));
            if !touched.is_empty() {
                return touched;
            }
            notified.await;
        }
    }
}

/// Follows a session's public events from a position on, without gaps.
#[derive(Debug)]
pub struct Follower {
    db: Db,
    org: OrgId,
    session: SessionId,
    cursor: u64,
    grown: watch::Receiver<u64>,
}

impl Db {
    /// Follows the public events of a session behind `after_seq` (0: from the first one).
    pub fn follow(&self, org: OrgId, session: SessionId, after_seq: u64) -> Follower {
        // Subscribed before the first look: an append between look and wait is seen as a change.
        let grown = self.feed().watch(session);
        Follower { db: self.clone(), org, session, cursor: after_seq, grown }
    }
}

impl Follower {
    /// Waits for the next events and returns them with their positions: at least one, or none when the session is
    /// archived and all of its events were returned: nothing more will come. Safe to drop and call again.
    ///
    /// # Errors
    /// When the journal cannot be read, or the session is gone.
    pub async fn next(&mut self) -> Result<Vec<(u64, Value)>> {
        loop {
            self.grown.mark_unchanged();
            let events = self.look().await?;
            if events.is_empty() && self.db.session(self.org, self.session).await?.archived_at.is_some() {
                // What came between the two looks was before the end: an archived session takes no more.
                let last = self.look().await?;
                self.cursor = last.last().map_or(self.cursor, |(seq, _)| *seq);
                return Ok(last);
            }
            if let Some((seq, _)) = events.last() {
                self.cursor = *seq;
                return Ok(events);
            }
            self.grown.changed().await.map_err(|_| DbError::Closed)?;
        }
    }

    async fn look(&self) -> Result<Vec<(u64, Value)>> {
        let (org, session, cursor) = (self.org, self.session, self.cursor);
        self.db.public_events(org, session, cursor, FOLLOW_EVENTS_MAX, Order::Ascending).await
    }
}
