//! The OpenAI wires against the scripted model over real HTTP, and the JSON dialect against a server that says what a test
//! tells it to.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use covey_models::config::ModelsFile;
use covey_models::scripted::{Chunking, Fault, FaultPlan, Handle, ScriptFile, ServeOptions, serve};
use covey_models::{
    CallLimits, Credential, Endpoint, Model, ModelAnswer, ModelFailure, ModelRequest, Router, Secret, Wire,
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const KEY: &str = "sk-test-0123456789";
const OPENAI: [Wire; 2] = [Wire::Chat, Wire::Responses];

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
    let tools = json!([{"name": "bash", "description": "Runs.", "input_schema": {"type": "object",
        "properties": {"command": {"type": "string"}}, "required": ["command"]}}]);
    let body = json!({"model": "m", "max_tokens": 100, "system": "s", "tools": tools, "messages": messages});
    ModelRequest::new(body.as_object().unwrap().clone())
}

fn start() -> ModelRequest {
    request(json!([{"role": "user", "content": [{"type": "text", "text": "go"}]}]))
}

async fn server(options: ServeOptions) -> Handle {
    serve(scripts(), TcpListener::bind("127.0.0.1:0").await.unwrap(), options).unwrap()
}

fn client(wire: Wire, base_url: &str) -> Endpoint {
    let limits = CallLimits { idle_time_max: Duration::from_millis(300), ..CallLimits::default() };
    Endpoint::new(wire, base_url, Some(Credential::ApiKey(Secret::new(KEY))), limits).unwrap()
}

async fn call(model: &dyn Model, request: &ModelRequest) -> Result<ModelAnswer, ModelFailure> {
    model.call(request, &|_| {}).await
}

fn results(content: &[Value]) -> Vec<Value> {
    let calls = content.iter().filter(|block| block["type"] == "tool_use");
    calls.map(|block| json!({"type": "tool_result", "tool_use_id": block["id"], "content": "ok"})).collect()
}

#[tokio::test]
async fn every_chunking_gives_the_same_answer_and_it_is_accepted_when_it_comes_back() {
    for wire in OPENAI {
        for (seed, chunking) in [(1, Chunking::Whole), (2, Chunking::Bytes), (3, Chunking::Seeded)] {
            let options =
                ServeOptions { chunking, seed, key: Some(KEY.to_owned()), ..ServeOptions::default() };
            let server = server(options).await;
            let client = client(wire, &server.base_url());
            let got = call(&client, &start()).await.unwrap();
            assert_eq!((got.stop_reason.as_str(), got.model.as_str()), ("tool_use", "m"));
            assert_eq!(got.request_id.as_deref(), Some("req_scripted_0"));
            assert!(got.usage["output_tokens"].as_u64().unwrap() > 1, "{}", got.usage);
            let kinds: Vec<&str> = got.content.iter().map(|block| block["type"].as_str().unwrap()).collect();
            assert_eq!(kinds, ["wire_item", "text", "tool_use", "tool_use"], "{wire:?}");
            let id = got.content[2]["id"].as_str().unwrap();
            assert_eq!(got.content[2]["input"]["command"], json!(format!("echo 'ä' > {id}")));
            let history = |content: &[Value]| {
                request(json!([{"role": "user", "content": [{"type": "text", "text": "go"}]},
                    {"role": "assistant", "content": content}, {"role": "user", "content": results(content)}]))
            };
            let next = call(&client, &history(&got.content)).await.unwrap();
            assert_eq!(next.content, [json!({"type": "text", "text": "Fertig."})]);
            assert_eq!(next.stop_reason, "end_turn");
            let mut changed = got.content.clone();
            changed[2]["input"]["command"] = json!("rm");
            let error = call(&client, &history(&changed)).await.unwrap_err();
            assert!(matches!(&error, ModelFailure::Rejected { status: 400, .. }), "{error}");
            assert_eq!((server.requests(), server.violations().len()), (3, 1));
            server.shutdown().await.unwrap();
        }
    }
}

#[tokio::test]
async fn faults_become_transient_failures_and_the_same_request_then_succeeds() {
    let cases = [
        (Fault::RateLimited { retry_after_s: 7 }, Some(429), Some(7)),
        (Fault::Overloaded { retry_after_s: 0 }, Some(529), Some(0)),
        (Fault::ServerError, Some(500), None),
        (Fault::MidStreamError, Some(503), None),
        (Fault::Truncated, None, None),
        (Fault::Hangup, None, None),
        (Fault::Garbage, None, None),
        (Fault::SlowDrip { pause_ms: 60_000 }, None, None),
    ];
    for wire in OPENAI {
        for (fault, expected_status, expected_wait) in cases {
            let faults = FaultPlan { first: vec![fault], ..FaultPlan::default() };
            let options = ServeOptions { faults, chunking: Chunking::Seeded, ..ServeOptions::default() };
            let server = server(options).await;
            let client = client(wire, &server.base_url());
            match call(&client, &start()).await.unwrap_err() {
                ModelFailure::Transient { status, retry_after, detail, .. } => {
                    assert_eq!(status, expected_status, "{wire:?} {fault:?}: {detail}");
                    assert_eq!(retry_after, expected_wait.map(Duration::from_secs), "{wire:?} {fault:?}");
                }
                other => panic!("{wire:?} {fault:?}: {other}"),
            }
            assert_eq!(call(&client, &start()).await.unwrap().stop_reason, "tool_use", "{wire:?} {fault:?}");
        }
    }
}

