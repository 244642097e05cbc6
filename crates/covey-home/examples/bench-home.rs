//! One step of the home store's bench: what `cargo xtask bench home` starts as a process of its own, so that its
//! time, processor use and peak memory can be measured from outside like those of any other tool.
//!
//! `secure DIR STORE CACHE`, `materialize ROOT DIR STORE CACHE`: the thing itself. `walk DIR THREADS`: the bare floor, a walk
//! with `statx` of every entry. `write FILE BYTES`: the floor of writing. `mutate DIR SEED`: what one more job
//! changes. `recompress ROOT STORE`: what a collection does in the background. `fill STORE BLOCKS`: blocks of
//! others. `key FILE`: a master key, which `COVEY_STORE_KEY_FILE` names to the other steps. `generate DIR ENTRIES`: a tree of small and empty files. `digest DIR`: one hash over everything that a
//! tree is, made without the code under test. Each prints one JSON object.

use std::error::Error;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_home::{
    BlockStore as _, CollectOptions, Excludes, MasterKey, MaterializeRequest, NoProgress, PackStore, Roots,
    SecureRequest, StoreError, collect, materialize, secure,
};
use covey_types::RootHash;
use serde_json::{Value, json};

#[path = "bench-home/digest.rs"]
mod digest;
#[path = "bench-home/tree.rs"]
mod tree;
#[path = "bench-home/walk.rs"]
mod walk;

type Outcome<T> = Result<T, Box<dyn Error>>;

const ORG: &str = "bench";
const USAGE: &str = "secure DIR STORE CACHE | materialize ROOT DIR STORE CACHE | walk DIR THREADS | write FILE BYTES | \
                     mutate DIR SEED | recompress ROOT STORE | fill STORE BLOCKS | key FILE | generate DIR ENTRIES | \
                     digest DIR";

fn open(store: &str) -> Outcome<PackStore> {
    let key = std::env::var_os("COVEY_STORE_KEY_FILE").map(|file| MasterKey::read(Path::new(&file)));
    Ok(PackStore::open_directory_with(Path::new(store), ORG, key.transpose()?.as_ref())?)
}

fn secured(dir: &str, store: &str, cache: &str) -> Outcome<Value> {
    let store = open(store)?;
    let report = secure(&SecureRequest {
        dir: Path::new(dir),
        store: &store,
        stat_cache: Some(Path::new(cache)),
        excludes: &Excludes::none(),
        previous: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 0,
    })?;
    Ok(serde_json::to_value(report)?)
}

fn materialized(root: &str, dir: &str, store: &str, cache: &str) -> Outcome<Value> {
    let store = open(store)?;
    let report = materialize(&MaterializeRequest {
        root: root.parse().map_err(|_| "not a root")?,
        dir: Path::new(dir),
        store: &store,
        stat_cache: Some(Path::new(cache)),
        excludes: &Excludes::none(),
        owner: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 0,
    })?;
    Ok(serde_json::to_value(report)?)
}

/// The one state that is needed.
struct OneRoot(RootHash);

impl Roots for OneRoot {
    fn roots(&self) -> Result<Vec<RootHash>, StoreError> {
        Ok(vec![self.0])
    }

    fn raise_floor(&self, _epoch: u64) -> Result<(), StoreError> {
        Ok(())
    }
}

fn recompressed(root: &str, store: &str) -> Outcome<Value> {
    let root = OneRoot(root.parse().map_err(|_| "not a root")?);
    let options = CollectOptions { recompress_bytes: u64::MAX, ..CollectOptions::default() };
    let report = collect(&open(store)?, &root, &options, &AtomicBool::new(false), &NoProgress)?;
    Ok(serde_json::to_value(report)?)
}

/// Blocks of a few bytes that no home has.
fn filled(store: &str, blocks: u64) -> Outcome<Value> {
    const BLOCKS_PER_UPLOAD: u64 = 100_000;
    let store = open(store)?;
    let mut stored_bytes = 0;
    for first in (0..blocks).step_by(BLOCKS_PER_UPLOAD as usize) {
        let upload = store.upload()?;
        for number in first..blocks.min(first + BLOCKS_PER_UPLOAD) {
            let bytes = format!("a block of another home, number {number}");
            upload.put(&upload.hasher().block(bytes.as_bytes())?)?;
        }
        stored_bytes += upload.finish()?.stored_bytes_new;
    }
    Ok(json!({ "blocks": blocks, "stored_bytes": stored_bytes }))
}

fn written(file: &str, bytes: u64) -> Outcome<Value> {
    const PART: usize = 1 << 20;
    let part = vec![0x5a; PART];
    let mut out = std::fs::File::create(file)?;
    let mut left = bytes;
    while left > 0 {
        let now = left.min(PART as u64);
        out.write_all(&part[..now as usize])?;
        left -= now;
    }
    Ok(json!({ "bytes": bytes }))
}

fn run() -> Outcome<Value> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["secure", dir, store, cache] => secured(dir, store, cache),
        ["materialize", root, dir, store, cache] => materialized(root, dir, store, cache),
        ["walk", dir, threads] => walk::walk(Path::new(dir), threads.parse()?),
        ["write", file, bytes] => written(file, bytes.parse()?),
        ["mutate", dir, seed] => tree::mutate(Path::new(dir), seed.parse()?),
        ["recompress", root, store] => recompressed(root, store),
        ["fill", store, blocks] => filled(store, blocks.parse()?),
        ["key", file] => Ok(json!({ "key": MasterKey::create(Path::new(file))?.id() })),
        ["generate", dir, entries] => tree::generate(Path::new(dir), entries.parse()?),
        ["digest", dir] => digest::digest(Path::new(dir)),
        _ => Err(USAGE.into()),
    }
}

fn main() -> Outcome<()> {
    println!("{}", run()?);
    Ok(())
}
