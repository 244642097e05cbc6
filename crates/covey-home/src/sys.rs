//! The system calls that walking and restoring a home need, all relative to directory descriptors.
//!
//! What stays true: nothing here follows a symbolic link of the home (I13). What does not belong here: what to
//! do with the answers.

use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    self, AtFlags, FileType, Mode, OFlags, RawDir, StatxFlags, Timespec, Timestamps, XattrFlags,
};

use crate::manifest::{DeviceNumber, Time, Xattr, Xattrs, is_kept_xattr};

/// What `statx` says about one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stat {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) file_type: FileType,
    pub(crate) mode: u16,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    pub(crate) mtime: Time,
    pub(crate) ctime: Time,
    /// Of a device node.
    pub(crate) number: DeviceNumber,
}

fn stat_of(found: &fs::Statx) -> Stat {
    let time = |t: &fs::StatxTimestamp| Time { seconds: t.tv_sec, nanoseconds: t.tv_nsec };
    Stat {
        device: u64::from(found.stx_dev_major) << 32 | u64::from(found.stx_dev_minor),
        inode: found.stx_ino,
        file_type: FileType::from_raw_mode(found.stx_mode.into()),
        mode: found.stx_mode & 0o7777,
        links: found.stx_nlink,
        uid: found.stx_uid,
        gid: found.stx_gid,
        size: found.stx_size,
        mtime: time(&found.stx_mtime),
        ctime: time(&found.stx_ctime),
        number: DeviceNumber { major: found.stx_rdev_major, minor: found.stx_rdev_minor },
    }
}

pub(crate) fn stat_at(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Stat> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    Ok(stat_of(&fs::statx(dir, name, flags, StatxFlags::BASIC_STATS)?))
}

pub(crate) fn stat_fd(fd: impl AsFd) -> io::Result<Stat> {
    Ok(stat_of(&fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?))
}

pub(crate) fn c_name(name: &[u8]) -> io::Result<CString> {
    CString::new(name).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// The process's file mode creation mask. Asking the kernel for it with `umask` would change it for a moment,
/// for all threads.
pub(crate) fn umask() -> Option<u16> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"))?;
    u16::from_str_radix(line.trim(), 8).ok()
}

/// How many names a directory has, without `.` and `..`.
pub(crate) fn count_names(dir: BorrowedFd<'_>) -> io::Result<usize> {
    let mut buffer = Vec::<u8>::with_capacity(NAMES_BUFFER_BYTES);
    fs::seek(dir, fs::SeekFrom::Start(0))?;
    let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
    let mut count = 0;
    while let Some(entry) = entries.next() {
        count += usize::from(!matches!(entry?.file_name().to_bytes(), b"." | b".."));
    }
    Ok(count)
}

/// `getdents` fills this at once; 32 KiB is what the C library uses.
const NAMES_BUFFER_BYTES: usize = 32 * 1024;

/// Names in a directory without `.` and `..`, each followed by NUL, in one buffer.
#[derive(Debug, Default)]
pub(crate) struct Names {
    bytes: Vec<u8>,
    /// Start and length without the NUL.
    ranges: Vec<(u32, u16)>,
}

impl Names {
    /// Reads a directory that was just opened.
    pub(crate) fn read(dir: BorrowedFd<'_>) -> io::Result<Self> {
        let mut buffer = Vec::<u8>::with_capacity(NAMES_BUFFER_BYTES);
        let mut names = Self::default();
        let spare: &mut [MaybeUninit<u8>] = buffer.spare_capacity_mut();
        let mut entries = RawDir::new(dir, spare);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes_with_nul();
            if name == b".\0" || name == b"..\0" {
                continue;
            }
            let start =
                u32::try_from(names.bytes.len()).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
            names.ranges.push((start, name.len() as u16 - 1));
            names.bytes.extend_from_slice(name);
        }
        let bytes = &names.bytes;
        names.ranges.sort_unstable_by(|a, b| name_at(bytes, *a).cmp(name_at(bytes, *b)));
        Ok(names)
    }

    /// Names that are known, ascending.
    pub(crate) fn known<'n>(names: impl Iterator<Item = &'n [u8]>) -> Self {
        let mut known = Self::default();
        for name in names {
            // A directory of more than 4 GiB of names was refused when it was read.
            known.ranges.push((known.bytes.len() as u32, name.len() as u16));
            known.bytes.extend_from_slice(name);
            known.bytes.push(0);
        }
        known
    }

    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Sorted by bytes.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &CStr> {
        self.ranges.iter().filter_map(|(start, len)| {
            let start = *start as usize;
            CStr::from_bytes_with_nul(&self.bytes[start..=start + usize::from(*len)]).ok()
        })
    }
}

fn name_at(bytes: &[u8], (start, len): (u32, u16)) -> &[u8] {
    &bytes[start as usize..start as usize + usize::from(len)]
}

pub(crate) fn open_dir_at(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(fs::openat(dir, name, flags, Mode::empty())?)
}

/// Opens a regular file for reading. A FIFO that took its place meanwhile cannot block us, a link is refused;
/// the caller looks at the descriptor again.
pub(crate) fn open_file_at(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    match fs::openat(dir, name, flags | OFlags::NOATIME, Mode::empty()) {
        // Only the owner may ask for NOATIME.
        Err(rustix::io::Errno::PERM) => Ok(fs::openat(dir, name, flags, Mode::empty())?),
        other => Ok(other?),
    }
}

