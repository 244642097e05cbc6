//! Whether a server shares its database with others, and how runners reach it then.
//!
//! What stays true: servers that share a database keep blocks in one place, because each drives sessions whose homes were
//! secured through another. A bucket is such a place; of a directory somebody must say so. What does not belong here: how
//! they share (`covey_server::db::leases`).

use std::net::SocketAddr;

use anyhow::{Result, bail};
use clap::Args;
use covey_server::db::DatabaseUrl;
use covey_server::db::leases::ServerPlace;
use covey_types::Fault;

use crate::exit_code::Refusal;
use crate::store_location::StoreLocation;

/// Options of a server that may be one of several.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Sharing {
    /// URL at which runners reach this server, when it is one of several on one database [default: http:// and what
    /// --listen says].
    #[arg(long, env = "COVEY_ADVERTISE_URL", value_name = "URL")]
    advertise_url: Option<String>,
    /// The home store is a directory that every server of the database and every runner sees under its own path, such as a
    /// network file system. Only then may several servers use one; a bucket is always shared.
    #[arg(long, env = "COVEY_SHARED_STORE")]
    shared_store: bool,
}

impl Sharing {
    /// What this server says of itself to the others; none when it shares with nobody.
    pub(crate) fn place(
        &self,
        database: &DatabaseUrl,
        store: Option<&StoreLocation>,
        listening: SocketAddr,
    ) -> Result<Option<ServerPlace>> {
        let is_shared = match store {
            None | Some(StoreLocation::Bucket(_)) => true,
            Some(StoreLocation::Directory(_)) => self.shared_store,
        };
        match database {
            DatabaseUrl::Sqlite(_) if self.shared_store => {
                let text = "--shared-store is for several servers, and SQLite has one: give them a database of \
                            PostgreSQL with --database-url or COVEY_DATABASE_URL";
                return Err(Refusal::new(Fault::Invalid, text).into());
            }
            DatabaseUrl::Sqlite(_) => return Ok(None),
            DatabaseUrl::Postgres(_) if !is_shared => return Ok(None),
            DatabaseUrl::Postgres(_) => {}
        }
        let address = match &self.advertise_url {
            Some(url) if ["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) => {
                url.trim_end_matches('/').to_owned()
            }
            Some(url) => bail!("--advertise-url `{url}`: expected a URL such as http://10.0.0.5:7788"),
            None if listening.ip().is_unspecified() => bail!(
                "this server is one of several and listens on every address ({listening}); say with --advertise-url at \
                 which URL runners reach it"
            ),
            None => format!("http://{listening}"),
        };
        Ok(Some(ServerPlace { address, version: env!("CARGO_PKG_VERSION").to_owned() }))
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn postgres() -> DatabaseUrl {
        DatabaseUrl::parse("postgres://covey@127.0.0.1/covey", Path::new("unused")).unwrap()
    }

    fn place(sharing: &Sharing, database: &DatabaseUrl, listen: &str) -> Result<Option<String>> {
        let store = StoreLocation::Directory(PathBuf::from("/store"));
        let place = sharing.place(database, Some(&store), listen.parse().unwrap())?;
        Ok(place.map(|place| place.address))
    }

    #[test]
    fn a_directory_is_shared_only_when_somebody_says_so() {
        let (own, shared) = (Sharing::default(), Sharing { shared_store: true, advertise_url: None });
        assert_eq!(place(&own, &postgres(), "127.0.0.1:1").unwrap(), None);
        assert_eq!(place(&shared, &postgres(), "127.0.0.1:1").unwrap().unwrap(), "http://127.0.0.1:1");
        let without = own.place(&postgres(), None, "127.0.0.1:1".parse().unwrap()).unwrap();
        assert!(without.is_some(), "where no blocks are kept, none have to be shared");
    }

    #[test]
    fn sqlite_has_one_server() {
        let sqlite = DatabaseUrl::parse("sqlite:", Path::new("/covey.db")).unwrap();
        assert_eq!(place(&Sharing::default(), &sqlite, "127.0.0.1:1").unwrap(), None);
        let shared = Sharing { shared_store: true, advertise_url: None };
        let refused = place(&shared, &sqlite, "127.0.0.1:1").unwrap_err().to_string();
        assert!(refused.contains("PostgreSQL"), "{refused}");
    }

    #[test]
    fn a_server_that_listens_everywhere_must_say_where_it_is() {
        let mut sharing = Sharing { shared_store: true, advertise_url: None };
        let refused = place(&sharing, &postgres(), "0.0.0.0:7788").unwrap_err().to_string();
        assert!(refused.contains("--advertise-url"), "{refused}");
        sharing.advertise_url = Some("http://a.example:7788/".to_owned());
        assert_eq!(place(&sharing, &postgres(), "0.0.0.0:7788").unwrap().unwrap(), "http://a.example:7788");
        sharing.advertise_url = Some("a.example".to_owned());
        assert!(place(&sharing, &postgres(), "0.0.0.0:7788").is_err());
    }
}
