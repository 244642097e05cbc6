//! Random trees, random work in them as mounted homes: what a tracked secure finds is what a scan finds.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use covey_home::Excludes;
use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, Timespec, Timestamps, XattrFlags};

use crate::ground::Ground;

/// One piece of work. Where it happens is chosen among what is there by `at` and `to`.
#[derive(Debug, Clone)]
struct Work {
    kind: u8,
    at: u16,
    to: u16,
    name: u8,
    number: u32,
}

const KINDS: u8 = 21;
/// Few, so that work meets earlier work; some are excluded at times, by name, by ending or by path.
const NAMES: [&[u8]; 12] =
    [b"a", b"b", b"c", b"d", b"e", b"pip", b"junk", b"x.skip", b"\xff\xfe", b"+", b"line\n", b"z"];

fn work() -> impl Strategy<Value = Work> {
    (0..KINDS, any::<u16>(), any::<u16>(), 0..NAMES.len() as u8, any::<u32>())
        .prop_map(|(kind, at, to, name, number)| Work { kind, at, to, name, number })
}

fn excludes() -> impl Strategy<Value = Excludes> {
    prop_oneof![
        2 => Just(Excludes::none()),
        1 => Just(Excludes::parse("junk,*.skip,a/pip,b/c/d")),
    ]
}

/// All names below, as paths, directories and others apart.
fn list(root: &Path) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let (mut dirs, mut others) = (vec![root.to_owned()], Vec::new());
    let mut next = 0;
    while next < dirs.len() {
        let mut names: Vec<_> = fs::read_dir(&dirs[next]).unwrap().map(Result::unwrap).collect();
        names.sort_by_key(fs::DirEntry::file_name);
        for entry in names {
            if entry.file_type().unwrap().is_dir() {
                dirs.push(entry.path())
            } else {
                others.push(entry.path())
            }
        }
        next += 1;
    }
    (dirs, others)
}

/// What may be refused for reasons of the work itself; anything else is the mount's fault.
fn may_fail(result: rustix::io::Result<()>, work: &Work) {
    use rustix::io::Errno;
    match result {
        Ok(()) => {}
        Err(
            Errno::EXIST
            | Errno::NOTEMPTY
            | Errno::ISDIR
            | Errno::NOTDIR
            | Errno::INVAL
            | Errno::NOENT
            | Errno::LOOP
            | Errno::PERM
            | Errno::NXIO,
        ) => {}
        Err(error) => panic!("{work:?}: {error}"),
    }
}

