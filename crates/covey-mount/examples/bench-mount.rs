//! Measures mounted homes as root and prints one JSON object: times in milliseconds, medians of several runs, the
//! page cache warm.
//!
//! `cargo run --release -p covey-mount --example bench-mount -- [--home DIR] [--entries N,N,…] [--manifest N]`:
//! `--home` measures on a real home (only read), `--entries` on generated ones of these sizes, `--manifest` only
//! writes the image of a made-up manifest, to show its memory. `--fill ROOT,STORE,CACHE` puts a state's contents into
//! a cache, `--share ROOT,STORE,CACHE,DIR` materializes it from there. Scratch files are made in `TMPDIR`.

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

use covey_home::manifest::{Blob, Content, Entry, EntryBody, ListingBuilder, Meta, Root, Time};
use covey_home::{
    Block, BlockStore, Excludes, MaterializeRequest, NoProgress, PackStore, SecureReport, SecureRequest,
};
use covey_mount::{Cache, FillRequest, Image, ImageRequest, MountRequest, MountedHome, SecureMounted};
use covey_types::{BlockHash, RootHash};
use serde_json::{Value, json};

type Outcome<T> = Result<T, Box<dyn Error>>;

const REPEATS: usize = 5;
const DEFAULT_ENTRIES: [u64; 3] = [10_000, 100_000, 200_000];
/// Files in a generated directory.
const FILES_PER_DIR: u64 = 20;
/// Files among which a job chooses what it changes.
const CHOICE: usize = 9_000;
static NEVER: AtomicBool = AtomicBool::new(false);

fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10_000.0).round() / 10.0
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

fn peak_resident_mib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: f64 = line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0.0);
    (kib / 102.4).round() / 10.0
}

/// User and system time of this process.
fn cpu_ms() -> Outcome<f64> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    Ok((ticks(11) + ticks(12)) * 10.0)
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

fn letters(seed: u64, len: usize) -> Vec<u8> {
    noise(seed, len).iter().map(|byte| b'a' + byte % 26).collect()
}

fn number(seed: u64, below: usize) -> usize {
    let mut eight = [0; 8];
    eight.copy_from_slice(&noise(seed, 8));
    (u64::from_le_bytes(eight) % below.max(1) as u64) as usize
}

/// The first directories are the same in homes of every size.
fn generate(home: &Path, entries: u64) -> Outcome<()> {
    for dir in 0..entries / (FILES_PER_DIR + 1) {
        let path = home.join(format!("group-{:05}/package-{dir}", dir / 100));
        fs::create_dir_all(&path)?;
        for file in 0..FILES_PER_DIR {
            let seed = dir * FILES_PER_DIR + file;
            fs::write(
                path.join(format!("file-{file}.txt")),
                letters(seed, 64).repeat(1 + (seed % 60) as usize),
            )?;
        }
    }
    Ok(())
}

fn scan(dir: &Path, store: &dyn BlockStore, cache: Option<&Path>) -> Outcome<SecureReport> {
    Ok(covey_home::secure(&SecureRequest {
        dir,
        store,
        stat_cache: cache,
        excludes: &Excludes::none(),
        previous: None,
        cancel: &NEVER,
        progress: &NoProgress,
        threads: 0,
    })?)
}

/// The first files and directories of a home, level by level.
fn choice(home: &Path) -> Outcome<(Vec<PathBuf>, Vec<PathBuf>)> {
    let (mut dirs, mut files) = (vec![home.to_owned()], Vec::new());
    let mut next = 0;
    while let Some(dir) = dirs.get(next).cloned() {
        let mut entries: Vec<_> = fs::read_dir(&dir)?.collect::<Result<_, _>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let kind = entry.file_type()?;
            if kind.is_dir() {
                dirs.push(entry.path());
            } else if kind.is_file() && entry.metadata()?.len() < 200_000 {
                files.push(entry.path());
            }
        }
        next += 1;
        if files.len() >= CHOICE {
            files.truncate(CHOICE);
            break;
        }
    }
    dirs.truncate(next);
    Ok((files, dirs))
}

