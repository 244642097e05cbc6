//! Server side of the store link: runners read blocks and add packs through the server, which holds the key.
//!
//! What stays true: a runner reaches the files of its own org only, adds packs whose every block was checked here (I7),
//! and can neither remove a file nor replace one, but for the list of packs that it has found damaged, which it may make longer. What does not belong here: what the files mean, and over what they
//! are reached.

use std::io::{Read, Write};
use std::sync::Arc;

use covey_home::backend::{Backend, BackendError, Expected, Key, OpenStore, PutOutcome};
use covey_home::{DamagedPack, Suspects, check_pack};
use covey_wire::frame::{self, FrameError};
use covey_wire::generation::{self, STORE_LINK, STORE_LINK_MIN};
use covey_wire::store::{STORE_PIECE_BYTES_MAX, StoreAnswer, StoreExpected, StoreRequest};

/// Links that are served at once; a runner has some for each home that it secures.
pub const STORE_LINKS_MAX: usize = 64;
/// Longest pack that a runner may add; its writers seal at about 32 MiB.
pub const PACK_BYTES_MAX: usize = 64 * 1024 * 1024;
const PACKS_DIR: &str = "packs/";

/// Why a link ended otherwise than by the runner's hanging up.
#[derive(Debug, thiserror::Error)]
pub enum StoreLinkError {
    /// Its bytes.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The runner asked for what it must not have; it was told.
    #[error("a runner was refused: {0}")]
    Refused(String),
}

/// Serves one link until it ends; blocks. `org` is whose files may be opened over it.
///
/// # Errors
/// [`StoreLinkError`].
pub fn serve(
    stream: &mut (impl Read + Write),
    store: &dyn OpenStore,
    org: &str,
) -> Result<(), StoreLinkError> {
    let mut files = None;
    let mut pack = Vec::new();
    while let Some(request) = frame::read::<StoreRequest>(stream)? {
        let answer = match (&files, request) {
            (None, StoreRequest::Open { version_min, version, org: wanted }) => {
                match open(store, org, (version_min, version), &wanted) {
                    Ok(opened) => {
                        files = Some(opened);
                        StoreAnswer::Done
                    }
                    Err(answer) => answer,
                }
            }
            (None, _) => StoreAnswer::Refused { reason: "the first message must open an org".to_owned() },
            (Some(files), request) => answer(files, &mut pack, request),
        };
        let refused = match &answer {
            StoreAnswer::Refused { reason } => Some(reason.clone()),
            _ => None,
        };
        frame::write(stream, &answer)?;
        if let Some(reason) = refused {
            return Err(StoreLinkError::Refused(reason));
        }
    }
    Ok(())
}

fn open(
    store: &dyn OpenStore,
    org: &str,
    versions: (u32, u32),
    wanted: &str,
) -> Result<Arc<dyn Backend>, StoreAnswer> {
    let refused = |reason: String| StoreAnswer::Refused { reason };
    generation::agree("the store link", (STORE_LINK_MIN, STORE_LINK), versions, "server", "runner")
        .map_err(|error| refused(error.to_string()))?;
    if wanted != org {
        return Err(refused(format!("this runner works for org {org} and asks for {wanted}")));
    }
    store.open(org).map_err(|error| StoreAnswer::Unavailable {
        what: format!("open the store of {org}"),
        reason: error.to_string(),
    })
}

/// Does one request; a failure is an answer, too.
fn answer(files: &Arc<dyn Backend>, pack: &mut Vec<u8>, request: StoreRequest) -> StoreAnswer {
    match done(files, pack, request) {
        Ok(answer) | Err(Failed::Refused(answer)) => answer,
        Err(Failed::Backend(BackendError::NotFound { file })) => StoreAnswer::NotFound { file },
        Err(Failed::Backend(BackendError::Unavailable { what, source })) => {
            StoreAnswer::Unavailable { what, reason: source.to_string() }
        }
    }
}

enum Failed {
    Backend(BackendError),
    Refused(StoreAnswer),
}

impl From<BackendError> for Failed {
    fn from(error: BackendError) -> Self {
        Self::Backend(error)
    }
}

fn refused(reason: impl Into<String>) -> Failed {
    Failed::Refused(StoreAnswer::Refused { reason: reason.into() })
}

fn key(text: &str) -> Result<Key, Failed> {
    Key::new(&text.split('/').collect::<Vec<_>>()).map_err(|error| refused(error.to_string()))
}

fn length(len: u64) -> Result<usize, Failed> {
    match usize::try_from(len) {
        Ok(len) if len <= STORE_PIECE_BYTES_MAX => Ok(len),
        _ => Err(refused(format!("{len} bytes in one message; the limit is {STORE_PIECE_BYTES_MAX}"))),
    }
}

