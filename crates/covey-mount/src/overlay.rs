//! The mount itself: an image, contents and an upper directory become one directory.
//!
//! What stays true: the image's own mount is never attached anywhere, so a process that dies on the way leaves
//! nothing mounted; a home is either mounted with everything it needs (metacopy, redirects, the index that keeps
//! hard links together) or not at all, although the kernel would silently go on with less.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_fd, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

/// What overlayfs has to have switched on, as it shows in its mount options.
const NEEDED_OPTIONS: [&str; 3] = ["metacopy=on", "redirect_dir=on", "index=on"];
/// Mounts of ours at one place that one call takes away; more than one only after somebody else's mistakes.
const STACKED_MAX: usize = 16;

/// A step of mounting that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step} failed{}{said}", if said.is_empty() { "" } else { ": " })]
pub struct MountStepError {
    /// Which.
    pub step: &'static str,
    /// What the kernel said about it, if anything.
    pub said: String,
    /// The system's answer.
    pub source: io::Error,
}

/// What is laid above each other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layers<'a> {
    pub(crate) image: &'a Path,
    pub(crate) contents: &'a Path,
    pub(crate) upper: &'a Path,
    pub(crate) work: &'a Path,
}

fn failed(step: &'static str) -> impl FnOnce(rustix::io::Errno) -> MountStepError {
    move |error| MountStepError { step, said: String::new(), source: error.into() }
}

/// Mounts the layers at `target`, a directory.
pub(crate) fn mount(layers: Layers<'_>, target: &Path) -> Result<(), MountStepError> {
    let image = rustix::fs::open(layers.image, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(failed("opening the image"))?;
    let dir = |path: &Path| {
        rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    };
    let context =
        fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed("asking the kernel for erofs"))?;
    // A path of the descriptor: a value may have 255 bytes, the image's own path more.
    let source = format!("/proc/self/fd/{}", image.as_raw_fd());
    told(&context, "naming the image", fsconfig_set_string(&context, "source", source.as_str()))?;
    told(&context, "making the image read-only", fsconfig_set_flag(&context, "ro"))?;
    told(&context, "mounting the image", fsconfig_create(&context))?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV;
    let tree =
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(failed("mounting the image"))?;

    let context =
        fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed("asking the kernel for overlay"))?;
    let contents = dir(layers.contents).map_err(failed("opening the contents"))?;
    let upper = dir(layers.upper).map_err(failed("opening the upper directory"))?;
    let work = dir(layers.work).map_err(failed("opening the work directory"))?;
    for (key, fd) in [("lowerdir+", &tree), ("datadir+", &contents), ("upperdir", &upper), ("workdir", &work)]
    {
        told(&context, "naming a layer", fsconfig_set_fd(&context, key, fd))?;
    }
    // `xino`: one device number and stable inode numbers over all layers, as in a plain directory.
    for key in ["metacopy", "redirect_dir", "index", "xino"] {
        told(&context, "choosing overlay options", fsconfig_set_string(&context, key, "on"))?;
    }
    told(&context, "mounting the layers", fsconfig_create(&context))?;
    let overlay = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NODEV)
        .map_err(failed("mounting the layers"))?;
    move_mount(&overlay, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(failed("attaching the home"))?;
    check_options(target)
}

/// Adds what the kernel wrote into the context's log.
fn told(context: &OwnedFd, step: &'static str, result: rustix::io::Result<()>) -> Result<(), MountStepError> {
    let Err(error) = result else { return Ok(()) };
    let mut said = Vec::new();
    let mut line = [0; 1024];
    // Each read is one message; an error means that there is no further one.
    while let Ok(len @ 1..) = rustix::io::read(context, &mut line) {
        let text = String::from_utf8_lossy(&line[..len]);
        said.push(text.trim().trim_start_matches("e ").to_owned());
    }
    Err(MountStepError { step, said: said.join("; "), source: error.into() })
}

fn check_options(target: &Path) -> Result<(), MountStepError> {
    let step = "checking the mounted home";
    let found = mounted_at(target).map_err(|source| MountStepError { step, said: String::new(), source })?;
    let missing = match &found {
        Some(mount) => {
            NEEDED_OPTIONS.iter().find(|needed| !mount.options.iter().any(|have| have == needed.as_bytes()))
        }
        None => Some(&"its line in /proc/self/mountinfo"),
    };
    let Some(missing) = missing else { return Ok(()) };
    let said = format!("the kernel went on without {missing}");
    match unmount(target, UnmountFlags::empty()) {
        Ok(()) => Err(MountStepError { step, said, source: io::ErrorKind::Unsupported.into() }),
        Err(error) => Err(MountStepError { step, said, source: error.into() }),
    }
}

