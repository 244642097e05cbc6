//! `covey doctor`.

use super::covey::Place;
use super::fake_server::FakeServer;

#[test]
fn every_check_says_ok_or_no_and_no_comes_with_a_remedy() {
    let place = Place::alone();
    let ended = place.run(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(ended.code, if report["ok"] == true { 0 } else { 8 }, "{ended:?}");
    let checks = report["checks"].as_array().unwrap();
    for check in checks {
        assert!(check["ok"] == true || check["remedy"].is_string(), "{check}");
    }
    let named = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap();
    assert_eq!(named("data directory")["ok"], true);
    assert_eq!(named("model key")["ok"], false);
    assert_eq!(named("model key")["needed"], false);
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "the doctor leaves things behind");
}

#[test]
fn a_data_directory_that_cannot_be_used_is_a_no_with_exit_code_8() {
    let ended = Place::alone().run(&["doctor", "--data-dir", "/proc/nothing"]);
    assert_eq!(ended.code, 8, "{ended:?}");
    assert!(ended.stdout.contains("NO  data directory") && ended.stdout.contains("--data-dir"), "{ended:?}");
}

#[test]
fn an_endpoint_is_tried_only_when_it_is_named() {
    let place = Place::alone();
    assert!(!place.run(&["doctor"]).stdout.contains("model  "));
    let server = FakeServer::start();
    let there = place.run(&["doctor", "--model-url", &server.url]).stdout;
    assert!(there.contains("answers (401"), "{there}");
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let gone = place.run(&["doctor", "--model-url", &format!("http://{closed}")]);
    assert_eq!(gone.code, 8);
    assert!(gone.stdout.contains("does not answer"), "{gone:?}");
}
