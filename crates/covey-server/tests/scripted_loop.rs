//! A whole server with the scripted model over HTTP, in each wire, that fails often, while server and model are restarted
//! in the middle of turns: every call runs once, every event is there, and the verifier refuses nothing. The same for a
//! session that is longer than its model's context. The runner is a fake that runs a call by counting it.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use covey_harness::Record;
use covey_harness::record::{Body, StopReason};
use covey_server::Server;
use covey_server::db::Db;
use covey_server::db::journal::UserEvent;
use covey_server::db::sessions::NewSession;
use covey_server::link::Trust;
use covey_server::model::scripted::{
    Chunking, Fault, FaultPlan, Handle, ScriptFile, ServeOptions, Violation, serve,
};
use covey_server::model::{CallLimits, Endpoint, Wire};
use covey_types::{OrgId, SandboxId, SessionId, StepId};
use covey_wire::frame::{Decoder, encode};
use covey_wire::runner::{HomeSource, RunnerToServer, ServerToRunner, ToolLoss};
use covey_wire::tool::ToolResult;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::TcpListener;
use tokio::sync::watch;

const TURNS: usize = 12;
/// Server and model are restarted after so many tool calls.
const RESTART_EVERY: usize = 4;
/// What is stuck shall fail, not hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// The host: it outlives servers, and knows what ran.
#[derive(Debug)]
struct Host {
    sandbox: SandboxId,
    woken: bool,
    runs: HashMap<StepId, u32>,
    ran: watch::Sender<usize>,
}

fn answer(host: &Mutex<Host>, message: ServerToRunner) -> Option<RunnerToServer> {
    let mut host = host.lock().unwrap();
    let sandbox = host.sandbox;
    let result = |step: StepId| ToolResult::text(format!("ran {step}"), false);
    Some(match message {
        ServerToRunner::WakeHome { home, token, generation, .. } => {
            let source = if std::mem::replace(&mut host.woken, true) {
                HomeSource::Adopted
            } else {
                HomeSource::Empty
            };
            RunnerToServer::HomeReady {
                home,
                token,
                sandbox,
                generation,
                source,
                set_aside: None,
                gaps: Default::default(),
                elapsed_ms: 1,
            }
        }
        ServerToRunner::RunTool { home, call, .. } => {
            *host.runs.entry(call.step).or_default() += 1;
            host.ran.send_modify(|ran| *ran += 1);
            RunnerToServer::ToolDone { home, sandbox, step: call.step, result: result(call.step) }
        }
        ServerToRunner::QueryTool { home, step, .. } if host.runs.contains_key(&step) => {
            RunnerToServer::ToolDone { home, sandbox, step, result: result(step) }
        }
        ServerToRunner::QueryTool { home, step, .. } => {
            RunnerToServer::ToolLost { home, step, loss: ToolLoss::NeverStarted, reason: "new".into() }
        }
        _ => return None,
    })
}

/// A runner on one link, until the server ends it.
async fn run(host: Arc<Mutex<Host>>, mut link: DuplexStream) {
    let hello =
        RunnerToServer::Hello { versions: (1, 1), name: "fake".into(), credential: None, homes: vec![] };
    let mut decoder = Decoder::default();
    let mut buffer = [0; 4096];
    let mut said = vec![hello];
    loop {
        for message in said.drain(..) {
            if link.write_all(&encode(&message).unwrap()).await.is_err() {
                return;
            }
        }
        match link.read(&mut buffer).await {
            Ok(length) if length > 0 => decoder.push(&buffer[..length]),
            _ => return,
        }
        while let Some(message) = decoder.next().unwrap() {
            said.extend(answer(&host, message));
        }
    }
}

/// What is played.
#[derive(Debug, Clone)]
struct Play {
    wire: Wire,
    scripts: ScriptFile,
    /// The agent's `model`.
    agent_model: Value,
    fault_percent: u8,
}

