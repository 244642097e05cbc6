//! The journal in PostgreSQL. An append moves the session's row (which checks the epoch and locks it), puts all records in
//! at once, and marks what they take account of. A driver's is one statement, and so one round trip; within other
//! transactions these are three.

use async_trait::async_trait;
use covey_harness::record::{Body, Record};
use covey_types::{EventId, OrgId, SessionId, SessionStatus, Timestamp};
use serde_json::Value;
use tokio_postgres::Row;

use super::connection::{
    Connection, Parameter, document, get as cell, number, printed_if_any, time, time_if_any,
};
use super::transaction::{look, transact, view};
use super::{Postgres, sessions};
use crate::journal::{
    Journal, Moved, UserEvent, judge_answer, not_moved, numbered, refuse_events, refuse_second_answer,
    stored_body, taken_by,
};
use crate::page::limit_sql;
use crate::{Order, Result, now};

#[async_trait]
impl Journal for Postgres {
    async fn append_user_events(
        &self,
        org: OrgId,
        session: SessionId,
        events: Vec<UserEvent>,
    ) -> Result<Vec<Record>> {
        transact!(self, "append user events", |tx| append_user_events(tx, org, session, &events).await)
    }

    async fn append(
        &self,
        org: OrgId,
        session: SessionId,
        epoch: u64,
        bodies: Vec<Body>,
    ) -> Result<Vec<Record>> {
        let (now, count) = (now(), bodies.len() as u64);
        let change = Moved::by(&bodies);
        // Numbered from 1 until it is known where they came to stand; their ids stay the same in every try.
        let mut records = numbered(1, now, bodies);
        let columns = Columns::of(&records)?;
        let taken: Vec<(&str, u64)> = records
            .iter()
            .filter_map(|record| taken_by(&record.body))
            .flat_map(|(kinds, upto)| kinds.iter().map(move |kind| (*kind, upto)))
            .collect();
        let parameters: [Parameter<'_>; 18] = [
            &org.to_string(),
            &session.to_string(),
            &(epoch as i64),
            &(count as i64),
            &now.unix_ms(),
            &change.status.map(SessionStatus::as_str),
            &(change.usage.input_tokens as i64),
            &(change.usage.output_tokens as i64),
            &(change.usage.cache_read_input_tokens as i64),
            &(change.usage.cache_creation_input_tokens as i64),
            &change.waits,
            &taken.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(),
            &taken.iter().map(|(_, upto)| *upto as i64).collect::<Vec<_>>(),
            &columns.kinds,
            &columns.events,
            &columns.steps,
            &columns.bodies,
            &columns.processed,
        ];
        let moved = self.at_once("append", APPEND, &parameters).await?;
        let Some(moment) = moved else { return Err(not_moved(session, Some(epoch))) };
        records.iter_mut().for_each(|record| record.seq += moment.head - count);
        self.announce_one(session);
        Ok(records)
    }

