//! `covey token`.

use super::covey::Place;
use super::fake_server::FakeServer;

#[test]
fn the_secret_of_a_token_is_shown_when_it_is_made_and_never_again() {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    let made = place.run(&["token", "create", "ci"]);
    assert!(made.stdout.contains("secret") && made.stdout.contains("covey_secret"), "{made:?}");
    let listed = place.run(&["token", "list"]);
    assert!(listed.stdout.contains("ci") && !listed.stdout.contains("covey_secret"), "{listed:?}");
    let id = place.json(&["token", "list", "--json"])["data"][0]["id"].as_str().unwrap().to_owned();
    assert!(place.json(&["token", "revoke", &id, "--json"])["revoked_at"].is_string());
    assert_eq!(place.run(&["token", "revoke", "tok_ff"]).code, 3);
}
