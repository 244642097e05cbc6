//! Snapshots: a home's published states, and the pointer to the current one. The pointer moves only here, in the
//! transaction that checks the lease's token, the base generation, the collection's floor and the limits (I5, I6, I8).
//!
//! A token fences **runners**: one host has one working copy and one actor for it, so what it offers under
//! any token since the home came to it descends from what it offered before. Only when the home goes to
//! another runner, or is replaced, do earlier tokens lose their force. That lets a snapshot of the last turn
//! arrive while the next one has its own token already.

use async_trait::async_trait;
use covey_harness::record::{Body, HomeOrigin};
use covey_types::{
    AgentId, FencingToken, Generation, HomeId, OrgId, RootHash, SessionId, Snapshot, SnapshotKind, StepId,
};
use covey_wire::api::history::GenerationName;

use crate::agents::Agent;
use crate::homes::Home;
use crate::{DbError, Result};

/// Sessions at most that are told in their journals when a home is replaced: the newest ones.
pub(crate) const TOLD_SESSIONS_MAX: i64 = 100;

/// How a snapshot came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A runner secured the home.
    Secured,
    /// It came from outside.
    Imported,
    /// It is, whole or in part, as an earlier generation was.
    Restored,
    /// It is another home's.
    Forked,
}

impl Origin {
    const ALL: [Self; 4] = [Self::Secured, Self::Imported, Self::Restored, Self::Forked];

    /// The one text form, as stored and sent.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Secured => "secured",
            Self::Imported => "imported",
            Self::Restored => "restored",
            Self::Forked => "forked",
        }
    }
}

/// A snapshot with what is known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRow {
    /// The snapshot itself.
    pub snapshot: Snapshot,
    /// The session it was taken in; none for what no session did.
    pub session: Option<SessionId>,
    /// Files in the home.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How it came about.
    pub origin: Origin,
    /// Of a restored or forked one: the generation whose state it is.
    pub from_generation: Option<Generation>,
    /// Of a forked one: the home of that generation.
    pub from_home: Option<HomeId>,
}

/// What a runner offers to publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publish {
    /// The home lease's token.
    pub token: FencingToken,
    /// A generation it descends from: the current one, or an earlier one of the same runner whose answer had
    /// not arrived.
    pub base: Generation,
    /// The state; all its blocks are durable.
    pub root: RootHash,
    /// How still the home was.
    pub kind: SnapshotKind,
    /// The last finished step.
    pub step: Option<StepId>,
    /// Files in the home.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The collection that the store knew of when its upload began.
    pub epoch: u64,
}

/// What became of an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Published {
    /// It is the home's current snapshot under this number.
    Current(Generation),
    /// A limit is in the way; the reason is in the lease holder's journal.
    OverQuota(String),
    /// A collection has passed: what the offer relies on may be gone.
    Collected {
        /// The least epoch that is taken.
        floor: u64,
    },
}

/// A row that is about to be written.
pub(crate) struct NewSnapshot {
    pub(crate) generation: Generation,
    pub(crate) root: RootHash,
    pub(crate) kind: SnapshotKind,
    pub(crate) session: Option<SessionId>,
    pub(crate) step: Option<StepId>,
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    pub(crate) origin: Origin,
    pub(crate) from: Option<(Option<HomeId>, Generation)>,
}

/// A state that shall take the place of a home's current one without any runner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replacement {
    /// The home's current generation, as the caller knows it; none for whatever is current.
    pub base: Option<Generation>,
    /// The state; all its blocks are durable.
    pub root: RootHash,
    /// Files in it.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The collection that the store knew of when its upload began; none when the state is that of a snapshot that is
    /// read in the same transaction, so that no collection can have missed it.
    pub epoch: Option<u64>,
    /// How it comes about.
    pub origin: Origin,
    /// Whose earlier state it is, whole or in part; a home only when it is another one.
    pub from: Option<(Option<HomeId>, Generation)>,
    /// Also when the last step in the home is not secured, so that its files can only be had from the runner's host.
    pub over_unsecured: bool,
}

pub(crate) fn of_snapshot(
    from: &SnapshotRow,
    base: Option<Generation>,
    origin: Origin,
    home: Option<HomeId>,
) -> Replacement {
    Replacement {
        base,
        root: from.snapshot.root,
        files: from.files,
        bytes: from.bytes,
        epoch: None,
        origin,
        from: Some((home, from.snapshot.generation)),
        over_unsecured: false,
    }
}

/// Whose home a fork shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ForkTarget {
    /// An agent that is there.
    Agent(AgentId),
    /// A new agent, configured as that of the source; without a name it is named after it.
    New {
        /// For people.
        name: Option<String>,
    },
}

