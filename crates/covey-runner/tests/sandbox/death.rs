//! Freezing, dying, adopting, destroying.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use covey_runner::sandbox::native::NativeBackend;
use covey_runner::sandbox::{AdoptError, SandboxBackend};
use covey_types::{ByteCount, FencingToken, StepId};
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

/// In this variable a test hands a directory to a second process of the same program, which then plays a runner.
const PLAY_RUNNER: &str = "COVEY_TEST_PLAY_RUNNER";

/// Not a test of its own: the process that the tests below kill.
#[test]
fn plays_a_runner_when_asked() {
    let Some(root) = std::env::var_os(PLAY_RUNNER) else { return };
    let room = Room::at(PathBuf::from(root));
    let live = room.start();
    let kept = live.begin("bash", &json!({"command": "echo kept"}));
    live.finish(kept);
    let running = live.begin("bash", &json!({"command": "until [ -e go ]; do sleep 0.01; done; echo ran"}));
    println!("RUNNING {kept} {running}");
    loop {
        std::thread::park();
    }
}

fn play_runner(root: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "death::plays_a_runner_when_asked", "--nocapture"])
        .env(PLAY_RUNNER, root)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn a_killed_runner_leaves_a_sandbox_whose_calls_and_results_the_next_one_takes_over() {
    let room = Room::new();
    let mut runner = play_runner(room.root.path());
    let mut lines = BufReader::new(runner.stdout.take().unwrap()).lines();
    let line =
        lines.find_map(|line| line.unwrap().split_once("RUNNING ").map(|(_, rest)| rest.to_owned())).unwrap();
    let (kept, running) = line.split_once(' ').unwrap();
    let (kept, running): (StepId, StepId) = (kept.parse().unwrap(), running.parse().unwrap());
    runner.kill().unwrap();
    runner.wait().unwrap();
    let [(_, found)] = &NativeBackend::new().recorded(&room.run_dir()).unwrap()[..] else {
        panic!("one record")
    };
    let adopted = Live::connect(Arc::clone(found), 2);
    match adopted.receive() {
        SandboxToRunner::Done { step, result } => {
            assert_eq!((step, text(&result).as_str()), (kept, "kept\n"))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(adopted.query(running), StepReport::Running);
    fs::write(room.home_dir().join("go"), "").unwrap();
    assert_eq!(text(&adopted.finish(running)), "ran\n");
}

#[test]
fn a_runner_killed_at_any_point_leaves_nothing_that_is_not_found_and_destroyed() {
    for n in 0..40_u64 {
        let room = Room::new();
        let mut runner = play_runner(room.root.path());
        // Spread over the whole start, which takes a few milliseconds after the program's own.
        std::thread::sleep(Duration::from_micros(n * 700));
        runner.kill().unwrap();
        runner.wait().unwrap();
        let mut cgroups = Vec::new();
        for (_, found) in NativeBackend::new().recorded(&room.run_dir()).unwrap() {
            cgroups.push(found.id().to_string());
            found.destroy().unwrap();
            assert!(!found.is_alive());
        }
        if let Ok(mut left) = fs::read_dir(room.run_dir()) {
            assert!(left.next().is_none(), "round {n}");
        }
        for id in cgroups {
            assert_eq!(cgroups_named(Path::new("/sys/fs/cgroup"), &id), Vec::<PathBuf>::new(), "round {n}");
        }
        wait_until_nobody_uses(room.root.path());
    }
}

fn cgroups_named(dir: &Path, name: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let dirs = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.flat_map(|entry| {
        let below = cgroups_named(&entry.path(), name);
        if entry.file_name() == name { vec![entry.path()] } else { below }
    })
    .collect()
}

/// A process of a sandbox has the home in its mounts. One that was never let go ends by itself, so this may take a
/// moment; a process that stays makes the test run into its time limit here.
fn wait_until_nobody_uses(root: &Path) {
    let needle = root.join("home").display().to_string();
    let is_used = || {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        processes.map(|entry| entry.path().join("mountinfo")).any(|path| {
            // Processes of others, and those that end while we look, cannot be read.
            fs::read_to_string(path).is_ok_and(|text| text.contains(&needle))
        })
    };
    for _ in 0..500 {
        if !is_used() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("a process still uses {needle}");
}

#[test]
fn memory_beyond_the_limit_ends_the_command_and_not_the_sandbox() {
    let room = Room::new();
    let mut spec = room.spec();
    spec.limits.memory = ByteCount(256 << 20);
    let live = room.start_with(&spec);
    // The shell doubles a string until it may not.
    let result = live.bash("bash -c 'x=x; while :; do x=$x$x; done'");
    assert!(result.is_error && result.exit_code != Some(0), "{result:?}");
    assert_eq!(live.output("echo alive"), "alive\n");
}
