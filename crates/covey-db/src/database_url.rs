//! Where the state is: `sqlite:PATH` or `postgres://…`.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::postgres::Location;
use crate::{DbError, Result};

/// Where the state is.
#[derive(Debug, Clone)]
pub enum DatabaseUrl {
    /// A file.
    Sqlite(PathBuf),
    /// A PostgreSQL server and a database of it.
    Postgres(Box<Location>),
}

impl DatabaseUrl {
    /// Reads a text; `sqlite:` without a path stands for the file `default`.
    ///
    /// # Errors
    /// [`DbError::Invalid`] with the forms that there are; no error repeats the password.
    pub fn parse(text: &str, default: &Path) -> Result<Self> {
        if let Some(path) = text.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return Ok(Self::Sqlite(if path.is_empty() { default.to_owned() } else { PathBuf::from(path) }));
        }
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            return Location::parse(text).map(|location| Self::Postgres(Box::new(location)));
        }
        let scheme = text.split(':').next().unwrap_or_default();
        let scheme: String = scheme.chars().take(40).collect();
        Err(DbError::Invalid(format!(
            "the database URL begins with `{scheme}`; expected `sqlite:`, `sqlite:PATH` or \
             `postgres://USER:PASSWORD@HOST:PORT/DATABASE`"
        )))
    }
}

impl fmt::Display for DatabaseUrl {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Postgres(location) => location.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> String {
        match DatabaseUrl::parse(text, Path::new("/data/covey.db")) {
            Ok(url) => url.to_string(),
            Err(error) => format!("refused: {error}"),
        }
    }

    #[test]
    fn each_form_is_read_and_no_answer_has_the_password() {
        for (text, read) in [
            ("sqlite:", "sqlite:/data/covey.db"),
            ("sqlite:other.db", "sqlite:other.db"),
            ("sqlite:///srv/covey.db", "sqlite:/srv/covey.db"),
            ("postgres://u:s3cret@db.example:5433/covey", "postgres://u@db.example:5433/covey"),
            (
                "postgresql://u:s3cret@db.example/covey?sslmode=verify-full",
                "postgres://u@db.example:5432/covey",
            ),
            ("postgres:///covey?host=/run/postgresql&user=u", "postgres://u@%2Frun%2Fpostgresql:5432/covey"),
        ] {
            assert_eq!(parse(text), read);
        }
        for text in [
            "mysql://u:s3cret@h/d",
            "postgres://u:s3cret@h/d?sslmode=always",
            "postgres://u:s3cret@h/d?pool_connections_max=0",
            "postgres://u:s3cret@h:port/d",
            "postgres://u:s3cret@h/d?sslrootcert=/no/such/file",
        ] {
            let read = parse(text);
            assert!(read.starts_with("refused: ") && !read.contains("s3cret"), "{text}: {read}");
        }
    }
}
