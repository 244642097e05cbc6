//! The walls: the root file system, privileges and limits, the system call filter.
//!
//! What stays true: every failure is an error; no step is skipped because the host lacks it, except the ones
//! that the runner reports (Landlock's ABI). What does not belong here: what runs inside.

pub(crate) mod confine;
pub(crate) mod filter;
pub(crate) mod root;
