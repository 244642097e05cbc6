//! SQLite: one writer thread with group commit, readers beside it.
//!
//! [`Sqlite::write`] runs a named closure in a savepoint; every closure that waits at the same moment shares one
//! commit (`synchronous=FULL`), and nobody is answered before it. A closure contains no effect but SQL. What
//! a closure appended to a journal is announced after the commit, never before. What does not belong here:
//! what both databases decide alike, which stands one level up.
//!
//! The free functions of the nouns ([`agents`], [`sessions`], [`journal`], …) take a [`Tx`] when they write
//! and a [`Read`] when they only look; a `Tx` is also a `Read`.

mod agents;
pub mod backup;
mod environments;
mod homes;
mod journal;
mod leases;
mod orgs;
mod retention;
mod rules;
mod runners;
mod schema;
mod sessions;
mod snapshots;
mod stores;
mod tokens;
mod writer;

use std::cell::RefCell;
use std::fs::{File, TryLockError};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use covey_types::{OrgId, SessionId, Timestamp};
use rusqlite::{Connection, OpenFlags};
use tokio::sync::{Semaphore, mpsc, oneshot};
use uuid::Uuid;

use crate::{
    DbError, Feed, Migrated, Order, PAGE_ROWS_MAX, Page, Result, Store, now, parsed, parsed_json, to_json,
};

pub use writer::{WRITE_BATCH_MAX, WRITE_QUEUE_MAX};

/// Connections for reading; more would only queue at the disk.
pub const READERS_MAX: usize = 4;

impl From<rusqlite::Error> for DbError {
    fn from(error: rusqlite::Error) -> Self {
        match &error {
            rusqlite::Error::SqliteFailure(code, what) => match code.extended_code {
                rusqlite::ffi::SQLITE_CONSTRAINT_UNIQUE | rusqlite::ffi::SQLITE_CONSTRAINT_PRIMARYKEY => {
                    Self::taken(what.as_deref().unwrap_or("a unique key"))
                }
                _ if code.code == rusqlite::ErrorCode::DiskFull => Self::Full,
                _ => Self::Sqlite(error),
            },
            _ => Self::Sqlite(error),
        }
    }
}

/// A consistent view for reading.
#[derive(Debug)]
struct Read<'a> {
    conn: &'a Connection,
}

/// One named transaction.
#[derive(Debug)]
struct Tx<'a> {
    read: Read<'a>,
    touched: RefCell<Vec<SessionId>>,
}

impl<'a> Deref for Tx<'a> {
    type Target = Read<'a>;

    fn deref(&self) -> &Self::Target {
        &self.read
    }
}

impl<'a> Tx<'a> {
    fn new(conn: &'a Connection) -> Self {
        Self { read: Read { conn }, touched: RefCell::default() }
    }

    /// The server's clock.
    fn now(&self) -> Timestamp {
        now()
    }

    /// A fresh UUIDv7; wrap it in the id type of the noun.
    fn fresh_uuid(&self) -> Uuid {
        Uuid::now_v7()
    }

    fn touch(&self, session: SessionId) {
        self.touched.borrow_mut().push(session);
    }
}

/// A database file that is open; when it is dropped, its writer thread ends.
#[derive(Debug)]
pub(crate) struct Sqlite {
    jobs: mpsc::Sender<writer::Job>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    readers: Mutex<Vec<Connection>>,
    permits: Semaphore,
    feed: Feed,
    leases: leases::OneServer,
    // Held for as long as the database is open.
    _lock: DataLock,
}

