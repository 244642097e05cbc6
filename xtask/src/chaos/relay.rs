//! The way between one server and PostgreSQL, which can be cut: a relay on loopback of our own.
//!
//! What stays true: what is held is passed on in order or never; nothing is dropped in the middle of a connection that goes
//! on. What does not belong here: when it is cut.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// How often a held stream looks whether it may go on.
const HELD_LOOK: Duration = Duration::from_millis(5);
const PIECE_BYTES: usize = 64 * 1024;

/// How the way is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both sides see their connections end.
    Close,
    /// Neither side sees anything: what is sent is held.
    Hold,
}

/// Relays connections until the process ends.
#[derive(Debug)]
pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    is_held: AtomicBool,
    /// Both ends of each connection, so that they can be closed.
    open: Mutex<Vec<TcpStream>>,
}

impl State {
    fn close_all(&self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for stream in open.drain(..) {
            // One that has ended by itself is as good.
            stream.shutdown(Shutdown::Both).ok();
        }
    }
}

impl Relay {
    pub(crate) fn start(to: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        thread::Builder::new().name("relay".to_owned()).spawn(move || {
            for client in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                if let Err(error) = take(client, to, &state) {
                    // The database restarts: whoever dialled sees a closed connection.
                    tracing_line(&error);
                }
            }
        })?;
        Ok(Self { address, state })
    }

    pub(crate) fn cut(&self, how: Cut) {
        match how {
            Cut::Close => self.state.close_all(),
            Cut::Hold => self.state.is_held.store(true, Ordering::SeqCst),
        }
    }

    /// Lets what was held go on, or closes it.
    pub(crate) fn mend(&self, close: bool) {
        if close {
            self.state.close_all();
        }
        self.state.is_held.store(false, Ordering::SeqCst);
    }
}

fn tracing_line(error: &anyhow::Error) {
    if std::env::var_os("COVEY_CHAOS_TALK").is_some() {
        eprintln!("relay: {error:#}");
    }
}

fn take(client: TcpStream, to: SocketAddr, state: &Arc<State>) -> Result<()> {
    let server = TcpStream::connect(to).context("the database does not answer")?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    {
        let mut open = state.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.extend([client.try_clone()?, server.try_clone()?]);
    }
    for (from, to) in [(client.try_clone()?, server.try_clone()?), (server, client)] {
        let state = Arc::clone(state);
        thread::Builder::new().name("relay".to_owned()).spawn(move || pass(from, to, &state))?;
    }
    Ok(())
}

fn pass(mut from: TcpStream, mut to: TcpStream, state: &State) {
    let mut piece = vec![0; PIECE_BYTES];
    while let Ok(count @ 1..) = from.read(&mut piece) {
        while state.is_held.load(Ordering::SeqCst) {
            thread::sleep(HELD_LOOK);
        }
        if to.write_all(&piece[..count]).is_err() {
            break;
        }
    }
    // The other direction ends with this one; a stream that is closed already is what is wanted.
    from.shutdown(Shutdown::Both).ok();
    to.shutdown(Shutdown::Both).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_comes_later_and_what_is_closed_ends() {
        let echo = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = echo.local_addr().unwrap();
        thread::spawn(move || {
            for stream in echo.incoming().flatten() {
                thread::spawn(move || {
                    let (mut from, mut to) = (stream.try_clone().unwrap(), stream);
                    std::io::copy(&mut from, &mut to).unwrap_or_default();
                });
            }
        });
        let relay = Relay::start(to).unwrap();
        let mut client = TcpStream::connect(relay.address).unwrap();
        let mut back = [0; 3];
        client.write_all(b"one").unwrap();
        client.read_exact(&mut back).unwrap();
        relay.cut(Cut::Hold);
        client.write_all(b"two").unwrap();
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert!(client.read_exact(&mut back).is_err(), "it is held");
        relay.mend(false);
        client.set_read_timeout(None).unwrap();
        client.read_exact(&mut back).unwrap();
        assert_eq!((&back), b"two");
        relay.cut(Cut::Close);
        assert_eq!(client.read(&mut back).unwrap_or(0), 0, "it is closed");
    }
}