    async fn records(
        &self,
        org: OrgId,
        session: SessionId,
        after_seq: u64,
        limit: usize,
    ) -> Result<Vec<Record>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM journal WHERE org = $1 AND session = $2 AND seq > $3 ORDER BY seq LIMIT $4"
        );
        look!(self, "read records", |read| {
            let parameters: [Parameter<'_>; 4] =
                [&org.to_string(), &session.to_string(), &(after_seq as i64), &(limit as i64)];
            read.rows(&sql, &parameters).await?.iter().map(record_of).collect()
        })
    }

    async fn epochs(
        &self,
        org: OrgId,
        session: SessionId,
        after_seq: u64,
        limit: usize,
    ) -> Result<Vec<(u64, u64)>> {
        let sql = "SELECT seq, epoch FROM journal WHERE org = $1 AND session = $2 AND seq > $3 ORDER BY seq LIMIT $4";
        look!(self, "read epochs", |read| {
            let parameters: [Parameter<'_>; 4] =
                [&org.to_string(), &session.to_string(), &(after_seq as i64), &limit_sql(limit)];
            read.rows(sql, &parameters)
                .await?
                .iter()
                .map(|row| Ok((number(row, 0)?, number(row, 1)?)))
                .collect()
        })
    }

    async fn public_events(
        &self,
        org: OrgId,
        session: SessionId,
        after_seq: u64,
        limit: usize,
        order: Order,
    ) -> Result<Vec<(u64, Value)>> {
        let from_newest = order == Order::Descending && after_seq == 0;
        let cursor = if from_newest { i64::MAX } else { after_seq as i64 };
        let sql = format!(
            "SELECT {COLUMNS} FROM journal
             WHERE org = $1 AND session = $2 AND seq {} $3 AND event IS NOT NULL ORDER BY seq {} LIMIT $4",
            order.beyond(),
            order.sql()
        );
        view!(self, "list events", |read| {
            sessions::must_be_there(read, org, session).await?;
            let parameters: [Parameter<'_>; 4] =
                [&org.to_string(), &session.to_string(), &cursor, &limit_sql(limit)];
            let mut events = Vec::new();
            for row in read.rows(&sql, &parameters).await? {
                let record = record_of(&row)?;
                let seq = record.seq;
                events.extend(record.public().map(|event| (seq, event)));
            }
            Ok(events)
        })
    }

    async fn seq_of_event(&self, org: OrgId, session: SessionId, event: EventId) -> Result<Option<u64>> {
        let sql = "SELECT seq FROM journal WHERE org = $1 AND session = $2 AND event = $3";
        look!(self, "find event", |read| {
            let row = read.row(sql, &[&org.to_string(), &session.to_string(), &event.to_string()]).await?;
            row.as_ref().map(|row| number(row, 0)).transpose()
        })
    }
}

pub(super) async fn append_user_events(
    tx: &Connection,
    org: OrgId,
    session: SessionId,
    events: &[UserEvent],
) -> Result<Vec<Record>> {
    // Locked: of two requests with one key, the second waits and finds what the first one stored.
    let row = sessions::get_to_change(tx, org, session).await?;
    let sql = "SELECT count(*) FROM journal WHERE session = $1 AND processed_at IS NULL";
    let waiting = tx.row(sql, &[&session.to_string()]).await?.map_or(Ok(0), |row| cell(&row, 0))?;
    refuse_events(&row, waiting, events)?;
    let mut records = Vec::new();
    for event in events {
        if let Some(key) = &event.dedup
            && let Some(known) = by_dedup(tx, org, session, key).await?
        {
            records.push(known);
            continue;
        }
        if let Some(call) = event.body.answered_call() {
            check_answer(tx, org, session, call, &event.body).await?;
        }
        let body = vec![event.body.clone()];
        records.extend(append_rows(tx, org, session, None, body, event.dedup.as_deref()).await?);
    }
    Ok(records)
}

/// Whether the call is there, waits for this kind of answer, and has none yet. The session's row is locked: of two answers
/// the second finds the first.
async fn check_answer(
    tx: &Connection,
    org: OrgId,
    session: SessionId,
    call: EventId,
    answer: &Body,
) -> Result<()> {
    let (org, id) = (org.to_string(), session.to_string());
    let sql = format!("SELECT {COLUMNS} FROM journal WHERE org = $1 AND session = $2 AND event = $3");
    let asked = tx.row(&sql, &[&org, &id, &call.to_string()]).await?;
    let asked = judge_answer(session, call, asked.as_ref().map(record_of).transpose()?, answer)?;
    let step = asked.body.step().map(|step| step.to_string());
    let sql = "SELECT EXISTS (SELECT FROM journal WHERE org = $1 AND session = $2 AND step = $3
                                                    AND kind = 'agent.tool_result')";
    let has_ended = tx.row(sql, &[&org, &id, &step]).await?.map_or(Ok(false), |row| cell(&row, 0))?;
    let sql = "SELECT body FROM journal WHERE org = $1 AND session = $2 AND seq > $3 AND kind = $4";
    let rows = tx.rows(sql, &[&org, &id, &(asked.seq as i64), &answer.kind()]).await?;
    let earlier = rows.iter().map(|row| document("journal record", row, 0)).collect::<Result<Vec<Body>>>()?;
    refuse_second_answer(call, has_ended, &earlier)
}

