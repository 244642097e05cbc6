//! A place to mount a home in, which takes everything away again.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use covey_home::{Excludes, MemoryStore, NoProgress, SecureReport, SecureRequest};
use covey_mount::{Cache, MountError, MountReport, MountRequest, MountedHome, SecureMounted};
use covey_types::RootHash;

pub(crate) struct Ground {
    scratch: tempfile::TempDir,
    pub(crate) store: MemoryStore,
    pub(crate) excludes: Excludes,
}

impl Ground {
    pub(crate) fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        covey_mount::probe(scratch.path()).expect("the host mounts homes");
        fs::create_dir(scratch.path().join("home")).unwrap();
        Self { scratch, store: MemoryStore::new(), excludes: Excludes::none() }
    }

    pub(crate) fn path(&self) -> &Path {
        self.scratch.path()
    }

    /// A plain directory, to be secured as the base.
    pub(crate) fn home(&self) -> PathBuf {
        self.path().join("home")
    }

    pub(crate) fn mounted(&self) -> PathBuf {
        self.path().join("mounted")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.path().join("state")
    }

    pub(crate) fn cache(&self) -> Cache {
        Cache::open(&self.path().join("cache"), None).unwrap()
    }

    pub(crate) fn scan(&self, dir: &Path) -> SecureReport {
        covey_home::secure(&SecureRequest {
            dir,
            store: &self.store,
            stat_cache: None,
            excludes: &self.excludes,
            previous: None,
            cancel: &AtomicBool::new(false),
            progress: &NoProgress,
            threads: 2,
        })
        .unwrap()
    }

    /// Secures the plain directory and mounts the result.
    pub(crate) fn mount_home(&self) -> (MountedHome, RootHash) {
        let base = self.scan(&self.home()).root;
        (self.mount(base).unwrap().0, base)
    }

    pub(crate) fn mount(&self, root: RootHash) -> Result<(MountedHome, MountReport), MountError> {
        let cache = self.cache();
        MountedHome::mount(&self.request(root, &cache, &self.mounted(), &self.state()))
    }

    pub(crate) fn request<'a>(
        &'a self,
        root: RootHash,
        cache: &'a Cache,
        dir: &'a Path,
        state: &'a Path,
    ) -> MountRequest<'a> {
        static NEVER: AtomicBool = AtomicBool::new(false);
        MountRequest {
            root,
            dir,
            state,
            cache,
            store: &self.store,
            owner: (0, 0),
            excludes: &self.excludes,
            discard: false,
            cancel: &NEVER,
            progress: &NoProgress,
            threads: 2,
        }
    }

    /// Secures by the upper directory and by a scan of what is mounted; both must come to the same.
    pub(crate) fn secure_both_ways(&self, home: &MountedHome) -> SecureReport {
        let cancel = AtomicBool::new(false);
        let request = SecureMounted {
            store: &self.store,
            excludes: &self.excludes,
            previous: None,
            cancel: &cancel,
            progress: &NoProgress,
            threads: 2,
        };
        let tracked = home.secure(&request).unwrap();
        let checked = home.cross_check(&request, tracked.root).unwrap();
        assert_eq!(checked.differences, Vec::<String>::new());
        assert_eq!(checked.scanned.root, tracked.root);
        assert_eq!((checked.scanned.files, checked.scanned.bytes), (tracked.files, tracked.bytes));
        let verified = covey_home::verify(&self.store, &tracked.root).unwrap();
        assert_eq!(verified.problems, Vec::<String>::new());
        tracked
    }

    pub(crate) fn umount(&self) {
        MountedHome::umount(&self.state(), false).unwrap();
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        match MountedHome::umount(&self.state(), true) {
            Ok(_) | Err(MountError::NoState { .. }) => {}
            Err(error) => eprintln!("{} stays mounted: {error}", self.mounted().display()),
        }
    }
}
