//! The API as the official SDKs call it: JSON over HTTP under `/v1`, lists in pages, events as a stream.
//!
//! Answers stay `serde_json::Value`: the command line shows what the server says and must not lose a field
//! that it does not know. What does not belong here: what an answer means, and any printing.

mod follow;
mod sse;

use std::time::Duration;

use bytes::Bytes;
use covey_types::Fault;
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};

pub(crate) use self::follow::{Follow, Heard};
use crate::global::{ClientFile, Global};

/// A server on this machine answers at once; one far away within seconds.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// For anything but the event stream.
const REQUEST_LIMIT: Duration = Duration::from_secs(120);
const PAGE_SIZE: u32 = 100;
/// Pages at most; a server that never ends its pages must not hang a script.
const PAGES_MAX: usize = 10_000;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// No connection, or it broke.
    #[error("{url} cannot be reached; is `covey up` running there?")]
    Unreachable {
        url: String,
        #[source]
        source: reqwest::Error,
    },
    /// The server said no.
    #[error("{message}{}", request_id.as_ref().map(|id| format!(" (request {id})")).unwrap_or_default())]
    Refused { status: StatusCode, message: String, request_id: Option<String> },
    /// Not our protocol.
    #[error("{url} answered something that is not the API of Covey: {what}")]
    Foreign { url: String, what: String },
    /// The text cannot be an id of anything.
    #[error("`{0}` is not an id")]
    NotAnId(String),
}

impl ClientError {
    /// What the caller can do about it.
    pub(crate) fn fault(&self) -> Fault {
        match self {
            Self::Unreachable { .. } => Fault::Retry,
            Self::Foreign { .. } => Fault::Bug,
            Self::NotAnId(_) => Fault::Invalid,
            Self::Refused { status, .. } => match status.as_u16() {
                401 | 403 => Fault::Denied,
                404 | 410 => Fault::NotFound,
                409 | 412 => Fault::Conflict,
                408 | 429 | 502..=504 | 529 => Fault::Retry,
                413 => Fault::TooLarge,
                507 => Fault::Full,
                400..=499 => Fault::Invalid,
                _ => Fault::Bug,
            },
        }
    }
}

/// A connection to one server with one token.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    server: ClientFile,
}

impl Client {
    pub(crate) fn new(global: &Global) -> anyhow::Result<Self> {
        Self::of(global.server()?)
    }

    /// A connection to a server that is known otherwise than by the options.
    pub(crate) fn of(server: ClientFile) -> anyhow::Result<Self> {
        let mut builder = reqwest::Client::builder()
            .connect_timeout(CONNECT_LIMIT)
            // The token must not follow a redirect to another place.
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("covey/", env!("CARGO_PKG_VERSION")));
        if server.url.starts_with("http://") {
            // Without this a machine that has no CA certificates could not even talk to its own server.
            let roots = rustls::RootCertStore::empty();
            let config = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
            builder = builder.tls_backend_preconfigured(config);
        }
        let http = builder.build()?;
        Ok(Self { http, server })
    }

    /// Which server this is.
    pub(crate) fn server(&self) -> &ClientFile {
        &self.server
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.answer(self.request(Method::GET, path).timeout(REQUEST_LIMIT)).await
    }

    /// As [`Client::get`] with a query; `limit` for answers that take a while to make.
    pub(crate) async fn ask(
        &self,
        path: &str,
        query: &[(&str, String)],
        limit: Duration,
    ) -> Result<Value, ClientError> {
        self.answer(self.request(Method::GET, path).query(query).timeout(limit)).await
    }

    pub(crate) async fn put(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.answer(self.request(Method::PUT, path).timeout(REQUEST_LIMIT).json(body)).await
    }

    /// Begins to read bytes of any length, for as long as they come.
    pub(crate) async fn download(
        &self,
        path: &str,
        query: &[(&str, String)],
    ) -> Result<Download, ClientError> {
        let response = self.accepted(self.request(Method::GET, path).query(query)).await?;
        Ok(Download { response, url: self.server.url.clone() })
    }

    /// Asks for something that takes long and is answered line by line.
    pub(crate) async fn post_for_lines(&self, path: &str, body: &Value) -> Result<Lines, ClientError> {
        let response = self.accepted(self.request(Method::POST, path).json(body)).await?;
        let bytes = Download { response, url: self.server.url.clone() };
        Ok(Lines { bytes, waiting: Vec::new() })
    }

    /// Sends bytes of any length.
    pub(crate) async fn upload(
        &self,
        path: &str,
        query: &[(&str, String)],
        body: reqwest::Body,
    ) -> Result<Value, ClientError> {
        self.answer(self.request(Method::PUT, path).query(query).body(body)).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.answer(self.request(Method::POST, path).timeout(REQUEST_LIMIT).json(body)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Result<Value, ClientError> {
        self.answer(self.request(Method::DELETE, path).timeout(REQUEST_LIMIT)).await
    }

    /// Every item of a list, page by page, at most `max`.
    pub(crate) async fn list(&self, path: &str, max: Option<usize>) -> Result<Vec<Value>, ClientError> {
        let mut items = Vec::new();
        let mut page: Option<String> = None;
        for _ in 0..PAGES_MAX {
            let mut request = self.request(Method::GET, path).timeout(REQUEST_LIMIT);
            request = request.query(&[("limit", PAGE_SIZE)]);
            if let Some(page) = &page {
                request = request.query(&[("page", page)]);
            }
            let mut answer = self.answer(request).await?;
            let Some(Value::Array(data)) = answer.get_mut("data").map(Value::take) else {
                return Err(self.foreign("a list without `data`"));
            };
            items.extend(data);
            page = answer["next_page"].as_str().map(String::from);
            if page.is_none() || max.is_some_and(|max| items.len() >= max) {
                items.truncate(max.unwrap_or(usize::MAX));
                return Ok(items);
            }
        }
        Err(self.foreign("a list that does not end"))
    }

    /// Sends events to a session.
    pub(crate) async fn send(&self, session: &str, events: Value) -> Result<Value, ClientError> {
        self.post(&format!("{}/events", id_path("sessions", session)?), &json!({ "events": events })).await
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.server.url));
        request.header("x-api-key", &self.server.token).header("anthropic-version", "2023-06-01")
    }

    async fn answer(&self, request: reqwest::RequestBuilder) -> Result<Value, ClientError> {
        let response = self.accepted(request).await?;
        response.json().await.map_err(|error| {
            if error.is_decode() { self.foreign(&error.to_string()) } else { self.unreachable(error) }
        })
    }

    /// The response, when its status says that all is well.
    async fn accepted(&self, request: reqwest::RequestBuilder) -> Result<Response, ClientError> {
        let response = request.send().await.map_err(|error| self.unreachable(error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let text = response.text().await.map_err(|error| self.unreachable(error))?;
        let body: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
        let message = match body.pointer("/error/message").and_then(Value::as_str) {
            Some(message) => message.to_owned(),
            None => format!("the server answered {status}"),
        };
        let request_id = body["request_id"].as_str().map(String::from);
        Err(ClientError::Refused { status, message, request_id })
    }

    fn unreachable(&self, source: reqwest::Error) -> ClientError {
        ClientError::Unreachable { url: self.server.url.clone(), source: source.without_url() }
    }

    fn foreign(&self, what: &str) -> ClientError {
        ClientError::Foreign { url: self.server.url.clone(), what: what.to_owned() }
    }
}

/// Bytes on their way from the server.
#[derive(Debug)]
pub(crate) struct Download {
    response: Response,
    url: String,
}

impl Download {
    /// The next of them; none at the end. What breaks off is an error, never an end.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        let piece = self.response.chunk().await;
        piece.map_err(|source| ClientError::Unreachable {
            url: self.url.clone(),
            source: source.without_url(),
        })
    }
}

