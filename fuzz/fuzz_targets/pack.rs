//! Any bytes as a pack, plain and in an encrypted store: no panic, no memory beyond the limits, never an answer that is
//! not the block's.

#![no_main]

use std::sync::Arc;

use covey_home::backend::{Backend, Key, MemoryBackend};
use covey_home::{MasterKey, PackStore};
use libfuzzer_sys::fuzz_target;

const MASTER: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

fn look(open: &dyn Fn(Arc<dyn Backend>) -> Option<PackStore>, bytes: &[u8]) {
    let backend = MemoryBackend::new();
    // The key ring before the pack: an encrypted store that is new.
    drop(open(Arc::new(backend.clone())));
    let key = Key::new(&["packs", "000102030405060708090a0b0c0d0e0f.pack"]).unwrap();
    let mut file = backend.create().unwrap();
    file.append(bytes).unwrap();
    file.publish(&key).unwrap();
    let Some(store) = open(Arc::new(backend)) else { return };
    for name in store.packs().unwrap() {
        drop(store.pack_contents(&name));
    }
    drop(store.verify_packs());
}

fuzz_target!(|bytes: &[u8]| {
    let master = MasterKey::from_text(MASTER).unwrap();
    look(&|backend| PackStore::open(backend).ok(), bytes);
    look(&|backend| PackStore::open_encrypted(backend, "org", &master).ok(), bytes);
});
