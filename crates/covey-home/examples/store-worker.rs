//! What the kill and power-cut tests let die: `work DIR ROLE SEED` does one kind of work on one store again and again
//! until it is killed, and says what it has acknowledged; `check DIR [ACKNOWLEDGED]` tells whether the store is whole.
//!
//! A home's files follow from one number, which is a file of it, so that whoever restores it knows every byte.

#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_home::integrity::{StoreCheck, check_store};
use covey_home::{
    CollectError, CollectOptions, Excludes, MaterializeRequest, NoProgress, PackStore, Pointers,
    SecureRequest, carry_states, collect, materialize, secure_and_publish,
};
use covey_types::{BlockHash, FencingToken};

const ORG: &str = "org";
/// Files of a home.
const FILES: u64 = 24;
/// Snapshots of a home that a collection leaves.
const KEPT: usize = 3;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["work", dir, role, seed] => work(Path::new(dir), role, seed.parse()?),
        ["check", dir] => check(Path::new(dir), &[]),
        ["check", dir, ref acknowledged @ ..] => check(Path::new(dir), acknowledged),
        _ => Err("usage: store-worker work DIR ROLE SEED | check DIR [HOME=GENERATION…]".into()),
    }
}

fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

fn work(dir: &Path, role: &str, seed: u64) -> Result<()> {
    let store = PackStore::open_directory(&dir.join("store"), ORG)?;
    let pointers = Pointers::open(&dir.join("store"), ORG)?;
    say("ready")?;
    for round in 0.. {
        match role {
            "secure-one" => secure(dir, &store, &pointers, "one", seed.wrapping_add(round))?,
            "secure-two" => secure(dir, &store, &pointers, "two", seed.wrapping_add(round))?,
            "collect" => gather(&store, &pointers)?,
            "materialize" => put_back(dir, &store, &pointers, seed.wrapping_add(round))?,
            "backup" => back_up(dir, &store, &pointers)?,
            _ => return Err(format!("no role `{role}`").into()),
        }
    }
    Ok(())
}

