//! A store in a directory of this host.
//!
//! What stays true: data, flush, rename, flush of the directory, in this order, so that a crash leaves an unnamed
//! temporary file or a whole one (I6); a temporary file is locked by its writer, and one that nobody holds is
//! cleared away by whoever opens the store, without looking at a clock. What does not belong here: what is in the
//! files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use covey_types::BlockHash;
use rustix::fs::FlockOperation;

use super::{
    Backend, BackendError, Expected, FileVersion, Key, NewFile, PutOutcome, SMALL_FILE_BYTES_MAX, Tail,
    Versioned,
};
use crate::block::StoreError;
use crate::name::{check_name, random_name};

/// Open files kept by one store; more would eat into a small `RLIMIT_NOFILE`.
const OPEN_FILES_MAX: usize = 32;
const TEMPORARY_DIR: &str = "tmp";
const CACHE_DIR: &str = "cache";
/// Locked while a small file of the same directory is replaced.
const LOCK_FILE: &str = "lock";

/// The files of one org below `orgs/<org>` of a directory.
#[derive(Debug)]
pub struct DirectoryBackend {
    org_dir: PathBuf,
    open_files: Mutex<Vec<(Key, Arc<File>)>>,
}

impl DirectoryBackend {
    /// Opens the store at `path` for `org`, creating what is missing, and clears away the unfinished files of
    /// processes that are gone.
    ///
    /// # Errors
    /// [`StoreError::Name`] for a bad org name, [`StoreError::Unavailable`] when the directory cannot be used.
    pub fn open(path: &Path, org: &str) -> Result<Self, StoreError> {
        check_name(org)?;
        let org_dir = path.join("orgs").join(org);
        for part in ["packs", TEMPORARY_DIR] {
            create_dir_durably(&org_dir.join(part))?;
        }
        sweep_abandoned(&org_dir.join(TEMPORARY_DIR))?;
        Ok(Self { org_dir, open_files: Mutex::default() })
    }

    /// The store at `path` for `org` if there is one; makes nothing.
    ///
    /// # Errors
    /// As [`DirectoryBackend::open`].
    pub fn open_existing(path: &Path, org: &str) -> Result<Option<Self>, StoreError> {
        check_name(org)?;
        let packs = path.join("orgs").join(org).join("packs");
        match fs::metadata(&packs) {
            Ok(_) => Self::open(path, org).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unavailable("look at", &packs, error).into()),
        }
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.org_dir.join(key.as_str())
    }

    fn file(&self, key: &Key) -> Result<Arc<File>, BackendError> {
        let mut open = self.open_files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = open.iter().position(|(known, _)| known == key) {
            let found = open.remove(at);
            // Another file may have been put in its place, whole where this one was damaged.
            if found.1.metadata().is_ok_and(|metadata| metadata.nlink() > 0) {
                let file = Arc::clone(&found.1);
                open.push(found);
                return Ok(file);
            }
        }
        let path = self.path(key);
        let file = Arc::new(File::open(&path).map_err(|error| failed("open", &path, error))?);
        if open.len() >= OPEN_FILES_MAX {
            open.remove(0);
        }
        open.push((key.clone(), Arc::clone(&file)));
        Ok(file)
    }

    fn forget(&self, key: &Key) {
        self.open_files.lock().unwrap_or_else(PoisonError::into_inner).retain(|(known, _)| known != key);
    }

    fn names(&self, dir: &Key, wanted: impl Fn(&fs::FileType) -> bool) -> Result<Vec<String>, BackendError> {
        let path = self.path(dir);
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            // `packs` is made when the store is opened, so there its absence is no emptiness.
            Err(error) if error.kind() == io::ErrorKind::NotFound && dir.as_str() != "packs" => {
                return Ok(Vec::new());
            }
            Err(error) => return Err(unavailable("list", &path, error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| unavailable("list", &path, error))?;
            let kind = entry.file_type().map_err(|error| unavailable("list", &path, error))?;
            // What has no such name was not put here by a store.
            names.extend(entry.file_name().into_string().ok().filter(|_| wanted(&kind)));
        }
        Ok(names)
    }
}

