//! Why a database did not do it.

use std::path::PathBuf;

use covey_types::{Fault, SessionId};

use crate::leases::InstanceId;

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
    /// Another server drives the session; it was woken.
    #[error("session {session} is driven by server {server}")]
    Leased {
        /// The session.
        session: SessionId,
        /// Which server.
        server: InstanceId,
    },
    /// This server is not among those of the database any more; it joins again by itself.
    #[error("this server's lease on the database has ended; it joins again")]
    LeaseEnded,
    /// Another process has this database file open.
    #[error(
        "the data directory is in use: another covey holds {path}; stop it, or choose another data directory"
    )]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// Another server works on this database.
    #[error(
        "another covey server works on {database}, and they do not share it: stop that one, choose another database, or let all servers of the database keep blocks in one place (COVEY_BLOB_STORE=s3://…, or --shared-store for a directory that all of them see)"
    )]
    Served {
        /// Where it is, without the password.
        database: String,
    },
    /// A newer covey wrote it.
    #[error(
        "the database {database} has schema {found}, this covey knows up to {known}; start a newer covey, or restore a copy from before the upgrade"
    )]
    Newer {
        /// The file, or where it is.
        database: String,
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
    /// The database server cannot be used as it is named; trying again does not help.
    #[error("the database {database} cannot be used: {what}; {remedy}")]
    Refused {
        /// Where it is, without the password.
        database: String,
        /// What it said.
        what: String,
        /// What to do.
        remedy: String,
    },
    /// The database server cannot be reached now.
    #[error("the database {database} cannot be reached: {what}; {remedy}")]
    Unreachable {
        /// Where it is, without the password.
        database: String,
        /// What happened.
        what: String,
        /// What to do.
        remedy: String,
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
    /// PostgreSQL refused, or the connection was lost before the commit; the whole transaction is undone.
    #[error("the database refused")]
    Postgres(#[source] tokio_postgres::Error),
    /// The connection was lost during the commit, and the database could not be asked in time what became of it. Read
    /// before doing it again.
    #[error(
        "the connection to the database was lost during the commit of `{0}`, and it cannot be told whether it is stored"
    )]
    OutcomeUnknown(&'static str),
    /// All connections are in use for too long.
    #[error(
        "no connection to the database became free within {seconds} s for `{name}`; the database is too slow, or too many requests wait"
    )]
    Busy {
        /// The transaction.
        name: &'static str,
        /// How long it waited.
        seconds: u64,
    },
    /// The shared commit failed; nothing of it is stored.
    #[error("the database could not commit: {0}")]
    Commit(String),
    /// A transaction panicked; it is undone.
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
            Self::Conflict(_) | Self::Fenced { .. } | Self::Leased { .. } => Fault::Conflict,
            Self::Invalid(_) => Fault::Invalid,
            Self::Limit(_) => Fault::Limit,
            Self::TooLarge(_) => Fault::TooLarge,
            Self::Full => Fault::Full,
            Self::Locked { .. }
            | Self::Served { .. }
            | Self::Newer { .. }
            | Self::Open { .. }
            | Self::Refused { .. } => Fault::Denied,
            Self::Corrupt { .. } => Fault::Corrupt,
            Self::Sqlite(_)
            | Self::Postgres(_)
            | Self::OutcomeUnknown(_)
            | Self::Busy { .. }
            | Self::Unreachable { .. }
            | Self::LeaseEnded
            | Self::Commit(_)
            | Self::Closed => Fault::Retry,
            Self::Panicked(_) => Fault::Bug,
        }
    }

    pub(crate) fn not_found(what: &'static str, id: impl ToString) -> Self {
        Self::NotFound { what, id: id.to_string() }
    }

    /// What a unique index refused: somebody was first.
    pub(crate) fn taken(what: &str) -> Self {
        Self::Conflict(format!("there is one already, and there can be only one: {what}"))
    }
}

/// What a database function returns.
pub type Result<T> = std::result::Result<T, DbError>;
