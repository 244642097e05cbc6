//! How a store of many blocks answers: `fill DIR BLOCKS BLOCK_BYTES` makes one, `ask DIR HASHES` opens it and asks which
//! of so many blocks are missing, half of which are there. One JSON object each; times are of this process, requests
//! are calls to the place where the store's files lie.

#![forbid(unsafe_code)]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use covey_home::backend::{
    Backend, BackendError, DirectoryBackend, Expected, Key, NewFile, PutOutcome, Tail, Versioned,
};
use covey_home::{Block, BlockStore as _, PackStore};
use covey_types::BlockHash;
use serde_json::json;

const ORG: &str = "org";
/// As a secure asks.
const HASHES_PER_QUESTION: usize = 65_536;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["fill", dir, blocks, bytes] => fill(Path::new(dir), blocks.parse()?, bytes.parse()?),
        ["ask", dir, hashes] => ask(Path::new(dir), hashes.parse()?),
        _ => Err("usage: bench-store fill DIR BLOCKS BLOCK_BYTES | ask DIR HASHES".into()),
    }
}

/// The bytes of a block: not compressible, and different for each number.
fn content(number: u64, bytes: &mut [u8]) {
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(bytes);
}

fn fill(dir: &Path, blocks: u64, block_bytes: usize) -> Result<()> {
    let began = Instant::now();
    let store = PackStore::open_directory(dir, ORG)?;
    let upload = store.upload()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    std::thread::scope(|scope| {
        let fillers: Vec<_> = (0..threads)
            .map(|thread| {
                let upload = &upload;
                scope.spawn(move || -> std::result::Result<(), covey_home::StoreError> {
                    let mut bytes = vec![0; block_bytes];
                    for number in (thread..blocks).step_by(threads as usize) {
                        content(number, &mut bytes);
                        upload.put(&Block::of(&bytes)?)?;
                    }
                    Ok(())
                })
            })
            .collect();
        fillers.into_iter().try_for_each(|filler| {
            filler.join().map_err(|_| "a filler panicked")?.map_err(Box::<dyn Error>::from)
        })
    })?;
    let report = upload.finish()?;
    println!(
        "{}",
        json!({
            "blocks": report.blocks_new, "bytes": report.bytes_new, "stored_bytes": report.stored_bytes_new,
            "elapsed_ms": began.elapsed().as_millis() as u64, "peak_mib": peak_mib()?,
        })
    );
    Ok(())
}

fn ask(dir: &Path, hashes: u64) -> Result<()> {
    let found = PackStore::open_directory(dir, ORG)?;
    // Which are there: spread over all packs, taken from their indexes.
    let packs = found.packs()?;
    let per_pack = (hashes / 2).div_ceil(packs.len().max(1) as u64) as usize;
    let mut wanted: Vec<BlockHash> = Vec::with_capacity(hashes as usize);
    for pack in &packs {
        let contents = found.pack_contents(pack)?.ok_or("a pack is gone")?;
        let step = (contents.blocks.len() / per_pack.max(1)).max(1);
        wanted.extend(contents.blocks.iter().step_by(step).take(per_pack).map(|block| block.hash));
    }
    wanted.truncate(hashes as usize / 2);
    let there = wanted.len();
    wanted.extend(
        (0..hashes - there as u64).map(|number| BlockHash::of(&[number.to_le_bytes(), [0xff; 8]].concat())),
    );
    wanted.sort_unstable();
    drop(found);
    let calls = Arc::new(AtomicU64::new(0));
    let inner = DirectoryBackend::open(dir, ORG)?;
    let began = Instant::now();
    let store = PackStore::open(Arc::new(Counting { inner, calls: Arc::clone(&calls) }))?;
    let opened_ms = began.elapsed().as_secs_f64() * 1000.0;
    let opening = calls.swap(0, Ordering::SeqCst);
    let began = Instant::now();
    let (mut missing, mut questions) = (0, 0);
    for part in wanted.chunks(HASHES_PER_QUESTION) {
        missing += store.missing(part)?.len();
        questions += 1;
    }
    println!(
        "{}",
        json!({
            "packs": packs.len(), "hashes": hashes, "there": there, "missing": missing,
            "right": missing as u64 == hashes - there as u64, "questions": questions,
            "open_ms": opened_ms, "open_requests": opening,
            "ask_ms": began.elapsed().as_secs_f64() * 1000.0, "ask_requests": calls.load(Ordering::SeqCst),
            "peak_mib": peak_mib()?,
        })
    );
    Ok(())
}

/// Largest resident size of this process.
fn peak_mib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<u64>()? / 1024)
}

/// Counts calls.
#[derive(Debug)]
struct Counting {
    inner: DirectoryBackend,
    calls: Arc<AtomicU64>,
}

impl Counting {
    fn counted(&self) -> &DirectoryBackend {
        self.calls.fetch_add(1, Ordering::SeqCst);
        &self.inner
    }
}

impl Backend for Counting {
    fn place(&self) -> String {
        self.inner.place()
    }
    fn is_remote(&self) -> bool {
        self.inner.is_remote()
    }
    fn cache_dir(&self) -> Option<PathBuf> {
        self.inner.cache_dir()
    }
    fn list(&self, dir: &Key) -> std::result::Result<Vec<String>, BackendError> {
        self.counted().list(dir)
    }
    fn list_dirs(&self, dir: &Key) -> std::result::Result<Vec<String>, BackendError> {
        self.counted().list_dirs(dir)
    }
    fn file_len(&self, key: &Key) -> std::result::Result<u64, BackendError> {
        self.counted().file_len(key)
    }
    fn read(&self, key: &Key, offset: u64, len: usize) -> std::result::Result<Vec<u8>, BackendError> {
        self.counted().read(key, offset, len)
    }
    fn read_tail(&self, key: &Key, len: usize) -> std::result::Result<Tail, BackendError> {
        self.counted().read_tail(key, len)
    }
    fn create(&self) -> std::result::Result<Box<dyn NewFile>, BackendError> {
        self.counted().create()
    }
    fn flush(&self, dir: &Key) -> std::result::Result<(), BackendError> {
        self.counted().flush(dir)
    }
    fn remove(&self, key: &Key) -> std::result::Result<bool, BackendError> {
        self.counted().remove(key)
    }
    fn get(&self, key: &Key) -> std::result::Result<Option<Versioned>, BackendError> {
        self.counted().get(key)
    }
    fn put_if(
        &self,
        key: &Key,
        bytes: &[u8],
        expected: &Expected,
    ) -> std::result::Result<PutOutcome, BackendError> {
        self.counted().put_if(key, bytes, expected)
    }
}
