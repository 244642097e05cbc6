//! Sandboxes, held to their promises: isolation, tools, the link, every way to die.
//!
//! What stays true: the tests pass as root and as an ordinary user, need no network, and each starts sandboxes of its own in a
//! directory of its own. What does not belong here: homes and the store.

mod bash;
mod contract;
mod death;
mod files;
mod isolation;
mod link;
mod probe;
mod room;
