//! The journal in SQLite.

use async_trait::async_trait;
use covey_harness::record::{Body, Record};
use covey_types::{EventId, OrgId, SessionId, SessionStatus, StepId, Timestamp};
use rusqlite::{OptionalExtension, Row};
use serde_json::Value;

use super::{Order, Read, Result, Sqlite, Tx, parsed, parsed_json};
use crate::journal::{
    Journal, Moved, UserEvent, judge_answer, not_moved, numbered, refuse_events, refuse_second_answer,
    stored_body, taken_by,
};
use crate::page::limit_sql;

#[async_trait]
impl Journal for Sqlite {
    async fn append_user_events(
        &self,
        org: OrgId,
        session: SessionId,
        events: Vec<UserEvent>,
    ) -> Result<Vec<Record>> {
        self.write("append user events", move |tx| append_user_events(tx, org, session, &events)).await
    }

    async fn append(
        &self,
        org: OrgId,
        session: SessionId,
        epoch: u64,
        bodies: Vec<Body>,
    ) -> Result<Vec<Record>> {
        self.write("append", move |tx| append_rows(tx, org, session, Some(epoch), bodies, None)).await
    }

    async fn records(
        &self,
        org: OrgId,
        session: SessionId,
        after_seq: u64,
        limit: usize,
    ) -> Result<Vec<Record>> {
        self.read("read records", move |read| since(read, org, session, after_seq, limit)).await
    }

    async fn epochs(
        &self,
        org: OrgId,
        session: SessionId,
        after_seq: u64,
        limit: usize,
    ) -> Result<Vec<(u64, u64)>> {
        self.read("read epochs", move |read| {
            let mut statement = read.conn.prepare_cached(
                "SELECT seq, epoch FROM journal WHERE org = ?1 AND session = ?2 AND seq > ?3 ORDER BY seq LIMIT ?4",
            )?;
            let mut rows =
                statement.query((org.to_string(), session.to_string(), after_seq as i64, limit_sql(limit)))?;
            let mut epochs = Vec::new();
            while let Some(row) = rows.next()? {
                epochs.push((row.get::<_, i64>(0)? as u64, row.get::<_, i64>(1)? as u64));
            }
            Ok(epochs)
        })
        .await
    }

    async fn public_events(
        &self,
        org: OrgId,
        session: SessionId,
        after_seq: u64,
        limit: usize,
        order: Order,
    ) -> Result<Vec<(u64, Value)>> {
        self.read("list events", move |read| list_public(read, org, session, after_seq, limit, order)).await
    }

    async fn seq_of_event(&self, org: OrgId, session: SessionId, event: EventId) -> Result<Option<u64>> {
        self.read("find event", move |read| seq_of(read, org, session, event)).await
    }
}

/// Appends what a client sent, in order, and returns the events as they are in the journal (those that were
/// there already included). The driver is woken by the commit itself.
///
/// # Errors
/// [`DbError::NotFound`]; [`DbError::Conflict`] for an archived or terminated session; [`DbError::Invalid`]
/// for other kinds of events; [`DbError::TooLarge`]; [`DbError::Limit`] when too many wait already.
pub(super) fn append_user_events(
    tx: &Tx<'_>,
    org: OrgId,
    session: SessionId,
    events: &[UserEvent],
) -> Result<Vec<Record>> {
    let row = super::sessions::get(tx, org, session)?;
    let waiting: i64 = tx
        .conn
        .prepare_cached("SELECT count(*) FROM journal WHERE session = ?1 AND processed_at IS NULL")?
        .query_row([session.to_string()], |row| row.get(0))?;
    refuse_events(&row, waiting, events)?;
    let mut records = Vec::new();
    for event in events {
        if let Some(key) = &event.dedup
            && let Some(known) = by_dedup(tx, org, session, key)?
        {
            records.push(known);
            continue;
        }
        if let Some(call) = event.body.answered_call() {
            check_answer(tx, org, session, call, &event.body)?;
        }
        let appended = append_rows(tx, org, session, None, vec![event.body.clone()], event.dedup.as_deref())?;
        records.extend(appended);
    }
    Ok(records)
}

