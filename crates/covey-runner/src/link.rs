//! Runner side of the runner link: dial, handshake, heartbeats, and messages to and from the homes.
//!
//! The server never dials. A runner has a link to each of the servers that share a database; which, they say
//! (`link/plan.rs`). While no link stands the homes go on; when one is up again each home repeats what was not answered.
//! A home listens to all servers and obeys the one with the newest token (`home.rs`).

mod plan;

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use covey_types::HomeId;
use covey_wire::frame::{self, Decoder};
use covey_wire::generation::{RUNNER_LINK, RUNNER_LINK_MIN};
use covey_wire::runner::{HomePresence, RunnerToServer, ServerToRunner};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use self::plan::{Plan, Target};
use crate::Runner;
use crate::home::{self, HomeEvent, HomeHandle};
use crate::sandbox::Sandbox;

/// Messages to the server that may wait; a home that finds the queue full waits, live output is dropped.
const OUTGOING_MAX: usize = 1024;
const READ_BYTES: usize = 64 * 1024;
/// The server must answer `Hello` within this time.
const HANDSHAKE_TERM: Duration = Duration::from_secs(10);
/// Beats that may be missed before the link counts as lost.
const MISSED_BEATS_MAX: u32 = 3;
/// Messages from all servers that may wait for the homes.
const INCOMING_MAX: usize = 256;
/// A server that is reached at all is reached within this time.
const DIAL_TERM: Duration = Duration::from_secs(10);
/// How long homes may take to part from their sandboxes when the runner ends in good order.
const LEAVE_DEADLINE: Duration = Duration::from_secs(5);

/// A byte stream to a server.
pub trait LinkStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> LinkStream for T {}

/// What [`Dial::dial`] returns.
pub type DialFuture<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn LinkStream>>> + Send + 'a>>;

/// A way to reach servers.
pub trait Dial: Send + Sync + std::fmt::Debug {
    /// Opens a new stream to any server: the only one, or one of those that share their database.
    fn dial(&self) -> DialFuture<'_>;

