//! A small tree of inodes that are hard to keep: every kind, name, mode, time and attribute that was once lost by
//! some tool. Made relative to directory descriptors, because one path in it is longer than any path may be.

use std::ffi::{CString, OsString};
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};

/// `user::rwx, user:1234:r--, group::r-x, mask::r-x, other::---` in the kernel's form.
const ACL: &[u8] = &[
    2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 4, 0, 210, 4, 0, 0, 4, 0, 5, 0, 255, 255, 255, 255, 16,
    0, 5, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
];
/// `cap_net_raw+ep`, version 2.
const CAPABILITY: &[u8] = &[1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const LEVELS_DEEP: usize = 24;

/// What this user or file system does not let one make; the tree has it not.
pub(crate) type LeftOut = Vec<&'static str>;

struct Odd {
    dir: PathBuf,
    left_out: LeftOut,
}

impl Odd {
    fn at(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn file(&self, name: &str) -> PathBuf {
        let path = self.at(name);
        fs::write(&path, format!("content of {name}\n")).expect("write a file");
        path
    }

    fn bytes_named(&self, name: &[u8]) {
        fs::write(self.dir.join(OsString::from_vec(name.to_vec())), b"x\n").expect("write a file");
    }

    /// Notes `what` if it is not allowed here; any other failure is one.
    fn allowed(&mut self, what: &'static str, result: rustix::io::Result<()>) {
        use rustix::io::Errno;
        match result {
            Ok(()) => {}
            Err(Errno::PERM | Errno::OPNOTSUPP | Errno::ACCESS) => self.left_out.push(what),
            Err(error) => panic!("{what}: {error}"),
        }
    }

    fn xattr(&mut self, what: &'static str, name: &str, attribute: &str, value: &[u8]) {
        let result = rustix::fs::setxattr(self.at(name), attribute, value, XattrFlags::empty());
        self.allowed(what, result);
    }

    fn node(&mut self, what: &'static str, kind: FileType, mode: u32, number: (u32, u32)) {
        let number = rustix::fs::makedev(number.0, number.1);
        let path = self.at(what);
        let result = rustix::fs::mknodat(rustix::fs::CWD, &path, kind, Mode::from_raw_mode(mode), number);
        self.allowed(what, result);
        if path.symlink_metadata().is_ok() {
            fs::set_permissions(&path, Permissions::from_mode(mode)).expect("chmod");
        }
    }

    fn mode(&self, name: &str, mode: u32) {
        fs::set_permissions(self.at(name), Permissions::from_mode(mode)).expect("chmod");
    }

    fn mtime(&self, name: &str, seconds: i64, nanoseconds: i64) {
        let times = Timestamps {
            last_access: Timespec { tv_sec: 5, tv_nsec: 6 },
            last_modification: Timespec { tv_sec: seconds, tv_nsec: nanoseconds },
        };
        rustix::fs::utimensat(rustix::fs::CWD, self.at(name), &times, AtFlags::SYMLINK_NOFOLLOW)
            .expect("set a time");
    }

    /// Directories below each other whose path is longer than `PATH_MAX`, and a file in the last.
    fn deep(&self) {
        let name = CString::new("d".repeat(200)).expect("a name");
        let open = |dir: &OwnedFd| {
            rustix::fs::openat(dir, &name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).expect("open")
        };
        let mut dir: OwnedFd = File::open(&self.dir).expect("open the tree").into();
        for _ in 0..LEVELS_DEEP {
            rustix::fs::mkdirat(&dir, &name, Mode::RWXU).expect("mkdir");
            dir = open(&dir);
        }
        let flags = OFlags::WRONLY | OFlags::CREATE;
        let file = rustix::fs::openat(&dir, "deep", flags, Mode::RUSR | Mode::WUSR).expect("create");
        File::from(file).write_all(b"at the bottom\n").expect("write");
    }
}

/// Makes the tree in `dir`, which must not exist; says what is not in it.
pub(crate) fn build(dir: &Path) -> LeftOut {
    fs::create_dir(dir).expect("make the tree");
    let mut odd = Odd { dir: dir.to_owned(), left_out: Vec::new() };
    for name in ["plain", "setuid", "zeromode", "owner", "old", "future", "xattr", "big-xattr", "caps", "acl"]
    {
        odd.file(name);
    }
    for name in ["hard", "hard2", "sticky", "zerodir", "closed", "empty", "dacl"] {
        fs::create_dir(odd.at(name)).expect("mkdir");
    }
    odd.file("hard/a");
    fs::hard_link(odd.at("hard/a"), odd.at("hard/b")).expect("link");
    fs::hard_link(odd.at("hard/a"), odd.at("hard2/c")).expect("link");
    // As many names as the first inode has, but other ones.
    odd.file("hard2/d");
    fs::hard_link(odd.at("hard2/d"), odd.at("hard/e")).expect("link");
    fs::hard_link(odd.at("hard2/d"), odd.at("f")).expect("link");
    let sparse = File::create(odd.file("sparse")).expect("create");
    sparse.set_len(256 << 20).expect("grow");
    sparse.write_all_at(b"begin", 0).expect("write");
    sparse.write_all_at(b"middle", 100 << 20).expect("write");
    File::create(odd.at("one-hole")).expect("create").set_len(1 << 20).expect("grow");
    fs::write(odd.at("zeros"), vec![0; 70_000]).expect("write");
    let names: [&[u8]; 10] = [
        b"bad-\xff\xfe-name",
        b"new\nline",
        b" lead",
        "e\u{301}".as_bytes(),
        "\u{e9}".as_bytes(),
        b"Case",
        b"case",
        b"-rf",
        b"quote'\"\\",
        b"\x01\x1b[31m",
    ];
    names.iter().for_each(|name| odd.bytes_named(name));
    odd.bytes_named("n".repeat(255).as_bytes());
    odd.deep();
    odd.mode("setuid", 0o6755);
    odd.mode("sticky", 0o1777);
    odd.file("zerodir/in");
    odd.file("closed/in");
    fs::write(odd.at("emptyfile"), b"").expect("write");
    let owner = (Some(Uid::from_raw(12_345)), Some(Gid::from_raw(54_321)));
    let chowned = rustix::fs::chownat(rustix::fs::CWD, odd.at("owner"), owner.0, owner.1, AtFlags::empty());
    odd.allowed("owner", chowned);
    odd.node("fifo", FileType::Fifo, 0o640, (0, 0));
    drop(UnixListener::bind(odd.at("sock")).expect("bind"));
    odd.node("chr", FileType::CharacterDevice, 0o620, (1, 3));
    odd.node("blk", FileType::BlockDevice, 0o660, (7, 300));
    odd.node("wh", FileType::CharacterDevice, 0o000, (0, 0));
    symlink("plain", odd.at("ln")).expect("symlink");
    symlink("/nonexistent/abs", odd.at("dangling")).expect("symlink");
    symlink(OsString::from_vec(b"\xff\xfe".to_vec()), odd.at("badtarget")).expect("symlink");
    symlink("t".repeat(4000), odd.at("longlink")).expect("symlink");
    rustix::fs::linkat(rustix::fs::CWD, odd.at("ln"), rustix::fs::CWD, odd.at("ln-hard"), AtFlags::empty())
        .expect("link");
    odd.xattr("user attributes", "xattr", "user.k", b"v\0bin");
    odd.xattr("user attributes", "xattr", "user.empty", b"");
    odd.xattr("user attributes", "hard", "user.dir", b"d");
    odd.xattr("user attributes", "big-xattr", "user.big", &[b'y'; 3000]);
    odd.xattr("capability", "caps", "security.capability", CAPABILITY);
    odd.xattr("acl", "acl", "system.posix_acl_access", ACL);
    odd.xattr("acl", "dacl", "system.posix_acl_default", ACL);
    odd.mtime("plain", 1_234_567_890, 123_456_789);
    odd.mtime("old", -86_400, 5);
    odd.mtime("future", 4_102_444_800, 1);
    odd.mtime("ln", 1_111_111_111, 222_222_222);
    odd.mtime("fifo", 1_000_000_000, 1);
    odd.mtime("hard", 987_654_321, 12_345_678);
    odd.mode("zeromode", 0);
    odd.mode("closed", 0o500);
    odd.mode("zerodir", 0);
    odd.mtime("zerodir", 1_222_222_222, 333_333_333);
    rustix::fs::utimensat(
        rustix::fs::CWD,
        &odd.dir,
        &Timestamps {
            last_access: Timespec { tv_sec: 5, tv_nsec: 6 },
            last_modification: Timespec { tv_sec: 1_333_333_333, tv_nsec: 444_444_444 },
        },
        AtFlags::empty(),
    )
    .expect("set a time");
    odd.left_out
}
