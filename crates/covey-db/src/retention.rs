//! Which snapshots of a home are kept, and why. What nothing keeps goes with the next collection, never before.
//!
//! Kept are: the current one; the one that each session which is not archived began from, and the last that it made
//! (so that what a session did can be told and taken back); the newest ones and the younger ones of the home's rules.

use std::collections::BTreeMap;

use async_trait::async_trait;
use covey_types::{Generation, HomeId, OrgId, RootHash, Timestamp};
use covey_wire::api::history::HomeRules;

use crate::Result;

/// What keeps a snapshot; the first of several that holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptBy {
    /// It is the home's current one.
    Current,
    /// A session that is not archived began from it or left it.
    Session,
    /// The rule about the newest ones.
    Newest,
    /// The rule about the younger ones.
    Age,
}

impl KeptBy {
    /// As the API says it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Session => "session",
            Self::Newest => "newest",
            Self::Age => "age",
        }
    }
}

/// What is kept of homes.
#[async_trait]
pub trait Retention: Send + Sync {
    /// The snapshots of a home that something keeps at the time `now`.
    ///
    /// # Errors
    /// [`crate::DbError::NotFound`].
    async fn kept_snapshots(
        &self,
        org: OrgId,
        home: HomeId,
        now: Timestamp,
    ) -> Result<BTreeMap<Generation, KeptBy>>;

    /// Homes of the org, in no order.
    ///
    /// # Errors
    /// When the database refuses.
    async fn homes_of_org(&self, org: OrgId) -> Result<Vec<HomeId>>;

    /// Forgets the snapshots of these homes that nothing keeps; tells how many went. Their blocks stay until they are
    /// collected. A home that is not there has none.
    ///
    /// # Errors
    /// When the database refuses.
    async fn forget_snapshots(&self, org: OrgId, homes: &[HomeId]) -> Result<u64>;

    /// How many [`Self::forget_snapshots`] of all homes would forget at the time `now`.
    ///
    /// # Errors
    /// When the database refuses.
    async fn forgettable_snapshots(&self, org: OrgId, now: Timestamp) -> Result<u64>;

    /// Roots of the org's snapshots: those of one home, or without one, of all but `except`.
    ///
    /// # Errors
    /// When the database refuses.
    async fn snapshot_roots(
        &self,
        org: OrgId,
        only: Option<HomeId>,
        except: Option<HomeId>,
    ) -> Result<Vec<RootHash>>;

    /// Roots of the snapshots of all homes of the org that something keeps at the time `now`.
    ///
    /// # Errors
    /// When the database refuses.
    async fn kept_roots(&self, org: OrgId, now: Timestamp) -> Result<Vec<RootHash>>;
}

/// Decides what is kept: `snapshots` are all of the home, newest first, with the time of their publish in milliseconds.
pub(crate) fn kept_of(
    current: Generation,
    of_sessions: &[Generation],
    rules: &HomeRules,
    now: Timestamp,
    snapshots: impl IntoIterator<Item = (Generation, i64)>,
) -> BTreeMap<Generation, KeptBy> {
    let oldest_ms = rules.keep_for_s.map(|seconds| {
        now.unix_ms().saturating_sub(i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1000))
    });
    let mut kept = BTreeMap::new();
    for (newer, (generation, published_ms)) in (0_u64..).zip(snapshots) {
        let why = if generation == current {
            Some(KeptBy::Current)
        } else if of_sessions.contains(&generation) {
            Some(KeptBy::Session)
        } else if rules.keep_newest.is_some_and(|count| newer < count) {
            Some(KeptBy::Newest)
        } else if oldest_ms.is_some_and(|oldest| published_ms >= oldest) {
            Some(KeptBy::Age)
        } else {
            None
        };
        kept.extend(why.map(|why| (generation, why)));
    }
    kept
}
