//! The control plane: API, journal, loop driver, model clients, server sides of the runner link and the store link.
//!
//! Reason for a crate: **artifact**. What does not belong here: namespaces, cgroups, a path on a runner.

pub mod collect;
pub mod config;
pub use covey_db as db;
pub mod drive;
pub mod history;
pub mod http;
pub mod link;
pub use covey_models as model;
mod server;
pub mod store_link;
pub mod stores;

pub use server::{HAND_OVER_MAX, Homes, RunnerGate, SERVED, Server, StartError};
