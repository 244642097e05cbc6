//! The runner from outside, with the fake backend: what it promises of homes.

#[cfg(test)]
mod deleted;
#[cfg(test)]
mod promises;
#[cfg(test)]
mod servers;
