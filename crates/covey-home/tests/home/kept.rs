//! What is kept of an inode, case by case: each test is a way in which some tool has lost it.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_home::{Excludes, MaterializeRequest, MemoryStore, NoProgress, materialize};
use rustix::fs::{FallocateFlags, FileType, Mode, XattrFlags};

use crate::support::{self, differences, dump, materialize_dir, noise, secure_dir, settle};

fn inode(path: &Path) -> (u64, u64) {
    let metadata = fs::symlink_metadata(path).unwrap();
    (metadata.dev(), metadata.ino())
}

/// Secures and materializes; returns where.
fn there_and_back(home: &Path, store: &MemoryStore) -> std::path::PathBuf {
    settle();
    let target = home.with_file_name("target");
    let root = secure_dir(home, store, None).unwrap().root;
    materialize_dir(root, &target, store, None).unwrap();
    assert_eq!(differences(&dump(&target), &dump(home)), Vec::<String>::new());
    target
}

#[test]
fn which_names_share_an_inode_is_kept_and_not_only_how_many() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("x/y")).unwrap();
    // Two inodes of three names and of equal content.
    for (first, others) in [("a", ["x/b", "x/y/c"]), ("x/y/a", ["b", "x/c"])] {
        fs::write(home.join(first), b"same bytes").unwrap();
        others.iter().for_each(|name| fs::hard_link(home.join(first), home.join(name)).unwrap());
    }
    let target = there_and_back(&home, &MemoryStore::new());
    for group in [["a", "x/b", "x/y/c"], ["x/y/a", "b", "x/c"]] {
        assert!(group.iter().all(|name| inode(&target.join(name)) == inode(&target.join(group[0]))));
    }
    assert_ne!(inode(&target.join("a")), inode(&target.join("b")));
    let blocks = fs::metadata(target.join("a")).unwrap();
    assert_eq!(blocks.nlink(), 3, "copies would need the space three times");
}

#[test]
fn names_of_one_symbolic_link_stay_one() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    symlink("nowhere", home.join("a")).unwrap();
    fs::hard_link(home.join("a"), home.join("b")).unwrap();
    let target = there_and_back(&home, &MemoryStore::new());
    assert_eq!(inode(&target.join("a")), inode(&target.join("b")));
}

#[test]
fn the_number_of_the_device_does_not_show_in_the_root() {
    let scratch = support::scratch();
    let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev()).ok();
    let here = device(scratch.path());
    let other = ["/dev/shm", "/run", "/var/tmp", "/tmp", "."].map(Path::new).into_iter().find_map(|place| {
        let dir = tempfile::tempdir_in(place).ok()?;
        (device(dir.path()) != here).then_some(dir)
    });
    let other = other.expect("this test needs two file systems, for example a tmpfs in /dev/shm");
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("d")).unwrap();
    fs::write(home.join("d/f"), b"x").unwrap();
    settle();
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let target = other.path().join("target");
    materialize_dir(root, &target, &store, None).unwrap();
    assert_eq!(secure_dir(&target, &store, None).unwrap().root, root);
}

#[test]
fn setuid_and_capabilities_survive_the_change_of_owner() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    const CAPABILITY: &[u8] = &[1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let scratch = support::scratch();
    let (home, target) = (scratch.path().join("home"), scratch.path().join("target"));
    fs::create_dir(&home).unwrap();
    for name in ["setuid", "ping"] {
        fs::write(home.join(name), b"binary").unwrap();
    }
    fs::set_permissions(home.join("setuid"), fs::Permissions::from_mode(0o6755)).unwrap();
    rustix::fs::setxattr(home.join("ping"), "security.capability", CAPABILITY, XattrFlags::empty()).unwrap();
    settle();
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let excludes = Excludes::none();
    // The second time only the owner differs from what is there.
    for owner in [(1234, 1234), (2345, 2345)] {
        materialize(&MaterializeRequest {
            root,
            dir: &target,
            store: &store,
            stat_cache: Some(&scratch.path().join("cache")),
            excludes: &excludes,
            owner: Some(owner),
            cancel: &AtomicBool::new(false),
            progress: &NoProgress,
            threads: 2,
        })
        .unwrap();
        assert_eq!(fs::metadata(target.join("setuid")).unwrap().uid(), owner.0);
        assert_eq!(differences(&dump(&target), &dump(&home)), Vec::<String>::new());
    }
}

