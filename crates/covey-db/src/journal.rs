//! The journal: append and read. Every append moves the session's head in the same transaction; a driver's
//! append also checks its fencing token there (I5). The database numbers the records.

use async_trait::async_trait;
use covey_harness::record::{Body, ModelUsage, Permission, Record, StopReason};
use covey_types::{EventId, OrgId, SessionId, SessionStatus, Timestamp};
use serde_json::Value;
use uuid::Uuid;

use crate::sessions::Session;
use crate::{DbError, Order, Result, to_json};

/// Bytes of one record's body; larger things belong into the home.
pub const RECORD_BYTES_MAX: usize = 24 * 1024 * 1024;
/// Bytes of one user event.
pub const USER_EVENT_BYTES_MAX: usize = 8 * 1024 * 1024;
/// User events one request may bring.
pub const USER_EVENTS_MAX: usize = 100;
/// User events that may wait to be taken.
pub const WAITING_EVENTS_MAX: i64 = 1000;

/// A user event to append.
#[derive(Debug, Clone, PartialEq)]
pub struct UserEvent {
    /// One of those that [`Body::is_user`] names.
    pub body: Body,
    /// Given by the client: the same key again appends nothing and returns the first event.
    pub dedup: Option<String>,
}

/// Appending to and reading of journals.
#[async_trait]
pub trait Journal: Send + Sync {
    /// Appends what a client sent, in order, all or nothing, and returns the events as they are in the journal (those
    /// that were there already included). The driver is woken by the commit itself.
    ///
    /// # Errors
    /// [`DbError::NotFound`]; [`DbError::Conflict`] for an archived or terminated session, and for an answer to a call
    /// that has one; [`DbError::Invalid`] for other kinds of events, and for an answer to what waits for none;
    /// [`DbError::TooLarge`]; [`DbError::Limit`] when too many wait already.
    async fn append_user_events(
        &self,
        org: OrgId,
        session: SessionId,
        events: Vec<UserEvent>,
    ) -> Result<Vec<Record>>;

    /// Appends for the driver that holds `epoch`, all or nothing.
    ///
    /// # Errors
    /// [`DbError::Fenced`] when somebody claimed the session since, or it is gone; [`DbError::Conflict`] when a step
    /// has its intention or its result already (I4).
    async fn append(
        &self,
        org: OrgId,
        session: SessionId,
        epoch: u64,
        bodies: Vec<Body>,
    ) -> Result<Vec<Record>>;

    /// Reads all records behind `after_seq`, private ones included, oldest first, at most `limit`.
    ///
    /// # Errors
    /// When the database refuses or a record is damaged.
    async fn records(
        &self,
        org: OrgId,
        session: SessionId,
        after_seq: u64,
        limit: usize,
    ) -> Result<Vec<Record>>;

    /// Under which epoch each record behind `after_seq` was appended, with its position, oldest first, at most `limit`.
    /// A client's event and what a runner reports bear the epoch that was current then.
    ///
    /// # Errors
    /// When the database refuses.
    async fn epochs(
        &self,
        org: OrgId,
        session: SessionId,
        after_seq: u64,
        limit: usize,
    ) -> Result<Vec<(u64, u64)>>;

    /// Lists public events with their positions: behind `after_seq` in ascending order, before it in descending
    /// order (0 then means: from the newest).
    ///
    /// # Errors
    /// [`DbError::NotFound`] for the session.
    async fn public_events(
        &self,
        org: OrgId,
        session: SessionId,
        after_seq: u64,
        limit: usize,
        order: Order,
    ) -> Result<Vec<(u64, Value)>>;

    /// Position of a public event, for `Last-Event-ID`; none when the session has no such event.
    ///
    /// # Errors
    /// When the database refuses.
    async fn seq_of_event(&self, org: OrgId, session: SessionId, event: EventId) -> Result<Option<u64>>;
}

/// What an append changes in the session's row.
pub(crate) struct Moved {
    pub(crate) status: Option<SessionStatus>,
    pub(crate) usage: ModelUsage,
    /// Whether calls wait for a client from now on; none: as before.
    pub(crate) waits: Option<bool>,
}

