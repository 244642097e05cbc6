//! Servers that share one database: who is among them, which sessions each has, and what becomes of those of one that is
//! gone.
//!
//! A server that has joined is an *instance*: a number that is new at every join, never used again, and good for as long as
//! its row is there. Whoever finds that an instance is gone removes the row, and from then on its sessions belong to
//! whoever claims them first. Nothing here makes acting safe: that is the session's epoch, which every append checks (I5),
//! and the home's token, which runner and sandbox check. This only decides who tries. What does not belong here: driving.

use std::fmt;

use async_trait::async_trait;
use covey_types::{OrgId, SessionId};
use tokio::sync::watch;

use crate::Result;
use crate::sessions::Session;

/// Sessions that one statement takes over: few enough that the first of them act while the others are still claimed.
pub const TAKE_OVER_SESSIONS_MAX: usize = 128;

/// One life of one server among others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(pub i64);

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What a server says of itself when it joins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerPlace {
    /// URL at which runners reach it.
    pub address: String,
    /// Its version, for people.
    pub version: String,
}

/// A server that is among those of the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Which.
    pub id: InstanceId,
    /// URL at which runners reach it.
    pub address: String,
    /// Its version, for people.
    pub version: String,
    /// It hands its sessions over and takes none.
    pub draining: bool,
}

/// How this process stands among the servers of its database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Not among them. Entered at the start, and when it has left.
    Outside,
    /// No other server may be there, and no lease is needed. Entered by taking the database for itself; left never.
    Alone,
    /// Its row is there, and was renewed in time. Entered by joining and by a renewal.
    Member(InstanceId),
    /// No renewal came through for nearly the whole term: others may be taking its sessions already. Left by a renewal,
    /// or by learning that the row is gone.
    Silent(InstanceId),
    /// It was asked to end: it claims nothing, and gives each session away at its next border.
    Draining(InstanceId),
    /// Others have removed its row: this instance never acts again. Left by joining as another one.
    Over(InstanceId),
}

/// What can happen to a [`Standing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StandingEvent {
    /// The database was taken for this process alone.
    TookAlone,
    /// A row was made, and its lock is held.
    Joined(InstanceId),
    /// The row is there and its term begins anew.
    Renewed,
    /// The term is nearly over by our own clock, counted from before the last renewal was sent.
    TermNearlyOver,
    /// The row is not there.
    RowGone,
    /// This server shall end.
    DrainAsked,
    /// The row was removed by ourselves.
    Left,
}

impl Standing {
    /// What follows (I15). An event that means nothing in a state leaves it as it is: each of them may come late.
    #[must_use]
    pub const fn after(self, event: StandingEvent) -> Self {
        use StandingEvent as E;
        match (self, event) {
            (Self::Outside, E::TookAlone) => Self::Alone,
            (Self::Outside | Self::Over(_), E::Joined(id)) => Self::Member(id),
            (Self::Silent(id), E::Renewed) => Self::Member(id),
            (Self::Member(id), E::TermNearlyOver) => Self::Silent(id),
            (Self::Member(id) | Self::Silent(id) | Self::Draining(id), E::RowGone) => Self::Over(id),
            // What does not come through is not worth waiting for: the others take over at the end of the term.
            (Self::Member(id) | Self::Silent(id), E::DrainAsked) => Self::Draining(id),
            (Self::Over(_), E::DrainAsked | E::Left) => Self::Outside,
            (Self::Member(_) | Self::Silent(_) | Self::Draining(_), E::Left) => Self::Outside,
            (same, _) => same,
        }
    }

    /// Whether it may take sessions.
    #[must_use]
    pub const fn may_claim(self) -> bool {
        matches!(self, Self::Alone | Self::Member(_))
    }

    /// Whether drivers may start anything. Politeness: what makes acting safe is checked by the database and the runner.
    #[must_use]
    pub const fn may_act(self) -> bool {
        matches!(self, Self::Alone | Self::Member(_) | Self::Draining(_))
    }

    /// Under which number it acts among others.
    #[must_use]
    pub const fn instance(self) -> Option<InstanceId> {
        match self {
            Self::Member(id) | Self::Silent(id) | Self::Draining(id) => Some(id),
            Self::Outside | Self::Alone | Self::Over(_) => None,
        }
    }
}