/// Whether the call is there, waits for this kind of answer, and has none yet.
fn check_answer(tx: &Tx<'_>, org: OrgId, session: SessionId, call: EventId, answer: &Body) -> Result<()> {
    let sql = format!("SELECT {COLUMNS} FROM journal WHERE org = ?1 AND session = ?2 AND event = ?3");
    let mut statement = tx.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), session.to_string(), call.to_string()))?;
    let asked = rows.next()?.map(record_of).transpose()?;
    let asked = judge_answer(session, call, asked, answer)?;
    let has_ended = asked.body.step().map_or(Ok(false), |step| has_result(tx, session, step))?;
    let mut statement = tx.conn.prepare_cached(
        "SELECT body FROM journal WHERE org = ?1 AND session = ?2 AND seq > ?3 AND kind = ?4",
    )?;
    let mut rows =
        statement.query((org.to_string(), session.to_string(), asked.seq as i64, answer.kind()))?;
    let mut earlier = Vec::new();
    while let Some(row) = rows.next()? {
        earlier.push(parsed_json("journal record", &row.get::<_, String>(0)?)?);
    }
    refuse_second_answer(call, has_ended, &earlier)
}

/// Appends what is fenced by something else in the same transaction (a home's lease).
pub(super) fn append_fenced_elsewhere(
    tx: &Tx<'_>,
    org: OrgId,
    session: SessionId,
    body: Body,
) -> Result<Vec<Record>> {
    append_rows(tx, org, session, None, vec![body], None)
}

fn append_rows(
    tx: &Tx<'_>,
    org: OrgId,
    session: SessionId,
    epoch: Option<u64>,
    bodies: Vec<Body>,
    dedup: Option<&str>,
) -> Result<Vec<Record>> {
    let now = tx.now();
    let (org_text, session_text) = (org.to_string(), session.to_string());
    let change = Moved::by(&bodies);
    // One conditional UPDATE is check and lock at once: a claim cannot slip in between (I5).
    let moved: Option<(i64, i64)> = tx
        .conn
        .prepare_cached(
            "UPDATE session SET head = head + ?4, updated_at = ?5, status = coalesce(?6, status),
                    input_tokens = input_tokens + ?7, output_tokens = output_tokens + ?8,
                    cache_read_input_tokens = cache_read_input_tokens + ?9,
                    cache_creation_input_tokens = cache_creation_input_tokens + ?10,
                    waits_since = CASE WHEN ?11 IS NULL THEN waits_since WHEN ?11 THEN ?5 END
             WHERE org = ?1 AND id = ?2 AND (?3 IS NULL OR epoch = ?3)
             RETURNING head, epoch",
        )?
        .query_row(
            (
                &org_text,
                &session_text,
                epoch.map(|e| e as i64),
                bodies.len() as i64,
                now.unix_ms(),
                change.status.map(SessionStatus::as_str),
                change.usage.input_tokens as i64,
                change.usage.output_tokens as i64,
                change.usage.cache_read_input_tokens as i64,
                change.usage.cache_creation_input_tokens as i64,
                change.waits,
            ),
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .optional()?;
    let Some((head, current_epoch)) = moved else {
        return Err(not_moved(session, epoch));
    };
    let first = head as u64 - bodies.len() as u64 + 1;
    let records = numbered(first, now, bodies);
    for record in &records {
        insert(tx, &org_text, &session_text, current_epoch, record, dedup)?;
        mark_taken(tx, &org_text, &session_text, &record.body, now)?;
    }
    tx.touch(session);
    Ok(records)
}

fn insert(
    tx: &Tx<'_>,
    org: &str,
    session: &str,
    epoch: i64,
    record: &Record,
    dedup: Option<&str>,
) -> Result<()> {
    let text = stored_body(&record.body)?;
    tx.conn
        .prepare_cached(
            "INSERT INTO journal (org, session, seq, epoch, kind, event, step, dedup, body, at, processed_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        )?
        .execute((
            org,
            session,
            record.seq as i64,
            epoch,
            record.body.kind(),
            record.event.map(|e| e.to_string()),
            record.body.step().map(|s| s.to_string()),
            dedup,
            text,
            record.at.unix_ms(),
            record.processed_at.map(Timestamp::unix_ms),
        ))?;
    Ok(())
}

/// The record that takes user events account of sets their time, in the same transaction.
fn mark_taken(tx: &Tx<'_>, org: &str, session: &str, body: &Body, now: Timestamp) -> Result<()> {
    let Some((kinds, upto)) = taken_by(body) else { return Ok(()) };
    for kind in kinds {
        tx.conn
            .prepare_cached(
                "UPDATE journal SET processed_at = ?5
                 WHERE org = ?1 AND session = ?2 AND kind = ?3 AND seq <= ?4 AND processed_at IS NULL",
            )?
            .execute((org, session, kind, upto as i64, now.unix_ms()))?;
    }
    Ok(())
}

const COLUMNS: &str = "seq, event, body, at, processed_at";

fn record_of(row: &Row<'_>) -> Result<Record> {
    Ok(Record {
        seq: row.get::<_, i64>(0)? as u64,
        event: row.get::<_, Option<String>>(1)?.map(|e| parsed("event", &e)).transpose()?,
        body: parsed_json("journal record", &row.get::<_, String>(2)?)?,
        at: Timestamp::from_unix_ms(row.get(3)?),
        processed_at: row.get::<_, Option<i64>>(4)?.map(Timestamp::from_unix_ms),
    })
}

fn by_dedup(read: &Read<'_>, org: OrgId, session: SessionId, key: &str) -> Result<Option<Record>> {
    let sql = format!("SELECT {COLUMNS} FROM journal WHERE org = ?1 AND session = ?2 AND dedup = ?3");
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), session.to_string(), key))?;
    rows.next()?.map(record_of).transpose()
}

