//! One file per message and version: old bytes are read for ever, today's bytes are unchanged.
//!
//! A new message or field needs a new file (`COVEY_WRITE_GOLDEN=1 cargo test -p covey-wire --test golden`);
//! an existing file is never changed and never deleted while that version of the link is spoken.

use std::fmt::Debug;
use std::fs;
use std::path::PathBuf;

use covey_types::{
    ByteCount, Fault, FencingToken, Generation, HomeId, OrgId, RootHash, RunnerId, SandboxId, SandboxState,
    SessionId, SnapshotKind, StepId,
};
use covey_wire::frame;
use covey_wire::runner::{
    HomeGap, HomeGaps, HomePresence, HomeSource, PublishOutcome, RunnerToServer, SandboxLimits,
    ServerToRunner, ToolLoss,
};
use covey_wire::tool::{RunnerToSandbox, SandboxToRunner, StepReport, ToolCall, ToolContent, ToolResult};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

fn uuid(last: u128) -> Uuid {
    Uuid::from_u128(0x0198_0000_0000_7000_8000_0000_0000_0000 | last)
}

fn home() -> HomeId {
    HomeId::from_uuid(uuid(1))
}

fn sandbox() -> SandboxId {
    SandboxId::from_uuid(uuid(2))
}

fn step() -> StepId {
    StepId::from_uuid(uuid(3))
}

fn result() -> ToolResult {
    ToolResult {
        content: vec![
            ToolContent::Text { text: "grüße".to_owned() },
            ToolContent::Image { media_type: "image/png".to_owned(), data: vec![0x89, 0x50, 0, 0xff] },
        ],
        is_error: false,
        exit_code: Some(3),
        output_path: Some("/outputs/step.txt".to_owned()),
        output_bytes: 1 << 33,
        elapsed_ms: 12,
        left_running: true,
        keep_running: false,
    }
}

