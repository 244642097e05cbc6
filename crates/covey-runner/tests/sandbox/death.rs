//! Freezing, dying, adopting, destroying.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use covey_runner::sandbox::native::NativeBackend;
use covey_runner::sandbox::{AdoptError, SandboxBackend};
use covey_types::FencingToken;
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, StepReport};
use serde_json::json;

use crate::room::{Live, Room, text};

#[test]
fn a_frozen_sandbox_does_nothing_and_goes_on_where_it_was() {
    let room = Room::new();
    let live = room.start();
    live.output(
        "(while :; do echo x >>ticks; sleep 0.005; done) >/dev/null 2>&1 & until [ -s ticks ]; do :; done",
    );
    let size = || fs::metadata(room.home_dir().join("ticks")).unwrap().len();
    for _ in 0..20 {
        live.sandbox.freeze().unwrap();
        let before = size();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(size(), before);
        live.sandbox.thaw().unwrap();
        live.ping();
    }
    let before = size();
    live.output(&format!("until [ $(stat -c %s ticks) -gt {before} ]; do sleep 0.01; done"));
    assert_eq!(live.output("echo on"), "on\n");
}

#[test]
fn the_agent_cannot_thaw_itself() {
    let room = Room::new();
    let live = room.start();
    live.bash(
        "(while :; do kill -CONT -1; echo x >>ticks; done) >/dev/null 2>&1 & until [ -s ticks ]; do :; done",
    );
    let size = || fs::metadata(room.home_dir().join("ticks")).unwrap().len();
    live.sandbox.freeze().unwrap();
    let before = size();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(size(), before);
    live.sandbox.thaw().unwrap();
}

#[test]
fn a_frozen_sandbox_can_be_destroyed() {
    let room = Room::new();
    let live = room.start();
    live.output("sleep 1000 >/dev/null 2>&1 &");
    live.sandbox.freeze().unwrap();
    live.sandbox.destroy().unwrap();
    assert!(!live.sandbox.is_alive());
    assert!(fs::read_dir(room.run_dir()).unwrap().next().is_none());
}

#[test]
fn destroying_is_idempotent_and_a_destroyed_sandbox_is_gone_for_everyone() {
    let room = Room::new();
    let live = room.start();
    let [(home, found)] = &NativeBackend::new().recorded(&room.run_dir()).unwrap()[..] else {
        panic!("one record")
    };
    assert_eq!((*home, found.id()), (room.home, live.sandbox.id()));
    assert!(found.is_alive());
    live.sandbox.destroy().unwrap();
    live.sandbox.destroy().unwrap();
    found.destroy().unwrap();
    assert!(!found.is_alive());
    assert!(matches!(found.connect(FencingToken(9)), Err(AdoptError::Gone)));
    assert!(found.freeze().is_err() && found.thaw().is_err());
    assert!(NativeBackend::new().recorded(&room.run_dir()).unwrap().is_empty());
}

#[test]
fn a_sandbox_is_adopted_with_its_running_call_and_its_kept_result() {
    let room = Room::new();
    let live = room.start();
    let kept = live.begin("bash", &json!({"command": "echo kept; cd /tmp"}));
    let result = live.finish(kept);
    let running = live.begin("bash", &json!({"command": "until [ -e ~/go ]; do sleep 0.01; done; pwd"}));
    // A runner that starts anew knows the directory only.
    let [(_, found)] = &NativeBackend::new().recorded(&room.run_dir()).unwrap()[..] else {
        panic!("one record")
    };
    let adopted = Live::connect(Arc::clone(found), 2);
    assert_eq!(adopted.receive(), SandboxToRunner::Done { step: kept, result });
    assert_eq!(adopted.query(running), StepReport::Running);
    fs::write(room.home_dir().join("go"), "").unwrap();
    assert_eq!(text(&adopted.finish(running)), "/tmp\n");
}

#[test]
fn a_killed_daemon_takes_everything_along_and_the_home_stays() {
    let room = Room::new();
    let live = room.start();
    live.output("echo work >f; setsid sleep 1000 >/dev/null 2>&1 &");
    let record: serde_json::Value = serde_json::from_slice(
        &fs::read(room.run_dir().join(live.sandbox.id().to_string()).join("record.json")).unwrap(),
    )
    .unwrap();
    let pid = record["process"]["pid"].as_i64().unwrap() as i32;
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    assert!(live.sandbox.wait_gone().contains("signal 9"));
    assert!(!live.sandbox.is_alive());
    live.sandbox.destroy().unwrap();
    let second = room.start();
    assert_eq!(second.output("cat f"), "work\n");
}

#[test]
fn without_a_runner_the_sandbox_ends_itself_after_the_term() {
    let room = Room::new();
    let mut spec = room.spec();
    spec.orphan_term = Duration::from_millis(1500);
    let live = room.start_with(&spec);
    // While somebody is there it lives on.
    std::thread::sleep(Duration::from_secs(3));
    live.ping();
    live.stream.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(live.sandbox.wait_gone().contains("code 0"));
}

#[test]
fn a_shutdown_ends_processes_politely() {
    let room = Room::new();
    let live = room.start();
    live.output(
        "(trap 'echo bye >~/bye; exit' TERM; while :; do sleep 0.01; done) >/dev/null 2>&1 & sleep 0.1",
    );
    live.send(&RunnerToSandbox::Shutdown { grace_ms: 5000 });
    live.sandbox.wait_gone();
    assert_eq!(fs::read_to_string(room.home_dir().join("bye")).unwrap(), "bye\n");
}

#[test]
fn a_start_that_fails_leaves_nothing_behind() {
    let room = Room::new();
    let mut spec = room.spec();
    spec.home_dir = room.root.path().join("missing");
    NativeBackend::new().start(&spec).unwrap_err();
    fs::write(room.root.path().join("file"), "").unwrap();
    spec.home_dir = room.root.path().join("file");
    NativeBackend::new().start(&spec).unwrap_err();
    assert!(NativeBackend::new().recorded(&room.run_dir()).unwrap().is_empty());
    assert!(fs::read_dir(room.run_dir()).unwrap().next().is_none());
    // The same id can be used again, since nothing of it ever ran.
    spec.home_dir = room.home_dir();
    assert_eq!(room.start_with(&spec).output("echo ok"), "ok\n");
}

#[test]
fn a_fork_bomb_ends_and_the_sandbox_stays_usable() {
    let room = Room::new();
    let mut spec = room.spec();
    spec.limits.pids = 100;
    let live = room.start_with(&spec);
    let result = live.call("bash", &json!({"command": "b() { b | b & }; b; sleep 1000", "timeout_ms": 1500}));
    assert!(result.is_error);
    live.call("bash", &json!({"restart": true}));
    assert_eq!(live.output("echo alive"), "alive\n");
}
