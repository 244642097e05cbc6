//! The public API over real HTTP: who may ask, what is refused and how, lists, events and their streams. The loop
//! does not run here; the test appends in its place.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::time::Duration;

use covey_harness::record::{Body, StopReason};
use covey_server::db::Db;
use covey_server::http::{Api, serve};
use covey_server::model::sse::{SseEvent, SseParser};
use covey_types::{OrgId, SessionId};
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A stream that should deliver does so within this time on the slowest machine; else the test fails, not hangs.
const PATIENCE: Duration = Duration::from_secs(30);

struct Server {
    _dir: tempfile::TempDir,
    db: Db,
    url: String,
    http: reqwest::Client,
    org: OrgId,
    token: String,
    strangers_token: String,
    stop: CancellationToken,
    served: JoinHandle<std::io::Result<()>>,
}

struct Answer {
    status: StatusCode,
    body: Value,
}

impl Answer {
    fn message(&self) -> &str {
        self.body["error"]["message"].as_str().unwrap_or_default()
    }
}

impl Server {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("covey.db")).unwrap();
        let org = db.ensure_default_org().await.unwrap();
        let other = db.create_org("other").await.unwrap();
        let (_, token) = db.create_token(org, "test").await.unwrap();
        let (_, strangers_token) = db.create_token(other, "test").await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        let api = Api::new(db.clone(), None, None, stop.clone());
        let served = tokio::spawn(async move { serve(listener, api.router(), &api).await });
        // The TLS provider is installed by whoever makes the first client of the process.
        rustls::crypto::ring::default_provider().install_default().unwrap_or_default();
        let config = rustls::ClientConfig::builder()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let http = reqwest::Client::builder().tls_backend_preconfigured(config).build().unwrap();
        Self { _dir: dir, db, url, http, org, token, strangers_token, stop, served }
    }

    fn request(&self, method: Method, path: &str, token: Option<&str>) -> reqwest::RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.url));
        match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    async fn ask(&self, method: Method, path: &str, token: Option<&str>, body: Option<&Value>) -> Answer {
        let mut request = self.request(method, path, token);
        if let Some(body) = body {
            request = request.json(body);
        }
        answer(request.send().await.unwrap()).await
    }

    async fn get(&self, path: &str) -> Value {
        let got = self.ask(Method::GET, path, Some(&self.token), None).await;
        assert_eq!(got.status, StatusCode::OK, "{path}: {}", got.body);
        got.body
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let got = self.ask(Method::POST, path, Some(&self.token), Some(&body)).await;
        assert_eq!(got.status, StatusCode::OK, "{path}: {}", got.body);
        got.body
    }

    async fn refused(&self, path: &str, body: Value) -> Answer {
        let got = self.ask(Method::POST, path, Some(&self.token), Some(&body)).await;
        assert_eq!(got.status, StatusCode::BAD_REQUEST, "{path} {body}: {}", got.body);
        assert_eq!(got.body["error"]["type"], "invalid_request_error");
        got
    }

    async fn session(&self) -> SessionId {
        let agent = self.post("/v1/agents", json!({"name": "a", "model": "m"})).await;
        let environment = self.post("/v1/environments", json!({"name": "e"})).await;
        let body = json!({"agent": agent["id"], "environment_id": environment["id"]});
        self.post("/v1/sessions", body).await["id"].as_str().unwrap().parse().unwrap()
    }

    /// What the loop would append.
    async fn append(&self, session: SessionId, bodies: Vec<Body>) {
        let org = self.org;
        let epoch = self.db.claim_session(org, session).await.unwrap().epoch;
        self.db.append(org, session, epoch, bodies).await.unwrap();
    }

    async fn stream(&self, session: SessionId, last_event_id: Option<&str>) -> Stream {
        let mut request =
            self.request(Method::GET, &format!("/v1/sessions/{session}/events/stream"), Some(&self.token));
        if let Some(id) = last_event_id {
            request = request.header("last-event-id", id);
        }
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        let mut stream = Stream { response, parser: SseParser::default(), events: Vec::new().into_iter() };
        // The opening comment says that the server has subscribed.
        let opening = stream.response.chunk().await.unwrap().unwrap();
        assert!(opening.starts_with(b": open"));
        assert_eq!(stream.parser.push(&opening).unwrap(), []);
        stream
    }
}