fn call() -> ToolCall {
    ToolCall { step: step(), name: "bash".to_owned(), input: r#"{"command":"true"}"#.to_owned() }
}

#[cfg(test)]
#[track_caller]
fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(name: &str, message: &T) {
    check_since(1, name, message);
}

/// As [`check`], for what a link says since `version`.
#[cfg(test)]
#[track_caller]
fn check_since<T: Serialize + DeserializeOwned + PartialEq + Debug>(version: u32, name: &str, message: &T) {
    let file = format!("{name}.v{version}.bin");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
    let bytes = frame::encode(message).unwrap();
    if std::env::var_os("COVEY_WRITE_GOLDEN").is_some() && !path.exists() {
        fs::write(&path, &bytes).unwrap();
    }
    let golden = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let read: T = frame::read(&mut &golden[..]).unwrap().unwrap();
    assert_eq!(&read, message, "{name}: the old bytes mean something else now");
    assert_eq!(bytes, golden, "{name}: the bytes of version {version} changed");
}

#[test]
fn runner_to_sandbox() {
    check("tool-hello", &RunnerToSandbox::Hello { versions: (1, 1), token: FencingToken(7) });
    check("tool-call", &RunnerToSandbox::Call(call()));
    check("tool-query", &RunnerToSandbox::Query { step: step() });
    check("tool-interrupt", &RunnerToSandbox::Interrupt { step: step() });
    check("tool-acknowledge", &RunnerToSandbox::Acknowledge { step: step() });
    check("tool-freeze", &RunnerToSandbox::Freeze);
    check("tool-thaw", &RunnerToSandbox::Thaw);
    check("tool-ping", &RunnerToSandbox::Ping { nonce: u64::MAX });
    check("tool-shutdown", &RunnerToSandbox::Shutdown { grace_ms: 2000 });
}

#[test]
fn sandbox_to_runner() {
    check("tool-hello-answer", &SandboxToRunner::Hello { version: 1, sandbox: sandbox() });
    check("tool-refused", &SandboxToRunner::Refused { reason: "old token".to_owned() });
    check("tool-accepted", &SandboxToRunner::Accepted { step: step() });
    check("tool-output", &SandboxToRunner::Output { step: step(), text: "line\n".to_owned() });
    check("tool-done", &SandboxToRunner::Done { step: step(), result: result() });
    for (name, report) in [
        ("unknown", StepReport::Unknown),
        ("running", StepReport::Running),
        ("done", StepReport::Done { result: result() }),
        ("acknowledged", StepReport::Acknowledged),
    ] {
        check(&format!("tool-report-{name}"), &SandboxToRunner::Report { step: step(), report });
    }
    check("tool-frozen", &SandboxToRunner::Frozen);
    check("tool-thawed", &SandboxToRunner::Thawed);
    check("tool-pong", &SandboxToRunner::Pong { nonce: 0 });
}

#[test]
fn server_to_runner() {
    let (home, token, sandbox, step) = (home(), FencingToken(9), sandbox(), step());
    let runner = RunnerId::from_uuid(uuid(4));
    check("runner-welcome", &ServerToRunner::Welcome { version: 1, runner, heartbeat_ms: 1000 });
    check("runner-refused", &ServerToRunner::Refused { reason: "revoked".to_owned() });
    check(
        "runner-wake-home",
        &ServerToRunner::WakeHome {
            org: OrgId::from_uuid(uuid(5)),
            home,
            session: SessionId::from_uuid(uuid(6)),
            token,
            generation: Generation(4),
            root: Some(RootHash::of(b"root")),
            limits: SandboxLimits { memory: ByteCount(1 << 32), pids: 2048, cpu_percent: 0 },
        },
    );
    check("runner-run-tool", &ServerToRunner::RunTool { home, token, sandbox, call: call() });
    check("runner-query-tool", &ServerToRunner::QueryTool { home, token, sandbox, step });
    check("runner-interrupt-tool", &ServerToRunner::InterruptTool { home, step });
    check("runner-acknowledge-tool", &ServerToRunner::AcknowledgeTool { home, step });
    check("runner-secure-home", &ServerToRunner::SecureHome { home, token });
    for (name, outcome) in [
        ("published", PublishOutcome::Published { generation: Generation(5) }),
        ("refused", PublishOutcome::Refused { reason: "old token".to_owned() }),
    ] {
        let root = RootHash::of(b"root");
        check(&format!("runner-publish-{name}"), &ServerToRunner::PublishAnswer { home, root, outcome });
    }
    for (name, outcome) in [
        ("over-quota", PublishOutcome::OverQuota { reason: "too large".to_owned() }),
        ("collected", PublishOutcome::Collected { floor: 3 }),
    ] {
        let root = RootHash::of(b"root");
        let answer = ServerToRunner::PublishAnswer { home, root, outcome };
        check_since(2, &format!("runner-publish-{name}"), &answer);
    }
    check("runner-stop-sandbox", &ServerToRunner::StopSandbox { home, token });
    check_since(
        3,
        "runner-forget-homes",
        &ServerToRunner::ForgetHomes { homes: vec![home, HomeId::from_uuid(uuid(7))] },
    );
    let all = vec!["http://a.example:7788".to_owned(), "http://b.example:7788".to_owned()];
    check_since(4, "runner-servers", &ServerToRunner::Servers { own: all[0].clone(), all });
    check("runner-heartbeat", &ServerToRunner::Heartbeat);
}

#[test]
fn runner_to_server() {
    let (home, token, sandbox, step) = (home(), FencingToken(9), sandbox(), step());
    check(
        "server-hello",
        &RunnerToServer::Hello {
            versions: (1, 1),
            name: "host".to_owned(),
            credential: None,
            homes: vec![HomePresence { home, generation: Generation(4), sandbox: Some(sandbox) }],
        },
    );
    for (name, source) in [
        ("adopted", HomeSource::Adopted),
        ("kept", HomeSource::Kept),
        ("materialized", HomeSource::Materialized),
        ("empty", HomeSource::Empty),
    ] {
        let (generation, set_aside) = (Generation(4), Some("aside-1".to_owned()));
        let gaps = HomeGaps::default();
        let ready = RunnerToServer::HomeReady {
            home,
            token,
            sandbox,
            generation,
            source,
            set_aside,
            gaps,
            elapsed_ms: 8,
        };
        check(&format!("server-home-ready-{name}"), &ready);
    }
    let gap = HomeGap { path: "src/lost.rs".to_owned(), reason: "block 00 is not in the store".to_owned() };
    check(
        "server-home-ready-gaps",
        &RunnerToServer::HomeReady {
            home,
            token,
            sandbox,
            generation: Generation(4),
            source: HomeSource::Materialized,
            set_aside: None,
            gaps: HomeGaps { count: 2, first: vec![gap] },
            elapsed_ms: 8,
        },
    );
    for (name, fault) in [
        ("retry", Fault::Retry),
        ("conflict", Fault::Conflict),
        ("not-found", Fault::NotFound),
        ("invalid", Fault::Invalid),
        ("denied", Fault::Denied),
        ("corrupt", Fault::Corrupt),
        ("limit", Fault::Limit),
        ("bug", Fault::Bug),
        ("too-large", Fault::TooLarge),
        ("full", Fault::Full),
    ] {
        let detail = "why".to_owned();
        check(
            &format!("server-home-failed-{name}"),
            &RunnerToServer::HomeFailed { home, token, fault, detail },
        );
    }
    check("server-tool-started", &RunnerToServer::ToolStarted { home, step });
    check("server-tool-output", &RunnerToServer::ToolOutput { home, step, text: "line\n".to_owned() });
    check("server-tool-done", &RunnerToServer::ToolDone { home, sandbox, step, result: result() });
    for (name, loss) in [("never-started", ToolLoss::NeverStarted), ("interrupted", ToolLoss::Interrupted)] {
        let reason = "killed".to_owned();
        check(&format!("server-tool-lost-{name}"), &RunnerToServer::ToolLost { home, step, loss, reason });
    }
    for kind in SnapshotKind::ALL {
        let mut publish = RunnerToServer::Publish {
            home,
            token,
            base: Generation(4),
            root: RootHash::of(b"root"),
            kind,
            step: Some(step),
            files: 12_000,
            bytes: ByteCount(1 << 30),
            stored_bytes_new: ByteCount(4096),
            elapsed_ms: 31,
            epoch: 0,
        };
        check(&format!("server-publish-{}", kind.as_str()), &publish);
        let RunnerToServer::Publish { epoch, .. } = &mut publish else { unreachable!() };
        *epoch = 5;
        check_since(2, &format!("server-publish-{}", kind.as_str()), &publish);
    }
    let detail = "disk full".to_owned();
    check("server-secure-failed", &RunnerToServer::SecureFailed { home, fault: Fault::Retry, detail });
    for state in SandboxState::ALL {
        let (name, reason) = (format!("{state:?}").to_lowercase(), "why".to_owned());
        let changed = RunnerToServer::SandboxChanged { home, sandbox, state, reason };
        check(&format!("server-sandbox-changed-{name}"), &changed);
    }
    check("server-heartbeat", &RunnerToServer::Heartbeat);
}

#[test]
fn fields_of_a_newer_peer_are_ignored() {
    // {"type": "Pong"-like map with an extra field}: a newer daemon may say more than we know.
    #[derive(Serialize)]
    struct Newer {
        r#type: &'static str,
        nonce: u64,
        mood: &'static str,
    }
    let bytes = frame::encode(&Newer { r#type: "pong", nonce: 3, mood: "fine" }).unwrap();
    let read: Option<SandboxToRunner> = frame::read(&mut &bytes[..]).unwrap();
    assert_eq!(read, Some(SandboxToRunner::Pong { nonce: 3 }));
}
