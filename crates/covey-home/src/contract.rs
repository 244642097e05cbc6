//! What every backend and every block store promises, as checks that answer with the first broken promise.
//!
//! What stays true: a check works on an empty store of its own, whatever it stands on, so one suite judges the
//! directory, memory and every object store. What does not belong here: faults; who injects them asks that
//! nothing is lost and nothing wrong is read.

use std::fmt::Debug;
use std::sync::Arc;
use std::thread;

use covey_types::{FencingToken, Generation, RootHash};

use crate::backend::{Backend, BackendError, Expected, Key, PutOutcome};
use crate::block::{BLOCK_BYTES_MAX, BlockHasher, BlockStore, StoreError, UploadReport};
use crate::keys::{KeyError, MasterKey};
use crate::pack_store::{Existing, PackStore, Packing};
use crate::pointer::{PointerError, Pointers};

/// A promise that was not kept.
#[derive(Debug, thiserror::Error)]
#[error("{promise}: {found}")]
pub struct Broken {
    /// What should be.
    pub promise: &'static str,
    /// What was.
    pub found: String,
}

type Checked = Result<(), Broken>;

fn ok<T, E: Debug>(promise: &'static str, result: Result<T, E>) -> Result<T, Broken> {
    result.map_err(|error| Broken { promise, found: format!("{error:?}") })
}

fn same<T: PartialEq + Debug>(promise: &'static str, found: T, expected: T) -> Checked {
    if found == expected {
        return Ok(());
    }
    let shown: String = format!("{found:?} and not {expected:?}").chars().take(500).collect();
    Err(Broken { promise, found: shown })
}

fn holds(promise: &'static str, is_so: bool, found: impl Debug) -> Checked {
    if is_so { Ok(()) } else { Err(Broken { promise, found: format!("{found:?}") }) }
}

/// Bytes that do not compress, the same for the same seed.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Checks files, their visibility, their removal, and conditional puts.
///
/// # Errors
/// The first promise that `backend` breaks. It must be empty.
pub fn check_backend(backend: &Arc<dyn Backend>) -> Checked {
    let key = |parts: &[&str]| ok("names are keys", Key::new(parts));
    let packs = key(&["packs"])?;
    let file = key(&["packs", "one"])?;
    same("an empty store lists nothing", ok("it is listed", backend.list(&packs))?, vec![])?;
    let missing = backend.read(&file, 0, 1);
    holds(
        "what is not there is said not to be",
        matches!(missing, Err(BackendError::NotFound { .. })),
        missing,
    )?;
    let missing = backend.read_tail(&file, 1);
    holds("what is not there has no end", matches!(missing, Err(BackendError::NotFound { .. })), missing)?;
    let missing = backend.file_len(&file);
    holds("what is not there has no length", matches!(missing, Err(BackendError::NotFound { .. })), missing)?;
    same("what is not there is not removed", ok("removing it is harmless", backend.remove(&file))?, false)?;

    let bytes = noise(1, 3_000_000);
    let mut new = ok("a file is begun", backend.create())?;
    for part in bytes.chunks(700_001) {
        ok("bytes are taken", new.append(part))?;
    }
    same("what is not published is not seen", ok("it is listed", backend.list(&packs))?, vec![])?;
    ok("it is published", new.publish(&file))?;
    ok("it is flushed", backend.flush(&packs))?;
    same("what is published is seen", ok("it is listed", backend.list(&packs))?, vec!["one".to_owned()])?;
    same("its length is known", ok("it is looked at", backend.file_len(&file))?, bytes.len() as u64)?;
    for (offset, len) in [(0, 10), (999_999, 500_000), (2_999_990, 100), (0, 3_000_000)] {
        let expected = &bytes[offset..bytes.len().min(offset + len)];
        let found = ok("it is read", backend.read(&file, offset as u64, len))?;
        holds("a range is what was written there", found == expected, (offset, len, found.len()))?;
    }
    let tail = ok("its end is read", backend.read_tail(&file, 1000))?;
    holds("the end is the end", tail.bytes[..] == bytes[bytes.len() - 1000..], tail.bytes.len())?;
    same("the end comes with the length", tail.file_len, bytes.len() as u64)?;
    let tail = ok("more than all of it is read", backend.read_tail(&file, bytes.len() + 5))?;
    holds("the end may be all of it", tail.bytes == bytes, tail.bytes.len())?;

    let mut dropped = ok("a file is begun", backend.create())?;
    ok("bytes are taken", dropped.append(b"half"))?;
    drop(dropped);
    same("what was dropped is not seen", ok("it is listed", backend.list(&packs))?, vec!["one".to_owned()])?;
    same("what is there is removed", ok("it is removed", backend.remove(&file))?, true)?;
    same("what was removed is gone", ok("it is listed", backend.list(&packs))?, vec![])?;
    check_conditional_puts(backend)
}

