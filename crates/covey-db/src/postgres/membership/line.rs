//! The statements of the connection that says that a server lives. Each has a limit: one that takes longer found a connection
//! that is broken. What does not belong here: when they are sent.

use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::{Client, Statement};

use super::super::schema::{LOCK_CLASS, LOCK_SERVER, connect_alone};
use super::super::{Location, session_settings};
use super::STATEMENT_WAIT;
use crate::leases::{Instance, InstanceId, ServerPlace};
use crate::{DbError, Result};

const LOCK_LOOK_EVERY: Duration = Duration::from_millis(50);

const RENEW: &str =
    "UPDATE instance SET expires_at = clock_timestamp() + $2::float8 * interval '1 second' WHERE id = $1";

/// One statement looks at all and takes away what is over. A lock that can be had is nobody's; it is given back with the
/// statement. Of two servers that look at once, one has it.
const LOOK: &str = "WITH gone AS (
         DELETE FROM instance
         WHERE id <> $1 AND (expires_at < clock_timestamp() OR CASE WHEN $2 THEN pg_try_advisory_xact_lock(id) END)
         RETURNING id)
     SELECT id, coalesce(address, ''), version, draining, id IN (SELECT id FROM gone) FROM instance ORDER BY id";

const ENTER: &str = "INSERT INTO instance (id, address, version, expires_at)
     VALUES ($1, $2, $3, clock_timestamp() + $4::float8 * interval '1 second')";

/// Which advisory lock.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lock {
    /// Of all servers, exclusively.
    Alone,
    /// Of all servers, with the others.
    Shared,
    /// Of one instance.
    Instance(InstanceId),
}

/// What a look found.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) living: Vec<Instance>,
    /// It took a row away.
    pub(super) is_gone: bool,
}

/// A connection as the database knows it: its number, and when it began, because numbers are used again.
pub(super) type Name = (i32, String);

/// See the head of this file.
pub(super) struct Line {
    client: Client,
    renew: Statement,
    look: Statement,
    /// Until then only terms count.
    pub(super) relocked_by: Instant,
    _task: JoinSet<()>,
}

impl Line {
    pub(super) async fn open(location: &Location, patience: Duration) -> Result<Self> {
        let (client, task) = within(patience, connect_alone(location)).await?;
        let (renew, look) = within(patience, async {
            client.batch_execute(&session_settings()).await?;
            Ok((client.prepare(RENEW).await?, client.prepare(LOOK).await?))
        })
        .await?;
        Ok(Self { client, renew, look, relocked_by: Instant::now(), _task: task })
    }

    /// Ends an earlier connection of ours: if only we know that it is broken, the database still holds its locks.
    pub(super) async fn end(&self, (number, began): &Name, patience: Duration) -> Result<()> {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE pid = $1 AND backend_start::text = $2";
        within(patience, async { Ok(self.client.execute(sql, &[number, began]).await?) }).await?;
        Ok(())
    }

    pub(super) async fn name(&self, patience: Duration) -> Result<Name> {
        let sql = "SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()";
        let row = within(patience, async { Ok(self.client.query_one(sql, &[]).await?) }).await?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    }

    /// Tries for so long; who has a lock gets it again.
    pub(super) async fn lock(&self, lock: Lock, wait: Duration) -> Result<bool> {
        let until = Instant::now() + wait;
        loop {
            if within(STATEMENT_WAIT, self.try_lock(lock)).await? {
                return Ok(true);
            }
            if Instant::now() > until {
                return Ok(false);
            }
            sleep(LOCK_LOOK_EVERY).await;
        }
    }

    async fn try_lock(&self, lock: Lock) -> Result<bool> {
        let client = &self.client;
        let row = match lock {
            Lock::Alone => {
                client.query_one("SELECT pg_try_advisory_lock($1, $2)", &[&LOCK_CLASS, &LOCK_SERVER]).await?
            }
            Lock::Shared => {
                let sql = "SELECT pg_try_advisory_lock_shared($1, $2)";
                client.query_one(sql, &[&LOCK_CLASS, &LOCK_SERVER]).await?
            }
            Lock::Instance(id) => {
                client.query_one("SELECT pg_try_advisory_lock($1::bigint)", &[&id.0]).await?
            }
        };
        Ok(row.try_get(0)?)
    }

    pub(super) async fn enter(
        &self,
        id: InstanceId,
        place: &ServerPlace,
        term: Duration,
        patience: Duration,
    ) -> Result<()> {
        let seconds = term.as_secs_f64();
        within(patience, async {
            Ok(self.client.execute(ENTER, &[&id.0, &place.address, &place.version, &seconds]).await?)
        })
        .await?;
        Ok(())
    }

    /// Begins the term anew; false when the row is not there.
    pub(super) async fn renew(&self, id: InstanceId, term: Duration, patience: Duration) -> Result<bool> {
        let seconds = term.as_secs_f64();
        let renewed = async { Ok(self.client.execute(&self.renew, &[&id.0, &seconds]).await?) };
        Ok(within(patience, renewed).await? == 1)
    }

    /// Looks at all servers, and takes away who is gone.
    pub(super) async fn look(&self, own: InstanceId, patience: Duration) -> Result<Seen> {
        let locks_count = Instant::now() >= self.relocked_by;
        let rows = async { Ok(self.client.query(&self.look, &[&own.0, &locks_count]).await?) };
        let mut seen = Seen { living: Vec::new(), is_gone: false };
        for row in within(patience, rows).await? {
            if row.try_get(4)? {
                seen.is_gone = true;
                continue;
            }
            seen.living.push(Instance {
                id: InstanceId(row.try_get(0)?),
                address: row.try_get(1)?,
                version: row.try_get(2)?,
                draining: row.try_get(3)?,
            });
        }
        Ok(seen)
    }

    pub(super) async fn drain(&self, id: InstanceId, patience: Duration) -> Result<()> {
        let sql = "UPDATE instance SET draining = TRUE WHERE id = $1";
        within(patience, async { Ok(self.client.execute(sql, &[&id.0]).await?) }).await?;
        Ok(())
    }

    pub(super) async fn leave(&self, id: InstanceId, patience: Duration) -> Result<()> {
        within(patience, async {
            self.client.execute("DELETE FROM instance WHERE id = $1", &[&id.0]).await?;
            Ok(self.client.execute("SELECT pg_advisory_unlock_all()", &[]).await?)
        })
        .await?;
        Ok(())
    }
}

async fn within<T>(patience: Duration, statement: impl Future<Output = Result<T>>) -> Result<T> {
    let in_time = timeout(patience, statement).await;
    in_time.map_err(|_| DbError::Busy { name: "lease", seconds: patience.as_secs() })?
}
