//! Keys from `~/.aws/credentials` and `~/.aws/config`: the form in which most people have one.
//!
//! Only keys that stand there in clear are read. A profile that gets its key by single sign-on, by a program or by a
//! role is refused by name, with what to do. What does not belong here: other settings of profiles.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use crate::settings::Key;

/// A longer file is no list of profiles.
const FILE_BYTES_MAX: u64 = 1024 * 1024;
const DEFAULT: &str = "default";
/// Settings of profiles whose key has to be fetched.
const FETCHED: [&str; 4] = ["sso_session", "sso_start_url", "credential_process", "role_arn"];

/// A profile that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// A file is there and cannot be read.
    #[error("{} cannot be read", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// No file knows it.
    #[error("there is no profile `{0}` in ~/.aws/credentials or ~/.aws/config: correct AWS_PROFILE")]
    Unknown(String),
    /// Its key does not stand in the file.
    #[error(
        "the profile `{name}` gets its key by `{way}`, which is not supported: run \
         `aws configure export-credentials --profile {name} --format env` and set what it prints"
    )]
    Fetched {
        /// The profile.
        name: String,
        /// The setting that says so.
        way: &'static str,
    },
}

/// What a profile says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Profile {
    pub(crate) key: Option<Key>,
    pub(crate) region: Option<String>,
}

impl Profile {
    /// Reads a profile from both files. A file that is not there is empty; so is the default profile.
    pub(crate) fn read(
        name: Option<&str>,
        credentials: Option<PathBuf>,
        config: Option<PathBuf>,
    ) -> Result<Self, ProfileError> {
        let wanted = name.unwrap_or(DEFAULT);
        let mut found = section(credentials.as_deref(), wanted)?;
        let title = if wanted == DEFAULT { DEFAULT.to_owned() } else { format!("profile {wanted}") };
        let from_config = section(config.as_deref(), &title)?;
        let is_known = found.is_some() || from_config.is_some();
        if !is_known && name.is_some() {
            return Err(ProfileError::Unknown(wanted.to_owned()));
        }
        // The file for keys comes before the other.
        let mut values = from_config.unwrap_or_default();
        values.extend(found.take().unwrap_or_default());
        let mut take = |name: &str| values.remove(name).filter(|value| !value.is_empty());
        let key = take("aws_access_key_id").zip(take("aws_secret_access_key"));
        let session_token = take("aws_session_token");
        if let (None, Some(way)) = (&key, FETCHED.iter().find(|way| values.contains_key(**way))) {
            return Err(ProfileError::Fetched { name: wanted.to_owned(), way });
        }
        Ok(Self {
            key: key.map(|(id, secret)| Key { id, secret, session_token }),
            region: values.remove("region"),
        })
    }
}

fn section(path: Option<&Path>, title: &str) -> Result<Option<HashMap<String, String>>, ProfileError> {
    let Some(path) = path else { return Ok(None) };
    let read = || -> io::Result<String> {
        if std::fs::metadata(path)?.len() > FILE_BYTES_MAX {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        std::fs::read_to_string(path)
    };
    match read() {
        Ok(text) => Ok(parse(&text, title)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ProfileError::Unreadable { path: path.to_owned(), source }),
    }
}

/// The settings below `[title]`; those of a nested group, which are indented, are left out.
fn parse(text: &str, title: &str) -> Option<HashMap<String, String>> {
    let mut found = None;
    let mut inside = false;
    for line in text.lines().filter(|line| !line.starts_with(['#', ';', ' ', '\t'])) {
        if let Some(name) = line.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            inside = name.split_whitespace().collect::<Vec<_>>().join(" ") == title;
            if inside {
                found.get_or_insert_with(HashMap::new);
            }
        } else if let (true, Some((name, value))) = (inside, line.split_once('=')) {
            let value = value.split(" #").next().unwrap_or_default().trim();
            found.get_or_insert_with(HashMap::new).insert(name.trim().to_ascii_lowercase(), value.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: Option<&str>, credentials: &str, config: &str) -> Result<Profile, ProfileError> {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (dir.path().join("credentials"), dir.path().join("config"));
        std::fs::write(&one, credentials).unwrap();
        std::fs::write(&other, config).unwrap();
        Profile::read(name, Some(one), Some(other))
    }

    #[test]
    fn a_profile_is_found_in_both_files() {
        let keys = "[default]\naws_access_key_id = A\naws_secret_access_key=s/+=\n\n[two]\naws_access_key_id=B\n\
                    aws_secret_access_key=t # new\naws_session_token = u\n";
        let config = "[default]\nregion = eu-west-1\n[profile two]\nregion=us-west-2\ns3 =\n  region = no\n";
        let one = read(None, keys, config).unwrap();
        assert_eq!(one.key, Some(Key { id: "A".into(), secret: "s/+=".into(), session_token: None }));
        assert_eq!(one.region.as_deref(), Some("eu-west-1"));
        let two = read(Some("two"), keys, config).unwrap();
        let key = Key { id: "B".into(), secret: "t".into(), session_token: Some("u".into()) };
        assert_eq!((two.key, two.region.as_deref()), (Some(key), Some("us-west-2")));
    }

    #[test]
    fn what_is_not_there_is_an_error_only_when_it_was_asked_for() {
        assert_eq!(read(None, "", "").unwrap(), Profile::default());
        assert_eq!(Profile::read(None, Some("/nowhere/at/all".into()), None).unwrap(), Profile::default());
        assert!(matches!(read(Some("x"), "[y]\n", ""), Err(ProfileError::Unknown(name)) if name == "x"));
    }

    #[test]
    fn a_key_that_must_be_fetched_is_refused_with_the_remedy() {
        let error = read(Some("x"), "", "[profile x]\nsso_session = s\n").unwrap_err().to_string();
        assert!(error.contains("`sso_session`") && error.contains("export-credentials"), "{error}");
    }
}
