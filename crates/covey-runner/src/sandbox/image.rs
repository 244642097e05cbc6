//! The daemon's program as a sealed memory file: no path on the host, nothing that could be overwritten.
//!
//! What stays true: one file per runner process, shared by all its sandboxes, so its pages exist once.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, SealFlags};

const SANDBOXD: &[u8] = include_bytes!(env!("COVEY_SANDBOXD"));

/// The path under which this process and its fresh children start the daemon.
///
/// # Errors
/// When the kernel refuses a memory file.
pub(super) fn path() -> io::Result<PathBuf> {
    static IMAGE: OnceLock<OwnedFd> = OnceLock::new();
    let image = match IMAGE.get() {
        Some(image) => image,
        None => {
            let made = make()?;
            // Two first callers may both have made one; the second copy is closed at once.
            IMAGE.get_or_init(|| made)
        }
    };
    Ok(PathBuf::from(format!("/proc/self/fd/{}", image.as_raw_fd())))
}

fn make() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Linux before 6.3 does not know the flag and lets every memory file be started.
    let image = match rustix::fs::memfd_create("sandboxd", flags | MemfdFlags::EXEC) {
        Err(rustix::io::Errno::INVAL) => rustix::fs::memfd_create("sandboxd", flags)?,
        outcome => outcome?,
    };
    let mut file = File::from(image);
    file.write_all(SANDBOXD)?;
    // Without the seals a sandbox that reaches the file through /proc could change the program of the next one.
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}
