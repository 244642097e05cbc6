//! Options that every command takes, and where the server is.
//!
//! A flag wins over the environment, the environment over `client.json`, which `covey up` writes into its data
//! directory. What does not belong here: reading an option that only one command has.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use covey_types::Fault;
use serde::{Deserialize, Serialize};

use crate::exit_code::Refusal;
use crate::store_location::StoreLocation;

/// The name of the file in the data directory that tells local clients where the server is.
pub(crate) const CLIENT_FILE: &str = "client.json";

/// Options of every command.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Address of the server, such as http://127.0.0.1:7788 [default: from client.json].
    #[arg(long, global = true, env = "COVEY_URL")]
    pub(crate) url: Option<String>,
    /// Token for the server [default: from client.json].
    #[arg(long, global = true, env = "COVEY_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// Directory of `covey up` on this machine [default: ~/.local/share/covey].
    #[arg(long, global = true, env = "COVEY_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// What `covey up` tells the clients of the same user, in a file of mode 0600.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClientFile {
    /// Where the server listens, without a slash at the end.
    pub(crate) url: String,
    /// A token of the server's org.
    pub(crate) token: String,
    /// The server's home store, for clients that put homes into it themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) store: Option<StoreLocation>,
    /// The org's name in that store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) org: Option<String>,
    /// The server's `COVEY_HOME_EXCLUDES`; none: its default. Whoever puts a directory into a home or makes it what
    /// the home is leaves out just what the server leaves out: with another list, files that were not kept would
    /// be removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) excludes: Option<String>,
    /// Where the server's state is, without a password, when that is not a file of the data directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) database: Option<String>,
}

impl Global {
    /// The data directory; may not exist yet.
    pub(crate) fn data_dir(&self) -> anyhow::Result<PathBuf> {
        if let Some(dir) = &self.data_dir {
            return std::path::absolute(dir).context("the data directory");
        }
        let home = std::env::home_dir().filter(|home| home.is_absolute());
        let home = home.context("HOME is not set; say where with --data-dir or COVEY_DATA_DIR")?;
        Ok(home.join(".local/share/covey"))
    }

    /// Where the server is, the token for it and, for a server of this machine, its store.
    pub(crate) fn server(&self) -> anyhow::Result<ClientFile> {
        if let Some(url) = &self.url
            && !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme))
        {
            let text = format!("`{url}` is no address of a server; give one such as http://127.0.0.1:7788");
            return Err(Refusal::new(Fault::Invalid, text).into());
        }
        let file = match (&self.url, &self.token) {
            // With both given, a file is not needed and may be of another server.
            (Some(url), Some(_)) => match self.client_file() {
                Ok(file) if file.url == trimmed(url) => file,
                _ => ClientFile {
                    url: trimmed(url),
                    token: String::new(),
                    store: None,
                    org: None,
                    excludes: None,
                    database: None,
                },
            },
            _ => self.client_file()?,
        };
        match (&self.url, &self.token) {
            // A token belongs to a server: the file's is never sent to another address.
            (Some(url), None) if trimmed(url) != file.url => {
                let text = format!("no token for {url}: give one with --token or COVEY_TOKEN");
                Err(Refusal::new(Fault::Denied, text).into())
            }
            (_, Some(token)) => Ok(ClientFile { token: token.clone(), ..file }),
            (_, None) => Ok(file),
        }
    }

    pub(crate) fn client_file(&self) -> anyhow::Result<ClientFile> {
        let path = self.data_dir()?.join(CLIENT_FILE);
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let text = format!(
                "no server is known ({}: {error}); start one with `covey up`, or give --url and --token",
                path.display()
            );
            Refusal::new(Fault::Retry, text)
        })?;
        let mut file: ClientFile = serde_json::from_str(&text)
            .with_context(|| format!("{} cannot be understood", path.display()))?;
        file.url = trimmed(&file.url);
        Ok(file)
    }
}

fn trimmed(url: &str) -> String {
    url.trim_end_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn global(dir: &std::path::Path, url: Option<&str>, token: Option<&str>) -> Global {
        Global {
            url: url.map(Into::into),
            token: token.map(Into::into),
            data_dir: Some(dir.to_owned()),
            json: false,
        }
    }

    #[test]
    fn the_token_of_the_file_goes_only_to_the_server_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(CLIENT_FILE), r#"{"url":"http://127.0.0.1:1/","token":"secret"}"#)
            .unwrap();
        let known = ClientFile {
            url: "http://127.0.0.1:1".into(),
            token: "secret".into(),
            store: None,
            org: None,
            excludes: None,
            database: None,
        };
        assert_eq!(global(dir.path(), None, None).server().unwrap(), known);
        assert_eq!(global(dir.path(), Some("http://127.0.0.1:1/"), None).server().unwrap(), known);
        let error = global(dir.path(), Some("http://127.0.0.1:2"), None).server().unwrap_err().to_string();
        assert!(error.contains("no token for http://127.0.0.1:2") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn an_address_without_a_scheme_is_refused_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let error = global(dir.path(), Some("example:7788"), Some("t")).server().unwrap_err().to_string();
        assert!(error.contains("`example:7788`"), "{error}");
    }

    #[test]
    fn flags_need_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let server = global(dir.path(), Some("http://h:1/"), Some("t")).server().unwrap();
        assert_eq!((server.url.as_str(), server.token.as_str()), ("http://h:1", "t"));
        assert!(global(dir.path(), None, None).server().unwrap_err().to_string().contains("covey up"));
    }
}