/// Why a driver gives its session back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// Nothing is to be done.
    Idle,
    /// Another server shall go on.
    HandedOver,
}

/// Being one of several servers.
#[async_trait]
pub trait Leases: Send + Sync {
    /// Joins the servers of this database and keeps the lease until [`leave`](Self::leave) or the process ends. Where a
    /// database has one server only, the same as [`crate::Store::take_over`]. Returns the default org.
    ///
    /// # Errors
    /// [`crate::DbError::Served`] when a server is at work that shares with nobody.
    async fn join(&self, place: &ServerPlace) -> Result<OrgId>;

    /// How this process stands, now and later.
    fn standing(&self) -> watch::Receiver<Standing>;

    /// The servers of the database, ourselves included; empty where there is one only.
    fn servers(&self) -> watch::Receiver<Vec<Instance>>;

    /// Changes whenever a server was found to be gone, so that its sessions want to be taken.
    fn left_behind(&self) -> watch::Receiver<u64>;

    /// Takes sessions whose server is gone, at most [`TAKE_OVER_SESSIONS_MAX`], for this one: each with a new epoch, and
    /// with `driver.claimed` in its journal. None when none is left, or another server takes them at this moment.
    ///
    /// # Errors
    /// When the database refuses.
    async fn take_left_behind(&self) -> Result<Vec<(OrgId, Session)>>;

    /// Gives a session back, and its home, for whom `epoch` is still the current one; else nothing changes.
    ///
    /// # Errors
    /// When the database refuses.
    async fn release_session(&self, org: OrgId, id: SessionId, epoch: u64, rest: Rest) -> Result<()>;

    /// Tells other servers that a session is to be driven, which this one does not.
    fn offer_session(&self, id: SessionId);

    /// Claims no more; others see that.
    ///
    /// # Errors
    /// When the database refuses.
    async fn drain(&self) -> Result<()>;

    /// Ends the lease: what is still held is taken by others at once.
    ///
    /// # Errors
    /// When the database refuses.
    async fn leave(&self) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: InstanceId = InstanceId(1);
    const TWO: InstanceId = InstanceId(2);

    #[test]
    fn each_event_leads_from_each_standing_where_the_table_says() {
        use Standing::{Alone, Draining, Member, Outside, Over, Silent};
        use StandingEvent as E;
        let events =
            [E::TookAlone, E::Joined(TWO), E::Renewed, E::TermNearlyOver, E::RowGone, E::DrainAsked, E::Left];
        let table = [
            (Outside, [Alone, Member(TWO), Outside, Outside, Outside, Outside, Outside]),
            (Alone, [Alone, Alone, Alone, Alone, Alone, Alone, Alone]),
            (
                Member(ONE),
                [Member(ONE), Member(ONE), Member(ONE), Silent(ONE), Over(ONE), Draining(ONE), Outside],
            ),
            (
                Silent(ONE),
                [Silent(ONE), Silent(ONE), Member(ONE), Silent(ONE), Over(ONE), Draining(ONE), Outside],
            ),
            (
                Draining(ONE),
                [
                    Draining(ONE),
                    Draining(ONE),
                    Draining(ONE),
                    Draining(ONE),
                    Over(ONE),
                    Draining(ONE),
                    Outside,
                ],
            ),
            (Over(ONE), [Over(ONE), Member(TWO), Over(ONE), Over(ONE), Over(ONE), Outside, Outside]),
        ];
        for (from, to) in table {
            for (event, expected) in events.into_iter().zip(to) {
                assert_eq!(from.after(event), expected, "{from:?} after {event:?}");
            }
        }
    }

    #[test]
    fn only_who_is_sure_of_its_lease_claims_and_an_instance_that_is_over_never_acts_again() {
        use Standing::{Alone, Draining, Member, Outside, Over, Silent};
        let rights = [Outside, Alone, Member(ONE), Silent(ONE), Draining(ONE), Over(ONE)]
            .map(|standing| (standing.may_claim(), standing.may_act(), standing.instance().is_some()));
        assert_eq!(
            rights,
            [
                (false, false, false),
                (true, true, false),
                (true, true, true),
                (false, false, true),
                (false, true, true),
                (false, false, false)
            ]
        );
    }
}
