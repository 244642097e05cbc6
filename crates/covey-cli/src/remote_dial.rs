//! Reaching servers over the network: a request that becomes the runner link.
//!
//! What stays true: the runner dials, and shows its token in the request, as any client does. What does not belong here: when
//! to dial whom.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use covey_runner::{Dial, DialFuture, LinkStream};
use covey_wire::runner::RUNNER_LINK_PROTOCOL;
use reqwest::header::{CONNECTION, UPGRADE};

/// A way to servers by their URLs.
#[derive(Debug)]
pub(crate) struct RemoteDial {
    /// Where to begin: any of them, or what stands before them all.
    seeds: Vec<String>,
    /// Begins with another one each time, so that runners do not all come to the first.
    next: AtomicUsize,
    token: Option<String>,
}

impl RemoteDial {
    pub(crate) fn new(seeds: Vec<String>, token: Option<String>) -> Self {
        let first = std::process::id() as usize;
        Self { seeds, next: AtomicUsize::new(first), token }
    }

    /// One link to the server with this URL.
    pub(crate) async fn reach(&self, url: &str) -> io::Result<Box<dyn LinkStream>> {
        let named = |error: &dyn std::fmt::Display| io::Error::other(format!("{url}: {error}"));
        let Some(token) = &self.token else { return Err(named(&"no token for it is known")) };
        // HTTP/2 has no upgrade.
        let client = reqwest::Client::builder().http1_only().no_proxy().build().map_err(|e| named(&e))?;
        let request = client.get(format!("{}/v1/covey/runners/link", url.trim_end_matches('/')));
        let request = request.header(CONNECTION, "upgrade").header(UPGRADE, RUNNER_LINK_PROTOCOL);
        let response =
            request.header("x-api-key", token).send().await.map_err(|e| named(&e.without_url()))?;
        if response.status() != reqwest::StatusCode::SWITCHING_PROTOCOLS {
            let (status, said) = (response.status(), response.text().await.unwrap_or_default());
            let said: String = said.chars().take(300).collect();
            return Err(named(&format!("{status} {said}")));
        }
        Ok(Box::new(response.upgrade().await.map_err(|e| named(&e.without_url()))?))
    }
}

impl Dial for RemoteDial {
    fn dial(&self) -> DialFuture<'_> {
        Box::pin(async {
            let first = self.next.fetch_add(1, Ordering::Relaxed);
            let mut failure = io::Error::other("no server is named; say where with --server");
            for at in 0..self.seeds.len() {
                let Some(url) = self.seeds.get((first.wrapping_add(at)) % self.seeds.len()) else { continue };
                match self.reach(url).await {
                    Ok(stream) => return Ok(stream),
                    Err(error) => failure = error,
                }
            }
            Err(failure)
        })
    }

    fn dial_at<'a>(&'a self, url: &'a str) -> DialFuture<'a> {
        Box::pin(self.reach(url))
    }
}
