//! A relay before the server that cuts a connection at a chosen message, or holds all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Where a `COMMIT` is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// It never arrives: the server sees the connection end.
    Before,
    /// It arrives and is carried out; its answer never comes back.
    After,
}

/// A relay; it ends when dropped.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    /// Commits that are still to be cut.
    left: Arc<AtomicUsize>,
    held: watch::Sender<bool>,
    _task: JoinSet<()>,
}

/// A statement whose parameters have this text is cut like a commit: it is a transaction of its own.
pub(crate) const CUT_HERE: &str = "cut-this-statement";
/// A simple query with this text.
const COMMIT: &[u8] = b"Q\0\0\0\x0bCOMMIT\0";

impl Proxy {
    pub(crate) async fn start(server_port: u16, cut: Cut) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let left = Arc::new(AtomicUsize::new(0));
        let mut task = JoinSet::new();
        let armed = Arc::clone(&left);
        let held = watch::Sender::new(false);
        let watched = held.subscribe();
        task.spawn(async move {
            let mut relays = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = TcpStream::connect(("127.0.0.1", server_port)).await.unwrap();
                relays.spawn(relay(client, server, cut, Arc::clone(&armed), watched.clone()));
            }
        });
        Self { port, left, held, _task: task }
    }

    /// Cuts the next commits.
    pub(crate) fn cut_next(&self, count: usize) {
        self.left.store(count, Ordering::SeqCst);
    }

    /// Passes nothing on in either direction, and neither side sees anything; or goes on.
    pub(crate) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }

    pub(crate) fn left(&self) -> usize {
        self.left.load(Ordering::SeqCst)
    }
}

async fn relay(
    mut client: TcpStream,
    mut server: TcpStream,
    cut: Cut,
    left: Arc<AtomicUsize>,
    mut held: watch::Receiver<bool>,
) {
    let (mut from_client, mut from_server) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    loop {
        tokio::select! {
            read = client.read(&mut from_client) => {
                let Ok(count @ 1..) = read else { return };
                let bytes = &from_client[..count];
                held.wait_for(|held| !held).await.unwrap();
                // A driver that waits for the answers to its statements sends the commit as a piece of its own.
                let is_commit = bytes == COMMIT;
                let is_statement = bytes.windows(CUT_HERE.len()).any(|part| part == CUT_HERE.as_bytes());
                if (is_commit || is_statement) && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
                    if cut == Cut::After {
                        server.write_all(bytes).await.unwrap();
                        let answered = server.read(&mut from_server).await.unwrap();
                        let expected: &[u8] = if is_commit { b"C" } else { b"2" };
                        assert!(from_server[..answered].starts_with(expected), "the commit was not carried out");
                    }
                    return;
                }
                if server.write_all(bytes).await.is_err() {
                    return;
                }
            }
            read = server.read(&mut from_server) => {
                let Ok(count @ 1..) = read else { return };
                held.wait_for(|held| !held).await.unwrap();
                if client.write_all(&from_server[..count]).await.is_err() {
                    return;
                }
            }
        }
    }
}