#[test]
fn metadata_is_replaced_whole_so_what_is_gone_is_gone() {
    let scratch = support::scratch();
    let (home, target) = (scratch.path().join("home"), scratch.path().join("target"));
    let (home_cache, target_cache) = (scratch.path().join("hc"), scratch.path().join("tc"));
    fs::create_dir_all(home.join("dir")).unwrap();
    fs::write(home.join("file"), b"content").unwrap();
    for name in ["dir", "file"] {
        rustix::fs::setxattr(home.join(name), "user.note", b"here", XattrFlags::empty()).unwrap();
    }
    settle();
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, Some(&home_cache)).unwrap().root;
    materialize_dir(root, &target, &store, Some(&target_cache)).unwrap();
    for name in ["dir", "file"] {
        rustix::fs::removexattr(home.join(name), "user.note").unwrap();
    }
    settle();
    let root = secure_dir(&home, &store, Some(&home_cache)).unwrap().root;
    let report = materialize_dir(root, &target, &store, Some(&target_cache)).unwrap();
    assert_eq!(differences(&dump(&target), &dump(&home)), Vec::<String>::new());
    assert_eq!(report.bytes_fetched, 0, "only metadata changed");
}

#[test]
fn directories_that_forbid_their_owner_to_write_or_enter_come_back_filled() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    for (number, mode) in [0o700, 0o500, 0o000, 0o111, 0o2770, 0o1777].into_iter().enumerate() {
        let dir = home.join(format!("{number}/below"));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("file"), b"x").unwrap();
        for dir in [&dir, dir.parent().unwrap()] {
            fs::set_permissions(dir, fs::Permissions::from_mode(mode)).unwrap();
        }
    }
    let target = there_and_back(&home, &MemoryStore::new());
    support::make_removable(&home);
    support::make_removable(&target);
}

#[test]
fn every_kind_of_inode_and_the_home_itself_keep_their_time_to_the_nanosecond() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("dir")).unwrap();
    fs::write(home.join("dir/file"), b"x").unwrap();
    symlink("x", home.join("link")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, home.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    for (number, name) in ["dir/file", "link", "fifo", "dir", ""].iter().enumerate() {
        let stamp = |tv_sec, tv_nsec| rustix::fs::Timespec { tv_sec, tv_nsec };
        let times = rustix::fs::Timestamps {
            last_access: stamp(1, 1),
            last_modification: stamp(-5 + number as i64 * 1_000_000_000, 1 + number as i64),
        };
        let path = if name.is_empty() { home.clone() } else { home.join(name) };
        rustix::fs::utimensat(rustix::fs::CWD, &path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
    let target = there_and_back(&home, &MemoryStore::new());
    assert_eq!(fs::metadata(&target).unwrap().mtime_nsec(), 5, "the home's own");
}

#[test]
fn holes_come_back_as_holes_and_written_zeros_as_data() {
    const MIB: u64 = 1 << 20;
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    let sparse = File::create(home.join("sparse")).unwrap();
    sparse.set_len(200 * MIB).unwrap();
    sparse.write_all_at(b"island", 50 * MIB).unwrap();
    fs::write(home.join("zeros"), vec![0; 3 * MIB as usize]).unwrap();
    // Preallocated and never written: no data, so it is not stored as zeros.
    let preallocated = File::create(home.join("preallocated")).unwrap();
    if rustix::fs::fallocate(&preallocated, FallocateFlags::empty(), 0, 20 * MIB).is_err() {
        preallocated.set_len(20 * MIB).unwrap();
    }
    let store = MemoryStore::new();
    let target = there_and_back(&home, &store);
    let allocated = |name: &str| fs::metadata(target.join(name)).unwrap().blocks() * 512;
    assert!(allocated("sparse") < MIB && allocated("preallocated") < MIB, "holes take no room");
    assert!(allocated("zeros") >= 3 * MIB, "data is data");
}

#[test]
fn a_fifo_a_socket_and_what_is_behind_them_are_never_opened() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    let fifo = home.join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(home.join("sock")).unwrap();
    listener.set_nonblocking(true).unwrap();
    // Without a reader, writing without waiting is refused; a reader would let it through.
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK;
    there_and_back(&home, &MemoryStore::new());
    assert!(rustix::fs::open(&fifo, flags, Mode::empty()).is_err(), "somebody holds the FIFO open");
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "nobody has knocked");
}