fn done(files: &Arc<dyn Backend>, pack: &mut Vec<u8>, request: StoreRequest) -> Result<StoreAnswer, Failed> {
    Ok(match request {
        StoreRequest::Open { .. } => return Err(refused("this link is open already")),
        StoreRequest::List { dir } => StoreAnswer::Names { names: files.list(&key(&dir)?)? },
        StoreRequest::ListDirs { dir } => StoreAnswer::Names { names: files.list_dirs(&key(&dir)?)? },
        StoreRequest::FileLen { key: file } => StoreAnswer::Len { len: files.file_len(&key(&file)?)? },
        StoreRequest::Read { key: file, offset, len } => {
            StoreAnswer::Bytes { bytes: files.read(&key(&file)?, offset, length(len)?)? }
        }
        StoreRequest::ReadTail { key: file, len } => {
            let tail = files.read_tail(&key(&file)?, length(len)?)?;
            StoreAnswer::Tail { bytes: tail.bytes, file_len: tail.file_len }
        }
        StoreRequest::Get { key: file } => match files.get(&key(&file)?)? {
            Some(found) => {
                StoreAnswer::File { bytes: found.bytes, version: found.version.as_str().to_owned() }
            }
            None => StoreAnswer::NotFound { file },
        },
        StoreRequest::Append { bytes } => {
            if pack.len() + bytes.len() > PACK_BYTES_MAX {
                return Err(refused(format!("a pack of more than {PACK_BYTES_MAX} bytes")));
            }
            pack.extend_from_slice(&bytes);
            StoreAnswer::Done
        }
        StoreRequest::Publish { key: file } => {
            let target = key(&file)?;
            publish(files, &target, &std::mem::take(pack))?;
            StoreAnswer::Done
        }
        StoreRequest::PutIf { key: file, bytes, expected } => put_if(files, &key(&file)?, &bytes, expected)?,
        StoreRequest::Flush { dir } => {
            files.flush(&key(&dir)?)?;
            StoreAnswer::Done
        }
    })
}

/// Only the list of damaged packs, and only more of them: a secure must be able to write down what it has found.
fn put_if(
    files: &Arc<dyn Backend>,
    target: &Key,
    bytes: &[u8],
    expected: StoreExpected,
) -> Result<StoreAnswer, Failed> {
    if !Suspects::is_key(target) {
        return Err(refused(format!("{target} is the server's")));
    }
    let now = files.get(target)?;
    if !Suspects::only_adds_damage(now.as_ref().map(|now| now.bytes.as_slice()), bytes) {
        return Err(refused(format!("{target}: a runner may only add packs that it has found damaged")));
    }
    // On the condition that it still is what was looked at.
    let is_as_expected = match (&now, &expected) {
        (_, StoreExpected::Any) | (None, StoreExpected::Absent) => true,
        (Some(now), StoreExpected::Version { version }) => now.version.as_str() == version,
        (None, StoreExpected::Version { .. }) | (Some(_), StoreExpected::Absent) => false,
    };
    let expected = now.map_or(Expected::Absent, |now| Expected::Version(now.version));
    let put = if is_as_expected { files.put_if(target, bytes, &expected)? } else { PutOutcome::Conflict };
    Ok(match put {
        PutOutcome::Written(version) => StoreAnswer::Written { version: version.as_str().to_owned() },
        PutOutcome::Conflict => StoreAnswer::Conflict,
    })
}

