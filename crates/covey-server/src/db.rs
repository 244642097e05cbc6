//! The database: SQLite, one writer thread with group commit, readers beside it. SQL stands only here (I1).
//!
//! [`Db::write`] runs a named closure in a savepoint; every closure that waits at the same moment shares one
//! commit (`synchronous=FULL`), and nobody is answered before it. A closure contains no effect but SQL. What
//! a closure appended to a journal is announced after the commit, never before. What does not belong here:
//! deciding what to append.
//!
//! The free functions of the nouns ([`agents`], [`sessions`], [`journal`], …) take a [`Tx`] when they write
//! and a [`Read`] when they only look; a `Tx` is also a `Read`.

pub mod agents;
pub mod backup;
pub mod environments;
pub mod follow;
pub mod homes;
pub mod journal;
pub mod orgs;
pub mod retention;
pub mod rules;
pub mod runners;
mod schema;
pub mod sessions;
pub mod snapshots;
pub mod stores;
pub mod tokens;
mod writer;

use std::cell::RefCell;
use std::fs::{File, TryLockError};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use covey_types::{Fault, SessionId, Timestamp};
use rusqlite::{Connection, OpenFlags};
use tokio::sync::{Semaphore, mpsc, oneshot};
use uuid::Uuid;

pub use follow::{Feed, Follower};
pub use writer::{WRITE_BATCH_MAX, WRITE_QUEUE_MAX};

/// Connections for reading; more would only queue at the disk.
pub const READERS_MAX: usize = 4;
/// Rows one page may have; a larger wish is cut to it.
pub const PAGE_ROWS_MAX: usize = 1000;

/// Why the database did not do it.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    /// It is proven not to be there (in this org).
    #[error("{what} {id} does not exist")]
    NotFound {
        /// The noun.
        what: &'static str,
        /// The id asked for.
        id: String,
    },
    /// The thing is not in a state that allows it, or changed meanwhile.
    #[error("{0}")]
    Conflict(String),
    /// The input breaks a rule; the text says which.
    #[error("{0}")]
    Invalid(String),
    /// A limit that has a name was reached.
    #[error("{0}")]
    Limit(String),
    /// The input exceeds a limit that has a name.
    #[error("{0}")]
    TooLarge(String),
    /// The disk with the database has no room; the whole transaction is undone.
    #[error(
        "the disk that holds the server's database is full; free space on it, nothing that was acknowledged is lost"
    )]
    Full,
    /// Somebody with a newer token acts on it: stop acting at once, do not retry (I5).
    #[error("the fencing token {token} of {what} is not the current one")]
    Fenced {
        /// The session or home.
        what: String,
        /// The token that was refused.
        token: u64,
    },
    /// Another process has this database open.
    #[error(
        "the data directory is in use: another covey holds {path}; stop it, or choose another data directory"
    )]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// A newer covey wrote this file.
    #[error(
        "the database {path} has schema {found}, this covey knows up to {known}; start a newer covey, or restore a copy from before the upgrade"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its schema.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// The file cannot be opened or created.
    #[error("the database {path} cannot be opened")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A stored value cannot be read back.
    #[error("stored {what} is damaged: {detail}")]
    Corrupt {
        /// What.
        what: &'static str,
        /// Why.
        detail: String,
    },
    /// SQLite refused; the whole transaction is undone.
    #[error("the database refused")]
    Sqlite(#[source] rusqlite::Error),
    /// The shared commit failed; nothing of it is stored.
    #[error("the database could not commit: {0}")]
    Commit(String),
    /// A closure panicked; its savepoint is undone.
    #[error("the transaction `{0}` panicked")]
    Panicked(&'static str),
    /// The database is shut down.
    #[error("the database is closed")]
    Closed,
}

impl DbError {
    /// The reaction that the error asks for.
    pub fn fault(&self) -> Fault {
        match self {
            Self::NotFound { .. } => Fault::NotFound,
            Self::Conflict(_) | Self::Fenced { .. } => Fault::Conflict,
            Self::Invalid(_) => Fault::Invalid,
            Self::Limit(_) => Fault::Limit,
            Self::TooLarge(_) => Fault::TooLarge,
            Self::Full => Fault::Full,
            Self::Locked { .. } | Self::Newer { .. } | Self::Open { .. } => Fault::Denied,
            Self::Corrupt { .. } => Fault::Corrupt,
            Self::Sqlite(_) | Self::Commit(_) | Self::Closed => Fault::Retry,
            Self::Panicked(_) => Fault::Bug,
        }
    }

    fn not_found(what: &'static str, id: impl ToString) -> Self {
        Self::NotFound { what, id: id.to_string() }
    }
}

impl From<rusqlite::Error> for DbError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(rusqlite::ErrorCode::DiskFull) => Self::Full,
            _ => Self::Sqlite(error),
        }
    }
}

