//! `covey up`: only its options; what it does is tested where it is built.

use super::covey::Place;

#[test]
fn a_script_and_an_endpoint_exclude_each_other() {
    let ended = Place::alone().run(&["up", "--model-script", "x", "--model-url", "http://127.0.0.1:1"]);
    assert_eq!(ended.code, 2, "{ended:?}");
}
