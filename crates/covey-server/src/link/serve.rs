//! One link, from handshake to end, over any byte stream.
//!
//! Reading and writing are two loops that run side by side, so that a peer that only writes cannot block us.
//! Three missed heartbeats end the link. What does not belong here: choosing a runner.

use std::time::Duration;

use covey_types::{HomeId, OrgId};
use covey_wire::frame::{self, Decoder, FrameError};
use covey_wire::generation::{RUNNER_LINK, RUNNER_LINK_MIN, agree};
use covey_wire::runner::{PublishOutcome, RunnerToServer, SERVERS_MAX, ServerToRunner};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Connected, Links, OUTBOX_MAX, Outbox, SERVERS_SINCE};
use crate::db::DbError;
use crate::db::snapshots::{Publish, Published};

/// How often each side says that it is still here.
pub const HEARTBEAT: Duration = Duration::from_secs(5);
/// Silence after which the link is lost: three missed heartbeats.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// Time for the first message.
const HELLO_WAIT: Duration = Duration::from_secs(10);
const READ_BYTES: usize = 64 * 1024;
/// The version of the link from which on a runner understands why else a publish was not accepted.
const QUOTA_SINCE: u32 = 2;

/// How a runner shows that it may connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// It runs in this process, for this org.
    InProcess(OrgId),
    /// It must show a token of its org.
    Token,
}