fn script() -> ScriptFile {
    let turn = |n: usize| {
        let call =
            |k: usize| json!({"name": "bash", "input": {"command": format!("echo {n} {k} {{{{call_id}}}}")}});
        let calls: Vec<Value> = (0..1 + n % 3).map(call).collect();
        json!({"thinking": format!("Schritt {n} 🦊"), "text": format!("step {n}"), "calls": calls})
    };
    let mut turns: Vec<Value> = (0..TURNS).map(turn).collect();
    turns.push(json!({"text": "All steps are done."}));
    serde_json::from_value(json!({"scripts": [{"seed": 9, "turns": turns}]})).unwrap()
}

async fn model(play: &Play, seed: u64) -> Handle {
    let kinds = vec![
        Fault::Overloaded { retry_after_s: 0 },
        Fault::ServerError,
        Fault::MidStreamError,
        Fault::Truncated,
        Fault::Hangup,
        Fault::Garbage,
        Fault::UnknownBlock,
    ];
    let faults = FaultPlan {
        first: vec![Fault::RateLimited { retry_after_s: 0 }],
        percent: play.fault_percent,
        kinds,
    };
    let options = ServeOptions { key: None, chunking: Chunking::Seeded, faults, seed };
    serve(play.scripts.clone(), TcpListener::bind("127.0.0.1:0").await.unwrap(), options).unwrap()
}

async fn new_session(db: &Db, play: &Play) -> (OrgId, SessionId) {
    let org = db.ensure_default_org().await.unwrap();
    let config = json!({"model": play.agent_model, "tools": [{"type": "agent_toolset_20260401"}]});
    let new = NewSession {
        agent: db.create_agent(org, "a", &config).await.unwrap().id,
        agent_version: None,
        agent_snapshot: None,
        environment: db.create_environment(org, "e", &json!({})).await.unwrap().id,
        title: None,
        metadata: json!({}),
        extra: json!({}),
    };
    let content = vec![json!({"type": "text", "text": "begin"})];
    let event = UserEvent { body: Body::UserMessage { content }, dedup: None };
    (org, db.create_session(org, &new, vec![event]).await.unwrap().id)
}

async fn records(db: &Db, org: OrgId, session: SessionId) -> Vec<Record> {
    db.records(org, session, 0, 100_000).await.unwrap()
}

/// Plays the session to its end; returns its journal and what the model refused.
async fn played(
    db: &Db,
    host: &Arc<Mutex<Host>>,
    (org, session): (OrgId, SessionId),
    play: &Play,
) -> Vec<Violation> {
    let mut ran = host.lock().unwrap().ran.subscribe();
    let mut violations = Vec::new();
    for life in 1.. {
        let model = model(play, life).await;
        let client = Endpoint::new(play.wire, &model.base_url(), None, CallLimits::default()).unwrap();
        let server = Server::start(db.clone(), Arc::new(client), None).await.unwrap();
        let (near, far) = tokio::io::duplex(64 * 1024);
        server.runner_gate(Trust::InProcess(org)).accept(near);
        let runner = tokio::spawn(run(Arc::clone(host), far));
        let mut follower = db.follow(org, session, 0);
        let is_idle = |event: &Value| event["type"] == "session.status_idle";
        let idle = async { while !follower.next().await.unwrap().iter().any(|(_, event)| is_idle(event)) {} };
        let restart = ran.wait_for(|ran| *ran >= life as usize * RESTART_EVERY);
        let ended = tokio::select! {
            () = idle => true,
            reached = restart => { reached.unwrap(); false }
        };
        server.shutdown().await;
        runner.await.unwrap();
        violations.extend(model.violations());
        model.shutdown().await.unwrap();
        if ended {
            break;
        }
    }
    violations
}

