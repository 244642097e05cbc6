//! What crosses a socket: the framing, the runner link, the store link, the tool link, and the answers of the public API.
//!
//! Reasons for a crate: **change policy** (old peers are running: fields and variants are appended, never
//! reinterpreted or removed) and **trust** ([`frame`] is the only decoder of bytes from a sandbox).
//! What does not belong here: who sends a message, over what transport, and what it causes.
//!
//! Messages are MessagePack maps with named fields (`rmp-serde`): unknown fields are ignored, absent ones
//! take their default, so one side may be newer. [`generation`] says which messages a peer may be sent.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod api;
pub mod frame;
pub mod generation;
pub mod runner;
pub mod setup;
pub mod store;
pub mod tool;