/// What a database function returns.
pub type Result<T> = std::result::Result<T, DbError>;

/// A consistent view for reading.
#[derive(Debug)]
pub struct Read<'a> {
    conn: &'a Connection,
}

/// One named transaction.
#[derive(Debug)]
pub struct Tx<'a> {
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
    pub fn now(&self) -> Timestamp {
        now()
    }

    /// A fresh UUIDv7; wrap it in the id type of the noun.
    pub fn fresh_uuid(&self) -> Uuid {
        Uuid::now_v7()
    }

    fn touch(&self, session: SessionId) {
        self.touched.borrow_mut().push(session);
    }
}

/// The server's clock.
pub fn now() -> Timestamp {
    // Before 1970 there was no Covey; a clock that says so is shown as 1970 and decides nothing (I5).
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_ms(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// In which order a list comes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Oldest first.
    Ascending,
    /// Newest first.
    #[default]
    Descending,
}

impl Order {
    const fn sql(self) -> &'static str {
        match self {
            Self::Ascending => "ASC",
            Self::Descending => "DESC",
        }
    }

    const fn beyond(self) -> &'static str {
        match self {
            Self::Ascending => ">",
            Self::Descending => "<",
        }
    }
}

/// Which part of a list; lists are in the order of creation (ids sort by it).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page<Id> {
    /// Only what comes behind this one in the chosen order.
    pub after: Option<Id>,
    /// At most this many, cut to [`PAGE_ROWS_MAX`]. Ask for one more than is shown to know whether a next
    /// page exists.
    pub limit: usize,
    /// The order.
    pub order: Order,
}

impl<Id> Default for Page<Id> {
    fn default() -> Self {
        Self { after: None, limit: 100, order: Order::Descending }
    }
}

impl<Id: ToString> Page<Id> {
    fn limit_sql(&self) -> i64 {
        self.limit.min(PAGE_ROWS_MAX) as i64
    }

    fn after_sql(&self) -> Option<String> {
        self.after.as_ref().map(ToString::to_string)
    }
}

/// A handle on the database; clones share it. The last one dropped ends the writer thread.
#[derive(Debug, Clone)]
pub struct Db {
    jobs: mpsc::Sender<writer::Job>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    readers: Mutex<Vec<Connection>>,
    permits: Semaphore,
    feed: Feed,
    // Held for as long as the database is open; the kernel releases it when the process dies.
    _lock: File,
}

impl Db {
    /// Opens or creates the database at `path`, migrates it, and locks it for this process (`<path>.lock`).
    ///
    /// # Errors
    /// [`DbError::Locked`] when another process has it, [`DbError::Newer`] when a newer covey wrote it,
    /// [`DbError::Open`] for everything else. Blocking: seconds at most.
    pub fn open(path: &Path) -> Result<Self> {
        let open_error = |source: Box<dyn std::error::Error + Send + Sync>| DbError::Open {
            path: path.to_owned(),
            source,
        };
        let lock = lock_beside(path)?;
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
            _lock: lock,
        };
        Ok(Self { jobs, shared: Arc::new(shared) })
    }

    /// Runs `work` in its own savepoint and returns after the commit that contains it. When `work` fails, only
    /// its own changes are undone. `name` stands in logs and errors.
    ///
    /// # Errors
    /// What `work` returned, or why it could not be committed.
    pub async fn write<T, F>(&self, name: &'static str, work: F) -> Result<T>
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
    pub async fn read<T, F>(&self, name: &'static str, work: F) -> Result<T>
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

    /// Announcements of appended records.
    pub fn feed(&self) -> &Feed {
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

fn lock_beside(path: &Path) -> Result<File> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock_path = PathBuf::from(name);
    let open_error =
        |source: std::io::Error| DbError::Open { path: lock_path.clone(), source: Box::new(source) };
    let file =
        File::options().create(true).truncate(false).write(true).open(&lock_path).map_err(open_error)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(DbError::Locked { path: lock_path }),
        Err(TryLockError::Error(e)) => Err(open_error(e)),
    }
}

/// Turns a stored text into what it was.
fn parsed<T: std::str::FromStr>(what: &'static str, text: &str) -> Result<T>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|e: T::Err| DbError::Corrupt { what, detail: e.to_string() })
}

fn parsed_json<T: serde::de::DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| DbError::Corrupt { what, detail: e.to_string() })
}

fn to_json<T: serde::Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| DbError::Invalid(format!("not representable as JSON: {e}")))
}

#[cfg(test)]
mod tests;