/// Why a link ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The runner closed it.
    #[error("the runner closed the link")]
    Closed,
    /// Nothing came for too long.
    #[error("nothing came from the runner for {} s", SILENCE_MAX.as_secs())]
    Silent,
    /// The runner was refused.
    #[error("the runner was refused: {0}")]
    Refused(String),
    /// It spoke before the handshake, or something else than messages.
    #[error("the runner broke the protocol: {0}")]
    Protocol(String),
    /// A newer link of the same runner, or the server's end.
    #[error("the link was replaced or the server stops")]
    Replaced,
    /// A driver did not keep up.
    #[error("the driver of home {0} does not take its messages")]
    Overrun(HomeId),
    /// The stream failed.
    #[error("the stream failed")]
    Io(#[from] std::io::Error),
    /// A frame could not be read or written.
    #[error("a frame failed")]
    Frame(#[from] FrameError),
    /// The database failed.
    #[error("the database failed")]
    Db(#[from] DbError),
}

/// Serves one runner until its link ends; the drivers that relied on it see that from their outbox.
///
/// # Errors
/// Always returns why the link ended.
pub async fn serve<S>(stream: S, links: &Links, trust: Trust, stop: &CancellationToken) -> LinkError
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let (mut reader, mut writer) = tokio::io::split(stream);
    let mut source = Source { decoder: Decoder::default(), buffer: vec![0; READ_BYTES] };
    let greeted = tokio::select! {
        greeted = greet(&mut source, &mut reader, &mut writer, links, trust) => greeted,
        () = stop.cancelled() => Err(LinkError::Replaced),
    };
    let (connected, queue) = match greeted {
        Ok(greeted) => greeted,
        Err(e) => return e,
    };
    let (org, outbox) = (connected.org, connected.outbox.clone());
    register(links, connected);
    tracing::info!(runner = %outbox.runner, "runner connected");
    // After it is registered: what is deleted from here on it is told at once.
    match links.db.deleted_homes(org).await {
        Ok(deleted) => outbox.forget(&deleted),
        Err(e) => tracing::warn!(error = %e, "cannot tell a runner which homes were deleted"),
    }
    let end = tokio::select! {
        end = read_all(&mut source, &mut reader, links, &outbox) => end,
        end = write_all(queue, &mut writer) => end,
        never = tell_servers(links, &outbox) => never,
        () = outbox.stop.cancelled() => LinkError::Replaced,
        () = stop.cancelled() => LinkError::Replaced,
    };
    tracing::info!(runner = %outbox.runner, reason = %end, "runner's link ended");
    unregister(links, &outbox);
    let runner = outbox.runner;
    let noted = links.db.runner_disconnected(org, runner).await;
    if let Err(e) = noted {
        tracing::warn!(error = %e, "could not note that the runner went");
    }
    end
}

/// Tells the runner at which servers it shall be, as often as that changes.
async fn tell_servers(links: &Links, outbox: &Outbox) -> LinkError {
    let (mut servers, standing) = (links.db.servers(), links.db.standing());
    loop {
        let known = servers.borrow_and_update().clone();
        let own = standing.borrow().instance();
        let own = known.iter().find(|server| Some(server.id) == own).map(|server| server.address.clone());
        if let Some(own) = own.filter(|_| outbox.version() >= SERVERS_SINCE) {
            let all = known.into_iter().map(|server| server.address).take(SERVERS_MAX).collect();
            if outbox.send(ServerToRunner::Servers { own, all }).is_err() {
                return LinkError::Replaced;
            }
        }
        if servers.changed().await.is_err() {
            // The database is closed with the server, which ends this link as well.
            return std::future::pending().await;
        }
    }
}

struct Source {
    decoder: Decoder,
    buffer: Vec<u8>,
}

impl Source {
    /// The next message; cancel-safe, because bytes that were read are kept in the decoder.
    async fn next<R: AsyncRead + Unpin>(&mut self, reader: &mut R) -> Result<RunnerToServer, LinkError> {
        loop {
            if let Some(message) = self.decoder.next()? {
                return Ok(message);
            }
            let read = tokio::time::timeout(SILENCE_MAX, reader.read(&mut self.buffer));
            match read.await.map_err(|_| LinkError::Silent)?? {
                0 => return Err(LinkError::Closed),
                n => self.decoder.push(&self.buffer[..n]),
            }
        }
    }
}

async fn greet<R, W>(
    source: &mut Source,
    reader: &mut R,
    writer: &mut W,
    links: &Links,
    trust: Trust,
) -> Result<(Connected, mpsc::Receiver<ServerToRunner>), LinkError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let hello =
        tokio::time::timeout(HELLO_WAIT, source.next(reader)).await.map_err(|_| LinkError::Silent)??;
    let RunnerToServer::Hello { versions, name, credential, homes } = hello else {
        return Err(LinkError::Protocol("the first message must be hello".into()));
    };
    let admitted = match agree("runner link", (RUNNER_LINK_MIN, RUNNER_LINK), versions, "server", "runner") {
        Ok(version) => admit(links, trust, credential).await?.map(|org| (version, org)),
        Err(e) => Err(e.to_string()),
    };
    let (version, org) = match admitted {
        Ok(admitted) => admitted,
        Err(reason) => {
            let refused = ServerToRunner::Refused { reason: reason.clone() };
            writer.write_all(&frame::encode(&refused)?).await?;
            writer.flush().await?;
            return Err(LinkError::Refused(reason));
        }
    };
    let runner = links.db.runner_connected(org, &name).await?;
    let heartbeat_ms = HEARTBEAT.as_millis() as u32;
    let welcome = ServerToRunner::Welcome { version, runner, heartbeat_ms };
    writer.write_all(&frame::encode(&welcome)?).await?;
    writer.flush().await?;
    let (queue, taken) = mpsc::channel(OUTBOX_MAX);
    let number = {
        let mut inner = links.inner();
        inner.next_number += 1;
        inner.next_number
    };
    let outbox = Outbox { runner, version, number, queue, stop: CancellationToken::new() };
    let homes = homes.into_iter().map(|presence| (presence.home, presence)).collect();
    Ok((Connected { org, outbox, homes }, taken))
}

