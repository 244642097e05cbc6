//! `covey home mount`, `umount`, and `secure` of what is mounted.
//!
//! Beside the org's blocks stand the contents that mounts read from (`mount-cache/`, one per org) and each mounted
//! home's changes (`mounts/`, one per home and directory).

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use clap::Args;
use covey_home::{Pointers, SecureReport};
use covey_mount::{Cache, MountReport, MountRequest, MountedHome, SecureMounted};
use covey_types::{BlockHash, ByteCount, Fault, FencingToken, Generation, RootHash};

use super::StorePlace;
use super::local::{LocalStore, owner_to_keep, report_to_people};
use crate::exit_code::Refusal;
use crate::global::Global;
use crate::output::{self, card, one_line};
use crate::progress::Progress;

/// Options of `covey home mount` beside the state to mount.
#[derive(Debug, Args)]
pub(crate) struct MountOptions {
    /// Where contents are kept for mounts to read, on ext4, xfs or btrfs [default: in the store's directory].
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Bytes that contents may take; what mounted homes need stays beyond it.
    #[arg(long, value_name = "BYTES")]
    cache_limit: Option<u64>,
    /// Where the home's changes are kept [default: in the store's directory].
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Throw away changes that were made on another state.
    #[arg(long)]
    discard: bool,
}

pub(super) fn mount(
    global: &Global,
    dir: &Path,
    place: &StorePlace,
    local: &LocalStore,
    root: RootHash,
    options: &MountOptions,
) -> anyhow::Result<()> {
    if local.is_encrypted() && (options.cache.is_none() || options.state.is_none()) {
        let text = "the store is encrypted, and a mounted home lies plain: say --cache DIR and --state DIR outside of it";
        return Err(Refusal::new(Fault::Invalid, text).into());
    }
    covey_home::name::check_name(&place.home)?;
    let cache_dir =
        options.cache.clone().unwrap_or_else(|| local.local_dir().join("mount-cache").join(&place.org));
    let state = match &options.state {
        Some(state) => state.clone(),
        None => {
            let name = BlockHash::of(std::path::absolute(dir)?.as_os_str().as_bytes()).to_string();
            local.local_dir().join("mounts").join(&place.org).join(&place.home).join(&name[..32])
        }
    };
    for parent in state.parent().into_iter().chain(cache_dir.parent()) {
        std::fs::create_dir_all(parent).with_context(|| format!("{} cannot be made", parent.display()))?;
    }
    let cache = Cache::open_keyed(&cache_dir, options.cache_limit, *local.blocks().hasher())?;
    let progress = Progress::start("mounting");
    let (_, report) = MountedHome::mount(&MountRequest {
        root,
        dir,
        state: &state,
        cache: &cache,
        store: local.blocks(),
        owner: owner_to_keep(dir).unwrap_or((0, 0)),
        excludes: local.excludes(),
        discard: options.discard,
        cancel: &AtomicBool::new(false),
        progress: &progress,
        threads: 0,
    })
    .with_context(|| format!("mounting at {}", dir.display()))?;
    drop(progress);
    output::value(global.json, &serde_json::to_value(&report)?, |_| mounted_text(&report))?;
    // After the answer: nobody waits for it.
    if report.fetched > 0 {
        cache.sync()?;
    }
    if options.cache_limit.is_some() && cache.trim()?.is_some_and(|trimmed| trimmed.over_limit) {
        eprintln!("warning: mounted homes need more than --cache-limit allows");
    }
    let Some(first) = report.gaps.first() else { return Ok(()) };
    let text = format!(
        "mounted, but {} contents are not to be had and their files cannot be read, first {}: {}",
        report.gap_count, first.path, first.reason
    );
    Err(Refusal::new(first.fault, text).into())
}

fn mounted_text(report: &MountReport) -> String {
    let what = match (report.already, report.continued) {
        (true, _) => "was mounted already",
        (_, true) => "with the changes of the earlier mount",
        _ => "without changes",
    };
    card(&[
        ("root", report.root.to_string()),
        ("mounted", what.to_owned()),
        ("files", format!("{}, {}", report.files, ByteCount(report.bytes))),
        ("image", ByteCount(report.image_bytes).to_string()),
        ("fetched", format!("{}, {}", report.fetched, ByteCount(report.fetched_bytes))),
        ("time", format!("{} ms", report.elapsed_ms)),
    ])
}

pub(super) fn umount(global: &Global, dir: &Path, state: Option<&Path>, discard: bool) -> anyhow::Result<()> {
    let state = match state {
        Some(state) => state.to_owned(),
        None => MountedHome::state_at(dir)?.ok_or_else(|| {
            let text = format!("no home is mounted at {}; name its changes with --state", dir.display());
            Refusal::new(Fault::NotFound, text)
        })?,
    };
    let report = MountedHome::umount(&state, discard)?;
    output::value(global.json, &serde_json::to_value(&report)?, |_| {
        let kept = if report.discarded { "thrown away" } else { "kept for the next mount" };
        format!("unmounted; its changes are {kept}")
    })?;
    Ok(())
}

/// Secures and publishes what changed in the home that is mounted at `dir`; none: no home is mounted there, or
/// its change cannot be told and it has to be scanned.
pub(super) fn secure_and_publish(
    local: &LocalStore,
    dir: &Path,
    home: &str,
    pointers: &Pointers,
    token: FencingToken,
    check: bool,
) -> anyhow::Result<Option<SecureReport>> {
    let Some(mounted) = MountedHome::state_at(dir)?.and_then(|state| MountedHome::open(&state)) else {
        return Ok(None);
    };
    let current = pointers.current(home)?;
    let progress = Progress::start("securing");
    let cancel = AtomicBool::new(false);
    let request = SecureMounted {
        store: local.blocks(),
        excludes: local.excludes(),
        previous: current.map(|pointer| pointer.root),
        cancel: &cancel,
        progress: &progress,
        threads: 0,
    };
    let mut report = match mounted.secure(&request) {
        Ok(report) => report,
        Err(error) if error.scan_may_help() => {
            eprintln!("warning: {}; scanning", one_line(&error.to_string()));
            return Ok(None);
        }
        Err(error) => return Err(error).with_context(|| format!("securing {}", dir.display())),
    };
    if check {
        let checked = mounted.cross_check(&request, report.root)?;
        if checked.scanned.root != report.root {
            for difference in &checked.differences {
                eprintln!("differs: {}", one_line(difference));
            }
            let text = "a scan finds another state than the tracked change: not published, please report it";
            return Err(Refusal::new(Fault::Bug, text).into());
        }
    }
    drop(progress);
    report_to_people(&report);
    let base = current.map_or_else(Generation::default, |pointer| pointer.generation);
    let published = match current.filter(|current| current.root == report.root && current.token >= token) {
        Some(current) => current,
        None => pointers.publish(home, report.root, base, token, report.epoch)?,
    };
    report.generation = Some(published.generation);
    Ok(Some(report))
}
