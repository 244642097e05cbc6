//! Paths, which are bytes, in JSON and in queries, which are text.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// A path as an answer shows it: text, and where that is not all of it, its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathText {
    /// With replacements for what is not UTF-8.
    pub text: String,
    /// The bytes in base64, if there were replacements.
    pub base64: Option<String>,
}

impl PathText {
    /// Shows a path.
    pub fn of(path: &[u8]) -> Self {
        match std::str::from_utf8(path) {
            Ok(text) => Self { text: text.to_owned(), base64: None },
            Err(_) => Self {
                text: String::from_utf8_lossy(path).into_owned(),
                base64: Some(URL_SAFE_NO_PAD.encode(path)),
            },
        }
    }
}

/// A path as `path_base64` has it.
pub fn base64_of(path: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(path)
}

/// The bytes of a path that is given as text or in base64; the empty path when it is not given.
///
/// # Errors
/// For people: what is wrong.
pub fn path_of(text: Option<&str>, base64: Option<&str>) -> Result<Vec<u8>, String> {
    match (text, base64) {
        (Some(_), Some(_)) => Err("give `path` or `path_base64`, not both".to_owned()),
        (Some(text), None) => Ok(text.as_bytes().to_vec()),
        (None, Some(base64)) => {
            let wrong =
                |_| "`path_base64`: expected base64 in the URL-safe alphabet, without padding".to_owned();
            URL_SAFE_NO_PAD.decode(base64).map_err(wrong)
        }
        (None, None) => Ok(Vec::new()),
    }
}

/// Where a page ended: behind this path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathCursor(pub Vec<u8>);

impl fmt::Display for PathCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The letter makes the cursor of the empty path a text that is not empty.
        write!(f, "p{}", URL_SAFE_NO_PAD.encode(&self.0))
    }
}

/// A text that is no end of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is no end of a page")]
pub struct InvalidCursor;

impl FromStr for PathCursor {
    type Err = InvalidCursor;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let decoded = text.strip_prefix('p').and_then(|encoded| URL_SAFE_NO_PAD.decode(encoded).ok());
        decoded.map(Self).ok_or(InvalidCursor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_survive_text_and_back() {
        for path in [&b""[..], b"a/b", b"\xff\xfe/x", "grüße".as_bytes(), b"?&=%/ +"] {
            let shown = PathText::of(path);
            let back = match &shown.base64 {
                Some(base64) => path_of(None, Some(base64)),
                None => path_of(Some(&shown.text), None),
            };
            assert_eq!(back.unwrap(), path);
            let cursor = PathCursor(path.to_vec());
            assert_eq!(cursor.to_string().parse(), Ok(cursor));
        }
        assert!(path_of(Some("a"), Some("YQ")).is_err() && path_of(None, Some("!")).is_err());
        assert!("".parse::<PathCursor>().is_err() && "YQ".parse::<PathCursor>().is_err());
    }
}
