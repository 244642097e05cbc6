//! The Messages client against the scripted model over real HTTP: every way to cut a stream, every fault, and the
//! key, which must never come back.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::sync::Mutex;
use std::time::Duration;

use covey_models::scripted::{
    Chunking, Fault, FaultPlan, Handle, ScriptFile, ScriptedModel, ServeOptions, serve,
};
use covey_models::{
    CallLimits, Credential, Endpoint, Model, ModelAnswer, ModelDelta, ModelFailure, ModelRequest, Secret,
    Wire,
};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const KEY: &str = "sk-test-0123456789";

fn scripts() -> ScriptFile {
    serde_json::from_value(json!({"scripts": [{"seed": 7, "turns": [
        {"thinking": "Schritt für Schritt 🦊", "text": "Ich schaue nach.",
         "calls": [{"name": "bash", "input": {"command": "echo 'ä' > {{call_id}}"}},
                   {"name": "read", "input": {"file_path": "/home/agent/a"}}]},
        {"text": "Fertig."},
    ]}]}))
    .unwrap()
}

fn request(messages: Value) -> ModelRequest {
    let body = json!({"model": "m", "max_tokens": 100, "system": "s", "messages": messages});
    ModelRequest::new(body.as_object().unwrap().clone())
}

fn start() -> ModelRequest {
    request(json!([{"role": "user", "content": "go"}]))
}

async fn server(options: ServeOptions) -> Handle {
    serve(scripts(), TcpListener::bind("127.0.0.1:0").await.unwrap(), options).unwrap()
}

async fn faulty(fault: Fault) -> Handle {
    let faults = FaultPlan { first: vec![fault], ..FaultPlan::default() };
    server(ServeOptions { faults, chunking: Chunking::Seeded, ..ServeOptions::default() }).await
}

fn client(base_url: &str) -> Endpoint {
    let limits = CallLimits { idle_time_max: Duration::from_millis(200), ..CallLimits::default() };
    Endpoint::new(Wire::Messages, base_url, Some(Credential::ApiKey(Secret::new(KEY))), limits).unwrap()
}

async fn call(model: &dyn Model, request: &ModelRequest) -> Result<ModelAnswer, ModelFailure> {
    model.call(request, &|_| {}).await
}

/// What a server that is not the scripted one answers: `response`, byte for byte, to one connection.
async fn one_answer(response: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.windows(4).any(|w| w == b"\r\n\r\n") {
            assert_ne!(socket.read_buf(&mut head).await.unwrap(), 0);
        }
        socket.write_all(response.as_bytes()).await.unwrap();
        socket.shutdown().await.unwrap();
        // The client closes when it has read everything.
        socket.read_to_end(&mut head).await.unwrap();
    });
    url
}

