//! Sandboxes, held to their promises: isolation, tools, the link, every way to die.
//!
//! What stays true: the tests pass as root and as an ordinary user, need no network, and each starts sandboxes of its own in a
//! directory of its own. What does not belong here: homes and the store.

#[cfg(test)]
mod bash;
#[cfg(test)]
mod contract;
#[cfg(test)]
mod death;
#[cfg(test)]
mod files;
#[cfg(test)]
mod isolation;
#[cfg(test)]
mod link;
#[cfg(test)]
mod probe;
#[cfg(test)]
mod room;