/// Bytes of one line at most.
const LINE_BYTES_MAX: usize = 1024 * 1024;

/// Lines of JSON on their way from the server.
#[derive(Debug)]
pub(crate) struct Lines {
    bytes: Download,
    waiting: Vec<u8>,
}

impl Lines {
    /// The next of them; none at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<Value>, ClientError> {
        loop {
            if let Some(end) = self.waiting.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.waiting.drain(..=end).collect();
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|error| self.foreign(&error.to_string()));
            }
            match self.bytes.next().await? {
                Some(piece) => self.waiting.extend_from_slice(&piece),
                None => return Ok(None),
            }
            if self.waiting.len() > LINE_BYTES_MAX {
                return Err(self.foreign("a line that does not end"));
            }
        }
    }

    fn foreign(&self, what: &str) -> ClientError {
        ClientError::Foreign { url: self.bytes.url.clone(), what: what.to_owned() }
    }
}

/// `/v1/<noun>/<id>`, if the text can be an id at all: a `/` in it would name another route.
pub(crate) fn id_path(noun: &str, id: &str) -> Result<String, ClientError> {
    if id.is_empty() || !id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
        return Err(ClientError::NotAnId(id.chars().take(80).collect()));
    }
    Ok(format!("/v1/{noun}/{id}"))
}

/// The event that a person's message becomes.
pub(crate) fn user_message(text: &str) -> Value {
    json!({ "type": "user.message", "content": [{ "type": "text", "text": text }] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_cannot_lead_to_another_route() {
        assert_eq!(id_path("agents", "agent_0f").unwrap(), "/v1/agents/agent_0f");
        for bad in ["", "a/b", "../x", "a?b", "a b", "ä"] {
            assert!(matches!(id_path("agents", bad), Err(ClientError::NotAnId(_))), "{bad}");
        }
    }

    #[test]
    fn every_status_asks_for_one_reaction() {
        let fault = |status: u16| {
            let status = StatusCode::from_u16(status).unwrap();
            ClientError::Refused { status, message: String::new(), request_id: None }.fault()
        };
        let table =
            [400, 401, 403, 404, 409, 413, 429, 500, 503, 507, 529].map(|status| (status, fault(status)));
        assert_eq!(
            table,
            [
                (400, Fault::Invalid),
                (401, Fault::Denied),
                (403, Fault::Denied),
                (404, Fault::NotFound),
                (409, Fault::Conflict),
                (413, Fault::TooLarge),
                (429, Fault::Retry),
                (500, Fault::Bug),
                (503, Fault::Retry),
                (507, Fault::Full),
                (529, Fault::Retry),
            ]
        );
    }
}