impl Backend for DirectoryBackend {
    fn place(&self) -> String {
        self.org_dir.display().to_string()
    }

    fn is_remote(&self) -> bool {
        false
    }

    fn cache_dir(&self) -> Option<PathBuf> {
        Some(self.org_dir.join(CACHE_DIR))
    }

    fn list(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        let mut names = self.names(dir, fs::FileType::is_file)?;
        names.retain(|name| name != LOCK_FILE && !name.ends_with(".tmp"));
        Ok(names)
    }

    fn list_dirs(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        self.names(dir, fs::FileType::is_dir)
    }

    fn file_len(&self, key: &Key) -> Result<u64, BackendError> {
        let path = self.path(key);
        fs::metadata(&path).map(|found| found.len()).map_err(|error| failed("look at", &path, error))
    }

    fn read(&self, key: &Key, offset: u64, len: usize) -> Result<Vec<u8>, BackendError> {
        let file = self.file(key)?;
        let mut bytes = vec![0; len];
        let mut filled = 0;
        while filled < len {
            match file.read_at(&mut bytes[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed("read", &self.path(key), error)),
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    }

    fn read_tail(&self, key: &Key, len: usize) -> Result<Tail, BackendError> {
        let path = self.path(key);
        // Not through the open files: who lists finds many packs new at once, and reads each of them once.
        let file = File::open(&path).map_err(|error| failed("open", &path, error))?;
        let file_len = file.metadata().map_err(|error| failed("look at", &path, error))?.len();
        let mut bytes = vec![0; len.min(usize::try_from(file_len).unwrap_or(usize::MAX))];
        let start = file_len - bytes.len() as u64;
        file.read_exact_at(&mut bytes, start).map_err(|error| failed("read", &path, error))?;
        Ok(Tail { bytes, file_len })
    }

    fn create(&self) -> Result<Box<dyn NewFile>, BackendError> {
        let dir = self.org_dir.join(TEMPORARY_DIR);
        loop {
            let path = dir.join(random_name());
            let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other.map_err(|error| unavailable("write", &path, error))?,
            };
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
                .map_err(|error| unavailable("lock", &path, error.into()))?;
            // An opener's sweep may have been between our create and our lock; then the name is gone.
            if !path.try_exists().map_err(|error| unavailable("look at", &path, error))? {
                continue;
            }
            return Ok(Box::new(TemporaryFile { file, path, org_dir: self.org_dir.clone(), renamed: false }));
        }
    }

    fn flush(&self, dir: &Key) -> Result<(), BackendError> {
        let path = self.path(dir);
        File::open(&path).and_then(|file| file.sync_all()).map_err(|error| unavailable("flush", &path, error))
    }

    fn remove(&self, key: &Key) -> Result<bool, BackendError> {
        let path = self.path(key);
        self.forget(key);
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(unavailable("remove", &path, error)),
        }
    }

    fn get(&self, key: &Key) -> Result<Option<Versioned>, BackendError> {
        read_small(&self.path(key))
    }

    fn put_if(&self, key: &Key, bytes: &[u8], expected: &Expected) -> Result<PutOutcome, BackendError> {
        let path = self.path(key);
        let dir = path.parent().unwrap_or(&self.org_dir).to_owned();
        if bytes.len() > SMALL_FILE_BYTES_MAX {
            return Err(unavailable("write", &path, io::Error::from(io::ErrorKind::FileTooLarge)));
        }
        create_dir_durably(&dir)?;
        let lock_path = dir.join(LOCK_FILE);
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .map_err(|error| unavailable("lock", &lock_path, error))?;
        // It dies with its process, so nothing has to be unlocked by hand.
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)
            .map_err(|error| unavailable("lock", &lock_path, error.into()))?;
        let as_expected = match expected {
            Expected::Any => true,
            Expected::Absent => read_small(&path)?.is_none(),
            Expected::Version(version) => read_small(&path)?.is_some_and(|found| found.version == *version),
        };
        if !as_expected {
            return Ok(PutOutcome::Conflict);
        }
        // One temporary name for all writers of the file; they hold the lock.
        let temporary = path.with_extension("tmp");
        let write = || -> io::Result<()> {
            let mut file = File::create(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|error| unavailable("write", &path, error))?;
        sync_dir(&dir)?;
        drop(lock);
        Ok(PutOutcome::Written(version_of(bytes)))
    }
}

