//! Runner side of the runner link: dial, handshake, heartbeats, and messages to and from the homes.
//!
//! The server never dials. While the link is down the homes go on; when it is up again each home repeats what
//! was not answered.

use std::collections::HashMap;
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
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

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
/// First pause between two dials; doubles up to the second.
const REDIAL_PAUSE: Duration = Duration::from_millis(100);
const REDIAL_PAUSE_MAX: Duration = Duration::from_secs(10);
/// How long homes may take to part from their sandboxes when the runner ends in good order.
const LEAVE_DEADLINE: Duration = Duration::from_secs(5);

/// A byte stream to the server.
pub trait LinkStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> LinkStream for T {}

/// What [`Dial::dial`] returns.
pub type DialFuture<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn LinkStream>>> + Send + 'a>>;

/// A way to reach the server.
pub trait Dial: Send + Sync + std::fmt::Debug {
    /// Opens a new stream.
    fn dial(&self) -> DialFuture<'_>;
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

/// The homes that are served, across reconnects.
struct Homes {
    runner: Arc<Runner>,
    handles: HashMap<HomeId, HomeHandle>,
    tasks: JoinSet<HomeId>,
    outgoing: Option<mpsc::Sender<RunnerToServer>>,
}

pub(crate) async fn run(
    runner: Arc<Runner>,
    dial: Arc<dyn Dial>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let mut homes =
        Homes { runner: Arc::clone(&runner), handles: HashMap::new(), tasks: JoinSet::new(), outgoing: None };
    homes.adopt_recorded().await?;
    let mut pause = REDIAL_PAUSE;
    loop {
        let connected_at = Instant::now();
        let end = connection(&mut homes, dial.as_ref(), &shutdown).await;
        homes.link_down().await;
        if matches!(end, LinkEnd::Shutdown) || shutdown.is_cancelled() {
            break;
        }
        if connected_at.elapsed() > REDIAL_PAUSE_MAX {
            pause = REDIAL_PAUSE;
        }
        tracing::warn!(end = %describe(&end), pause_ms = pause.as_millis() as u64, "no link to the server; dialling again");
        if timeout(pause, shutdown.cancelled()).await.is_ok() {
            break;
        }
        pause = (pause * 2).min(REDIAL_PAUSE_MAX);
    }
    homes.leave().await;
    Ok(())
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
async fn connection(homes: &mut Homes, dial: &dyn Dial, shutdown: &CancellationToken) -> LinkEnd {
    let stream = match dial.dial().await {
        Ok(stream) => stream,
        Err(error) => return LinkEnd::Dial(error),
    };
    let (source, mut sink) = tokio::io::split(stream);
    let mut incoming = Incoming { source, decoder: Decoder::default(), buffer: vec![0; READ_BYTES] };
    let hello = RunnerToServer::Hello {
        versions: (RUNNER_LINK_MIN, RUNNER_LINK),
        name: homes.runner.config.name.clone(),
        credential: None,
        homes: homes.presence(),
    };
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
    homes.link_up(outgoing).await;

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
                Ok(Ok(message)) => homes.route(message).await,
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
            home::spawn(&mut self.tasks, Arc::clone(&self.runner), home, sandbox, self.outgoing.clone());
        self.handles.entry(home).insert_entry(handle).into_mut()
    }

    async fn link_up(&mut self, outgoing: mpsc::Sender<RunnerToServer>) {
        self.outgoing = Some(outgoing.clone());
        for handle in self.handles.values() {
            handle.tell(HomeEvent::LinkUp(outgoing.clone())).await;
        }
    }

    async fn link_down(&mut self) {
        self.outgoing = None;
        for handle in self.handles.values() {
            handle.tell(HomeEvent::LinkDown).await;
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

    async fn route(&mut self, message: ServerToRunner) {
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
            ServerToRunner::Welcome { .. } | ServerToRunner::Refused { .. } | ServerToRunner::Heartbeat => {
                return;
            }
        };
        // A home whose actor has ended (warm limit reached) is served again by a new one.
        let ended = self.handles.get(&home).is_none_or(HomeHandle::has_ended);
        if ended {
            self.spawn(home, None);
        }
        if let Some(handle) = self.handles.get(&home) {
            handle.tell(HomeEvent::Server(message)).await;
        }
        while self.tasks.try_join_next().is_some() {}
    }
}

/// Runs blocking work off the async threads.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}