struct Stream {
    response: Response,
    parser: SseParser,
    events: std::vec::IntoIter<SseEvent>,
}

impl Stream {
    /// The next event; none at the stream's end.
    async fn next(&mut self) -> Option<SseEvent> {
        loop {
            if let Some(event) = self.events.next() {
                return Some(event);
            }
            let piece = tokio::time::timeout(PATIENCE, self.response.chunk()).await.unwrap().unwrap()?;
            self.events = self.parser.push(&piece).unwrap().into_iter();
        }
    }
}

async fn answer(response: Response) -> Answer {
    let status = response.status();
    let request_id = response.headers().get("request-id").map(|id| id.to_str().unwrap().to_owned());
    let body: Value = response.json().await.unwrap();
    assert!(request_id.is_some());
    if !status.is_success() {
        assert_eq!(body["type"], "error");
        assert_eq!(body["request_id"], json!(request_id));
        assert!(!body["error"]["message"].as_str().unwrap().is_empty());
    }
    Answer { status, body }
}

fn message(text: &str) -> Value {
    json!({"type": "user.message", "content": [{"type": "text", "text": text}]})
}

fn kinds(page: &Value) -> Vec<&str> {
    page["data"].as_array().unwrap().iter().map(|event| event["type"].as_str().unwrap()).collect()
}

/// Every route, with ids of things that exist in the first org.
async fn routes(server: &Server) -> Vec<(Method, String, Option<Value>)> {
    let session = server.get(&format!("/v1/sessions/{}", server.session().await)).await;
    let id = |value: &Value| value.as_str().unwrap().to_owned();
    let (s, e) = (id(&session["id"]), id(&session["environment_id"]));
    let (a, h) = (id(&session["agent"]["id"]), id(&session["covey_home_id"]));
    let (get, post, delete) = (Method::GET, Method::POST, Method::DELETE);
    let root = json!({"root": "0".repeat(64)});
    vec![
        (get.clone(), format!("/v1/agents/{a}"), None),
        (get.clone(), format!("/v1/agents/{a}?version=1"), None),
        (post.clone(), format!("/v1/agents/{a}"), Some(json!({"name": "b"}))),
        (get.clone(), format!("/v1/agents/{a}/versions"), None),
        (post.clone(), format!("/v1/agents/{a}/archive"), None),
        (get.clone(), format!("/v1/environments/{e}"), None),
        (post.clone(), format!("/v1/environments/{e}"), Some(json!({"name": "b"}))),
        (post.clone(), format!("/v1/environments/{e}/archive"), None),
        (delete.clone(), format!("/v1/environments/{e}"), None),
        (post.clone(), "/v1/sessions".into(), Some(json!({"agent": a, "environment_id": e}))),
        (get.clone(), format!("/v1/sessions/{s}"), None),
        (post.clone(), format!("/v1/sessions/{s}"), Some(json!({"title": "t"}))),
        (post.clone(), format!("/v1/sessions/{s}/archive"), None),
        (delete, format!("/v1/sessions/{s}"), None),
        (get.clone(), format!("/v1/sessions/{s}/events"), None),
        (post.clone(), format!("/v1/sessions/{s}/events"), Some(json!({"events": [message("x")]}))),
        (get.clone(), format!("/v1/sessions/{s}/events/stream"), None),
        (get.clone(), format!("/v1/covey/homes/{h}"), None),
        (get.clone(), format!("/v1/covey/homes/{h}/snapshots"), None),
        (post, format!("/v1/covey/homes/{h}/import"), Some(root)),
        (get, format!("/v1/covey/sessions/{s}/records"), None),
    ]
}

const LISTS: [&str; 5] =
    ["/v1/agents", "/v1/environments", "/v1/sessions", "/v1/covey/homes", "/v1/covey/runners"];

