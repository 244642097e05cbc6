//! Tests of the home store through its public face, in one binary. All of them pass as root and as an ordinary
//! user.

#![expect(clippy::unwrap_used, reason = "a failed test ends there")]

mod round_trip;
mod support;