fn apply(root: &Path, work: &Work) {
    let (dirs, others) = list(root);
    let dir = |number: u16| dirs[usize::from(number) % dirs.len()].clone();
    let other =
        |number: u16| (!others.is_empty()).then(|| others[usize::from(number) % others.len()].clone());
    let any = |number: u16| {
        let all: Vec<_> = dirs.iter().skip(1).chain(&others).collect();
        (!all.is_empty()).then(|| all[usize::from(number) % all.len()].clone())
    };
    let name = OsString::from_vec(NAMES[usize::from(work.name)].to_vec());
    let new = dir(work.to).join(&name);
    let body = |len: usize| vec![work.number as u8; len];
    let small = work.number as usize % 9000;
    // FIFOs would wait for a reader, links lead elsewhere: only files are opened.
    let file = others
        .iter()
        .filter(|path| fs::symlink_metadata(path).unwrap().is_file())
        .cycle()
        .nth(usize::from(work.at) % others.len().max(1));
    let open = || file.map(|path| File::options().read(true).write(true).open(path).unwrap());
    let put = |path: &Path, bytes: &[u8]| -> rustix::io::Result<()> {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        File::from(fd).write_all_at(bytes, 0).unwrap();
        Ok(())
    };
    let times = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        last_modification: Timespec { tv_sec: i64::from(work.number) - (1 << 31), tv_nsec: 7 },
    };
    match work.kind {
        0 => may_fail(put(&new, &body(small)), work),
        1 => {
            if let Some(file) = open() {
                file.write_all_at(b"in place", u64::from(work.number) % 20_000).unwrap();
            }
        }
        2 => {
            if let Some(file) = open() {
                file.set_len(u64::from(work.number) % 30_000).unwrap();
            }
        }
        3 => {
            if let Some(path) = any(work.at).filter(|path| !path.is_symlink()) {
                let mode = Mode::from_raw_mode(work.number & 0o7777);
                rustix::fs::chmod(&path, mode).unwrap();
            }
        }
        4 => {
            if let Some(path) = any(work.at) {
                rustix::fs::utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
            }
        }
        5 | 6 => {
            if let Some(path) = other(work.at) {
                fs::remove_file(path).unwrap();
            }
        }
        7..=9 => {
            if let Some(path) = any(work.at) {
                may_fail(rustix::fs::rename(&path, &new), work);
            }
        }
        10 | 11 => {
            if let Some(path) = other(work.at) {
                may_fail(rustix::fs::linkat(CWD, &path, CWD, &new, AtFlags::empty()), work);
            }
        }
        12 => may_fail(rustix::fs::symlink(name.clone(), &new), work),
        13 => may_fail(rustix::fs::mkdir(&new, Mode::RWXU), work),
        14 => {
            if dirs.len() > 1 {
                fs::remove_dir_all(&dirs[1 + usize::from(work.at) % (dirs.len() - 1)]).unwrap();
            }
        }
        15 => {
            // Gone and there again: what was in it must not show through.
            if dirs.len() > 1 {
                let path = &dirs[1 + usize::from(work.at) % (dirs.len() - 1)];
                fs::remove_dir_all(path).unwrap();
                fs::create_dir(path).unwrap();
                put(&path.join(&name), &body(small)).unwrap();
            }
        }
        16 => {
            if put(&new, &body(1)).is_ok() {
                let file = File::options().write(true).open(&new).unwrap();
                file.set_len(1 << 20).unwrap();
                file.write_all_at(&body(small + 1), 300_000).unwrap();
            }
        }
        17 => {
            if let Some(path) = any(work.at).filter(|path| !path.is_symlink() && !is_fifo(path)) {
                let key = format!("user.{}", work.name % 3);
                if work.number.is_multiple_of(3) {
                    match rustix::fs::lremovexattr(&path, key.as_str()) {
                        Ok(()) | Err(rustix::io::Errno::NODATA) => {}
                        Err(error) => panic!("{error}"),
                    }
                } else {
                    let value = work.number.to_le_bytes();
                    rustix::fs::lsetxattr(&path, key.as_str(), &value, XattrFlags::empty()).unwrap();
                }
            }
        }
        18 => may_fail(
            rustix::fs::mknodat(CWD, &new, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0),
            work,
        ),
        19 => {
            if let (Some(path), Some(second)) = (any(work.at), any(work.to)) {
                may_fail(rustix::fs::renameat_with(CWD, &path, CWD, &second, RenameFlags::EXCHANGE), work);
            }
        }
        _ => {
            // Another kind under the same name.
            if let Some(path) = other(work.at) {
                fs::remove_file(&path).unwrap();
                fs::create_dir(&path).unwrap();
                put(&path.join(&name), &body(small)).unwrap();
            }
        }
    }
}

fn is_fifo(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::symlink_metadata(path).unwrap().file_type().is_fifo()
}

/// A home before the work: a fixed skeleton with links across, so that short runs meet what matters.
fn build(root: &Path, extra: &[Work]) {
    for path in ["a/b/c", "a/pip", "b/c/d", "c/a", "d/junk"] {
        fs::create_dir_all(root.join(path)).unwrap();
        for (number, name) in ["a", "b", "x.skip"].iter().enumerate() {
            let path = root.join(path).join(name);
            if !path.exists() {
                fs::write(&path, format!("{}", path.display()).repeat(number * 20)).unwrap();
            }
        }
    }
    fs::hard_link(root.join("a/pip/b"), root.join("b/linked")).unwrap();
    fs::hard_link(root.join("a/pip/b"), root.join("c/a/linked")).unwrap();
    fs::hard_link(root.join("b/c/d/b"), root.join("a/b/c/linked")).unwrap();
    fs::write(root.join("large"), vec![3_u8; 8_400_000]).unwrap();
    for work in extra {
        apply(root, work);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_tracked_secure_finds_what_a_scan_finds(
        before in proptest::collection::vec(work(), 0..12),
        rounds in proptest::collection::vec(proptest::collection::vec(work(), 1..14), 1..4),
        excludes in excludes(),
        remounts in any::<bool>(),
    ) {
        let mut ground = Ground::new();
        ground.excludes = excludes;
        build(&ground.home(), &before);
        let (mut home, base) = ground.mount_home();
        prop_assert_eq!(ground.scan(&ground.mounted()).root, base);
        for round in &rounds {
            for work in round {
                apply(&ground.mounted(), work);
            }
            let root = ground.secure_both_ways(&home).root;
            if remounts {
                ground.umount();
                home = ground.mount(root).unwrap().0;
                prop_assert_eq!(ground.scan(&ground.mounted()).root, root);
            }
        }
    }
}