#[tokio::test]
async fn another_orgs_things_do_not_exist_and_without_a_token_nothing_does() {
    let server = Server::start().await;
    let routes = routes(&server).await;
    for (method, path, body) in &routes {
        let foreign = server.ask(method.clone(), path, Some(&server.strangers_token), body.as_ref()).await;
        assert_eq!(foreign.status, StatusCode::NOT_FOUND, "{method} {path}: {}", foreign.body);
        assert_eq!(foreign.body["error"]["type"], "not_found_error");
        for token in [None, Some("covey_wrong"), Some("")] {
            let unknown = server.ask(method.clone(), path, token, body.as_ref()).await;
            assert_eq!(unknown.status, StatusCode::UNAUTHORIZED, "{method} {path}: {}", unknown.body);
            assert_eq!(unknown.body["error"]["type"], "authentication_error");
        }
        // A thing that nobody has: the same answer but for the id.
        if let Some(at) = path.find('_') {
            let mut nobodys = path.clone();
            nobodys.replace_range(at + 1..at + 5, "ffff");
            let body = body.clone().map(|body| match body.get("agent") {
                Some(_) => json!({"agent": format!("agent_{}", "f".repeat(32)), "environment_id": body["environment_id"]}),
                None => body,
            });
            let absent = server.ask(method.clone(), &nobodys, Some(&server.token), body.as_ref()).await;
            let shape = |text: &str| text.split(' ').filter(|word| !word.contains('_')).collect::<String>();
            assert_eq!(absent.status, StatusCode::NOT_FOUND, "{method} {nobodys}: {}", absent.body);
            assert_eq!(shape(absent.message()), shape(foreign.message()));
        }
    }
    for path in LISTS {
        let foreign = server.ask(Method::GET, path, Some(&server.strangers_token), None).await;
        assert_eq!((foreign.status, &foreign.body["data"]), (StatusCode::OK, &json!([])), "{path}");
        assert_eq!(server.ask(Method::GET, path, None, None).await.status, StatusCode::UNAUTHORIZED);
    }
    // With the right token every one of them works, so the refusals above were about the token.
    for (method, path, body) in &routes {
        if path.ends_with("/stream") || *method == Method::DELETE || path.ends_with("/archive") {
            continue;
        }
        let own = server.ask(method.clone(), path, Some(&server.token), body.as_ref()).await;
        assert_eq!(own.status, StatusCode::OK, "{method} {path}: {}", own.body);
    }
}

