//! The one classification of errors that leave a crate: by the reaction they ask for.

use serde::{Deserialize, Serialize};

/// What the caller can do about an error. HTTP status, exit code, retry policy and log level are exhaustive
/// matches over this and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// Try the same again later; nothing is wrong with the request.
    Retry,
    /// Somebody else changed the thing first; look again, then decide.
    Conflict,
    /// It is proven not to be there (never "could not be read").
    NotFound,
    /// The request itself is wrong; the text says how to mend it.
    Invalid,
    /// The caller may not do this.
    Denied,
    /// Stored bytes are damaged; never defaulted, always reported.
    Corrupt,
    /// A limit that has a name was reached, for now: wait, or give something up.
    Limit,
    /// Our own fault.
    Bug,
    /// The thing itself exceeds a limit that has a name; waiting does not help, a smaller one does.
    TooLarge,
    /// A disk is full. Nothing is lost; the same can be done again once somebody has made room.
    Full,
}
