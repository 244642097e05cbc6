//! `covey` from outside on real buckets. `cargo xtask test --stage buckets` starts the servers and names them in
//! `COVEY_TEST_BUCKETS`; without the feature `servers` these tests are not built, so nothing passes unseen.

#[cfg(test)]
mod backup;
#[cfg(test)]
mod encrypted;
#[cfg(test)]
mod identity;
#[cfg(test)]
mod machine;
#[cfg(test)]
mod repair;
