//! Where a bucket is and who asks: from the environment, as other programs that use S3 read it.
//!
//! What stays true: a secret is in no message and in no `Debug`; nothing is asked over the network here. What does not
//! belong here: whether the settings are right (`crate::probe`).

use std::fmt;
use std::path::PathBuf;

use covey_types::Fault;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::{BackoffConfig, RetryConfig};

use crate::place::BucketPlace;
use crate::profile::{self, Profile};
use crate::wire::Connector;

const REGION_DEFAULT: &str = "us-east-1";
/// In this order; the first that is set counts.
const ENDPOINT_VARIABLES: [&str; 3] = ["COVEY_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
const REGION_VARIABLES: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];
/// Any of these names credentials that come before those of a profile.
const OTHER_CREDENTIALS: [&str; 4] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];
const VIRTUAL_HOST_VARIABLE: &str = "AWS_VIRTUAL_HOSTED_STYLE_REQUEST";
const ALLOW_HTTP_VARIABLE: &str = "AWS_ALLOW_HTTP";

/// Settings that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The endpoint is no address.
    #[error(
        "the endpoint `{endpoint}` of {place} cannot be used: {problem}; set COVEY_S3_ENDPOINT to http(s)://HOST:PORT"
    )]
    Endpoint {
        /// As it was given, without what may be a password.
        endpoint: String,
        /// The bucket.
        place: BucketPlace,
        /// What is wrong.
        problem: String,
    },
    /// It is another machine's and not encrypted.
    #[error(
        "the endpoint {endpoint} of {place} is not encrypted: homes could be read and changed on their way; use https://, \
         or set AWS_ALLOW_HTTP=true if the network is your own"
    )]
    Unencrypted {
        /// The endpoint.
        endpoint: String,
        /// The bucket.
        place: BucketPlace,
    },
    /// The file with profiles.
    #[error(transparent)]
    Profile(#[from] profile::ProfileError),
    /// Anything else that the library refuses.
    #[error("{place} cannot be used: {problem}")]
    Library {
        /// The bucket.
        place: BucketPlace,
        /// The library's words.
        problem: String,
    },
}

impl SettingsError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        Fault::Invalid
    }
}

/// A key for a bucket.
#[derive(Clone, PartialEq, Eq)]
pub struct Key {
    /// Its id, which is no secret.
    pub id: String,
    /// The secret.
    pub secret: String,
    /// For temporary keys.
    pub session_token: Option<String>,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("id", &self.id).finish_non_exhaustive()
    }
}

/// See the module's first lines.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// `http(s)://host:port`; none: Amazon's for the region.
    pub endpoint: Option<String>,
    /// None: `us-east-1`.
    pub region: Option<String>,
    /// None: what the machine itself has (web identity, container, instance).
    pub key: Option<Key>,
    /// Whether another machine may be asked without encryption.
    pub allow_http: bool,
    /// Settings of the library by their names in the environment, for what has no field here.
    others: Vec<(String, String)>,
}

