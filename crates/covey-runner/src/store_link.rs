//! Runner side of the store link: the home store through the server of the same machine, for a runner that holds no
//! key for the place where it lies.
//!
//! What stays true: a link that fails is not used again, and what was asked over it is asked once more over a fresh
//! one if it only reads; a pack on its way is lost with its link, and its upload says so. What does not belong here:
//! which files there are.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use covey_home::backend::{
    Backend, BackendError, Expected, FileVersion, Key, NewFile, OpenStore, PutOutcome, Tail, Versioned,
};
use covey_home::name::check_name;
use covey_home::{NameKeys, StoreError};
use covey_wire::frame::{self, FrameError};
use covey_wire::generation::{STORE_LINK, STORE_LINK_MIN};
use covey_wire::store::{STORE_PIECE_BYTES_MAX, StoreAnswer, StoreExpected, StoreRequest};

/// Longest wait for one answer: the server tries a bucket again and again for a few minutes.
const ANSWER_MAX: Duration = Duration::from_secs(600);
/// Links that are kept for the next question.
const IDLE_MAX: usize = 8;

/// A way to the store of a server that listens on a unix socket.
#[derive(Debug, Clone)]
pub struct StoreLink {
    socket: PathBuf,
    cache_dir: PathBuf,
}

impl StoreLink {
    /// Nothing is dialled before the first question. `cache_dir` is for what can be made anew.
    pub const fn new(socket: PathBuf, cache_dir: PathBuf) -> Self {
        Self { socket, cache_dir }
    }
}

impl OpenStore for StoreLink {
    fn open(&self, org: &str) -> Result<Arc<dyn Backend>, StoreError> {
        check_name(org)?;
        Ok(Arc::new(LinkedBackend {
            links: Arc::new(Links {
                socket: self.socket.clone(),
                org: org.to_owned(),
                idle: Mutex::default(),
            }),
            cache_dir: self.cache_dir.join(org),
        }))
    }
}

#[derive(Debug)]
struct Links {
    socket: PathBuf,
    org: String,
    idle: Mutex<Vec<UnixStream>>,
}

/// One link in use; goes back only by [`Links::keep`].
struct Link {
    stream: UnixStream,
    /// What the server said when it was dialled; none of a link that was kept.
    names: Option<NameKeys>,
}

impl Link {
    fn ask(&mut self, request: &StoreRequest) -> Result<StoreAnswer, FrameError> {
        frame::write(&mut self.stream, request)?;
        let answer = frame::read(&mut self.stream)?;
        answer.ok_or_else(|| FrameError::Io(io::Error::from(io::ErrorKind::UnexpectedEof)))
    }
}

impl Links {
    fn place(&self) -> String {
        format!("the store of {} behind {}", self.org, self.socket.display())
    }

    fn unavailable(&self, what: &str, error: &dyn std::fmt::Display) -> BackendError {
        BackendError::unavailable(format!("{what} {}", self.place()), io::Error::other(error.to_string()))
    }

    fn dial(&self) -> Result<Link, BackendError> {
        let dial = || -> io::Result<UnixStream> {
            let stream = UnixStream::connect(&self.socket)?;
            stream.set_read_timeout(Some(ANSWER_MAX))?;
            stream.set_write_timeout(Some(ANSWER_MAX))?;
            Ok(stream)
        };
        let stream = dial().map_err(|error| self.unavailable("reach", &error))?;
        let mut link = Link { stream, names: None };
        let open =
            StoreRequest::Open { version_min: STORE_LINK_MIN, version: STORE_LINK, org: self.org.clone() };
        match link.ask(&open) {
            Ok(StoreAnswer::Done) => Ok(link),
            Ok(StoreAnswer::Opened { names, cache }) => {
                let names = Some(NameKeys::from_bytes(names.map(|key| key.0), cache.0));
                Ok(Link { names, ..link })
            }
            Ok(other) => Err(self.failed("open", other)),
            Err(error) => Err(self.unavailable("open", &error)),
        }
    }

    fn idle(&self) -> Option<Link> {
        self.idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop()
            .map(|stream| Link { stream, names: None })
    }

    fn keep(&self, link: Link) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(link.stream);
        }
    }

    /// Asks what may be asked twice.
    fn ask(&self, request: &StoreRequest) -> Result<StoreAnswer, BackendError> {
        // A kept link may have ended with its server long ago.
        if let Some(mut link) = self.idle()
            && let Ok(answer) = link.ask(request)
        {
            self.keep(link);
            return Ok(answer);
        }
        let mut link = self.dial()?;
        let answer = link.ask(request).map_err(|error| self.unavailable("ask", &error))?;
        self.keep(link);
        Ok(answer)
    }

    /// The error that an answer is which is not the one that was hoped for.
    fn failed(&self, what: &str, answer: StoreAnswer) -> BackendError {
        match answer {
            StoreAnswer::NotFound { file } => BackendError::NotFound { file },
            StoreAnswer::Unavailable { what, reason } => {
                BackendError::unavailable(what, io::Error::other(reason))
            }
            StoreAnswer::Refused { reason } => self.unavailable(what, &reason),
            other => self.unavailable(what, &format!("the server answers something else: {other:?}")),
        }
    }
}

/// The files of one org through the server.
#[derive(Debug)]
struct LinkedBackend {
    links: Arc<Links>,
    cache_dir: PathBuf,
}

impl LinkedBackend {
    fn names(&self, request: &StoreRequest) -> Result<Vec<String>, BackendError> {
        match self.links.ask(request)? {
            StoreAnswer::Names { names } => Ok(names),
            other => Err(self.links.failed("list", other)),
        }
    }

