//! Trees to measure on: what one more job changes in a home, and a tree of very many small files.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Value, json};

use crate::Outcome;

/// Files that are edited, in the middle or at their end.
const EDITED: usize = 200;
/// Text that is new, in files of a heavy-tailed size.
const NEW_TEXT_BYTES: u64 = 30_000_000;
/// New bytes that do not compress, in one file.
const NEW_NOISE_BYTES: usize = 18_000_000;
const REMOVED: usize = 60;
/// Files that get a new mtime and nothing else.
const TOUCHED: usize = 2000;
const CHMODDED: usize = 20;
/// Pages of a database that are written in place.
const PAGES: u64 = 64;
const PAGE_BYTES: u64 = 4096;
const LOG_BYTES: usize = 400_000;

/// Numbers that depend on nothing but a seed.
struct Random(blake3::OutputReader);

impl Random {
    fn new(seed: u64) -> Self {
        Self(blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof())
    }

    fn fill(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.fill(&mut bytes);
        bytes
    }

    fn next(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// Some of `from`, each once.
    fn some<'a>(&mut self, from: &'a [(PathBuf, u64)], count: usize) -> Vec<&'a Path> {
        let mut left: Vec<&Path> = from.iter().map(|(path, _)| path.as_path()).collect();
        let mut taken = Vec::new();
        while taken.len() < count && !left.is_empty() {
            let at = self.below(left.len() as u64) as usize;
            taken.push(left.swap_remove(at));
        }
        taken
    }
}

/// Words that compress like source text.
fn text(random: &mut Random, len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 16);
    while out.len() < len {
        let number = random.next();
        let part = format!("{:x} ", number >> (64 - [16, 24, 32][(number % 3) as usize]));
        out.extend_from_slice(part.as_bytes());
    }
    out.truncate(len);
    out
}

fn files_below(dir: &Path, found: &mut Vec<(PathBuf, u64)>) -> Outcome<()> {
    let mut entries = fs::read_dir(dir)?.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_unstable_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let metadata = entry.metadata()?;
        if metadata.is_dir() {
            files_below(&entry.path(), found)?;
        } else if metadata.is_file() {
            found.push((entry.path(), metadata.len()));
        }
    }
    Ok(())
}

/// The directory of a size that one job would rename (a package, a results directory), preferring `prefix`.
fn rename_one(parent: &Path, seed: u64, names_min: usize) -> Outcome<bool> {
    let mut candidates = BTreeMap::new();
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() && !name.starts_with('.') {
            let mut files = Vec::new();
            files_below(&entry.path(), &mut files)?;
            if (names_min..names_min * 20).contains(&files.len()) {
                candidates.insert(name, entry.path());
            }
        }
    }
    let Some((name, path)) = candidates.pop_first() else { return Ok(false) };
    let stem = name.split('~').next().unwrap_or(&name).to_owned();
    fs::rename(path, parent.join(format!("{stem}~{seed}")))?;
    Ok(true)
}

