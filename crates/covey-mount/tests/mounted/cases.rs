//! What broke in other people's mounted homes, one case each.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use covey_home::Excludes;
use covey_home::tracked::TrackedError;
use covey_mount::{MountError, MountedHome};
use rustix::fs::{AtFlags, CWD, FileType, Mode, XattrFlags};

use crate::ground::Ground;

fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}

fn get_xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 4096];
    let len = rustix::fs::lgetxattr(path, name, &mut value[..]).ok()?;
    value.truncate(len);
    Some(value)
}

fn set_mtime(path: &Path, seconds: i64, nanoseconds: i64) {
    let times = rustix::fs::Timestamps {
        last_access: rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        last_modification: rustix::fs::Timespec { tv_sec: seconds, tv_nsec: nanoseconds },
    };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// Every kind of inode and metadata that a home can have.
fn build_odd(home: &Path) {
    fs::create_dir_all(home.join("dir/sub")).unwrap();
    fs::write(home.join("dir/file"), b"hello").unwrap();
    fs::write(home.join("empty"), b"").unwrap();
    fs::write(home.join("large"), vec![7_u8; 9 << 20]).unwrap();
    fs::hard_link(home.join("dir/file"), home.join("dir/sub/same")).unwrap();
    fs::hard_link(home.join("dir/file"), home.join("also")).unwrap();
    symlink("nowhere", home.join("link")).unwrap();
    symlink("t".repeat(4000), home.join("long-link")).unwrap();
    rustix::fs::linkat(CWD, home.join("link"), CWD, home.join("link-again"), AtFlags::empty()).unwrap();
    rustix::fs::mknodat(CWD, home.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    std::os::unix::net::UnixListener::bind(home.join("socket")).unwrap();
    for (name, kind) in [("null", FileType::CharacterDevice), ("disk", FileType::BlockDevice)] {
        let number = rustix::fs::makedev(7, 70_000);
        rustix::fs::mknodat(CWD, home.join(name), kind, Mode::RUSR, number).unwrap();
    }
    let sparse = File::create(home.join("sparse")).unwrap();
    sparse.set_len(256 << 20).unwrap();
    sparse.write_all_at(b"middle", 100 << 20).unwrap();
    File::create(home.join("one-hole")).unwrap().set_len(5 << 30).unwrap();
    for name in
        [&b"bad-\xff\xfe"[..], b"new\nline", b" lead", "e\u{301}".as_bytes(), "\u{e9}".as_bytes(), b"+"]
    {
        fs::write(home.join(std::ffi::OsStr::from_bytes(name)), name).unwrap();
    }
    fs::write(home.join("n".repeat(255)), b"x").unwrap();
    fs::create_dir(home.join("many")).unwrap();
    for number in 0..700 {
        fs::write(home.join(format!("many/name-{number}")), number.to_string()).unwrap();
    }
    set_xattr(&home.join("empty"), "user.binary", b"v\0bin");
    set_xattr(&home.join("empty"), "user.empty", b"");
    set_xattr(&home.join("dir"), "user.large", &vec![b'y'; 3000]);
    set_xattr(home, "user.of-the-home", b"1");
    let acl = [
        &2_u32.to_le_bytes()[..],
        &[1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 6, 0, 0x39, 0x30, 0, 0, 4, 0, 4, 0, 255, 255, 255, 255],
        &[16, 0, 6, 0, 255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255],
    ]
    .concat();
    set_xattr(&home.join("large"), "system.posix_acl_access", &acl);
    set_xattr(&home.join("dir/sub"), "system.posix_acl_default", &acl);
    let capability = [&0x0200_0001_u32.to_le_bytes()[..], &[0, 0x20, 0, 0], &[0; 12]].concat();
    set_xattr(&home.join("many/name-1"), "security.capability", &capability);
    for (name, mode) in [("many/name-2", 0o6755), ("many/name-3", 0), ("dir/sub", 0o1777), ("fifo", 0o640)] {
        fs::set_permissions(home.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    set_mtime(&home.join("many/name-4"), -86_400, 5);
    set_mtime(&home.join("many/name-5"), 4_102_444_800, 1);
    set_mtime(&home.join("link"), 1_111_111_111, 222_222_222);
    set_mtime(&home.join("dir"), 987_654_321, 12_345_678);
    set_mtime(home, 1_234_567_890, 123_456_789);
}

#[test]
fn what_is_mounted_is_what_was_secured() {
    let ground = Ground::new();
    build_odd(&ground.home());
    let (home, base) = ground.mount_home();
    assert_eq!(ground.scan(&ground.mounted()).root, base);
    assert_eq!(ground.secure_both_ways(&home).root, base);
    // The numbers of parents are right, which only who asks for them by number sees.
    let inode = |path: &str| fs::metadata(ground.mounted().join(path)).unwrap().ino();
    assert_eq!(inode("dir/sub/.."), inode("dir"));
    let metadata = fs::metadata(ground.mounted().join("dir/file")).unwrap();
    assert_eq!((metadata.nlink(), metadata.ino()), (3, inode("also")));
}

#[test]
fn every_entry_can_be_owned_by_the_homes_user() {
    let ground = Ground::new();
    build_odd(&ground.home());
    let base = ground.scan(&ground.home()).root;
    let (cache, dir, state) = (ground.cache(), ground.mounted(), ground.state());
    let mut request = ground.request(base, &cache, &dir, &state);
    request.owner = (1234, 2345);
    MountedHome::mount(&request).unwrap();
    for name in ["", "dir", "dir/file", "link", "fifo", "many/name-3"] {
        let metadata = fs::symlink_metadata(ground.mounted().join(name)).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (1234, 2345), "{name}");
    }
    assert_eq!(ground.scan(&ground.mounted()).root, base);
}

#[test]
fn a_lower_directory_can_be_renamed_again_and_again() {
    let ground = Ground::new();
    build_odd(&ground.home());
    let (home, _) = ground.mount_home();
    let at = ground.mounted();
    fs::rename(at.join("dir"), at.join("moved")).unwrap();
    ground.secure_both_ways(&home);
    fs::rename(at.join("moved"), at.join("many/deeper")).unwrap();
    fs::write(at.join("many/deeper/new"), b"new").unwrap();
    ground.secure_both_ways(&home);
    fs::create_dir(at.join("dir")).unwrap();
    fs::rename(at.join("many/deeper/sub"), at.join("dir/sub")).unwrap();
    ground.secure_both_ways(&home);
    // Back to where it was, below another directory of the old name.
    fs::rename(at.join("many/deeper"), at.join("dir/many")).unwrap();
    fs::remove_dir_all(at.join("many")).unwrap();
    ground.secure_both_ways(&home);
    assert_eq!(fs::read(at.join("dir/many/file")).unwrap(), b"hello");
}

#[test]
fn the_names_of_one_inode_stay_one_inode() {
    let ground = Ground::new();
    build_odd(&ground.home());
    let (home, _) = ground.mount_home();
    let at = ground.mounted();
    // Written through one name: the others are in directories that nothing else touches.
    File::options().append(true).open(at.join("also")).unwrap().write_all(b" again").unwrap();
    assert_eq!(fs::read(at.join("dir/sub/same")).unwrap(), b"hello again");
    ground.secure_both_ways(&home);
    // One name goes, one comes, and the directory of the third is renamed.
    fs::remove_file(at.join("also")).unwrap();
    fs::hard_link(at.join("dir/file"), at.join("many/another")).unwrap();
    fs::rename(at.join("dir/sub"), at.join("sub")).unwrap();
    ground.secure_both_ways(&home);
    assert_eq!(fs::read(at.join("sub/same")).unwrap(), b"hello again");
    // A link with two names, of which one is removed: nothing is left to share.
    fs::remove_file(at.join("link")).unwrap();
    ground.secure_both_ways(&home);
    // Only the metadata of a shared inode changes.
    fs::set_permissions(at.join("sub/same"), fs::Permissions::from_mode(0o604)).unwrap();
    ground.secure_both_ways(&home);
    ground.umount();
    let root = ground.scan_after_mount();
    assert_eq!(fs::metadata(at.join("dir/file")).unwrap().mode() & 0o777, 0o604);
    assert_eq!(fs::metadata(at.join("dir/file")).unwrap().nlink(), 3);
    assert_ne!(root, home.base());
}

impl Ground {
    /// Mounts the base again, with the changes; the root of what is seen.
    fn scan_after_mount(&self) -> covey_types::RootHash {
        let base = MountedHome::open(&self.state()).unwrap().base();
        let (_, report) = self.mount(base).unwrap();
        assert!(report.continued);
        self.scan(&self.mounted()).root
    }
}

#[test]
fn what_is_removed_is_gone_and_may_come_back_as_something_else() {
    let ground = Ground::new();
    build_odd(&ground.home());
    let (home, _) = ground.mount_home();
    let at = ground.mounted();
    fs::remove_file(at.join("large")).unwrap();
    fs::remove_dir_all(at.join("dir")).unwrap();
    ground.secure_both_ways(&home);
    fs::create_dir(at.join("large")).unwrap();
    fs::write(at.join("large/inside"), b"1").unwrap();
    fs::write(at.join("dir"), b"a file now").unwrap();
    ground.secure_both_ways(&home);
    fs::remove_file(at.join("dir")).unwrap();
    fs::create_dir(at.join("dir")).unwrap();
    assert_eq!(fs::read_dir(at.join("dir")).unwrap().count(), 0, "what was below does not come back");
    ground.secure_both_ways(&home);
}

#[test]
fn only_metadata_changes_cost_no_reading() {
    let ground = Ground::new();
    build_odd(&ground.home());
    let (home, _) = ground.mount_home();
    let at = ground.mounted();
    fs::set_permissions(at.join("large"), fs::Permissions::from_mode(0o600)).unwrap();
    set_mtime(&at.join("sparse"), 1_000_000_000, 1);
    set_xattr(&at.join("many/name-9"), "user.note", b"n");
    // A renamed file has its bytes below another name.
    fs::rename(at.join("large"), at.join("many/renamed")).unwrap();
    fs::set_permissions(at.join("many/name-10"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(at.join("many/name-10"), at.join("many/name-11")).unwrap();
    let report = ground.secure_both_ways(&home);
    assert_eq!((report.files_read, report.bytes_read), (0, 0));
}

#[test]
fn a_second_secure_reads_only_what_changed_since() {
    let ground = Ground::new();
    build_odd(&ground.home());
    let (home, _) = ground.mount_home();
    let at = ground.mounted();
    for number in 0..50 {
        fs::write(at.join(format!("many/name-{number}")), format!("changed {number}")).unwrap();
    }
    let clock = || fs::metadata(at.join("many/name-49")).unwrap().modified().unwrap();
    while SystemTime::now().duration_since(clock()).is_ok_and(|past| past < Duration::from_millis(60)) {
        std::thread::yield_now();
    }
    assert_eq!(ground.secure_both_ways(&home).files_read, 50);
    let again = ground.secure_both_ways(&home);
    assert_eq!((again.files_read, again.blocks_new), (0, 0));
    fs::write(at.join("many/name-3"), "once more").unwrap();
    assert_eq!(ground.secure_both_ways(&home).files_read, 1);
    // What the store lost is read again, though nothing changed.
    let lost = covey_types::BlockHash::of(b"changed 7");
    assert!(ground.store.remove(&lost));
    let report = ground.secure_both_ways(&home);
    assert!(report.files_read >= 1, "{report:?}");
}

#[test]
fn the_agents_own_overlay_attributes_survive() {
    let ground = Ground::new();
    let home_dir = ground.home();
    fs::create_dir(home_dir.join("layer")).unwrap();
    fs::write(home_dir.join("layer/file"), b"x").unwrap();
    // As a container engine in the agent's own name space leaves them.
    set_xattr(&home_dir.join("layer"), "user.overlay.opaque", b"y");
    set_xattr(&home_dir.join("layer/file"), "user.overlay.redirect", b"/elsewhere");
    let (home, base) = ground.mount_home();
    let at = ground.mounted();
    assert_eq!(get_xattr(&at.join("layer"), "user.overlay.opaque").unwrap(), b"y");
    assert_eq!(ground.scan(&at).root, base);
    fs::create_dir(at.join("upper-layer")).unwrap();
    set_xattr(&at.join("upper-layer"), "user.overlay.opaque", b"y");
    set_xattr(&at.join("layer/file"), "user.overlay.metacopy", b"");
    // The kernel's own names, set by root inside: escaped below, and no marks to a secure.
    set_xattr(&at.join("upper-layer"), "trusted.overlay.opaque", b"y");
    set_xattr(&at.join("layer/file"), "trusted.overlay.redirect", b"/nowhere");
    fs::write(at.join("upper-layer/f"), b"y").unwrap();
    ground.secure_both_ways(&home);
    ground.umount();
    ground.scan_after_mount();
    assert_eq!(get_xattr(&at.join("upper-layer"), "trusted.overlay.opaque").unwrap(), b"y");
    assert_eq!(get_xattr(&at.join("layer/file"), "trusted.overlay.redirect").unwrap(), b"/nowhere");
    assert_eq!(fs::read(at.join("layer/file")).unwrap(), b"x");
    assert_eq!(fs::read(at.join("upper-layer/f")).unwrap(), b"y");
}

#[test]
fn excludes_hold_where_a_name_is_now() {
    let mut ground = Ground::new();
    ground.excludes = Excludes::parse("__pycache__,*.tmp,.cache/pip,a/b/c");
    let dir = ground.home();
    for path in ["caches/pip", "x/b/c", "x/b/d", "plain/__pycache__"] {
        fs::create_dir_all(dir.join(path)).unwrap();
        fs::write(dir.join(path).join("file"), path).unwrap();
    }
    fs::hard_link(dir.join("x/b/c/file"), dir.join("x/b/d/linked")).unwrap();
    // Secured with the same excludes, as a base always is.
    let (home, base) = ground.mount_home();
    let at = ground.mounted();
    assert!(!at.join("plain/__pycache__").exists(), "it is not in the snapshot");
    assert_eq!(ground.secure_both_ways(&home).root, base);
    // Renamed directories bring names to where they are excluded.
    fs::rename(at.join("caches"), at.join(".cache")).unwrap();
    fs::rename(at.join("x"), at.join("a")).unwrap();
    fs::write(at.join("plain/y.tmp"), b"not kept").unwrap();
    ground.secure_both_ways(&home);
    // And away again.
    fs::rename(at.join(".cache"), at.join("caches")).unwrap();
    fs::rename(at.join("plain/y.tmp"), at.join("plain/y")).unwrap();
    fs::rename(at.join("a/b"), at.join("plain/b")).unwrap();
    ground.secure_both_ways(&home);
    // Other excludes than the base's are for a scan.
    ground.excludes = Excludes::parse("plain");
    let cancel = std::sync::atomic::AtomicBool::new(false);
    let request = covey_mount::SecureMounted {
        store: &ground.store,
        excludes: &ground.excludes,
        previous: None,
        cancel: &cancel,
        progress: &covey_home::NoProgress,
        threads: 1,
    };
    let refused = home.secure(&request).unwrap_err();
    assert!(matches!(refused, TrackedError::OtherExcludes) && refused.scan_may_help(), "{refused}");
}

#[test]
fn a_snapshot_with_excluded_names_is_mounted_without_them() {
    let mut ground = Ground::new();
    let dir = ground.home();
    fs::write(dir.join("kept"), b"1").unwrap();
    fs::write(dir.join("y.tmp"), b"2").unwrap();
    fs::hard_link(dir.join("kept"), dir.join("kept.tmp")).unwrap();
    let base = ground.scan(&dir).root;
    ground.excludes = Excludes::parse("*.tmp");
    let home = ground.mount(base).unwrap().0;
    let at = ground.mounted();
    assert_eq!(fs::read_dir(&at).unwrap().count(), 1);
    assert_eq!(fs::metadata(at.join("kept")).unwrap().nlink(), 1);
    let cancel = std::sync::atomic::AtomicBool::new(false);
    let request = covey_mount::SecureMounted {
        store: &ground.store,
        excludes: &ground.excludes,
        previous: None,
        cancel: &cancel,
        progress: &covey_home::NoProgress,
        threads: 1,
    };
    assert!(matches!(home.secure(&request), Err(TrackedError::OtherExcludes)));
}

#[test]
fn changes_are_never_laid_over_another_state() {
    let ground = Ground::new();
    fs::write(ground.home().join("file"), b"1").unwrap();
    let (_, base) = ground.mount_home();
    fs::write(ground.home().join("file"), b"2").unwrap();
    let other = ground.scan(&ground.home()).root;
    let at = ground.mounted();
    let elsewhere = ground.mount(other).unwrap_err();
    assert!(matches!(elsewhere, MountError::MountedElsewhere { .. }), "{elsewhere}");
    fs::write(at.join("work"), b"unsecured").unwrap();
    ground.umount();
    let refused = ground.mount(other).unwrap_err();
    assert!(matches!(refused, MountError::OtherBase { base: found, .. } if found == base), "{refused}");
    // Secured, these changes are what the new root names, and go on.
    let secured = {
        let (home, report) = ground.mount(base).unwrap();
        assert!(report.continued && !report.already);
        ground.secure_both_ways(&home).root
    };
    ground.umount();
    let (_, report) = ground.mount(secured).unwrap();
    assert_eq!((report.root, report.base, report.continued), (secured, base, true));
    assert_eq!(fs::read(at.join("work")).unwrap(), b"unsecured");
    assert!(ground.mount(secured).unwrap().1.already);
    ground.umount();
    let (cache, state) = (ground.cache(), ground.state());
    let mut request = ground.request(other, &cache, &at, &state);
    request.discard = true;
    MountedHome::mount(&request).unwrap();
    assert_eq!(fs::read(at.join("file")).unwrap(), b"2");
    assert!(!at.join("work").exists());
}

#[test]
fn a_home_in_use_is_not_unmounted_and_says_so() {
    let ground = Ground::new();
    fs::write(ground.home().join("file"), b"1").unwrap();
    ground.mount_home();
    let open = File::open(ground.mounted().join("file")).unwrap();
    let busy = MountedHome::umount(&ground.state(), false).unwrap_err();
    assert!(matches!(&busy, MountError::Mount { source, .. } if source.said.contains("process")), "{busy}");
    drop(open);
    assert!(MountedHome::umount(&ground.state(), false).unwrap().was_mounted);
    assert!(!MountedHome::umount(&ground.state(), false).unwrap().was_mounted);
    let taken = ground.path().join("taken");
    fs::create_dir(&taken).unwrap();
    fs::write(taken.join("file"), b"mine").unwrap();
    let base = MountedHome::open(&ground.state()).unwrap().base();
    let (cache, state) = (ground.cache(), ground.state());
    let refused = MountedHome::mount(&ground.request(base, &cache, &taken, &state)).unwrap_err();
    assert!(matches!(refused, MountError::PlaceTaken { .. }), "{refused}");
}

#[test]
fn a_sparse_file_keeps_its_holes_when_it_is_written() {
    let ground = Ground::new();
    build_odd(&ground.home());
    let (home, _) = ground.mount_home();
    let path = ground.mounted().join("sparse");
    let mut file = File::options().read(true).write(true).open(&path).unwrap();
    file.seek(SeekFrom::Start(200 << 20)).unwrap();
    file.write_all(b"more").unwrap();
    drop(file);
    let root = ground.secure_both_ways(&home).root;
    // The kernel copies a changed file in pieces of 1 MiB: holes around its data may be filled up to that.
    assert!(fs::metadata(&path).unwrap().blocks() * 512 < 8 << 20);
    File::options().write(true).open(ground.mounted().join("one-hole")).unwrap().set_len(1 << 40).unwrap();
    assert_ne!(ground.secure_both_ways(&home).root, root);
}

#[test]
fn a_deep_tree_is_mounted_and_changed() {
    let ground = Ground::new();
    let mut dir = rustix::fs::open(ground.home(), rustix::fs::OFlags::PATH, Mode::empty()).unwrap();
    let name = CString::new("d".repeat(200)).unwrap();
    for _ in 0..24 {
        rustix::fs::mkdirat(&dir, name.as_c_str(), Mode::RWXU).unwrap();
        dir = rustix::fs::openat(&dir, name.as_c_str(), rustix::fs::OFlags::PATH, Mode::empty()).unwrap();
    }
    let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
    rustix::fs::openat(&dir, "deep", flags, Mode::RUSR).unwrap();
    let (home, base) = ground.mount_home();
    assert_eq!(ground.scan(&ground.mounted()).root, base);
    let mut dir = rustix::fs::open(ground.mounted(), rustix::fs::OFlags::PATH, Mode::empty()).unwrap();
    for _ in 0..24 {
        dir = rustix::fs::openat(&dir, name.as_c_str(), rustix::fs::OFlags::PATH, Mode::empty()).unwrap();
    }
    rustix::fs::openat(&dir, "deeper", flags, Mode::RUSR).unwrap();
    drop(dir);
    ground.secure_both_ways(&home);
}

#[test]
fn what_an_overlay_takes_for_a_removed_name_is_refused_and_not_lost() {
    let ground = Ground::new();
    rustix::fs::mknodat(CWD, ground.home().join("none"), FileType::CharacterDevice, Mode::RUSR, 0).unwrap();
    let base = ground.scan(&ground.home()).root;
    let refused = ground.mount(base).unwrap_err();
    assert_eq!(refused.fault(), covey_types::Fault::Limit, "{refused}");
    assert!(!ground.state().join("state.json").exists());
}

#[test]
fn odd_paths_are_mounted_and_found_again() {
    let ground = Ground::new();
    fs::write(ground.home().join("file"), b"1").unwrap();
    let base = ground.scan(&ground.home()).root;
    let odd = ground.path().join("a, b\\c:d=e\n").join("x".repeat(250));
    fs::create_dir_all(&odd).unwrap();
    let (dir, state) = (odd.join("mounted"), odd.join("state"));
    let cache = covey_mount::Cache::open(&odd.join("cache"), None).unwrap();
    MountedHome::mount(&ground.request(base, &cache, &dir, &state)).unwrap();
    assert_eq!(MountedHome::state_at(&dir).unwrap(), Some(state.canonicalize().unwrap()));
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"1");
    assert!(MountedHome::umount(&state, true).unwrap().was_mounted);
    assert_eq!(MountedHome::state_at(&dir).unwrap(), None);
}