impl Settings {
    /// Reads the environment; `variable` looks one up. Empty counts as unset.
    ///
    /// # Errors
    /// When a profile is named and cannot be read.
    pub fn from_environment(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, SettingsError> {
        let set = |name: &str| variable(name).map(|value| value.trim().to_owned()).filter(|v| !v.is_empty());
        let key = set("AWS_ACCESS_KEY_ID").map(|id| Key {
            id,
            secret: set("AWS_SECRET_ACCESS_KEY").unwrap_or_default(),
            session_token: set("AWS_SESSION_TOKEN"),
        });
        let profile = match OTHER_CREDENTIALS.iter().any(|name| set(name).is_some()) {
            true => Profile::default(),
            false => Profile::read(
                set("AWS_PROFILE").as_deref(),
                file(&set, "AWS_SHARED_CREDENTIALS_FILE", "credentials"),
                file(&set, "AWS_CONFIG_FILE", "config"),
            )?,
        };
        let others = AWS_VARIABLES.iter().filter_map(|name| Some(((*name).to_owned(), set(name)?)));
        Ok(Self {
            endpoint: ENDPOINT_VARIABLES.iter().find_map(|name| set(name)),
            region: REGION_VARIABLES.iter().find_map(|name| set(name)).or(profile.region),
            key: key.or(profile.key),
            allow_http: set(ALLOW_HTTP_VARIABLE).is_some_and(|value| value == "true" || value == "1"),
            others: others.collect(),
        })
    }

    /// For a key that is known, at an endpoint; nothing is read from the environment.
    pub fn of(endpoint: &str, region: &str, key: Key) -> Self {
        Self {
            endpoint: Some(endpoint.to_owned()),
            region: Some(region.to_owned()),
            key: Some(key),
            ..Self::default()
        }
    }

    /// The region that requests are signed for.
    pub(crate) fn region(&self) -> &str {
        self.region.as_deref().unwrap_or(REGION_DEFAULT)
    }

    /// The address that is asked.
    ///
    /// # Errors
    /// When it is none, or another machine's without encryption.
    pub(crate) fn endpoint(&self, place: &BucketPlace) -> Result<url::Url, SettingsError> {
        let Some(text) = &self.endpoint else {
            let text = format!("https://s3.{}.amazonaws.com", self.region());
            return text.parse().map_err(|error: url::ParseError| self.no_endpoint(place, &text, &error));
        };
        let url: url::Url = text.parse().map_err(|error| self.no_endpoint(place, text, &error))?;
        let is_loopback = match url.host() {
            Some(url::Host::Ipv4(address)) => address.is_loopback(),
            Some(url::Host::Ipv6(address)) => address.is_loopback(),
            Some(url::Host::Domain(name)) => name == "localhost",
            None => return Err(self.no_endpoint(place, text, &"it names no host")),
        };
        match url.scheme() {
            "https" => Ok(url),
            "http" if is_loopback || self.allow_http => Ok(url),
            "http" => Err(SettingsError::Unencrypted { endpoint: shown(&url), place: place.clone() }),
            _ => Err(self.no_endpoint(place, text, &"it is neither http:// nor https://")),
        }
    }

    fn no_endpoint(&self, place: &BucketPlace, text: &str, problem: &dyn fmt::Display) -> SettingsError {
        let endpoint = text.rsplit_once('@').map_or(text, |(_, host)| host).to_owned();
        SettingsError::Endpoint { endpoint, place: place.clone(), problem: problem.to_string() }
    }

    /// The endpoint as the library takes it: where buckets have hosts of their own, with the bucket's name before it.
    fn address(&self, place: &BucketPlace, endpoint: &url::Url) -> String {
        let has_host = |(name, value): &(String, String)| name == VIRTUAL_HOST_VARIABLE && value == "true";
        let plain = endpoint.as_str().trim_end_matches('/');
        match plain.split_once("://") {
            Some((scheme, rest)) if self.others.iter().any(has_host) => {
                format!("{scheme}://{}.{rest}", place.bucket())
            }
            _ => plain.to_owned(),
        }
    }

    /// The library's client.
    pub(crate) fn build(
        &self,
        place: &BucketPlace,
        endpoint: &url::Url,
        connector: Connector,
    ) -> Result<AmazonS3, SettingsError> {
        let mut builder = AmazonS3Builder::new();
        for (name, value) in &self.others {
            let config: AmazonS3ConfigKey =
                name.to_ascii_lowercase().parse().map_err(|error| library(place, &error))?;
            builder = builder.with_config(config, value);
        }
        if let Some(key) = &self.key {
            builder = builder.with_access_key_id(&key.id).with_secret_access_key(&key.secret);
            if let Some(token) = &key.session_token {
                builder = builder.with_token(token);
            }
        }
        builder
            .with_bucket_name(place.bucket())
            .with_region(self.region())
            .with_endpoint(self.address(place, endpoint))
            .with_allow_http(endpoint.scheme() == "http")
            // The server compares it with what arrived, and keeps it beside the object.
            .with_checksum_algorithm(Checksum::SHA256)
            // `Patience` tries again, one operation as a whole and within one limit of time.
            .with_retry(RetryConfig {
                max_retries: 0,
                backoff: BackoffConfig::default(),
                ..RetryConfig::default()
            })
            // One object at a time: every server knows that.
            .with_disable_bulk_delete(true)
            .with_http_connector(connector)
            .build()
            .map_err(|error| library(place, &error))
    }
}

fn library(place: &BucketPlace, error: &dyn fmt::Display) -> SettingsError {
    SettingsError::Library { place: place.clone(), problem: error.to_string() }
}

/// Without user and password.
pub(crate) fn shown(url: &url::Url) -> String {
    url.origin().ascii_serialization()
}

fn file(set: &dyn Fn(&str) -> Option<String>, name: &str, default: &str) -> Option<PathBuf> {
    set(name).map(PathBuf::from).or_else(|| Some(PathBuf::from(set("HOME")?).join(".aws").join(default)))
}

/// What the library reads itself; the machine's own credentials among it.
const AWS_VARIABLES: [&str; 12] = [
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_ENDPOINT_URL_STS",
    "AWS_METADATA_ENDPOINT",
    "AWS_IMDSV1_FALLBACK",
    VIRTUAL_HOST_VARIABLE,
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SSE_KMS_KEY_ID",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Settings {
        let look =
            |name: &str| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Settings::from_environment(&look).unwrap()
    }