/// Appends what is fenced by something else in the same transaction (a home's lease).
pub(super) async fn append_fenced_elsewhere(
    tx: &Connection,
    org: OrgId,
    session: SessionId,
    body: Body,
) -> Result<Vec<Record>> {
    append_rows(tx, org, session, None, vec![body], None).await
}

/// A driver's append. The records stand behind the new head; the mark is raised only with it.
const APPEND: &str = "WITH moved AS (
         UPDATE session SET head = head + $4, updated_at = $5, status = coalesce($6::text, status),
                input_tokens = input_tokens + $7, output_tokens = output_tokens + $8,
                cache_read_input_tokens = cache_read_input_tokens + $9,
                cache_creation_input_tokens = cache_creation_input_tokens + $10,
                waits_since = CASE WHEN $11::bool IS NULL THEN waits_since WHEN $11 THEN $5 END
         WHERE org = $1 AND id = $2 AND epoch = $3
         RETURNING head, epoch),
     taken AS (
         UPDATE journal SET processed_at = $5
         FROM moved, unnest($12::text[], $13::bigint[]) AS account (of_kind, upto)
         WHERE journal.org = $1 AND journal.session = $2 AND journal.kind = of_kind AND journal.seq <= upto
           AND journal.processed_at IS NULL),
     added AS (
         INSERT INTO journal (org, session, seq, epoch, kind, event, step, body, at, processed_at)
         SELECT $1, $2, moved.head - $4 + number, moved.epoch, kind, event, step, body, $5, processed_at
         FROM moved, unnest($14::text[], $15::text[], $16::text[], $17::text[], $18::bigint[])
              WITH ORDINALITY AS record (kind, event, step, body, processed_at, number)),
     marked AS (
         INSERT INTO commit_mark (id, number, head) SELECT $19, $20, moved.head FROM moved
         ON CONFLICT (id) DO UPDATE SET number = excluded.number, head = excluded.head, at = now())
     SELECT head FROM moved";

/// Records as columns.
struct Columns<'a> {
    kinds: Vec<&'a str>,
    events: Vec<Option<String>>,
    steps: Vec<Option<String>>,
    bodies: Vec<String>,
    processed: Vec<Option<i64>>,
}

impl<'a> Columns<'a> {
    fn of(records: &'a [Record]) -> Result<Self> {
        Ok(Self {
            kinds: records.iter().map(|record| record.body.kind()).collect(),
            events: records.iter().map(|record| record.event.map(|event| event.to_string())).collect(),
            steps: records.iter().map(|record| record.body.step().map(|step| step.to_string())).collect(),
            bodies: records.iter().map(|record| stored_body(&record.body)).collect::<Result<_>>()?,
            processed: records.iter().map(|record| record.processed_at.map(Timestamp::unix_ms)).collect(),
        })
    }
}

async fn append_rows(
    tx: &Connection,
    org: OrgId,
    session: SessionId,
    epoch: Option<u64>,
    bodies: Vec<Body>,
    dedup: Option<&str>,
) -> Result<Vec<Record>> {
    let now = now();
    let change = Moved::by(&bodies);
    let (org_text, session_text) = (org.to_string(), session.to_string());
    // One conditional UPDATE is check and lock at once: a claim cannot slip in between (I5).
    let sql = "UPDATE session SET head = head + $4, updated_at = $5, status = coalesce($6::text, status),
                      input_tokens = input_tokens + $7, output_tokens = output_tokens + $8,
                      cache_read_input_tokens = cache_read_input_tokens + $9,
                      cache_creation_input_tokens = cache_creation_input_tokens + $10,
                      waits_since = CASE WHEN $11::bool IS NULL THEN waits_since WHEN $11 THEN $5 END
               WHERE org = $1 AND id = $2 AND ($3::bigint IS NULL OR epoch = $3)
               RETURNING head, epoch";
    let parameters: [Parameter<'_>; 11] = [
        &org_text,
        &session_text,
        &epoch.map(|epoch| epoch as i64),
        &(bodies.len() as i64),
        &now.unix_ms(),
        &change.status.map(SessionStatus::as_str),
        &(change.usage.input_tokens as i64),
        &(change.usage.output_tokens as i64),
        &(change.usage.cache_read_input_tokens as i64),
        &(change.usage.cache_creation_input_tokens as i64),
        &change.waits,
    ];
    let Some(row) = tx.row(sql, &parameters).await? else { return Err(not_moved(session, epoch)) };
    let (head, current_epoch): (u64, i64) = (number(&row, 0)?, cell(&row, 1)?);
    let records = numbered(head - bodies.len() as u64 + 1, now, bodies);
    insert(tx, &org_text, &session_text, current_epoch, &records, dedup).await?;
    for record in &records {
        mark_taken(tx, &org_text, &session_text, &record.body, now).await?;
    }
    tx.touch(session);
    Ok(records)
}

