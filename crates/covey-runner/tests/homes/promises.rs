//! The runner from outside: a server at the other end of its link, the fake backend in place of sandboxes.
//!
//! Each test is one promise of `covey_runner::home`: results and snapshots outlive a lost link and a lost runner,
//! a call that may have started is never started again, and no working copy is overwritten.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use covey_home::PackStore;
use covey_runner::sandbox::fake::{FakeBackend, FakeReply};
use covey_runner::{Dial, DialFuture, LinkStream, Runner, RunnerConfig};
use covey_types::{
    FencingToken, Generation, HomeId, OrgId, RootHash, RunnerId, SandboxId, SandboxState, SessionId,
    SnapshotKind, StepId,
};
use covey_wire::frame::{self, Decoder};
use covey_wire::runner::{
    HomeSource, PublishOutcome, RunnerToServer, SandboxLimits, ServerToRunner, ToolLoss,
};
use covey_wire::tool::{ToolCall, ToolResult};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Longer than anything here takes; only a hang reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Dialler(mpsc::Sender<DuplexStream>);

impl Dial for Dialler {
    fn dial(&self) -> DialFuture<'_> {
        Box::pin(async {
            let (ours, theirs) = tokio::io::duplex(64 * 1024);
            self.0.send(theirs).await.map_err(std::io::Error::other)?;
            Ok(Box::new(ours) as Box<dyn LinkStream>)
        })
    }
}

/// A runner under test and the server side of its link.
pub(crate) struct World {
    dials: mpsc::Receiver<DuplexStream>,
    link: DuplexStream,
    decoder: Decoder,
    runner: JoinHandle<std::io::Result<()>>,
    stop: CancellationToken,
    pub(crate) home: HomeId,
    pub(crate) token: FencingToken,
}

/// What the runner says next over a link.
pub(crate) async fn next_said(link: &mut DuplexStream, decoder: &mut Decoder) -> RunnerToServer {
    let message = tokio::time::timeout(PATIENCE, async {
        let mut buffer = [0; 4096];
        loop {
            if let Some(message) = decoder.next().unwrap() {
                return message;
            }
            let read = link.read(&mut buffer).await.unwrap();
            assert!(read > 0, "the runner closed the link");
            decoder.push(&buffer[..read]);
        }
    });
    message.await.expect("the runner says nothing more")
}

impl World {
    pub(crate) async fn start(dir: &Path, backend: &FakeBackend) -> Self {
        let config = RunnerConfig::new(dir.join("runner"), Some(dir.join("store")));
        let runner = Runner::new(config, Arc::new(backend.clone())).unwrap();
        let (dialled, mut dials) = mpsc::channel(1);
        let stop = CancellationToken::new();
        let running = tokio::spawn(runner.run(Arc::new(Dialler(dialled)), stop.clone()));
        let link = dials.recv().await.unwrap();
        let home = HomeId::from_uuid(Uuid::from_u128(7));
        let decoder = Decoder::default();
        let mut world = Self { dials, link, decoder, runner: running, stop, home, token: FencingToken(1) };
        world.greet().await;
        world
    }

    async fn greet(&mut self) {
        let hello = self.receive().await;
        assert!(matches!(hello, RunnerToServer::Hello { .. }), "{hello:?}");
        let runner = RunnerId::from_uuid(Uuid::nil());
        self.send(ServerToRunner::Welcome { version: 1, runner, heartbeat_ms: 60_000 }).await;
    }

    /// Cuts the link and takes the next one that the runner dials.
    pub(crate) async fn reconnect(&mut self) {
        let next = tokio::time::timeout(PATIENCE, async {
            self.link.shutdown().await.unwrap();
            self.dials.recv().await.unwrap()
        });
        self.link = next.await.unwrap();
        self.decoder = Decoder::default();
        self.greet().await;
    }

    pub(crate) async fn send(&mut self, message: ServerToRunner) {
        self.link.write_all(&frame::encode(&message).unwrap()).await.unwrap();
    }

    async fn receive(&mut self) -> RunnerToServer {
        next_said(&mut self.link, &mut self.decoder).await
    }

    /// The next message that is wanted; others (states, live output) are passed over.
    pub(crate) async fn until<T>(&mut self, mut wanted: impl FnMut(RunnerToServer) -> Option<T>) -> T {
        loop {
            let message = self.receive().await;
            if let Some(found) = wanted(message) {
                return found;
            }
        }
    }

