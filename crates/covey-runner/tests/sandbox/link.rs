//! The tool link: once per step, one runner at a time, nothing lost with a connection.

use std::io::Write;
use std::os::unix::net::UnixStream;

use covey_runner::sandbox::AdoptError;
use covey_types::FencingToken;
use covey_wire::frame;
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, StepReport, ToolCall};
use serde_json::json;

use crate::room::{Live, Room, fresh_step, text};

#[test]
fn a_step_id_is_never_run_twice() {
    let room = Room::new();
    let live = room.start();
    let step = fresh_step();
    let call = ToolCall { step, name: "bash".into(), input: json!({"command": "echo x >>f"}).to_string() };
    assert_eq!(live.query(step), StepReport::Unknown);
    live.send(&RunnerToSandbox::Call(call.clone()));
    assert_eq!(live.receive(), SandboxToRunner::Accepted { step });
    let result = live.finish(step);
    live.send(&RunnerToSandbox::Call(call.clone()));
    assert_eq!(live.receive(), SandboxToRunner::Report { step, report: StepReport::Done { result } });
    live.send(&RunnerToSandbox::Acknowledge { step });
    live.send(&RunnerToSandbox::Call(call));
    assert_eq!(live.receive(), SandboxToRunner::Report { step, report: StepReport::Acknowledged });
    assert_eq!(live.output("cat f"), "x\n");
}

#[test]
fn a_result_is_repeated_on_each_new_connection_until_it_is_acknowledged() {
    let room = Room::new();
    let live = room.start();
    let kept = live.begin("bash", &json!({"command": "echo kept"}));
    let result = live.finish(kept);
    let running = live.begin("bash", &json!({"command": "until [ -e go ]; do sleep 0.01; done; echo ran"}));
    let second = Live::connect(std::sync::Arc::clone(&live.sandbox), 2);
    assert_eq!(second.receive(), SandboxToRunner::Done { step: kept, result });
    second.send(&RunnerToSandbox::Acknowledge { step: kept });
    assert_eq!(second.query(running), StepReport::Running);
    second.call("write", &json!({"file_path": "go", "content": ""}));
    assert_eq!(text(&second.finish(running)), "ran\n");
    second.send(&RunnerToSandbox::Acknowledge { step: running });
    second.ping();
    let third = Live::connect(std::sync::Arc::clone(&live.sandbox), 2);
    // The write's result was never acknowledged; the acknowledged ones are not repeated.
    assert!(matches!(third.receive(), SandboxToRunner::Done { .. }));
    third.ping();
}

#[test]
fn a_newer_runner_closes_the_older_and_a_smaller_token_is_refused() {
    let room = Room::new();
    let live = room.start();
    let newer = Live::connect(std::sync::Arc::clone(&live.sandbox), 5);
    assert!(matches!(frame::read::<SandboxToRunner>(&mut &live.stream), Ok(None) | Err(_)));
    let refused = live.sandbox.connect(FencingToken(4));
    assert!(matches!(&refused, Err(AdoptError::Unresponsive(why)) if why.contains("older")), "{refused:?}");
    newer.ping();
}

#[test]
fn nonsense_from_a_peer_ends_its_connection_and_nothing_else() {
    let room = Room::new();
    let live = room.start();
    let socket = room.run_dir().join(live.sandbox.id().to_string()).join("ctl.sock");
    for bytes in [&b"\xff\xff\xff\xff"[..], b"\x03\0\0\0abc", b"\0\0\0\0", b"\x01"] {
        let mut peer = UnixStream::connect(&socket).unwrap();
        peer.write_all(bytes).unwrap();
        drop(peer);
    }
    live.ping();
    assert_eq!(live.output("echo still here"), "still here\n");
}

#[test]
fn tools_other_than_bash_run_while_bash_runs() {
    let room = Room::new();
    let live = room.start();
    let running = live.begin("bash", &json!({"command": "until [ -e go ]; do sleep 0.01; done"}));
    for n in 0..5 {
        let file = format!("f{n}");
        assert!(!live.call("write", &json!({"file_path": file, "content": "x"})).is_error);
        assert!(!live.call("read", &json!({"file_path": file})).is_error);
    }
    live.call("write", &json!({"file_path": "go", "content": ""}));
    assert_eq!(live.finish(running).exit_code, Some(0));
}

#[test]
fn live_output_is_shown_while_a_call_runs() {
    let room = Room::new();
    let live = room.start();
    let step = live.begin("bash", &json!({"command": "echo early; until [ -e go ]; do sleep 0.01; done"}));
    let message: SandboxToRunner = frame::read(&mut &live.stream).unwrap().unwrap();
    assert_eq!(message, SandboxToRunner::Output { step, text: "early\n".into() });
    live.call("write", &json!({"file_path": "go", "content": ""}));
    assert_eq!(live.finish(step).exit_code, Some(0));
}
