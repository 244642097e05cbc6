//! `covey run`.

use std::fs;
use std::process::Stdio;

use serde_json::{Value, json};

use super::covey::{Ended, Place};
use super::fake_server::FakeServer;

/// A server whose agent makes `result` of whatever directory it is given, and says so.
fn with_result(make: impl FnOnce(&std::path::Path)) -> (FakeServer, Place) {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    place.write_client_file();
    fs::create_dir(place.path().join("project")).unwrap();
    fs::write(place.path().join("project/program"), "broken\n").unwrap();
    let result = place.path().join("result");
    fs::create_dir(&result).unwrap();
    make(&result);
    let args = ["home", "secure", "result", "--json", "--store", "server-store", "--org", "o", "--home", "x"];
    let root = place.json(&args)["root"].clone();
    let mut state = server.state();
    state.root_after_session = Some(root);
    state.replies.push_back(vec![
        json!({ "type": "agent.tool_use", "name": "bash", "input": { "command": "mend program" } }),
        json!({ "type": "agent.tool_result", "content": [{ "type": "text", "text": "mended" }] }),
        json!({ "type": "session.status_idle", "stop_reason": { "type": "end_turn" } }),
        // As the real server says it: idle first, secured a moment later.
        json!({ "type": "home.secured", "generation": 2, "changed": true }),
    ]);
    drop(state);
    (server, place)
}