fn check_conditional_puts(backend: &Arc<dyn Backend>) -> Checked {
    let key = ok("names are keys", Key::new(&["homes", "h", "mark"]))?;
    same("what was never put is not there", ok("it is read", backend.get(&key))?, None)?;
    let put =
        |bytes: &[u8], expected| ok("a conditional put is answered", backend.put_if(&key, bytes, &expected));
    let PutOutcome::Written(first) = put(b"1", Expected::Absent)? else {
        return Err(Broken { promise: "the first put succeeds", found: "a conflict".to_owned() });
    };
    same("a second first put is none", put(b"2", Expected::Absent)?, PutOutcome::Conflict)?;
    let PutOutcome::Written(second) = put(b"2", Expected::Version(first.clone()))? else {
        return Err(Broken { promise: "who knows the version replaces it", found: "a conflict".to_owned() });
    };
    same("an old version replaces nothing", put(b"3", Expected::Version(first))?, PutOutcome::Conflict)?;
    let found = ok("it is read", backend.get(&key))?;
    let found = found.map(|found| (found.bytes, found.version));
    same("the last put is read with its version", found, Some((b"2".to_vec(), second.clone())))?;
    same(
        "a directory is listed",
        ok("it is listed", backend.list_dirs(&ok("a key", Key::new(&["homes"]))?))?,
        vec!["h".to_owned()],
    )?;
    let listed = ok("it is listed", backend.list(&ok("a key", Key::new(&["homes", "h"]))?))?;
    same("nothing else is in it", listed, vec!["mark".to_owned()])?;
    // Eight at once on one version.
    let won = thread::scope(|scope| {
        let tries: Vec<_> = (0..8_u8)
            .map(|n| {
                let (backend, key, version) = (backend, &key, second.clone());
                scope.spawn(move || backend.put_if(key, &[n], &Expected::Version(version)))
            })
            .collect();
        let outcomes = tries.into_iter().filter_map(|one| one.join().ok());
        outcomes.filter(|outcome| matches!(outcome, Ok(PutOutcome::Written(_)))).count()
    });
    same("of many on one version one wins", won, 1)?;
    let read = ok("it is read", backend.get(&key))?.map(|found| found.bytes.len());
    same("what the winner put is there", read, Some(1))?;
    same("it is removed", ok("it is removed", backend.remove(&key))?, true)?;
    let gone = put(b"4", Expected::Version(second))?;
    same("what is gone has no version", gone, PutOutcome::Conflict)
}

fn put(store: &dyn BlockStore, blocks: &[&[u8]]) -> Result<UploadReport, StoreError> {
    let upload = store.upload()?;
    for bytes in blocks {
        upload.put(&upload.hasher().block(bytes)?)?;
    }
    upload.finish()
}

/// Checks what a block store promises to secure and materialize.
///
/// # Errors
/// The first promise that `store` breaks. It must be empty.
pub fn check_blocks(store: &dyn BlockStore) -> Checked {
    let name = |bytes: &[u8]| store.hasher().hash(bytes);
    let large = noise(2, BLOCK_BYTES_MAX);
    let middle = vec![b'x'; 300_000];
    let small: Vec<Vec<u8>> = (0..3000_u32).map(|n| n.to_le_bytes().repeat(n as usize % 40)).collect();
    let mut blocks: Vec<&[u8]> = small.iter().map(Vec::as_slice).collect();
    blocks.extend([&large[..], &middle, b""]);
    ok("blocks are put", put(store, &blocks))?;
    for bytes in &blocks {
        let found = ok("a block is read", store.get(&name(bytes)))?;
        holds("what was put is read back", found == *bytes, found.len())?;
    }
    let absent = name(b"not there");
    let found = store.get(&absent);
    holds("absence is said", matches!(&found, Err(StoreError::Absent { hash }) if *hash == absent), found)?;
    let missing = ok("membership is told", store.missing(&[absent, name(b"")]))?;
    same("only what is not there is missing", missing, vec![absent])?;

    let report = ok("blocks are put", put(store, &[b"same", b"same", b"other"]))?;
    same("a block is stored once in an upload", report.blocks_new, 2)?;
    let report = ok("blocks are put", put(store, &[b"same", b"new"]))?;
    same("a block is stored once in a store", (report.blocks_new, report.bytes_new), (1, 3))?;
    let report = ok("blocks are put", put(store, &[b"same"]))?;
    same("nothing new costs nothing", (report.blocks_new, report.stored_bytes_new), (0, 0))?;

    let half = name(b"half");
    let upload = ok("an upload begins", store.upload())?;
    ok("a block is put", upload.put(&ok("a block", upload.hasher().block(b"half"))?))?;
    let found = store.get(&half);
    holds("what is not finished is not seen", matches!(found, Err(StoreError::Absent { .. })), found)?;
    drop(upload);
    let found = store.get(&half);
    holds("what was dropped is not there", matches!(found, Err(StoreError::Absent { .. })), found)?;
    same("what was dropped is missing", ok("membership is told", store.missing(&[half]))?, vec![half])?;
    let other = ok("a block", BlockHasher::keyed([9; 32]).block(b"of another org"))?;
    let put = ok("an upload begins", store.upload())?.put(&other);
    holds("another org's name is refused", matches!(put, Err(StoreError::OtherHasher { .. })), put)
}

