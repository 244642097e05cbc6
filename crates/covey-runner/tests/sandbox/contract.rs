//! What every backend promises to whoever drives it: the same tests for the native one and the fake.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use covey_runner::sandbox::fake::{FakeBackend, FakeReply};
use covey_runner::sandbox::native::NativeBackend;
use covey_runner::sandbox::{AdoptError, SandboxBackend};
use covey_types::FencingToken;
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, StepReport, ToolCall, ToolResult};
use serde_json::{Value, json};

use crate::room::{Live, Room, fresh_step, text};

/// The fake plays the few commands that these tests use.
fn fake() -> FakeBackend {
    FakeBackend::new(|spec, call| {
        let input: Value = serde_json::from_str(&call.input).unwrap();
        match input["command"].as_str().unwrap() {
            "echo x >>f" => {
                let old = fs::read_to_string(spec.home_dir.join("f")).unwrap_or_default();
                fs::write(spec.home_dir.join("f"), old + "x\n").unwrap();
                FakeReply::Result(ToolResult::text("(no output)", false))
            }
            "sleep 1000" => FakeReply::Hang,
            "cat f" => FakeReply::Result(ToolResult::text(
                fs::read_to_string(spec.home_dir.join("f")).unwrap(),
                false,
            )),
            other => panic!("not played: {other}"),
        }
    })
}

fn start(backend: &dyn SandboxBackend, room: &Room) -> Live {
    Live::connect(backend.start(&room.spec()).unwrap(), 1)
}

fn a_step_runs_once(backend: &dyn SandboxBackend) {
    let room = Room::new();
    let live = start(backend, &room);
    let step = fresh_step();
    let call = ToolCall { step, name: "bash".into(), input: json!({"command": "echo x >>f"}).to_string() };
    assert_eq!(live.query(step), StepReport::Unknown);
    live.send(&RunnerToSandbox::Call(call.clone()));
    assert_eq!(live.receive(), SandboxToRunner::Accepted { step });
    let result = live.finish(step);
    for report in [StepReport::Done { result }, StepReport::Acknowledged] {
        live.send(&RunnerToSandbox::Call(call.clone()));
        assert_eq!(live.receive(), SandboxToRunner::Report { step, report });
        live.send(&RunnerToSandbox::Acknowledge { step });
    }
    assert_eq!(live.output_of("cat f"), "x\n");
}

fn results_outlive_connections(backend: &dyn SandboxBackend) {
    let room = Room::new();
    let live = start(backend, &room);
    let kept = live.begin("bash", &json!({"command": "echo x >>f"}));
    let result = live.finish(kept);
    let running = live.begin("bash", &json!({"command": "sleep 1000"}));
    let second = Live::connect(Arc::clone(&live.sandbox), 1);
    assert_eq!(second.receive(), SandboxToRunner::Done { step: kept, result });
    assert_eq!(second.query(running), StepReport::Running);
    second.send(&RunnerToSandbox::Interrupt { step: running });
    let interrupted = second.finish(running);
    assert!(interrupted.is_error && text(&interrupted).contains("interrupted"));
    for step in [kept, running] {
        second.send(&RunnerToSandbox::Acknowledge { step });
    }
    second.ping();
    Live::connect(Arc::clone(&live.sandbox), 1).ping();
}

fn tokens_fence(backend: &dyn SandboxBackend) {
    let room = Room::new();
    let live = start(backend, &room);
    let newer = Live::connect(Arc::clone(&live.sandbox), 7);
    assert!(matches!(live.sandbox.connect(FencingToken(6)), Err(AdoptError::Unresponsive(_))));
    newer.ping();
    let mut rest = Vec::new();
    // The older link ends; how depends on who closed it.
    if let Ok(length) = std::io::Read::read_to_end(&mut &live.stream, &mut rest) {
        assert_eq!(length, 0);
    }
}

fn frozen_means_still(backend: &dyn SandboxBackend) {
    let room = Room::new();
    let live = start(backend, &room);
    live.output_of("echo x >>f");
    live.sandbox.freeze().unwrap();
    live.sandbox.freeze().unwrap();
    assert!(live.sandbox.is_alive());
    live.sandbox.thaw().unwrap();
    live.sandbox.thaw().unwrap();
    assert_eq!(live.output_of("cat f"), "x\n");
}

fn the_dead_are_recorded_until_destroyed(backend: &dyn SandboxBackend) {
    let room = Room::new();
    let live = start(backend, &room);
    assert!(backend.recorded(&room.root.path().join("elsewhere")).unwrap().is_empty());
    live.send(&RunnerToSandbox::Shutdown { grace_ms: 100 });
    live.sandbox.wait_gone();
    assert!(!live.sandbox.is_alive());
    let [(home, found)] = &backend.recorded(&room.run_dir()).unwrap()[..] else { panic!("one record") };
    assert_eq!((*home, found.id(), found.is_alive()), (room.home, live.sandbox.id(), false));
    assert!(matches!(found.connect(FencingToken(9)), Err(AdoptError::Gone)));
    assert!(found.freeze().is_err() && found.thaw().is_err());
    found.wait_gone();
    found.destroy().unwrap();
    found.destroy().unwrap();
    assert!(backend.recorded(&room.run_dir()).unwrap().is_empty());
}

fn a_missing_home_is_refused(backend: &dyn SandboxBackend) {
    let room = Room::new();
    let mut spec = room.spec();
    spec.home_dir = room.root.path().join("missing");
    spec.orphan_term = Duration::from_secs(1);
    backend.start(&spec).unwrap_err();
    assert!(backend.recorded(&room.run_dir()).unwrap().is_empty());
}

macro_rules! both {
    ($($name:ident)*) => {
        mod native {
            $(#[test] fn $name() { super::$name(&super::NativeBackend::new()); })*
        }
        mod fake {
            $(#[test] fn $name() { super::$name(&super::fake()); })*
        }
    };
}

both! {
    a_step_runs_once
    results_outlive_connections
    tokens_fence
    frozen_means_still
    the_dead_are_recorded_until_destroyed
    a_missing_home_is_refused
}
