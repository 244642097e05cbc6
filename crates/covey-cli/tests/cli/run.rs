//! `covey run`.

use super::covey::Place;

#[test]
fn a_task_needs_a_directory() {
    assert_eq!(Place::alone().run(&["run", "do it"]).code, 2);
}
