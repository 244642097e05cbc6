//! Following a session: every event once and in order, also across restarts of the server.
//!
//! The stream has no replay. So it is opened first, then the log is listed, then the stream is read, and what
//! comes twice is dropped by id. When the connection breaks, the same again.

use std::collections::{HashSet, VecDeque};
use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use reqwest::Method;
use serde_json::Value;
use tokio::time::Instant;

use super::sse::Decoder;
use super::{Client, ClientError, id_path};

/// How long a server may be away before following is given up; a restart takes a second or two.
const AWAY_LIMIT: Duration = Duration::from_secs(60);
/// Between two attempts to connect again.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// A stream on which nothing comes, not even a heartbeat, is taken as broken.
const SILENCE_LIMIT: Duration = Duration::from_secs(90);

type Pieces = Pin<Box<dyn Stream<Item = reqwest::Result<Vec<u8>>> + Send>>;

/// What [`Follow::next`] heard.
#[derive(Debug)]
pub(crate) enum Heard {
    /// An event of the session, not heard before.
    Event(Value),
    /// The connection broke; it is being made again.
    Broken(String),
    /// The session is archived: all of its events were given out, and no more will come.
    Over,
}

/// One followed session.
pub(crate) struct Follow {
    client: Client,
    path: String,
    /// Ids of every event given out; an event is a few hundred bytes, its id 37.
    seen: HashSet<String>,
    ready: VecDeque<Value>,
    stream: Option<(Pieces, Decoder)>,
    away_since: Option<Instant>,
    /// The session was archived when its log was listed, so the list is the whole.
    archived: bool,
}

impl Follow {
    /// Starts with the first event of the session, or with the first that `skip` does not contain.
    pub(crate) fn new(client: &Client, session: &str, skip: HashSet<String>) -> Result<Self, ClientError> {
        let path = format!("{}/events", id_path("sessions", session)?);
        let client = client.clone();
        Ok(Self {
            client,
            path,
            seen: skip,
            ready: VecDeque::new(),
            stream: None,
            away_since: None,
            archived: false,
        })
    }

    /// Waits for the next event. Dropping the future loses nothing.
    ///
    /// # Errors
    /// When the server refuses, or stays away for longer than a minute.
    pub(crate) async fn next(&mut self) -> Result<Heard, ClientError> {
        loop {
            while let Some(event) = self.ready.pop_front() {
                // Previews of unfinished answers have no id; they are for those who asked for them.
                let Some(id) = event["id"].as_str() else { continue };
                if self.seen.insert(id.to_owned()) {
                    return Ok(Heard::Event(event));
                }
            }
            let heard = match &mut self.stream {
                _ if self.archived => return Ok(Heard::Over),
                None => self.open().await.map(|()| None),
                Some((pieces, decoder)) => read(&self.client, pieces, decoder).await.map(Some),
            };
            match heard {
                Ok(None) => self.away_since = None,
                Ok(Some(events)) => self.ready.extend(events),
                Err(error) if error.fault() == covey_types::Fault::Retry => {
                    let first = self.stream.take().is_some();
                    let since = *self.away_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > AWAY_LIMIT {
                        return Err(error);
                    }
                    if first {
                        return Ok(Heard::Broken(error.to_string()));
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn open(&mut self) -> Result<(), ClientError> {
        let request = self.client.request(Method::GET, &format!("{}/stream", self.path));
        let response = self.client.accepted(request.header("accept", "text/event-stream")).await?;
        let pieces: Pieces = Box::pin(response.bytes_stream().map(|piece| piece.map(|bytes| bytes.to_vec())));
        // Asked before the list: what an archived session has is in the list.
        let session = self.client.get(self.path.trim_end_matches("/events")).await?;
        let listed = self.client.list(&self.path, None).await?;
        self.ready.extend(listed);
        self.archived = session["archived_at"].is_string();
        self.stream = Some((pieces, Decoder::default()));
        Ok(())
    }
}

async fn read(
    client: &Client,
    pieces: &mut Pieces,
    decoder: &mut Decoder,
) -> Result<Vec<Value>, ClientError> {
    let ended = |what: &str| ClientError::Refused {
        status: reqwest::StatusCode::SERVICE_UNAVAILABLE,
        message: what.to_owned(),
        request_id: None,
    };
    let piece = match tokio::time::timeout(SILENCE_LIMIT, pieces.next()).await {
        Err(_) => return Err(ended("the event stream fell silent")),
        Ok(None) => return Err(ended("the event stream ended")),
        Ok(Some(piece)) => piece.map_err(|error| client.unreachable(error))?,
    };
    let events = decoder.push(&piece).map_err(|error| client.foreign(&error.to_string()))?;
    events
        .iter()
        .map(|data| serde_json::from_str(data).map_err(|error| client.foreign(&error.to_string())))
        .collect()
}
