//! `covey runner`.

use serde_json::json;

use super::covey::Place;
use super::fake_server::FakeServer;

#[test]
fn runners_are_listed() {
    let server = FakeServer::start();
    server.state().runners = vec![json!({
        "id": "rnr_1", "name": "host\u{1b}[2J", "connected": true, "last_seen_at": "2026-01-01T00:00:00.000Z"
    })];
    let place = Place::with_server(&server.url);
    assert_eq!(place.json(&["runner", "list", "--json"])["data"][0]["id"], "rnr_1");
    let text = place.run(&["runner", "list"]).stdout;
    assert!(text.starts_with("ID     NAME") && text.contains("true"), "{text}");
    assert!(!text.contains('\u{1b}'), "a name steers the terminal: {text:?}");
}