/// What is mounted at a place.
#[derive(Debug)]
pub(crate) struct MountPoint {
    pub(crate) file_system: String,
    /// As bytes, because paths are.
    pub(crate) options: Vec<Vec<u8>>,
}

impl MountPoint {
    /// Of an overlay its upper directory.
    pub(crate) fn upper_dir(&self) -> Option<PathBuf> {
        let options = self.options.iter().filter(|_| self.file_system == "overlay");
        let mut paths = options.filter_map(|option| option.strip_prefix(b"upperdir="));
        paths.next().map(|path| PathBuf::from(OsString::from_vec(path.to_vec())))
    }

    /// Whether it is an overlay with this upper directory.
    pub(crate) fn is_overlay_on(&self, upper: &Path) -> bool {
        self.upper_dir().is_some_and(|found| found == upper)
    }
}

/// The topmost mount whose mount point is exactly `place`.
pub(crate) fn mounted_at(place: &Path) -> io::Result<Option<MountPoint>> {
    let Ok(place) = place.canonicalize() else { return Ok(None) };
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|byte| *byte == b'\n').filter_map(|line| parse(line, &place)).next_back())
}

/// One line of `mountinfo`, if it is of that place.
fn parse(line: &[u8], place: &Path) -> Option<MountPoint> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let at = PathBuf::from(OsString::from_vec(octal_unescaped(fields.get(4)?)));
    if at != place {
        return None;
    }
    let dash = fields.iter().position(|field| *field == b"-")?;
    Some(MountPoint {
        file_system: String::from_utf8_lossy(fields.get(dash + 1)?).into_owned(),
        // Split first: a comma in a path is escaped.
        options: fields.get(dash + 3)?.split(|byte| *byte == b',').map(octal_unescaped).collect(),
    })
}

fn octal_unescaped(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, behind @ ..] = rest {
        if let (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) = (*first, behind) {
            out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
            rest = after;
        } else {
            out.push(*first);
            rest = behind;
        }
    }
    out
}

/// Takes away every mount with this upper directory that is on top at `place`; tells whether there was one.
pub(crate) fn unmount_ours(place: &Path, upper: &Path) -> Result<bool, MountStepError> {
    let step = "unmounting the home";
    let mut any = false;
    for _ in 0..STACKED_MAX {
        let top = mounted_at(place).map_err(|source| MountStepError { step, said: String::new(), source })?;
        if !top.is_some_and(|top| top.is_overlay_on(upper)) {
            return Ok(any);
        }
        unmount(place, UnmountFlags::empty()).map_err(|error| {
            let busy = "a process still has a file or its working directory in it";
            let said = if error == rustix::io::Errno::BUSY { busy } else { "" };
            MountStepError { step, said: said.to_owned(), source: error.into() }
        })?;
        any = true;
    }
    Ok(any)
}

/// Holds the lock file of a directory until it is dropped.
pub(crate) fn lock_file(path: &Path) -> io::Result<File> {
    File::options().create(true).truncate(false).read(true).write(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_place_and_known_by_its_upper_directory() {
        let line = br"48 27 0:47 / /tmp/a\040b rw,relatime shared:1 - overlay none rw,upperdir=/s/a\054b/upper,index=on";
        let found = parse(line, Path::new("/tmp/a b")).unwrap();
        assert_eq!(found.file_system, "overlay");
        assert!(found.options.iter().any(|option| option == b"index=on"));
        assert!(found.is_overlay_on(Path::new("/s/a,b/upper")));
        assert!(parse(line, Path::new("/tmp/a")).is_none());
        let plain = br"48 27 0:47 / /m rw - overlay none rw,upperdir=/s/x\040y/upper,index=on";
        let found = parse(plain, Path::new("/m")).unwrap();
        assert!(found.is_overlay_on(Path::new("/s/x y/upper")));
        assert!(!found.is_overlay_on(Path::new("/s/x y")));
    }
}
