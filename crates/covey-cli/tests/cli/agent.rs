//! `covey agent`.

use serde_json::json;

use super::covey::Place;
use super::fake_server::FakeServer;

#[test]
fn an_agent_is_made_with_the_six_tools_and_found_by_name() {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    let made =
        place.json(&["agent", "create", "--name", "mender", "--model", "m1", "--system", "Mend.", "--json"]);
    assert_eq!(
        server.asked("POST", "/v1/agents"),
        [
            json!({"name": "mender", "model": "m1", "tools": [{"type": "agent_toolset_20260401"}], "system": "Mend."})
        ]
    );
    let shown = place.run(&["agent", "show", "mender"]);
    assert_eq!(shown.code, 0, "{shown:?}");
    assert!(shown.stdout.contains(made["id"].as_str().unwrap()) && shown.stdout.contains("model        m1"));
}

#[test]
fn agents_are_listed_as_a_table_and_as_json() {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    place.json(&["agent", "create", "--name", "one", "--model", "m", "--json"]);
    assert_eq!(place.json(&["agent", "list", "--json"])["data"][0]["name"], "one");
    let id = format!("agent_{:032x}", 1);
    let state = "ID                                      NAME  VERSION  MODEL  STATE\n";
    assert_eq!(place.run(&["agent", "list"]).stdout, format!("{state}{id}  one   1        m      -\n"));
}

#[test]
fn an_update_names_the_version_that_it_was_made_from() {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    place.json(&["agent", "create", "--name", "one", "--model", "m", "--json"]);
    let updated = place.json(&["agent", "update", "one", "--model", "m2", "--json"]);
    assert_eq!((&updated["version"], &updated["model"]["id"]), (&json!(2), &json!("m2")));
    let path = format!("/v1/agents/agent_{:032x}", 1);
    assert_eq!(server.asked("POST", &path), [json!({"model": "m2", "version": 1})]);
    let nothing = place.run(&["agent", "update", "one"]);
    assert_eq!(nothing.code, 2, "{nothing:?}");
}

#[test]
fn an_archived_agent_is_no_longer_found_by_name() {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    place.json(&["agent", "create", "--name", "one", "--model", "m", "--json"]);
    assert!(place.json(&["agent", "archive", "one", "--json"])["archived_at"].is_string());
    let gone = place.run(&["agent", "show", "one"]);
    assert_eq!(gone.code, 3, "{gone:?}");
    assert_eq!(gone.stderr, "error: no agent has the name `one`; `covey agent list` shows them\n");
}

#[test]
fn a_name_that_two_agents_have_is_refused() {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    for _ in 0..2 {
        place.json(&["agent", "create", "--name", "twin", "--model", "m", "--json"]);
    }
    assert_eq!(place.run(&["agent", "show", "twin"]).code, 5);
}

#[test]
fn each_way_to_fail_has_its_exit_code_and_says_what_to_do() {
    let unknown = Place::alone().run(&["agent", "list"]);
    assert_eq!(unknown.code, 6, "{unknown:?}");
    assert!(unknown.stderr.contains("covey up"), "{unknown:?}");

    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    let denied = place.run(&["agent", "list", "--token", "wrong"]);
    assert_eq!(denied.code, 4, "{denied:?}");
    assert_eq!(denied.stderr, "error: the token is not known (request req_1)\n");
    let missing = place.run(&["agent", "show", "agent_0"]);
    assert_eq!((missing.code, missing.stdout.as_str()), (3, ""), "{missing:?}");
    let odd = place.run(&["session", "show", "a/../b"]);
    assert_eq!(odd.code, 2, "{odd:?}");

    // A port that was free a moment ago.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let unreachable = Place::with_server(&format!("http://{closed}")).run(&["agent", "list", "--json"]);
    assert_eq!((unreachable.code, unreachable.stdout.as_str()), (6, ""), "{unreachable:?}");
}