    /// What only the server does.
    fn not_here(&self, what: &str, key: &Key) -> BackendError {
        let error = io::Error::new(io::ErrorKind::PermissionDenied, "only the server does that");
        BackendError::unavailable(format!("{what} {key} in {}", self.place()), error)
    }
}

impl Backend for LinkedBackend {
    fn place(&self) -> String {
        self.links.place()
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn cache_dir(&self) -> Option<PathBuf> {
        Some(Path::to_owned(&self.cache_dir))
    }

    fn name_keys(&self) -> Result<Option<NameKeys>, BackendError> {
        let mut link = self.links.dial()?;
        let names = link.names.take();
        self.links.keep(link);
        Ok(names)
    }

    fn list(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        self.names(&StoreRequest::List { dir: dir.to_string() })
    }

    fn list_dirs(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        self.names(&StoreRequest::ListDirs { dir: dir.to_string() })
    }

    fn file_len(&self, key: &Key) -> Result<u64, BackendError> {
        match self.links.ask(&StoreRequest::FileLen { key: key.to_string() })? {
            StoreAnswer::Len { len } => Ok(len),
            other => Err(self.links.failed("look at", other)),
        }
    }

    fn read(&self, key: &Key, offset: u64, len: usize) -> Result<Vec<u8>, BackendError> {
        let mut bytes = Vec::new();
        loop {
            let wanted = (len - bytes.len()).min(STORE_PIECE_BYTES_MAX);
            let request = StoreRequest::Read {
                key: key.to_string(),
                offset: offset + bytes.len() as u64,
                len: wanted as u64,
            };
            let mut piece = match self.links.ask(&request)? {
                StoreAnswer::Bytes { bytes } if bytes.len() <= wanted => bytes,
                other => return Err(self.links.failed("read", other)),
            };
            let is_end = piece.len() < wanted;
            bytes.append(&mut piece);
            if is_end || bytes.len() == len {
                return Ok(bytes);
            }
        }
    }

    fn read_tail(&self, key: &Key, len: usize) -> Result<Tail, BackendError> {
        if len > STORE_PIECE_BYTES_MAX {
            let file_len = self.file_len(key)?;
            let start = file_len.saturating_sub(len as u64);
            return Ok(Tail { bytes: self.read(key, start, len)?, file_len });
        }
        match self.links.ask(&StoreRequest::ReadTail { key: key.to_string(), len: len as u64 })? {
            StoreAnswer::Tail { bytes, file_len } => Ok(Tail { bytes, file_len }),
            other => Err(self.links.failed("read", other)),
        }
    }

    fn create(&self) -> Result<Box<dyn NewFile>, BackendError> {
        // Always a fresh one: what an earlier upload has left on a link must not become part of this.
        Ok(Box::new(LinkedFile { link: self.links.dial()?, links: Arc::clone(&self.links) }))
    }

    fn flush(&self, dir: &Key) -> Result<(), BackendError> {
        match self.links.ask(&StoreRequest::Flush { dir: dir.to_string() })? {
            StoreAnswer::Done => Ok(()),
            other => Err(self.links.failed("flush", other)),
        }
    }

    fn remove(&self, key: &Key) -> Result<bool, BackendError> {
        Err(self.not_here("remove", key))
    }

    fn get(&self, key: &Key) -> Result<Option<Versioned>, BackendError> {
        match self.links.ask(&StoreRequest::Get { key: key.to_string() })? {
            StoreAnswer::File { bytes, version } => {
                Ok(Some(Versioned { bytes, version: FileVersion::new(version) }))
            }
            StoreAnswer::NotFound { .. } => Ok(None),
            other => Err(self.links.failed("read", other)),
        }
    }

    fn put_if(&self, key: &Key, bytes: &[u8], expected: &Expected) -> Result<PutOutcome, BackendError> {
        let expected = match expected {
            Expected::Absent => StoreExpected::Absent,
            Expected::Version(version) => StoreExpected::Version { version: version.as_str().to_owned() },
            Expected::Any => StoreExpected::Any,
        };
        // Asked twice when a link breaks, the second meets what the first has written, and says so.
        let request = StoreRequest::PutIf { key: key.to_string(), bytes: bytes.to_vec(), expected };
        match self.links.ask(&request)? {
            StoreAnswer::Written { version } => Ok(PutOutcome::Written(FileVersion::new(version))),
            StoreAnswer::Conflict => Ok(PutOutcome::Conflict),
            other => Err(self.links.failed("write to", other)),
        }
    }
}

/// A pack on its way.
struct LinkedFile {
    link: Link,
    links: Arc<Links>,
}

impl std::fmt::Debug for LinkedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinkedFile").field("links", &self.links).finish_non_exhaustive()
    }
}

impl LinkedFile {
    fn ask(&mut self, what: &str, request: &StoreRequest) -> Result<(), BackendError> {
        match self.link.ask(request) {
            Ok(StoreAnswer::Done) => Ok(()),
            Ok(other) => Err(self.links.failed(what, other)),
            Err(error) => Err(self.links.unavailable(what, &error)),
        }
    }
}

impl NewFile for LinkedFile {
    fn append(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        bytes
            .chunks(STORE_PIECE_BYTES_MAX)
            .try_for_each(|piece| self.ask("write to", &StoreRequest::Append { bytes: piece.to_vec() }))
    }

    fn publish(mut self: Box<Self>, key: &Key) -> Result<(), BackendError> {
        self.ask("publish a pack to", &StoreRequest::Publish { key: key.to_string() })
    }
}