    /// Opens a new stream to the server with this URL, which another server has named.
    fn dial_at<'a>(&'a self, url: &'a str) -> DialFuture<'a> {
        let text = format!("this runner has no way to reach {url}");
        Box::pin(std::future::ready(Err(io::Error::new(io::ErrorKind::Unsupported, text))))
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum LinkEnd {
    #[error("cannot reach the server")]
    Dial(#[source] io::Error),
    #[error("the server refuses this runner: {0}")]
    Refused(String),
    #[error("the server did not answer the handshake")]
    NoHandshake,
    #[error("the server has been silent for too long")]
    Silent,
    #[error("the server closed the link")]
    Closed,
    #[error("the link failed")]
    Io(#[source] io::Error),
    #[error("the link failed")]
    Frame(#[source] frame::FrameError),
    #[error("this runner is shutting down")]
    Shutdown,
}

/// One link, from dial to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkId(u64);

/// The links that stand, by which homes speak.
pub(crate) type Links = BTreeMap<LinkId, mpsc::Sender<RunnerToServer>>;

/// What a link says to the one loop that owns the homes.
enum LinkEvent {
    /// The server has answered the handshake.
    Up(mpsc::Sender<RunnerToServer>),
    /// The server says something.
    Said(ServerToRunner),
    /// It is over.
    Down(LinkEnd),
}

/// The homes that are served, across reconnects.
struct Homes {
    runner: Arc<Runner>,
    handles: HashMap<HomeId, HomeHandle>,
    tasks: JoinSet<HomeId>,
    links: Links,
}

pub(crate) async fn run(
    runner: Arc<Runner>,
    dial: Arc<dyn Dial>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let mut homes = Homes {
        runner: Arc::clone(&runner),
        handles: HashMap::new(),
        tasks: JoinSet::new(),
        links: Links::new(),
    };
    homes.adopt_recorded().await?;
    let (events, mut happened) = mpsc::channel(INCOMING_MAX);
    let mut plan = Plan::default();
    let mut dialled =
        Dialled { dial, events, tasks: JoinSet::new(), next: 0, runner, shutdown: shutdown.clone() };
    loop {
        for target in plan.due(Instant::now()) {
            let link = dialled.start(&target, homes.presence());
            plan.dialling(link, target);
        }
        let wait = plan.next_due();
        tokio::select! {
            () = shutdown.cancelled() => break,
            () = sleep_until(wait.unwrap_or_else(Instant::now)), if wait.is_some() => {}
            event = happened.recv() => match event {
                Some((link, LinkEvent::Up(outgoing))) => {
                    plan.up(link);
                    homes.link_up(link, outgoing).await;
                }
                Some((_, LinkEvent::Said(ServerToRunner::Welcome { .. } | ServerToRunner::Heartbeat))) => {}
                Some((link, LinkEvent::Said(ServerToRunner::Servers { own, all }))) => plan.told(link, own, all),
                Some((link, LinkEvent::Said(message))) => homes.route(link, message).await,
                Some((link, LinkEvent::Down(end))) => {
                    let pause = plan.down(link, Instant::now());
                    homes.link_down(link).await;
                    tracing::warn!(end = %describe(&end), pause_ms = pause.as_millis() as u64, "a link to a server ended");
                }
                None => break,
            },
        }
        while dialled.tasks.try_join_next().is_some() {}
    }
    let links: Vec<LinkId> = homes.links.keys().copied().collect();
    for link in links {
        homes.link_down(link).await;
    }
    dialled.tasks.shutdown().await;
    homes.leave().await;
    Ok(())
}

/// Starts links, each a task of its own.
struct Dialled {
    dial: Arc<dyn Dial>,
    events: mpsc::Sender<(LinkId, LinkEvent)>,
    tasks: JoinSet<()>,
    next: u64,
    runner: Arc<Runner>,
    shutdown: CancellationToken,
}

impl Dialled {
    fn start(&mut self, target: &Target, presence: Vec<HomePresence>) -> LinkId {
        self.next += 1;
        let link = LinkId(self.next);
        let hello = RunnerToServer::Hello {
            versions: (RUNNER_LINK_MIN, RUNNER_LINK),
            name: self.runner.config.name.clone(),
            credential: None,
            homes: presence,
        };
        let (dial, events, target) = (Arc::clone(&self.dial), self.events.clone(), target.clone());
        let shutdown = self.shutdown.clone();
        self.tasks.spawn(async move {
            let end = connection(link, dial.as_ref(), &target, hello, &events, &shutdown).await;
            if events.send((link, LinkEvent::Down(end))).await.is_err() {
                tracing::debug!("the runner has ended");
            }
        });
        link
    }
}

fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// One connection, from dial to end.
async fn connection(
    link: LinkId,
    dial: &dyn Dial,
    target: &Target,
    hello: RunnerToServer,
    events: &mpsc::Sender<(LinkId, LinkEvent)>,
    shutdown: &CancellationToken,
) -> LinkEnd {
    let dialling = match target {
        Target::Any => dial.dial(),
        Target::At(url) => dial.dial_at(url),
    };
    let stream = match timeout(DIAL_TERM, dialling).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return LinkEnd::Dial(error),
        Err(_) => return LinkEnd::Dial(io::Error::from(io::ErrorKind::TimedOut)),
    };
    let (source, mut sink) = tokio::io::split(stream);
    let mut incoming = Incoming { source, decoder: Decoder::default(), buffer: vec![0; READ_BYTES] };
    if let Err(end) = write(&mut sink, &hello).await {
        return end;
    }
    let beat = match timeout(HANDSHAKE_TERM, incoming.next()).await {
        Err(_) => return LinkEnd::NoHandshake,
        Ok(Err(end)) => return end,
        Ok(Ok(ServerToRunner::Welcome { heartbeat_ms, .. })) => {
            Duration::from_millis(heartbeat_ms.max(10).into())
        }
        Ok(Ok(ServerToRunner::Refused { reason })) => return LinkEnd::Refused(reason),
        Ok(Ok(_)) => return LinkEnd::NoHandshake,
    };
    let (outgoing, mut messages) = mpsc::channel(OUTGOING_MAX);
    if events.send((link, LinkEvent::Up(outgoing))).await.is_err() {
        return LinkEnd::Shutdown;
    }

    let writer = async {
        loop {
            let message = match timeout(beat, messages.recv()).await {
                Ok(Some(message)) => message,
                Ok(None) => return LinkEnd::Closed,
                Err(_) => RunnerToServer::Heartbeat,
            };
            if let Err(end) = write(&mut sink, &message).await {
                return end;
            }
        }
    };
    let reader = async {
        loop {
            match timeout(beat * MISSED_BEATS_MAX, incoming.next()).await {
                Err(_) => return LinkEnd::Silent,
                Ok(Err(end)) => return end,
                Ok(Ok(message)) => {
                    if events.send((link, LinkEvent::Said(message))).await.is_err() {
                        return LinkEnd::Shutdown;
                    }
                }
            }
        }
    };
    tokio::select! {
        end = writer => end,
        end = reader => end,
        () = shutdown.cancelled() => LinkEnd::Shutdown,
    }
}

async fn write(sink: &mut (impl AsyncWrite + Unpin), message: &RunnerToServer) -> Result<(), LinkEnd> {
    let frame = frame::encode(message).map_err(LinkEnd::Frame)?;
    sink.write_all(&frame).await.map_err(LinkEnd::Io)?;
    sink.flush().await.map_err(LinkEnd::Io)
}

struct Incoming<S> {
    source: S,
    decoder: Decoder,
    buffer: Vec<u8>,
}

impl<S: AsyncRead + Unpin> Incoming<S> {
    async fn next(&mut self) -> Result<ServerToRunner, LinkEnd> {
        loop {
            if let Some(message) = self.decoder.next().map_err(LinkEnd::Frame)? {
                return Ok(message);
            }
            match self.source.read(&mut self.buffer).await {
                Ok(0) => return Err(LinkEnd::Closed),
                Ok(n) => self.decoder.push(&self.buffer[..n]),
                Err(error) => return Err(LinkEnd::Io(error)),
            }
        }
    }
}

impl Homes {
    /// Takes up what an earlier runner on this data directory left behind: living sandboxes keep running and
    /// wait for their server, dead ones are swept.
    async fn adopt_recorded(&mut self) -> io::Result<()> {
        let (backend, run_dir) = (Arc::clone(&self.runner.backend), self.runner.run_dir());
        let recorded = blocking(move || backend.recorded(&run_dir)).await??;
        for (home, sandbox) in recorded {
            let living = Arc::clone(&sandbox);
            if blocking(move || living.is_alive()).await? && !self.handles.contains_key(&home) {
                tracing::info!(%home, sandbox = %sandbox.id(), "adopting a sandbox that outlived its runner");
                self.spawn(home, Some(sandbox));
            } else {
                let id = sandbox.id();
                if let Err(error) = blocking(move || sandbox.destroy()).await? {
                    tracing::warn!(%home, sandbox = %id, %error, "cannot sweep a dead sandbox");
                }
            }
        }
        Ok(())
    }

    fn presence(&self) -> Vec<HomePresence> {
        self.handles
            .iter()
            .filter_map(|(home, handle)| {
                let sandbox = handle.adopted?;
                Some(HomePresence { home: *home, generation: handle.generation, sandbox: Some(sandbox) })
            })
            .collect()
    }

    fn spawn(&mut self, home: HomeId, sandbox: Option<Arc<dyn Sandbox>>) -> &HomeHandle {
        let handle =
            home::spawn(&mut self.tasks, Arc::clone(&self.runner), home, sandbox, self.links.clone());
        self.handles.entry(home).insert_entry(handle).into_mut()
    }

    async fn link_up(&mut self, link: LinkId, outgoing: mpsc::Sender<RunnerToServer>) {
        self.links.insert(link, outgoing.clone());
        for handle in self.handles.values() {
            handle.tell(HomeEvent::LinkUp(link, outgoing.clone())).await;
        }
    }

    async fn link_down(&mut self, link: LinkId) {
        if self.links.remove(&link).is_none() {
            return;
        }
        for handle in self.handles.values() {
            handle.tell(HomeEvent::LinkDown(link)).await;
        }
    }

    /// Lets every home part from its sandbox; those that do not within [`LEAVE_DEADLINE`] are cut off.
    async fn leave(&mut self) {
        let left = timeout(LEAVE_DEADLINE, async {
            for handle in self.handles.values() {
                handle.tell(HomeEvent::RunnerEnds).await;
            }
            while self.tasks.join_next().await.is_some() {}
        });
        if left.await.is_err() {
            tracing::warn!("some homes are still busy; they are taken up again at the next start");
        }
        self.tasks.shutdown().await;
    }

    /// Homes that were deleted: each actor gives its own up, and what is left of others goes without one.
    async fn forget(&mut self, homes: &[HomeId]) {
        for home in homes {
            let is_here = self.runner.home_dir(*home).path().symlink_metadata().is_ok();
            let served = self.handles.get(home).is_some_and(|handle| !handle.has_ended());
            if !served && is_here {
                self.spawn(*home, None);
            }
            if let Some(handle) = self.handles.get(home).filter(|handle| !handle.has_ended()) {
                handle.tell(HomeEvent::Deleted).await;
            }
        }
    }

    async fn route(&mut self, link: LinkId, message: ServerToRunner) {
        let home = match &message {
            ServerToRunner::WakeHome { home, .. }
            | ServerToRunner::RunTool { home, .. }
            | ServerToRunner::QueryTool { home, .. }
            | ServerToRunner::InterruptTool { home, .. }
            | ServerToRunner::AcknowledgeTool { home, .. }
            | ServerToRunner::SecureHome { home, .. }
            | ServerToRunner::PublishAnswer { home, .. }
            | ServerToRunner::StopSandbox { home, .. } => *home,
            ServerToRunner::ForgetHomes { homes } => return self.forget(homes).await,
            ServerToRunner::Welcome { .. }
            | ServerToRunner::Refused { .. }
            | ServerToRunner::Servers { .. }
            | ServerToRunner::Heartbeat => return,
        };
        // A home whose actor has ended (warm limit reached) is served again by a new one.
        let ended = self.handles.get(&home).is_none_or(HomeHandle::has_ended);
        if ended {
            self.spawn(home, None);
        }
        if let Some(handle) = self.handles.get(&home) {
            handle.tell(HomeEvent::Server(link, message)).await;
        }
        while self.tasks.try_join_next().is_some() {}
    }
}

/// Runs blocking work off the async threads.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}
