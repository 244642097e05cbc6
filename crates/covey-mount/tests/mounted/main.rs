//! Tests that mount homes for real: as root, on a kernel that can. `cargo xtask test --stage mounts` runs them, or
//! says why they cannot run here; without the feature `mounts` they are not built, so nothing passes unseen.

#![expect(clippy::unwrap_used, reason = "a failed test ends there")]

mod cases;
mod contents;
mod ground;
mod kill;
mod property;
mod tools;
