//! Secures a directory into a bucket and says how many requests that took, as one line of JSON.
//!
//! `secure-to-bucket DIR s3://BUCKET/PREFIX LOCAL_DIR`; endpoint and key come from the environment as for `covey`. A
//! bench calls it once for a first secure and again for an unchanged one.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use covey_bucket::{Access, BucketStore, OpenOptions, Patience, Settings};
use covey_home::{Excludes, NoProgress, PackStore, Pointers, SecureRequest, secure_and_publish};
use covey_types::FencingToken;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, place, local] = arguments.as_slice() else {
        return Err("usage: secure-to-bucket DIR s3://BUCKET/PREFIX LOCAL_DIR".into());
    };
    let local = Path::new(local);
    let settings = Settings::from_environment(&|name| std::env::var(name).ok())?;
    let options = OpenOptions {
        settings: &settings,
        access: Access::Write,
        patience: Patience::default(),
        local_dir: Some(local),
        probe_again: false,
    };
    let bucket = BucketStore::open(&place.parse()?, &options)?;
    let probed = bucket.requests().count();
    let backend = bucket.backend("bench")?;
    let store = PackStore::open(Arc::clone(&backend))?;
    let pointers = Pointers::on(backend);
    let stat_cache = local.join("stat-cache");
    let request = SecureRequest {
        dir: Path::new(dir),
        store: &store,
        excludes: &Excludes::none(),
        stat_cache: Some(&stat_cache),
        previous: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 0,
    };
    let report = secure_and_publish(&request, &pointers, "home", FencingToken(1))?;
    println!(
        "{{\"requests\":{},\"requests_probe\":{probed},\"packs\":{},\"stored_bytes_new\":{},\"bytes_read\":{},\"elapsed_ms\":{},\
         \"root\":\"{}\"}}",
        bucket.requests().count(),
        store.packs()?.len(),
        report.stored_bytes_new,
        report.bytes_read,
        report.elapsed_ms,
        report.root,
    );
    Ok(())
}
