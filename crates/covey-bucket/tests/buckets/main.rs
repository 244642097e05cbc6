//! The bucket backend against real servers, alone and behind a proxy that breaks things. `cargo xtask test --stage
//! buckets` starts the servers and names them in `COVEY_TEST_BUCKETS`; without the feature `servers` these tests are
//! not built, so nothing passes unseen.

#![expect(clippy::unwrap_used, reason = "a failed test ends there")]

mod contract;
mod faults;
mod homes;
mod parts;
mod probe;
mod proxy;
mod servers;
