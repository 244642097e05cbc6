//! What every block store promises, checked on both.

use covey_home::{BLOCK_BYTES_MAX, Block, BlockStore, DirectoryStore, MemoryStore, StoreError};
use covey_types::BlockHash;

use crate::support::{self, noise};

fn with_each_store(check: impl Fn(&dyn BlockStore)) {
    check(&MemoryStore::new());
    let scratch = support::scratch();
    check(&DirectoryStore::open(scratch.path(), "org").unwrap());
}

fn put(store: &dyn BlockStore, blocks: &[&[u8]]) -> covey_home::UploadReport {
    let upload = store.upload().unwrap();
    for bytes in blocks {
        upload.put(&Block::of(bytes).unwrap()).unwrap();
    }
    upload.finish().unwrap()
}

#[test]
fn what_was_put_is_read_back() {
    let large = noise(1, BLOCK_BYTES_MAX);
    let middle = vec![b'x'; 300_000];
    with_each_store(|store| {
        let small: Vec<Vec<u8>> = (0..3000_u32).map(|n| n.to_le_bytes().repeat(n as usize % 40)).collect();
        let mut blocks: Vec<&[u8]> = small.iter().map(Vec::as_slice).collect();
        blocks.extend([&large[..], &middle, b""]);
        put(store, &blocks);
        for bytes in blocks {
            assert_eq!(store.get(&BlockHash::of(bytes)).unwrap(), bytes);
        }
    });
}

#[test]
fn absence_is_proven_and_said() {
    with_each_store(|store| {
        put(store, &[b"there"]);
        let absent = BlockHash::of(b"not there");
        assert!(matches!(store.get(&absent), Err(StoreError::Absent { hash }) if hash == absent));
        assert_eq!(store.missing(&[absent, BlockHash::of(b"there")]).unwrap(), [absent]);
    });
}

#[test]
fn a_block_is_stored_once() {
    with_each_store(|store| {
        assert_eq!(put(store, &[b"same", b"same", b"other"]).blocks_new, 2);
        let again = put(store, &[b"same", b"new"]);
        assert_eq!((again.blocks_new, again.bytes_new), (1, 3));
        let nothing = put(store, &[b"same"]);
        assert_eq!((nothing.blocks_new, nothing.stored_bytes_new), (0, 0));
    });
}

#[test]
fn an_unfinished_upload_shows_nothing() {
    with_each_store(|store| {
        let upload = store.upload().unwrap();
        upload.put(&Block::of(b"half").unwrap()).unwrap();
        let hash = BlockHash::of(b"half");
        assert!(matches!(store.get(&hash), Err(StoreError::Absent { .. })));
        drop(upload);
        assert!(matches!(store.get(&hash), Err(StoreError::Absent { .. })));
        assert_eq!(store.missing(&[hash]).unwrap(), [hash]);
    });
}

#[test]
fn a_block_above_the_limit_is_refused() {
    let bytes = vec![0; BLOCK_BYTES_MAX + 1];
    assert!(matches!(Block::of(&bytes), Err(StoreError::TooLarge { .. })));
}

#[test]
fn another_org_does_not_see_a_block() {
    let scratch = support::scratch();
    let (one, other) = (
        DirectoryStore::open(scratch.path(), "one").unwrap(),
        DirectoryStore::open(scratch.path(), "other").unwrap(),
    );
    put(&one, &[b"secret"]);
    assert!(matches!(other.get(&BlockHash::of(b"secret")), Err(StoreError::Absent { .. })));
    assert!(matches!(DirectoryStore::open(scratch.path(), "../one"), Err(StoreError::Name(_))));
}

#[test]
fn an_unavailable_store_does_not_say_absent() {
    let store = MemoryStore::new();
    put(&store, &[b"there"]);
    store.set_unavailable(true);
    assert!(matches!(store.get(&BlockHash::of(b"there")), Err(StoreError::Unavailable { .. })));
    assert!(store.missing(&[BlockHash::of(b"there")]).is_err());
    assert!(store.upload().is_err());
}
