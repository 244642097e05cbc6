//! Where a PostgreSQL database is, and how it is reached.

use std::fmt;
use std::str::FromStr as _;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres_rustls::MakeRustlsConnect;
use url::form_urlencoded;

use super::tls::{self, Trust};
use super::{CONNECT_WAIT_MAX, Result};
use crate::DbError;

/// Connections of one server, unless the URL says `pool_connections_max`.
pub const POOL_CONNECTIONS_DEFAULT: usize = 16;
/// How long a server that shares its database is believed to live without a word, unless the URL says `lease_seconds`.
pub const LEASE_TERM_DEFAULT: Duration = Duration::from_secs(10);
/// The shortest and the longest such time: a shorter one ends whenever a disk is slow, a longer one is an outage.
pub const LEASE_SECONDS: std::ops::RangeInclusive<u64> = 2..=60;
/// Most connections of one server; more only wait in the database.
pub const POOL_CONNECTIONS_MAX: usize = 500;
/// Each connection is watched, so that one to a host that is gone is given up within about half a minute.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(20);

/// Where a database is. Shown without its password.
#[derive(Clone)]
pub struct Location {
    config: Config,
    trust: Trust,
    pool_connections: usize,
    lease_term: Duration,
}

impl Location {
    /// Reads `postgres://USER:PASSWORD@HOST:PORT/DATABASE?…` with the parameters of libpq that the driver knows, and
    /// `sslmode` (`disable`, `prefer`, `require`, `verify-ca`, `verify-full`), `sslrootcert` (a PEM file),
    /// `pool_connections_max`, `lease_seconds`.
    ///
    /// `prefer`, the default, encrypts if the server can and trusts any certificate. The three others from `require` on
    /// are the same: the certificate must be signed by one of `sslrootcert`, or else of this machine's authorities, and
    /// name the host.
    ///
    /// # Errors
    /// [`DbError::Invalid`]; it never repeats the password.
    pub fn parse(text: &str) -> Result<Self> {
        let (address, query) = text.split_once('?').unwrap_or((text, ""));
        let mut rest = form_urlencoded::Serializer::new(String::new());
        let (mut mode, mut root, mut pool_connections) = (None, None, POOL_CONNECTIONS_DEFAULT);
        let mut lease_term = LEASE_TERM_DEFAULT;
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match name.as_ref() {
                "sslmode" => mode = Some(value.into_owned()),
                "sslrootcert" => root = Some(value.into_owned()),
                "pool_connections_max" => pool_connections = connections(&value)?,
                "lease_seconds" => lease_term = term(&value)?,
                _ => {
                    rest.append_pair(&name, &value);
                }
            }
        }
        // The driver reads `+` as it stands and not as a space.
        let rest = rest.finish().replace('+', "%20");
        let address = if rest.is_empty() { address.to_owned() } else { format!("{address}?{rest}") };
        let mut config = Config::from_str(&address).map_err(|error| unreadable(&error))?;
        let is_checked = match mode.as_deref() {
            None if root.is_some() => true,
            None | Some("prefer" | "disable") => false,
            Some("require" | "verify-ca" | "verify-full") => true,
            Some(_) => {
                let modes = "disable, prefer, require, verify-ca, verify-full";
                return Err(DbError::Invalid(format!(
                    "`sslmode` of the database URL: expected one of {modes}"
                )));
            }
        };
        config.ssl_mode(match mode.as_deref() {
            Some("disable") => SslMode::Disable,
            _ if is_checked => SslMode::Require,
            _ => SslMode::Prefer,
        });
        let trust = match (is_checked, root) {
            (false, _) => Trust::Anybody,
            (true, None) => Trust::Machine,
            (true, Some(path)) => Trust::Authorities(tls::read_authorities(&path)?),
        };
        if config.get_dbname().is_none() {
            return Err(DbError::Invalid("the database URL names no database; append `/NAME`".to_owned()));
        }
        if config.get_user().is_none() {
            return Err(DbError::Invalid(
                "the database URL names no user; write `postgres://USER@…`".to_owned(),
            ));
        }
        config.connect_timeout(CONNECT_WAIT_MAX).application_name("covey");
        config.keepalives_idle(KEEPALIVE_IDLE).keepalives_interval(KEEPALIVE_INTERVAL);
        config.keepalives_retries(KEEPALIVE_RETRIES).tcp_user_timeout(UNACKNOWLEDGED_MAX);
        Ok(Self { config, trust, pool_connections, lease_term })
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    pub(super) fn pool_connections(&self) -> usize {
        self.pool_connections
    }

    pub(super) fn lease_term(&self) -> Duration {
        self.lease_term
    }

    pub(super) fn tls(&self) -> Result<MakeRustlsConnect> {
        tls::connector(&self.trust)
    }

    /// The database's name.
    pub(super) fn database(&self) -> &str {
        self.config.get_dbname().unwrap_or_default()
    }

    /// The user's name.
    pub(super) fn user(&self) -> &str {
        self.config.get_user().unwrap_or_default()
    }
}

fn connections(text: &str) -> Result<usize> {
    // One writes, one finds out what became of a commit.
    text.parse().ok().filter(|n| (2..=POOL_CONNECTIONS_MAX).contains(n)).ok_or_else(|| {
        DbError::Invalid(format!(
            "`pool_connections_max` of the database URL: expected 2 to {POOL_CONNECTIONS_MAX}"
        ))
    })
}

fn term(text: &str) -> Result<Duration> {
    text.parse().ok().filter(|seconds| LEASE_SECONDS.contains(seconds)).map(Duration::from_secs).ok_or_else(
        || {
            let (least, most) = (LEASE_SECONDS.start(), LEASE_SECONDS.end());
            DbError::Invalid(format!("`lease_seconds` of the database URL: expected {least} to {most}"))
        },
    )
}

fn unreadable(error: &tokio_postgres::Error) -> DbError {
    let why = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
    DbError::Invalid(format!(
        "the database URL cannot be read: {why}; expected `postgres://USER:PASSWORD@HOST:PORT/DATABASE`"
    ))
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let escaped = |text: &str| form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>();
        write!(f, "postgres://{}@", escaped(self.user()))?;
        let ports = self.config.get_ports();
        for (at, host) in self.config.get_hosts().iter().enumerate() {
            let port = ports.get(at).or(ports.first()).copied().unwrap_or(5432);
            let comma = if at == 0 { "" } else { "," };
            match host {
                Host::Tcp(name) => write!(f, "{comma}{name}:{port}")?,
                #[cfg(unix)]
                Host::Unix(path) => write!(f, "{comma}{}:{port}", escaped(&path.to_string_lossy()))?,
            }
        }
        write!(f, "/{}", escaped(self.database()))
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
