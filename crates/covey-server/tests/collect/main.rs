//! Collecting the stores of a server: what an agent had goes with it, what others need stays, and what races a collection
//! is refused and comes again with nothing lost.

#[cfg(test)]
mod agents;
#[cfg(test)]
mod charge;
#[cfg(test)]
mod races;
#[cfg(test)]
mod schedule;
#[cfg(test)]
mod told;
#[cfg(test)]
mod world;
