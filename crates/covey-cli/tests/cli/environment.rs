//! `covey environment`.

use super::covey::Place;
use super::fake_server::FakeServer;

#[test]
fn an_environment_is_made_shown_listed_archived_and_deleted() {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    let made = place.json(&["environment", "create", "lab", "--description", "for trials", "--json"]);
    let id = made["id"].as_str().unwrap().to_owned();
    assert_eq!(made["description"], "for trials");
    assert!(place.run(&["environment", "show", &id]).stdout.contains("lab"));
    assert_eq!(place.json(&["environment", "list", "--json"])["data"][0]["name"], "lab");
    assert!(place.json(&["environment", "archive", &id, "--json"])["archived_at"].is_string());
    assert_eq!(place.run(&["environment", "delete", &id]).stdout, format!("deleted {id}\n"));
    assert_eq!(place.run(&["environment", "show", &id]).code, 3);
}
