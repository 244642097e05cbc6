//! Homes and their leases. What does not belong here: snapshots, and moving the pointer ([`crate::snapshots`]).
//!
//! A token fences **runners**: one host has one working copy and one actor for it, so what it offers under
//! any token since the home came to it descends from what it offered before. Only when the home goes to
//! another runner, or is imported, do earlier tokens lose their force. That lets a snapshot of the last turn
//! arrive while the next one has its own token already.

use async_trait::async_trait;
use covey_types::{
    AgentId, Fault, FencingToken, Generation, HomeId, OrgId, RootHash, RunnerId, SessionId, StepId, Timestamp,
};

use crate::{Page, Result};

/// Deleted homes of an org that are remembered, the newest ones. A runner that does not dial in while so many are
/// deleted keeps its copies of the older ones.
pub const DELETED_HOMES_MAX: i64 = 10_000;

/// A home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    /// Its id.
    pub id: HomeId,
    /// Its agent.
    pub agent: AgentId,
    /// Number of the current snapshot; 0 when there is none yet.
    pub generation: Generation,
    /// The current snapshot's state.
    pub root: Option<RootHash>,
    /// The last token that was given out.
    pub lease_token: FencingToken,
    /// The session that holds the lease, or held it last.
    pub lease_session: Option<SessionId>,
    /// Whether it is held now.
    pub lease_held: bool,
    /// The runner that the last token was given to.
    pub lease_runner: Option<RunnerId>,
    /// The first token since the home came to that runner.
    pub lease_floor: FencingToken,
    /// The generation it came there with.
    pub floor_generation: Generation,
    /// When it was created.
    pub created_at: Timestamp,
    /// Set while what was done in it last could not be published.
    pub unsecured: Option<Unsecured>,
}

/// Since when and why a home is not secured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsecured {
    /// Since when, by the server's clock.
    pub since: Timestamp,
    /// For people.
    pub reason: String,
}

impl Unsecured {
    pub(crate) fn of(since: Option<i64>, reason: Option<String>) -> Option<Self> {
        Some(Self { since: Timestamp::from_unix_ms(since?), reason: reason? })
    }
}

/// What became of an attempt to take a home's lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// It is held now, under this token.
    Granted(FencingToken),
    /// Another session acts on the home.
    HeldBy(SessionId),
}

/// What is stored of homes, snapshots apart.
#[async_trait]
pub trait Homes: Send + Sync {
    /// Reads one home.
    ///
    /// # Errors
    /// [`crate::DbError::NotFound`].
    async fn home(&self, org: OrgId, id: HomeId) -> Result<Home>;

    /// Lists homes.
    ///
    /// # Errors
    /// When the database refuses.
    async fn list_homes(&self, org: OrgId, page: &Page<HomeId>) -> Result<Vec<Home>>;

    /// Takes the home's lease for a session that acts on it through `runner`; each grant has a new, higher token.
    /// A session that holds it already gets a new token as well. With another runner than before, the earlier one
    /// can publish no more. `epoch`: the driver's; one that was overtaken must not take the home from who overtook it.
    ///
    /// # Errors
    /// [`crate::DbError::NotFound`]; [`crate::DbError::Fenced`] when `epoch` is not the session's any more.
    async fn claim_home(
        &self,
        org: OrgId,
        id: HomeId,
        session: SessionId,
        epoch: Option<u64>,
        runner: RunnerId,
    ) -> Result<Claim>;

    /// Gives the lease back. The token stays good for late publishes until the next claim.
    ///
    /// # Errors
    /// When the database refuses.
    async fn release_home(&self, org: OrgId, id: HomeId, session: SessionId) -> Result<()>;

    /// Notes why the home is not secured; the time of the first reason in a row stays.
    ///
    /// # Errors
    /// When the database refuses.
    async fn mark_home_unsecured(&self, org: OrgId, id: HomeId, reason: &str) -> Result<()>;

    /// Records in the lease holder's journal that a secure failed, and that the home is unsecured. A runner names only
    /// the home.
    ///
    /// # Errors
    /// [`crate::DbError::NotFound`].
    async fn note_secure_failed(&self, id: HomeId, fault: Fault, detail: &str) -> Result<()>;

    /// Whether the result of a call that a runner reports for a home is in the journal, or nobody acts on the home any
    /// more, so that the runner's copy may be dropped.
    ///
    /// # Errors
    /// [`crate::DbError::NotFound`] for the home.
    async fn is_result_known(&self, id: HomeId, step: StepId) -> Result<bool>;

    /// The org's homes that were deleted with their agents, in order: the newest [`DELETED_HOMES_MAX`] of them.
    ///
    /// # Errors
    /// When the database refuses.
    async fn deleted_homes(&self, org: OrgId) -> Result<Vec<HomeId>>;
}

/// What a claim of `home` writes; none when another session holds it.
pub(crate) struct Grant {
    pub(crate) token: FencingToken,
    pub(crate) floor: FencingToken,
    pub(crate) floor_generation: Generation,
}

/// Decides a claim of the lease.
pub(crate) fn grant(
    home: &Home,
    session: SessionId,
    runner: RunnerId,
) -> std::result::Result<Grant, SessionId> {
    if home.lease_held
        && let Some(holder) = home.lease_session
        && holder != session
    {
        return Err(holder);
    }
    let token = home.lease_token.next();
    let (floor, floor_generation) = if home.lease_runner == Some(runner) {
        (home.lease_floor, home.floor_generation)
    } else {
        (token, home.generation)
    };
    Ok(Grant { token, floor, floor_generation })
}