#[test]
fn the_directory_becomes_what_the_agent_left() {
    let (server, place) = with_result(|result| {
        fs::write(result.join("program"), "mended\n").unwrap();
        fs::write(result.join("notes"), "new\n").unwrap();
    });
    let ended = place.run(&["run", "mend it", "--home", "project"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(ended.stdout, "you: mend it\n→ bash mend program\n  │ mended\n· idle (end_turn)\n");
    assert_eq!(fs::read_to_string(place.path().join("project/program")).unwrap(), "mended\n");
    assert_eq!(fs::read_to_string(place.path().join("project/notes")).unwrap(), "new\n");
    let agent = &server.asked("POST", "/v1/agents")[0];
    assert!(agent["name"].as_str().unwrap().starts_with("project-"), "{agent}");
}

#[test]
fn a_second_run_in_the_same_directory_has_the_same_agent_and_home() {
    let (server, place) = with_result(|result| fs::write(result.join("program"), "mended\n").unwrap());
    assert_eq!(place.run(&["run", "mend it", "--home", "project"]).code, 0);
    let reply = json!({ "type": "session.status_idle", "stop_reason": { "type": "end_turn" } });
    server.state().replies.push_back(vec![reply]);
    let again = place.run(&["run", "once more", "--home", "./project/"]);
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.stderr.contains("changed nothing"), "{again:?}");
    assert_eq!(server.asked("POST", "/v1/agents").len(), 1);
    let home = format!("home_{:032x}", 1);
    assert_eq!(server.asked("POST", &format!("/v1/covey/homes/{home}/import")).len(), 1);
}

#[test]
fn a_directory_that_somebody_changed_meanwhile_is_left_alone() {
    let (server, place) = with_result(|result| fs::write(result.join("program"), "mended\n").unwrap());
    server.state().replies.clear();
    let mut command = place.command(&["run", "mend it", "--home", "project"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    server.wait_until_asked(&format!("/v1/sessions/sesn_{:032x}/events/stream", 1));
    fs::write(place.path().join("project/mine"), "typed by a person\n").unwrap();
    server.append(json!({ "type": "session.status_idle", "stop_reason": { "type": "end_turn" } }));
    let ended = Ended::from(child.wait_with_output().unwrap());
    assert_eq!(ended.code, 5, "{ended:?}");
    assert_eq!(fs::read_to_string(place.path().join("project/program")).unwrap(), "broken\n");
    assert!(place.path().join("project/mine").exists());

    // The sentence says how to get the result, and that works.
    let (_, said) = ended.stderr.split_once("covey home materialize NEW_DIR ").unwrap();
    let args: Vec<&str> =
        ["home", "materialize", "fetched"].into_iter().chain(said.split_whitespace()).collect();
    assert_eq!(place.run(&args).code, 0);
    assert_eq!(fs::read_to_string(place.path().join("fetched/program")).unwrap(), "mended\n");
}

#[test]
fn the_result_can_be_left_in_the_home() {
    let (_server, place) = with_result(|result| fs::write(result.join("program"), "mended\n").unwrap());
    let ended = place.run(&["run", "mend it", "--home", "project", "--no-write-back", "--json"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(fs::read_to_string(place.path().join("project/program")).unwrap(), "broken\n");
    let lines: Vec<Value> = ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = lines.last().unwrap();
    assert_eq!(last["type"], "covey.run");
    assert_eq!((&last["changed"], &last["written_back"]), (&json!(true), &json!(false)));
    assert_eq!(lines[0]["type"], "user.message");
}

#[test]
fn a_result_that_the_directory_never_got_is_not_dropped_by_the_next_run() {
    let (server, place) = with_result(|result| fs::write(result.join("program"), "mended\n").unwrap());
    assert_eq!(place.run(&["run", "mend it", "--home", "project", "--no-write-back"]).code, 0);
    let reply = || vec![json!({ "type": "session.status_idle", "stop_reason": { "type": "end_turn" } })];
    server.state().replies.push_back(reply());
    let refused = place.run(&["run", "once more", "--home", "project"]);
    assert_eq!(refused.code, 5, "{refused:?}");
    let home = format!("home_{:032x}", 1);
    let imports = |server: &FakeServer| server.asked("POST", &format!("/v1/covey/homes/{home}/import")).len();
    assert_eq!(imports(&server), 1);
    // The sentence says how to get it, and that works.
    let (_, said) = refused.stderr.split_once("covey home materialize NEW_DIR ").unwrap();
    let said = said.lines().next().unwrap();
    let args: Vec<&str> =
        ["home", "materialize", "fetched"].into_iter().chain(said.split_whitespace()).collect();
    assert_eq!(place.run(&args).code, 0);
    assert_eq!(fs::read_to_string(place.path().join("fetched/program")).unwrap(), "mended\n");
    let replaced = place.run(&["run", "once more", "--home", "project", "--replace-home"]);
    assert!(replaced.stderr.contains("are the agent's home"), "{replaced:?}");
    assert_eq!(imports(&server), 2);
}

#[test]
fn what_the_server_leaves_out_of_homes_is_never_removed_from_the_directory() {
    let (_server, place) = with_result(|result| fs::write(result.join("program"), "mended\n").unwrap());
    let path = place.path().join(".local/share/covey/client.json");
    let mut file: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    file["excludes"] = "only-here".into();
    fs::write(&path, file.to_string()).unwrap();
    for name in ["only-here", "scratch.tmp"] {
        fs::write(place.path().join("project").join(name), "mine\n").unwrap();
    }
    let ended = place.run(&["run", "mend it", "--home", "project"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(fs::read_to_string(place.path().join("project/program")).unwrap(), "mended\n");
    assert_eq!(fs::read_to_string(place.path().join("project/only-here")).unwrap(), "mine\n");
    // By this command's own default it would have been left out; the server's list says that it is part of the home,
    // and the agent's result lacks it.
    assert!(!place.path().join("project/scratch.tmp").exists());
}

#[test]
fn a_file_or_an_empty_task_is_refused_before_anything_is_made() {
    let (server, place) = with_result(|_| {});
    assert_eq!(place.run(&["run", "do it", "--home", "project/program"]).code, 2);
    assert_eq!(place.run(&["run", " ", "--home", "project"]).code, 2);
    assert_eq!(server.asked("POST", "/v1/agents").len(), 0);
}

#[test]
fn files_that_could_not_be_secured_are_not_replaced_by_older_ones() {
    let (server, place) = with_result(|result| fs::write(result.join("program"), "half done\n").unwrap());
    let mut state = server.state();
    let failed = json!({ "type": "home.secure_failed", "fault": "retry", "detail": "the disk is full" });
    state.replies[0].push(failed);
    drop(state);
    let ended = place.run(&["run", "mend it", "--home", "project"]);
    assert_eq!(ended.code, 6, "{ended:?}");
    assert!(ended.stderr.contains("the disk is full"), "{ended:?}");
    assert_eq!(fs::read_to_string(place.path().join("project/program")).unwrap(), "broken\n");
}

#[test]
fn ctrl_c_interrupts_the_agent_and_a_second_one_leaves_it() {
    let (server, place) = with_result(|result| fs::write(result.join("program"), "x").unwrap());
    server.state().replies.clear();
    let events = format!("/v1/sessions/sesn_{:032x}/events", 1);
    let mut command = place.command(&["run", "mend it", "--home", "project"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    let press = || rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    server.wait_until_asked(&format!("{events}/stream"));
    press();
    server.wait_until(|state| state.events.iter().any(|event| event["type"] == "user.interrupt"));
    press();
    let ended = Ended::from(child.wait_with_output().unwrap());
    assert_eq!(ended.code, 130, "{ended:?}");
    assert!(ended.stderr.contains("the session goes on"), "{ended:?}");
    assert_eq!(fs::read_to_string(place.path().join("project/program")).unwrap(), "broken\n");
}

#[test]
fn a_task_needs_a_directory_and_a_server_on_this_machine() {
    assert_eq!(Place::alone().run(&["run", "do it"]).code, 2);
    assert_eq!(Place::alone().run(&["run", "do it", "--home", "nowhere"]).code, 3);
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    fs::create_dir(place.path().join("project")).unwrap();
    let ended = place.run(&["run", "do it", "--home", "project"]);
    assert_eq!(ended.code, 2, "{ended:?}");
    assert!(ended.stderr.contains("--data-dir"), "{ended:?}");
}
