//! Which snapshot of a home is current, for use without a server: a small file that is replaced by conditional put.
//!
//! What stays true: blocks, manifest, pointer, in this order; this is the pointer (I6). One line of generations
//! per home: who publishes names the generation it started from and a fencing token that never gets smaller
//! (I5). Nothing has to be unlocked by hand. What does not belong here: leases, clocks, and servers, whose pointer
//! is a row in SQL.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use covey_types::{BlockHash, Fault, FencingToken, Generation, RootHash};
use serde::Serialize;

use crate::backend::{Backend, BackendError, DirectoryBackend, Expected, Key, PutOutcome, Versioned};
use crate::block::StoreError;
use crate::collect::Roots;
use crate::integrity::{NamedRoot, NamedRoots, RootNames};
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
        Ok(self.read_current(home)?.and_then(|(stored, _)| stored.pointer))
    }

    /// Kept snapshots, the oldest first, the current one last.
    ///
    /// # Errors
    /// When one of them cannot be read.
    pub fn snapshots(&self, home: &str) -> Result<Vec<Pointer>, PointerError> {
        let current = self.current(home)?;
        let mut found = Vec::new();
        for number in self.kept(home)? {
            let kept = self.read_kept(home, number)?.and_then(|(stored, _)| stored.pointer);
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
            let kept = self.read_kept(home, number)?.and_then(|(stored, _)| stored.pointer);
            if kept.is_some_and(|kept| !wanted(&kept)) && self.backend.remove(&kept_key(home, number)?)? {
                forgotten += 1;
            }
        }
        Ok(forgotten)
    }

    /// Forgets a home with all its snapshots; tells whether it had one. Nobody may publish it at the same time. Its
    /// blocks stay until the next garbage collection.
    ///
    /// # Errors
    /// When that is not certain; what is left of it is whole, and another try goes on.
    pub fn forget(&self, home: &str) -> Result<bool, PointerError> {
        for number in self.kept(home)? {
            self.backend.remove(&kept_key(home, number)?)?;
        }
        // The current one last: a copy without it would say that it is lost.
        self.backend.remove(&copy_key(home)?)?;
        Ok(self.backend.remove(&current_key(home)?)?)
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
        let Some((stored, found)) = self.read_current(home)? else {
            // A home must be seen by collections before it can need anything: first its place, then the floor.
            let place = Stored { pointer: None, floor: self.floor()?.0 };
            return match self.backend.put_if(&key, text(home, &place).as_bytes(), &Expected::Absent)? {
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
            match self.backend.put_if(&kept, text(home, &copy).as_bytes(), &Expected::Any)? {
                PutOutcome::Written(_) => {}
                PutOutcome::Conflict => return Ok(None),
            }
        }
        let pointer = Pointer { generation: generation.next(), root, token };
        let next = Stored { pointer: Some(pointer), floor: stored.floor };
        match self.backend.put_if(&key, text(home, &next).as_bytes(), &Expected::Version(found.version))? {
            PutOutcome::Conflict => return Ok(None),
            PutOutcome::Written(_) => {}
        }
        self.write_copy(home, pointer, stored.floor)?;
        // Before so many generations there cannot be more.
        let kept = match pointer.generation.0 > SNAPSHOTS_KEPT_MAX as u64 {
            true => self.kept(home)?,
            false => Vec::new(),
        };
        // The current one counts, and is not among them.
        for number in &kept[..(kept.len() + 1).saturating_sub(SNAPSHOTS_KEPT_MAX)] {
            self.backend.remove(&kept_key(home, *number)?)?;
        }
        Ok(Some(pointer))
    }

    /// Writes damaged pointers anew from the newest copy that is right, with the floor `least`; says which, and where
    /// there is no copy.
    pub(crate) fn mend(&self, least: u64) -> Result<Vec<String>, StoreError> {
        let mut mended = Vec::new();
        for home in self.backend.list_dirs(&Key::new(&["homes"])?)? {
            let key = current_key(&home)?;
            match self.read_current(&home) {
                Ok(Some((Stored { pointer: Some(current), floor }, _))) => {
                    let copy = self.read(&home, &copy_key(&home)?);
                    let newer = copy.as_ref().ok().and_then(|copy| copy.as_ref()?.0.pointer);
                    if let Some(newer) = newer.filter(|newer| newer.generation > current.generation) {
                        let stored = Stored { pointer: Some(newer), floor: floor.max(least) };
                        self.write(&home, &key, &stored)?;
                        mended.push(format!(
                            "{key}: it was older than its copy, generation {}",
                            newer.generation
                        ));
                    } else if newer.is_none() {
                        self.write_copy(&home, current, floor)?;
                        mended.push(copy_key(&home)?.to_string());
                    }
                }
                Ok(_) => {}
                Err(StoreError::Damaged { .. }) => {
                    let mut newest: Option<Pointer> = None;
                    let mut copies = vec![self.read(&home, &copy_key(&home)?)];
                    for number in self.kept(&home).map_err(store_error)? {
                        copies.push(self.read_kept(&home, number));
                    }
                    for copy in copies {
                        match copy {
                            Ok(copy) => {
                                let pointer = copy.and_then(|(stored, _)| stored.pointer);
                                newest = newest.into_iter().chain(pointer).max_by_key(|p| p.generation);
                            }
                            Err(StoreError::Damaged { .. }) => {}
                            Err(error) => return Err(error),
                        }
                    }
                    if let Some(pointer) = newest {
                        self.write(&home, &key, &Stored { pointer: Some(pointer), floor: least })?;
                        let generation = pointer.generation;
                        mended.push(format!(
                            "{key}: it is generation {generation}, the newest that has a copy"
                        ));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(mended)
    }

    /// The pointer of the home; none before its first publish. One that is gone although it has a copy is damaged: who
    /// took it for none would begin a new line of generations.
    fn read_current(&self, home: &str) -> Result<Option<(Stored, Versioned)>, StoreError> {
        let key = current_key(home)?;
        let found = self.read(home, &key)?;
        if found.is_none() && self.backend.get(&copy_key(home)?)?.is_some() {
            // It may just have been made.
            let again = self.read(home, &key)?;
            let gone = || StoreError::damaged(format!("{key} in {}", self.backend.place()), "it is gone");
            return again.map(Some).ok_or_else(gone);
        }
        Ok(found)
    }

    /// Copies what is current, to mend a damaged pointer with. Copies only get newer; where a crash comes before, the
    /// next publish makes one.
    fn write_copy(&self, home: &str, pointer: Pointer, floor: u64) -> Result<(), StoreError> {
        let key = copy_key(home)?;
        // The first one most likely has none, which is not worth a question.
        let mut is_guess = pointer.generation == Generation(1);
        for _ in 0..TRIES_MAX {
            let read = if std::mem::take(&mut is_guess) { Ok(None) } else { self.read(home, &key) };
            let expected = match read {
                Ok(None) => Expected::Absent,
                Ok(Some((Stored { pointer: Some(copy), .. }, _))) if copy.generation > pointer.generation => {
                    return Ok(());
                }
                Ok(Some((_, found))) => Expected::Version(found.version),
                Err(StoreError::Damaged { .. }) => Expected::Any,
                Err(error) => return Err(error),
            };
            let copy = text(home, &Stored { pointer: Some(pointer), floor });
            if let PutOutcome::Written(_) = self.backend.put_if(&key, copy.as_bytes(), &expected)? {
                return Ok(());
            }
        }
        Err(busy(home))
    }

    /// A kept snapshot; one under another's number is damaged.
    fn read_kept(&self, home: &str, number: u64) -> Result<Option<(Stored, Versioned)>, StoreError> {
        let key = kept_key(home, number)?;
        let found = self.read(home, &key)?;
        let is_its = |stored: &Stored| stored.pointer.is_none_or(|pointer| pointer.generation.0 == number);
        match found {
            Some((stored, _)) if !is_its(&stored) => {
                let place = format!("{key} in {}", self.backend.place());
                Err(StoreError::damaged(place, "it is another generation's"))
            }
            found => Ok(found),
        }
    }

    fn write(&self, home: &str, key: &Key, stored: &Stored) -> Result<(), StoreError> {
        match self.backend.put_if(key, text(home, stored).as_bytes(), &Expected::Any)? {
            PutOutcome::Written(_) => Ok(()),
            PutOutcome::Conflict => Err(busy(key.as_str())),
        }
    }

    fn kept(&self, home: &str) -> Result<Vec<u64>, PointerError> {
        let names = self.backend.list(&Key::new(&["homes", home, "snapshots"])?)?;
        let mut found: Vec<u64> = names.iter().filter_map(|name| name.parse().ok()).collect();
        found.sort_unstable();
        Ok(found)
    }

    fn read(&self, home: &str, key: &Key) -> Result<Option<(Stored, Versioned)>, StoreError> {
        let Some(found) = self.backend.get(key)? else { return Ok(None) };
        let stored = std::str::from_utf8(&found.bytes).ok().and_then(|text| parse(home, text));
        let place = || format!("{key} in {}", self.backend.place());
        let stored = stored.ok_or_else(|| StoreError::damaged(place(), "it is not a pointer"))?;
        Ok(Some((stored, found)))
    }

    /// The least epoch that publishes of homes without a place of their own may have, and the file's version.
    pub(crate) fn floor(&self) -> Result<(u64, Expected), StoreError> {
        let key = floor_key()?;
        let Some(found) = self.backend.get(&key)? else { return Ok((0, Expected::Absent)) };
        let floor = std::str::from_utf8(&found.bytes).ok().and_then(parse_floor);
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
            match self.backend.put_if(&floor_key()?, floor_text(epoch).as_bytes(), &expected)? {
                PutOutcome::Written(_) => return Ok(()),
                PutOutcome::Conflict => {}
            }
        }
        Err(busy("any"))
    }

    /// Writes a damaged floor anew.
    pub(crate) fn write_floor(&self, epoch: u64) -> Result<(), StoreError> {
        match self.backend.put_if(&floor_key()?, floor_text(epoch).as_bytes(), &Expected::Any)? {
            PutOutcome::Written(_) => Ok(()),
            PutOutcome::Conflict => Err(busy("any")),
        }
    }

    /// The greatest floor that any file here says; damaged files say nothing.
    pub(crate) fn greatest_floor(&self) -> Result<u64, StoreError> {
        let mut greatest = match self.floor() {
            Ok((floor, _)) => floor,
            Err(StoreError::Damaged { .. }) => 0,
            Err(error) => return Err(error),
        };
        for home in self.backend.list_dirs(&Key::new(&["homes"])?)? {
            match self.read(&home, &current_key(&home)?) {
                Ok(found) => greatest = greatest.max(found.map_or(0, |(stored, _)| stored.floor)),
                Err(StoreError::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(greatest)
    }

    fn raise_home_floor(&self, home: &str, epoch: u64) -> Result<(), StoreError> {
        let key = current_key(home)?;
        for _ in 0..TRIES_MAX {
            let Some((stored, found)) = self.read(home, &key)? else { return Ok(()) };
            if stored.floor >= epoch {
                return Ok(());
            }
            let raised = Stored { floor: epoch, ..stored };
            match self.backend.put_if(
                &key,
                text(home, &raised).as_bytes(),
                &Expected::Version(found.version),
            )? {
                PutOutcome::Written(_) => return Ok(()),
                PutOutcome::Conflict => {}
            }
        }
        Err(busy(home))
    }
}

impl RootNames for Pointers {
    fn named_roots(&self) -> Result<NamedRoots, StoreError> {
        let mut found = NamedRoots::default();
        for home in self.backend.list_dirs(&Key::new(&["homes"])?)? {
            let mut read = vec![self.read_current(&home)];
            if let (Ok(Some((current, _))), Ok(Some((copy, _)))) =
                (&read[0], self.read(&home, &copy_key(&home)?))
                && let (Some(current), Some(copy)) = (current.pointer, copy.pointer)
                && copy.generation > current.generation
            {
                let key = current_key(&home)?;
                let (is, was) = (current.generation, copy.generation);
                found
                    .problems
                    .push(format!("{key} in {}: it is generation {is} and was {was}", self.backend.place()));
            }
            if let Err(StoreError::Damaged { what, detail }) = self.read(&home, &copy_key(&home)?) {
                found.problems.push(format!("{what}: {detail}"));
            }
            for number in self.kept(&home).map_err(store_error)? {
                read.push(self.read_kept(&home, number));
            }
            let mut known = BTreeSet::new();
            for pointer in read {
                match pointer {
                    Ok(stored) => {
                        let pointer = stored.and_then(|(stored, _)| stored.pointer);
                        // What is being replaced stands in both places.
                        let pointer =
                            pointer.filter(|pointer| known.insert((pointer.generation, pointer.root)));
                        found.roots.extend(pointer.map(|pointer| NamedRoot {
                            home: home.clone(),
                            generation: pointer.generation,
                            root: pointer.root,
                        }));
                    }
                    Err(error @ StoreError::Damaged { .. }) => found.problems.push(error.to_string()),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(found)
    }
}

impl Roots for Pointers {
    fn roots(&self) -> Result<Vec<RootHash>, StoreError> {
        let mut roots = Vec::new();
        for home in self.homes().map_err(store_error)? {
            // First the current one: whatever was published before this read is it, or has been copied before it
            // was replaced.
            let current = self.read_current(&home)?;
            roots.extend(current.and_then(|(stored, _)| stored.pointer).map(|pointer| pointer.root));
            for number in self.kept(&home).map_err(store_error)? {
                let kept = self.read_kept(&home, number)?;
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

fn store_error(error: PointerError) -> StoreError {
    match error {
        PointerError::Store(error) => error,
        PointerError::Name(error) => error.into(),
        other => StoreError::unavailable(other.to_string(), std::io::Error::from(std::io::ErrorKind::Other)),
    }
}

fn busy(home: &str) -> StoreError {
    let error = std::io::Error::from(std::io::ErrorKind::ResourceBusy);
    StoreError::unavailable(format!("move the pointer of home {home}"), error)
}

fn current_key(home: &str) -> Result<Key, InvalidName> {
    Key::new(&["homes", home, "current"])
}

fn copy_key(home: &str) -> Result<Key, InvalidName> {
    Key::new(&["homes", home, "current.copy"])
}

fn floor_key() -> Result<Key, InvalidName> {
    Key::new(&["gc", "floor"])
}

fn floor_text(epoch: u64) -> String {
    let body = format!("covey-floor 1\n{epoch}\n");
    let checksum = BlockHash::of(body.as_bytes());
    format!("{body}checksum {checksum}\n")
}

fn parse_floor(found: &str) -> Option<u64> {
    let number = found.strip_prefix("covey-floor 1\n")?.lines().next()?.parse().ok()?;
    // Early stores have no checksum.
    (found == floor_text(number) || found == format!("covey-floor 1\n{number}\n")).then_some(number)
}

fn kept_key(home: &str, generation: u64) -> Result<Key, InvalidName> {
    Key::new(&["homes", home, "snapshots", &format!("{generation:020}")])
}

/// The file's bytes. The checksum is over the home's name, too, so that the pointer of another home is damage.
fn text(home: &str, stored: &Stored) -> String {
    with_checksum(stored, &format!("home {home}\n"))
}

fn with_checksum(stored: &Stored, of: &str) -> String {
    let body = match &stored.pointer {
        Some(pointer) => format!(
            "covey-pointer 1\ngeneration {}\nroot {}\ntoken {}\nfloor {}\n",
            pointer.generation, pointer.root, pointer.token, stored.floor
        ),
        None => format!("covey-pointer 1\ngeneration 0\nfloor {}\n", stored.floor),
    };
    let checksum = BlockHash::of(format!("{body}{of}").as_bytes());
    format!("{body}checksum {checksum}\n")
}

fn parse(home: &str, found: &str) -> Option<Stored> {
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
    // Early stores have a checksum without the name.
    (text(home, &stored) == found || with_checksum(&stored, "") == found).then_some(stored)
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
