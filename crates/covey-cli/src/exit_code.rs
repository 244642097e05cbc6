//! Exit codes: what a script can tell apart.

use covey_bucket::{OpenError, SettingsError};
use covey_home::archive::ArchiveError;
use covey_home::integrity::IntegrityError;
use covey_home::tracked::TrackedError;
use covey_home::view::ViewError;
use covey_home::{
    CarryError, CollectError, CopyError, EditError, KeyError, MaterializeError, PointerError,
    SecureAndPublishError, SecureError, StoreError,
};
use covey_mount::{CacheError, MountError};
use covey_server::db::DbError;
use covey_server::history::OpenFileError;
use covey_types::Fault;

use crate::client::ClientError;

/// How the command ended. The numbers are part of the interface: appended, never changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExitCode {
    /// It did what was asked.
    Success = 0,
    /// Anything that has no number of its own, faults of Covey among them.
    Failure = 1,
    /// The command line cannot be understood (given by the parser) or the request is wrong; change it.
    Invalid = 2,
    /// What was named does not exist.
    NotFound = 3,
    /// The token is missing, unknown or not allowed to do this.
    Denied = 4,
    /// Something changed meanwhile; look again, then decide.
    Conflict = 5,
    /// The server or the store cannot be reached, or asks to try later.
    Unavailable = 6,
    /// Stored bytes are damaged.
    Damaged = 7,
    /// `covey doctor`: this machine lacks something.
    Incapable = 8,
    /// The session ended, but not with a finished turn.
    Unfinished = 9,
    /// The person pressed Ctrl-C.
    Interrupted = 130,
}

/// For `covey --help`.
pub(crate) const HELP: &str = "\
Exit codes:
  0  done                            5  conflict: changed meanwhile
  1  failed                          6  server or store not reachable, try later
  2  wrong command line or request   7  stored bytes are damaged
  3  not found                       8  doctor: this machine lacks something
  4  not allowed                     9  the session ended without finishing its turn
                                   130  interrupted with Ctrl-C";

impl ExitCode {
    /// The code for an error, found by the first cause that has a class.
    pub(crate) fn of(error: &anyhow::Error) -> Self {
        error.chain().find_map(fault_of).map_or(Self::Failure, Self::for_fault)
    }

    const fn for_fault(fault: Fault) -> Self {
        match fault {
            Fault::Retry | Fault::Full => Self::Unavailable,
            Fault::Conflict => Self::Conflict,
            Fault::NotFound => Self::NotFound,
            Fault::Invalid | Fault::Limit | Fault::TooLarge => Self::Invalid,
            Fault::Denied => Self::Denied,
            Fault::Corrupt => Self::Damaged,
            Fault::Bug => Self::Failure,
        }
    }
}

/// The class of one cause, if it is of a kind that has one.
fn fault_of(cause: &(dyn std::error::Error + 'static)) -> Option<Fault> {
    let client = cause.downcast_ref().map(ClientError::fault);
    let refusal = || cause.downcast_ref().map(|refusal: &Refusal| refusal.fault);
    let secure = || cause.downcast_ref().map(SecureError::fault);
    let publish = || cause.downcast_ref().map(SecureAndPublishError::fault);
    let pointer = || cause.downcast_ref().map(PointerError::fault);
    let materialize = || cause.downcast_ref().map(MaterializeError::fault);
    let store = || cause.downcast_ref().map(StoreError::fault);
    client
        .or_else(refusal)
        .or_else(secure)
        .or_else(publish)
        .or_else(pointer)
        .or_else(materialize)
        .or_else(store)
        .or_else(|| cause.downcast_ref().map(IntegrityError::fault))
        .or_else(|| cause.downcast_ref().map(CarryError::fault))
        .or_else(|| cause.downcast_ref().map(CollectError::fault))
        .or_else(|| cause.downcast_ref().map(DbError::fault))
        .or_else(|| cause.downcast_ref().map(KeyError::fault))
        .or_else(|| cause.downcast_ref().map(TrackedError::fault))
        .or_else(|| cause.downcast_ref().map(MountError::fault))
        .or_else(|| cause.downcast_ref().map(CacheError::fault))
        .or_else(|| cause.downcast_ref().map(ViewError::fault))
        .or_else(|| cause.downcast_ref().map(OpenFileError::fault))
        .or_else(|| cause.downcast_ref().map(EditError::fault))
        .or_else(|| cause.downcast_ref().map(ArchiveError::fault))
        .or_else(|| cause.downcast_ref().map(CollectError::fault))
        .or_else(|| cause.downcast_ref().map(CopyError::fault))
        .or_else(|| cause.downcast_ref().map(OpenError::fault))
        .or_else(|| cause.downcast_ref().map(SettingsError::fault))
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        Self::from(code as u8)
    }
}

/// The command itself will not go on; `text` says why and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Refusal {
    fault: Fault,
    text: String,
}

impl Refusal {
    pub(crate) fn new(fault: Fault, text: impl Into<String>) -> Self {
        Self { fault, text: text.into() }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn a_class_is_found_below_any_number_of_sentences() {
        let refused: Result<(), _> = Err(Refusal::new(Fault::Conflict, "the directory changed"));
        let error = refused.context("writing back").context("covey run").unwrap_err();
        assert_eq!(ExitCode::of(&error), ExitCode::Conflict);
        assert_eq!(ExitCode::of(&anyhow::anyhow!("anything")), ExitCode::Failure);
    }
}
