//! Tests of the home store through its public face, in one binary. All of them pass as root and as an ordinary
//! user.

#![expect(clippy::unwrap_used, reason = "a failed test ends there")]

mod archive;
mod collect;
mod concurrency;
mod copy;
mod damage;
mod deep;
mod encrypted;
mod gaps;
mod git;
mod golden;
mod hostile;
mod in_place;
mod interleave;
mod kept;
mod kill;
mod look;
mod matrix;
mod odd;
mod odd_tree;
mod property;
mod round_trip;
mod special;
mod store_contract;
mod support;
mod view;
