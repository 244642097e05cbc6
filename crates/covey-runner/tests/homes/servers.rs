//! A runner of several servers: a link to each, and the newest token decides whom a home obeys.

use std::path::Path;
use std::sync::Arc;

use covey_runner::sandbox::fake::FakeBackend;
use covey_runner::{Dial, DialFuture, LinkStream, Runner, RunnerConfig};
use covey_types::{FencingToken, Generation, HomeId, OrgId, RunnerId, SandboxId, SessionId, StepId};
use covey_wire::frame::{self, Decoder};
use covey_wire::runner::{PublishOutcome, RunnerToServer, SandboxLimits, ServerToRunner, ToolLoss};
use covey_wire::tool::ToolCall;
use tokio::io::{AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::promises::{PATIENCE, next_said, step, witness};

/// Hands the server's end of each link to the test, with the URL that was dialled; none where any server would do.
#[derive(Debug)]
struct Dialler(mpsc::Sender<(Option<String>, DuplexStream)>);

impl Dialler {
    async fn open(&self, url: Option<String>) -> std::io::Result<Box<dyn LinkStream>> {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        self.0.send((url, theirs)).await.map_err(std::io::Error::other)?;
        Ok(Box::new(ours))
    }
}

impl Dial for Dialler {
    fn dial(&self) -> DialFuture<'_> {
        Box::pin(self.open(None))
    }

    fn dial_at<'a>(&'a self, url: &'a str) -> DialFuture<'a> {
        Box::pin(self.open(Some(url.to_owned())))
    }
}

/// One server's end of its link.
struct Link {
    stream: DuplexStream,
    decoder: Decoder,
}

impl Link {
    async fn greet(stream: DuplexStream) -> Self {
        let mut link = Self { stream, decoder: Decoder::default() };
        let hello = link.receive().await;
        assert!(matches!(hello, RunnerToServer::Hello { .. }), "{hello:?}");
        let runner = RunnerId::from_uuid(Uuid::nil());
        link.send(ServerToRunner::Welcome { version: 4, runner, heartbeat_ms: 60_000 }).await;
        link
    }

    async fn send(&mut self, message: ServerToRunner) {
        self.stream.write_all(&frame::encode(&message).unwrap()).await.unwrap();
    }

    async fn receive(&mut self) -> RunnerToServer {
        next_said(&mut self.stream, &mut self.decoder).await
    }

    async fn until<T>(&mut self, mut wanted: impl FnMut(RunnerToServer) -> Option<T>) -> T {
        loop {
            let message = self.receive().await;
            if let Some(found) = wanted(message) {
                return found;
            }
        }
    }

    async fn name(&mut self, own: &str) {
        let all = vec!["http://a".to_owned(), "http://b".to_owned()];
        self.send(ServerToRunner::Servers { own: own.to_owned(), all }).await;
    }

    async fn wake(&mut self, token: u64) -> Result<SandboxId, String> {
        let wake = ServerToRunner::WakeHome {
            org: OrgId::from_uuid(Uuid::nil()),
            home: home(),
            session: SessionId::from_uuid(Uuid::nil()),
            token: FencingToken(token),
            generation: Generation(0),
            root: None,
            limits: SandboxLimits::default(),
        };
        self.send(wake).await;
        self.until(|message| match message {
            RunnerToServer::HomeReady { sandbox, .. } => Some(Ok(sandbox)),
            RunnerToServer::HomeFailed { detail, .. } => Some(Err(detail)),
            _ => None,
        })
        .await
    }

    async fn run(&mut self, token: u64, sandbox: SandboxId, step: StepId) {
        let call = ToolCall { step, name: "bash".to_owned(), input: "{}".to_owned() };
        self.send(ServerToRunner::RunTool { home: home(), token: FencingToken(token), sandbox, call }).await;
    }

    async fn done(&mut self, wanted: StepId) {
        self.until(|message| match message {
            RunnerToServer::ToolDone { step, .. } if step == wanted => Some(()),
            RunnerToServer::ToolLost { reason, .. } => panic!("{reason}"),
            _ => None,
        })
        .await;
    }
}

