//! What agents run, in a mounted home.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::ground::Ground;

fn run(dir: &Path, program: &str, args: &[&str]) -> String {
    let output = Command::new(program)
        .current_dir(dir)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("{program} is needed: {error}"));
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn git(dir: &Path, args: &[&str]) -> String {
    // As the sandbox's system configuration sets it: inode numbers and ctimes are not kept.
    let settings = ["core.checkStat=minimal", "core.trustctime=false", "safe.directory=*", "user.name=t"];
    let mut all: Vec<&str> = settings.iter().flat_map(|setting| ["-c", setting]).collect();
    all.extend(["-c", "user.email=t@example.invalid"]);
    all.extend(args);
    run(dir, "git", &all)
}

#[test]
fn git_status_in_a_mounted_checkout_is_clean() {
    let ground = Ground::new();
    let home_dir = ground.home();
    fs::create_dir(home_dir.join("src")).unwrap();
    git(&home_dir, &["init", "-q"]);
    let long_ago = SystemTime::UNIX_EPOCH + Duration::new(1_600_000_000, 123_456_789);
    for number in 0..50 {
        let path = home_dir.join(format!("src/{number}"));
        fs::write(&path, format!("content {number}")).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(long_ago).unwrap();
    }
    git(&home_dir, &["add", "."]);
    git(&home_dir, &["commit", "-q", "-m", "all"]);
    let (home, _) = ground.mount_home();
    let at = ground.mounted();
    assert_eq!(git(&at, &["status", "--porcelain"]), "");
    fs::write(at.join("src/7"), b"changed").unwrap();
    assert_eq!(git(&at, &["status", "--porcelain"]).trim(), "M src/7");
    git(&at, &["commit", "-q", "-a", "-m", "more"]);
    git(&at, &["gc", "-q"]);
    assert_eq!(git(&at, &["fsck"]), "");
    assert_eq!(git(&at, &["status", "--porcelain"]), "");
    ground.secure_both_ways(&home);
}

/// Pages of a database are rewritten in place, with a write-ahead log that is mapped into memory.
const DATABASE: &str = "
import sqlite3, sys
db = sqlite3.connect('session.db')
assert db.execute('pragma journal_mode=wal').fetchone() == ('wal',)
db.execute('create table if not exists notes (n integer primary key, text)')
for n in range(200):
    db.execute('insert or replace into notes values (?, ?)', (n, sys.argv[1] * 300))
    db.commit()
assert db.execute('pragma integrity_check').fetchone() == ('ok',)
if sys.argv[2] == 'close':
    db.close()
else:
    import os
    os._exit(0)
";

#[test]
fn a_database_lives_in_a_mounted_home() {
    let ground = Ground::new();
    run(&ground.home(), "python3", &["-c", DATABASE, "first", "close"]);
    let (home, _) = ground.mount_home();
    let at = ground.mounted();
    run(&at, "python3", &["-c", DATABASE, "second", "close"]);
    ground.secure_both_ways(&home);
    // With its log and shared memory left behind, as a killed sandbox leaves them.
    run(&at, "python3", &["-c", DATABASE, "third", "exit"]);
    assert!(at.join("session.db-wal").exists());
    let root = ground.secure_both_ways(&home).root;
    ground.umount();
    ground.mount(root).unwrap();
    let check = "import sqlite3; print(sqlite3.connect('session.db').execute(\
                 'select count(*), min(text) = max(text), substr(max(text), 1, 5) from notes').fetchone())";
    assert_eq!(run(&at, "python3", &["-c", check]).trim(), "(200, 1, 'third')");
}

/// Opens the file, maps it, writes through the map and leaves it mapped at exit.
const MAPPED: &str = "
import mmap
f = open('mapped', 'r+b')
m = mmap.mmap(f.fileno(), 0)
m[5000:5006] = b'mapped'
assert open('mapped', 'rb').read()[5000:5006] == b'mapped'
";

#[test]
fn a_write_through_a_memory_map_is_seen_and_secured() {
    let ground = Ground::new();
    fs::write(ground.home().join("mapped"), vec![b'.'; 10_000]).unwrap();
    let (home, base) = ground.mount_home();
    let at = ground.mounted();
    run(&at, "python3", &["-c", MAPPED]);
    let root = ground.secure_both_ways(&home).root;
    assert_ne!(root, base);
    assert_eq!(&fs::read(at.join("mapped")).unwrap()[4999..5007], b".mapped.");
}
