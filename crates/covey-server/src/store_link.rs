//! Server side of the store link: runners read blocks and add packs through the server, which holds the key.
//!
//! What stays true: a runner reaches the files of its own org only, adds packs whose every block was checked here (I7),
//! and can neither remove a file nor replace one, but for the list of packs that it has found damaged, which it may make
//! longer. Of an encrypted store it sees packs as if they were not sealed, and gets the key of block names and no other.
//! What does not belong here: what the files mean, and over what they are reached.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use covey_home::backend::{Backend, BackendError, Expected, Key, OpenStore, PutOutcome};
use covey_home::{DamagedPack, MasterKey, StoreError, Suspects, Unsealed, check_pack};
use covey_wire::frame::{self, FrameError};
use covey_wire::generation::{self, STORE_LINK, STORE_LINK_MIN};
use covey_wire::store::{
    STORE_PIECE_BYTES_MAX, STORE_SEALED_MIN, StoreAnswer, StoreExpected, StoreKey, StoreRequest,
};

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
                    Ok((opened, answer)) => {
                        files = Some(opened);
                        answer
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

/// Opens each org's files once for all links, unsealed where there is a master key.
#[derive(Debug)]
pub struct LinkedStores {
    store: Arc<dyn OpenStore>,
    master: Option<MasterKey>,
    opened: Mutex<HashMap<String, Arc<dyn Backend>>>,
}

impl LinkedStores {
    /// On a store that is encrypted if there is a master key.
    pub fn new(store: Arc<dyn OpenStore>, master: Option<MasterKey>) -> Self {
        Self { store, master, opened: Mutex::default() }
    }
}

impl OpenStore for LinkedStores {
    fn open(&self, org: &str) -> Result<Arc<dyn Backend>, StoreError> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(files) = opened.get(org) {
            return Ok(Arc::clone(files));
        }
        let files = self.store.open(org)?;
        let files = match &self.master {
            None => files,
            Some(master) => Arc::new(Unsealed::open(files, org, master)?) as Arc<dyn Backend>,
        };
        opened.insert(org.to_owned(), Arc::clone(&files));
        Ok(files)
    }
}

fn open(
    store: &dyn OpenStore,
    org: &str,
    versions: (u32, u32),
    wanted: &str,
) -> Result<(Arc<dyn Backend>, StoreAnswer), StoreAnswer> {
    let refused = |reason: String| StoreAnswer::Refused { reason };
    let agree = |min| generation::agree("the store link", (min, STORE_LINK), versions, "server", "runner");
    let agreed = agree(STORE_LINK_MIN).map_err(|error| refused(error.to_string()))?;
    if wanted != org {
        return Err(refused(format!("this runner works for org {org} and asks for {wanted}")));
    }
    let unavailable = |error: &dyn std::fmt::Display| StoreAnswer::Unavailable {
        what: format!("open the store of {org}"),
        reason: error.to_string(),
    };
    let files = store.open(org).map_err(|error| unavailable(&error))?;
    let answer = match files.name_keys().map_err(|error| unavailable(&error))? {
        None => StoreAnswer::Done,
        Some(_) if agreed < STORE_SEALED_MIN => {
            // It would name blocks as nobody else does.
            agree(STORE_SEALED_MIN).map_err(|error| refused(format!("{error}; the store is encrypted")))?;
            StoreAnswer::Done
        }
        Some(keys) => {
            StoreAnswer::Opened { names: keys.names().copied().map(StoreKey), cache: StoreKey(*keys.cache()) }
        }
    };
    Ok((files, answer))
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
    check_pack(target, pack, files.name_keys()?).map_err(|DamagedPack(why)| refused(why))?;
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
    use covey_home::{BlockStore as _, OrgKeys, PackStore};

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

    fn asked(
        store: &dyn OpenStore,
        requests: &[StoreRequest],
    ) -> (Vec<StoreAnswer>, Result<(), StoreLinkError>) {
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
        pack_named(Arc::new(MemoryBackend::new()))
    }

    fn pack_named(backend: Arc<dyn Backend>) -> (String, Vec<u8>) {
        let store = PackStore::open(Arc::clone(&backend)).unwrap();
        let upload = store.upload().unwrap();
        upload.put(&upload.hasher().block(b"a block").unwrap()).unwrap();
        upload.finish().unwrap();
        let key = format!("{PACKS_DIR}{}.pack", store.packs().unwrap()[0]);
        let file = Key::new(&key.split('/').collect::<Vec<_>>()).unwrap();
        let len = backend.file_len(&file).unwrap() as usize;
        (key, backend.read(&file, 0, len).unwrap())
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
    fn an_encrypted_store_takes_only_what_is_named_with_its_key_and_shows_nothing_sealed() {
        let (memory, master) = (MemoryBackend::new(), MasterKey::generate().unwrap());
        let stores = || LinkedStores::new(Arc::new(Memory(memory.clone())), Some(master.clone()));
        let open = |version| StoreRequest::Open { version_min: 1, version, org: "org".to_owned() };
        let (answers, ended) = asked(&stores(), &[open(1)]);
        assert!(
            matches!(&answers[0], StoreAnswer::Refused { reason } if reason.contains("upgrade the runner"))
        );
        assert!(ended.is_err());
        // As a runner makes one, that has what the answer says.
        let (answers, _) = asked(&stores(), &[open(2)]);
        let StoreAnswer::Opened { names: Some(names), cache } = &answers[0] else { panic!("{answers:?}") };
        assert!(!format!("{answers:?}").contains(&format!("{:?}", &names.0[..2])), "keys are shown");
        let keys = covey_home::NameKeys::from_bytes(Some(names.0), cache.0);
        let block = keys.hasher().block(b"a block").unwrap().hash();
        let elsewhere = MemoryBackend::new();
        OrgKeys::share(&memory, &elsewhere).unwrap();
        let (key, bytes) = pack_named(Arc::new(Unsealed::open(Arc::new(elsewhere), "org", &master).unwrap()));
        let publish = |bytes: &[u8]| {
            let append = StoreRequest::Append { bytes: bytes.to_vec() };
            let publish = StoreRequest::Publish { key: key.clone() };
            asked(&stores(), &[open(2), append, publish]).0.remove(2)
        };
        let (_, plain) = pack();
        assert!(matches!(publish(&plain), StoreAnswer::Refused { .. }), "its blocks have other names");
        assert_eq!(publish(&bytes), StoreAnswer::Done);
        let read = StoreRequest::Read { key: key.clone(), offset: 0, len: 1 << 20 };
        let ring = StoreRequest::Get { key: "keys/ring".to_owned() };
        let (answers, _) = asked(&stores(), &[open(2), read, ring]);
        assert_eq!(answers[1], StoreAnswer::Bytes { bytes: bytes.clone() });
        assert!(matches!(answers[2], StoreAnswer::NotFound { .. }), "{answers:?}");
        let lies = Key::new(&key.split('/').collect::<Vec<_>>()).unwrap();
        assert_ne!(memory.read(&lies, 0, bytes.len()).unwrap()[..64], bytes[..64], "it lies sealed");
        let sealed = PackStore::open_encrypted(Arc::new(memory.clone()), "org", &master).unwrap();
        assert_eq!(sealed.get(&block).unwrap(), b"a block");
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
