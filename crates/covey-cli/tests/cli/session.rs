//! `covey session`.

use std::process::Stdio;

use serde_json::{Value, json};

use super::covey::{Ended, Place};
use super::fake_server::FakeServer;

fn end_turn() -> Value {
    json!({ "type": "session.status_idle", "stop_reason": { "type": "end_turn" } })
}

fn message(text: &str) -> Value {
    json!({ "type": "agent.message", "content": [{ "type": "text", "text": text }] })
}

/// A server with an agent and a session, and the session's id.
fn begun() -> (FakeServer, Place, String) {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    place.json(&["agent", "create", "--name", "one", "--model", "m", "--json"]);
    let session = place.json(&["session", "create", "one", "--title", "first", "--json"]);
    let id = session["id"].as_str().unwrap().to_owned();
    (server, place, id)
}

#[test]
fn a_session_begins_in_the_default_environment_which_is_made_once() {
    let (server, place, _) = begun();
    place.json(&["session", "create", "one", "--message", "hello", "--json"]);
    assert_eq!(server.asked("POST", "/v1/environments"), [json!({ "name": "default" })]);
    let created = &server.asked("POST", "/v1/sessions")[0];
    assert_eq!(created["environment_id"], format!("env_{:032x}", 1));
    assert_eq!(created["title"], "first");
    let sent = server.asked("POST", &format!("/v1/sessions/sesn_{:032x}/events", 2));
    assert_eq!(sent[0]["events"][0]["content"][0]["text"], "hello");
}

#[test]
fn sessions_are_listed_shown_and_archived() {
    let (_server, place, id) = begun();
    let listed = place.run(&["session", "list"]);
    assert!(listed.stdout.contains(&id) && listed.stdout.contains("first"), "{listed:?}");
    assert_eq!(place.json(&["session", "show", &id, "--json"])["status"], "idle");
    assert!(place.json(&["session", "archive", &id, "--json"])["archived_at"].is_string());
    assert_eq!(place.run(&["session", "show", "sesn_ff"]).code, 3);
}

#[test]
fn a_deleted_session_is_gone() {
    let (_server, place, id) = begun();
    assert_eq!(place.json(&["session", "delete", &id, "--json"])["id"], id.as_str());
    assert_eq!(place.run(&["session", "show", &id]).code, 3);
    assert_eq!(place.run(&["session", "delete", &id]).code, 3);
}

#[test]
fn following_an_archived_session_shows_it_and_ends() {
    let (server, place, id) = begun();
    server.append(message("said before"));
    place.json(&["session", "archive", &id, "--json"]);
    let ended = place.run(&["session", "events", &id, "--follow"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "said before\n"));
    assert!(ended.stderr.contains("archived"), "{ended:?}");
}

#[test]
fn an_interrupt_is_an_event() {
    let (server, place, id) = begun();
    assert_eq!(place.run(&["session", "interrupt", &id]).stdout, "interrupt sent\n");
    let sent = server.asked("POST", &format!("/v1/sessions/{id}/events"));
    assert_eq!(sent, [json!({ "events": [{ "type": "user.interrupt" }] })]);
}

#[test]
fn send_and_follow_shows_only_what_follows_until_idle() {
    let (server, place, id) = begun();
    server.append(message("from before"));
    server.state().replies.push_back(vec![message("the answer"), end_turn()]);
    let ended = place.run(&["session", "send", &id, "question", "--follow"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "you: question\nthe answer\n· idle (end_turn)\n"));
}

#[test]
fn a_turn_that_did_not_end_well_has_its_own_exit_code() {
    let (server, place, id) = begun();
    let idle = json!({ "type": "session.status_idle", "stop_reason": { "type": "retries_exhausted" } });
    server.state().replies.push_back(vec![idle]);
    assert_eq!(place.run(&["session", "send", &id, "question", "--follow"]).code, 9);
}

#[test]
fn events_are_printed_as_json_lines_without_change() {
    let (server, place, id) = begun();
    server.append(message("one"));
    server.append(json!({ "type": "from.a.newer.server", "field": [1] }));
    let ended = place.run(&["session", "events", &id, "--json"]);
    let lines: Vec<Value> = ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines, server.state().events);
}

#[test]
fn following_survives_a_server_that_dies_and_shows_each_event_once_and_in_order() {
    let (server, place, id) = begun();
    server.state().events_per_stream = Some(2);
    server.append(message("event 0"));
    let args = ["session", "events", &id, "--follow", "--json"];
    let child = place.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    server.wait_until_asked(&format!("/v1/sessions/{id}/events/stream"));
    for number in 1..8 {
        server.append(message(&format!("event {number}")));
    }
    server.append(json!({ "type": "session.status_terminated" }));
    let ended = Ended::from(child.wait_with_output().unwrap());
    assert_eq!(ended.code, 9, "{ended:?}");
    let ids: Vec<Value> =
        ended.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone()).collect();
    let wanted: Vec<Value> = server.state().events.iter().map(|event| event["id"].clone()).collect();
    assert_eq!(ids, wanted);
}
