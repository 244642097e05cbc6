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
use crate::collect::Roots;
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
    /// A garbage collection has passed since the secure began, and may have deleted what it relied on.
    #[error(
        "a garbage collection has passed since this was secured (epoch {epoch}, now {floor}); secure it again"
    )]
    Collected {
        /// The caller's.
        epoch: u64,
        /// The least that is taken.
        floor: u64,
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
            Self::Collected { .. } => Fault::Retry,
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
        Ok(self.read(&current_key(home)?)?.and_then(|(stored, _)| stored.pointer))
    }

    /// Kept snapshots, the oldest first, the current one last.
    ///
    /// # Errors
    /// When one of them cannot be read.
    pub fn snapshots(&self, home: &str) -> Result<Vec<Pointer>, PointerError> {
        let current = self.current(home)?;
        let mut found = Vec::new();
        for number in self.kept(home)? {
            let kept = self.read(&kept_key(home, number)?)?.and_then(|(stored, _)| stored.pointer);
            // One beyond the current one is of a publish that lost its race.
            found.extend(kept.filter(|kept| current.is_some_and(|c| kept.generation < c.generation)));
        }
        found.extend(current);
        Ok(found)
    }

    /// Forgets kept snapshots of the home that are not `wanted`; the current one stays. Tells how many went. Their
    /// blocks stay until the next garbage collection.
    ///
    /// # Errors
    /// When they cannot be read or removed; some may be gone then.
    pub fn retain(&self, home: &str, wanted: &dyn Fn(&Pointer) -> bool) -> Result<u64, PointerError> {
        let mut forgotten = 0;
        for number in self.kept(home)? {
            let key = kept_key(home, number)?;
            let kept = self.read(&key)?.and_then(|(stored, _)| stored.pointer);
            if kept.is_some_and(|kept| !wanted(&kept)) && self.backend.remove(&key)? {
                forgotten += 1;
            }
        }
        Ok(forgotten)
    }

    /// Makes `root` the home's current snapshot. Every block it names must be durable; `epoch` is that of the
    /// upload that brought them ([`crate::Upload::epoch`]). Repeating a publish whose answer was lost gives the same
    /// answer.
    ///
    /// # Errors
    /// [`PointerError::Fenced`], [`PointerError::NotCurrent`] and [`PointerError::Collected`] leave everything as it
    /// was.
    pub fn publish(
        &self,
        home: &str,
        root: RootHash,
        base: Generation,
        token: FencingToken,
        epoch: u64,
    ) -> Result<Pointer, PointerError> {
        check_name(home)?;
        for _ in 0..TRIES_MAX {
            if let Some(published) = self.try_publish(home, root, base, token, epoch)? {
                return Ok(published);
            }
        }
        Err(busy(home).into())
    }

    /// None: somebody else was faster; look again.
    fn try_publish(
        &self,
        home: &str,
        root: RootHash,
        base: Generation,
        token: FencingToken,
        epoch: u64,
    ) -> Result<Option<Pointer>, PointerError> {
        let key = current_key(home)?;
        let Some((stored, found)) = self.read(&key)? else {
            // A home must be seen by collections before it can need anything: first its place, then the floor.
            let place = Stored { pointer: None, floor: self.floor()?.0 };
            return match self.backend.put_if(&key, text(&place).as_bytes(), &Expected::Absent)? {
                PutOutcome::Written(_) | PutOutcome::Conflict => Ok(None),
            };
        };
        let current = stored.pointer;
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
        // The home's own floor is checked again by the conditional put. The store's is for a home whose place was
        // made after a collection had listed the homes.
        let floor = stored.floor.max(self.floor()?.0);
        if epoch < floor {
            return Err(PointerError::Collected { epoch, floor });
        }
        // What is replaced is kept first, and by whoever replaces it: a crash in between leaves a copy of what is
        // still current, and a publish that loses its race has kept what the winner kept, too.
        if let Some(current) = &current {
            let kept = kept_key(home, current.generation.0)?;
            let copy = Stored { pointer: Some(*current), floor: stored.floor };
            match self.backend.put_if(&kept, text(&copy).as_bytes(), &Expected::Any)? {
                PutOutcome::Written(_) => {}
                PutOutcome::Conflict => return Ok(None),
            }
        }
        let pointer = Pointer { generation: generation.next(), root, token };
        let next = Stored { pointer: Some(pointer), floor: stored.floor };
        match self.backend.put_if(&key, text(&next).as_bytes(), &Expected::Version(found.version))? {
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

    fn read(&self, key: &Key) -> Result<Option<(Stored, Versioned)>, StoreError> {
        let Some(found) = self.backend.get(key)? else { return Ok(None) };
        let stored = std::str::from_utf8(&found.bytes).ok().and_then(parse);
        let place = || format!("{key} in {}", self.backend.place());
        let stored = stored.ok_or_else(|| StoreError::damaged(place(), "it is not a pointer"))?;
        Ok(Some((stored, found)))
    }

    /// The least epoch that publishes of homes without a place of their own may have, and the file's version.
    fn floor(&self) -> Result<(u64, Expected), StoreError> {
        let key = floor_key()?;
        let Some(found) = self.backend.get(&key)? else { return Ok((0, Expected::Absent)) };
        let text = std::str::from_utf8(&found.bytes).ok();
        let floor =
            text.and_then(|text| text.strip_prefix("covey-floor 1\n")?.strip_suffix('\n')?.parse().ok());
        let damaged =
            || StoreError::damaged(format!("{key} in {}", self.backend.place()), "it is not a floor");
        Ok((floor.ok_or_else(damaged)?, Expected::Version(found.version)))
    }

    fn raise_store_floor(&self, epoch: u64) -> Result<(), StoreError> {
        for _ in 0..TRIES_MAX {
            let (floor, expected) = self.floor()?;
            if floor >= epoch {
                return Ok(());
            }
            let text = format!("covey-floor 1\n{epoch}\n");
            match self.backend.put_if(&floor_key()?, text.as_bytes(), &expected)? {
                PutOutcome::Written(_) => return Ok(()),
                PutOutcome::Conflict => {}
            }
        }
        Err(busy("any"))
    }

    fn raise_home_floor(&self, home: &str, epoch: u64) -> Result<(), StoreError> {
        let key = current_key(home)?;
        for _ in 0..TRIES_MAX {
            let Some((stored, found)) = self.read(&key)? else { return Ok(()) };
            if stored.floor >= epoch {
                return Ok(());
            }
            let raised = Stored { floor: epoch, ..stored };
            match self.backend.put_if(&key, text(&raised).as_bytes(), &Expected::Version(found.version))? {
                PutOutcome::Written(_) => return Ok(()),
                PutOutcome::Conflict => {}
            }
        }
        Err(busy(home))
    }
}

impl Roots for Pointers {
    fn roots(&self) -> Result<Vec<RootHash>, StoreError> {
        let store_error = |error| match error {
            PointerError::Store(error) => error,
            PointerError::Name(error) => error.into(),
            other => {
                StoreError::unavailable(other.to_string(), std::io::Error::from(std::io::ErrorKind::Other))
            }
        };
        let mut roots = Vec::new();
        for home in self.homes().map_err(store_error)? {
            // First the current one: whatever was published before this read is it, or has been copied before it
            // was replaced.
            let current = self.read(&current_key(&home)?)?;
            roots.extend(current.and_then(|(stored, _)| stored.pointer).map(|pointer| pointer.root));
            for number in self.kept(&home).map_err(store_error)? {
                let kept = self.read(&kept_key(&home, number)?)?;
                roots.extend(kept.and_then(|(stored, _)| stored.pointer).map(|pointer| pointer.root));
            }
        }
        Ok(roots)
    }

    fn raise_floor(&self, epoch: u64) -> Result<(), StoreError> {
        self.raise_store_floor(epoch)?;
        let homes = self.backend.list_dirs(&Key::new(&["homes"])?)?;
        homes.iter().try_for_each(|home| self.raise_home_floor(home, epoch))
    }
}

/// What a pointer's file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stored {
    /// None before the first publish.
    pointer: Option<Pointer>,
    /// Publishes of earlier epochs are refused.
    floor: u64,
}

