//! A restored checkout is clean, and git reads no content to find that out.
//!
//! Git compares inode numbers and ctimes with its index, and a restore gives every file new ones. With
//! `core.checkStat=minimal` and `core.trustctime=false`, which the sandbox's system configuration sets, it
//! compares what a restore keeps: size and mtime.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use covey_home::MemoryStore;

use crate::support::{self, materialize_dir, secure_dir};

fn git(dir: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .current_dir(dir)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .args(["-c", "user.name=t", "-c", "user.email=t@example.invalid"])
        .args(["-c", "core.checkStat=minimal", "-c", "core.trustctime=false", "-c", "safe.directory=*"])
        .args(args)
        .output()
        .ok()?;
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn git_status_in_a_restored_checkout_is_clean_and_reads_nothing() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("src")).unwrap();
    if git(&home, &["init", "-q"]).is_none() {
        return;
    }
    // Older than the index, or git would have to read them whatever is compared.
    let long_ago = SystemTime::UNIX_EPOCH + Duration::new(1_600_000_000, 123_456_789);
    for number in 0..50 {
        let path = home.join(format!("src/{number}"));
        fs::write(&path, format!("content {number}")).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(long_ago).unwrap();
    }
    git(&home, &["add", "."]);
    git(&home, &["commit", "-q", "-m", "all"]);
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let restored = scratch.path().join("restored");
    materialize_dir(root, &restored, &store, None).unwrap();
    // Other bytes of the same length under the restored mtime: whoever read them would see a change.
    for number in 10..20 {
        let path = restored.join(format!("src/{number}"));
        fs::write(&path, format!("CONTENT {number}")).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(long_ago).unwrap();
    }
    assert_eq!(git(&restored, &["status", "--porcelain"]).unwrap(), "");
}
