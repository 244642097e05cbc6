//! What every block store and every backend promises, checked on those of this crate.

use std::sync::Arc;

use covey_home::backend::{Backend, DirectoryBackend, MemoryBackend};
use covey_home::{BLOCK_BYTES_MAX, Block, BlockStore, MemoryStore, PackStore, StoreError, contract};
use covey_types::BlockHash;

use crate::support;

/// Gives each check an empty backend of each kind, and one that seems far away.
fn with_each_backend(check: impl Fn(&Arc<dyn Backend>) -> Result<(), contract::Broken>) {
    let scratch = support::scratch();
    let directory = DirectoryBackend::open(&scratch.path().join("store"), "org").unwrap();
    let remote = MemoryBackend::with_cache_dir(scratch.path().join("cache")).remote();
    let all: [(&str, Arc<dyn Backend>); 3] = [
        ("memory", Arc::new(MemoryBackend::new())),
        ("directory", Arc::new(directory)),
        ("far", Arc::new(remote)),
    ];
    for (name, backend) in all {
        check(&backend).map_err(|broken| format!("{name}: {broken}")).unwrap();
    }
}

#[test]
fn backends_keep_their_promises() {
    with_each_backend(contract::check_backend);
}

#[test]
fn packs_keep_their_promises_on_every_backend() {
    with_each_backend(contract::check_packs);
}

#[test]
fn pointers_keep_their_promises_on_every_backend() {
    with_each_backend(contract::check_pointers);
}

#[test]
fn block_stores_keep_their_promises() {
    contract::check_blocks(&MemoryStore::new()).unwrap();
    with_each_backend(|backend| contract::check_blocks(&PackStore::open(Arc::clone(backend)).unwrap()));
}

#[test]
fn a_block_above_the_limit_is_refused() {
    let bytes = vec![0; BLOCK_BYTES_MAX + 1];
    assert!(matches!(Block::of(&bytes), Err(StoreError::TooLarge { .. })));
}

#[test]
fn another_org_does_not_see_a_block() {
    let scratch = support::scratch();
    let open = |org: &str| PackStore::open_directory(scratch.path(), org);
    let (one, other) = (open("one").unwrap(), open("other").unwrap());
    let upload = one.upload().unwrap();
    upload.put(&Block::of(b"secret").unwrap()).unwrap();
    upload.finish().unwrap();
    assert!(matches!(other.get(&BlockHash::of(b"secret")), Err(StoreError::Absent { .. })));
    assert!(matches!(open("../one"), Err(StoreError::Name(_))));
}

#[test]
fn an_unavailable_store_does_not_say_absent() {
    let store = MemoryStore::new();
    let backend = MemoryBackend::new();
    let packs = PackStore::open(Arc::new(backend.clone())).unwrap();
    store.set_unavailable(true);
    backend.set_unavailable(true);
    let hash = BlockHash::of(b"there");
    for store in [&store as &dyn BlockStore, &packs] {
        assert!(matches!(store.get(&hash), Err(StoreError::Unavailable { .. })));
        assert!(store.missing(&[hash]).is_err());
        assert!(store.upload().is_err());
    }
}