/// What became of a fork.
#[derive(Debug, Clone, PartialEq)]
pub struct Forked {
    /// The agent whose home it is.
    pub agent: Agent,
    /// Its generation there.
    pub generation: Generation,
    /// The snapshot that both share.
    pub from: SnapshotRow,
}

/// What is stored of snapshots.
#[async_trait]
pub trait Snapshots: Send + Sync {
    /// Lists a home's snapshots, newest first, those below `before` only.
    ///
    /// # Errors
    /// [`DbError::NotFound`] for the home.
    async fn list_snapshots(
        &self,
        org: OrgId,
        home: HomeId,
        before: Option<Generation>,
        limit: usize,
    ) -> Result<Vec<SnapshotRow>>;

    /// How many snapshots of a home are kept.
    ///
    /// # Errors
    /// When the database refuses.
    async fn count_snapshots(&self, org: OrgId, home: HomeId) -> Result<u64>;

    /// Finds the snapshot that is meant.
    ///
    /// # Errors
    /// [`DbError::NotFound`] for the home, and for a snapshot that never was or is not kept any more.
    async fn snapshot(&self, org: OrgId, home: HomeId, name: GenerationName) -> Result<SnapshotRow>;

    /// Makes a state the home's current snapshot and records it in the journal of the session that holds, or
    /// last held, the lease; one transaction. The same root again keeps its generation. A runner names only the home.
    ///
    /// # Errors
    /// [`DbError::Fenced`] for a token from before the home came to its runner; [`DbError::Conflict`] when `base`
    /// is from before that, or was never reached; [`DbError::NotFound`].
    async fn publish(&self, home: HomeId, offer: &Publish) -> Result<Published>;

    /// Makes a state from outside the home's current snapshot. Only while no session acts on the home; late publishes of
    /// earlier holders are refused from then on. Sessions that have worked in the home and are not archived are told.
    ///
    /// # Errors
    /// [`DbError::NotFound`]; [`DbError::Conflict`] when the lease is held, `base` is not current, or a collection has
    /// passed since the upload began; [`DbError::TooLarge`] when the home may not be so large.
    async fn replace_home(&self, org: OrgId, home: HomeId, with: &Replacement) -> Result<Generation>;

    /// Refuses what was stored in an earlier epoch than is taken now.
    ///
    /// # Errors
    /// [`DbError::Conflict`], as [`Self::replace_home`] says it; [`DbError::NotFound`].
    async fn check_epoch(&self, org: OrgId, home: HomeId, epoch: u64) -> Result<()>;

    /// As [`Self::replace_home`] with a state that was made from the current one and an earlier snapshot of the same
    /// home, whose number `with.from` says. None when a collection has passed since it was begun: it has to be made
    /// again.
    ///
    /// # Errors
    /// As [`Self::replace_home`]; [`DbError::NotFound`] also when the snapshot is not kept any more.
    async fn replace_edited_home(
        &self,
        org: OrgId,
        home: HomeId,
        with: &Replacement,
    ) -> Result<Option<Generation>>;

    /// Makes the snapshot `name` of a home its current one again, under a new number.
    ///
    /// # Errors
    /// As [`Self::snapshot`] and [`Self::replace_home`]; `base` none stands for whatever is current.
    async fn restore_home(
        &self,
        org: OrgId,
        home: HomeId,
        name: GenerationName,
        base: Option<Generation>,
        over_unsecured: bool,
    ) -> Result<(Generation, SnapshotRow)>;

    /// Makes the snapshot `name` of the home `source` the current one of another agent's home of the same org. Nothing
    /// is copied: both name the same blocks.
    ///
    /// # Errors
    /// As [`Self::snapshot`] and [`Self::replace_home`].
    async fn fork_home(
        &self,
        org: OrgId,
        source: HomeId,
        name: GenerationName,
        target: &ForkTarget,
        over_unsecured: bool,
    ) -> Result<Forked>;
}

/// The name of a forked agent that was given none.
pub(crate) fn name_of_fork(given: Option<&str>, source: &str) -> String {
    given.map_or_else(|| format!("{source} (fork)"), str::to_owned)
}

/// Refuses an offer under a token from before the home came to its runner, or from another line; tells whether it
/// would change the home.
pub(crate) fn judge_offer(home: &Home, offer: &Publish) -> Result<bool> {
    if offer.token < home.lease_floor || offer.token > home.lease_token {
        return Err(DbError::Fenced { what: format!("home {}", home.id), token: offer.token.0 });
    }
    let changed = home.root != Some(offer.root);
    // A publish whose answer was lost comes again with the old base: its root is current, so it is answered
    // like the first time.
    if changed && !(home.floor_generation..=home.generation).contains(&offer.base) {
        return Err(DbError::Conflict(format!(
            "home {} is at generation {}, the publish descends from {}",
            home.id, home.generation, offer.base
        )));
    }
    Ok(changed)
}