/// A descriptor that names an inode without opening it: a FIFO, a file without permissions, a link.
pub(crate) fn open_path_at(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    Ok(fs::openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

/// The kernel's name for a descriptor. `fchmod` and the attribute calls refuse `O_PATH` descriptors; through
/// this name they work on exactly that inode, as long as the descriptor is open.
pub(crate) fn fd_path(fd: BorrowedFd<'_>) -> CString {
    let text = format!("/proc/self/fd/{}", fd.as_raw_fd());
    CString::new(text).unwrap_or_default()
}

pub(crate) fn chmod_path_fd(fd: BorrowedFd<'_>, mode: u16) -> io::Result<()> {
    Ok(fs::chmodat(fs::CWD, fd_path(fd).as_c_str(), Mode::from_raw_mode(mode.into()), AtFlags::empty())?)
}

/// Opens a file of ours whose mode forbids it, with the mode lifted for that moment. The attributes come along,
/// because reading them asks the mode again, whatever the descriptor may do.
pub(crate) fn open_lifted(path_fd: &OwnedFd, stat: &Stat) -> io::Result<(OwnedFd, Xattrs)> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    chmod_path_fd(path_fd.as_fd(), stat.mode | 0o400)?;
    let opened = fs::openat(fs::CWD, fd_path(path_fd.as_fd()).as_c_str(), flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|fd| xattrs_of(&fd).map(|xattrs| (fd, xattrs)));
    chmod_path_fd(path_fd.as_fd(), stat.mode)?;
    opened
}

pub(crate) fn set_mtime(fd: impl AsFd, mtime: Time) -> io::Result<()> {
    Ok(fs::futimens(fd, &times(mtime))?)
}

pub(crate) fn set_mtime_at(dir: BorrowedFd<'_>, name: &CStr, mtime: Time) -> io::Result<()> {
    Ok(fs::utimensat(dir, name, &times(mtime), AtFlags::SYMLINK_NOFOLLOW)?)
}

fn times(mtime: Time) -> Timestamps {
    // atime is not kept; leaving it alone spares a difference between two restores of one snapshot.
    let omit = Timespec { tv_sec: 0, tv_nsec: fs::UTIME_OMIT };
    let mtime = Timespec { tv_sec: mtime.seconds, tv_nsec: mtime.nanoseconds.into() };
    Timestamps { last_access: omit, last_modification: mtime }
}

/// The kept attributes of a file or directory.
pub(crate) fn xattrs_of(fd: impl AsFd) -> io::Result<Xattrs> {
    let fd = fd.as_fd();
    read_xattrs(|buffer| fs::flistxattr(fd, buffer), |name, buffer| fs::fgetxattr(fd, name, buffer))
}

/// The kept attributes of an inode that only an `O_PATH` descriptor names.
pub(crate) fn xattrs_of_path_fd(fd: BorrowedFd<'_>) -> io::Result<Xattrs> {
    let path = fd_path(fd);
    read_xattrs(
        |buffer| fs::listxattr(path.as_c_str(), buffer),
        |name, buffer| fs::getxattr(path.as_c_str(), name, buffer),
    )
}

fn read_xattrs(
    list: impl Fn(&mut [u8]) -> rustix::io::Result<usize>,
    get: impl Fn(&CStr, &mut [u8]) -> rustix::io::Result<usize>,
) -> io::Result<Xattrs> {
    let mut few = [0; 256];
    let names = match list(&mut few) {
        Ok(0) | Err(rustix::io::Errno::OPNOTSUPP) => return Ok(Xattrs::default()),
        Ok(len) => few[..len].to_vec(),
        Err(rustix::io::Errno::RANGE) => {
            // The kernel's limit for a list of names.
            let mut many = vec![0; 65_536];
            let len = list(&mut many)?;
            many.truncate(len);
            many
        }
        Err(error) => return Err(error.into()),
    };
    let mut xattrs = Vec::new();
    for name in names.split_inclusive(|byte| *byte == 0) {
        let Ok(c_name) = CStr::from_bytes_with_nul(name) else { continue };
        if !is_kept_xattr(c_name.to_bytes()) {
            continue;
        }
        let mut value = vec![0; 65_536];
        match get(c_name, &mut value) {
            Ok(len) => value.truncate(len),
            // Removed since it was listed.
            Err(rustix::io::Errno::NODATA) => continue,
            Err(error) => return Err(error.into()),
        }
        value.shrink_to_fit();
        xattrs.push(Xattr { name: c_name.to_bytes().to_vec(), value });
    }
    xattrs.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(Xattrs(xattrs))
}

pub(crate) fn set_xattr(fd: impl AsFd, name: &[u8], value: &[u8]) -> io::Result<()> {
    Ok(fs::fsetxattr(fd, c_name(name)?.as_c_str(), value, XattrFlags::empty())?)
}

pub(crate) fn set_xattr_path_fd(fd: BorrowedFd<'_>, name: &[u8], value: &[u8]) -> io::Result<()> {
    Ok(fs::setxattr(fd_path(fd).as_c_str(), c_name(name)?.as_c_str(), value, XattrFlags::empty())?)
}

pub(crate) fn remove_xattr(fd: impl AsFd, name: &[u8]) -> io::Result<()> {
    match fs::fremovexattr(fd, c_name(name)?.as_c_str()) {
        Ok(()) | Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
