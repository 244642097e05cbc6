//! The mark of a working copy: which published state it descends from.
//!
//! It stands beside the copy (`state.json`), never inside, where the agent could write it. A copy without a
//! readable mark is never trusted; a copy is never overwritten because of it, only moved aside.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use covey_types::{FencingToken, Generation, HomeId, OrgId, RootHash, StepId};
use serde::{Deserialize, Serialize};

/// Everything a restarted runner must know about a working copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    /// Owner of the home.
    pub(crate) org: OrgId,
    /// The published generation that the copy descends from.
    pub(crate) generation: Generation,
    /// Its root.
    pub(crate) root: Option<RootHash>,
    /// A root that was offered and not answered: if the server's current root is this one, the answer was lost
    /// and the copy is not stale.
    pub(crate) offered: Option<Offer>,
    /// The files are being put back: they may be incomplete, and completing them in place loses nothing.
    pub(crate) materializing: bool,
    /// Owner of the files on the host.
    pub(crate) host_uid: u32,
    /// The highest lease token seen for this home.
    pub(crate) token: FencingToken,
    /// The last step whose files the copy contains.
    pub(crate) step: Option<StepId>,
    /// The sandbox was parked when its runner ended in good order and was thawed only for that.
    #[serde(default)]
    pub(crate) parked: bool,
    /// The copy holds nothing that is not published, and nothing runs on it.
    #[serde(default)]
    pub(crate) settled: Option<Settled>,
}

/// See [`Mark::settled`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settled {
    /// Bytes of its files.
    pub(crate) bytes: u64,
}

/// What the name of a home's directory gets in front when the home was deleted.
pub(crate) const DELETED_PREFIX: &str = "deleted-";

/// Where a copy stands that is being deleted.
pub(crate) const GIVEN_UP: &str = "given-up";

/// An unanswered publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offer {
    /// The root that was offered.
    pub(crate) root: RootHash,
}

/// The directory of one home on this host.
#[derive(Debug, Clone)]
pub(crate) struct HomeDir {
    path: PathBuf,
}

impl HomeDir {
    pub(crate) fn new(homes_dir: &Path, home: HomeId) -> Self {
        Self { path: homes_dir.join(home.to_string()) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The working copy.
    pub(crate) fn files(&self) -> PathBuf {
        self.path.join("files")
    }

    /// Full outputs of calls.
    pub(crate) fn outputs(&self) -> PathBuf {
        self.path.join("outputs")
    }

    /// The stat cache of the home store.
    pub(crate) fn stat_cache(&self) -> PathBuf {
        self.path.join("stat-cache")
    }

    fn mark(&self) -> PathBuf {
        self.path.join("state.json")
    }

    /// Reads the mark; `None` when there is none or it does not parse, which is not trusted either way.
    pub(crate) fn read_mark(&self) -> io::Result<Option<Mark>> {
        let text = match fs::read(self.mark()) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        match serde_json::from_slice(&text) {
            Ok(mark) => Ok(Some(mark)),
            Err(error) => {
                tracing::warn!(path = %self.mark().display(), %error, "unreadable mark; the copy is not trusted");
                Ok(None)
            }
        }
    }

    /// Replaces the mark durably: a crash leaves the old one or the new one.
    pub(crate) fn write_mark(&self, mark: &Mark) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(mark).map_err(io::Error::other)?;
        let temporary = self.path.join("state.json.new");
        let mut file = File::create(&temporary)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&temporary, self.mark())?;
        File::open(&self.path)?.sync_all()
    }

    /// Moves the working copy out of the way; gives its new place. Nothing is ever deleted here.
    pub(crate) fn set_aside(&self) -> io::Result<PathBuf> {
        let number = (1..).find(|n| !self.path.join(format!("aside-{n}")).exists()).unwrap_or(u32::MAX);
        let aside = self.path.join(format!("aside-{number}"));
        fs::rename(self.files(), &aside)?;
        Ok(aside)
    }
}

impl HomeDir {
    /// When the mark was last written.
    pub(crate) fn used_at(&self) -> io::Result<SystemTime> {
        fs::metadata(self.mark())?.modified()
    }

    /// Takes a copy out of the way that is to be deleted: the next wake puts the home back from the store.
    pub(crate) fn give_up_files(&self) -> io::Result<()> {
        let given_up = self.path.join(GIVEN_UP);
        match fs::remove_dir_all(&given_up) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::rename(self.files(), given_up)
    }

    /// Takes everything of a home that was deleted out of the way; [`crate::evict::delete_evicted`] deletes it.
    pub(crate) fn give_up(&self) -> io::Result<()> {
        let name = self.path.file_name().unwrap_or_default();
        let mut given_up = std::ffi::OsString::from(DELETED_PREFIX);
        given_up.push(name);
        let given_up = self.path.with_file_name(given_up);
        match fs::remove_dir_all(&given_up) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        match fs::rename(&self.path, given_up) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// Every home with a readable mark below `homes_dir`.
pub(crate) fn all(homes_dir: &Path) -> io::Result<Vec<(HomeId, Mark)>> {
    let mut marks = Vec::new();
    for entry in fs::read_dir(homes_dir)? {
        let name = entry?.file_name();
        let Some(home) = name.to_str().and_then(|n| n.parse().ok()) else { continue };
        if let Some(mark) = HomeDir::new(homes_dir, home).read_mark()? {
            marks.push((home, mark));
        }
    }
    Ok(marks)
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn mark() -> Mark {
        Mark {
            org: OrgId::from_uuid(Uuid::nil()),
            generation: Generation(3),
            root: Some(RootHash::of(b"r")),
            offered: None,
            materializing: false,
            host_uid: 200_001,
            token: FencingToken(9),
            step: None,
            parked: false,
            settled: None,
        }
    }

    #[test]
    fn a_mark_survives_and_a_damaged_one_is_as_none() {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeId::from_uuid(Uuid::nil());
        let home_dir = HomeDir::new(dir.path(), home);
        fs::create_dir(home_dir.path()).unwrap();
        assert_eq!(home_dir.read_mark().unwrap(), None);
        home_dir.write_mark(&mark()).unwrap();
        assert_eq!(home_dir.read_mark().unwrap(), Some(mark()));
        assert_eq!(all(dir.path()).unwrap(), vec![(home, mark())]);
        fs::write(home_dir.mark(), "{\"generation\":").unwrap();
        assert_eq!(home_dir.read_mark().unwrap(), None);
    }

    #[test]
    fn setting_aside_never_overwrites_an_earlier_one() {
        let dir = tempfile::tempdir().unwrap();
        let home_dir = HomeDir::new(dir.path(), HomeId::from_uuid(Uuid::nil()));
        for content in ["first", "second"] {
            fs::create_dir_all(home_dir.files()).unwrap();
            fs::write(home_dir.files().join("f"), content).unwrap();
            home_dir.set_aside().unwrap();
        }
        let read = |n| fs::read_to_string(home_dir.path().join(format!("aside-{n}/f"))).unwrap();
        assert_eq!((read(1), read(2)), ("first".to_owned(), "second".to_owned()));
    }
}
