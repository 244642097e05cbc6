//! Lets runners and clients of the same user use the server's store through a unix socket in the data directory, so that
//! the bucket's key stays with the server.
//!
//! What stays true: as many links as have a thread, and no more; a link that cannot be served is closed and costs the
//! others nothing. What does not belong here: what is asked over a link.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use covey_home::backend::OpenStore;
use covey_server::store_link::{STORE_LINKS_MAX, serve};

/// A runner that asks nothing for so long dials again when it does.
const SILENCE_MAX: Duration = Duration::from_secs(15 * 60);

/// Listens until the process ends.
pub(crate) fn listen(socket: &Path, store: Arc<dyn OpenStore>, org: String) -> Result<()> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let listener = UnixListener::bind(socket).with_context(|| format!("{}", socket.display()))?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    let links = Arc::new(AtomicUsize::new(0));
    // Threads, because every call on a store blocks.
    let accept = move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => accept_one(stream, &store, &org, &links),
                Err(error) => tracing::warn!(%error, "nobody can dial in to the store"),
            }
        }
    };
    std::thread::Builder::new().name("store-links".to_owned()).spawn(accept)?;
    Ok(())
}

fn accept_one(mut stream: UnixStream, store: &Arc<dyn OpenStore>, org: &str, links: &Arc<AtomicUsize>) {
    if links.fetch_add(1, Ordering::SeqCst) >= STORE_LINKS_MAX {
        links.fetch_sub(1, Ordering::SeqCst);
        tracing::warn!(STORE_LINKS_MAX, "too many store links; this one is closed");
        return;
    }
    let (store, org, ours) = (Arc::clone(store), org.to_owned(), Arc::clone(links));
    let work = move || {
        let served = stream
            .set_read_timeout(Some(SILENCE_MAX))
            .map_err(|error| error.to_string())
            .and_then(|()| serve(&mut stream, &*store, &org).map_err(|error| error.to_string()));
        if let Err(error) = served {
            tracing::debug!(%error, "a store link has ended");
        }
        ours.fetch_sub(1, Ordering::SeqCst);
    };
    if let Err(error) = std::thread::Builder::new().name("store-link".to_owned()).spawn(work) {
        links.fetch_sub(1, Ordering::SeqCst);
        tracing::warn!(%error, "no thread for a store link");
    }
}
