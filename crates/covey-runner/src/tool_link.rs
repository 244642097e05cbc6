//! Runner side of the tool link: bytes from the sandbox become messages in the home's queue.
//!
//! The daemon shares its uid with the agent, so everything it sends is hostile: frames are limited by
//! [`Decoder`], the queue into the home is bounded (a flooding daemon only slows itself), and nothing it says
//! names another home.

use std::os::unix::net::UnixStream as StdUnixStream;

use covey_types::SandboxId;
use covey_wire::frame::{self, Decoder};
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Messages to one daemon that may wait; more means that it does not read, and the link is given up.
const OUTGOING_MAX: usize = 256;
const READ_BYTES: usize = 64 * 1024;

/// What came from a daemon.
#[derive(Debug)]
pub(crate) enum ToolEvent {
    /// A message.
    Message(SandboxToRunner),
    /// The link is over; why, for the log.
    Closed(String),
}

/// An open tool link. Dropping it closes the link.
#[derive(Debug)]
pub(crate) struct ToolLink {
    outgoing: mpsc::Sender<RunnerToSandbox>,
    _tasks: JoinSet<()>,
}

impl ToolLink {
    /// Takes over a stream after its handshake. `wrap` makes a message for the home's queue.
    pub(crate) fn open<T: Send + 'static>(
        stream: StdUnixStream,
        sandbox: SandboxId,
        queue: mpsc::Sender<T>,
        wrap: impl Fn(SandboxId, ToolEvent) -> T + Send + 'static,
    ) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_read_timeout(None)?;
        let (mut source, mut sink) = UnixStream::from_std(stream)?.into_split();
        let (outgoing, mut messages) = mpsc::channel::<RunnerToSandbox>(OUTGOING_MAX);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            while let Some(message) = messages.recv().await {
                let sent = match frame::encode(&message) {
                    Ok(frame) => sink.write_all(&frame).await.map_err(|e| e.to_string()),
                    Err(e) => Err(e.to_string()),
                };
                if let Err(error) = sent {
                    // The reader sees the closed stream as well and reports it; one report is enough.
                    tracing::debug!(%sandbox, error, "cannot write to the sandbox");
                    return;
                }
            }
        });
        tasks.spawn(async move {
            let mut decoder = Decoder::default();
            let mut buffer = vec![0; READ_BYTES];
            let reason = loop {
                match decoder.next() {
                    Ok(Some(message)) => {
                        if queue.send(wrap(sandbox, ToolEvent::Message(message))).await.is_err() {
                            return;
                        }
                        continue;
                    }
                    Ok(None) => {}
                    Err(error) => break error.to_string(),
                }
                match source.read(&mut buffer).await {
                    Ok(0) => break "the daemon closed the link".to_owned(),
                    Ok(n) => decoder.push(&buffer[..n]),
                    Err(error) => break error.to_string(),
                }
            };
            if queue.send(wrap(sandbox, ToolEvent::Closed(reason))).await.is_err() {
                tracing::debug!(%sandbox, "the home is no longer served");
            }
        });
        Ok(Self { outgoing, _tasks: tasks })
    }

    /// Hands a message over; false when the daemon does not take messages any more.
    pub(crate) fn send(&self, message: RunnerToSandbox) -> bool {
        self.outgoing.try_send(message).is_ok()
    }
}