fn publish(files: &Arc<dyn Backend>, target: &Key, pack: &[u8]) -> Result<(), Failed> {
    if !target.as_str().starts_with(PACKS_DIR) {
        return Err(refused(format!("{target} is no pack, and runners add nothing else")));
    }
    check_pack(target, pack).map_err(|DamagedPack(why)| refused(why))?;
    // Names are chosen at random: one that is there is a repeated publish, or somebody who wants to replace it.
    match files.file_len(target) {
        Ok(_) => return Err(refused(format!("{target} is there already"))),
        Err(BackendError::NotFound { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let mut file = files.create()?;
    file.append(pack)?;
    Ok(file.publish(target)?)
}

#[cfg(test)]
mod tests {
    use std::io;

    use covey_home::backend::MemoryBackend;
    use covey_home::{Block, BlockStore as _, PackStore};

    use super::*;

    /// One org in memory.
    #[derive(Debug, Default)]
    struct Memory(MemoryBackend);

    impl OpenStore for Memory {
        fn open(&self, _: &str) -> Result<Arc<dyn Backend>, covey_home::StoreError> {
            Ok(Arc::new(self.0.clone()))
        }
    }

    /// What the runner has sent, and what it is answered.
    struct Wire {
        asked: io::Cursor<Vec<u8>>,
        answered: Vec<u8>,
    }

    impl Read for Wire {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.asked.read(into)
        }
    }

    impl Write for Wire {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.answered.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn asked(store: &Memory, requests: &[StoreRequest]) -> (Vec<StoreAnswer>, Result<(), StoreLinkError>) {
        let mut bytes = Vec::new();
        requests.iter().for_each(|request| bytes.extend(frame::encode(request).unwrap()));
        let mut wire = Wire { asked: io::Cursor::new(bytes), answered: Vec::new() };
        let ended = serve(&mut wire, store, "org");
        let mut answered = io::Cursor::new(wire.answered);
        let mut answers = Vec::new();
        while let Some(answer) = frame::read(&mut answered).unwrap() {
            answers.push(answer);
        }
        (answers, ended)
    }

    fn open() -> StoreRequest {
        StoreRequest::Open { version_min: 1, version: 1, org: "org".to_owned() }
    }

    fn pack() -> (String, Vec<u8>) {
        let backend = MemoryBackend::new();
        let store = PackStore::open(Arc::new(backend.clone())).unwrap();
        let upload = store.upload().unwrap();
        upload.put(&Block::of(b"a block").unwrap()).unwrap();
        upload.finish().unwrap();
        let key = backend.keys().into_iter().find(|key| key.as_str().starts_with(PACKS_DIR)).unwrap();
        let len = backend.file_len(&key).unwrap() as usize;
        (key.as_str().to_owned(), backend.read(&key, 0, len).unwrap())
    }

    #[test]
    fn a_pack_is_added_once_and_read_back() {
        let store = Memory::default();
        let (key, bytes) = pack();
        let append = StoreRequest::Append { bytes: bytes.clone() };
        let publish = StoreRequest::Publish { key: key.clone() };
        let read = StoreRequest::Read { key, offset: 0, len: 1 << 20 };
        let (answers, ended) = asked(&store, &[open(), append.clone(), publish.clone(), read]);
        assert_eq!(answers[3], StoreAnswer::Bytes { bytes });
        assert!(ended.is_ok());
        let (answers, ended) = asked(&store, &[open(), append, publish]);
        assert!(matches!(&answers[2], StoreAnswer::Refused { reason } if reason.contains("already")));
        assert!(ended.is_err());
    }

    #[test]
    fn damage_is_written_down_and_nothing_else_is_replaced() {
        let text = |packs: &[&str]| {
            let lines: String = packs.iter().map(|line| format!("{line}\n")).collect();
            let body = format!("covey-suspects 1\n{lines}");
            let checksum = covey_types::BlockHash::of(body.as_bytes());
            format!("{body}checksum {checksum}\n").into_bytes()
        };
        let (one, two) = (format!("{:032x} damaged", 1), format!("{:032x} damaged", 2));
        let replaced = format!("{:032x} replaced", 2);
        let store = Memory::default();
        let put = |key: &str, packs: &[&str], expected: StoreExpected| {
            let request = StoreRequest::PutIf { key: key.to_owned(), bytes: text(packs), expected };
            asked(&store, &[open(), request]).0.remove(1)
        };
        let file = "damage/suspects";
        let first = put(file, &[&one], StoreExpected::Absent);
        let StoreAnswer::Written { version } = first else { panic!("{first:?}") };
        assert_eq!(put(file, &[&one], StoreExpected::Absent), StoreAnswer::Conflict);
        let is_refused = |answer| matches!(answer, StoreAnswer::Refused { .. });
        for packs in [&[two.as_str()][..], &[], &[&one, &replaced], &["nonsense"]] {
            assert!(is_refused(put(file, packs, StoreExpected::Any)), "{packs:?}");
        }
        assert!(is_refused(put("homes/h/current", &[&one], StoreExpected::Any)));
        let more = put(file, &[&one, &two], StoreExpected::Version { version });
        assert!(matches!(more, StoreAnswer::Written { .. }), "{more:?}");
    }

    #[test]
    fn what_is_damaged_or_no_pack_is_refused() {
        let (key, mut bytes) = pack();
        let publish = |key: &str, bytes: &[u8]| {
            let append = StoreRequest::Append { bytes: bytes.to_vec() };
            let publish = StoreRequest::Publish { key: key.to_owned() };
            asked(&Memory::default(), &[open(), append, publish]).0.remove(2)
        };
        assert!(matches!(publish("homes/h/current", &bytes), StoreAnswer::Refused { .. }));
        for at in [0, 40, bytes.len() / 2, bytes.len() - 1] {
            bytes[at] ^= 1;
            assert!(matches!(publish(&key, &bytes), StoreAnswer::Refused { .. }), "{at}");
            bytes[at] ^= 1;
        }
        assert_eq!(publish(&key, &bytes), StoreAnswer::Done);
    }

    #[test]
    fn another_org_another_version_and_a_path_outside_are_refused() {
        let refused = |requests: &[StoreRequest]| {
            let (answers, ended) = asked(&Memory::default(), requests);
            assert!(matches!(answers.last(), Some(StoreAnswer::Refused { .. })), "{answers:?}");
            assert!(ended.is_err());
        };
        refused(&[StoreRequest::Open { version_min: 1, version: 1, org: "other".to_owned() }]);
        refused(&[StoreRequest::Open { version_min: 9, version: 9, org: "org".to_owned() }]);
        refused(&[StoreRequest::List { dir: "packs".to_owned() }]);
        refused(&[open(), open()]);
        refused(&[open(), StoreRequest::Get { key: "../other/homes/h/current".to_owned() }]);
        refused(&[open(), StoreRequest::Read { key: "packs/x".to_owned(), offset: 0, len: u64::MAX }]);
    }
}
