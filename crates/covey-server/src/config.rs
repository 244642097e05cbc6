//! The server's configuration: one struct, unknown keys refused, validated before anything is opened.
//!
//! A file (JSON) gives the base, the environment overrides it, flags override both; the caller applies flags.
//! The model's key is never part of the struct: only where it comes from. What does not belong here: the
//! runner's configuration.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::model::{CallLimits, Credential, Endpoint, EndpointError, Secret, Wire};

/// Where the model is when nothing else is said.
pub const MODEL_URL_DEFAULT: &str = "https://api.anthropic.com";

/// Environment variables that hold the key, in the order in which they are looked at, and whether the key is
/// a bearer token.
const KEY_VARIABLES: [(&str, bool); 3] =
    [("COVEY_MODEL_KEY", false), ("ANTHROPIC_API_KEY", false), ("ANTHROPIC_AUTH_TOKEN", true)];

/// How the server runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where everything is kept: the database, and beside it what the store needs.
    pub data_dir: PathBuf,
    /// Where the API listens.
    pub listen: SocketAddr,
    /// Base URL of the model's Messages endpoint.
    pub model_url: String,
    /// Name of the environment variable that holds the model's key; none: `COVEY_MODEL_KEY`,
    /// `ANTHROPIC_API_KEY`, then `ANTHROPIC_AUTH_TOKEN`.
    pub model_key_variable: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("covey-data"),
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 7788)),
            model_url: MODEL_URL_DEFAULT.to_owned(),
            model_key_variable: None,
        }
    }
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, an unknown key, or a value of the wrong type.
    #[error("the configuration cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// An environment variable holds something else than it should.
    #[error("the environment variable {name} is not usable: {reason}")]
    Variable {
        /// Its name.
        name: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The model's URL or key.
    #[error(transparent)]
    Model(#[from] EndpointError),
}

impl Config {
    /// Reads a configuration file's text.
    ///
    /// # Errors
    /// When it is not JSON or has an unknown key, which the error names.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Ok(serde_json::from_str(text)?)
    }

    /// Lays the environment over it: `COVEY_DATA_DIR`, `COVEY_LISTEN`, `COVEY_MODEL_URL`. `variable` looks one
    /// up; empty counts as unset.
    ///
    /// # Errors
    /// When a variable is not usable.
    pub fn with_environment(
        mut self,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let set = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        if let Some(dir) = set("COVEY_DATA_DIR") {
            self.data_dir = PathBuf::from(dir);
        }
        if let Some(listen) = set("COVEY_LISTEN") {
            self.listen = listen.trim().parse().map_err(|e: std::net::AddrParseError| {
                ConfigError::Variable { name: "COVEY_LISTEN", reason: e.to_string() }
            })?;
        }
        if let Some(url) = set("COVEY_MODEL_URL") {
            self.model_url = url.trim().to_owned();
        }
        Ok(self)
    }

    /// Where the database is.
    pub fn database_path(&self) -> PathBuf {
        self.data_dir.join("covey.db")
    }

    /// Makes the model's client, with the key that the environment holds; without one, the first call says so.
    ///
    /// # Errors
    /// When URL or key are not usable.
    pub fn model_client(&self, variable: &dyn Fn(&str) -> Option<String>) -> Result<Endpoint, ConfigError> {
        let credential = self.credential(variable);
        Ok(Endpoint::new(Wire::Messages, &self.model_url, credential, CallLimits::default())?)
    }

    /// Whether every model call would fail for want of a key: there is none, and the endpoint is not one of this
    /// machine or network, which may need none.
    pub fn lacks_model_key(&self, variable: &dyn Fn(&str) -> Option<String>) -> bool {
        self.model_url.starts_with("https://") && self.credential(variable).is_none()
    }

    fn credential(&self, variable: &dyn Fn(&str) -> Option<String>) -> Option<Credential> {
        let value = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        match &self.model_key_variable {
            Some(name) => value(name).map(|key| Credential::ApiKey(Secret::new(&key))),
            None => KEY_VARIABLES.iter().find_map(|(name, bearer)| {
                let secret = Secret::new(&value(name)?);
                Some(if *bearer { Credential::Bearer(secret) } else { Credential::ApiKey(secret) })
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_is_refused_by_its_name() {
        let refused = Config::from_json(r#"{"data_dri": "x"}"#).unwrap_err().to_string();
        assert!(refused.contains("data_dri"), "{refused}");
    }

    #[test]
    fn the_environment_goes_over_the_file() {
        let file = Config::from_json(r#"{"data_dir": "a", "model_url": "http://one"}"#).unwrap();
        let variable = |name: &str| match name {
            "COVEY_MODEL_URL" => Some("http://two".to_owned()),
            "COVEY_DATA_DIR" => Some(" ".to_owned()),
            _ => None,
        };
        let config = file.with_environment(&variable).unwrap();
        assert_eq!(config.model_url, "http://two");
        assert_eq!(config.data_dir, PathBuf::from("a"));
        let odd = |name: &str| (name == "COVEY_LISTEN").then(|| "nowhere".to_owned());
        assert!(Config::default().with_environment(&odd).is_err());
    }
}
