//! The cache behind mounted homes: what is kept, what goes, and what happens when something is not to be had.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use covey_home::manifest::Content;
use covey_mount::{Cache, ContentId, FillRequest, MountedHome};
use covey_types::BlockHash;

use crate::ground::Ground;

const BODY: usize = 100_000;

fn body(seed: u8) -> Vec<u8> {
    (0..BODY).map(|at| (at as u8).wrapping_mul(31) ^ seed).collect()
}

fn id(bytes: &[u8]) -> ContentId {
    let (size, block) = (bytes.len() as u64, BlockHash::of(bytes));
    ContentId::of(&Content::Whole { size, block }).unwrap()
}

#[test]
fn a_content_is_one_private_file_that_no_home_shares() {
    let ground = Ground::new();
    fs::write(ground.home().join("a"), body(1)).unwrap();
    fs::write(ground.home().join("b"), body(1)).unwrap();
    ground.mount_home();
    let cached = ground.cache().path_of(&id(&body(1)));
    let metadata = fs::metadata(&cached).unwrap();
    assert_eq!((metadata.mode() & 0o7777, metadata.nlink()), (0o400, 1));
    let at = ground.mounted();
    fs::set_permissions(at.join("a"), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(at.join("a"), b"changed").unwrap();
    assert_eq!(fs::read(at.join("b")).unwrap(), body(1));
    assert_eq!(fs::read(&cached).unwrap(), body(1), "a home never writes into the cache");
    assert_eq!(fs::metadata(&cached).unwrap().mode() & 0o7777, 0o400);
}

#[test]
fn what_a_mounted_image_needs_is_never_trimmed() {
    let ground = Ground::new();
    let dir = ground.path().join("cache");
    let limited = |bytes| Cache::open(&dir, Some(bytes)).unwrap();
    // Three states: the first is unmounted, the second mounted, both have one content of their own.
    fs::write(ground.home().join("shared"), body(0)).unwrap();
    fs::write(ground.home().join("own"), body(1)).unwrap();
    let (home, _) = ground.mount_home();
    ground.umount();
    let first_image = fs::read_dir(ground.cache().images()).unwrap().count();
    fs::write(ground.home().join("own"), body(2)).unwrap();
    let second = ground.scan(&ground.home()).root;
    let (cache, at, state) = (ground.cache(), ground.mounted(), ground.path().join("state-2"));
    MountedHome::mount(&ground.request(second, &cache, &at, &state)).unwrap();

    let report = limited(1 << 40).trim().unwrap().unwrap();
    assert_eq!((report.contents, report.images, report.removed), (3, 2, 0));
    let report = limited(1).trim().unwrap().unwrap();
    assert_eq!((report.contents, report.images, report.removed), (2, 1, 1));
    assert!(report.over_limit, "mounted homes are not broken for a limit");
    assert_eq!(fs::read_dir(ground.cache().images()).unwrap().count(), first_image);
    assert_eq!(fs::read(at.join("own")).unwrap(), body(2));
    assert!(!cache.path_of(&id(&body(1))).exists());

    // What was trimmed is fetched again; then both homes are as they were.
    let other = ground.path().join("other");
    let (again, report) =
        MountedHome::mount(&ground.request(home.base(), &cache, &other, &ground.state())).unwrap();
    assert_eq!((report.fetched, report.fetched_bytes), (1, BODY as u64));
    assert_eq!(fs::read(other.join("own")).unwrap(), body(1));
    assert_eq!(again.base(), home.base());
    let report = limited(1).trim().unwrap().unwrap();
    assert_eq!((report.contents, report.removed), (3, 0));
    MountedHome::umount(&state, true).unwrap();
    assert_eq!(limited(1).trim().unwrap().unwrap().removed, 1);
}

#[test]
fn a_second_mount_fetches_nothing() {
    let ground = Ground::new();
    fs::write(ground.home().join("a"), body(1)).unwrap();
    fs::write(ground.home().join("large"), vec![1; 9 << 20]).unwrap();
    let base = ground.scan(&ground.home()).root;
    let (_, report) = ground.mount(base).unwrap();
    assert_eq!((report.fetched, report.fetched_bytes), (2, BODY as u64 + (9 << 20)));
    ground.umount();
    let (_, report) = ground.mount(base).unwrap();
    assert_eq!((report.fetched, report.continued), (0, true));
    // Not even the store is asked.
    ground.umount();
    ground.store.set_unavailable(true);
    let (_, report) = ground.mount(base).unwrap();
    assert_eq!(report.gap_count, 0);
    assert_eq!(fs::read(ground.mounted().join("a")).unwrap(), body(1));
    ground.store.set_unavailable(false);
}

#[test]
fn a_content_that_is_not_to_be_had_is_named_and_never_becomes_wrong_bytes() {
    let ground = Ground::new();
    fs::write(ground.home().join("lost"), body(1)).unwrap();
    fs::write(ground.home().join("here"), body(2)).unwrap();
    let base = ground.scan(&ground.home()).root;
    assert!(ground.store.remove(&BlockHash::of(&body(1))));
    let (home, report) = ground.mount(base).unwrap();
    assert_eq!(report.gap_count, 1);
    assert_eq!(report.gaps[0].path, id(&body(1)).to_string());
    let at = ground.mounted();
    assert_eq!(fs::read(at.join("here")).unwrap(), body(2));
    assert!(fs::read(at.join("lost")).is_err());
    // The next secure does not make the loss final.
    fs::write(at.join("new"), b"n").unwrap();
    let cancel = std::sync::atomic::AtomicBool::new(false);
    let request = covey_mount::SecureMounted {
        store: &ground.store,
        excludes: &ground.excludes,
        previous: None,
        cancel: &cancel,
        progress: &covey_home::NoProgress,
        threads: 1,
    };
    let secured = home.secure(&request).unwrap();
    assert_eq!(secured.files, 3);
    // Found again, it is fetched at the next mount.
    let upload = covey_home::BlockStore::upload(&ground.store).unwrap();
    upload.put(&covey_home::Block::of(&body(1)).unwrap()).unwrap();
    upload.finish().unwrap();
    ground.umount();
    let (_, report) = ground.mount(secured.root).unwrap();
    assert_eq!((report.gap_count, report.fetched), (0, 1));
    assert_eq!(fs::read(at.join("lost")).unwrap(), body(1));
}

#[test]
fn what_is_not_here_yet_is_known_before_it_is_fetched() {
    let ground = Ground::new();
    fs::write(ground.home().join("a"), body(1)).unwrap();
    fs::write(ground.home().join("b"), body(2)).unwrap();
    fs::write(ground.home().join("empty"), b"").unwrap();
    let root = ground.scan(&ground.home()).root;
    let cache = ground.cache();
    let cancel = std::sync::atomic::AtomicBool::new(false);
    let image = cache
        .pin(
            &covey_mount::ImageRequest {
                root,
                store: &ground.store,
                owner: (0, 0),
                excludes: &ground.excludes,
                cancel: &cancel,
                progress: &covey_home::NoProgress,
            },
            ground.path(),
        )
        .unwrap();
    let missing = || -> Vec<ContentId> {
        let missing = cache.missing(&image).unwrap();
        missing.map(|content| ContentId::of(&content.unwrap()).unwrap()).collect()
    };
    assert_eq!(missing(), [id(&body(1)), id(&body(2))], "in the order of the tree");
    assert!(!cache.is_ready(&image));
    let fill = FillRequest {
        image: &image,
        store: &ground.store,
        cancel: &cancel,
        progress: &covey_home::NoProgress,
        threads: 2,
    };
    assert_eq!(cache.fill(&fill).unwrap().fetched, 2);
    assert!(missing().is_empty() && cache.is_ready(&image));
    cache.unpin(ground.path()).unwrap();
}
