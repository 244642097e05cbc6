//! Whether this host can mount homes, found out by mounting one.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_home::{Excludes, MemoryStore, NoProgress, SecureRequest};
use covey_types::RootHash;

use crate::cache::Cache;
use crate::home::{MountError, MountRequest, MountedHome, SecureMounted};

/// Why homes cannot be mounted here; they are copied instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("homes cannot be mounted: {missing}; {remedy}")]
pub struct Unsupported {
    /// What does not work.
    pub missing: String,
    /// What would make it work.
    pub remedy: &'static str,
}

const AS_ROOT: &str = "run covey as root; as an ordinary user homes are copied";
const KERNEL: &str = "it takes Linux 6.15 or newer with EROFS (CONFIG_EROFS_FS_BACKED_BY_FILE) and overlayfs";
const FILE_SYSTEM: &str = "put the data directory on ext4, xfs or btrfs, and not on an overlay or a tmpfs";

/// Mounts a small home below `dir`, changes it in the ways that need the kernel's help, secures it, and takes it
/// away again. `dir` is where caches and states will be, since what works depends on its file system.
///
/// # Errors
/// What does not work, with the remedy.
pub fn probe(dir: &Path) -> Result<(), Unsupported> {
    if !rustix::process::geteuid().is_root() {
        let missing = "only root may mount".to_owned();
        return Err(Unsupported { missing, remedy: AS_ROOT });
    }
    let place = dir.join(format!(".covey-mount-probe-{}", std::process::id()));
    let tried = attempt(&place);
    let cleared = match fs::remove_dir_all(&place) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    tried.and_then(|()| cleared.map_err(|error| broken("clearing up", &error)))
}

fn broken(what: &str, error: &dyn std::error::Error) -> Unsupported {
    let mut missing = format!("{what}: {error}");
    let mut source = error.source();
    while let Some(error) = source {
        missing.push_str(&format!(": {error}"));
        source = error.source();
    }
    let remedy = if missing.contains("asking the kernel for") { KERNEL } else { FILE_SYSTEM };
    Unsupported { missing, remedy }
}

fn attempt(place: &Path) -> Result<(), Unsupported> {
    let io = |what: &'static str| move |error: io::Error| broken(what, &error);
    let source = place.join("home");
    fs::create_dir_all(source.join("old/below")).map_err(io("making a directory"))?;
    fs::write(source.join("old/below/file"), "probe").map_err(io("writing a file"))?;
    fs::hard_link(source.join("old/below/file"), source.join("linked")).map_err(io("linking a file"))?;
    let store = MemoryStore::new();
    let (excludes, cancel) = (Excludes::none(), AtomicBool::new(false));
    let secured = covey_home::secure(&SecureRequest {
        dir: &source,
        store: &store,
        stat_cache: None,
        excludes: &excludes,
        previous: None,
        cancel: &cancel,
        progress: &NoProgress,
        threads: 1,
    });
    let root = secured.map_err(|error| broken("securing", &error))?.root;
    let cache = Cache::open(&place.join("cache"), None).map_err(|error| broken("the cache", &error))?;
    let state = place.join("state");
    let mounted = MountedHome::mount(&MountRequest {
        root,
        dir: &place.join("mounted"),
        state: &state,
        cache: &cache,
        store: &store,
        owner: (0, 0),
        excludes: &excludes,
        discard: false,
        cancel: &cancel,
        progress: &NoProgress,
        threads: 1,
    });
    let (home, _) = mounted.map_err(|error| broken("mounting", &error))?;
    let tried = change(&home, &store, &excludes, root);
    let unmounted: Result<_, MountError> = MountedHome::umount(&state, true);
    tried.and_then(|()| unmounted.map(|_| ()).map_err(|error| broken("unmounting", &error)))
}

/// A directory from below is renamed, an inode with two names written through one of them.
fn change(
    home: &MountedHome,
    store: &MemoryStore,
    excludes: &Excludes,
    root: RootHash,
) -> Result<(), Unsupported> {
    let dir = home.dir().to_owned();
    let work = || -> io::Result<String> {
        fs::rename(dir.join("old"), dir.join("new"))?;
        fs::File::options().append(true).open(dir.join("new/below/file"))?.write_all(b"d")?;
        fs::read_to_string(dir.join("linked"))
    };
    let found = work().map_err(|error| broken("renaming and writing", &error))?;
    if found != "probed" {
        let missing = "a file with two names became two files".to_owned();
        return Err(Unsupported { missing, remedy: KERNEL });
    }
    let cancel = AtomicBool::new(false);
    let request = SecureMounted {
        store,
        excludes,
        previous: Some(root),
        cancel: &cancel,
        progress: &NoProgress,
        threads: 1,
    };
    let secured = home.secure(&request).map_err(|error| broken("securing the change", &error))?;
    let checked = home
        .cross_check(&request, secured.root)
        .map_err(|error| broken("checking the secured change", &error))?;
    match checked.differences.first() {
        None if checked.scanned.root == secured.root => Ok(()),
        first => {
            let missing = format!("the change is not told rightly: {}", first.map_or("", String::as_str));
            Err(Unsupported { missing, remedy: KERNEL })
        }
    }
}