/// Reads all records behind `after_seq`, private ones included, oldest first, at most `limit`.
///
/// # Errors
/// When the database refuses or a record is damaged.
pub(super) fn since(
    read: &Read<'_>,
    org: OrgId,
    session: SessionId,
    after_seq: u64,
    limit: usize,
) -> Result<Vec<Record>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM journal WHERE org = ?1 AND session = ?2 AND seq > ?3 ORDER BY seq LIMIT ?4"
    );
    let mut statement = read.conn.prepare_cached(&sql)?;
    let mut rows = statement.query((org.to_string(), session.to_string(), after_seq as i64, limit as i64))?;
    let mut records = Vec::new();
    while let Some(row) = rows.next()? {
        records.push(record_of(row)?);
    }
    Ok(records)
}

/// Lists public events with their positions: behind `after_seq` in ascending order, before it in descending
/// order (0 then means: from the newest).
///
/// # Errors
/// [`DbError::NotFound`] for the session.
pub(super) fn list_public(
    read: &Read<'_>,
    org: OrgId,
    session: SessionId,
    after_seq: u64,
    limit: usize,
    order: Order,
) -> Result<Vec<(u64, Value)>> {
    super::sessions::get(read, org, session)?;
    let from_newest = order == Order::Descending && after_seq == 0;
    let cursor = if from_newest { i64::MAX } else { after_seq as i64 };
    let sql = format!(
        "SELECT {COLUMNS} FROM journal
         WHERE org = ?1 AND session = ?2 AND seq {} ?3 AND event IS NOT NULL ORDER BY seq {} LIMIT ?4",
        order.beyond(),
        order.sql()
    );
    let mut statement = read.conn.prepare_cached(&sql)?;
    let limit = limit_sql(limit);
    let mut rows = statement.query((org.to_string(), session.to_string(), cursor, limit))?;
    let mut events = Vec::new();
    while let Some(row) = rows.next()? {
        let record = record_of(row)?;
        let seq = record.seq;
        events.extend(record.public().map(|event| (seq, event)));
    }
    Ok(events)
}

/// The newest record of one of these kinds.
///
/// # Errors
/// When the database refuses or the record is damaged.
pub(super) fn last_of(
    read: &Read<'_>,
    org: OrgId,
    session: SessionId,
    kinds: &[&str],
) -> Result<Option<Record>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM journal
         WHERE org = ?1 AND session = ?2 AND instr(?3, ',' || kind || ',') > 0 ORDER BY seq DESC LIMIT 1"
    );
    let mut statement = read.conn.prepare_cached(&sql)?;
    let kinds = format!(",{},", kinds.join(","));
    let mut rows = statement.query((org.to_string(), session.to_string(), kinds))?;
    rows.next()?.map(record_of).transpose()
}

/// Position of a public event, for `Last-Event-ID`; none when the session has no such event.
///
/// # Errors
/// When the database refuses.
pub(super) fn seq_of(read: &Read<'_>, org: OrgId, session: SessionId, event: EventId) -> Result<Option<u64>> {
    let seq: Option<i64> = read
        .conn
        .prepare_cached("SELECT seq FROM journal WHERE org = ?1 AND session = ?2 AND event = ?3")?
        .query_row((org.to_string(), session.to_string(), event.to_string()), |row| row.get(0))
        .optional()?;
    Ok(seq.map(|s| s as u64))
}

/// Whether the call's result is in the journal, so that the runner's copy may be dropped.
///
/// # Errors
/// When the database refuses.
pub(super) fn has_result(read: &Read<'_>, session: SessionId, step: StepId) -> Result<bool> {
    let found: Option<i64> = read
        .conn
        .prepare_cached(
            "SELECT 1 FROM journal WHERE session = ?1 AND step = ?2 AND kind = 'agent.tool_result'",
        )?
        .query_row((session.to_string(), step.to_string()), |row| row.get(0))
        .optional()?;
    Ok(found.is_some())
}
