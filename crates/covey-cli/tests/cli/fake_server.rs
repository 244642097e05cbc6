//! A server with the state that the command line needs, in the wire format of the API.
//!
//! It keeps agents, environments, sessions, events and homes in memory and answers like the real one. It runs no
//! agent: a test appends the events that one would cause.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;

use serde_json::{Value, json};

pub(crate) const TOKEN: &str = "covey-test-token";

/// What a client asked for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) body: Value,
}

/// Everything that the server knows.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) agents: Vec<Value>,
    pub(crate) environments: Vec<Value>,
    pub(crate) sessions: Vec<Value>,
    pub(crate) events: Vec<Value>,
    pub(crate) homes: Vec<Value>,
    pub(crate) snapshots: Vec<Value>,
    pub(crate) runners: Vec<Value>,
    pub(crate) tokens: Vec<Value>,
    pub(crate) asked: Vec<Asked>,
    /// Events that follow each `user.message`, in the order of the messages.
    pub(crate) replies: VecDeque<Vec<Value>>,
    /// The root that a home has once its session is archived, as if an agent had worked in it.
    pub(crate) root_after_session: Option<Value>,
    /// Streams end after so many events, as if the server had died.
    pub(crate) events_per_stream: Option<usize>,
    next_event: usize,
}

/// A running server; its thread ends with the test process.
pub(crate) struct FakeServer {
    shared: Arc<(Mutex<State>, Condvar)>,
    pub(crate) url: String,
}

impl FakeServer {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new((Mutex::new(State::default()), Condvar::new()));
        let served = shared.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let served = served.clone();
                // A client that goes away ends its own connection only.
                thread::spawn(move || serve(&stream, &served).ok());
            }
        });
        Self { shared, url }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap()
    }

    /// The bodies of what was asked by `method` at `path`.
    pub(crate) fn asked(&self, method: &str, path: &str) -> Vec<Value> {
        let state = self.state();
        let wanted = state.asked.iter().filter(|asked| asked.method == method && asked.path == path);
        wanted.map(|asked| asked.body.clone()).collect()
    }

    /// Waits until somebody has asked for `path`.
    pub(crate) fn wait_until_asked(&self, path: &str) {
        self.wait_until(|state| state.asked.iter().any(|asked| asked.path == path));
    }

    /// Waits until something is true of the state.
    pub(crate) fn wait_until(&self, is_so: impl Fn(&State) -> bool) {
        let limit = std::time::Duration::from_secs(60);
        let waited = self.shared.1.wait_timeout_while(self.state(), limit, |state| !is_so(state)).unwrap();
        assert!(!waited.1.timed_out(), "it did not come: {:?}", waited.0);
    }

    /// Appends an event to the log of the session and wakes the streams.
    pub(crate) fn append(&self, event: Value) {
        self.state().append(event);
        self.shared.1.notify_all();
    }
}

impl State {
    fn append(&mut self, mut event: Value) -> Value {
        self.next_event += 1;
        event["id"] = json!(format!("sevt_{:032x}", self.next_event));
        self.events.push(event.clone());
        event
    }

