//! Running a transaction until it is decided.
//!
//! Before the commit, whatever undid a transaction (a deadlock, a lost connection) lets it be run again: nothing of it
//! is there. When the connection is lost *during* the commit, nobody knows, and running it again could do it twice. So
//! each writing transaction raises the number of a mark, a row of `commit_mark` that nobody else uses: whoever reads the
//! mark under its lock learns whether the transaction is there, also after the database was restarted or has failed
//! over. (A transaction's id would not do: after a crash, PostgreSQL may give it to another one.) An append is one
//! statement, for which the same holds; what it answers stands in its mark, too.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use covey_types::SessionId;
use deadpool_postgres::PoolError;
use deadpool_postgres::TimeoutType;
use futures_util::future::join;
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::{Connection, Parameter, Trouble, get, number_if_any, trouble};
use super::{CONNECTION_WAIT_MAX, Postgres, connect_error};
use crate::{DbError, Result};

/// How often a transaction is run before its error is told.
pub const TRANSACTION_TRIES_MAX: u32 = 10;
/// How long it is asked what became of a commit. Longer than PostgreSQL keeps the transaction of a lost connection open.
pub const OUTCOME_WAIT_MAX: Duration = Duration::from_secs(60);
/// How long the first wait before another try is; each is twice as long, up to [`RETRY_WAIT_LONGEST`].
const RETRY_WAIT_FIRST: Duration = Duration::from_millis(5);
const RETRY_WAIT_LONGEST: Duration = Duration::from_secs(1);
/// Marks that were not raised for so long belong to servers that are gone.
const MARK_KEPT: &str = "7 days";

/// A row that tells whether a transaction is there.
#[derive(Debug)]
pub(super) struct Mark {
    id: String,
    number: i64,
}

impl Mark {
    fn fresh() -> Self {
        Self { id: Uuid::now_v7().to_string(), number: 0 }
    }
}

/// Where an append left a session.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    /// The last position.
    pub(super) head: u64,
}

impl Moment {
    fn of(row: &Row, at: usize) -> Result<Option<Self>> {
        Ok(number_if_any(row, at)?.map(|head| Self { head }))
    }
}

/// A transaction under way, with its mark; none when it only reads.
pub(super) struct Tx {
    pub(super) connection: Connection,
    mark: Option<Mark>,
}

/// How a connection is begun to be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A transaction that writes.
    Write,
    /// Several statements that see one moment.
    View,
    /// One statement.
    Look,
}

/// The tries of one transaction.
pub(super) struct Tries {
    name: &'static str,
    done: u32,
}

impl Tries {
    pub(super) fn of(name: &'static str) -> Self {
        Self { name, done: 0 }
    }

    /// Waits before another try, if there may be one.
    async fn again(&mut self, error: &DbError) -> bool {
        self.done += 1;
        if self.done >= TRANSACTION_TRIES_MAX || trouble(error) == Trouble::Lasting {
            return false;
        }
        let whole = RETRY_WAIT_FIRST.saturating_mul(1 << self.done.min(16)).min(RETRY_WAIT_LONGEST);
        tracing::debug!(transaction = self.name, tries = self.done, %error, "a transaction is run again");
        // Different for each, so that those who collided do not collide again.
        tokio::time::sleep(whole.mul_f64(0.5 + 0.5 * fraction())).await;
        true
    }
}

/// A number from 0 to 1 that differs from call to call.
fn fraction() -> f64 {
    f64::from(Uuid::now_v7().as_u64_pair().1 as u16) / f64::from(u16::MAX)
}

