//! What the tests of this crate share: scratch directories, and a dump of everything that a home is.
//!
//! The dump is written with std and rustix only, not with the code under test.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, StatxFlags};

/// A directory that goes away with the value.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("a scratch directory")
}

/// Returns when the clock of the file system has moved on so far that nothing written before is racy.
pub(crate) fn settle() {
    let dir = scratch();
    let probe = dir.path().join("probe");
    let clock = || {
        File::create(&probe).expect("write the probe");
        fs::metadata(&probe).and_then(|m| m.modified()).expect("stat the probe")
    };
    let start = clock();
    while clock().duration_since(start).is_ok_and(|past| past.as_millis() < 50) {
        std::thread::yield_now();
    }
}

/// Everything that is kept of one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Dumped {
    pub(crate) kind: char,
    pub(crate) mode: u16,
    pub(crate) mtime: (i64, u32),
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(crate) content: Vec<u8>,
    pub(crate) holes: Vec<(u64, u64)>,
    pub(crate) size: u64,
    /// All names of the inode that the tree has, sorted.
    pub(crate) names: Vec<Vec<u8>>,
}

/// Dumps a tree by path (bytes, `/`-joined), the root as the empty path.
pub(crate) fn dump(root: &Path) -> BTreeMap<Vec<u8>, Dumped> {
    let mut found = BTreeMap::new();
    let mut inodes: BTreeMap<(u64, u64), Vec<Vec<u8>>> = BTreeMap::new();
    let fd = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).expect("open the root");
    visit(fd.as_fd(), c"", Vec::new(), &mut found, &mut inodes);
    let mut out = BTreeMap::new();
    for (path, (inode, mut dumped)) in found {
        dumped.names = inodes[&inode].clone();
        dumped.names.sort();
        out.insert(path, dumped);
    }
    out
}

type Found = BTreeMap<Vec<u8>, ((u64, u64), Dumped)>;

fn visit(
    dir: BorrowedFd<'_>,
    name: &std::ffi::CStr,
    path: Vec<u8>,
    found: &mut Found,
    inodes: &mut BTreeMap<(u64, u64), Vec<Vec<u8>>>,
) {
    let flags = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
    let stat = rustix::fs::statx(dir, name, flags, StatxFlags::BASIC_STATS).expect("statx");
    let inode = (u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor), stat.stx_ino);
    let mode = stat.stx_mode & 0o7777;
    let mut dumped = Dumped {
        kind: '?',
        mode,
        mtime: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
        xattrs: BTreeMap::new(),
        content: Vec::new(),
        holes: Vec::new(),
        size: 0,
        names: Vec::new(),
    };
    match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::RegularFile => {
            dumped.kind = 'f';
            dumped.size = stat.stx_size;
            let (fd, restore) = open_anyhow(dir, name, mode, OFlags::RDONLY);
            let file = File::from(fd);
            (dumped.content, dumped.holes) = contents(&file, stat.stx_size);
            dumped.xattrs = xattrs(&file);
            restore();
        }
        FileType::Directory => {
            dumped.kind = 'd';
            let (fd, restore) = open_anyhow(dir, name, mode, OFlags::RDONLY | OFlags::DIRECTORY);
            dumped.xattrs = xattrs(&fd);
            let mut names = Vec::new();
            for entry in rustix::fs::Dir::read_from(&fd).expect("read a directory") {
                let entry = entry.expect("an entry");
                if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    names.push(entry.file_name().to_owned());
                }
            }
            for child in names {
                let mut child_path = path.clone();
                if !child_path.is_empty() {
                    child_path.push(b'/');
                }
                child_path.extend_from_slice(child.to_bytes());
                visit(fd.as_fd(), &child, child_path, found, inodes);
            }
            restore();
        }
        FileType::Symlink => {
            dumped.kind = 'l';
            dumped.content = rustix::fs::readlinkat(dir, name, Vec::new()).expect("readlink").into_bytes();
        }
        FileType::Fifo => dumped.kind = 'p',
        FileType::Socket => dumped.kind = 's',
        kind @ (FileType::CharacterDevice | FileType::BlockDevice) => {
            dumped.kind = if kind == FileType::BlockDevice { 'b' } else { 'c' };
            dumped.content = format!("{}:{}", stat.stx_rdev_major, stat.stx_rdev_minor).into_bytes();
        }
        other => panic!("{other:?} in a dump"),
    }
    inodes.entry(inode).or_default().push(path.clone());
    found.insert(path, (inode, dumped));
}

fn open_anyhow(
    dir: BorrowedFd<'_>,
    name: &std::ffi::CStr,
    mode: u16,
    flags: OFlags,
) -> (OwnedFd, Box<dyn FnOnce()>) {
    let path_fd = if name.is_empty() {
        rustix::io::dup(dir).expect("dup")
    } else {
        rustix::fs::openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty()).expect("open")
    };
    let by_fd = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&path_fd));
    // No more than needed: lifting moves ctime, and with it what the stat cache knows.
    let needed = if flags.contains(OFlags::DIRECTORY) { 0o500 } else { 0o400 };
    let lifts = !rustix::process::geteuid().is_root() && mode & needed != needed;
    let chmod =
        |mode: u16| rustix::fs::chmod(by_fd.as_str(), Mode::from_raw_mode(mode.into())).expect("chmod");
    if lifts {
        chmod(mode | 0o700);
    }
    let fd =
        rustix::fs::open(by_fd.as_str(), flags | OFlags::NONBLOCK, Mode::empty()).expect("open for reading");
    let restore = move || {
        if lifts {
            let by_fd = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&path_fd));
            rustix::fs::chmod(by_fd.as_str(), Mode::from_raw_mode(mode.into())).expect("chmod back");
        }
    };
    (fd, Box::new(restore))
}

