//! Which snapshot of a home is current, for use without a server: a file moved by rename under an OS lock.
//!
//! What stays true: blocks, manifest, pointer, in this order; this is the pointer (I6). One line of generations
//! per home: who publishes names the generation it started from and a fencing token that never gets smaller
//! (I5). The lock dies with its process, so nothing has to be unlocked by hand. What does not belong here:
//! leases, clocks, and servers, whose pointer is a row in SQL.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use covey_types::{BlockHash, Fault, FencingToken, Generation, RootHash};
use rustix::fs::FlockOperation;
use serde::Serialize;

use crate::block::StoreError;
use crate::directory::{create_dir_durably, sync_dir};
use crate::name::{InvalidName, check_name};
use crate::secure::{SecureError, SecureReport, SecureRequest, secure};

/// Earlier snapshots whose pointers are kept; the oldest goes when a further one comes. Their blocks stay until
/// a garbage collection asks which are still named.
pub const SNAPSHOTS_KEPT_MAX: usize = 64;
/// Longer is no pointer file.
const POINTER_BYTES_MAX: u64 = 4096;

/// A published snapshot of a home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Pointer {
    /// Number within the home, from 1.
    pub generation: Generation,
    /// The state.
    pub root: RootHash,
    /// Who published it.
    pub token: FencingToken,
}

/// Why a snapshot was not published, or a pointer not read.
#[derive(Debug, thiserror::Error)]
pub enum PointerError {
    /// Somebody with a larger token has published since.
    #[error("token {offered} is older than {current}, which has published since; give the home up")]
    Fenced {
        /// The caller's.
        offered: FencingToken,
        /// The home's.
        current: FencingToken,
    },
    /// The caller did not start from the current snapshot.
    #[error("generation {current} is current, not {base}; materialize it first, or publish beside it")]
    NotCurrent {
        /// The caller's.
        base: Generation,
        /// The home's; 0 before the first publish.
        current: Generation,
    },
    /// The home's name.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// The file is damaged, or the disk does not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl PointerError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Fenced { .. } | Self::NotCurrent { .. } => Fault::Conflict,
            Self::Name(_) => Fault::Invalid,
            Self::Store(error) => error.fault(),
        }
    }
}

/// The homes of one org in a store directory.
#[derive(Debug)]
pub struct Pointers {
    homes: PathBuf,
}

impl Pointers {
    /// The pointers of `org` in the store at `path`, the path that [`crate::DirectoryStore::open`] takes.
    ///
    /// # Errors
    /// When the org's name is none.
    pub fn open(path: &Path, org: &str) -> Result<Self, PointerError> {
        check_name(org)?;
        Ok(Self { homes: path.join("orgs").join(org).join("homes") })
    }

    /// The home's current snapshot; none before the first publish.
    ///
    /// # Errors
    /// When that cannot be told.
    pub fn current(&self, home: &str) -> Result<Option<Pointer>, PointerError> {
        check_name(home)?;
        Ok(read(&self.homes.join(home).join("current"))?)
    }

    /// Kept snapshots, the oldest first, the current one last.
    ///
    /// # Errors
    /// When one of them cannot be read.
    pub fn snapshots(&self, home: &str) -> Result<Vec<Pointer>, PointerError> {
        check_name(home)?;
        let mut found = Vec::new();
        for (_, path) in kept(&self.homes.join(home).join("snapshots"))? {
            found.extend(read(&path)?);
        }
        Ok(found)
    }

    /// Makes `root` the home's current snapshot. Every block it names must be durable. Repeating a publish
    /// whose answer was lost gives the same answer.
    ///
    /// # Errors
    /// [`PointerError::Fenced`] and [`PointerError::NotCurrent`] leave everything as it was.
    pub fn publish(
        &self,
        home: &str,
        root: RootHash,
        base: Generation,
        token: FencingToken,
    ) -> Result<Pointer, PointerError> {
        check_name(home)?;
        let dir = self.homes.join(home);
        let snapshots = dir.join("snapshots");
        create_dir_durably(&snapshots)?;
        let unavailable =
            |error: io::Error| StoreError::unavailable(format!("lock {}", dir.display()), error);
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(dir.join("lock"))
            .map_err(unavailable)?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(|error| unavailable(error.into()))?;
        let current = read(&dir.join("current"))?;
        let (generation, newest) = current.map_or_else(Default::default, |p| (p.generation, p.token));
        if token < newest {
            return Err(PointerError::Fenced { offered: token, current: newest });
        }
        if let Some(current) = current.filter(|current| current.root == root && current.token == token)
            && (base.next() == generation || base == generation)
        {
            return Ok(current);
        }
        if base != generation {
            return Err(PointerError::NotCurrent { base, current: generation });
        }
        let pointer = Pointer { generation: generation.next(), root, token };
        // The kept copy first: a crash between the two leaves a copy that the repeated publish overwrites.
        write(&snapshots, &format!("{:020}", pointer.generation.0), &pointer)?;
        write(&dir, "current", &pointer)?;
        let all = kept(&snapshots)?;
        for (_, path) in &all[..all.len().saturating_sub(SNAPSHOTS_KEPT_MAX)] {
            fs::remove_file(path)
                .map_err(|error| StoreError::unavailable(format!("remove {}", path.display()), error))?;
        }
        drop(lock);
        Ok(pointer)
    }
}

