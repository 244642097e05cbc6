//! `read write edit glob grep`: careful with what is there.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use covey_wire::tool::ToolContent;
use serde_json::json;

use crate::room::{Room, text};

#[test]
fn a_file_is_written_read_with_line_numbers_and_edited() {
    let room = Room::new();
    let live = room.start();
    let wrote = live.call("write", &json!({"file_path": "a/b/c.txt", "content": "one\ntwo\nthree\n"}));
    assert!(!wrote.is_error, "{wrote:?}");
    let read = live.call("read", &json!({"file_path": "/home/agent/a/b/c.txt"}));
    assert_eq!(text(&read), "     1\tone\n     2\ttwo\n     3\tthree\n");
    let part = live.call("read", &json!({"file_path": "a/b/c.txt", "view_range": [2, -1]}));
    assert_eq!(text(&part), "     2\ttwo\n     3\tthree\n");
    let edited =
        live.call("edit", &json!({"file_path": "a/b/c.txt", "old_string": "two", "new_string": "2"}));
    assert!(!edited.is_error, "{edited:?}");
    assert_eq!(live.output("cat a/b/c.txt"), "one\n2\nthree\n");
}

#[test]
fn relative_paths_start_at_the_shells_directory() {
    let room = Room::new();
    let live = room.start();
    live.output("mkdir d && cd d && echo x >f");
    assert_eq!(text(&live.call("read", &json!({"file_path": "f"}))), "     1\tx\n");
    assert_eq!(text(&live.call("read", &json!({"file_path": "~/d/f"}))), "     1\tx\n");
}

#[test]
fn a_file_that_was_not_read_or_has_changed_since_is_not_touched() {
    let room = Room::new();
    let live = room.start();
    live.output("echo one >f");
    let edit =
        |old: &str| live.call("edit", &json!({"file_path": "f", "old_string": old, "new_string": "x"}));
    let refused = edit("one");
    assert!(refused.is_error && text(&refused).contains("read it first"), "{refused:?}");
    let refused = live.call("write", &json!({"file_path": "f", "content": "x"}));
    assert!(refused.is_error && text(&refused).contains("read it first"), "{refused:?}");
    live.call("read", &json!({"file_path": "f"}));
    live.output("echo two >>f");
    let refused = edit("one");
    assert!(refused.is_error && text(&refused).contains("read it again"), "{refused:?}");
    let refused = live.call("write", &json!({"file_path": "f", "content": "x"}));
    assert!(refused.is_error && text(&refused).contains("read it again"), "{refused:?}");
    assert_eq!(live.output("cat f"), "one\ntwo\n");
    live.call("read", &json!({"file_path": "f"}));
    assert!(!edit("one").is_error);
    // A second edit in a row needs no reading: the agent knows what it wrote.
    assert!(!edit("two").is_error);
    assert_eq!(live.output("cat f"), "x\nx\n");
}

#[test]
fn mode_byte_order_mark_line_ends_links_and_hard_links_are_kept() {
    let room = Room::new();
    let live = room.start();
    live.output(r"printf '\357\273\277a\r\nb\r\n' >real; chmod 751 real; ln real hard; ln -s real soft");
    live.call("read", &json!({"file_path": "soft"}));
    let edited = live.call("edit", &json!({"file_path": "soft", "old_string": "a\nb", "new_string": "x\ny"}));
    assert!(!edited.is_error, "{edited:?}");
    assert_eq!(
        live.output("od -An -tx1 hard; stat -c %a real; stat -c %h real; readlink soft"),
        " ef bb bf 78 0d 0a 79 0d 0a\n751\n2\nreal\n"
    );
    live.output("chmod 640 real; rm hard");
    assert!(!live.call("edit", &json!({"file_path": "real", "old_string": "x", "new_string": "z"})).is_error);
    assert_eq!(fs::metadata(room.home_dir().join("real")).unwrap().permissions().mode() & 0o7777, 0o640);
}

