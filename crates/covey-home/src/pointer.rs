//! Which snapshot of a home is current, for use without a server: a small file that is replaced by conditional put.
//!
//! What stays true: blocks, manifest, pointer, in this order; this is the pointer (I6). One line of generations
//! per home: who publishes names the generation it started from and a fencing token that never gets smaller
//! (I5). Nothing has to be unlocked by hand. What does not belong here: leases, clocks, and servers, whose pointer
//! is a row in SQL.

use std::path::Path;
use std::sync::Arc;

use covey_types::{BlockHash, Fault, FencingToken, Generation, RootHash};
use serde::Serialize;

use crate::backend::{Backend, BackendError, DirectoryBackend, Expected, Key, PutOutcome, Versioned};
use crate::block::StoreError;
use crate::name::{InvalidName, check_name};
use crate::secure::{SecureError, SecureReport, SecureRequest, secure};

/// Earlier snapshots whose pointers are kept; the oldest goes when a further one comes. Their blocks stay until
/// a garbage collection asks which are still named.
pub const SNAPSHOTS_KEPT_MAX: usize = 64;
/// So many lost races for one pointer are no race any more.
const TRIES_MAX: usize = 32;

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

impl From<BackendError> for PointerError {
    fn from(error: BackendError) -> Self {
        Self::Store(error.into())
    }
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

/// The homes of one org in a store.
#[derive(Debug)]
pub struct Pointers {
    backend: Arc<dyn Backend>,
}

impl Pointers {
    /// The pointers beside the packs that stand on `backend`.
    pub fn on(backend: Arc<dyn Backend>) -> Self {
        Self { backend }
    }

    /// The pointers of `org` in the store directory `path`.
    ///
    /// # Errors
    /// When the org's name is none, or the directory cannot be used.
    pub fn open(path: &Path, org: &str) -> Result<Self, PointerError> {
        Ok(Self::on(Arc::new(DirectoryBackend::open(path, org)?)))
    }

    /// Names of the homes that have a pointer or had one, in no order.
    ///
    /// # Errors
    /// When not all can be told.
    pub fn homes(&self) -> Result<Vec<String>, PointerError> {
        Ok(self.backend.list_dirs(&Key::new(&["homes"])?)?)
    }

    /// The home's current snapshot; none before the first publish.
    ///
    /// # Errors
    /// When that cannot be told.
    pub fn current(&self, home: &str) -> Result<Option<Pointer>, PointerError> {
        Ok(self.read(&Key::new(&["homes", home, "current"])?)?.map(|(pointer, _)| pointer))
    }

    /// Kept snapshots, the oldest first, the current one last.
    ///
    /// # Errors
    /// When one of them cannot be read.
    pub fn snapshots(&self, home: &str) -> Result<Vec<Pointer>, PointerError> {
        let current = self.current(home)?;
        let mut found = Vec::new();
        for number in self.kept(home)? {
            let kept = self.read(&kept_key(home, number)?)?.map(|(pointer, _)| pointer);
            // One beyond the current one is of a publish that lost its race.
            found.extend(kept.filter(|kept| current.is_some_and(|c| kept.generation < c.generation)));
        }
        found.extend(current);
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
        for _ in 0..TRIES_MAX {
            if let Some(published) = self.try_publish(home, root, base, token)? {
                return Ok(published);
            }
        }
        let error = std::io::Error::from(std::io::ErrorKind::ResourceBusy);
        Err(StoreError::unavailable(format!("move the pointer of home {home}"), error).into())
    }

    /// None: somebody else was faster; look again.
    fn try_publish(
        &self,
        home: &str,
        root: RootHash,
        base: Generation,
        token: FencingToken,
    ) -> Result<Option<Pointer>, PointerError> {
        let key = Key::new(&["homes", home, "current"])?;
        let found = self.read(&key)?;
        let current = found.as_ref().map(|(pointer, _)| *pointer);
        let (generation, newest) = current.map_or_else(Default::default, |p| (p.generation, p.token));
        if token < newest {
            return Err(PointerError::Fenced { offered: token, current: newest });
        }
        if let Some(current) = current.filter(|current| current.root == root && current.token == token)
            && (base.next() == generation || base == generation)
        {
            return Ok(Some(current));
        }
        if base != generation {
            return Err(PointerError::NotCurrent { base, current: generation });
        }
        // What is replaced is kept first, and by whoever replaces it: a crash in between leaves a copy of what is
        // still current, and a publish that loses its race has kept what the winner kept, too.
        if let Some(current) = &current {
            let kept = kept_key(home, current.generation.0)?;
            match self.backend.put_if(&kept, text(current).as_bytes(), &Expected::Any)? {
                PutOutcome::Written(_) => {}
                PutOutcome::Conflict => return Ok(None),
            }
        }
        let pointer = Pointer { generation: generation.next(), root, token };
        let expected = found.map_or(Expected::Absent, |(_, found)| Expected::Version(found.version));
        match self.backend.put_if(&key, text(&pointer).as_bytes(), &expected)? {
            PutOutcome::Conflict => return Ok(None),
            PutOutcome::Written(_) => {}
        }
        let kept = self.kept(home)?;
        // The current one counts, and has no copy yet.
        for number in &kept[..(kept.len() + 1).saturating_sub(SNAPSHOTS_KEPT_MAX)] {
            self.backend.remove(&kept_key(home, *number)?)?;
        }
        Ok(Some(pointer))
    }

    fn kept(&self, home: &str) -> Result<Vec<u64>, PointerError> {
        let names = self.backend.list(&Key::new(&["homes", home, "snapshots"])?)?;
        let mut found: Vec<u64> = names.iter().filter_map(|name| name.parse().ok()).collect();
        found.sort_unstable();
        Ok(found)
    }

    fn read(&self, key: &Key) -> Result<Option<(Pointer, Versioned)>, PointerError> {
        let Some(found) = self.backend.get(key)? else { return Ok(None) };
        let pointer = std::str::from_utf8(&found.bytes).ok().and_then(parse);
        let place = || format!("{key} in {}", self.backend.place());
        let pointer = pointer.ok_or_else(|| StoreError::damaged(place(), "it is not a pointer"))?;
        Ok(Some((pointer, found)))
    }
}

fn kept_key(home: &str, generation: u64) -> Result<Key, InvalidName> {
    Key::new(&["homes", home, "snapshots", &format!("{generation:020}")])
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
