//! `bash`: one persistent shell that always comes back.

use std::fs;
use std::time::Instant;

use covey_types::size::TOOL_RESULT_BYTES_MAX;
use covey_wire::tool::RunnerToSandbox;
use serde_json::json;

use crate::room::{Room, text};

#[test]
fn directory_variables_functions_and_exit_status_survive_from_call_to_call() {
    let room = Room::new();
    let live = room.start();
    assert_eq!(live.output("pwd; id -u; id -un; hostname"), "/home/agent\n1000\nagent\ncovey\n");
    live.output("mkdir -p a/b && cd a/b && export X=1 && y=2 && f() { echo f-$1; } && declare -A m=([k]=v)");
    assert_eq!(live.output("pwd; echo $X $y ${m[k]}; f z"), "/home/agent/a/b\n1 2 v\nf-z\n");
    assert_eq!(text(&live.bash("(exit 7)")), "[exit code 7]\n");
    assert_eq!(live.output("echo $?"), "7\n");
}

#[test]
fn broken_commands_do_not_break_the_shell() {
    let room = Room::new();
    let live = room.start();
    live.output("keep=kept");
    for broken in
        ["if true", "echo 'abc", "cat <<EOF\nno end", "echo \"", "break", "continue", ")", "case x in"]
    {
        live.bash(broken);
        assert_eq!(live.output("echo $keep"), "kept\n", "after {broken:?}");
    }
    assert_eq!(live.output("echo 'it'\\''s'; cat <<'X'\n$a `b` \\\nX"), "it's\n$a `b` \\\n");
}

#[test]
fn standard_input_is_empty_and_there_is_no_terminal() {
    let room = Room::new();
    let live = room.start();
    assert_eq!(live.output("cat; read x; echo done"), "done\n");
    live.failure("test -t 0");
    live.failure("echo x >/dev/tty");
}

#[test]
fn the_end_of_the_shell_is_reported_and_the_next_call_has_a_new_one_with_the_old_environment() {
    let room = Room::new();
    let live = room.start();
    live.output("cd /tmp; export KEPT=yes; lost=yes");
    let result = live.bash("echo before; exit 3");
    assert_eq!((result.exit_code, result.is_error), (Some(3), true));
    let told = text(&result);
    assert!(
        told.starts_with("before\n") && told.contains("ended the shell") && told.contains("replaced"),
        "{told}"
    );
    assert_eq!(live.output("pwd; echo $KEPT-$lost"), "/tmp\nyes-\n");
    let result = live.bash("kill -9 $$");
    assert_eq!(result.exit_code, Some(137));
    assert_eq!(live.output("pwd; echo $KEPT"), "/tmp\nyes\n");
}

#[test]
fn restart_forgets_everything() {
    let room = Room::new();
    let live = room.start();
    live.output("cd /tmp; export X=1; sleep 1000 &");
    assert!(!live.call("bash", &json!({"restart": true})).is_error);
    assert_eq!(live.output("pwd; echo -$X-; pgrep sleep || echo none"), "/home/agent\n--\nnone\n");
}

#[test]
fn a_background_process_that_holds_the_output_does_not_hold_the_call() {
    let room = Room::new();
    let live = room.start();
    let started = Instant::now();
    let result = live.bash("(while sleep 0.05; do echo tick; done) & echo started");
    assert!(started.elapsed().as_secs() < 10);
    assert!(result.left_running);
    assert!(text(&result).contains("started\n"));
    let path = result.output_path.expect("a path");
    // What it prints later goes to the call's file.
    live.output(&format!("until [ $(grep -c tick {path}) -ge 3 ]; do sleep 0.02; done"));
    // And it lives through the next call's end.
    live.output("kill %1 2>/dev/null || pkill -f tick || true");
}

#[test]
fn a_call_that_leaves_nothing_says_so() {
    let room = Room::new();
    let live = room.start();
    let result = live.bash("true");
    assert!(!result.left_running && !result.keep_running && result.output_path.is_none());
    assert_eq!(text(&result), "(no output)");
    assert!(live.call("bash", &json!({"command": "true", "keep_running": true})).keep_running);
}

#[test]
fn a_timeout_kills_every_process_of_the_call_and_none_of_earlier_calls() {
    let room = Room::new();
    let live = room.start();
    live.output("sleep 4242 >/dev/null 2>&1 & echo $! >/tmp/earlier");
    live.output("cd /tmp; export KEPT=1");
    let command = "setsid sleep 1111 & (trap '' TERM; exec sleep 2222) & ( ( exec sleep 3333 ) & ) ; env -i setsid sleep 5555 & \
                   (while :; do :; done) & sleep 6666; touch /tmp/went-on";
    let result = live.call("bash", &json!({"command": command, "timeout_ms": 700}));
    assert!(result.is_error);
    let told = text(&result);
    assert!(told.contains("timed out after 700 ms"), "{told}");
    assert!(!result.left_running, "{told}");
    let left = live.output("for n in 1111 2222 3333 5555 6666; do pgrep -f \"^sleep $n\"; done; true");
    assert_eq!(left, "(no output)");
    live.failure("test -e /tmp/went-on");
    live.output("kill -0 $(cat /tmp/earlier)");
    assert_eq!(live.output("pwd; echo $KEPT"), "/tmp\n1\n");
}

