//! A whole home through a link that breaks: either it is published and comes back byte for byte, or an error says
//! that it is not, and then the next secure brings it.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_bucket::Patience;
use covey_home::{
    Excludes, MaterializeRequest, NoProgress, PackStore, Pointers, SecureRequest, materialize,
    secure_and_publish,
};
use covey_types::{FencingToken, RootHash};

use super::proxy::{Proxy, Schedule};
use super::servers;

fn make_home(dir: &Path, seed: u64) {
    for number in 0..120_u64 {
        let folder = dir.join(format!("d{}", number % 7));
        fs::create_dir_all(&folder).unwrap();
        let text = format!("{seed} {number} ").repeat((number * 37 % 900) as usize);
        fs::write(folder.join(format!("f{number}")), text).unwrap();
    }
    let large: Vec<u8> =
        (0..12_000_000_u64).map(|at| (at.wrapping_mul(seed + 77) >> 7) as u8 ^ (at >> 11) as u8).collect();
    fs::write(dir.join("large"), large).unwrap();
}

/// Names and contents of everything below a directory.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                let name = path.strip_prefix(dir).unwrap().display().to_string();
                found.push((name, fs::read(&path).unwrap()));
            }
        }
    }
    found.sort_unstable();
    found
}

fn secure(
    dir: &Path,
    backend: &std::sync::Arc<dyn covey_home::backend::Backend>,
) -> Result<RootHash, String> {
    let store = PackStore::open(std::sync::Arc::clone(backend)).map_err(|error| error.to_string())?;
    let request = SecureRequest {
        dir,
        store: &store,
        excludes: &Excludes::none(),
        stat_cache: None,
        previous: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    };
    let pointers = Pointers::on(std::sync::Arc::clone(backend));
    let report = secure_and_publish(&request, &pointers, "home", FencingToken(1));
    report.map(|report| report.root).map_err(|error| error.to_string())
}

fn restored(
    backend: &std::sync::Arc<dyn covey_home::backend::Backend>,
    root: RootHash,
    dir: &Path,
) -> Result<(), String> {
    let store = PackStore::open(std::sync::Arc::clone(backend)).map_err(|error| error.to_string())?;
    let report = materialize(&MaterializeRequest {
        root,
        dir,
        store: &store,
        stat_cache: None,
        excludes: &Excludes::none(),
        owner: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    });
    report.map(drop).map_err(|error| error.to_string())
}

#[test]
fn a_home_is_published_whole_or_an_error_says_that_it_is_not() {
    // Gives up early, so that some of the secures fail.
    let hasty =
        Patience { tries_max: 2, answer: std::time::Duration::from_millis(700), ..servers::patience() };
    let (mut published, mut refused) = (0, 0);
    for server in servers::all() {
        let place = servers::fresh_place();
        let clean = server.open(&server.url(), &place).unwrap().backend("org").unwrap();
        let pointers = Pointers::on(std::sync::Arc::clone(&clean));
        for seed in 0..8 {
            let home = tempfile::tempdir().unwrap();
            make_home(home.path(), seed);
            let before = pointers.current("home").unwrap();
            let proxy = Proxy::before(&server);
            let broken = server.open_with(&proxy.url(), &place, hasty).unwrap().backend("org").unwrap();
            proxy.break_things(Schedule::Random(seed), |_| true);
            let secured = secure(home.path(), &broken);
            let now = pointers.current("home").unwrap();
            match &secured {
                Ok(root) => {
                    published += 1;
                    assert_eq!(now.map(|pointer| pointer.root), Some(*root), "{}, seed {seed}", server.name);
                }
                // The answer to the last put may be what was lost; then the state is there, and whole.
                Err(_) => refused += 1,
            }
            if let Some(now) = now.filter(|now| Some(*now) != before) {
                let target = tempfile::tempdir().unwrap();
                restored(&clean, now.root, target.path()).unwrap();
                assert!(contents(target.path()) == contents(home.path()), "{}, seed {seed}", server.name);
            }
            // Whatever has happened, the next secure brings it.
            let root = secure(home.path(), &clean).unwrap();
            assert_eq!(pointers.current("home").unwrap().map(|pointer| pointer.root), Some(root));
            let report = PackStore::open(std::sync::Arc::clone(&clean)).unwrap().verify_packs().unwrap();
            assert_eq!(report.problems, Vec::<String>::new(), "{}, seed {seed}", server.name);
        }
    }
    assert!(published > 0 && refused > 0, "{published} published, {refused} refused: neither is shown");
}

#[test]
fn what_is_read_through_a_broken_link_is_right_or_refused() {
    for server in servers::all() {
        let place = servers::fresh_place();
        let clean = server.open(&server.url(), &place).unwrap().backend("org").unwrap();
        let home = tempfile::tempdir().unwrap();
        make_home(home.path(), 99);
        let root = secure(home.path(), &clean).unwrap();
        for seed in 0..4 {
            let proxy = Proxy::before(&server);
            let broken = server.open(&proxy.url(), &place).unwrap().backend("org").unwrap();
            proxy.break_things(Schedule::Random(seed), |_| true);
            let target = tempfile::tempdir().unwrap();
            restored(&broken, root, target.path()).unwrap();
            assert!(contents(target.path()) == contents(home.path()), "{}, seed {seed}", server.name);
            assert!(proxy.faults() > 0);
        }
    }
}

#[test]
fn a_first_secure_asks_little() {
    for server in servers::all() {
        let proxy = Proxy::before(&server);
        let home = tempfile::tempdir().unwrap();
        make_home(home.path(), 5);
        let store = server.open_calmly(&proxy.url(), &servers::fresh_place()).unwrap();
        let opened = proxy.requests();
        secure(home.path(), &store.backend("org").unwrap()).unwrap();
        let asked = proxy.requests() - opened;
        // One pack, its list, the marks of collections and the pointer, most of them absent and proven to be.
        assert!(asked <= 24, "{}: {asked} requests: {:#?}", server.name, proxy.log());
        assert_eq!(store.requests().count(), proxy.requests(), "what is counted is what is sent");
    }
}
