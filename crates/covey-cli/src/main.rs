//! The `covey` command.
fn main() {}
