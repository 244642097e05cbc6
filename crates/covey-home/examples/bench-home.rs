//! One step of the home store's bench: what `cargo xtask bench home` starts as a process of its own, so that its
//! time, processor use and peak memory can be measured from outside like those of any other tool.
//!
//! `secure DIR STORE CACHE`, `materialize ROOT DIR STORE CACHE`: the thing itself. `walk DIR THREADS`: the bare floor, a walk
//! with `statx` of every entry. `write FILE BYTES`: the floor of writing. `mutate DIR SEED`: what one more job
//! changes. `generate DIR ENTRIES`: a tree of small and empty files. `digest DIR`: one hash over everything that a
//! tree is, made without the code under test. Each prints one JSON object.

use std::error::Error;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_home::{Excludes, MaterializeRequest, NoProgress, PackStore, SecureRequest, materialize, secure};
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
                     mutate DIR SEED | generate DIR ENTRIES | digest DIR";

fn secured(dir: &str, store: &str, cache: &str) -> Outcome<Value> {
    let store = PackStore::open_directory(Path::new(store), ORG)?;
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
    let store = PackStore::open_directory(Path::new(store), ORG)?;
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
        ["generate", dir, entries] => tree::generate(Path::new(dir), entries.parse()?),
        ["digest", dir] => digest::digest(Path::new(dir)),
        _ => Err(USAGE.into()),
    }
}

fn main() -> Outcome<()> {
    println!("{}", run()?);
    Ok(())
}