    fn answer(&mut self, asked: &Asked) -> (u16, Value) {
        let parts: Vec<&str> = asked.path.trim_start_matches("/v1/").split('/').collect();
        match (asked.method.as_str(), parts.as_slice()) {
            ("GET", ["agents"]) => page(&self.agents),
            ("GET", ["environments"]) => page(&self.environments),
            ("GET", ["sessions"]) => page(&self.sessions),
            ("GET", ["covey", "homes"]) => page(&self.homes),
            ("GET", ["covey", "runners"]) => page(&self.runners),
            ("GET", ["covey", "homes", id, "snapshots"]) if find(&self.homes, id).is_some() => {
                page(&self.snapshots)
            }
            ("GET", ["covey", "homes", id]) => found(find(&self.homes, id)),
            ("GET", ["agents", id]) => found(find(&self.agents, id)),
            ("GET", ["sessions", id]) => found(find(&self.sessions, id)),
            ("GET", ["sessions", id, "events"]) if find(&self.sessions, id).is_some() => page(&self.events),
            ("POST", ["agents"]) => self.create_agent(&asked.body),
            ("POST", ["agents", id]) => self.update_agent(id, &asked.body),
            ("POST", ["agents", id, "archive"]) => archive(&mut self.agents, id),
            ("POST", ["environments"]) => create(&mut self.environments, "env", &asked.body),
            ("POST", ["sessions"]) => self.create_session(&asked.body),
            ("POST", ["sessions", id, "archive"]) => self.archive_session(id),
            ("POST", ["sessions", id, "events"]) if find(&self.sessions, id).is_some() => {
                self.send(&asked.body)
            }
            ("GET", ["environments", id]) => found(find(&self.environments, id)),
            ("POST", ["environments", id, "archive"]) => archive(&mut self.environments, id),
            ("DELETE", ["environments", id]) => delete(&mut self.environments, id, "environment_deleted"),
            ("GET", ["covey", "tokens"]) => page(&self.tokens),
            ("POST", ["covey", "tokens"]) => {
                let (status, mut made) = create(&mut self.tokens, "tok", &asked.body);
                made["secret"] = json!("covey_secret");
                (status, made)
            }
            ("POST", ["covey", "tokens", id, "revoke"]) => self.revoke_token(id),
            ("DELETE", ["sessions", id]) => delete(&mut self.sessions, id, "session_deleted"),
            ("POST", ["covey", "homes", id, "import"]) => self.import(id, &asked.body),
            _ => error(404, "not_found_error", "there is nothing here"),
        }
    }

    fn revoke_token(&mut self, id: &str) -> (u16, Value) {
        let Some(token) = self.tokens.iter_mut().find(|token| token["id"] == id) else { return found(None) };
        token["revoked_at"] = json!("2026-01-02T00:00:00.000Z");
        (200, token.clone())
    }

    fn create_agent(&mut self, body: &Value) -> (u16, Value) {
        if !body["name"].is_string() {
            return error(400, "invalid_request_error", "name: missing");
        }
        let home = format!("home_{:032x}", self.homes.len() + 1);
        let mut agent = body.clone();
        agent["version"] = json!(1);
        agent["covey_home_id"] = json!(home);
        agent["model"] = json!({ "id": body["model"] });
        let answer = create(&mut self.agents, "agent", &agent);
        self.homes.push(json!({
            "id": home, "agent_id": answer.1["id"], "generation": 0, "root": null, "session_id": null,
            "created_at": "2026-01-01T00:00:00.000Z",
        }));
        answer
    }

    fn update_agent(&mut self, id: &str, body: &Value) -> (u16, Value) {
        let Some(agent) = self.agents.iter_mut().find(|agent| agent["id"] == id) else { return found(None) };
        if body["version"] != agent["version"] {
            return error(409, "conflict_error", "the agent has another version by now");
        }
        for (name, value) in body.as_object().unwrap() {
            agent[name] = if name == "model" { json!({ "id": value }) } else { value.clone() };
        }
        agent["version"] = json!(agent["version"].as_u64().unwrap() + 1);
        (200, agent.clone())
    }

    fn create_session(&mut self, body: &Value) -> (u16, Value) {
        let Some(agent) = find(&self.agents, body["agent"].as_str().unwrap_or_default()) else {
            return error(404, "not_found_error", "no such agent");
        };
        let mut session = body.clone();
        session["agent"] = agent.clone();
        session["covey_home_id"] = agent["covey_home_id"].clone();
        session["status"] = json!("idle");
        create(&mut self.sessions, "sesn", &session)
    }

    fn archive_session(&mut self, id: &str) -> (u16, Value) {
        if let (Some(root), Some(home)) = (&self.root_after_session, self.homes.first_mut()) {
            home["root"] = root.clone();
        }
        archive(&mut self.sessions, id)
    }

    fn send(&mut self, body: &Value) -> (u16, Value) {
        let sent: Vec<Value> =
            body["events"].as_array().unwrap().iter().map(|e| self.append(e.clone())).collect();
        if sent.iter().any(|event| event["type"] == "user.message") {
            for event in self.replies.pop_front().unwrap_or_default() {
                self.append(event);
            }
        }
        (200, json!({ "data": sent }))
    }