/// One more job: 200 edits, 2000 touches, 20 chmods, 60 removals, two renamed directories, some 35 MB new.
fn mutate(home: &Path, seed: u64) -> Outcome<()> {
    let (files, dirs) = choice(home)?;
    let mut picks = (0..).map(|n| files[number(seed << 32 | n, files.len())].clone());
    let mut next = |count: usize| -> Vec<PathBuf> { picks.by_ref().take(count).collect() };
    for path in next(200) {
        File::options().append(true).open(path)?.write_all(b"\n// edit")?;
    }
    for path in next(2000) {
        File::open(path)?.set_modified(SystemTime::now())?;
    }
    for path in next(20) {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    for path in next(60) {
        match fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    for (at, dir) in dirs.iter().rev().take(2).enumerate() {
        fs::rename(dir, home.join(format!("zz-renamed-{seed}-{at}")))?;
    }
    let job = home.join(format!("zz-job-{seed}"));
    fs::create_dir(&job)?;
    for at in 0..700 {
        fs::write(job.join(format!("new-{at}")), letters(seed << 16 | at, 4096).repeat(number(at, 13)))?;
    }
    fs::write(job.join("capture.bin"), noise(seed, 18 << 20))?;
    Ok(())
}

/// `ls` of each directory down to the first file, and `cat` of it.
fn first_look(dir: &Path) -> Outcome<()> {
    let mut at = dir.to_owned();
    loop {
        let mut names: Vec<_> = fs::read_dir(&at)?.collect::<Result<_, _>>()?;
        names.sort_by_key(fs::DirEntry::file_name);
        let of_kind = |is: fn(&fs::FileType) -> bool| {
            names.iter().find(|entry| entry.file_type().is_ok_and(|kind| is(&kind))).map(fs::DirEntry::path)
        };
        if let Some(file) = of_kind(fs::FileType::is_file) {
            std::hint::black_box(fs::read(file)?);
            return Ok(());
        }
        at = of_kind(fs::FileType::is_dir).ok_or("a home without files")?;
    }
}

struct Bench<'a> {
    place: &'a Path,
    store: &'a PackStore,
    excludes: Excludes,
}

impl Bench<'_> {
    fn mount(&self, root: RootHash, cache: &Cache) -> Outcome<(MountedHome, covey_mount::MountReport)> {
        Ok(MountedHome::mount(&MountRequest {
            root,
            dir: &self.place.join("mounted"),
            state: &self.place.join("state"),
            cache,
            store: self.store,
            owner: (0, 0),
            excludes: &self.excludes,
            discard: true,
            cancel: &NEVER,
            progress: &NoProgress,
            threads: 0,
        })?)
    }

    fn umount(&self) -> Outcome<()> {
        MountedHome::umount(&self.place.join("state"), true)?;
        Ok(())
    }

    fn image(&self, root: RootHash, dir: &Path) -> Outcome<Image> {
        Ok(Image::prepare(
            &ImageRequest {
                root,
                store: self.store,
                owner: (0, 0),
                excludes: &self.excludes,
                cancel: &NEVER,
                progress: &NoProgress,
            },
            dir,
        )?)
    }

    /// `plain` is changed; it is secured by scans, with its stat cache.
    fn run(&self, plain: &Path, stat_cache: &Path) -> Outcome<Value> {
        scan(plain, self.store, Some(stat_cache))?;
        // Once more: what was written just before the first is no longer dirty then.
        let base = scan(plain, self.store, Some(stat_cache))?;
        let cache = Cache::open(&self.place.join("cache"), None)?;
        let images = self.place.join("images");
        fs::create_dir_all(&images)?;
        let mut image_ms = Vec::new();
        let mut facts = Value::Null;
        for _ in 0..3 {
            let start = Instant::now();
            let image = self.image(base.root, &images)?;
            image_ms.push(ms(start.elapsed()));
            facts = serde_json::to_value(image.facts())?;
            image.remove()?;
        }
        let start = Instant::now();
        let (_, first) = self.mount(base.root, &cache)?;
        let first_ms = ms(start.elapsed());
        let (mut mount_ms, mut ready_ms) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            self.umount()?;
            let start = Instant::now();
            self.mount(base.root, &cache)?;
            mount_ms.push(ms(start.elapsed()));
            first_look(&self.place.join("mounted"))?;
            ready_ms.push(ms(start.elapsed()));
        }
        self.umount()?;
        let (home, _) = self.mount(base.root, &cache)?;
        let (mut tracked_ms, mut scan_ms, mut cpu) = (Vec::new(), Vec::new(), Vec::new());
        let (mut read, mut scan_read, mut last) = (Vec::new(), Vec::new(), None);
        for seed in 0..3 {
            mutate(home.dir(), seed)?;
            mutate(plain, seed)?;
            let before = cpu_ms()?;
            let start = Instant::now();
            let tracked = home.secure(&SecureMounted {
                store: self.store,
                excludes: &self.excludes,
                previous: None,
                cancel: &NEVER,
                progress: &NoProgress,
                threads: 0,
            })?;
            tracked_ms.push(ms(start.elapsed()));
            cpu.push(cpu_ms()? - before);
            read.push(tracked.bytes_read);
            last = Some(tracked.root);
            let start = Instant::now();
            scan_read.push(scan(plain, self.store, Some(stat_cache))?.bytes_read);
            scan_ms.push(ms(start.elapsed()));
        }
        let checked = scan(home.dir(), self.store, None)?;
        self.umount()?;
        let (tracked_median, scan_median) = (median(tracked_ms.clone()), median(scan_ms.clone()));
        Ok(json!({
            "image": facts,
            "image_ms": median(image_ms),
            "first_mount_ms": first_ms,
            "first_mount_fetched": first.fetched,
            "first_mount_fetched_bytes": first.fetched_bytes,
            "mount_ms": median(mount_ms),
            "mount_ls_cat_ms": median(ready_ms),
            "tracked_secure_ms": tracked_median,
            "tracked_secure_each_ms": tracked_ms,
            "tracked_secure_cpu_ms": median(cpu),
            "tracked_bytes_read": read,
            "scan_secure_ms": scan_median,
            "scan_secure_each_ms": scan_ms,
            "scan_bytes_read": scan_read,
            "scan_by_tracked": (scan_median / tracked_median * 100.0).round() / 100.0,
            "tracked_is_right": Some(checked.root) == last,
        }))
    }
}