/// The org that the runner belongs to, or what to tell it.
async fn admit(
    links: &Links,
    trust: Trust,
    credential: Option<String>,
) -> Result<Result<OrgId, String>, LinkError> {
    if let Trust::InProcess(org) = trust {
        return Ok(Ok(org));
    }
    let Some(secret) = credential else {
        return Ok(Err("a token is needed; give the runner one of its org".into()));
    };
    let owner = links.db.verify_token(&secret).await?;
    Ok(owner.map(|(org, _)| org).ok_or_else(|| "the token is unknown or revoked; create a new one".into()))
}

fn register(links: &Links, connected: Connected) {
    let mut inner = links.inner();
    let runner = connected.outbox.runner;
    if let Some(older) = inner.connected.insert(runner, connected) {
        // Its drivers see its end; what they had sent over it is asked for again.
        older.outbox.stop.cancel();
    }
    drop(inner);
    links.changed.send_modify(|n| *n += 1);
}

fn unregister(links: &Links, outbox: &Outbox) {
    let mut inner = links.inner();
    if inner.connected.get(&outbox.runner).is_some_and(|c| c.outbox.number == outbox.number) {
        inner.connected.remove(&outbox.runner);
    }
    drop(inner);
    links.changed.send_modify(|n| *n += 1);
}

async fn write_all<W: AsyncWrite + Unpin>(
    mut queue: mpsc::Receiver<ServerToRunner>,
    writer: &mut W,
) -> LinkError {
    let mut beat = tokio::time::interval(HEARTBEAT);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            message = queue.recv() => match message {
                Some(message) => message,
                None => return LinkError::Replaced,
            },
            _ = beat.tick() => ServerToRunner::Heartbeat,
        };
        let frame = match frame::encode(&message) {
            Ok(frame) => frame,
            Err(e) => return e.into(),
        };
        if let Err(e) = writer.write_all(&frame).await {
            return e.into();
        }
        if let Err(e) = writer.flush().await {
            return e.into();
        }
    }
}

async fn read_all<R: AsyncRead + Unpin>(
    source: &mut Source,
    reader: &mut R,
    links: &Links,
    outbox: &Outbox,
) -> LinkError {
    loop {
        let message = match source.next(reader).await {
            Ok(message) => message,
            Err(e) => return e,
        };
        let Some(home) = home_of(&message) else {
            if matches!(message, RunnerToServer::Heartbeat) {
                continue;
            }
            return LinkError::Protocol("hello again".into());
        };
        match deliver(links, home, message) {
            Ok(None) => {}
            Ok(Some(message)) => {
                if let Err(e) = answer_undriven(links, outbox, home, message).await {
                    // The runner repeats what was not answered.
                    tracing::warn!(%home, error = %e, "could not answer a runner's message");
                }
            }
            Err(e) => return e,
        }
    }
}

fn home_of(message: &RunnerToServer) -> Option<HomeId> {
    use RunnerToServer as M;
    match message {
        M::Hello { .. } | M::Heartbeat => None,
        M::HomeReady { home, .. }
        | M::HomeFailed { home, .. }
        | M::ToolStarted { home, .. }
        | M::ToolOutput { home, .. }
        | M::ToolDone { home, .. }
        | M::ToolLost { home, .. }
        | M::Publish { home, .. }
        | M::SecureFailed { home, .. }
        | M::SandboxChanged { home, .. } => Some(*home),
    }
}

/// Hands the message to the home's driver; gives it back when there is none.
fn deliver(
    links: &Links,
    home: HomeId,
    message: RunnerToServer,
) -> Result<Option<RunnerToServer>, LinkError> {
    let inner = links.inner();
    let Some(route) = inner.routes.get(&home) else { return Ok(Some(message)) };
    let is_output = matches!(message, RunnerToServer::ToolOutput { .. });
    match route.mailbox.try_send(message) {
        Ok(()) => Ok(None),
        Err(mpsc::error::TrySendError::Closed(message)) => Ok(Some(message)),
        Err(_) if is_output => Ok(None),
        Err(_) => Err(LinkError::Overrun(home)),
    }
}

