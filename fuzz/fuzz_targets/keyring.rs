//! Any bytes as a key ring: no panic, and no keys.

#![no_main]

use covey_home::backend::{Backend, Expected, Key, MemoryBackend};
use covey_home::{MasterKey, OrgKeys};
use libfuzzer_sys::fuzz_target;

const MASTER: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

fuzz_target!(|bytes: &[u8]| {
    let backend = MemoryBackend::new();
    let key = Key::new(&["keys", "ring"]).unwrap();
    if backend.put_if(&key, bytes, &Expected::Absent).is_err() {
        return;
    }
    drop(OrgKeys::report(&backend));
    let master = MasterKey::from_text(MASTER).unwrap();
    assert!(OrgKeys::read(&backend, "org", &master).is_err());
});
