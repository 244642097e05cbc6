//! The home that the demo works on: real input that a machine which has just built Covey has anyway.
//!
//! A clone of a repository with its history, the package sources that the build fetched, a small program of
//! ours with a fault, and a handful of inodes that are hard to keep. No third-party code is part of Covey: it
//! is copied from where the machine already has it.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Serialize;

/// Enough files that a store which re-reads everything would show.
pub(super) const FILES_MIN: u64 = 10_000;
/// Files of the package sources that are hard-linked once more.
const HARD_LINKS: usize = 64;

const INVOICE: [(&str, &str); 4] = [
    ("invoice.sh", include_str!("../../../../../demo/invoice/invoice.sh")),
    ("test.sh", include_str!("../../../../../demo/invoice/test.sh")),
    ("items/single.txt", include_str!("../../../../../demo/invoice/items/single.txt")),
    ("items/several.txt", include_str!("../../../../../demo/invoice/items/several.txt")),
];

/// What the template is made of.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Template {
    #[serde(skip)]
    pub(super) dir: PathBuf,
    /// Regular files, each name counted.
    pub(super) files: u64,
    /// Bytes of the files.
    pub(super) bytes: u64,
    /// Names that share an inode with another.
    pub(super) hard_links: u64,
    /// Where the files came from.
    pub(super) sources: Vec<String>,
}

/// Builds the home below `dir`, which must not exist.
pub(super) fn build(dir: &Path, repo: Option<&Path>) -> Result<Template> {
    fs::create_dir_all(dir)?;
    let mut template =
        Template { dir: dir.to_owned(), files: 0, bytes: 0, hard_links: 0, sources: Vec::new() };
    let invoice = dir.join("invoice");
    for (name, content) in INVOICE {
        let path = invoice.join(name);
        fs::create_dir_all(path.parent().context("a file has a parent")?)?;
        fs::write(path, content)?;
    }
    let repo = match repo {
        Some(repo) => {
            if !repo.is_dir() {
                bail!("--repo {}: not a directory", repo.display());
            }
            Some(repo.to_owned())
        }
        None => own_repository(),
    };
    if let Some(repo) = &repo {
        copy_repository(repo, &dir.join("repository"), &mut template)?;
    }
    let packages = package_sources()?;
    if !packages.is_empty() {
        template.sources.push("package sources of the build".to_owned());
    }
    let mut files = count(dir)?.files;
    for package in packages {
        // Whole packages until it is enough: every file more is written five times by what follows.
        if files > FILES_MIN {
            break;
        }
        let target = dir.join("packages").join(package.file_name().unwrap_or(OsStr::new("package")));
        copy_tree(&package, &target, &mut unlimited())?;
        files += count(&target)?.files;
    }
    // The documentation alone has five times as many files as the demo wants: only what is missing.
    let mut missing = FILES_MIN.saturating_sub(count(dir)?.files);
    if missing > 0
        && let Some(doc) = toolchain_documentation()
    {
        copy_tree(&doc, &dir.join("toolchain-doc"), &mut missing)?;
        template.sources.push("documentation of the Rust toolchain".to_owned());
    }
    template.hard_links = link_some(dir)?;
    odd_inodes(&dir.join("odd"))?;
    let counted = count(dir)?;
    (template.files, template.bytes) = (counted.files, counted.bytes);
    if template.files < FILES_MIN {
        bail!(
            "found only {} files on this machine, the demo wants {FILES_MIN}; give a larger tree with --repo PATH",
            template.files
        );
    }
    Ok(template)
}

/// The checkout that this binary was built in, if it is still there.
fn own_repository() -> Option<PathBuf> {
    let current = std::env::current_dir().ok()?;
    let found = current.ancestors().find(|dir| dir.join("crates/covey-cli/Cargo.toml").is_file())?;
    Some(found.to_owned())
}

/// A clone where git is installed; else a copy of the checkout without build output.
fn copy_repository(repo: &Path, target: &Path, template: &mut Template) -> Result<()> {
    let cloned = repo.join(".git").exists()
        && Command::new("git")
            .args(["clone", "--quiet", "--no-local", "--"])
            .arg(repo)
            .arg(target)
            .stdin(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
    if cloned {
        template.sources.push("clone of a repository, with its history".to_owned());
    } else {
        if target.exists() {
            fs::remove_dir_all(target)?;
        }
        copy_tree(repo, target, &mut unlimited())?;
        template.sources.push("copy of a directory".to_owned());
    }
    Ok(())
}

/// The directories of the packages that cargo has unpacked.
fn package_sources() -> Result<Vec<PathBuf>> {
    let home = |variable: &str, below: &str| {
        std::env::var_os(variable)
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(below)))
    };
    let Some(registries) = home("CARGO_HOME", ".cargo").map(|cargo| cargo.join("registry/src")) else {
        return Ok(Vec::new());
    };
    let mut packages = Vec::new();
    for registry in directories(&registries)? {
        packages.extend(directories(&registry)?);
    }
    Ok(packages)
}

