//! A process that secures and publishes in a loop is killed at random points; what it said it published is
//! there, whole.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use covey_home::{Excludes, NoProgress, PackStore, Pointers, SecureRequest, secure_and_publish, verify};
use covey_types::{FencingToken, Generation};

use crate::support::{self, noise};

const DIR_VARIABLE: &str = "COVEY_HOME_KILL_TEST_DIR";
const ROUNDS: u64 = 40;

/// The process that is killed; the parent test starts it with its directory.
#[test]
#[ignore = "the body of the process that the kill test starts"]
fn child() {
    let dir = PathBuf::from(std::env::var_os(DIR_VARIABLE).expect("started by the kill test"));
    let store = PackStore::open_directory(&dir.join("store"), "org").unwrap();
    let pointers = Pointers::open(&dir.join("store"), "org").unwrap();
    let home = dir.join("home");
    let mut seed = u64::from(std::process::id()) << 32;
    loop {
        for number in 0..20 {
            seed += 1;
            fs::write(home.join(format!("file-{number}")), noise(seed, 20_000)).unwrap();
        }
        let report = secure_and_publish(
            &SecureRequest {
                dir: &home,
                store: &store,
                stat_cache: Some(&dir.join("cache")),
                excludes: &Excludes::none(),
                previous: None,
                cancel: &AtomicBool::new(false),
                progress: &NoProgress,
                threads: 2,
            },
            &pointers,
            "home",
            FencingToken(1),
        )
        .unwrap();
        println!("published {}", report.generation.unwrap());
    }
}

fn run_and_kill(dir: &Path, delay: Duration) -> Option<Generation> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::child", "--ignored", "--nocapture"])
        .env(DIR_VARIABLE, dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let published =
        |line: &str| -> Option<Generation> { line.split_once("published ")?.1.parse().ok().map(Generation) };
    let mut last = lines.find_map(|line| published(&line));
    // Not a synchronisation: the random moment of the kill.
    std::thread::sleep(delay);
    child.kill().unwrap();
    child.wait().unwrap();
    for line in lines {
        last = published(&line).or(last);
    }
    last
}

#[test]
fn killed_at_any_point_the_store_has_every_published_snapshot_whole() {
    let scratch = support::scratch();
    fs::create_dir(scratch.path().join("home")).unwrap();
    let pointers = Pointers::open(&scratch.path().join("store"), "org").unwrap();
    for round in 0..ROUNDS {
        let delay = Duration::from_micros(u64::from(noise(round, 1)[0]) * 150);
        let said = run_and_kill(scratch.path(), delay);
        let store = PackStore::open_directory(&scratch.path().join("store"), "org").unwrap();
        assert_eq!(store.problems(), Vec::<String>::new());
        let current = pointers.current("home").unwrap().unwrap();
        assert!(
            said.is_none_or(|said| said <= current.generation),
            "{said:?} was published, {current:?} is there"
        );
        let report = verify(&store, &current.root).unwrap();
        assert_eq!(report.problems, Vec::<String>::new(), "round {round}");
        assert_eq!(fs::read_dir(scratch.path().join("store/orgs/org/tmp")).unwrap().count(), 0);
    }
    let store = PackStore::open_directory(&scratch.path().join("store"), "org").unwrap();
    assert_eq!(store.verify_packs().unwrap().problems, Vec::<String>::new());
    for snapshot in pointers.snapshots("home").unwrap() {
        assert_eq!(verify(&store, &snapshot.root).unwrap().problems, Vec::<String>::new());
    }
}