#[tokio::test]
async fn an_item_that_nobody_knows_survives_the_way_there_and_back() {
    let faults = FaultPlan { first: vec![Fault::UnknownBlock], ..FaultPlan::default() };
    let server = server(ServeOptions { faults, ..ServeOptions::default() }).await;
    let client = client(Wire::Responses, &server.base_url());
    let got = call(&client, &start()).await.unwrap();
    assert_eq!(got.content[0]["item"]["type"], "covey_unknown_block");
    let next = request(json!([{"role": "user", "content": [{"type": "text", "text": "go"}]},
        {"role": "assistant", "content": got.content}, {"role": "user", "content": results(&got.content)}]));
    assert_eq!(call(&client, &next).await.unwrap().stop_reason, "end_turn");
    assert_eq!(server.violations(), []);
}

#[tokio::test]
async fn the_key_is_sent_as_a_bearer_and_never_comes_back() {
    for wire in OPENAI {
        let server = server(ServeOptions { key: Some("other".to_owned()), ..ServeOptions::default() }).await;
        let error = call(&client(wire, &server.base_url()), &start()).await.unwrap_err();
        let said = format!("{error} {error:?}");
        assert!(said.contains("invalid key: [redacted]") && !said.contains(KEY), "{said}");
        assert!(matches!(error, ModelFailure::Unauthorized { .. }), "{said}");
    }
}

/// A Chat server that answers with these texts, one after the other, and keeps what it was sent.
async fn saying(texts: &[&str]) -> (String, Arc<Mutex<Vec<Value>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (texts, kept) = (texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>(), Arc::clone(&seen));
    tokio::spawn(async move {
        for text in texts {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut bytes = Vec::new();
            let body = loop {
                assert_ne!(socket.read_buf(&mut bytes).await.unwrap(), 0);
                let at = bytes.windows(4).position(|w| w == b"\r\n\r\n");
                if let Some(body) = at.and_then(|at| serde_json::from_slice::<Value>(&bytes[at + 4..]).ok()) {
                    break body;
                }
            };
            kept.lock().unwrap().push(body);
            let choice = json!({"message": {"content": text}, "finish_reason": "stop"});
            let usage = json!({"prompt_tokens": 10, "completion_tokens": 2});
            let answer = json!({"model": "tiny", "choices": [choice], "usage": usage}).to_string();
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
            let response = format!("{head}content-length: {}\r\n\r\n{answer}", answer.len());
            socket.write_all(response.as_bytes()).await.unwrap();
            socket.shutdown().await.unwrap();
        }
    });
    (url, seen)
}

fn json_router(url: &str) -> Router {
    let file = format!(
        "[[providers]]\nname = \"local\"\nkind = \"openai-chat\"\nbase_url = \"{url}\"\ndialect = \"json\"\n"
    );
    Router::new(ModelsFile::parse(&file, false).unwrap(), Path::new("/"), &|_| None).unwrap()
}

#[tokio::test]
async fn a_model_without_tools_calls_them_in_json_and_is_asked_again_when_it_stammers() {
    let texts =
        ["{\"tool\": \"bash\", \"inp", "```json\n{\"tool\":\"bash\",\"input\":{\"command\":\"ls\"}}\n```"];
    let (url, seen) = saying(&texts).await;
    let router = json_router(&url);
    let answer = call(&router, &start()).await.unwrap();
    assert_eq!((answer.stop_reason.as_str(), answer.content.len()), ("tool_use", 1));
    assert_eq!(answer.content[0]["input"], json!({"command": "ls"}));
    assert_eq!((&answer.usage["input_tokens"], &answer.usage["context_tokens"]), (&json!(20), &json!(12)));
    let seen = seen.lock().unwrap();
    let [first, second] = &seen[..] else { panic!("{seen:?}") };
    assert!(first.get("tools").is_none());
    assert_eq!(first["response_format"]["type"], "json_schema");
    assert!(first["messages"][0]["content"].as_str().unwrap().contains("bash {\"command\": string}"));
    // The second one goes on where the first one ended.
    let messages = |body: &Value| body["messages"].as_array().unwrap().clone();
    assert_eq!(messages(second)[..2], messages(first)[..]);
    assert_eq!(messages(second)[2], json!({"role": "assistant", "content": texts[0]}));
    assert!(messages(second)[3]["content"].as_str().unwrap().contains("was not understood"));
}

#[tokio::test]
async fn a_model_that_never_keeps_to_the_form_is_a_refusal_that_says_what_to_do() {
    let (url, seen) = saying(&["{\"a\":", "{\"b\":", "{\"c\":"]).await;
    let error = call(&json_router(&url), &start()).await.unwrap_err();
    assert!(matches!(error, ModelFailure::Rejected { .. }), "{error}");
    assert!(error.to_string().contains("response_format"), "{error}");
    assert_eq!(seen.lock().unwrap().len(), 3, "asked again twice");
}

#[tokio::test]
async fn a_model_that_only_talks_has_answered() {
    let (url, _) = saying(&["Hello there."]).await;
    let answer = call(&json_router(&url), &start()).await.unwrap();
    assert_eq!(answer.content, [json!({"type": "text", "text": "Hello there."})]);
    assert_eq!(answer.stop_reason, "end_turn");
}

#[tokio::test]
async fn a_model_that_no_provider_serves_is_named() {
    let file = "[[providers]]\nname = \"a\"\nkind = \"openai-chat\"\nbase_url = \"http://127.0.0.1:1\"\nmodels = [\"x\"]\n";
    let router = Router::new(ModelsFile::parse(file, false).unwrap(), Path::new("/"), &|_| None).unwrap();
    let error = call(&router, &start()).await.unwrap_err().to_string();
    assert!(error.contains("serves m"), "{error}");
}