#[test]
fn what_is_no_regular_file_is_refused_and_never_hangs() {
    let room = Room::new();
    let live = room.start();
    live.output(
        "mkfifo fifo; ln -s loop loop; ln -s fifo to-fifo; mkdir dir; printf 'a\\0b' >bin; echo t >txt",
    );
    for path in ["fifo", "to-fifo", "loop", "dir", "bin", "/dev/zero", "missing", ""] {
        let read = live.call("read", &json!({"file_path": path}));
        assert!(read.is_error, "{path}: {read:?}");
        let edit = live.call("edit", &json!({"file_path": path, "old_string": "a", "new_string": "b"}));
        assert!(edit.is_error, "{path}: {edit:?}");
    }
    for path in ["fifo", "loop", "dir", "/etc/passwd", "/usr/x", "/proc/sys/kernel/hostname"] {
        assert!(live.call("write", &json!({"file_path": path, "content": "x"})).is_error, "{path}");
    }
    assert_eq!(text(&live.call("grep", &json!({"pattern": "t"}))), "/home/agent/txt:1:t\n");
}

#[test]
fn pictures_are_pictures_and_large_files_need_a_range() {
    let room = Room::new();
    let live = room.start();
    live.output(r"printf '\211PNG\r\n\032\n-pixels' >p.png; seq 1 100000 >big");
    let read = live.call("read", &json!({"file_path": "p.png"}));
    assert!(
        matches!(&read.content[..], [ToolContent::Image { media_type, data }] if media_type == "image/png" && data.ends_with(b"-pixels"))
    );
    let refused = live.call("read", &json!({"file_path": "big"}));
    assert!(refused.is_error && text(&refused).contains("view_range"), "{refused:?}");
    let part = live.call("read", &json!({"file_path": "big", "view_range": [99_999, 100_000]}));
    assert_eq!(text(&part), " 99999\t99999\n100000\t100000\n");
    for range in [json!([0, 1]), json!([3, 2]), json!([1, -2])] {
        assert!(live.call("read", &json!({"file_path": "big", "view_range": range})).is_error);
    }
}

#[test]
fn glob_returns_the_newest_first_and_at_most_two_hundred() {
    let room = Room::new();
    let live = room.start();
    live.output("mkdir -p s/t .git; touch -d '2020-01-01' s/old.rs; touch -d '2021-01-01' s/t/new.rs; touch .git/x.rs s/no.txt");
    let found = live.call("glob", &json!({"pattern": "**/*.rs"}));
    assert_eq!(text(&found), "/home/agent/s/t/new.rs\n/home/agent/s/old.rs\n");
    assert_eq!(text(&live.call("glob", &json!({"pattern": "*.rs", "path": "s"}))), "/home/agent/s/old.rs\n");
    assert_eq!(
        text(&live.call("glob", &json!({"pattern": "/home/agent/s/*.txt"}))),
        "/home/agent/s/no.txt\n"
    );
    live.output("mkdir many; touch many/{1..250}");
    let many = text(&live.call("glob", &json!({"pattern": "many/*"})));
    assert_eq!(many.lines().count(), 201);
    assert!(many.contains("200 of 250"));
    assert!(live.call("glob", &json!({"pattern": "[", "path": "s"})).is_error);
}

#[test]
fn grep_finds_lines_skips_binaries_and_git_and_stays_bounded() {
    let room = Room::new();
    let live = room.start();
    live.output(
        "mkdir -p d/.git; echo 'let x = 1;' >d/a.rs; echo 'let y' >d/.git/b; printf 'let\\0' >d/bin; \
                 ln -s .. d/up; mkfifo d/fifo",
    );
    assert_eq!(
        text(&live.call("grep", &json!({"pattern": r"let \w", "path": "d"}))),
        "/home/agent/d/a.rs:1:let x = 1;\n"
    );
    assert_eq!(
        text(&live.call("grep", &json!({"pattern": "x", "path": "d/a.rs"}))),
        "/home/agent/d/a.rs:1:let x = 1;\n"
    );
    live.output("mkdir e; for i in $(seq 200); do printf 'needle %03000d\\n' 1 >>e/long; done");
    let many = text(&live.call("grep", &json!({"pattern": "needle", "path": "e"})));
    assert!(many.len() < 102 * 1024 && many.contains("there is more"), "{}", many.len());
    assert!(many.lines().all(|line| line.len() < 2100));
    assert!(live.call("grep", &json!({"pattern": "("})).is_error);
}
