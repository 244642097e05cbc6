//! `covey demo`: only its options; `cargo xtask test` runs the whole.

use super::covey::Place;

#[test]
fn an_option_that_it_does_not_have_is_refused() {
    assert_eq!(Place::alone().run(&["demo", "--no-such-option"]).code, 2);
    assert!(Place::alone().run(&["demo", "--help"]).stdout.contains("--repo"));
}
