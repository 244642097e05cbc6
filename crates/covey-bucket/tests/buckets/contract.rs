//! The contract suite of `covey-home` on each server.

use std::sync::Arc;

use covey_home::PackStore;
use covey_home::backend::Backend;
use covey_home::contract::{check_backend, check_blocks, check_packs, check_pointers};

use super::proxy::Proxy;
use super::servers;

/// Every promise that is broken; each check gets a place of its own.
pub(super) fn broken(fresh: impl Fn() -> Arc<dyn Backend>) -> Vec<String> {
    let mut broken = broken_above(&fresh);
    broken.extend(check_backend(&fresh()).err().map(|error| format!("backend: {error}")));
    broken
}

/// The same without reading raw ranges: they have no checksum, so a flipped bit in one is found by whoever knows what
/// stands there.
pub(super) fn broken_above(fresh: &impl Fn() -> Arc<dyn Backend>) -> Vec<String> {
    let mut broken = Vec::new();
    let mut note = |check: &str, result: Result<(), covey_home::contract::Broken>| {
        broken.extend(result.err().map(|error| format!("{check}: {error}")));
    };
    note("packs", check_packs(&fresh()));
    note("pointers", check_pointers(&fresh()));
    match PackStore::open(fresh()) {
        Ok(store) => note("blocks", check_blocks(&store)),
        Err(error) => broken.push(format!("blocks: {error}")),
    }
    broken
}

#[test]
fn every_server_keeps_the_contract() {
    for server in servers::all() {
        let proxy = Proxy::before(&server);
        let url = if server.is_atomic { server.url() } else { proxy.url() };
        assert_eq!(broken(|| server.fresh(&url)), Vec::<String>::new(), "{}", server.name);
    }
}

#[test]
fn more_names_than_one_page_holds_are_all_listed() {
    // S3 lists 1000 names at a time.
    const FILES: u64 = 1203;
    for server in servers::all() {
        let backend = server.fresh(&server.url());
        std::thread::scope(|scope| {
            for worker in 0..8 {
                let backend = &backend;
                scope.spawn(move || {
                    for number in (worker..FILES).step_by(8) {
                        let name = format!("{number:06}");
                        let key = covey_home::backend::Key::new(&["homes", "h", "snapshots", &name]).unwrap();
                        let put = backend.put_if(&key, b"x", &covey_home::backend::Expected::Any).unwrap();
                        assert!(matches!(put, covey_home::backend::PutOutcome::Written(_)));
                    }
                });
            }
        });
        let dir = covey_home::backend::Key::new(&["homes", "h", "snapshots"]).unwrap();
        let mut names = backend.list(&dir).unwrap();
        names.sort_unstable();
        let expected: Vec<String> = (0..FILES).map(|number| format!("{number:06}")).collect();
        assert_eq!(names, expected, "{}", server.name);
    }
}
