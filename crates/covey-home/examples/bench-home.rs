//! Measures the home store on a generated home and prints one JSON object: times in milliseconds, the floors of
//! the same machine in the same run, and the peak resident size.
//!
//! `cargo run --release -p covey-home --example bench-home [DIR]`; without DIR a home of about 20,000 files is
//! made in a scratch directory. The page cache is warm throughout.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use covey_home::{
    Excludes, MaterializeRequest, NoProgress, PackStore, SecureReport, SecureRequest, materialize, secure,
};
use serde_json::json;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Directories of the generated home, and files in each.
const DIRS: u64 = 400;
const FILES_PER_DIR: u64 = 50;
/// Unchanged secures, of which the median counts.
const REPEATS: usize = 5;

fn fill(seed: u64, bytes: &mut [u8]) {
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(bytes);
}

/// Source-like text: words from a small set in an order that depends on the seed.
fn text(seed: u64, len: usize) -> Vec<u8> {
    const WORDS: [&str; 16] = [
        "let ", "return ", "fn ", "match ", "self", ".value", "(", ")", " = ", ";\n", "{\n    ", "}\n",
        "// note ", "Option<", ">", "error",
    ];
    let mut random = vec![0; len / 4 + 1];
    fill(seed, &mut random);
    let mut out: Vec<u8> = Vec::with_capacity(len + 8);
    for byte in random.iter().cycle() {
        if out.len() >= len {
            break;
        }
        out.extend_from_slice(WORDS[usize::from(byte % 16)].as_bytes());
    }
    out
}

/// Sizes like those of package trees: most files are small, few are large, some do not compress.
fn generate(home: &Path) -> Outcome<()> {
    for dir in 0..DIRS {
        let path = home.join(format!("group-{}/package-{dir}/src", dir % 20));
        fs::create_dir_all(&path)?;
        for file in 0..FILES_PER_DIR {
            let seed = dir * FILES_PER_DIR + file;
            let name = path.join(format!("file-{file}.txt"));
            match seed % 100 {
                99 => {
                    let mut bytes = vec![0; 400_000];
                    fill(seed, &mut bytes);
                    fs::write(name, bytes)?;
                }
                90..=98 => fs::write(name, text(seed, 60_000))?,
                _ => fs::write(name, text(seed, 300 + (seed * 37 % 6000) as usize))?,
            }
        }
        fs::hard_link(path.join("file-0.txt"), path.join("linked.txt"))?;
    }
    Ok(())
}

/// What one job changes: edits, new files, removals, a renamed directory.
fn mutate(home: &Path) -> Outcome<()> {
    for dir in 0..20 {
        let path = home.join(format!("group-{dir}/package-{dir}/src"));
        for file in 1..11 {
            fs::write(path.join(format!("file-{file}.txt")), text(1_000_000 + dir * 100 + file, 4000))?;
        }
        fs::remove_file(path.join("file-20.txt"))?;
        let mut bytes = vec![0; 200_000];
        fill(2_000_000 + dir, &mut bytes);
        fs::write(path.join("built.bin"), bytes)?;
    }
    fs::rename(home.join("group-5/package-25"), home.join("group-5/renamed"))?;
    Ok(())
}

fn files_below(dir: &Path, found: &mut Vec<PathBuf>) -> Outcome<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let metadata = fs::symlink_metadata(entry.path())?;
        if metadata.is_dir() {
            files_below(&entry.path(), found)?;
        } else if metadata.is_file() {
            found.push(entry.path());
        }
    }
    Ok(())
}

fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10_000.0).round() / 10.0
}

fn peak_resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

fn run() -> Outcome<serde_json::Value> {
    let scratch = tempfile::tempdir()?;
    let given = std::env::args_os().nth(1).map(PathBuf::from);
    let home = given.clone().unwrap_or_else(|| scratch.path().join("home"));
    if given.is_none() {
        generate(&home)?;
    }
    let store = PackStore::open_directory(&scratch.path().join("store"), "bench")?;
    let cache = scratch.path().join("cache");
    let excludes = Excludes::none();
    let cancel = AtomicBool::new(false);
    let secured = |dir: &Path, cache: &Path| -> Outcome<(SecureReport, f64)> {
        let start = Instant::now();
        let report = secure(&SecureRequest {
            dir,
            store: &store,
            stat_cache: Some(cache),
            excludes: &excludes,
            previous: None,
            cancel: &cancel,
            progress: &NoProgress,
            threads: 0,
        })?;
        Ok((report, ms(start.elapsed())))
    };

    let start = Instant::now();
    let mut files = Vec::new();
    files_below(&home, &mut files)?;
    let floor_walk = ms(start.elapsed());
    let start = Instant::now();
    let mut floor_bytes = 0;
    for file in &files {
        let bytes = fs::read(file)?;
        floor_bytes += bytes.len() as u64;
        std::hint::black_box(blake3::hash(&bytes));
    }
    let floor_read = ms(start.elapsed());

    let (first, first_ms) = secured(&home, &cache)?;
    // Once more, so that what was written just before the first secure is no longer dirty.
    secured(&home, &cache)?;
    let mut unchanged_ms = Vec::new();
    let mut unchanged = None;
    for _ in 0..REPEATS {
        let (report, elapsed) = secured(&home, &cache)?;
        unchanged_ms.push(elapsed);
        unchanged = Some(report);
    }
    unchanged_ms.sort_by(f64::total_cmp);
    let unchanged = unchanged.ok_or("no repeat")?;
    let job = if given.is_none() {
        mutate(&home)?;
        let (report, elapsed) = secured(&home, &cache)?;
        json!({"wall_ms": elapsed, "bytes_read": report.bytes_read, "blocks_new": report.blocks_new,
            "bytes_new": report.bytes_new, "stored_bytes_new": report.stored_bytes_new})
    } else {
        serde_json::Value::Null
    };
    let (last, _) = secured(&home, &cache)?;
    let target = scratch.path().join("restored");
    let target_cache = scratch.path().join("restored-cache");
    let start = Instant::now();
    let restored = materialize(&MaterializeRequest {
        root: last.root,
        dir: &target,
        store: &store,
        stat_cache: Some(&target_cache),
        excludes: &excludes,
        owner: None,
        cancel: &cancel,
        progress: &NoProgress,
        threads: 0,
    })?;
    let materialize_ms = ms(start.elapsed());
    let (after, after_ms) = secured(&target, &target_cache)?;
    Ok(json!({
        "files": first.files,
        "bytes": first.bytes,
        "stored_bytes": first.stored_bytes_new,
        "first_secure_ms": first_ms,
        "unchanged_secure_ms": unchanged_ms[REPEATS / 2],
        "unchanged_bytes_read": unchanged.bytes_read,
        "unchanged_blocks_new": unchanged.blocks_new,
        "one_more_job": job,
        "materialize_ms": materialize_ms,
        "materialized_files": restored.files_written,
        "secure_after_materialize_ms": after_ms,
        "secure_after_materialize_bytes_read": after.bytes_read,
        "root_is_the_same": after.root == last.root,
        "floor_walk_statx_1_thread_ms": floor_walk,
        "floor_read_blake3_1_thread_ms": floor_read,
        "floor_bytes": floor_bytes,
        "peak_resident_kib": peak_resident_kib(),
    }))
}

fn main() -> Outcome<()> {
    println!("{}", run()?);
    Ok(())
}