/// The row that an offer becomes.
pub(crate) fn offered(home: &Home, offer: &Publish) -> NewSnapshot {
    NewSnapshot {
        generation: home.generation.next(),
        root: offer.root,
        kind: offer.kind,
        session: home.lease_session,
        step: offer.step,
        files: offer.files,
        bytes: offer.bytes,
        origin: Origin::Secured,
        from: None,
    }
}

/// What the journal says of an offer that was taken.
pub(crate) fn secured(generation: Generation, changed: bool, offer: &Publish) -> Body {
    Body::HomeSecured {
        generation,
        root: offer.root,
        kind: offer.kind,
        step: offer.step,
        changed,
        files: offer.files,
        bytes: offer.bytes,
    }
}

/// Refuses to replace a home on which a session acts.
pub(crate) fn refuse_if_held(home: &Home) -> Result<()> {
    if !home.lease_held {
        return Ok(());
    }
    let session = home.lease_session.map_or_else(|| "a session".to_owned(), |s| format!("session {s}"));
    Err(DbError::Conflict(format!(
        "{session} acts on home {}; wait until it is idle, or interrupt it, then try again",
        home.id
    )))
}

/// Why a home whose last step is not secured is not replaced.
pub(crate) fn not_secured_yet(home: HomeId, session: SessionId) -> DbError {
    DbError::Conflict(format!(
        "the last step of session {session} in home {home} is not secured yet; try again in a moment, or force it: \
         what that step changed then stays only on the runner's host"
    ))
}

/// Refuses a replacement that was made on another state.
pub(crate) fn refuse_if_moved(home: &Home, base: Option<Generation>) -> Result<()> {
    match base {
        Some(base) if base != home.generation => Err(DbError::Conflict(format!(
            "home {} is at generation {}, not {base}; look at it again, then try again",
            home.id, home.generation
        ))),
        _ => Ok(()),
    }
}

/// Why what was stored before a collection does not become current.
pub(crate) fn collected_since(home: HomeId) -> DbError {
    DbError::Conflict(format!(
        "a garbage collection has passed since what shall become home {home} was stored, and may have deleted parts \
         of it; store it again, then try again"
    ))
}

/// The row that a replacement becomes.
pub(crate) fn replacing(generation: Generation, with: &Replacement) -> NewSnapshot {
    NewSnapshot {
        generation,
        root: with.root,
        kind: SnapshotKind::Quiesced,
        session: None,
        step: None,
        files: with.files,
        bytes: with.bytes,
        origin: with.origin,
        from: with.from,
    }
}

/// What sessions that have worked in a replaced home are told.
pub(crate) fn replaced(generation: Generation, with: &Replacement) -> Body {
    let origin = match with.origin {
        Origin::Restored => HomeOrigin::Restored,
        Origin::Forked => HomeOrigin::Forked,
        Origin::Imported | Origin::Secured => HomeOrigin::Imported,
    };
    let from_generation = with.from.map(|(_, generation)| generation);
    Body::HomeReplaced { generation, root: with.root, origin, from_generation }
}

/// Where a name points: at most this generation, after passing so many.
pub(crate) fn searched(home: &Home, name: GenerationName) -> (i64, i64) {
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    match name {
        GenerationName::Current => (number(home.generation.0), 0),
        GenerationName::Number(wanted) => (number(wanted), 0),
        GenerationName::Before(before) => (number(home.generation.0), number(before)),
    }
}

/// The snapshot that was found, if it is the one that is meant.
pub(crate) fn meant(home: &Home, name: GenerationName, found: Option<SnapshotRow>) -> Result<SnapshotRow> {
    let exact =
        |found: &SnapshotRow| !matches!(name, GenerationName::Number(n) if found.snapshot.generation.0 != n);
    found.filter(exact).ok_or_else(|| match home.generation {
        Generation(0) => DbError::NotFound { what: "a snapshot of", id: home.id.to_string() },
        _ => DbError::NotFound { what: "a kept snapshot", id: format!("{name} of {}", home.id) },
    })
}

/// Kind and origin as stored.
pub(crate) fn kind_and_origin(kind: &str, origin: &str) -> Result<(SnapshotKind, Origin)> {
    let odd = |what, text: &str| DbError::Corrupt { what, detail: format!("`{text}` is none") };
    let known_kind = SnapshotKind::ALL.into_iter().find(|known| known.as_str() == kind);
    let known_origin = Origin::ALL.into_iter().find(|known| known.as_str() == origin);
    Ok((
        known_kind.ok_or_else(|| odd("snapshot kind", kind))?,
        known_origin.ok_or_else(|| odd("snapshot origin", origin))?,
    ))
}
