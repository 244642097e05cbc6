//! The durable agent loop, pure: journal records are folded into a [`Session`], which says what comes next.
//!
//! Reason for a crate: **purity** (I9). No clock, no randomness, no network, no disk, no SQL, no async is
//! reachable from here; ids and times come in with records. What does not belong here: performing an effect.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod config;
pub mod effect;
pub mod prompt;
pub mod record;
pub mod repair;
pub mod retry;
pub mod session;
pub mod toolset;
pub mod verify;

pub use config::AgentConfig;
pub use effect::Effect;
pub use record::{Body, Record};
pub use session::Session;