/// A file below `tmp/`, locked while it is written.
#[derive(Debug)]
struct TemporaryFile {
    file: File,
    path: PathBuf,
    org_dir: PathBuf,
    renamed: bool,
}

impl NewFile for TemporaryFile {
    fn append(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        self.file.write_all(bytes).map_err(|error| unavailable("write", &self.path, error))
    }

    fn publish(mut self: Box<Self>, key: &Key) -> Result<(), BackendError> {
        self.file.sync_all().map_err(|error| unavailable("flush", &self.path, error))?;
        // After the flush: a file that is visible is whole, also after a power cut.
        let target = self.org_dir.join(key.as_str());
        fs::rename(&self.path, &target).map_err(|error| unavailable("name", &target, error))?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.renamed {
            // A failure leaves a file that the next opener sweeps.
            drop(fs::remove_file(&self.path));
        }
    }
}

fn version_of(bytes: &[u8]) -> FileVersion {
    FileVersion::new(BlockHash::of(bytes).to_string())
}

fn read_small(path: &Path) -> Result<Option<Versioned>, BackendError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unavailable("read", path, error)),
    };
    let mut bytes = Vec::new();
    file.take(SMALL_FILE_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| unavailable("read", path, error))?;
    if bytes.len() > SMALL_FILE_BYTES_MAX {
        return Err(unavailable("read", path, io::Error::from(io::ErrorKind::FileTooLarge)));
    }
    let version = version_of(&bytes);
    Ok(Some(Versioned { bytes, version }))
}

fn unavailable(verb: &str, path: &Path, error: io::Error) -> BackendError {
    BackendError::unavailable(format!("{verb} {}", path.display()), error)
}

fn failed(verb: &str, path: &Path, error: io::Error) -> BackendError {
    match error.kind() {
        io::ErrorKind::NotFound => BackendError::NotFound { file: path.display().to_string() },
        _ => unavailable(verb, path, error),
    }
}

/// Creates a directory and those above it, each made durable in its parent: a pack in a directory that a power
/// cut takes away is no pack.
fn create_dir_durably(dir: &Path) -> Result<(), BackendError> {
    let unavailable = |error| unavailable("create", dir, error);
    match fs::create_dir(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let Some(parent) = dir.parent() else { return Err(unavailable(error)) };
            create_dir_durably(parent)?;
            match fs::create_dir(dir) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(unavailable(error)),
            }
        }
        Err(error) => return Err(unavailable(error)),
    }
    match dir.parent() {
        Some(parent) if parent != Path::new("") => sync_dir(parent),
        _ => sync_dir(Path::new(".")),
    }
}

fn sync_dir(dir: &Path) -> Result<(), BackendError> {
    File::open(dir).and_then(|file| file.sync_all()).map_err(|error| unavailable("flush", dir, error))
}

/// Removes unfinished files that no living process holds locked. A lock, not an age, decides (I5: no clocks).
fn sweep_abandoned(tmp: &Path) -> Result<(), BackendError> {
    for entry in fs::read_dir(tmp).map_err(|error| unavailable("clear", tmp, error))? {
        let path = entry.map_err(|error| unavailable("clear", tmp, error))?.path();
        let Ok(file) = File::open(&path) else { continue };
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(unavailable("clear", &path, error));
                }
                _ => {}
            }
        }
    }
    Ok(())
}
