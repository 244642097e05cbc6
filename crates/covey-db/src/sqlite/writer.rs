//! The one writer: a thread that takes whatever waits, runs it in one transaction, commits once, answers all.
//!
//! Each closure has its own savepoint, so one that fails takes nothing of the others with it. Nobody is
//! answered, and nothing is announced, before the commit. What does not belong here: what is written.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

use super::{SessionId, Tx};
use crate::{DbError, Feed, Result};

/// Closures that may wait for the writer; more wait in their own tasks.
pub const WRITE_QUEUE_MAX: usize = 1024;
/// Closures in one commit: bounds how long the first of them waits for the others.
pub const WRITE_BATCH_MAX: usize = 256;

/// Answers the asker once the commit is decided.
type Answer = Box<dyn FnOnce(std::result::Result<(), &NotCommitted>) + Send>;

/// Why a shared commit failed, for each of those who shared it.
enum NotCommitted {
    Full,
    Other(String),
}

impl NotCommitted {
    fn of(error: &DbError) -> Self {
        match error {
            DbError::Full => Self::Full,
            other => Self::Other(other.to_string()),
        }
    }

    fn told(&self) -> DbError {
        match self {
            Self::Full => DbError::Full,
            Self::Other(why) => DbError::Commit(why.clone()),
        }
    }
}

/// A closure with the place for its answer.
pub(super) struct Job {
    name: &'static str,
    run: Box<dyn FnOnce(&Tx<'_>) -> Outcome + Send>,
}

/// What running gave: whether to keep it, and how to answer once the commit is decided.
pub(super) struct Outcome {
    keep: bool,
    answer: Answer,
}

pub(super) fn job<T, F>(name: &'static str, work: F, sender: oneshot::Sender<Result<T>>) -> Job
where
    T: Send + 'static,
    F: FnOnce(&Tx<'_>) -> Result<T> + Send + 'static,
{
    let run = Box::new(move |tx: &Tx<'_>| {
        let result = catch_unwind(AssertUnwindSafe(|| work(tx))).unwrap_or(Err(DbError::Panicked(name)));
        let keep = result.is_ok();
        let answer = Box::new(move |commit: std::result::Result<(), &NotCommitted>| {
            let result = match commit {
                Ok(()) => result,
                Err(why) if keep => Err(why.told()),
                Err(_) => result,
            };
            if sender.send(result).is_err() {
                tracing::debug!(transaction = name, "the asker is gone; what was committed stays");
            }
        });
        Outcome { keep, answer }
    });
    Job { name, run }
}

pub(super) fn start(conn: Connection, feed: Feed) -> std::io::Result<mpsc::Sender<Job>> {
    let (jobs, queue) = mpsc::channel(WRITE_QUEUE_MAX);
    // Detached on purpose: it ends when the last handle is gone, and what it has not committed was answered
    // to nobody.
    std::thread::Builder::new().name("covey-db".into()).spawn(move || work(conn, queue, &feed))?;
    Ok(jobs)
}

fn work(conn: Connection, mut queue: mpsc::Receiver<Job>, feed: &Feed) {
    while let Some(first) = queue.blocking_recv() {
        let mut batch = vec![first];
        while batch.len() < WRITE_BATCH_MAX {
            match queue.try_recv() {
                Ok(job) => batch.push(job),
                Err(_) => break,
            }
        }
        let mut answers = Vec::with_capacity(batch.len());
        let committed = run_batch(&conn, batch, &mut answers);
        if let Err(e) = &committed {
            tracing::error!(error = %e, "the database could not commit");
        }
        let why = committed.as_ref().err().map(NotCommitted::of);
        if let Ok(touched) = committed {
            for session in touched {
                feed.announce(session);
            }
        }
        for answer in answers {
            answer(why.as_ref().map_or(Ok(()), Err));
        }
    }
}

fn run_batch(conn: &Connection, batch: Vec<Job>, answers: &mut Vec<Answer>) -> Result<Vec<SessionId>> {
    let mut begun = conn.execute_batch("BEGIN IMMEDIATE").map_err(DbError::from);
    let mut touched = Vec::new();
    for job in batch {
        let tx = Tx::new(conn);
        if begun.is_ok() {
            begun = conn.execute_batch("SAVEPOINT job").map_err(DbError::from);
        }
        // Without a transaction the closure must not run at all; it is answered with the reason.
        let outcome = if begun.is_ok() { (job.run)(&tx) } else { unrun(job) };
        if begun.is_ok() {
            let end = if outcome.keep { "RELEASE job" } else { "ROLLBACK TO job; RELEASE job" };
            begun = conn.execute_batch(end).map_err(DbError::from);
        }
        if outcome.keep {
            touched.append(&mut tx.touched.borrow_mut());
        }
        answers.push(outcome.answer);
    }
    let committed = begun.and_then(|()| conn.execute_batch("COMMIT").map_err(DbError::from));
    if let Err(e) = committed {
        // Already rolled back by SQLite for some errors; then this one fails, and that is fine.
        if let Err(again) = conn.execute_batch("ROLLBACK") {
            tracing::debug!(error = %again, "nothing to roll back");
        }
        return Err(e);
    }
    Ok(touched)
}

/// Answers a job that never ran: dropping it closes its channel, which its asker sees as closed.
fn unrun(job: Job) -> Outcome {
    tracing::warn!(transaction = job.name, "not run: the shared transaction failed");
    Outcome { keep: false, answer: Box::new(|_| ()) }
}