fn contents(file: &File, size: u64) -> (Vec<u8>, Vec<(u64, u64)>) {
    let mut data = Vec::new();
    let mut holes = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start.min(size),
            Err(rustix::io::Errno::NXIO) => size,
            Err(error) => panic!("{error}"),
        };
        if start > at {
            holes.push((at, start));
        }
        if start == size {
            break;
        }
        let end = rustix::fs::seek(file, SeekFrom::Hole(start)).expect("seek").min(size);
        let mut part = vec![0; (end - start) as usize];
        file.read_exact_at(&mut part, start).expect("read");
        data.extend_from_slice(&part);
        at = end;
    }
    (data, holes)
}

fn xattrs(fd: impl AsFd) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let fd = fd.as_fd();
    let mut list = vec![0; 65_536];
    let len = match rustix::fs::flistxattr(fd, list.as_mut_slice()) {
        Ok(len) => len,
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        Err(error) => panic!("{error}"),
    };
    let mut found = BTreeMap::new();
    for name in list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if name.starts_with(b"security.selinux") {
            continue;
        }
        let mut value = vec![0; 65_536];
        let len = rustix::fs::fgetxattr(fd, name, value.as_mut_slice()).expect("an attribute");
        found.insert(name.to_vec(), value[..len].to_vec());
    }
    found
}

/// Gives an ordinary user the permissions to clear a tree away.
pub(crate) fn make_removable(root: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let Ok(metadata) = fs::symlink_metadata(root) else { return };
    if !metadata.is_dir() {
        return;
    }
    fs::set_permissions(root, fs::Permissions::from_mode(0o700)).expect("chmod");
    for entry in fs::read_dir(root).expect("read a directory") {
        match entry {
            Ok(entry) => make_removable(&entry.path()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Secures `dir` with two threads and no excludes.
pub(crate) fn secure_dir(
    dir: &Path,
    store: &dyn covey_home::BlockStore,
    stat_cache: Option<&Path>,
) -> Result<covey_home::SecureReport, covey_home::SecureError> {
    secure_excluding(dir, store, stat_cache, &covey_home::Excludes::none())
}

/// The same with excludes.
pub(crate) fn secure_excluding(
    dir: &Path,
    store: &dyn covey_home::BlockStore,
    stat_cache: Option<&Path>,
    excludes: &covey_home::Excludes,
) -> Result<covey_home::SecureReport, covey_home::SecureError> {
    covey_home::secure(&covey_home::SecureRequest {
        dir,
        store,
        stat_cache,
        excludes,
        previous: None,
        cancel: &std::sync::atomic::AtomicBool::new(false),
        progress: &covey_home::NoProgress,
        threads: 2,
    })
}

/// Materializes `root` into `dir` with two threads and no excludes.
pub(crate) fn materialize_dir(
    root: covey_types::RootHash,
    dir: &Path,
    store: &dyn covey_home::BlockStore,
    stat_cache: Option<&Path>,
) -> Result<covey_home::MaterializeReport, covey_home::MaterializeError> {
    covey_home::materialize(&covey_home::MaterializeRequest {
        root,
        dir,
        store,
        stat_cache,
        excludes: &covey_home::Excludes::none(),
        owner: None,
        cancel: &std::sync::atomic::AtomicBool::new(false),
        progress: &covey_home::NoProgress,
        threads: 2,
    })
}

/// Bytes that do not compress and depend on nothing but `seed`.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new_derive_key("covey-home tests")
        .update(&seed.to_le_bytes())
        .finalize_xof()
        .fill(&mut bytes);
    bytes
}

/// How two dumps differ, one line per name; empty when they are equal.
pub(crate) fn differences(
    found: &BTreeMap<Vec<u8>, Dumped>,
    wanted: &BTreeMap<Vec<u8>, Dumped>,
) -> Vec<String> {
    let mut paths: Vec<_> = found.keys().chain(wanted.keys()).collect();
    paths.sort();
    paths.dedup();
    let brief = |dumped: Option<&Dumped>| {
        dumped.map(|d| {
            let hash = covey_types::BlockHash::of(&d.content);
            let names: Vec<_> = d.names.iter().map(|name| name.escape_ascii().to_string()).collect();
            let (kind, mode, mtime, size) = (d.kind, d.mode, d.mtime, d.size);
            format!(
                "{kind} {mode:o} {mtime:?} {:?} size {size} data {} {hash} holes {:?} {names:?}",
                d.xattrs,
                d.content.len(),
                d.holes
            )
        })
    };
    paths
        .into_iter()
        .filter(|path| found.get(*path) != wanted.get(*path))
        .map(|path| {
            format!(
                "`{}`: {:?} is not {:?}",
                path.escape_ascii(),
                brief(found.get(path)),
                brief(wanted.get(path))
            )
        })
        .collect()
}