    pub(crate) async fn wake(
        &mut self,
        generation: u64,
        root: Option<RootHash>,
    ) -> (SandboxId, HomeSource, Option<String>) {
        let wake = ServerToRunner::WakeHome {
            org: OrgId::from_uuid(Uuid::nil()),
            home: self.home,
            session: SessionId::from_uuid(Uuid::nil()),
            token: self.token,
            generation: Generation(generation),
            root,
            limits: SandboxLimits::default(),
        };
        self.send(wake).await;
        self.until(|message| match message {
            RunnerToServer::HomeReady { sandbox, source, set_aside, .. } => {
                Some((sandbox, source, set_aside))
            }
            RunnerToServer::HomeFailed { detail, .. } => panic!("{detail}"),
            _ => None,
        })
        .await
    }

    pub(crate) async fn run(&mut self, sandbox: SandboxId, step: StepId) {
        let call = ToolCall { step, name: "bash".to_owned(), input: "{}".to_owned() };
        self.send(ServerToRunner::RunTool { home: self.home, token: self.token, sandbox, call }).await;
    }

    async fn done(&mut self, wanted: StepId) {
        self.until(|message| match message {
            RunnerToServer::ToolDone { step, .. } if step == wanted => Some(()),
            RunnerToServer::ToolLost { reason, .. } => panic!("{reason}"),
            _ => None,
        })
        .await;
    }

    pub(crate) async fn offer(&mut self) -> (Generation, RootHash, SnapshotKind, Option<StepId>) {
        self.until(|message| match message {
            RunnerToServer::Publish { base, root, kind, step, .. } => Some((base, root, kind, step)),
            RunnerToServer::SecureFailed { detail, .. } => panic!("{detail}"),
            _ => None,
        })
        .await
    }

    async fn answer(&mut self, root: RootHash, generation: u64) {
        let outcome = PublishOutcome::Published { generation: Generation(generation) };
        self.send(ServerToRunner::PublishAnswer { home: self.home, root, outcome }).await;
    }

    pub(crate) async fn end(self) {
        self.stop.cancel();
        self.runner.await.unwrap().unwrap();
    }
}

pub(crate) fn step(number: u128) -> StepId {
    StepId::from_uuid(Uuid::from_u128(number))
}

/// Every call appends its step to a file in the home; `bash` on a step in `dying` kills the sandbox after that.
pub(crate) fn witness(dying: Vec<StepId>) -> FakeBackend {
    FakeBackend::new(move |spec, call| {
        use std::io::Write as _;
        let path = spec.home_dir.join("witness");
        let mut file = std::fs::File::options().create(true).append(true).open(path).unwrap();
        writeln!(file, "{}", call.step).unwrap();
        if dying.contains(&call.step) {
            FakeReply::Die
        } else {
            FakeReply::Result(ToolResult::text("ok", false))
        }
    })
}