fn busy(home: &str) -> StoreError {
    let error = std::io::Error::from(std::io::ErrorKind::ResourceBusy);
    StoreError::unavailable(format!("move the pointer of home {home}"), error)
}

fn current_key(home: &str) -> Result<Key, InvalidName> {
    Key::new(&["homes", home, "current"])
}

fn floor_key() -> Result<Key, InvalidName> {
    Key::new(&["gc", "floor"])
}

fn kept_key(home: &str, generation: u64) -> Result<Key, InvalidName> {
    Key::new(&["homes", home, "snapshots", &format!("{generation:020}")])
}

fn text(stored: &Stored) -> String {
    let body = match &stored.pointer {
        Some(pointer) => format!(
            "covey-pointer 1\ngeneration {}\nroot {}\ntoken {}\nfloor {}\n",
            pointer.generation, pointer.root, pointer.token, stored.floor
        ),
        None => format!("covey-pointer 1\ngeneration 0\nfloor {}\n", stored.floor),
    };
    let checksum = BlockHash::of(body.as_bytes());
    format!("{body}checksum {checksum}\n")
}

fn parse(found: &str) -> Option<Stored> {
    let mut lines = found.lines();
    let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned);
    if field("covey-pointer")? != "1" {
        return None;
    }
    let generation = Generation(field("generation")?.parse().ok()?);
    let pointer = match generation {
        Generation(0) => None,
        generation => Some(Pointer {
            generation,
            root: field("root")?.parse().ok()?,
            token: FencingToken(field("token")?.parse().ok()?),
        }),
    };
    let stored = Stored { pointer, floor: field("floor")?.parse().ok()? };
    // One pointer has one text, so comparing it checks the checksum and everything else.
    (text(&stored) == found).then_some(stored)
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
        None => pointers.publish(home, report.root, base, token, report.epoch)?,
    };
    report.generation = Some(published.generation);
    Ok(report)
}