/// Checks packs on `backend`: two processes, removal, replacement, and verification.
///
/// # Errors
/// The first promise that is broken. The backend must be empty.
pub fn check_packs(backend: &Arc<dyn Backend>) -> Checked {
    check_opened_packs(&|| PackStore::open(Arc::clone(backend)))
}

/// The same with encryption.
///
/// # Errors
/// The first promise that is broken. The backend must be empty.
pub fn check_encrypted_packs(backend: &Arc<dyn Backend>) -> Checked {
    let master = ok("a key is made", MasterKey::generate())?;
    check_opened_packs(&|| PackStore::open_encrypted(Arc::clone(backend), "org", &master))?;
    let without = PackStore::open(Arc::clone(backend));
    let is_refused = matches!(&without, Err(StoreError::Keys(KeyError::Missing { .. })));
    holds("an encrypted store does not open without a key", is_refused, without)
}

fn check_opened_packs(open: &dyn Fn() -> Result<PackStore, StoreError>) -> Checked {
    let open = || ok("the store opens", open());
    let (one, other) = (open()?, open()?);
    let text = b"the same line\n".repeat(40_000);
    // Long enough for a frame of its own.
    let noisy = noise(3, 700_000);
    let name = |bytes: &[u8]| one.hasher().hash(bytes);
    let hash = name(&noisy);
    ok("blocks are put", put(&one, &[&noisy, &text, b"small"]))?;
    let found = ok("another process reads it", other.get(&hash))?;
    holds("another process reads what was put", found == noisy, found.len())?;
    ok("blocks are put", put(&other, &[b"more"]))?;
    ok("an earlier reader sees it", one.get(&name(b"more")))?;
    let report = ok("packs are verified", open()?.verify_packs())?;
    same("every block is right", (report.packs, report.blocks, report.problems), (2, 4, vec![]))?;

    // As a rewrite by garbage collection: everything into a new pack, then the old ones go.
    let old = ok("packs are listed", one.packs())?;
    let packing = Packing { level: 3, existing: Existing::Copy, ..Packing::default() };
    let upload = ok("a rewrite begins", one.repack(packing))?;
    for pack in &old {
        let read = one.read_pack(pack, |_, bytes| crate::object::put(&*upload, bytes).map(drop), |_, _| {});
        ok("a pack is read", read)?;
    }
    ok("a rewrite ends", crate::block::Upload::finish(upload))?;
    for pack in &old {
        same("a pack is removed", ok("it is removed", one.remove_pack(pack))?, true)?;
    }
    for (store, who) in [(&one, "who rewrote"), (&other, "who did not know"), (&open()?, "who comes later")] {
        for bytes in [&noisy[..], &text, b"small", b"more"] {
            let found = ok("a rewritten block is read", store.get(&name(bytes)));
            holds("a rewrite loses nothing", found.is_ok_and(|found| found == bytes), who)?;
        }
    }
    for pack in ok("packs are listed", one.packs())? {
        ok("a pack is removed", one.remove_pack(&pack))?;
    }
    let found = other.get(&hash);
    holds("what was removed is absent", matches!(found, Err(StoreError::Absent { .. })), found)?;
    same("what was removed is stored again", ok("it is put", put(&other, &[&noisy]))?.blocks_new, 1)
}

/// Checks the pointer of a home on `backend`.
///
/// # Errors
/// The first promise that is broken. The backend must be empty.
pub fn check_pointers(backend: &Arc<dyn Backend>) -> Checked {
    let pointers = Pointers::on(Arc::clone(backend));
    let root = |n: u8| RootHash::of(&[n]);
    same("a new home has no snapshot", ok("it is read", pointers.current("home"))?, None)?;
    let publish =
        |n, base, token| pointers.publish("home", root(n), Generation(base), FencingToken(token), 0);
    let first = ok("the first is published", publish(1, 0, 5))?;
    same("the first has number 1", first.generation, Generation(1))?;
    same("a repeated publish is one", ok("it is repeated", publish(1, 0, 5))?, first)?;
    let late = publish(2, 1, 4);
    holds("a smaller token is fenced", matches!(late, Err(PointerError::Fenced { .. })), late)?;
    let stale = publish(2, 0, 6);
    holds("an old base is refused", matches!(stale, Err(PointerError::NotCurrent { .. })), stale)?;
    let second = ok("the second is published", publish(2, 1, 6))?;
    same("the second is current", ok("it is read", pointers.current("home"))?, Some(second))?;
    same("both are kept", ok("they are listed", pointers.snapshots("home"))?, vec![first, second])?;
    same("the home is listed", ok("homes are listed", pointers.homes())?, vec!["home".to_owned()])?;
    let won = thread::scope(|scope| {
        let tries: Vec<_> = (0..8_u8)
            .map(|n| {
                let pointers = &pointers;
                scope.spawn(move || {
                    pointers.publish("contested", RootHash::of(&[n]), Generation(0), FencingToken(1), 0)
                })
            })
            .collect();
        tries.into_iter().filter_map(|one| one.join().ok()).filter(Result::is_ok).count()
    });
    same("of many on one base one wins", won, 1)
}
