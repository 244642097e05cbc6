//! What of the cache can be believed after the machine went down.
//!
//! Contents are not flushed one by one. The file `session` says in which boot something was last added and
//! whether it has all reached the disk since; written before the first addition, and after a flush. A cache that
//! was neither used in this boot nor flushed is read and hashed before it is used.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Cache, CacheError, io_error};
use crate::content::ContentId;

pub(super) const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Session {
    boot: String,
    /// Everything that is here is on the disk.
    synced: bool,
}

pub(super) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

impl Cache {
    pub(super) fn begin_session(&self) -> Result<(), CacheError> {
        let found = self.read_session();
        if found.as_ref().is_some_and(|session| session.boot == self.boot || session.synced) {
            return Ok(());
        }
        let Some(_alone) = self.try_lock_alone()? else {
            // Somebody is at it; wait for the end.
            drop(self.lock_shared()?);
            return self.begin_session();
        };
        if self.read_session() != found {
            return Ok(());
        }
        self.distrust()?;
        self.write_session(true)
    }

    fn read_session(&self) -> Option<Session> {
        serde_json::from_slice(&fs::read(self.dir.join("session")).ok()?).ok()
    }

    fn write_session(&self, synced: bool) -> Result<(), CacheError> {
        let (path, draft) = (self.dir.join("session"), self.draft());
        let write = || -> io::Result<()> {
            let session = Session { boot: self.boot.clone(), synced };
            let mut file = File::create(&draft)?;
            file.write_all(&serde_json::to_vec(&session)?)?;
            // Before what it speaks of: an old word after a power cut must not be too good.
            file.sync_all()?;
            fs::rename(&draft, &path)?;
            File::open(&self.dir)?.sync_all()
        };
        write().map_err(io_error(&path))
    }

    /// Notes that something is about to be added.
    pub(super) fn mark_unsynced(&self) -> Result<(), CacheError> {
        let noted = Session { boot: self.boot.clone(), synced: false };
        if self.read_session().as_ref() == Some(&noted) { Ok(()) } else { self.write_session(false) }
    }

    /// Makes what is here durable, so that it is believed after the machine went down. Worth calling when
    /// nobody waits; false: somebody was adding something, and nothing was done.
    ///
    /// # Errors
    /// When it cannot be flushed.
    pub fn sync(&self) -> Result<bool, CacheError> {
        let Some(_alone) = self.try_lock_alone()? else { return Ok(false) };
        if self.read_session().is_some_and(|session| session.synced) {
            return Ok(true);
        }
        let flush = || -> io::Result<()> { Ok(rustix::fs::syncfs(File::open(&self.dir)?)?) };
        flush().map_err(io_error(&self.dir))?;
        self.write_session(true)?;
        Ok(true)
    }

    /// Removes images and everything whose bytes are not what its name says.
    fn distrust(&self) -> Result<(), CacheError> {
        for dir in [self.images(), self.dir.join("tmp"), self.dir.join("pins")] {
            for path in entries(&dir)? {
                fs::remove_file(&path).map_err(io_error(&path))?;
            }
        }
        for dir in entries(&self.contents())? {
            for path in entries(&dir)? {
                if !self.is_what_it_says(&path).map_err(io_error(&path))? {
                    fs::remove_file(&path).map_err(io_error(&path))?;
                }
            }
        }
        Ok(())
    }

    /// Only contents of one block have a name that is the hash of their bytes; others are fetched again.
    fn is_what_it_says(&self, path: &Path) -> io::Result<bool> {
        match id_of(path) {
            Some(id) if id.is_plain_hash() => Ok(self.hasher.hash(&fs::read(path)?) == id.hash()),
            _ => Ok(false),
        }
    }
}

pub(super) fn entries(dir: &Path) -> Result<Vec<PathBuf>, CacheError> {
    let read = || fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>();
    read().map_err(io_error(dir))
}

/// The name of a cached content by its path.
pub(super) fn id_of(path: &Path) -> Option<ContentId> {
    let dir = path.parent()?.file_name()?.to_str()?;
    ContentId::parse(dir, path.file_name()?.to_str()?)
}

#[cfg(test)]
mod tests {
    use covey_types::BlockHash;

    use super::*;

    fn content_file(cache: &Cache, bytes: &[u8]) -> PathBuf {
        let block = BlockHash::of(bytes);
        let content = covey_home::manifest::Content::Whole { size: bytes.len() as u64, block };
        let path = cache.path_of(&ContentId::of(&content).unwrap());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn after_a_power_cut_only_what_is_right_is_kept() {
        let scratch = tempfile::tempdir().unwrap();
        let cache = Cache::open(scratch.path(), None).unwrap();
        let (good, bad) = (content_file(&cache, b"good"), content_file(&cache, b"bad"));
        let image = cache.images().join("x.json");
        for path in [&bad, &image] {
            fs::write(path, b"half").unwrap();
        }
        let session = |text: &str| fs::write(scratch.path().join("session"), text).unwrap();
        session(&format!(r#"{{"boot":"{}","synced":false}}"#, cache.boot));
        Cache::open(scratch.path(), None).unwrap();
        assert!(bad.exists(), "nothing is lost within one boot");
        session(r#"{"boot":"another","synced":true}"#);
        Cache::open(scratch.path(), None).unwrap();
        assert!(bad.exists(), "what was flushed is believed");
        session(r#"{"boot":"another","synced":false}"#);
        Cache::open(scratch.path(), None).unwrap();
        assert!(good.exists() && !bad.exists() && !image.exists());
    }

    #[test]
    fn a_flush_is_noted_and_an_addition_takes_the_note_back() {
        let scratch = tempfile::tempdir().unwrap();
        let cache = Cache::open(scratch.path(), None).unwrap();
        cache.mark_unsynced().unwrap();
        assert!(!cache.read_session().unwrap().synced);
        let shared = cache.lock_shared().unwrap();
        assert!(!cache.sync().unwrap(), "somebody adds something");
        drop(shared);
        assert!(cache.sync().unwrap());
        assert!(cache.read_session().unwrap().synced);
    }
}