fn generated(entries: u64) -> Outcome<Value> {
    let scratch = tempfile::tempdir()?;
    let plain = scratch.path().join("plain");
    generate(&plain, entries)?;
    let store = PackStore::open_directory(&scratch.path().join("store"), "bench")?;
    let bench = Bench { place: scratch.path(), store: &store, excludes: Excludes::none() };
    bench.run(&plain, &scratch.path().join("stat-cache"))
}

fn real(home: &Path) -> Outcome<Value> {
    let scratch = tempfile::tempdir()?;
    let store = PackStore::open_directory(&scratch.path().join("store"), "bench")?;
    let base = scan(home, &store, None)?;
    let (plain, stat_cache) = (scratch.path().join("plain"), scratch.path().join("stat-cache"));
    covey_home::materialize(&MaterializeRequest {
        root: base.root,
        dir: &plain,
        store: &store,
        stat_cache: Some(&stat_cache),
        excludes: &Excludes::none(),
        owner: None,
        cancel: &NEVER,
        progress: &NoProgress,
        threads: 0,
    })?;
    let bench = Bench { place: scratch.path(), store: &store, excludes: Excludes::none() };
    bench.run(&plain, &stat_cache)
}

/// The image of a manifest that nobody secured: names and hashes, no contents.
fn made_up(entries: u64) -> Outcome<Value> {
    const DIRS_PER_GROUP: u64 = 1_000;
    let scratch = tempfile::tempdir()?;
    let open = || PackStore::open_directory(&scratch.path().join("store"), "bench");
    let store = open()?;
    let meta = Meta { mode: 0o755, mtime: Time { seconds: 1, nanoseconds: 2 }, xattrs: Blob::empty() };
    let upload = store.upload()?;
    let put = |bytes: &[u8]| -> Outcome<BlockHash> {
        let block = Block::of(bytes)?;
        upload.put(&block)?;
        Ok(block.hash())
    };
    let dir = |builder: ListingBuilder| -> Outcome<Vec<u8>> {
        let body = EntryBody::Directory { listing: builder.finish(put)? };
        Ok(Entry { meta: meta.clone(), body }.encode())
    };
    let mut top = ListingBuilder::default();
    for group in 0..entries / (DIRS_PER_GROUP * (FILES_PER_DIR + 1)) {
        let mut middle = ListingBuilder::default();
        for number in 0..DIRS_PER_GROUP {
            let mut listing = ListingBuilder::default();
            for file in 0..FILES_PER_DIR {
                let seed = (group * DIRS_PER_GROUP + number) * FILES_PER_DIR + file;
                let content = Content::Whole { size: 9_000, block: BlockHash::of(&seed.to_le_bytes()) };
                let entry = Entry { meta: meta.clone(), body: EntryBody::File(content) };
                listing.push(format!("file-{file:02}.ts").as_bytes(), &entry.encode());
            }
            middle.push(format!("package-{number:04}").as_bytes(), &dir(listing)?);
        }
        top.push(format!("group-{group:04}").as_bytes(), &dir(middle)?);
    }
    let listing = top.finish(put)?;
    let root = put(&Root { meta, listing, files: 0, bytes: 0, links: Blob::empty() }.encode())?;
    upload.finish()?;
    drop(store);
    let store = open()?;
    let before = peak_resident_mib();
    let bench = Bench { place: scratch.path(), store: &store, excludes: Excludes::none() };
    let start = Instant::now();
    let image = bench.image(RootHash::from_bytes(*root.as_bytes()), scratch.path())?;
    Ok(json!({
        "image": image.facts(),
        "image_ms": ms(start.elapsed()),
        "peak_resident_before_mib": before,
        "peak_resident_mib": peak_resident_mib(),
    }))
}