/// The directories in a directory, by name; none when it is not there.
fn directories(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot read {}", dir.display()))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn toolchain_documentation() -> Option<PathBuf> {
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).output().ok()?;
    let sysroot = PathBuf::from(OsStr::from_bytes(sysroot.stdout.trim_ascii_end()));
    ["share/doc", "lib"].into_iter().map(|below| sysroot.join(below)).find(|dir| dir.is_dir())
}

/// Copies directories, files and symlinks with modes and times, until `files_left` files are copied; build output
/// and other kinds are left out.
fn copy_tree(source: &Path, target: &Path, files_left: &mut u64) -> Result<()> {
    fs::create_dir_all(target)?;
    let entries = fs::read_dir(source).with_context(|| format!("cannot read {}", source.display()))?;
    let mut entries = entries.collect::<io::Result<Vec<_>>>()?;
    // Two runs on one machine take the same part.
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        if *files_left == 0 {
            return Ok(());
        }
        let (from, to) = (entry.path(), target.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            if entry.file_name() != "target" || source.join("Cargo.lock").symlink_metadata().is_err() {
                copy_tree(&from, &to, files_left)?;
            }
        } else if kind.is_symlink() {
            symlink(fs::read_link(&from)?, &to)?;
        } else if kind.is_file() {
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
            *files_left -= 1;
            let modified = entry.metadata()?.modified()?;
            // A read-only file cannot be opened for writing, and its time is not worth changing its mode.
            if let Ok(file) = fs::File::options().append(true).open(&to) {
                file.set_modified(modified)?;
            }
        }
    }
    Ok(())
}

fn link_some(dir: &Path) -> Result<u64> {
    let links = dir.join("links");
    fs::create_dir_all(&links)?;
    let mut files = Vec::new();
    collect_files(&dir.join("packages"), &mut files, HARD_LINKS)?;
    if files.is_empty() {
        collect_files(&dir.join("invoice"), &mut files, HARD_LINKS)?;
    }
    for (number, file) in files.iter().enumerate() {
        fs::hard_link(file, links.join(format!("link-{number}")))?;
    }
    Ok(files.len() as u64)
}

fn collect_files(dir: &Path, files: &mut Vec<PathBuf>, files_max: usize) -> Result<()> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    let mut entries = entries.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        if files.len() >= files_max {
            return Ok(());
        }
        let kind = entry.file_type()?;
        if kind.is_dir() {
            collect_files(&entry.path(), files, files_max)?;
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

/// Inodes that tools of this kind lose: odd modes, holes, names that are not text, a FIFO, a dangling link.
fn odd_inodes(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    let write = |name: &OsStr, mode: u32| -> io::Result<()> {
        let path = dir.join(name);
        fs::write(&path, name.as_bytes())?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
    };
    write(OsStr::new("no-one-may-read"), 0o000)?;
    write(OsStr::new("set-uid"), 0o4755)?;
    write(OsStr::new("set-gid"), 0o2711)?;
    write(OsStr::new("read-only"), 0o444)?;
    write(OsStr::from_bytes(b"not \xff text\nand two lines"), 0o640)?;
    fs::write(dir.join("empty"), "")?;
    symlink("nowhere/at all", dir.join("dangling"))?;
    let mut sparse = fs::File::create(dir.join("sparse"))?;
    sparse.set_len(64 << 20)?;
    sparse.write_all(b"head, then a hole")?;
    let closed = dir.join("closed-directory");
    fs::create_dir(&closed)?;
    fs::write(closed.join("inside"), "kept")?;
    fs::set_permissions(closed, fs::Permissions::from_mode(0o500))?;
    let deep = (0..40).fold(dir.join("deep"), |path, level| path.join(format!("level-{level}")));
    fs::create_dir_all(&deep)?;
    fs::write(deep.join("bottom"), "here")?;
    let status = Command::new("mkfifo").arg(dir.join("fifo")).status();
    if !status.is_ok_and(|s| s.success()) {
        bail!("cannot make a FIFO with `mkfifo`; install coreutils");
    }
    Ok(())
}

const fn unlimited() -> u64 {
    u64::MAX
}

struct Counted {
    files: u64,
    bytes: u64,
}

fn count(dir: &Path) -> Result<Counted> {
    let mut counted = Counted { files: 0, bytes: 0 };
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                counted.files += 1;
                counted.bytes += entry.metadata()?.len();
            }
        }
    }
    Ok(counted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_copied_up_to_a_number_of_files() {
        let place = tempfile::tempdir().unwrap();
        let source = place.path().join("source");
        for name in ["a/1", "a/2", "b/3", "c/4"] {
            let path = source.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, name).unwrap();
        }
        let (target, mut left) = (place.path().join("target"), 3);
        copy_tree(&source, &target, &mut left).unwrap();
        assert_eq!((left, count(&target).unwrap().files), (0, 3));
        assert!(target.join("b/3").exists() && !target.join("c").exists());
    }
}