async fn insert(
    tx: &Connection,
    org: &str,
    session: &str,
    epoch: i64,
    records: &[Record],
    dedup: Option<&str>,
) -> Result<()> {
    let sql = "INSERT INTO journal (org, session, seq, epoch, kind, event, step, dedup, body, at, processed_at)
               SELECT $1::text, $2::text, seq, $3::bigint, kind, event, step, $4::text, body, $5::bigint, processed_at
               FROM unnest($6::bigint[], $7::text[], $8::text[], $9::text[], $10::text[], $11::bigint[])
                    AS record (seq, kind, event, step, body, processed_at)";
    let Some(first) = records.first() else { return Ok(()) };
    let columns = Columns::of(records)?;
    let parameters: [Parameter<'_>; 11] = [
        &org,
        &session,
        &epoch,
        &dedup,
        &first.at.unix_ms(),
        &records.iter().map(|record| record.seq as i64).collect::<Vec<_>>(),
        &columns.kinds,
        &columns.events,
        &columns.steps,
        &columns.bodies,
        &columns.processed,
    ];
    tx.execute(sql, &parameters).await?;
    Ok(())
}

/// The record that takes user events account of sets their time, in the same transaction.
async fn mark_taken(tx: &Connection, org: &str, session: &str, body: &Body, now: Timestamp) -> Result<()> {
    let Some((kinds, upto)) = taken_by(body) else { return Ok(()) };
    let sql = "UPDATE journal SET processed_at = $5
               WHERE org = $1 AND session = $2 AND kind = ANY($3::text[]) AND seq <= $4 AND processed_at IS NULL";
    tx.execute(sql, &[&org, &session, &kinds, &(upto as i64), &now.unix_ms()]).await?;
    Ok(())
}

const COLUMNS: &str = "seq, event, body, at, processed_at";

fn record_of(row: &Row) -> Result<Record> {
    Ok(Record {
        seq: number(row, 0)?,
        event: printed_if_any("event", row, 1)?,
        body: document("journal record", row, 2)?,
        at: time(row, 3)?,
        processed_at: time_if_any(row, 4)?,
    })
}

async fn by_dedup(read: &Connection, org: OrgId, session: SessionId, key: &str) -> Result<Option<Record>> {
    let sql = format!("SELECT {COLUMNS} FROM journal WHERE org = $1 AND session = $2 AND dedup = $3");
    let row = read.row(&sql, &[&org.to_string(), &session.to_string(), &key]).await?;
    row.as_ref().map(record_of).transpose()
}

/// The newest record of one of these kinds.
pub(super) async fn last_of(
    read: &Connection,
    org: OrgId,
    session: SessionId,
    kinds: &[&str],
) -> Result<Option<Record>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM journal
         WHERE org = $1 AND session = $2 AND kind = ANY($3::text[]) ORDER BY seq DESC LIMIT 1"
    );
    let row = read.row(&sql, &[&org.to_string(), &session.to_string(), &kinds]).await?;
    row.as_ref().map(record_of).transpose()
}