/// Plays it; returns the journal and how often each call ran.
async fn whole_play(play: &Play) -> (Vec<Record>, HashMap<StepId, u32>) {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(&dir.path().join("covey.db")).unwrap();
    let (org, session) = new_session(&db, play).await;
    let host = Arc::new(Mutex::new(Host {
        sandbox: SandboxId::from_uuid(uuid::Uuid::now_v7()),
        woken: false,
        runs: HashMap::new(),
        ran: watch::channel(0).0,
    }));
    let violations = tokio::time::timeout(PATIENCE, played(&db, &host, (org, session), play)).await.unwrap();
    assert_eq!(violations, [], "{:?}", play.wire);
    let runs = host.lock().unwrap().runs.clone();
    (records(&db, org, session).await, runs)
}

fn count(records: &[Record], wanted: fn(&Body) -> bool) -> usize {
    records.iter().filter(|record| wanted(&record.body)).count()
}

async fn ends_complete(wire: Wire) {
    let play = Play { wire, scripts: script(), agent_model: json!("scripted"), fault_percent: 10 };
    let (records, runs) = whole_play(&play).await;
    let calls: usize = (0..TURNS).map(|n| 1 + n % 3).sum();
    assert_eq!(count(&records, |body| matches!(body, Body::ToolUse { .. })), calls);
    assert_eq!(count(&records, |body| matches!(body, Body::ToolResult { is_error: false, .. })), calls);
    assert_eq!(count(&records, |body| matches!(body, Body::ModelDone { .. })), TURNS + 1);
    assert!(count(&records, |body| matches!(body, Body::ModelFailed { .. })) > 0, "the faults were real");
    let idle = Body::StatusIdle { stop_reason: StopReason::EndTurn };
    assert_eq!(records.iter().filter(|record| record.body == idle).count(), 1);
    assert_eq!((runs.len(), runs.values().all(|runs| *runs == 1)), (calls, true));
}

#[tokio::test]
async fn a_session_ends_complete_although_model_and_server_fail_all_the_way() {
    ends_complete(Wire::Messages).await;
}

#[tokio::test]
async fn a_session_over_the_chat_wire_ends_complete_as_well() {
    ends_complete(Wire::Chat).await;
}

#[tokio::test]
async fn a_session_over_the_responses_wire_ends_complete_as_well() {
    ends_complete(Wire::Responses).await;
}

#[tokio::test]
async fn a_session_longer_than_its_context_goes_on_behind_each_summary() {
    const STEPS: usize = 40;
    let filler = "x".repeat(400);
    let turn = |n: usize| {
        let input = json!({"command": format!("echo {n} {{{{call_id}}}} {filler}")});
        json!({"text": format!("step {n}"), "calls": [{"name": "bash", "input": input}]})
    };
    let mut turns: Vec<Value> = (0..STEPS).map(turn).collect();
    turns.push(json!({"text": "All steps are done."}));
    let scripts =
        serde_json::from_value(json!({"scripts": [{"when": "begin", "seed": 9, "turns": turns}]})).unwrap();
    // What the scripted model counts as a token is four bytes of the request.
    let agent_model = json!({"id": "scripted", "context_tokens": 3000});
    let play = Play { wire: Wire::Messages, scripts, agent_model, fault_percent: 0 };
    let (records, runs) = whole_play(&play).await;
    let compacted = count(&records, |body| matches!(body, Body::ContextCompacted { .. }));
    assert!(compacted >= 3, "{compacted}");
    let commands: Vec<String> = records
        .iter()
        .filter_map(|record| match &record.body {
            Body::ToolUse { input, .. } => input["command"].as_str().map(str::to_owned),
            _ => None,
        })
        .collect();
    assert_eq!(commands.len(), STEPS);
    for (n, command) in commands.iter().enumerate() {
        assert!(command.starts_with(&format!("echo {n} ")), "{n}: {command}");
    }
    let said: Vec<&Value> = records
        .iter()
        .filter_map(|record| match &record.body {
            Body::AgentMessage { content } => content.last(),
            _ => None,
        })
        .collect();
    assert_eq!(said.last().unwrap()["text"], "All steps are done.");
    assert_eq!((runs.len(), runs.values().all(|runs| *runs == 1)), (STEPS, true));
}
