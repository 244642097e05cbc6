//! The data plane: sandboxes, working copies of homes, runner side of the link.
//!
//! Reason for a crate: **artifact**. What does not belong here: SQL, models, the journal, the API.

pub mod sandbox;
