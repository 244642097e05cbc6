//! `covey home`.

use serde_json::json;

use super::covey::Place;
use super::fake_server::FakeServer;

#[test]
fn homes_and_their_snapshots_are_shown() {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    place.json(&["agent", "create", "--name", "one", "--model", "m", "--json"]);
    server.state().snapshots =
        vec![json!({ "generation": 1, "root": "ab", "kind": "quiesced", "files": 3, "bytes": 9 })];
    let home = format!("home_{:032x}", 1);
    assert!(place.run(&["home", "list"]).stdout.contains(&home));
    assert_eq!(place.json(&["home", "show", &home, "--json"])["generation"], 0);
    let snapshots = place.run(&["home", "snapshots", &home]);
    assert!(snapshots.stdout.contains("quiesced"), "{snapshots:?}");
    assert_eq!(place.run(&["home", "snapshots", "home_ff"]).code, 3);
}