/// Answers what needs an answer although no driver acts on the home: late publishes and repeated results.
pub(crate) async fn answer_undriven(
    links: &Links,
    outbox: &Outbox,
    home: HomeId,
    message: RunnerToServer,
) -> Result<(), DbError> {
    match message {
        RunnerToServer::Publish { token, base, root, kind, step, files, bytes, epoch, .. } => {
            let offer = Publish { token, base, root, kind, step, files, bytes: bytes.0, epoch };
            publish(links, outbox, home, offer).await
        }
        RunnerToServer::SecureFailed { fault, detail, .. } => {
            links.db.note_secure_failed(home, fault, &detail).await
        }
        RunnerToServer::ToolDone { step, .. } => {
            let known = links.db.is_result_known(home, step).await?;
            // Without a driver no turn is open, so a result that is not known belongs to nobody any more only
            // when there is no session; otherwise the driver that is about to start asks for it.
            if known && outbox.send(ServerToRunner::AcknowledgeTool { home, step }).is_err() {
                tracing::debug!("the link ended; the runner repeats the result on the next one");
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Publishes and answers. Errors that another attempt may mend are not answered: the runner repeats the offer.
pub(crate) async fn publish(
    links: &Links,
    outbox: &Outbox,
    home: HomeId,
    offer: Publish,
) -> Result<(), DbError> {
    let root = offer.root;
    let published = links.db.publish(home, &offer).await;
    let outcome = match published {
        Ok(Published::Current(generation)) => PublishOutcome::Published { generation },
        Ok(Published::OverQuota(reason)) if outbox.version() >= QUOTA_SINCE => {
            PublishOutcome::OverQuota { reason }
        }
        Ok(Published::Collected { floor }) if outbox.version() >= QUOTA_SINCE => {
            PublishOutcome::Collected { floor }
        }
        // A runner that knows neither answer gives the working copy up: it is set aside, not lost.
        Ok(Published::OverQuota(reason)) => PublishOutcome::Refused { reason },
        Ok(Published::Collected { .. }) => PublishOutcome::Refused {
            reason: "a garbage collection has passed; upgrade the runner".to_owned(),
        },
        Err(e @ (DbError::Fenced { .. } | DbError::Conflict(_) | DbError::NotFound { .. })) => {
            PublishOutcome::Refused { reason: e.to_string() }
        }
        Err(e) => return Err(e),
    };
    if outbox.send(ServerToRunner::PublishAnswer { home, root, outcome }).is_err() {
        tracing::debug!("the link ended; the runner offers the snapshot again on the next one");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::io::DuplexStream;

    use super::*;
    use crate::db::Db;

    struct Fixture {
        _dir: tempfile::TempDir,
        links: Links,
        org: OrgId,
    }

    async fn fixture() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("covey.db")).unwrap();
        let org = db.ensure_default_org().await.unwrap();
        Fixture { _dir: dir, links: Links::new(db), org }
    }

    fn hello(versions: (u32, u32), credential: Option<String>) -> RunnerToServer {
        RunnerToServer::Hello { versions, name: "r".into(), credential, homes: vec![] }
    }

    async fn say(stream: &mut DuplexStream, message: &RunnerToServer) {
        stream.write_all(&frame::encode(message).unwrap()).await.unwrap();
    }

    async fn hear(stream: &mut DuplexStream) -> ServerToRunner {
        let mut length = [0; 4];
        stream.read_exact(&mut length).await.unwrap();
        let mut body = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut body).await.unwrap();
        frame::decode(&body).unwrap()
    }

    async fn refused(f: &Fixture, trust: Trust, first: RunnerToServer) -> LinkError {
        let (mut ours, theirs) = tokio::io::duplex(4096);
        let stop = CancellationToken::new();
        let client = async {
            say(&mut ours, &first).await;
            let mut rest = Vec::new();
            ours.read_to_end(&mut rest).await.unwrap();
        };
        tokio::join!(serve(theirs, &f.links, trust, &stop), client).0
    }

    #[tokio::test]
    async fn a_runner_that_may_not_connect_is_told_what_to_do() {
        let f = fixture().await;
        let inside = Trust::InProcess(f.org);
        let cases = [
            (inside, hello((7, 9), None), "upgrade the server"),
            (inside, hello((0, 0), None), "upgrade the runner"),
            (Trust::Token, hello((1, 1), None), "a token is needed"),
            (Trust::Token, hello((1, 1), Some("covey_wrong".into())), "unknown or revoked"),
            (inside, RunnerToServer::Heartbeat, "must be hello"),
        ];
        for (trust, first, said) in cases {
            let end = refused(&f, trust, first).await.to_string();
            assert!(end.contains(said), "{end}");
        }
        assert!(f.links.inner().connected.is_empty());
    }

    #[tokio::test]
    async fn a_newer_link_of_the_same_runner_ends_the_older_one() {
        let f = fixture().await;
        let stop = CancellationToken::new();
        let home = HomeId::from_uuid(uuid::Uuid::from_u128(1));
        let (mut first, one) = tokio::io::duplex(4096);
        let (mut second, two) = tokio::io::duplex(4096);
        let (a, b) = (
            serve(one, &f.links, Trust::InProcess(f.org), &stop),
            serve(two, &f.links, Trust::InProcess(f.org), &stop),
        );
        let script = async {
            say(&mut first, &hello((1, 1), None)).await;
            assert!(matches!(hear(&mut first).await, ServerToRunner::Welcome { .. }));
            let outbox = loop {
                if let Some(outbox) = f.links.place(f.org, home, None) {
                    break outbox;
                }
                tokio::task::yield_now().await;
            };
            say(&mut second, &hello((1, 1), None)).await;
            assert!(matches!(hear(&mut second).await, ServerToRunner::Welcome { .. }));
            outbox.ended().await;
            assert_eq!(outbox.send(ServerToRunner::Heartbeat), Err(super::super::LinkEnded));
            let newer = f.links.place(f.org, home, None).expect("the newer link stands");
            newer.send(ServerToRunner::Heartbeat).unwrap();
            drop(second);
        };
        let (a, b, ()) = tokio::join!(a, b, script);
        assert!(matches!(a, LinkError::Replaced), "{a}");
        assert!(matches!(b, LinkError::Closed | LinkError::Io(_)), "{b}");
        assert!(f.links.inner().connected.is_empty());
    }

    #[tokio::test]
    async fn a_snapshot_of_a_home_that_does_not_exist_is_answered_with_a_refusal() {
        let f = fixture().await;
        let stop = CancellationToken::new();
        let (mut ours, theirs) = tokio::io::duplex(4096);
        let home = HomeId::from_uuid(uuid::Uuid::from_u128(1));
        let root = covey_types::RootHash::of(b"r");
        let script = async {
            say(&mut ours, &hello((1, 1), None)).await;
            assert!(matches!(hear(&mut ours).await, ServerToRunner::Welcome { .. }));
            let publish = RunnerToServer::Publish {
                home,
                token: covey_types::FencingToken(1),
                base: covey_types::Generation(0),
                root,
                kind: covey_types::SnapshotKind::Quiesced,
                step: None,
                files: 0,
                bytes: covey_types::ByteCount(0),
                stored_bytes_new: covey_types::ByteCount(0),
                elapsed_ms: 0,
                epoch: 0,
            };
            say(&mut ours, &publish).await;
            let answer = loop {
                let message = hear(&mut ours).await;
                if message != ServerToRunner::Heartbeat {
                    break message;
                }
            };
            assert!(matches!(
                answer,
                ServerToRunner::PublishAnswer { outcome: PublishOutcome::Refused { .. }, .. }
            ));
            drop(ours);
        };
        tokio::join!(serve(theirs, &f.links, Trust::InProcess(f.org), &stop), script);
    }
}