    fn place() -> BucketPlace {
        "s3://bkt/p".parse().unwrap()
    }

    #[test]
    fn the_environment_is_read_in_the_usual_order() {
        let settings = from(&[
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "hidden"),
            ("AWS_DEFAULT_REGION", "eu-west-1"),
            ("AWS_ENDPOINT_URL", "https://b"),
            ("COVEY_S3_ENDPOINT", "https://a"),
        ]);
        assert_eq!(settings.endpoint.as_deref(), Some("https://a"));
        assert_eq!(settings.region(), "eu-west-1");
        assert!(!format!("{settings:?}").contains("hidden"));
        let bare = from(&[]);
        assert_eq!(bare.endpoint(&place()).unwrap().as_str(), "https://s3.us-east-1.amazonaws.com/");
        assert_eq!(bare.key, None);
    }

    #[test]
    fn a_bucket_may_have_a_host_of_its_own() {
        let endpoint: url::Url = "https://s3.example:9000/".parse().unwrap();
        let address = |pairs: &[(&str, &str)]| from(pairs).address(&place(), &endpoint);
        assert_eq!(address(&[]), "https://s3.example:9000");
        assert_eq!(address(&[("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")]), "https://bkt.s3.example:9000");
    }

    #[test]
    fn an_unencrypted_endpoint_is_for_this_machine_or_by_permission() {
        let at = |endpoint: &str, allow: &str| {
            from(&[("COVEY_S3_ENDPOINT", endpoint), ("AWS_ALLOW_HTTP", allow)]).endpoint(&place())
        };
        assert!(at("http://127.0.0.1:8333", "").is_ok());
        assert!(at("http://[::1]:8333", "").is_ok());
        assert!(at("http://localhost:8333", "").is_ok());
        assert!(at("http://s3.lan:9000", "true").is_ok());
        let error = at("http://user:pass@s3.lan:9000", "").unwrap_err().to_string();
        assert!(error.contains("http://s3.lan:9000") && !error.contains("pass"), "{error}");
        for bad in ["s3.lan:9000", "ftp://x", "nonsense", "http://"] {
            assert!(at(bad, "").is_err(), "{bad}");
        }
    }
}
