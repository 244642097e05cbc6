//! The in-sandbox daemon.
fn main() {}