    fn import(&mut self, id: &str, body: &Value) -> (u16, Value) {
        let Some(home) = self.homes.iter_mut().find(|home| home["id"] == id) else { return found(None) };
        home["root"] = body["root"].clone();
        home["generation"] = json!(home["generation"].as_u64().unwrap() + 1);
        (200, json!({ "id": id, "generation": home["generation"], "root": home["root"] }))
    }
}

fn find<'a>(items: &'a [Value], id: &str) -> Option<&'a Value> {
    items.iter().find(|item| item["id"] == id)
}

fn found(item: Option<&Value>) -> (u16, Value) {
    item.map_or_else(|| error(404, "not_found_error", "no such thing"), |item| (200, item.clone()))
}

fn page(items: &[Value]) -> (u16, Value) {
    (200, json!({ "data": items, "next_page": null }))
}

fn create(items: &mut Vec<Value>, prefix: &str, body: &Value) -> (u16, Value) {
    let mut item = body.clone();
    item["id"] = json!(format!("{prefix}_{:032x}", items.len() + 1));
    item["created_at"] = json!("2026-01-01T00:00:00.000Z");
    item["archived_at"] = Value::Null;
    items.push(item.clone());
    (200, item)
}

fn archive(items: &mut [Value], id: &str) -> (u16, Value) {
    let Some(item) = items.iter_mut().find(|item| item["id"] == id) else { return found(None) };
    item["archived_at"] = json!("2026-01-02T00:00:00.000Z");
    (200, item.clone())
}

fn delete(items: &mut Vec<Value>, id: &str, kind: &str) -> (u16, Value) {
    if find(items, id).is_none() {
        return found(None);
    }
    items.retain(|item| item["id"] != id);
    (200, json!({ "id": id, "type": kind }))
}

fn error(status: u16, kind: &str, message: &str) -> (u16, Value) {
    let error = json!({ "type": kind, "message": message });
    (status, json!({ "type": "error", "error": error, "request_id": "req_1" }))
}

fn serve(stream: &TcpStream, shared: &(Mutex<State>, Condvar)) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let Some((asked, token)) = read_request(&mut reader)? else { return Ok(()) };
        let mut state = shared.0.lock().unwrap();
        state.asked.push(asked.clone());
        shared.1.notify_all();
        if token.as_deref() != Some(TOKEN) {
            let (status, body) = error(401, "authentication_error", "the token is not known");
            drop(state);
            write_answer(stream, status, &body)?;
        } else if asked.path.ends_with("/events/stream") {
            drop(state);
            return write_stream(stream, shared);
        } else {
            let (status, body) = state.answer(&asked);
            drop(state);
            shared.1.notify_all();
            write_answer(stream, status, &body)?;
        }
    }
}

fn read_request(reader: &mut impl BufRead) -> std::io::Result<Option<(Asked, Option<String>)>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_ascii_whitespace();
    let method = words.next().unwrap().to_owned();
    let path = words.next().unwrap().split('?').next().unwrap().to_owned();
    let (mut length, mut token) = (0, None);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        let Some((name, value)) = header.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().unwrap(),
            "x-api-key" => token = Some(value.to_owned()),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() };
    Ok(Some((Asked { method, path, body }, token)))
}

fn write_answer(mut stream: &TcpStream, status: u16, body: &Value) -> std::io::Result<()> {
    let body = body.to_string();
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status} Answer\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// Like the real one: only what comes after the stream was opened, and no end.
fn write_stream(mut stream: &TcpStream, shared: &(Mutex<State>, Condvar)) -> std::io::Result<()> {
    let mut state = shared.0.lock().unwrap();
    let mut next = state.events.len();
    let end = state.events_per_stream.map_or(usize::MAX, |count| next + count);
    stream.write_all(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n: open\n\n",
    )?;
    while next < end {
        while next < state.events.len().min(end) {
            let event = state.events[next].clone();
            next += 1;
            write!(stream, "event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap())?;
        }
        if next < end {
            state = shared.1.wait(state).unwrap();
        }
    }
    Ok(())
}