pub(crate) fn mutate(home: &Path, seed: u64) -> Outcome<Value> {
    let mut random = Random::new(9000 + seed);
    let mut files = Vec::new();
    files_below(home, &mut files)?;
    let is_source = |(path, size): &(PathBuf, u64)| {
        let text = path.to_string_lossy();
        let kept_apart = text.contains("/.npm/") || text.contains("/.git/");
        (101..200_000).contains(size)
            && !kept_apart
            && [".ts", ".js", ".json", ".md", ".py", ".rs"].iter().any(|end| text.ends_with(end))
    };
    let sources: Vec<(PathBuf, u64)> = files.iter().filter(|file| is_source(file)).cloned().collect();
    let edited = random.some(&sources, EDITED);
    for path in &edited {
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let at = if random.below(10) < 7 { random.below(bytes.len() as u64) as usize } else { bytes.len() };
        bytes.splice(at..at, format!("\n// edit {}\n", random.below(1 << 40)).into_bytes());
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&bytes)?;
    }
    let blob = text(&mut random, 1_500_000);
    let (mut new_files, mut new_bytes) = (0_u64, 0_u64);
    let job = home.join(format!("job-{seed}"));
    while new_bytes < NEW_TEXT_BYTES {
        // A Pareto distribution of exponent 0.8, as file sizes have it.
        let uniform = (random.below(1 << 30) + 1) as f64 / f64::from(1 << 30);
        let size = (uniform.powf(-1.25) * 3000.0).min(1_400_000.0) as usize;
        let from = random.below((blob.len() - size) as u64) as usize;
        let dir = job.join(format!("d{}", new_files % 17));
        fs::create_dir_all(&dir)?;
        let mut bytes = format!("{seed} {new_files}\n").into_bytes();
        bytes.extend_from_slice(&blob[from..from + size]);
        if new_files % 2 == 1 {
            bytes.reverse();
        }
        let end = ["json", "ts", "log", "md"][(new_files % 4) as usize];
        fs::write(dir.join(format!("f{new_files}.{end}")), &bytes)?;
        new_files += 1;
        new_bytes += bytes.len() as u64;
    }
    fs::write(job.join("capture.bin"), random.fill(NEW_NOISE_BYTES))?;
    let removed = random.some(&sources, REMOVED);
    for path in &removed {
        fs::remove_file(path)?;
    }
    let touched = random.some(&files, TOUCHED);
    for path in touched.iter().filter(|path| path.exists()) {
        let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        let times = rustix::fs::Timestamps { last_access: now, last_modification: now };
        rustix::fs::utimensat(rustix::fs::CWD, *path, &times, rustix::fs::AtFlags::empty())?;
    }
    let chmodded = random.some(&sources, CHMODDED);
    for path in chmodded.iter().filter(|path| path.exists()) {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    let renamed_root = rename_one(home, seed, 20)?;
    let packages = home.join("repos/tool/node_modules");
    let renamed_package = packages.is_dir() && rename_one(&packages, seed, 300)?;
    let database = home.join(".agent/session.db");
    let database_is_there = database.is_file();
    if database_is_there {
        let file = OpenOptions::new().write(true).open(&database)?;
        let pages = (file.metadata()?.len() / PAGE_BYTES).max(1);
        for _ in 0..PAGES {
            file.write_all_at(&random.fill(PAGE_BYTES as usize), random.below(pages) * PAGE_BYTES)?;
        }
    }
    let log = home.join(".agent/build.log");
    fs::create_dir_all(home.join(".agent"))?;
    OpenOptions::new().create(true).append(true).open(log)?.write_all(&blob[..LOG_BYTES])?;
    Ok(json!({
        "edited": edited.len(), "new_files": new_files + 1, "new_bytes": new_bytes + NEW_NOISE_BYTES as u64,
        "removed": removed.len(), "touched": touched.len(), "chmodded": chmodded.len(),
        "renamed_directories": u32::from(renamed_root) + u32::from(renamed_package),
        "database_pages": if database_is_there { PAGES } else { 0 }, "log_bytes": LOG_BYTES,
    }))
}

/// Files in a directory of the generated tree, and directories below one.
const FAN_OUT: u64 = 100;

/// A tree of about `entries` entries: in three of ten files nothing, in the others a few bytes that are nowhere
/// else.
pub(crate) fn generate(dir: &Path, entries: u64) -> Outcome<Value> {
    let long_ago = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_600_000_000);
    let mut made = 0;
    let mut group = 0;
    while made < entries {
        let path = dir.join(format!("group-{}/package-{group}", group / FAN_OUT));
        fs::create_dir_all(&path)?;
        made += 1;
        for number in 0..FAN_OUT {
            let file = File::create(path.join(format!("module-{number}.txt")))?;
            if number % 10 >= 3 {
                let line =
                    format!("export const id = \"{group}/{number}\";\n").repeat(1 + (number % 5) as usize);
                file.write_all_at(line.as_bytes(), 0)?;
            }
            file.set_modified(long_ago)?;
            made += 1;
        }
        group += 1;
    }
    Ok(json!({ "entries": made, "directories": group }))
}
