//! One connection and its statements; what errors mean.

use std::error::Error as _;
use std::sync::{Mutex, PoisonError};

use covey_types::{SessionId, Timestamp};
use deadpool_postgres::Object;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{FromSql, ToSql};
use tokio_postgres::{Error, Row};

use super::Location;
use crate::{DbError, Result};

/// A parameter of a statement.
pub(super) type Parameter<'a> = &'a (dyn ToSql + Sync);

/// A connection that statements run on. Whether it is within a transaction is known to who made it.
pub(super) struct Connection {
    /// None once it was given up.
    object: Option<Object>,
    touched: Mutex<Vec<SessionId>>,
    /// A transaction is open: the connection must not be used by others before its end.
    pub(super) is_open: bool,
}

impl Connection {
    pub(super) fn new(object: Object) -> Self {
        Self { object: Some(object), touched: Mutex::default(), is_open: false }
    }

    pub(super) fn client(&self) -> Result<&Object> {
        self.object.as_ref().ok_or(DbError::Closed)
    }

    /// All rows of a statement.
    pub(super) async fn rows(&self, sql: &str, parameters: &[Parameter<'_>]) -> Result<Vec<Row>> {
        let client = self.client()?;
        let statement = client.prepare_cached(sql).await?;
        Ok(client.query(&statement, parameters).await?)
    }

    /// The only row of a statement, if there is one.
    pub(super) async fn row(&self, sql: &str, parameters: &[Parameter<'_>]) -> Result<Option<Row>> {
        let client = self.client()?;
        let statement = client.prepare_cached(sql).await?;
        Ok(client.query_opt(&statement, parameters).await?)
    }

    /// How many rows a statement changed.
    pub(super) async fn execute(&self, sql: &str, parameters: &[Parameter<'_>]) -> Result<u64> {
        let client = self.client()?;
        let statement = client.prepare_cached(sql).await?;
        Ok(client.execute(&statement, parameters).await?)
    }

    /// The session's journal is announced after the commit.
    pub(super) fn touch(&self, session: SessionId) {
        self.touched.lock().unwrap_or_else(PoisonError::into_inner).push(session);
    }

    pub(super) fn take_touched(&self) -> Vec<SessionId> {
        std::mem::take(&mut *self.touched.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Whoever waited for the transaction is gone in its middle. Closing the connection is what undoes it; given back
        // to the pool, it would hold its locks and end within somebody else's transaction.
        if self.is_open
            && let Some(object) = self.object.take()
        {
            drop(Object::take(object));
        }
    }
}

/// What an error means for a transaction that has not been told to commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Somebody else was in the way: run it again.
    Collision,
    /// The connection is gone, and the transaction with it: run it again on another one.
    Lost,
    /// It would happen again.
    Lasting,
}

/// Judges an error of a statement.
pub(super) fn trouble(error: &DbError) -> Trouble {
    match error {
        DbError::Postgres(error) => trouble_of(error),
        DbError::Unreachable { .. } => Trouble::Lost,
        _ => Trouble::Lasting,
    }
}

fn trouble_of(error: &Error) -> Trouble {
    let Some(code) = error.code() else {
        let has_lost_io = error.source().is_some_and(|cause| cause.is::<std::io::Error>());
        return if error.is_closed() || has_lost_io { Trouble::Lost } else { Trouble::Lasting };
    };
    match *code {
        SqlState::T_R_SERIALIZATION_FAILURE | SqlState::T_R_DEADLOCK_DETECTED => Trouble::Collision,
        SqlState::ADMIN_SHUTDOWN
        | SqlState::CRASH_SHUTDOWN
        | SqlState::CANNOT_CONNECT_NOW
        | SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT
        // A primary that has become a standby.
        | SqlState::READ_ONLY_SQL_TRANSACTION => Trouble::Lost,
        _ if code.code().starts_with("08") => Trouble::Lost,
        _ => Trouble::Lasting,
    }
}

impl From<Error> for DbError {
    fn from(error: Error) -> Self {
        let Some(said) = error.as_db_error() else { return Self::Postgres(error) };
        match *said.code() {
            SqlState::UNIQUE_VIOLATION => Self::taken(said.constraint().unwrap_or_else(|| said.message())),
            SqlState::DISK_FULL => Self::Full,
            SqlState::CHARACTER_NOT_IN_REPERTOIRE | SqlState::UNTRANSLATABLE_CHARACTER => Self::Invalid(
                "a name, title or key has the character U+0000, which the database cannot hold".to_owned(),
            ),
            _ => Self::Postgres(error),
        }
    }
}

/// What it means that no connection could be made.
pub(super) fn connect_error(location: &Location, error: &Error) -> DbError {
    let database = location.to_string();
    let refused = |what: String, remedy: &str| DbError::Refused {
        database: database.clone(),
        what,
        remedy: remedy.to_owned(),
    };
    let unreachable = |what: String, remedy: &str| DbError::Unreachable {
        database: database.clone(),
        what,
        remedy: remedy.to_owned(),
    };
    let (user, name) = (location.user(), location.database());
    if let Some(said) = error.as_db_error() {
        let message = said.message().to_owned();
        return match *said.code() {
            SqlState::INVALID_PASSWORD => refused(
                format!("the password of user `{user}` is wrong"),
                "correct it in the database URL (COVEY_DATABASE_URL)",
            ),
            SqlState::INVALID_AUTHORIZATION_SPECIFICATION => refused(
                message,
                "check the user in the database URL, and what the server's pg_hba.conf lets in",
            ),
            SqlState::INVALID_CATALOG_NAME => refused(
                format!("the server has no database `{name}`"),
                "create it (`createdb`), or correct its name in the database URL",
            ),
            SqlState::INSUFFICIENT_PRIVILEGE => {
                refused(message, "let the user connect to the database and create tables in it")
            }
            SqlState::TOO_MANY_CONNECTIONS => unreachable(
                message,
                "raise max_connections of the server, or lower `pool_connections_max` in the database URL",
            ),
            SqlState::CANNOT_CONNECT_NOW => unreachable(message, "it starts or stops; try again in a moment"),
            _ => refused(message, "see the log of the database server"),
        };
    }
    let mut causes = Vec::new();
    let mut cause = error.source();
    while let Some(next) = cause {
        causes.push(next.to_string());
        cause = next.source();
    }
    let shown = error.to_string();
    let what = if causes.is_empty() { shown.clone() } else { causes.join(": ") };
    match shown.as_str() {
        "error performing TLS handshake" => refused(
            format!("TLS: {what}"),
            "check `sslmode` and `sslrootcert` in the database URL, and the server's certificate",
        ),
        "invalid configuration" | "authentication error" => {
            refused(what, "check user and password in the database URL (COVEY_DATABASE_URL)")
        }
        _ => unreachable(what, "check host and port in the database URL, and whether the server runs"),
    }
}

/// A value of a row.
pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, at: usize) -> Result<T> {
    row.try_get(at).map_err(|error| DbError::Corrupt {
        what: "row",
        detail: std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string),
    })
}

/// A number that is never negative.
pub(super) fn number(row: &Row, at: usize) -> Result<u64> {
    Ok(get::<i64>(row, at)? as u64)
}

/// A number that may be missing.
pub(super) fn number_if_any(row: &Row, at: usize) -> Result<Option<u64>> {
    Ok(get::<Option<i64>>(row, at)?.map(|number| number as u64))
}

/// A time.
pub(super) fn time(row: &Row, at: usize) -> Result<Timestamp> {
    Ok(Timestamp::from_unix_ms(get(row, at)?))
}

/// A time that may be missing.
pub(super) fn time_if_any(row: &Row, at: usize) -> Result<Option<Timestamp>> {
    Ok(get::<Option<i64>>(row, at)?.map(Timestamp::from_unix_ms))
}

/// An id, a hash, or what else has a printed form.
pub(super) fn printed<T: std::str::FromStr>(what: &'static str, row: &Row, at: usize) -> Result<T>
where
    T::Err: std::fmt::Display,
{
    crate::parsed(what, get(row, at)?)
}

/// The same, when it may be missing.
pub(super) fn printed_if_any<T: std::str::FromStr>(
    what: &'static str,
    row: &Row,
    at: usize,
) -> Result<Option<T>>
where
    T::Err: std::fmt::Display,
{
    get::<Option<&str>>(row, at)?.map(|text| crate::parsed(what, text)).transpose()
}

/// A JSON document.
pub(super) fn document<T: serde::de::DeserializeOwned>(
    what: &'static str,
    row: &Row,
    at: usize,
) -> Result<T> {
    crate::parsed_json(what, get(row, at)?)
}