impl Sqlite {
    /// Opens or creates the database at `path`, migrates it, and locks it for this process (`<path>.lock`).
    ///
    /// # Errors
    /// [`DbError::Locked`] when another process has it, [`DbError::Newer`] when a newer covey wrote it,
    /// [`DbError::Open`] for everything else. Blocking: seconds at most.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let open_error = |source: Box<dyn std::error::Error + Send + Sync>| DbError::Open {
            path: path.to_owned(),
            source,
        };
        let lock = DataLock::beside(path)?;
        create_private(path).map_err(|e| open_error(e.into()))?;
        let mut conn = Connection::open(path).map_err(|e| open_error(e.into()))?;
        schema::configure(&conn).map_err(|e| open_error(e.into()))?;
        schema::migrate(&mut conn, path)?;
        let feed = Feed::default();
        let jobs = writer::start(conn, feed.clone()).map_err(|e| open_error(e.into()))?;
        let shared = Shared {
            path: path.to_owned(),
            readers: Mutex::default(),
            permits: Semaphore::new(READERS_MAX),
            feed,
            leases: leases::OneServer::default(),
            _lock: lock,
        };
        Ok(Self { jobs, shared: Arc::new(shared) })
    }

    /// Brings the file to the schema that this Covey knows, if it is older.
    pub(crate) fn migrate(path: &Path) -> Result<Migrated> {
        let _lock = DataLock::beside(path)?;
        let open_error =
            |source: rusqlite::Error| DbError::Open { path: path.to_owned(), source: source.into() };
        create_private(path).map_err(|e| DbError::Open { path: path.to_owned(), source: e.into() })?;
        let mut conn = Connection::open(path).map_err(open_error)?;
        schema::configure(&conn).map_err(open_error)?;
        let from = schema::check_known(&conn, path)?;
        schema::migrate(&mut conn, path)?;
        Ok(Migrated { from, to: schema::check_known(&conn, path)? })
    }

    /// Runs `work` in its own savepoint and returns after the commit that contains it. When `work` fails, only
    /// its own changes are undone. `name` stands in logs and errors.
    ///
    /// # Errors
    /// What `work` returned, or why it could not be committed.
    async fn write<T, F>(&self, name: &'static str, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        let job = writer::job(name, work, answer);
        self.jobs.send(job).await.map_err(|_| DbError::Closed)?;
        answered.await.map_err(|_| DbError::Closed)?
    }

    /// Runs `work` on a consistent view, off the async threads.
    ///
    /// # Errors
    /// What `work` returned.
    async fn read<T, F>(&self, name: &'static str, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Read<'_>) -> Result<T> + Send + 'static,
    {
        // A closed semaphore is impossible: nobody closes it.
        let _permit = self.shared.permits.acquire().await.map_err(|_| DbError::Closed)?;
        let shared = Arc::clone(&self.shared);
        let task = tokio::task::spawn_blocking(move || {
            let spare = shared.readers.lock().map_err(|_| DbError::Closed)?.pop();
            let conn = match spare {
                Some(conn) => conn,
                None => open_reader(&shared.path)?,
            };
            conn.execute_batch("BEGIN")?;
            let result = work(&Read { conn: &conn });
            conn.execute_batch("COMMIT")?;
            shared.readers.lock().map_err(|_| DbError::Closed)?.push(conn);
            result
        });
        task.await.map_err(|_| DbError::Panicked(name))?
    }
}

#[async_trait]
impl Store for Sqlite {
    async fn take_over(&self) -> Result<OrgId> {
        // The lock beside the database says that no other server lives, so neither do its drivers.
        let org = self.write("take over", |tx| {
            homes::release_all(tx)?;
            runners::all_disconnected(tx)?;
            orgs::ensure_default(tx)
        });
        let org = org.await?;
        self.shared.leases.took();
        Ok(org)
    }

    fn feed(&self) -> &Feed {
        &self.shared.feed
    }
}

fn open_reader(path: &Path) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags)?;
    conn.busy_timeout(schema::BUSY_WAIT)?;
    Ok(conn)
}

/// Makes the database's file for its owner only; SQLite gives its other files the same mode.
fn create_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    File::options().create(true).truncate(false).write(true).mode(0o600).open(path).map(drop)
}

/// The right of one process to work in a data directory; the kernel gives it back when the process dies.
#[derive(Debug)]
pub struct DataLock {
    _file: File,
}

impl DataLock {
    /// Locks the file beside the database at `path` (`<path>.lock`), whether there is one or not.
    ///
    /// # Errors
    /// [`DbError::Locked`] when another process has it.
    pub fn beside(path: &Path) -> Result<Self> {
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        let lock_path = PathBuf::from(name);
        let open_error =
            |source: std::io::Error| DbError::Open { path: lock_path.clone(), source: Box::new(source) };
        let file =
            File::options().create(true).truncate(false).write(true).open(&lock_path).map_err(open_error)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(DbError::Locked { path: lock_path }),
            Err(TryLockError::Error(e)) => Err(open_error(e)),
        }
    }
}

#[cfg(test)]
mod tests;