#[tokio::test]
async fn both_ways_to_send_the_token_are_accepted_and_health_needs_none() {
    let server = Server::start().await;
    let url = format!("{}/v1/agents", server.url);
    let by_key = server.http.get(&url).header("x-api-key", &server.token).send().await.unwrap();
    assert_eq!(by_key.status(), StatusCode::OK);
    let by_bearer = server
        .http
        .get(&url)
        .header("authorization", format!("bearer  {}", server.token))
        .send()
        .await
        .unwrap();
    assert_eq!(by_bearer.status(), StatusCode::OK);
    let health = server.ask(Method::GET, "/healthz", None, None).await;
    assert_eq!(health.body["status"], "ok");
    let nowhere = server.ask(Method::GET, "/v1/nothing", None, None).await;
    assert_eq!(
        (nowhere.status, &nowhere.body["error"]["type"]),
        (StatusCode::NOT_FOUND, &json!("not_found_error"))
    );
    let wrong_method = server.ask(Method::PUT, "/v1/agents", Some(&server.token), None).await;
    assert_eq!(wrong_method.status, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn a_wrong_field_is_refused_by_name_and_an_unknown_one_is_not() {
    let server = Server::start().await;
    let session = server.session().await;
    let events = format!("/v1/sessions/{session}/events");
    let custom = |name: &str| {
        let schema = json!({"type": "object"});
        let tool = json!({"type": "custom", "name": name, "description": "d", "input_schema": schema});
        json!({"name": "a", "model": "m", "tools": [tool]})
    };
    let toolset = |extra: Value| {
        let mut toolset = json!({"type": "agent_toolset_20260401"});
        toolset.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!({"name": "a", "model": "m", "tools": [toolset]})
    };
    let session_with = |extra: Value| {
        let mut body = json!({"agent": "agent_00000000000000000000000000000001",
            "environment_id": "env_00000000000000000000000000000001"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let ask = json!({"permission_policy": {"type": "auto"}});
    let cases = [
        ("/v1/agents", json!({"model": "m"}), "`name` is missing"),
        ("/v1/agents", json!({"name": "a"}), "`model` is missing"),
        ("/v1/agents", json!({"name": 5, "model": "m"}), "`name`: expected a string"),
        ("/v1/agents", json!({"name": " ", "model": "m"}), "`name`: expected 1 to"),
        ("/v1/agents", json!({"name": "a", "model": 5}), "`model`: expected a model's name"),
        ("/v1/agents", json!({"name": "a", "model": {}}), "`model.id` is missing"),
        ("/v1/agents", json!({"name": "a", "model": "m", "system": []}), "`system`: expected a string"),
        ("/v1/agents", json!({"name": "a", "model": "m", "metadata": {"k": 1}}), "`metadata.k`"),
        (
            "/v1/agents",
            json!({"name": "a", "model": "m", "mcp_servers": [{}]}),
            "`mcp_servers` is not supported",
        ),
        (
            "/v1/agents",
            json!({"name": "a", "model": "m", "tools": [{"type": "mcp_toolset"}]}),
            "`tools[0].type`",
        ),
        ("/v1/agents", json!({"name": "a", "model": "m", "tools": [{"type": "custom"}]}), "`tools[0].name`"),
        ("/v1/agents", custom("bash"), "`tools[0].name`"),
        ("/v1/agents", custom("a b"), "`tools[0].name`"),
        (
            "/v1/agents",
            toolset(json!({"default_config": ask})),
            "`tools[0].default_config.permission_policy.type`",
        ),
        ("/v1/agents", toolset(json!({"configs": [{"name": "sudo"}]})), "`tools[0].configs[0].name`"),
        (
            "/v1/agents",
            toolset(json!({"configs": [{"name": "web_search"}]})),
            "`tools[0].configs[0].enabled`",
        ),
        ("/v1/environments", json!({"name": "e", "config": {"type": "moon"}}), "`config.type`"),
        (
            "/v1/environments",
            json!({"name": "e", "config": {"type": "cloud", "networking": {"type": "unrestricted"}}}),
            "`config.networking.type`",
        ),
        (
            "/v1/environments",
            json!({"name": "e", "config": {"type": "cloud", "packages": {"pip": ["x"]}}}),
            "`config.packages.pip` is not supported",
        ),
        ("/v1/sessions", json!({"environment_id": "env_1"}), "`agent` is missing"),
        (
            "/v1/sessions",
            json!({"agent": "sesn_1", "environment_id": "env_1"}),
            "`agent`: `sesn_1` is not an agent id",
        ),
        ("/v1/sessions", session_with(json!({"resources": [{}]})), "`resources` is not supported"),
        ("/v1/sessions", session_with(json!({"vault_ids": ["v"]})), "`vault_ids` is not supported"),
        ("/v1/sessions", session_with(json!({"budget": {}})), "`budget` is not supported"),
        (
            "/v1/sessions",
            session_with(json!({"initial_events": [{"type": "user.interrupt"}]})),
            "`initial_events`",
        ),
        (&events, json!({}), "`events` is missing"),
        (&events, json!({"events": {}}), "`events`: expected a list"),
        (&events, json!({"events": [7]}), "`events[0]`: expected an object"),
        (
            &events,
            json!({"events": [message("x"), {"type": "user.message"}]}),
            "`events[1].content` is missing",
        ),
        (&events, json!({"events": [message(" \n")]}), "`events[0].content[0].text`"),
        (&events, json!({"events": [{"type": "agent.message"}]}), "`events[0].type`"),
        (&events, json!({"events": [{"type": "user.define_outcome"}]}), "is not supported"),
        (&events, json!({"events": [{"type": "user.tool_confirmation"}]}), "`events[0].result`"),
        (&events, json!({"events": [{"type": "user.tool_confirmation", "result": "allow"}]}), "tool_use_id"),
        (
            &events,
            json!({"events": [{"type": "user.tool_confirmation", "result": "deny", "tool_use_id": "x"}]}),
            "the id of an event",
        ),
        (
            &events,
            json!({"events": [{"type": "user.custom_tool_result", "custom_tool_use_id": "sevt_00000000000000000000000000000007"}]}),
            "has no call",
        ),
        (&events, json!({"events": vec![message("x"); 51]}), "at most 50 events"),
    ];
    for (path, body, expected) in cases {
        let got = server.refused(path, body.clone()).await;
        assert!(got.message().contains(expected), "{path} {body}: {}", got.message());
    }
    for (body, expected) in
        [("[1]", "expected a JSON object"), ("{", "is no JSON"), ("{\"name\":\"\\ud800\"}", "is no JSON")]
    {
        let request = server.request(Method::POST, "/v1/agents", Some(&server.token)).body(body);
        let got = answer(request.send().await.unwrap()).await;
        assert_eq!(got.status, StatusCode::BAD_REQUEST);
        assert!(got.message().contains(expected), "{}", got.message());
    }
    for query in [
        "limit=0",
        "limit=x",
        "page=?",
        "order=up",
        "statuses[]=asleep",
        "created_at[gte]=2026",
        "agent_id=x",
    ] {
        let got = server.ask(Method::GET, &format!("/v1/sessions?{query}"), Some(&server.token), None).await;
        assert_eq!(got.status, StatusCode::BAD_REQUEST, "{query}");
        let name = query.split(['=', '[']).next().unwrap();
        assert!(got.message().contains(name), "{query}: {}", got.message());
    }
    assert_eq!(kinds(&server.get(&events).await), Vec::<&str>::new(), "a refused request appends nothing");
    server
        .post(
            "/v1/agents?beta=true",
            json!({"name": "a", "model": {"id": "m", "speed": "standard", "new": 1},
        "tomorrow": {"x": 1}, "multiagent": null, "skills": [], "description": ""}),
        )
        .await;
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_with_413() {
    let server = Server::start().await;
    let body = vec![b' '; covey_wire::api::REQUEST_BYTES_MAX + 1];
    let request = server.request(Method::POST, "/v1/agents", Some(&server.token)).body(body);
    // The server may answer and close while the client still sends; then there is no answer to read.
    if let Ok(response) = request.send().await {
        let got = answer(response).await;
        assert_eq!(
            (got.status, &got.body["error"]["type"]),
            (StatusCode::PAYLOAD_TOO_LARGE, &json!("request_too_large"))
        );
    }
}

#[tokio::test]
async fn agents_have_versions_and_a_stale_update_is_a_conflict() {
    let server = Server::start().await;
    let tools = json!([{"type": "agent_toolset_20260401", "configs": [{"name": "bash", "enabled": false}]}]);
    let made = server
        .post(
            "/v1/agents",
            json!({"name": "a", "model": "m", "system": "s", "tools": tools, "metadata": {"k": "v"}}),
        )
        .await;
    let path = format!("/v1/agents/{}", made["id"].as_str().unwrap());
    assert_eq!(
        (&made["version"], &made["model"], &made["type"]),
        (&json!(1), &json!({"id": "m"}), &json!("agent"))
    );
    let allow = json!({"type": "always_allow"});
    assert_eq!(
        made["tools"],
        json!([{"type": "agent_toolset_20260401",
        "default_config": {"enabled": true, "permission_policy": allow},
        "configs": [{"type": "bash", "name": "bash", "enabled": false, "permission_policy": allow}]}])
    );
    assert_eq!(server.get(&path).await, made);

    let changed =
        server.post(&path, json!({"version": 1, "system": null, "metadata": {"k": null, "l": "w"}})).await;
    assert_eq!(
        (&changed["version"], &changed["system"], &changed["name"]),
        (&json!(2), &json!(null), &json!("a"))
    );
    assert_eq!((&changed["metadata"], &changed["tools"]), (&json!({"l": "w"}), &made["tools"]));
    let response =
        server.request(Method::POST, &path, Some(&server.token)).json(&json!({"version": 1, "name": "b"}));
    let response = response.send().await.unwrap();
    // The SDKs would repeat a 409 three times for nothing.
    assert_eq!(response.headers()["x-should-retry"], "false");
    let stale = answer(response).await;
    assert_eq!(
        (stale.status, &stale.body["error"]["type"]),
        (StatusCode::CONFLICT, &json!("conflict_error"))
    );

    let versions = server.get(&format!("{path}/versions?limit=1")).await;
    assert_eq!((&versions["data"][0]["version"], &versions["next_page"]), (&json!(2), &json!("2")));
    let older = server.get(&format!("{path}/versions?limit=1&page=2")).await;
    assert_eq!((&older["data"][0]["system"], &older["next_page"]), (&json!("s"), &json!(null)));
    assert_eq!(server.get(&format!("{path}?version=1")).await["system"], "s");
    assert!(server.post(&format!("{path}/archive"), json!({})).await["archived_at"].is_string());
    assert_eq!(server.get("/v1/agents").await["data"], json!([]));
    assert_eq!(server.get("/v1/agents?include_archived=true").await["data"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn pages_neither_skip_nor_repeat() {
    let server = Server::start().await;
    let mut made = Vec::new();
    for n in 0..5 {
        made.push(server.post("/v1/environments", json!({"name": format!("e{n}")})).await["id"].clone());
    }
    made.reverse();
    let (mut seen, mut query) = (Vec::new(), String::new());
    loop {
        let page = server.get(&format!("/v1/environments?limit=2{query}")).await;
        seen.extend(page["data"].as_array().unwrap().iter().map(|environment| environment["id"].clone()));
        let Some(next) = page["next_page"].as_str() else { break };
        query = format!("&page={next}");
    }
    assert_eq!(seen, made);
    let path = format!("/v1/environments/{}", made[0].as_str().unwrap());
    let deleted = server.ask(Method::DELETE, &path, Some(&server.token), None).await;
    assert_eq!(deleted.body, json!({"id": made[0], "type": "environment_deleted"}));
    assert_eq!(server.ask(Method::GET, &path, Some(&server.token), None).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_session_keeps_its_agent_and_starts_with_its_initial_events() {
    let server = Server::start().await;
    let agent = server.post("/v1/agents", json!({"name": "a", "model": "m", "system": "s"})).await;
    let environment =
        server.post("/v1/environments", json!({"name": "e", "config": {"type": "self_hosted"}})).await;
    let plain = server
        .post(
            "/v1/sessions",
            json!({"agent": {"type": "agent", "id": agent["id"], "version": 1},
            "environment_id": environment["id"], "title": "t", "metadata": {"k": "v"}, "resources": [],
            "initial_events": [message("one"), message("two")]}),
        )
        .await;
    assert_eq!((&plain["status"], &plain["title"]), (&json!("idle"), &json!("t")));
    assert_eq!((&plain["agent"]["system"], &plain["agent"]["version"]), (&json!("s"), &json!(1)));
    let path = format!("/v1/sessions/{}", plain["id"].as_str().unwrap());
    assert_eq!(kinds(&server.get(&format!("{path}/events")).await), ["user.message", "user.message"]);

    let overridden = server
        .post(
            "/v1/sessions",
            json!({"agent": {"type": "agent_with_overrides", "id": agent["id"], "model": "n"},
            "environment_id": environment["id"]}),
        )
        .await;
    assert_eq!(
        (&overridden["agent"]["model"]["id"], &overridden["agent"]["system"]),
        (&json!("n"), &json!("s"))
    );
    assert_eq!(server.get(&format!("/v1/agents/{}", agent["id"].as_str().unwrap())).await["version"], 1);

    let changed = server.post(&path, json!({"metadata": {"k": null}})).await;
    assert_eq!((&changed["title"], &changed["metadata"]), (&json!("t"), &json!({})));
    assert_eq!(server.get("/v1/sessions?statuses[]=running").await["data"], json!([]));
    let agents = format!("/v1/sessions?agent_id={}&order=asc&limit=1", agent["id"].as_str().unwrap());
    assert_eq!(server.get(&agents).await["data"][0]["id"], plain["id"]);
    let archived = server.post(&format!("{path}/archive"), json!({})).await;
    assert!(archived["archived_at"].is_string());
    let late = json!({"events": [message("late")]});
    let late = server.ask(Method::POST, &format!("{path}/events"), Some(&server.token), Some(&late)).await;
    assert_eq!(late.status, StatusCode::CONFLICT);
    let deleted = server.ask(Method::DELETE, &path, Some(&server.token), None).await;
    assert_eq!(deleted.body["type"], "session_deleted");
}

#[tokio::test]
async fn events_are_listed_in_both_orders_filtered_paged_and_sent_once_per_key() {
    let server = Server::start().await;
    let session = server.session().await;
    let path = format!("/v1/sessions/{session}/events");
    let body = json!({"events": [message("a"), {"type": "user.interrupt"}]});
    let mut ids = Vec::new();
    for _ in 0..2 {
        let request =
            server.request(Method::POST, &path, Some(&server.token)).header("idempotency-key", "k1");
        let got = answer(request.json(&body).send().await.unwrap()).await;
        assert_eq!(kinds(&got.body), ["user.message", "user.interrupt"]);
        assert_eq!(got.body["data"][0]["processed_at"], json!(null));
        ids.push(got.body["data"].clone());
    }
    assert_eq!(ids[0], ids[1], "the second one is the first one");
    server
        .append(session, vec![Body::StatusRunning {}, Body::StatusIdle { stop_reason: StopReason::EndTurn }])
        .await;
    let all = ["user.message", "user.interrupt", "session.status_running", "session.status_idle"];
    assert_eq!(kinds(&server.get(&path).await), all);
    let descending = server.get(&format!("{path}?order=desc&limit=3")).await;
    assert_eq!(kinds(&descending), ["session.status_idle", "session.status_running", "user.interrupt"]);
    let next = descending["next_page"].as_str().unwrap();
    assert_eq!(kinds(&server.get(&format!("{path}?order=desc&limit=3&page={next}")).await), ["user.message"]);
    let filter = "types[]=user.interrupt&types[]=session.status_idle&limit=1";
    let filtered = server.get(&format!("{path}?{filter}")).await;
    assert_eq!(kinds(&filtered), ["user.interrupt"]);
    let next = filtered["next_page"].as_str().unwrap();
    assert_eq!(kinds(&server.get(&format!("{path}?{filter}&page={next}")).await), ["session.status_idle"]);
    let records = server.get(&format!("/v1/covey/sessions/{session}/records?limit=1")).await;
    assert_eq!((records["data"][0]["seq"].as_u64(), records["next_page"].as_str()), (Some(1), Some("1")));
}

#[tokio::test]
async fn a_stream_begins_at_the_present_resumes_by_id_and_ends_with_the_session() {
    let server = Server::start().await;
    let session = server.session().await;
    let path = format!("/v1/sessions/{session}/events");
    server.post(&path, json!({"events": [message("before")]})).await;
    let mut stream = server.stream(session, None).await;
    let sent = server.post(&path, json!({"events": [message("ä\n🦊")]})).await;
    let got = stream.next().await.unwrap();
    assert_eq!(
        (got.event.as_deref(), got.id.as_deref()),
        (Some("user.message"), sent["data"][0]["id"].as_str())
    );
    assert_eq!(serde_json::from_str::<Value>(&got.data).unwrap(), sent["data"][0]);
    drop(stream);

    // While nobody listens, three more; the reconnected client gets exactly those.
    server.post(&path, json!({"events": [message("1"), message("2")]})).await;
    server.append(session, vec![Body::StatusRunning {}]).await;
    let mut resumed = server.stream(session, got.id.as_deref()).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.push(resumed.next().await.unwrap().event.unwrap());
    }
    assert_eq!(seen, ["user.message", "user.message", "session.status_running"]);
    server.append(session, vec![Body::StatusTerminated {}]).await;
    assert_eq!(resumed.next().await.unwrap().event.as_deref(), Some("session.status_terminated"));
    assert_eq!(resumed.next().await, None);

    let request = server.request(Method::GET, &format!("{path}/stream"), Some(&server.token));
    let unknown = request.header("last-event-id", format!("sevt_{}", "0".repeat(32))).send().await.unwrap();
    let unknown = answer(unknown).await;
    assert_eq!(unknown.status, StatusCode::BAD_REQUEST);
    assert!(unknown.message().contains("Last-Event-ID"), "{}", unknown.message());
}

#[tokio::test]
async fn shutdown_and_deletion_end_streams_cleanly() {
    let server = Server::start().await;
    let (first, second) = (server.session().await, server.session().await);
    let mut deleted = server.stream(first, None).await;
    let mut open = server.stream(second, None).await;
    let gone = server.ask(Method::DELETE, &format!("/v1/sessions/{first}"), Some(&server.token), None).await;
    assert_eq!(gone.status, StatusCode::OK);
    assert_eq!(deleted.next().await, None);
    server.stop.cancel();
    assert_eq!(open.next().await, None, "the body ends, the connection does not break");
    tokio::time::timeout(PATIENCE, server.served).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_up_neither_others_nor_the_shutdown() {
    let server = Server::start().await;
    let session = server.session().await;
    let mut deaf = tokio::net::TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap();
    let request = format!(
        "GET /v1/sessions/{session}/events/stream HTTP/1.1\r\nhost: x\r\nx-api-key: {}\r\n\r\n",
        server.token
    );
    tokio::io::AsyncWriteExt::write_all(&mut deaf, request.as_bytes()).await.unwrap();
    let mut attentive = server.stream(session, None).await;
    // Far more than the sockets' buffers take.
    let text = "x".repeat(1024 * 1024);
    for _ in 0..16 {
        let content = vec![json!({"type": "text", "text": text})];
        server.append(session, vec![Body::AgentMessage { content }]).await;
    }
    for _ in 0..16 {
        assert_eq!(attentive.next().await.unwrap().event.as_deref(), Some("agent.message"));
    }
    server.stop.cancel();
    assert_eq!(attentive.next().await, None);
    tokio::time::timeout(PATIENCE, server.served).await.unwrap().unwrap().unwrap();
    drop(deaf);
}

#[tokio::test]
async fn homes_are_imported_on_their_base_generation_only() {
    let server = Server::start().await;
    server.session().await;
    let home = server.get("/v1/covey/homes").await["data"][0].clone();
    assert_eq!((&home["generation"], &home["root"]), (&json!(0), &json!(null)));
    let path = format!("/v1/covey/homes/{}", home["id"].as_str().unwrap());
    let root = "ab".repeat(32);
    let body = json!({"root": root, "base_generation": 0, "files": 3, "bytes": 40});
    assert_eq!(server.post(&format!("{path}/import"), body).await["generation"], 1);
    assert_eq!(server.get(&path).await["root"], json!(root));
    let snapshots = server.get(&format!("{path}/snapshots")).await;
    assert_eq!(
        (&snapshots["data"][0]["files"], &snapshots["data"][0]["kind"]),
        (&json!(3), &json!("quiesced"))
    );
    let stale = json!({"root": "cd".repeat(32), "base_generation": 0});
    let stale = server.ask(Method::POST, &format!("{path}/import"), Some(&server.token), Some(&stale)).await;
    assert_eq!(stale.status, StatusCode::CONFLICT);
    assert!(
        server.refused(&format!("{path}/import"), json!({"root": "x"})).await.message().contains("`root`")
    );
}

#[tokio::test]
async fn a_message_over_the_limit_is_refused_with_413_and_waiting_would_not_help() {
    let server = Server::start().await;
    let session = server.session().await;
    let text = "x".repeat(9 * 1024 * 1024);
    let events = json!({"events": [{"type": "user.message", "content": [{"type": "text", "text": text}]}]});
    let path = format!("/v1/sessions/{session}/events");
    let refused = server.ask(Method::POST, &path, Some(&server.token), Some(&events)).await;
    assert_eq!(
        (refused.status, &refused.body["error"]["type"]),
        (StatusCode::PAYLOAD_TOO_LARGE, &json!("request_too_large"))
    );
    assert!(refused.message().contains("8388608"), "{}", refused.message());
}

#[tokio::test]
async fn a_stream_of_an_archived_session_ends_also_when_it_is_archived_meanwhile() {
    let server = Server::start().await;
    let session = server.session().await;
    let mut open = server.stream(session, None).await;
    server.post(&format!("/v1/sessions/{session}/archive"), json!({})).await;
    assert_eq!(open.next().await, None);
    assert_eq!(server.stream(session, None).await.next().await, None);
}

#[tokio::test]
async fn a_token_opens_until_it_is_revoked_and_its_secret_is_shown_once() {
    let server = Server::start().await;
    let made = server.post("/v1/covey/tokens", json!({"name": "ci"})).await;
    let secret = made["secret"].as_str().unwrap().to_owned();
    let ask = async |path: &str| server.ask(Method::GET, path, Some(&secret), None).await;
    assert_eq!(ask("/v1/agents").await.status, StatusCode::OK);
    let listed = server.get("/v1/covey/tokens").await;
    assert!(listed["data"].as_array().unwrap().iter().any(|token| token["id"] == made["id"]));
    assert!(!listed.to_string().contains(&secret));
    let path = format!("/v1/covey/tokens/{}/revoke", made["id"].as_str().unwrap());
    let stranger = server.ask(Method::POST, &path, Some(&server.strangers_token), Some(&json!({}))).await;
    assert_eq!(stranger.status, StatusCode::NOT_FOUND);
    assert!(server.post(&path, json!({})).await["revoked_at"].is_string());
    assert_eq!(ask("/v1/agents").await.status, StatusCode::UNAUTHORIZED);
}