fn filled(root: &str, store: &str, cache: &Path) -> Outcome<Value> {
    let store = PackStore::open_directory(Path::new(store), "bench")?;
    let cache = Cache::open(cache, None)?;
    let excludes = Excludes::none();
    let root = root.parse().map_err(|_| "not a root")?;
    let (cancel, progress) = (&NEVER, &NoProgress);
    let image = Image::prepare(
        &ImageRequest { root, store: &store, owner: (0, 0), excludes: &excludes, cancel, progress },
        &cache.images(),
    )?;
    let report = cache.fill(&FillRequest { image: &image, store: &store, cancel, progress, threads: 0 })?;
    if report.gap_count > 0 {
        return Err("not everything could be fetched".into());
    }
    Ok(json!({"fetched": report.fetched, "fetched_bytes": report.fetched_bytes}))
}

fn shared(root: &str, store: &str, cache: &Path, dir: &Path) -> Outcome<Value> {
    let store = PackStore::open_directory(Path::new(store), "bench")?;
    let cache = Cache::open(cache, None)?;
    let request = MaterializeRequest {
        root: root.parse().map_err(|_| "not a root")?,
        dir,
        store: &store,
        stat_cache: None,
        excludes: &Excludes::none(),
        owner: None,
        cancel: &NEVER,
        progress: &NoProgress,
        threads: 0,
    };
    Ok(serde_json::to_value(covey_home::materialize_sharing(&request, Some(&cache))?)?)
}

fn main() -> Outcome<()> {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--json");
    let mut sizes: Vec<u64> = DEFAULT_ENTRIES.to_vec();
    while let Some(arg) = args.next() {
        let value = args.next().ok_or("an option without a value")?;
        match arg.as_str() {
            "--home" => {
                let home = real(Path::new(&value))?;
                println!("{}", json!({"homes": [home], "peak_resident_mib": peak_resident_mib()}));
                return Ok(());
            }
            "--manifest" => {
                println!("{}", json!({"manifest": made_up(value.parse()?)?}));
                return Ok(());
            }
            "--fill" | "--share" => {
                let said = match value.split(',').collect::<Vec<_>>().as_slice() {
                    [root, store, cache] => filled(root, store, Path::new(cache))?,
                    [root, store, cache, dir] => shared(root, store, Path::new(cache), Path::new(dir))?,
                    _ => return Err("three or four values, with commas between them".into()),
                };
                println!("{said}");
                return Ok(());
            }
            "--entries" => sizes = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            other => return Err(format!("there is no option {other}").into()),
        }
    }
    let homes = sizes.iter().map(|entries| generated(*entries)).collect::<Outcome<Vec<_>>>()?;
    println!("{}", json!({"homes": homes, "peak_resident_mib": peak_resident_mib()}));
    Ok(())
}