fn home() -> HomeId {
    HomeId::from_uuid(Uuid::from_u128(7))
}

struct World {
    dials: mpsc::Receiver<(Option<String>, DuplexStream)>,
    runner: JoinHandle<std::io::Result<()>>,
    stop: CancellationToken,
}

impl World {
    /// A runner with links to two servers.
    async fn start(dir: &Path, backend: &FakeBackend) -> (Self, Link, Link) {
        let config = RunnerConfig::new(dir.join("runner"), Some(dir.join("store")));
        let runner = Runner::new(config, Arc::new(backend.clone())).unwrap();
        let (dialled, dials) = mpsc::channel(1);
        let stop = CancellationToken::new();
        let running = tokio::spawn(runner.run(Arc::new(Dialler(dialled)), stop.clone()));
        let mut world = Self { dials, runner: running, stop };
        let (any, mut first) = world.next().await;
        assert_eq!(any, None);
        first.name("http://a").await;
        let (named, second) = world.next().await;
        assert_eq!(named.as_deref(), Some("http://b"), "the one that it has not reached");
        (world, first, second)
    }

    async fn next(&mut self) -> (Option<String>, Link) {
        let dialled = tokio::time::timeout(PATIENCE, self.dials.recv()).await;
        let (url, stream) = dialled.expect("the runner does not dial").unwrap();
        (url, Link::greet(stream).await)
    }

    async fn end(self) {
        self.stop.cancel();
        self.runner.await.unwrap().unwrap();
    }
}

fn runs(dir: &Path) -> usize {
    let path = dir.join("runner/homes").join(home().to_string()).join("files/witness");
    std::fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_overtaken_runs_nothing_and_is_told_so_on_its_own_link() {
    let dir = tempfile::tempdir().unwrap();
    let (world, mut old, mut new) = World::start(dir.path(), &witness(vec![])).await;
    let sandbox = old.wake(1).await.unwrap();
    old.run(1, sandbox, step(1)).await;
    old.done(step(1)).await;
    assert_eq!(new.wake(2).await.unwrap(), sandbox, "the sandbox goes on under the new token");
    old.run(1, sandbox, step(2)).await;
    let lost = old.until(|message| match message {
        RunnerToServer::ToolLost { step, loss, .. } => Some((step, loss)),
        _ => None,
    });
    assert_eq!(lost.await, (step(2), ToolLoss::NeverStarted));
    assert!(old.wake(1).await.unwrap_err().contains("newer"));
    new.run(2, sandbox, step(3)).await;
    new.done(step(3)).await;
    assert_eq!(runs(dir.path()), 2, "steps 1 and 3");
    // What the old one asks about is answered to the old one, and nothing is lost for the new one.
    let token = FencingToken(1);
    old.send(ServerToRunner::QueryTool { home: home(), token, sandbox, step: step(3) }).await;
    old.done(step(3)).await;
    new.run(2, sandbox, step(4)).await;
    new.done(step(4)).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_that_is_gone_did_not_answer_is_told_to_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let (mut world, mut first, mut second) = World::start(dir.path(), &witness(vec![])).await;
    let sandbox = first.wake(1).await.unwrap();
    first.run(1, sandbox, step(1)).await;
    let root = first.until(|message| match message {
        RunnerToServer::Publish { root, .. } => Some(root),
        _ => None,
    });
    let root = root.await;
    drop(first);
    let offered = second.until(|message| match message {
        RunnerToServer::Publish { root, .. } => Some(root),
        _ => None,
    });
    assert_eq!(offered.await, root);
    let outcome = PublishOutcome::Published { generation: Generation(1) };
    second.send(ServerToRunner::PublishAnswer { home: home(), root, outcome }).await;
    second.send(ServerToRunner::AcknowledgeTool { home: home(), step: step(1) }).await;
    // It is dialled again by its name, for as long as the others name it.
    let (again, mut third) = world.next().await;
    assert_eq!(again.as_deref(), Some("http://a"));
    third.name("http://a").await;
    second.run(1, sandbox, step(2)).await;
    second.done(step(2)).await;
    world.end().await;
}