#[test]
fn a_name_is_bytes() {
    use std::os::unix::ffi::OsStrExt;
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    let mut names: Vec<Vec<u8>> =
        (1..=255).filter(|byte| *byte != b'/').map(|byte| vec![b'n', byte]).collect();
    names.push(vec![0xff; 255]);
    for name in &names {
        fs::write(home.join(std::ffi::OsStr::from_bytes(name)), name).unwrap();
    }
    let target = there_and_back(&home, &MemoryStore::new());
    assert_eq!(fs::read_dir(target).unwrap().count(), names.len());
}

#[test]
fn empty_files_come_back_from_the_manifest_alone() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    for number in 0..10 {
        fs::write(home.join(number.to_string()), b"").unwrap();
    }
    let store = MemoryStore::new();
    let target = there_and_back(&home, &store);
    assert_eq!(store.len(), 2, "a listing and a root");
    assert!(fs::read_dir(target).unwrap().all(|entry| entry.unwrap().metadata().unwrap().len() == 0));
}

#[test]
fn attributes_of_the_host_are_neither_kept_nor_touched() {
    let scratch = support::scratch();
    let (home, target) = (scratch.path().join("home"), scratch.path().join("target"));
    fs::create_dir(&home).unwrap();
    fs::write(home.join("file"), b"x").unwrap();
    settle();
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let is_root = rustix::process::geteuid().is_root();
    let label = |path: &Path| rustix::fs::setxattr(path, "trusted.label", b"host", XattrFlags::empty());
    assert_eq!(label(&home.join("file")).is_ok(), is_root);
    assert_eq!(secure_dir(&home, &store, None).unwrap().root, root, "not part of the home");
    let cache = scratch.path().join("cache");
    materialize_dir(root, &target, &store, Some(&cache)).unwrap();
    assert_eq!(label(&target).is_ok(), is_root);
    let report = materialize_dir(root, &target, &store, Some(&cache)).unwrap();
    assert_eq!(report.warnings, Vec::<String>::new());
    let mut value = [0; 16];
    let left = rustix::fs::getxattr(&target, "trusted.label", value.as_mut_slice());
    assert_eq!(left.is_ok(), is_root);
}

#[test]
fn a_home_that_was_copied_or_restored_is_not_read_again() {
    let scratch = support::scratch();
    let (home, target) = (scratch.path().join("home"), scratch.path().join("target"));
    fs::create_dir_all(home.join("deep/er")).unwrap();
    for number in 0..20 {
        fs::write(home.join(format!("deep/er/{number}")), noise(number, 1000)).unwrap();
    }
    settle();
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let cache = scratch.path().join("cache");
    materialize_dir(root, &target, &store, Some(&cache)).unwrap();
    let report = secure_dir(&target, &store, Some(&cache)).unwrap();
    assert_eq!((report.root, report.files_read, report.bytes_read), (root, 0, 0));
}