fn witness_lines(dir: &Path, home: HomeId) -> usize {
    let path = dir.join("runner/homes").join(home.to_string()).join("files/witness");
    std::fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_was_not_acknowledged_is_repeated_on_the_next_link() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::start(dir.path(), &witness(vec![])).await;
    let (sandbox, source, _) = world.wake(0, None).await;
    assert_eq!(source, HomeSource::Empty);
    world.run(sandbox, step(1)).await;
    world.done(step(1)).await;
    world.reconnect().await;
    world.done(step(1)).await;
    // Asked for by id, and even handed over again, it is answered and not run.
    let (home, token) = (world.home, world.token);
    world.send(ServerToRunner::QueryTool { home, token, sandbox, step: step(1) }).await;
    world.done(step(1)).await;
    world.run(sandbox, step(1)).await;
    world.done(step(1)).await;
    assert_eq!(witness_lines(dir.path(), world.home), 1);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_step_border_is_offered_as_a_snapshot_until_it_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::start(dir.path(), &witness(vec![])).await;
    let (sandbox, ..) = world.wake(0, None).await;
    world.run(sandbox, step(1)).await;
    let (base, root, kind, of) = world.offer().await;
    assert_eq!((base, kind, of), (Generation(0), SnapshotKind::Frozen, Some(step(1))));
    world.reconnect().await;
    let (_, again, ..) = world.offer().await;
    assert_eq!(again, root);
    world.answer(root, 1).await;
    world.run(sandbox, step(2)).await;
    let (base, second, ..) = world.offer().await;
    assert_eq!(base, Generation(1));
    assert_ne!(second, root);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_home_that_is_too_large_stays_as_it_is_and_is_offered_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::start(dir.path(), &witness(vec![])).await;
    let (sandbox, ..) = world.wake(0, None).await;
    world.run(sandbox, step(1)).await;
    let (_, first, ..) = world.offer().await;
    let outcome = PublishOutcome::OverQuota { reason: "too large".to_owned() };
    world.send(ServerToRunner::PublishAnswer { home: world.home, root: first, outcome }).await;
    // The same sandbox takes the next call: nothing was given up.
    world.run(sandbox, step(2)).await;
    let (base, second, _, of) = world.offer().await;
    assert_eq!((base, of), (Generation(0), Some(step(2))));
    assert_ne!(second, first);
    world.answer(second, 1).await;
    assert_eq!(witness_lines(dir.path(), world.home), 2);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_home_that_was_secured_before_a_collection_is_secured_again_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::start(dir.path(), &witness(vec![])).await;
    let (sandbox, ..) = world.wake(0, None).await;
    world.run(sandbox, step(1)).await;
    let (_, first, ..) = world.offer().await;
    // The collection condemns everything that the store has, and nobody names what was just offered.
    let org = OrgId::from_uuid(Uuid::nil()).to_string();
    let store = PackStore::open_directory(&dir.path().join("store"), &org).unwrap();
    let pointers = covey_home::Pointers::open(&dir.path().join("store"), &org).unwrap();
    let options = covey_home::CollectOptions::default();
    let cancel = std::sync::atomic::AtomicBool::new(false);
    let report = covey_home::collect(&store, &pointers, &options, &cancel, &covey_home::NoProgress).unwrap();
    assert!(report.packs_removed > 0, "{report:?}");
    let outcome = PublishOutcome::Collected { floor: 1 };
    world.send(ServerToRunner::PublishAnswer { home: world.home, root: first, outcome }).await;
    // No step and no request: the runner does it by itself, and uploads what is gone.
    let (root, epoch) = world
        .until(|message| match message {
            RunnerToServer::Publish { root, epoch, .. } => Some((root, epoch)),
            RunnerToServer::SecureFailed { detail, .. } => panic!("{detail}"),
            _ => None,
        })
        .await;
    assert_eq!((root, epoch), (first, 1));
    let verified = covey_home::verify(&store, &root).unwrap();
    assert_eq!(verified.problems, Vec::<String>::new());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_dies_in_a_call_costs_that_call_and_nothing_of_the_home() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::start(dir.path(), &witness(vec![step(2)])).await;
    let (first, ..) = world.wake(0, None).await;
    world.run(first, step(1)).await;
    let (_, root, ..) = world.offer().await;
    world.answer(root, 1).await;
    world.run(first, step(2)).await;
    let (mut loss, mut state, mut offered) = (None, None, None);
    while loss.is_none() || state.is_none() || offered.is_none() {
        match world.receive().await {
            RunnerToServer::ToolLost { step: of, loss: how, .. } => loss = Some((of, how)),
            RunnerToServer::SandboxChanged { state: SandboxState::Lost, .. } => state = Some(()),
            RunnerToServer::Publish { root, kind, .. } => offered = Some((root, kind)),
            _ => {}
        }
    }
    assert_eq!(loss, Some((step(2), ToolLoss::Interrupted)));
    let (partial, kind) = offered.unwrap();
    assert_eq!(kind, SnapshotKind::Quiesced);
    assert_ne!(partial, root, "the partial effects are a state of their own");
    world.answer(partial, 2).await;
    let (second, source, aside) = world.wake(2, Some(partial)).await;
    assert_eq!((source, aside), (HomeSource::Kept, None));
    assert_ne!(second, first);
    // A call that was meant for the dead sandbox is not started in the new one.
    world.run(first, step(3)).await;
    let lost = world.until(|message| match message {
        RunnerToServer::ToolLost { step: of, loss, .. } => Some((of, loss)),
        _ => None,
    });
    assert_eq!(lost.await, (step(3), ToolLoss::NeverStarted));
    assert_eq!(witness_lines(dir.path(), world.home), 2);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_does_not_make_the_copy_stale_and_a_stale_copy_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let backend = witness(vec![]);
    let mut world = World::start(dir.path(), &backend).await;
    let (sandbox, ..) = world.wake(0, None).await;
    world.run(sandbox, step(1)).await;
    let (_, first, ..) = world.offer().await;
    world.end().await;
    // The server has published it, but this runner never heard so; its sandbox died with it.
    backend.kill(sandbox);
    let mut world = World::start(dir.path(), &backend).await;
    let (sandbox, source, aside) = world.wake(1, Some(first)).await;
    assert_eq!((source, aside), (HomeSource::Kept, None));
    world.run(sandbox, step(2)).await;
    let (base, second, ..) = world.offer().await;
    assert_eq!(base, Generation(1));
    world.end().await;
    backend.kill(sandbox);
    // The home went on elsewhere: generation 7 is not what this copy descends from.
    let mut world = World::start(dir.path(), &backend).await;
    let (_, source, aside) = world.wake(7, Some(first)).await;
    assert_eq!(source, HomeSource::Materialized);
    let aside = aside.expect("the newer copy is kept");
    let kept = std::fs::read_to_string(Path::new(&aside).join("witness")).unwrap();
    assert_eq!(kept.lines().count(), 2);
    assert_eq!(witness_lines(dir.path(), world.home), 1);
    let store =
        PackStore::open_directory(&dir.path().join("store"), &OrgId::from_uuid(Uuid::nil()).to_string())
            .unwrap();
    for root in [first, second] {
        covey_home::verify(&store, &root).unwrap();
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_outlives_its_runner_is_adopted_with_its_result() {
    let dir = tempfile::tempdir().unwrap();
    let backend = witness(vec![]);
    let mut world = World::start(dir.path(), &backend).await;
    let (sandbox, ..) = world.wake(0, None).await;
    world.run(sandbox, step(1)).await;
    let (_, root, ..) = world.offer().await;
    world.answer(root, 1).await;
    world.end().await;
    let mut world = World::start(dir.path(), &backend).await;
    world.token = FencingToken(2);
    let (same, source, _) = world.wake(1, Some(root)).await;
    assert_eq!((same, source), (sandbox, HomeSource::Adopted));
    // The daemon kept the result, because nobody had acknowledged it.
    world.done(step(1)).await;
    assert_eq!(backend.starts(), 1);
    // An older server must not act on the home any more.
    world.token = FencingToken(1);
    world.run(sandbox, step(2)).await;
    let lost = world.until(|message| match message {
        RunnerToServer::ToolLost { step: of, loss, .. } => Some((of, loss)),
        _ => None,
    });
    assert_eq!(lost.await, (step(2), ToolLoss::NeverStarted));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_sandbox_that_is_adopted_is_answered_before_any_wake() {
    let dir = tempfile::tempdir().unwrap();
    let backend = FakeBackend::new(|_, _| FakeReply::Hang);
    let mut world = World::start(dir.path(), &backend).await;
    let (sandbox, ..) = world.wake(0, None).await;
    world.run(sandbox, step(1)).await;
    world.until(|message| matches!(message, RunnerToServer::ToolStarted { .. }).then_some(())).await;
    world.end().await;
    // No server wakes the home; the link that keeps the daemon from ending itself comes by itself.
    let world = World::start(dir.path(), &backend).await;
    tokio::task::spawn_blocking(move || backend.wait_links(sandbox, 2, PATIENCE)).await.unwrap();
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parked_sandbox_is_thawed_when_its_runner_ends_and_frozen_when_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let backend = witness(vec![]);
    let mut world = World::start(dir.path(), &backend).await;
    let (sandbox, ..) = world.wake(0, None).await;
    world.run(sandbox, step(1)).await;
    world.offer().await;
    assert!(backend.is_frozen(sandbox));
    world.end().await;
    // So that its daemon can end it after the orphan term.
    assert!(!backend.is_frozen(sandbox));
    let mut world = World::start(dir.path(), &backend).await;
    // The home's result is repeated once its actor runs, which is after the sandbox was taken up.
    world.done(step(1)).await;
    assert!(backend.is_frozen(sandbox));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_runners_do_not_share_a_data_directory() {
    let dir = tempfile::tempdir().unwrap();
    let backend = witness(vec![]);
    let world = World::start(dir.path(), &backend).await;
    let config = RunnerConfig::new(dir.path().join("runner"), Some(dir.path().join("store")));
    let refused = Runner::new(config.clone(), Arc::new(backend.clone())).unwrap_err().to_string();
    assert!(refused.contains("another runner"), "{refused}");
    world.end().await;
    Runner::new(config, Arc::new(backend)).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_home_that_could_not_be_secured_is_secured_once_the_store_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let backend = witness(vec![]);
    let mut world = World::start(dir.path(), &backend).await;
    let (sandbox, ..) = world.wake(0, None).await;
    // A file where the store's directory should be: as a volume that is not mounted.
    std::fs::write(dir.path().join("store"), "").unwrap();
    world.run(sandbox, step(1)).await;
    world.until(|message| matches!(message, RunnerToServer::SecureFailed { .. }).then_some(())).await;
    std::fs::remove_file(dir.path().join("store")).unwrap();
    // No further step, no further question.
    let (_, root, ..) = world.offer().await;
    world.answer(root, 1).await;
    world.end().await;
}

/// A directory with two large files in the home store; gives its state and the pack that holds them.
fn stored(dir: &Path) -> (RootHash, std::path::PathBuf) {
    let home = dir.join("seed");
    std::fs::create_dir(&home).unwrap();
    for (name, byte) in [("kept", 1_u8), ("lost", 2)] {
        // Not compressible, and long enough for a frame of its own.
        let mut state = u64::from(byte);
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        let bytes: Vec<u8> = (0..700_000).map(|_| next()).collect();
        std::fs::write(home.join(name), bytes).unwrap();
    }
    let org = OrgId::from_uuid(Uuid::nil()).to_string();
    let store = PackStore::open_directory(&dir.join("store"), &org).unwrap();
    let secured = covey_home::secure(&covey_home::SecureRequest {
        dir: &home,
        store: &store,
        stat_cache: None,
        excludes: &covey_home::Excludes::none(),
        previous: None,
        cancel: &std::sync::atomic::AtomicBool::new(false),
        progress: &covey_home::NoProgress,
        threads: 1,
    });
    let packs = dir.join("store/orgs").join(&org).join("packs");
    let pack = std::fs::read_dir(packs).unwrap().next().unwrap().unwrap().path();
    (secured.unwrap().root, pack)
}

/// Removes one block from reach by damaging its first byte in the pack.
fn damage(pack: &Path, content: &[u8]) {
    let mut bytes = std::fs::read(pack).unwrap();
    let at = bytes.windows(64).position(|window| window == &content[..64]).expect("stored as it is");
    bytes[at] ^= 1;
    std::fs::write(pack, bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_home_comes_up_without_what_the_store_has_lost_and_keeps_it_in_what_is_secured() {
    let dir = tempfile::tempdir().unwrap();
    let (root, pack) = stored(dir.path());
    damage(&pack, &std::fs::read(dir.path().join("seed/lost")).unwrap());
    let mut world = World::start(dir.path(), &witness(vec![])).await;
    world
        .send(ServerToRunner::WakeHome {
            org: OrgId::from_uuid(Uuid::nil()),
            home: world.home,
            session: SessionId::from_uuid(Uuid::nil()),
            token: world.token,
            generation: Generation(1),
            root: Some(root),
            limits: SandboxLimits::default(),
        })
        .await;
    let (sandbox, gaps) = world
        .until(|message| match message {
            RunnerToServer::HomeReady { sandbox, gaps, .. } => Some((sandbox, gaps)),
            RunnerToServer::HomeFailed { detail, .. } => panic!("{detail}"),
            _ => None,
        })
        .await;
    assert_eq!((gaps.count, gaps.first[0].path.as_str()), (1, "lost"), "{gaps:?}");
    world.run(sandbox, step(1)).await;
    let (base, later, ..) = world.offer().await;
    assert_eq!(base, Generation(1));
    assert_ne!(later, root, "the step's file is in it");
    world.end().await;
    let org = OrgId::from_uuid(Uuid::nil()).to_string();
    let store = PackStore::open_directory(&dir.path().join("store"), &org).unwrap();
    let entry = |root: &RootHash, path: &[u8]| {
        covey_home::view::Snapshot::open(&store, root).unwrap().find(path).unwrap()
    };
    assert_eq!(entry(&later, b"lost"), entry(&root, b"lost"), "the loss is not final");
    assert_eq!(entry(&later, b"kept"), entry(&root, b"kept"));
}