#[test]
fn an_interrupt_ends_the_running_call_and_one_that_waits_never_starts() {
    let room = Room::new();
    let live = room.start();
    let running = live.begin("bash", &json!({"command": "touch /tmp/began; sleep 1000"}));
    let waiting = live.begin("bash", &json!({"command": "touch /tmp/never"}));
    // Another tool runs in parallel and tells when the first one is under way.
    while text(&live.call("glob", &json!({"pattern": "/tmp/*"}))).lines().all(|l| l != "/tmp/began") {}
    live.send(&RunnerToSandbox::Interrupt { step: waiting });
    live.send(&RunnerToSandbox::Interrupt { step: running });
    let first = live.finish(running);
    assert!(first.is_error && text(&first).contains("interrupted"), "{first:?}");
    let second = live.finish(waiting);
    assert!(text(&second).contains("before it started"), "{second:?}");
    live.failure("test -e /tmp/never");
}

#[test]
fn a_flood_of_output_is_cut_for_the_model_and_whole_in_the_file() {
    let room = Room::new();
    let live = room.start();
    let result = live.bash("seq 1 200000");
    let shown = text(&result);
    assert!(shown.len() < TOOL_RESULT_BYTES_MAX + 300);
    assert!(shown.starts_with("1\n2\n") && shown.ends_with("199999\n200000\n"));
    assert_eq!(result.output_bytes, 1_288_895);
    let path = result.output_path.expect("a path");
    assert!(shown.contains(&path));
    let kept = fs::read_to_string(room.outputs_dir().join(path.trim_start_matches("/outputs/"))).unwrap();
    assert_eq!(kept.len(), 1_288_895);
    assert_eq!(live.output(&format!("sed -n 100000p {path}")), "100000\n");
}

#[test]
fn terminal_escapes_and_bytes_that_are_no_text_are_cleaned_for_the_model_and_raw_in_the_file() {
    let room = Room::new();
    let live = room.start();
    let result = live.bash(r"printf '\033[31mred\033[0m\n10%%\r100%%\n\0\377x\n'");
    assert_eq!(text(&result), "red\n100%\n\u{fffd}\u{fffd}x\n");
    let path = result.output_path.expect("a path");
    assert_eq!(
        live.output(&format!("od -An -c {path} | head -1 | tr -s ' '")).trim(),
        r"033 [ 3 1 m r e d 033 [ 0 m \n 1 0 %"
    );
}

#[test]
fn an_agent_that_destroys_its_own_shells_meeting_place_loses_one_call_only() {
    let room = Room::new();
    let live = room.start();
    for command in [
        "rm -rf /run/covey",
        "rm /run/covey/status; mkdir /run/covey/status",
        "chmod 0 /run/covey",
        "kill -9 -1",
    ] {
        let spoiled = live.call("bash", &json!({"command": command, "timeout_ms": 400}));
        assert!(spoiled.is_error, "{command}");
        assert_eq!(live.output("echo on"), "on\n", "after {command}");
    }
}

#[test]
fn many_processes_left_behind_end_with_a_restart() {
    let room = Room::new();
    let live = room.start();
    live.bash("for i in $(seq 300); do (setsid sleep 9999 >/dev/null 2>&1 &); done");
    live.call("bash", &json!({"restart": true}));
    assert_eq!(live.output("until ! pgrep sleep >/dev/null; do :; done; echo none"), "none\n");
}

#[test]
fn wrong_input_is_answered_and_not_run() {
    let room = Room::new();
    let live = room.start();
    for input in [
        json!({}),
        json!({"command": 1}),
        json!({"command": "a\u{0}b"}),
        json!({"command": "x".repeat(300_000)}),
    ] {
        assert!(live.call("bash", &input).is_error);
    }
    assert!(live.call("bsh", &json!({})).is_error);
    assert_eq!(live.output("echo ok"), "ok\n");
}

#[test]
fn a_program_may_make_a_terminal_of_its_own() {
    let room = Room::new();
    let live = room.start();
    if live.bash("python3 --version").exit_code == Some(0) {
        let command =
            "python3 -c 'import os, pty; m, s = pty.openpty(); print(os.ttyname(s)); print(os.isatty(s))'";
        assert_eq!(live.output(command), "/dev/pts/0\nTrue\n");
    }
}