impl Postgres {
    /// A connection on which the transaction has begun, after as many tries as there may be.
    pub(super) async fn begin(&self, kind: Kind, tries: &mut Tries) -> Result<Tx> {
        loop {
            match self.try_to_begin(kind, tries.name).await {
                Ok(tx) => return Ok(tx),
                Err(error) if tries.again(&error).await => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn connection(&self, name: &'static str) -> Result<Connection> {
        let object = self.pool.get().await.map_err(|error| match error {
            PoolError::Timeout(TimeoutType::Wait) => {
                DbError::Busy { name, seconds: CONNECTION_WAIT_MAX.as_secs() }
            }
            PoolError::Timeout(_) => DbError::Unreachable {
                database: self.location.to_string(),
                what: "it does not answer in time".to_owned(),
                remedy: "check host and port in the database URL, and whether the server runs".to_owned(),
            },
            PoolError::Backend(error) => connect_error(&self.location, &error),
            PoolError::PostCreateHook(deadpool_postgres::HookError::Backend(error)) => DbError::from(error),
            PoolError::PostCreateHook(_) | PoolError::Closed | PoolError::NoRuntimeSpecified => {
                DbError::Closed
            }
        })?;
        Ok(Connection::new(object))
    }

    async fn try_to_begin(&self, kind: Kind, name: &'static str) -> Result<Tx> {
        let mut connection = self.connection(name).await?;
        let mark = match kind {
            Kind::Look => None,
            Kind::View => {
                connection.is_open = true;
                let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
                connection.client()?.batch_execute(begin).await?;
                None
            }
            Kind::Write => {
                let client = connection.client()?;
                let raise = client.prepare_cached(RAISE_MARK).await?;
                let mut mark = self.spare_mark();
                mark.number += 1;
                connection.is_open = true;
                let client = connection.client()?;
                // Both go out at once, in this order: one round trip.
                let (begun, raised) =
                    join(client.batch_execute("BEGIN"), client.execute(&raise, &[&mark.id, &mark.number]))
                        .await;
                begun?;
                raised?;
                Some(mark)
            }
        };
        Ok(Tx { connection, mark })
    }

    fn spare_mark(&self) -> Mark {
        self.marks.lock().ok().and_then(|mut marks| marks.pop()).unwrap_or_else(Mark::fresh)
    }

    fn give_back(&self, mark: Option<Mark>) {
        if let (Some(mark), Ok(mut marks)) = (mark, self.marks.lock()) {
            marks.push(mark);
        }
    }

    /// Ends a transaction whose statements gave `result`: with an answer, or to be run again.
    pub(super) async fn end<T>(
        &self,
        mut tx: Tx,
        result: Result<T>,
        tries: &mut Tries,
    ) -> ControlFlow<Result<T>> {
        let value = match result {
            Ok(value) => value,
            Err(error) => return self.undo(tx, error, tries).await,
        };
        if !tx.connection.is_open {
            return ControlFlow::Break(Ok(value));
        }
        let committed = match tx.connection.client() {
            Ok(client) => client.batch_execute("COMMIT").await.map_err(DbError::from),
            Err(error) => Err(error),
        };
        let error = match committed {
            Ok(()) => {
                tx.connection.is_open = false;
                self.give_back(tx.mark.take());
                self.announce(&tx.connection);
                return ControlFlow::Break(Ok(value));
            }
            Err(error) => error,
        };
        let Some(mark) = tx.mark.take() else {
            // It only read: what it saw is good.
            return ControlFlow::Break(Ok(value));
        };
        if trouble(&error) != Trouble::Lost {
            // The database said no, so it is undone; the connection is closed by the drop.
            self.give_back(Some(mark));
            return if tries.again(&error).await {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(Err(error))
            };
        }
        match self.outcome(&mark, tries.name).await {
            Ok(Some(_)) => {
                tracing::info!(
                    transaction = tries.name,
                    "the connection was lost during a commit; it is stored"
                );
                self.give_back(Some(mark));
                self.announce(&tx.connection);
                ControlFlow::Break(Ok(value))
            }
            Ok(None) => {
                self.give_back(Some(mark));
                if tries.again(&error).await {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(Err(error))
                }
            }
            Err(why) => {
                tracing::error!(transaction = tries.name, error = %why, "it cannot be told what became of a commit");
                ControlFlow::Break(Err(DbError::OutcomeUnknown(tries.name)))
            }
        }
    }

    async fn undo<T>(&self, mut tx: Tx, error: DbError, tries: &mut Tries) -> ControlFlow<Result<T>> {
        if tx.connection.is_open {
            // When this fails, the connection is closed by the drop, which undoes it, too.
            let undone = match tx.connection.client() {
                Ok(client) => client.batch_execute("ROLLBACK").await.is_ok(),
                Err(_) => false,
            };
            tx.connection.is_open = !undone;
        }
        self.give_back(tx.mark.take());
        drop(tx);
        if tries.again(&error).await { ControlFlow::Continue(()) } else { ControlFlow::Break(Err(error)) }
    }

    pub(super) fn announce_one(&self, session: SessionId) {
        self.feed.announce(session);
        self.notices.tell(vec![session]);
    }

    fn announce(&self, connection: &Connection) {
        let touched = connection.take_touched();
        for session in &touched {
            self.feed.announce(*session);
        }
        self.notices.tell(touched);
    }

    /// Runs one statement that is a transaction of its own. Its last two parameters are the mark that it raises if it
    /// does anything, with what it answers. None: it did nothing.
    pub(super) async fn at_once(
        &self,
        name: &'static str,
        sql: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Option<Moment>> {
        let mut tries = Tries::of(name);
        loop {
            let connection = match self.connection(name).await {
                Ok(connection) => connection,
                Err(error) if tries.again(&error).await => continue,
                Err(error) => return Err(error),
            };
            let mut mark = self.spare_mark();
            mark.number += 1;
            let mut all: Vec<Parameter<'_>> = parameters.to_vec();
            all.extend([&mark.id as Parameter<'_>, &mark.number]);
            let answered = connection.row(sql, &all).await;
            drop(connection);
            let answered = answered.and_then(|row| row.map(|row| Moment::of(&row, 0)).transpose());
            let error = match answered {
                Ok(moment) => {
                    self.give_back(Some(mark));
                    return Ok(moment.flatten());
                }
                Err(error) => error,
            };
            if trouble(&error) == Trouble::Lost {
                match self.outcome(&mark, name).await {
                    Ok(None) => {}
                    Ok(Some(moment)) => {
                        tracing::info!(
                            transaction = name,
                            "the connection was lost during a statement; it is stored"
                        );
                        self.give_back(Some(mark));
                        return Ok(moment);
                    }
                    Err(why) => {
                        tracing::error!(transaction = name, error = %why, "it cannot be told what became of a statement");
                        return Err(DbError::OutcomeUnknown(name));
                    }
                }
            }
            self.give_back(Some(mark));
            if !tries.again(&error).await {
                return Err(error);
            }
        }
    }

    /// Whether the transaction with this mark is there, and what it wrote beside the mark; waits for it if the database
    /// still holds it open.
    async fn outcome(&self, mark: &Mark, name: &'static str) -> Result<Option<Option<Moment>>> {
        let until = Instant::now() + OUTCOME_WAIT_MAX;
        let mut wait = RETRY_WAIT_FIRST;
        loop {
            let error = match self.number_of(mark, name).await {
                Ok((number, moment)) => return Ok((number >= mark.number).then_some(moment)),
                Err(error) => error,
            };
            if Instant::now() > until {
                return Err(error);
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(RETRY_WAIT_LONGEST);
        }
    }

    async fn number_of(&self, mark: &Mark, name: &'static str) -> Result<(i64, Option<Moment>)> {
        let connection = self.connection(name).await?;
        // An upsert waits for the other transaction also when the row is as new as it.
        let row = connection.row(READ_MARK, &[&mark.id]).await?;
        row.map_or(Ok((0, None)), |row| Ok((get(&row, 0)?, Moment::of(&row, 1)?)))
    }
}

const RAISE_MARK: &str = "INSERT INTO commit_mark (id, number) VALUES ($1, $2)
    ON CONFLICT (id) DO UPDATE SET number = $2, at = now()";

const READ_MARK: &str = "INSERT INTO commit_mark (id, number) VALUES ($1, 0)
    ON CONFLICT (id) DO UPDATE SET number = commit_mark.number RETURNING number, head";

/// Forgets marks of servers that are gone.
pub(super) async fn forget_old_marks(tx: &Connection) -> Result<()> {
    let sql = "DELETE FROM commit_mark WHERE at < now() - $1::text::interval";
    tx.execute(sql, &[&MARK_KEPT]).await?;
    Ok(())
}

/// Runs the statements of `$body` on the connection `$tx` until they are decided.
macro_rules! run {
    ($kind:ident, $db:expr, $name:literal, |$tx:ident| $body:expr) => {{
        let mut tries = $crate::postgres::transaction::Tries::of($name);
        loop {
            let kind = $crate::postgres::transaction::Kind::$kind;
            let begun = match $db.begin(kind, &mut tries).await {
                Ok(begun) => begun,
                Err(error) => break Err(error),
            };
            let result: $crate::Result<_> = {
                let $tx = &begun.connection;
                async { $body }.await
            };
            if let std::ops::ControlFlow::Break(answer) = $db.end(begun, result, &mut tries).await {
                break answer;
            }
        }
    }};
}

/// A transaction that writes.
macro_rules! transact {
    ($($rest:tt)*) => { $crate::postgres::transaction::run!(Write, $($rest)*) };
}

/// Several statements that read one moment.
macro_rules! view {
    ($($rest:tt)*) => { $crate::postgres::transaction::run!(View, $($rest)*) };
}

/// One statement that reads.
macro_rules! look {
    ($($rest:tt)*) => { $crate::postgres::transaction::run!(Look, $($rest)*) };
}

pub(super) use {look, run, transact, view};
