//! A credential that cannot be printed by accident.
//!
//! `Debug` shows nothing of it, there is no `Display` and no `Serialize`; [`Secret::expose`] is the one way out,
//! so a search for it finds every place that could leak.

use std::fmt;

use base64::Engine as _;

/// What stands where a secret stood.
pub const REDACTED: &str = "[redacted]";

/// A key or token of a third party, or one of ours.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value as read from the environment or a file; surrounding white space (a final newline) goes.
    pub fn new(value: &str) -> Self {
        Self(value.trim().to_owned())
    }

    /// The value itself, for the header that carries it and for nothing else.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Replaces the secret, plain or in base64, wherever `text` contains it. Call before `text` is cut: a cut
    /// inside the secret would leave a part that no longer matches.
    pub fn redact(&self, text: &str) -> String {
        if self.0.is_empty() {
            return text.to_owned();
        }
        let encoded = base64::engine::general_purpose::STANDARD_NO_PAD.encode(&self.0);
        text.replace(&self.0, REDACTED).replace(&encoded, REDACTED)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret([redacted])")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_shows_in_no_output_and_is_found_in_others() {
        let secret = Secret::new("sk-very-secret\n");
        assert_eq!(format!("{secret:?} {:?}", Some(&secret)), "Secret([redacted]) Some(Secret([redacted]))");
        assert_eq!(secret.redact("bad key sk-very-secret!"), "bad key [redacted]!");
        assert_eq!(secret.redact("Basic c2stdmVyeS1zZWNyZXQ="), "Basic [redacted]=");
        assert_eq!(Secret::new("").redact("abc"), "abc");
    }
}
