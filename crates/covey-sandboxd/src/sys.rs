//! The system calls that no safe wrapper offers, each behind a safe function.
//!
//! What stays true: every caller is single-threaded at that time (stage 0, and stage 1 before its threads), and
//! no function here keeps a pointer after it returns. What does not belong here: policy.
#![expect(unsafe_code, reason = "clone3, mount_setattr, close_range and one ioctl have no safe wrapper")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Namespaces of every sandbox. The cgroup namespace follows inside, where the process already is in its cgroup.
const NAMESPACES: i32 = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS;

/// The C library's constant does not fit its type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Which side of a clone we are.
#[derive(Debug)]
pub(crate) enum Side {
    /// The cloning process; the new one's pid as seen here.
    Parent(i32),
    /// The new process, pid 1 of its namespace.
    Child,
}

/// Clones into new namespaces, and into `cgroup` where given. The new process is a child of *our parent*, the
/// runner, so that stage 0 can end and the runner reaps.
pub(crate) fn clone_isolated(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Side> {
    let mut flags = NAMESPACES as u64 | libc::CLONE_PARENT as u64;
    if cgroup.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    // Layout of `struct clone_args` up to `cgroup`; with CLONE_PARENT the exit signal must be zero.
    let mut args = [0_u64; 11];
    args[0] = flags;
    args[10] = cgroup.map_or(0, |fd| fd.as_raw_fd() as u64);
    // SAFETY: `args` is a valid, zero-initialised clone_args of the size given; without CLONE_VM the child runs
    // on a copy of this single-threaded process, so every lock and the heap are in a consistent state there.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, args.as_ptr(), size_of_val(&args)) };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(if pid == 0 { Side::Child } else { Side::Parent(pid as i32) })
}

/// [`clone_isolated`] for kernels and container profiles that refuse `clone3`; joins no cgroup.
pub(crate) fn clone_isolated_v1() -> io::Result<Side> {
    // The first argument is the flags on every architecture but s390, which the seccomp filter refuses anyway.
    let flags = (NAMESPACES | libc::CLONE_PARENT | libc::SIGCHLD) as libc::c_ulong;
    // SAFETY: a null stack without CLONE_VM means a copy of ours; see `clone_isolated`.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(if pid == 0 { Side::Child } else { Side::Parent(pid as i32) })
}

/// Makes a cgroup namespace whose root is the cgroup that this process is in.
pub(crate) fn unshare_cgroup() -> io::Result<()> {
    // SAFETY: a new cgroup namespace changes how paths are shown and nothing that safe code relies on.
    Ok(unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWCGROUP) }?)
}

/// Attributes that a mount gets in addition to those it has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MountAttributes(u64);

impl MountAttributes {
    /// No set-uid, no devices.
    pub(crate) const WRITABLE: Self = Self(0x2 | 0x4);
    /// No set-uid, no devices, no program starts.
    pub(crate) const DATA: Self = Self(0x2 | 0x4 | 0x8);
    /// No set-uid, no devices, read-only.
    pub(crate) const READ_ONLY: Self = Self(0x1 | 0x2 | 0x4);
    /// No set-uid, no program starts: a single device.
    pub(crate) const DEVICE: Self = Self(0x2 | 0x8);
    /// Read-only and no set-uid, devices allowed: for the sandbox's own root with `/dev` in it.
    pub(crate) const READ_ONLY_ROOT: Self = Self(0x1 | 0x2);
}

/// Sets attributes on the mount at `path`, and on all mounts below where `is_recursive`.
pub(crate) fn set_mount_attributes(path: &CStr, set: MountAttributes, is_recursive: bool) -> io::Result<()> {
    // Layout of `struct mount_attr`: set, clear, propagation, userns descriptor.
    let attributes = [set.0, 0, 0, 0];
    let flags = if is_recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: `path` is NUL-terminated and `attributes` has the size given; both outlive the call.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            flags,
            attributes.as_ptr(),
            size_of_val(&attributes),
        )
    };
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Brings the loopback interface of this (empty) network namespace up.
pub(crate) fn raise_loopback() -> io::Result<()> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    // SAFETY: `ifreq` is plain data, for which all-zero bytes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which lives until the call returns.
    let outcome = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) };
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Marks every descriptor from 3 up close-on-exec, in case something came in that should not have.
pub(crate) fn seal_descriptors() -> io::Result<()> {
    // SAFETY: only sets a flag on descriptors; nothing is closed, so no owner's descriptor goes stale.
    let outcome = unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sends a signal to every process of our pid namespace but ourselves, atomically against forks.
pub(crate) fn signal_all(signal: i32) -> io::Result<()> {
    // SAFETY: plain system call without pointers. As pid 1 of a pid namespace -1 reaches that namespace only.
    let outcome = unsafe { libc::kill(-1, signal) };
    let error = io::Error::last_os_error();
    // No process to signal is the aim reached.
    if outcome < 0 && error.raw_os_error() != Some(libc::ESRCH) { Err(error) } else { Ok(()) }
}