#[tokio::test]
async fn every_chunking_gives_what_the_scripted_model_says_in_process() {
    let expected = call(&ScriptedModel::new(scripts()), &start()).await.unwrap();
    for (seed, chunking) in
        [(1, Chunking::Whole), (2, Chunking::Bytes), (3, Chunking::Seeded), (4, Chunking::Seeded)]
    {
        let server = server(ServeOptions { chunking, seed, ..ServeOptions::default() }).await;
        let client = client(&server.base_url());
        let shown = Mutex::new((String::new(), String::new()));
        let on_delta = |delta: ModelDelta| {
            let mut shown = shown.lock().unwrap();
            match delta {
                ModelDelta::Text(text) => shown.0.push_str(&text),
                ModelDelta::Thinking(text) => shown.1.push_str(&text),
            }
        };
        let got = client.call(&start(), &on_delta).await.unwrap();
        assert_eq!(
            (&got.content, &got.stop_reason, &got.model),
            (&expected.content, &expected.stop_reason, &"m".to_owned())
        );
        assert_eq!(got.request_id.as_deref(), Some("req_scripted_0"));
        assert!(got.usage["output_tokens"].as_u64().unwrap() > 1, "{}", got.usage);
        let (text, thinking) = shown.into_inner().unwrap();
        assert_eq!((text.as_str(), thinking.as_str()), ("Ich schaue nach.", "Schritt für Schritt 🦊"));

        // What came back is accepted when it is sent back unchanged, and refused when it is not.
        let results: Vec<Value> = got.content[2..]
            .iter()
            .map(|block| json!({"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}))
            .collect();
        let history = |content: &[Value]| {
            request(json!([{"role": "user", "content": "go"}, {"role": "assistant", "content": content},
                {"role": "user", "content": results}]))
        };
        let next = call(&client, &history(&got.content)).await.unwrap();
        assert_eq!(next.content, [json!({"type": "text", "text": "Fertig."})]);
        assert_eq!(next.stop_reason, "end_turn");
        let error = call(&client, &history(&got.content[1..])).await.unwrap_err();
        assert!(matches!(&error, ModelFailure::Rejected { status: 400, .. }), "{error}");
        assert_eq!((server.requests(), server.violations().len()), (3, 1));
        server.shutdown().await.unwrap();
    }
}

#[tokio::test]
async fn faults_become_transient_failures_and_the_same_request_then_succeeds() {
    let cases = [
        (Fault::RateLimited { retry_after_s: 7 }, Some(429), Some(7)),
        (Fault::Overloaded { retry_after_s: 0 }, Some(529), Some(0)),
        (Fault::ServerError, Some(500), None),
        (Fault::MidStreamError, Some(529), None),
        (Fault::Truncated, None, None),
        (Fault::Hangup, None, None),
        (Fault::Garbage, None, None),
        (Fault::SlowDrip { pause_ms: 60_000 }, None, None),
    ];
    for (fault, expected_status, expected_wait) in cases {
        let server = faulty(fault).await;
        let client = client(&server.base_url());
        match call(&client, &start()).await.unwrap_err() {
            ModelFailure::Transient { status, retry_after, request_id, detail } => {
                assert_eq!(status, expected_status, "{fault:?}: {detail}");
                assert_eq!(retry_after, expected_wait.map(Duration::from_secs), "{fault:?}");
                assert_eq!(request_id.as_deref(), Some("req_scripted_0"), "{fault:?}");
            }
            other => panic!("{fault:?}: {other}"),
        }
        assert_eq!(call(&client, &start()).await.unwrap().stop_reason, "tool_use", "{fault:?}");
    }
}

#[tokio::test]
async fn an_unknown_block_survives_the_way_there_and_back() {
    let server = faulty(Fault::UnknownBlock).await;
    let client = client(&server.base_url());
    let got = call(&client, &start()).await.unwrap();
    assert_eq!(got.content[0]["type"], "covey_unknown_block");
    let results: Vec<Value> = got.content[3..]
        .iter()
        .map(|block| json!({"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}))
        .collect();
    let next =
        request(json!([{"role": "user", "content": "go"}, {"role": "assistant", "content": got.content},
        {"role": "user", "content": results}]));
    assert_eq!(call(&client, &next).await.unwrap().stop_reason, "end_turn");
    assert_eq!(server.violations(), []);
}

#[tokio::test]
async fn the_key_is_sent_and_never_comes_back_although_the_server_echoes_it() {
    for credential in [Credential::ApiKey(Secret::new(KEY)), Credential::Bearer(Secret::new(KEY))] {
        let right = server(ServeOptions { key: Some(KEY.to_owned()), ..ServeOptions::default() }).await;
        let wrong = server(ServeOptions { key: Some("other".to_owned()), ..ServeOptions::default() }).await;
        let client = |url: &str| {
            Endpoint::new(Wire::Messages, url, Some(credential.clone()), CallLimits::default()).unwrap()
        };
        assert!(call(&client(&right.base_url()), &start()).await.is_ok());
        let error = call(&client(&wrong.base_url()), &start()).await.unwrap_err();
        let said = format!("{error} {error:?} {:?} {credential:?}", client(&wrong.base_url()));
        assert!(said.contains("invalid key: [redacted]"), "{said}");
        assert!(!said.contains(KEY), "{said}");
        assert!(matches!(error, ModelFailure::Unauthorized { .. }), "{said}");
    }
}

#[tokio::test]
async fn without_a_key_only_a_plain_http_endpoint_is_asked() {
    let server = server(ServeOptions::default()).await;
    let local =
        Endpoint::new(Wire::Messages, &format!("{}/v1/", server.base_url()), None, CallLimits::default())
            .unwrap();
    assert!(call(&local, &start()).await.is_ok());
    match Endpoint::new(
        Wire::Messages,
        "https://model.invalid",
        Some(Credential::ApiKey(Secret::new(" "))),
        CallLimits::default(),
    ) {
        Ok(remote) => {
            let error = call(&remote, &start()).await.unwrap_err();
            assert!(error.to_string().contains("ANTHROPIC_API_KEY"), "{error}");
        }
        // A machine without CA certificates cannot make a client for https at all, and says so.
        Err(error) => assert!(error.to_string().contains("CA certificates"), "{error}"),
    }
    for url in ["", "localhost", "ftp://a", "http://"] {
        assert!(Endpoint::new(Wire::Messages, url, None, CallLimits::default()).is_err(), "{url}");
    }
}

#[tokio::test]
async fn nobody_listening_is_transient_and_names_the_host() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://user:{KEY}@{}", listener.local_addr().unwrap());
    drop(listener);
    let error = call(&client(&url), &start()).await.unwrap_err();
    assert!(matches!(error, ModelFailure::Transient { status: None, .. }));
    let text = error.to_string();
    assert!(text.contains("cannot connect to 127.0.0.1") && !text.contains(KEY), "{text}");
}

#[tokio::test]
async fn a_redirect_is_refused_so_that_the_key_goes_nowhere_else() {
    let head =
        "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n";
    let error = call(&client(&one_answer(head.to_owned()).await), &start()).await.unwrap_err();
    assert!(matches!(error, ModelFailure::Rejected { status: 307, .. }), "{error}");
}

#[tokio::test]
async fn an_endpoint_that_does_not_stream_is_understood() {
    let message = json!({"model": "local", "stop_reason": "end_turn", "usage": {"output_tokens": 2},
        "content": [{"type": "text", "text": "hi"}]})
    .to_string();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
    let got = call(&client(&one_answer(format!("{head}{message}")).await), &start()).await.unwrap();
    assert_eq!((got.model.as_str(), &got.content[0]["text"]), ("local", &json!("hi")));
}

#[tokio::test]
async fn statuses_dates_and_long_texts_are_read_as_documented() {
    let answer = |status: u16, headers: &str, body: &str| {
        format!("HTTP/1.1 {status} X\r\n{headers}connection: close\r\n\r\n{body}")
    };
    let dates = "date: Sun, 29 Nov 2026 23:00:00 GMT\r\nretry-after: Sun, 29 Nov 2026 23:00:20 GMT\r\n";
    let error = call(&client(&one_answer(answer(503, dates, "busy")).await), &start()).await.unwrap_err();
    let ModelFailure::Transient { status, retry_after, .. } = &error else { panic!("{error}") };
    assert_eq!((*status, *retry_after), (Some(503), Some(Duration::from_secs(20))));

    let body = json!({"error": {"type": "invalid_request_error", "message": format!("{}{KEY}", "x".repeat(2020))},
        "request_id": "req_9"});
    let error =
        call(&client(&one_answer(answer(400, "", &body.to_string())).await), &start()).await.unwrap_err();
    let ModelFailure::Rejected { status: 400, detail, request_id } = &error else { panic!("{error}") };
    assert_eq!(request_id.as_deref(), Some("req_9"));
    assert!(
        detail.len() <= 2048 && !detail.contains(&KEY[..4]),
        "the key is redacted before the text is cut"
    );
}

#[tokio::test]
async fn an_answer_over_the_byte_limit_is_dropped() {
    let server = server(ServeOptions::default()).await;
    let limits = CallLimits { answer_bytes_max: 100, ..CallLimits::default() };
    let client = Endpoint::new(Wire::Messages, &server.base_url(), None, limits).unwrap();
    let error = call(&client, &start()).await.unwrap_err();
    assert!(error.to_string().contains("exceeds 100 bytes"), "{error}");
}

#[tokio::test]
async fn the_request_goes_out_as_it_is_plus_stream() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/prefix", listener.local_addr().unwrap());
    let seen = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"\"stream\":true}") {
            assert_ne!(socket.read_buf(&mut bytes).await.unwrap(), 0);
        }
        String::from_utf8(bytes).unwrap()
    });
    let mut body = Map::new();
    body.insert("zeta".into(), json!([1, {"b": 1, "a": 2}]));
    body.insert("alpha".into(), json!(null));
    let error = call(&client(&url), &ModelRequest::new(body)).await.unwrap_err();
    assert!(matches!(error, ModelFailure::Transient { .. }));
    let seen = seen.await.unwrap();
    assert!(seen.starts_with("POST /prefix/v1/messages HTTP/1.1\r\n"), "{seen}");
    assert!(seen.contains("\r\nanthropic-version: 2023-06-01\r\n"), "{seen}");
    assert!(seen.ends_with("{\"zeta\":[1,{\"b\":1,\"a\":2}],\"alpha\":null,\"stream\":true}"), "{seen}");
}