impl Moved {
    pub(crate) fn by(bodies: &[Body]) -> Self {
        let mut usage = ModelUsage::default();
        for body in bodies {
            if let Body::SpanEnd { model_usage, .. } = body {
                usage.input_tokens += model_usage.input_tokens;
                usage.output_tokens += model_usage.output_tokens;
                usage.cache_read_input_tokens += model_usage.cache_read_input_tokens;
                usage.cache_creation_input_tokens += model_usage.cache_creation_input_tokens;
            }
        }
        let waits =
            |body: &Body| matches!(body, Body::StatusIdle { stop_reason: StopReason::RequiresAction { .. } });
        let last = bodies.iter().rev().find(|body| body.status().is_some());
        Self { status: last.and_then(Body::status), usage, waits: last.map(waits) }
    }
}

/// Numbers bodies from `first` on.
pub(crate) fn numbered(first: u64, now: Timestamp, bodies: Vec<Body>) -> Vec<Record> {
    let record = |(seq, body): (u64, Body)| {
        let event =
            body.is_public().then(|| body.own_event().unwrap_or_else(|| EventId::from_uuid(Uuid::now_v7())));
        Record { seq, event, at: now, processed_at: (!body.is_user()).then_some(now), body }
    };
    (first..).zip(bodies).map(record).collect()
}

/// The body as it is stored.
pub(crate) fn stored_body(body: &Body) -> Result<String> {
    let text = to_json(body)?;
    let limit = if body.is_user() { USER_EVENT_BYTES_MAX } else { RECORD_BYTES_MAX };
    if text.len() > limit {
        return Err(DbError::TooLarge(format!(
            "a {} record of {} bytes, at most {limit}; put it into the home and name its path",
            body.kind(),
            text.len()
        )));
    }
    Ok(text)
}

/// Which waiting user events a record takes account of: their kinds, up to which position.
pub(crate) const fn taken_by(body: &Body) -> Option<(&'static [&'static str], u64)> {
    match body {
        Body::ModelIntended { upto, .. } => Some((&["user.message"], *upto)),
        Body::InterruptHandled { upto } => Some((&["user.interrupt"], *upto)),
        Body::AnswersHandled { upto } => {
            Some((&["user.tool_confirmation", "user.custom_tool_result"], *upto))
        }
        _ => None,
    }
}

/// Refuses an answer to what is no call that waits for it. `asked`: the record of the event that it names.
pub(crate) fn judge_answer(
    session: SessionId,
    call: EventId,
    asked: Option<Record>,
    answer: &Body,
) -> Result<Record> {
    let waits = |asked: &Record| match (&asked.body, answer) {
        (Body::ToolUse { evaluated_permission, .. }, Body::UserToolConfirmation { .. }) => {
            *evaluated_permission == Permission::Ask
        }
        (Body::CustomToolUse { refusal, .. }, Body::UserCustomToolResult { .. }) => refusal.is_none(),
        _ => false,
    };
    asked.filter(waits).ok_or_else(|| {
        let kind = answer.kind();
        DbError::Invalid(format!(
            "session {session} has no call {call} that waits for a {kind}; the last session.status_idle names those that \
             wait"
        ))
    })
}

/// Refuses a second answer. `earlier`: answers of the same kind behind the call.
pub(crate) fn refuse_second_answer(call: EventId, has_ended: bool, earlier: &[Body]) -> Result<()> {
    if has_ended || earlier.iter().any(|earlier| earlier.answered_call() == Some(call)) {
        return Err(DbError::Conflict(format!("call {call} was answered before, or has ended")));
    }
    Ok(())
}

/// Refuses events that a client may not append now.
pub(crate) fn refuse_events(session: &Session, waiting: i64, events: &[UserEvent]) -> Result<()> {
    let id = session.id;
    if session.archived_at.is_some() || session.status == SessionStatus::Terminated {
        return Err(DbError::Conflict(format!("session {id} is archived or terminated")));
    }
    if events.len() > USER_EVENTS_MAX {
        return Err(DbError::TooLarge(format!(
            "{} events in one request, at most {USER_EVENTS_MAX}",
            events.len()
        )));
    }
    if waiting + events.len() as i64 > WAITING_EVENTS_MAX {
        return Err(DbError::Limit(format!(
            "session {id} has {waiting} events waiting, at most {WAITING_EVENTS_MAX}; wait for it"
        )));
    }
    match events.iter().find(|event| !event.body.is_user()) {
        Some(event) => Err(DbError::Invalid(format!("clients may not append {}", event.body.kind()))),
        None => Ok(()),
    }
}

/// Why nothing was appended: the row did not match.
pub(crate) fn not_moved(session: SessionId, epoch: Option<u64>) -> DbError {
    match epoch {
        Some(token) => DbError::Fenced { what: format!("session {session}"), token },
        None => DbError::not_found("session", session),
    }
}
