//! A process that mounts, changes, secures and unmounts in a loop is killed at random points; the next one takes
//! up what is there, and nothing stays mounted.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use covey_home::{Excludes, NoProgress, PackStore, SecureRequest};
use covey_mount::{Cache, MountRequest, MountedHome, SecureMounted};
use covey_types::{BlockHash, RootHash};

const DIR_VARIABLE: &str = "COVEY_MOUNT_KILL_TEST_DIR";
const ROUNDS: u64 = 40;

fn mount(dir: &Path, store: &PackStore, root: RootHash) -> MountedHome {
    let cache = Cache::open(&dir.join("cache"), None).unwrap();
    let request = MountRequest {
        root,
        dir: &dir.join("mounted"),
        state: &dir.join("state"),
        cache: &cache,
        store,
        owner: (0, 0),
        excludes: &Excludes::none(),
        discard: false,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    };
    MountedHome::mount(&request).unwrap().0
}

fn base(dir: &Path) -> RootHash {
    fs::read_to_string(dir.join("base")).unwrap().parse().unwrap()
}

fn secure(home: &MountedHome, store: &PackStore) -> (RootHash, Vec<String>) {
    let cancel = AtomicBool::new(false);
    let request = SecureMounted {
        store,
        excludes: &Excludes::none(),
        previous: None,
        cancel: &cancel,
        progress: &NoProgress,
        threads: 2,
    };
    let secured = home.secure(&request).unwrap().root;
    let checked = home.cross_check(&request, secured).unwrap();
    (secured, checked.differences)
}

/// The process that is killed; the parent test starts it with its directory.
#[test]
#[ignore = "the body of the process that the kill test starts"]
fn child() {
    let dir = PathBuf::from(std::env::var_os(DIR_VARIABLE).expect("started by the kill test"));
    let store = PackStore::open_directory(&dir.join("store"), "org").unwrap();
    for number in 0.. {
        let home = mount(&dir, &store, base(&dir));
        let at = home.dir().to_owned();
        fs::write(at.join(format!("new-{}", number % 7)), number.to_string()).unwrap();
        if at.join("dir").exists() {
            fs::rename(at.join("dir"), at.join("moved")).unwrap();
        }
        assert_eq!(secure(&home, &store).1, Vec::<String>::new());
        drop(home);
        MountedHome::umount(&dir.join("state"), number % 5 == 4).unwrap();
    }
}

#[test]
fn killed_at_any_point_a_home_can_be_mounted_secured_and_unmounted() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    covey_mount::probe(dir).expect("the host mounts homes");
    fs::create_dir_all(dir.join("home/dir")).unwrap();
    for number in 0..200 {
        fs::write(dir.join(format!("home/dir/file-{number}")), format!("{number}").repeat(500)).unwrap();
    }
    let store = PackStore::open_directory(&dir.join("store"), "org").unwrap();
    let root = covey_home::secure(&SecureRequest {
        dir: &dir.join("home"),
        store: &store,
        stat_cache: None,
        excludes: &Excludes::none(),
        previous: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    })
    .unwrap()
    .root;
    fs::write(dir.join("base"), root.to_string()).unwrap();
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kill::child", "--ignored", "--nocapture"])
            .env(DIR_VARIABLE, dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Not a synchronisation: the random moment of the kill.
        let random = u64::from(BlockHash::of(&round.to_le_bytes()).as_bytes()[0]);
        std::thread::sleep(Duration::from_micros(random * 700));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), None, "the child was killed and did not fail in round {round}");
        // A copy of the state as it was left, for a second way on: unmounting at once.
        if round % 2 == 0 {
            let home = mount(dir, &store, root);
            assert_eq!(fs::read(home.dir().join("new-0")).is_ok(), home.dir().join("new-0").exists());
            let (secured, differences) = secure(&home, &store);
            assert_eq!(differences, Vec::<String>::new(), "round {round}");
            assert_eq!(covey_home::verify(&store, &secured).unwrap().problems, Vec::<String>::new());
        }
        if dir.join("state/state.json").exists() {
            MountedHome::umount(&dir.join("state"), round % 3 == 0).unwrap();
        }
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!table.contains(dir.to_str().unwrap()), "round {round} leaves a mount:\n{table}");
    }
    let cache = Cache::open(&dir.join("cache"), Some(0)).unwrap();
    let left = cache.trim().unwrap().unwrap();
    assert_eq!((left.contents, left.images, left.over_limit), (0, 0, false), "nothing is held for ever");
}