fn kept(dir: &Path) -> Result<Vec<(u64, PathBuf)>, StoreError> {
    let unavailable = |error| StoreError::unavailable(format!("list {}", dir.display()), error);
    let mut found = Vec::new();
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        Err(error) => return Err(unavailable(error)),
    };
    for entry in entries {
        let entry = entry.map_err(unavailable)?;
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        found.extend(number.map(|number: u64| (number, entry.path())));
    }
    found.sort_unstable();
    Ok(found)
}

fn text(pointer: &Pointer) -> String {
    let body = format!(
        "covey-pointer 1\ngeneration {}\nroot {}\ntoken {}\n",
        pointer.generation, pointer.root, pointer.token
    );
    let checksum = BlockHash::of(body.as_bytes());
    format!("{body}checksum {checksum}\n")
}

fn parse(found: &str) -> Option<Pointer> {
    let mut lines = found.lines();
    let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned);
    if field("covey-pointer")? != "1" {
        return None;
    }
    let pointer = Pointer {
        generation: Generation(field("generation")?.parse().ok()?),
        root: field("root")?.parse().ok()?,
        token: FencingToken(field("token")?.parse().ok()?),
    };
    // One pointer has one text, so comparing it checks the checksum and everything else.
    (text(&pointer) == found).then_some(pointer)
}

fn read(path: &Path) -> Result<Option<Pointer>, StoreError> {
    use std::io::Read;
    let unavailable = |error| StoreError::unavailable(format!("read {}", path.display()), error);
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unavailable(error)),
    };
    let mut found = Vec::new();
    file.take(POINTER_BYTES_MAX).read_to_end(&mut found).map_err(unavailable)?;
    let pointer = std::str::from_utf8(&found).ok().and_then(parse);
    pointer.map(Some).ok_or_else(|| StoreError::damaged(path.display().to_string(), "it is not a pointer"))
}

/// Data, flush, rename, flush of the directory: after a power cut the old or the new one is there, whole.
fn write(dir: &Path, name: &str, pointer: &Pointer) -> Result<(), StoreError> {
    let path = dir.join(name);
    // One name for all writers; they hold the home's lock.
    let temporary = dir.join(format!("{name}.tmp"));
    let unavailable = |error| StoreError::unavailable(format!("write {}", path.display()), error);
    let mut file = File::create(&temporary).map_err(unavailable)?;
    file.write_all(text(pointer).as_bytes()).and_then(|()| file.sync_all()).map_err(unavailable)?;
    fs::rename(&temporary, &path).map_err(unavailable)?;
    sync_dir(dir)
}

/// Why a home was not secured and published.
#[derive(Debug, thiserror::Error)]
pub enum SecureAndPublishError {
    /// Securing failed; nothing was published.
    #[error(transparent)]
    Secure(#[from] SecureError),
    /// It was secured but not published.
    #[error(transparent)]
    Pointer(#[from] PointerError),
}

impl SecureAndPublishError {
    /// What the caller can do about it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Secure(error) => error.fault(),
            Self::Pointer(error) => error.fault(),
        }
    }
}

/// Secures a home and makes it current, for use without a server. A home that has not changed keeps its
/// generation. A partial secure is not published: it never replaces a complete one silently.
///
/// # Errors
/// When either failed; the pointer is then where it was.
pub fn secure_and_publish(
    request: &SecureRequest<'_>,
    pointers: &Pointers,
    home: &str,
    token: FencingToken,
) -> Result<SecureReport, SecureAndPublishError> {
    let current = pointers.current(home)?;
    let request = SecureRequest { previous: current.map(|pointer| pointer.root), ..*request };
    let mut report = secure(&request)?;
    if report.partial {
        return Ok(report);
    }
    let base = current.map_or_else(Generation::default, |pointer| pointer.generation);
    let published = match current.filter(|current| current.root == report.root && current.token >= token) {
        Some(current) => current,
        None => pointers.publish(home, report.root, base, token)?,
    };
    report.generation = Some(published.generation);
    Ok(report)
}
