//! Where a step reads from and writes to: directories that are empty, file systems that are fresh, caches that are
//! cold.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;

use crate::process;

const TOOL_LIMIT: Duration = Duration::from_secs(10 * 60);
/// Size of an image in GiB; only what is written takes room.
const IMAGE_GIB: u64 = 12;

/// An empty directory at `path`.
pub(super) fn empty_dir(path: &Path) -> anyhow::Result<()> {
    remove(path)?;
    fs::create_dir_all(path).with_context(|| format!("{} cannot be made", path.display()))
}

pub(super) fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Ok(found) if found.is_dir() => {
            fs::remove_dir_all(path).with_context(|| format!("{} cannot be removed", path.display()))
        }
        _ => fs::remove_file(path).with_context(|| format!("{} cannot be removed", path.display())),
    }
}

/// A file system of its own for what is restored: directories of a file system that holds other homes already are
/// filled many times more slowly, whatever fills them.
#[derive(Debug)]
pub(super) struct FreshFs {
    image: PathBuf,
    dir: PathBuf,
    mounted: bool,
}

impl FreshFs {
    /// Makes an ext4 in a file and mounts it; as an ordinary user an empty directory must do.
    pub(super) fn ext4(work: &Path, name: &str) -> anyhow::Result<Self> {
        // Everything is made now, so that no kernel thread writes tables while we measure.
        let options = ["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
        Self::make(work, name, "mkfs.ext4", &options)
    }

    /// The same with an xfs whose files can share their blocks.
    pub(super) fn xfs(work: &Path, name: &str) -> anyhow::Result<Self> {
        Self::make(work, name, "mkfs.xfs", &["-q", "-m", "reflink=1"])
    }

    fn make(work: &Path, name: &str, mkfs: &str, options: &[&str]) -> anyhow::Result<Self> {
        let (image, dir) = (work.join(format!("{name}.img")), work.join(name));
        empty_dir(&dir)?;
        remove(&image)?;
        if !rustix::process::geteuid().is_root() {
            return Ok(Self { image, dir, mounted: false });
        }
        let file = fs::File::create(&image)?;
        file.set_len(IMAGE_GIB << 30)?;
        drop(file);
        process::run(Command::new(mkfs).args(options).arg(&image), TOOL_LIMIT)?;
        process::run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&dir), TOOL_LIMIT)?;
        Ok(Self { image, dir, mounted: true })
    }

    /// A directory in it that does not exist yet.
    pub(super) fn target(&self) -> PathBuf {
        self.dir.join("home")
    }

    pub(super) const fn is_fresh(&self) -> bool {
        self.mounted
    }
}

impl Drop for FreshFs {
    fn drop(&mut self) {
        if self.mounted
            && let Err(error) = process::run(Command::new("umount").arg(&self.dir), TOOL_LIMIT)
        {
            eprintln!("warning: {} stays mounted: {error:#}", self.dir.display());
            return;
        }
        for path in [&self.image, &self.dir] {
            if let Err(error) = remove(path) {
                eprintln!("warning: {error:#}");
            }
        }
    }
}

/// Makes the page cache forget everything; false where only root may.
pub(super) fn drop_caches() -> anyhow::Result<bool> {
    if !rustix::process::geteuid().is_root() {
        return Ok(false);
    }
    rustix::fs::sync();
    Ok(fs::write("/proc/sys/vm/drop_caches", "3").is_ok())
}

/// Bytes of all files below a directory.
pub(super) fn size_of(dir: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).with_context(|| format!("{}", dir.display()))? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                dirs.push(entry.path());
            } else {
                bytes += metadata.len();
            }
        }
    }
    Ok(bytes)
}

/// A copy of a tree with all its metadata.
pub(super) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    process::run(Command::new("cp").arg("-a").arg(from).arg(to), TOOL_LIMIT)
}