fn noise(seed: u64, number: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut hasher = blake3::Hasher::new_derive_key("covey store-worker");
    hasher.update(&seed.to_le_bytes()).update(&number.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Half of the files stay the same for eight numbers in a row, so that packs are shared.
fn content(seed: u64, number: u64) -> Vec<u8> {
    let of = if number.is_multiple_of(2) { seed } else { seed / 8 };
    let len = 1000
        + (BlockHash::of(&[of.to_le_bytes(), number.to_le_bytes()].concat()).as_bytes()[0] as usize) * 100;
    noise(of, number, len)
}

fn path_of(number: u64) -> String {
    format!("dir-{}/file-{number}", number % 5)
}

fn secure(dir: &Path, store: &PackStore, pointers: &Pointers, home: &str, seed: u64) -> Result<()> {
    let files = dir.join(format!("home-{home}"));
    for number in 0..FILES {
        let path = files.join(path_of(number));
        let bytes = content(seed, number);
        fs::create_dir_all(path.parent().unwrap_or(&files))?;
        if fs::read(&path).is_ok_and(|found| found == bytes) {
            continue;
        }
        fs::write(&path, bytes)?;
    }
    fs::write(files.join("SEED"), seed.to_string())?;
    let request = SecureRequest {
        dir: &files,
        store,
        stat_cache: Some(&dir.join(format!("cache-{home}"))),
        excludes: &Excludes::none(),
        previous: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    };
    say("busy")?;
    loop {
        match secure_and_publish(&request, pointers, home, FencingToken(1)) {
            Ok(report) => {
                let generation = report.generation.ok_or("a partial secure")?;
                return say(&format!("published {home}={generation}"));
            }
            // A collection passed: it is done again.
            Err(error) if error.to_string().contains("garbage collection has passed") => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn gather(store: &PackStore, pointers: &Pointers) -> Result<()> {
    say("busy")?;
    for home in pointers.homes()? {
        let kept = pointers.snapshots(&home)?;
        let first = kept.len().saturating_sub(KEPT);
        let first = kept.get(first).map_or(0, |pointer| pointer.generation.0);
        pointers.retain(&home, &|pointer| pointer.generation.0 >= first)?;
    }
    let options = CollectOptions { rewrite_below_percent: 90, ..CollectOptions::default() };
    match collect(store, pointers, &options, &AtomicBool::new(false), &NoProgress) {
        Ok(report) => say(&format!("collected {}", report.packs_removed)),
        // Another one was faster, or a snapshot was forgotten by it while it was marked.
        Err(CollectError::Overtaken | CollectError::Mark(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn put_back(dir: &Path, store: &PackStore, pointers: &Pointers, seed: u64) -> Result<()> {
    let home = if seed.is_multiple_of(2) { "one" } else { "two" };
    let Some(pointer) = pointers.current(home)? else { return Ok(()) };
    if seed.is_multiple_of(3) {
        // All of it is written again.
        remove(&dir.join(format!("target-{home}")))?;
    }
    say("busy")?;
    let done = materialize(&MaterializeRequest {
        root: pointer.root,
        dir: &dir.join(format!("target-{home}")),
        store,
        stat_cache: Some(&dir.join(format!("target-cache-{home}"))),
        excludes: &Excludes::none(),
        owner: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 2,
    });
    // A collection may take a state away that is not the current one any more.
    if let Err(error) = done
        && pointers.current(home)? == Some(pointer)
    {
        return Err(error.into());
    }
    say("materialized")
}

fn remove(path: &Path) -> Result<()> {
    if path.exists() {
        fs::remove_dir_all(path)?;
    }
    Ok(())
}

fn back_up(dir: &Path, store: &PackStore, pointers: &Pointers) -> Result<()> {
    // In turn onto what is there and from the beginning. Out of sight first: half a backup is none.
    let trash = dir.join("backup-old");
    remove(&trash)?;
    if pointers.current("one")?.is_some_and(|pointer| pointer.generation.0.is_multiple_of(2))
        && dir.join("backup").exists()
    {
        fs::rename(dir.join("backup"), &trash)?;
    }
    say("busy")?;
    let backup = PackStore::open_directory(&dir.join("backup"), ORG)?;
    let targets = Pointers::open(&dir.join("backup"), ORG)?;
    for home in pointers.homes()? {
        let Some(pointer) = pointers.current(&home)? else { continue };
        match carry_states(store, &backup, &[pointer.root], &AtomicBool::new(false), &NoProgress) {
            Ok(_) => {}
            Err(_) if pointers.current(&home)? != Some(pointer) => continue,
            Err(error) => return Err(error.into()),
        }
        let base = targets.current(&home)?.map_or_else(Default::default, |current| current.generation);
        targets.publish(&home, pointer.root, base, FencingToken(1), 0)?;
    }
    say("backed up")
}

/// Everything published is whole, the newest of each home restores byte for byte, and none is older than what was
/// acknowledged.
fn check(dir: &Path, acknowledged: &[&str]) -> Result<()> {
    check_one(dir, &dir.join("store"), acknowledged)?;
    if dir.join("backup").exists() {
        check_one(dir, &dir.join("backup"), &[])?;
    }
    say("whole")
}

fn check_one(dir: &Path, path: &Path, acknowledged: &[&str]) -> Result<()> {
    let store = PackStore::open_directory(path, ORG)?;
    let pointers = Pointers::open(path, ORG)?;
    let report = check_store(&StoreCheck {
        store: &store,
        roots: &pointers,
        sample_percent: 100,
        record: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
    })?;
    if !report.ok {
        return Err(format!("{} does not verify: {report:?}", path.display()).into());
    }
    for line in acknowledged {
        let (home, generation) = line.split_once('=').ok_or("HOME=GENERATION")?;
        let current = pointers.current(home)?.map_or(0, |current| current.generation.0);
        if current < generation.parse()? {
            return Err(format!("{home}: {generation} was acknowledged, {current} is there").into());
        }
    }
    for home in pointers.homes()? {
        let Some(pointer) = pointers.current(&home)? else { continue };
        let target = dir.join("restored");
        remove(&target)?;
        materialize(&MaterializeRequest {
            root: pointer.root,
            dir: &target,
            store: &store,
            stat_cache: None,
            excludes: &Excludes::none(),
            owner: None,
            cancel: &AtomicBool::new(false),
            progress: &NoProgress,
            threads: 2,
        })?;
        compare(&target).map_err(|error| format!("{home} {}: {error}", pointer.generation))?;
    }
    Ok(())
}

fn compare(target: &Path) -> Result<()> {
    let seed: u64 = fs::read_to_string(target.join("SEED"))?.parse()?;
    let mut count = 1;
    for number in 0..FILES {
        if fs::read(target.join(path_of(number)))? != content(seed, number) {
            return Err(format!("{} has other bytes than seed {seed} gives", path_of(number)).into());
        }
        count += 1;
    }
    let mut found = 0;
    let mut waiting = vec![target.to_owned()];
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                waiting.push(entry.path());
            } else {
                found += 1;
            }
        }
    }
    if found == count { Ok(()) } else { Err(format!("{found} files instead of {count}").into()) }
}
