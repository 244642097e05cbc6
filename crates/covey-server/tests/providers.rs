//! Several providers: one that does not answer, another one in its place, and what the journal and the events say of it.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use covey_harness::Record;
use covey_harness::record::Body;
use covey_harness::retry::FAILURES_BEFORE_FAILOVER;
use covey_server::Server;
use covey_server::db::Db;
use covey_server::db::journal::UserEvent;
use covey_server::db::sessions::NewSession;
use covey_server::model::Router;
use covey_server::model::config::ModelsFile;
use covey_server::model::scripted::{Fault, FaultPlan, Handle, ServeOptions, serve};
use covey_types::{OrgId, SessionId};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// What is stuck shall fail, not hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// Says the same as the other one, but for the thinking: that goes to nobody else.
async fn model(thinking: Option<&str>, faults: usize) -> Handle {
    let turns = json!([{"thinking": thinking, "text": "Hello."}, {"text": "Again."}]);
    let scripts = serde_json::from_value(json!({"scripts": [{"turns": turns}]})).unwrap();
    let first = vec![Fault::Overloaded { retry_after_s: 0 }; faults];
    let options =
        ServeOptions { faults: FaultPlan { first, ..FaultPlan::default() }, ..ServeOptions::default() };
    serve(scripts, TcpListener::bind("127.0.0.1:0").await.unwrap(), options).unwrap()
}

fn says(text: &str) -> UserEvent {
    let content = vec![json!({"type": "text", "text": text})];
    UserEvent { body: Body::UserMessage { content }, dedup: None }
}

async fn idle(db: &Db, org: OrgId, session: SessionId, after: u64) -> Vec<Record> {
    let mut follower = db.follow(org, session, after);
    let ended = async {
        loop {
            let events = follower.next().await.unwrap();
            if events.iter().any(|(_, event)| event["type"] == "session.status_idle") {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, ended).await.unwrap();
    db.records(org, session, 0, 1000).await.unwrap()
}

#[tokio::test]
async fn a_provider_that_does_not_answer_is_replaced_by_the_next_and_everybody_is_told() {
    let down = model(None, 1000).await;
    let up = model(Some("hm"), 0).await;
    let file = format!(
        r#"
        [[providers]]
        name = "first"
        kind = "anthropic"
        base_url = "{}"
        models = ["big"]
        fallback = {{ provider = "second", model = "other" }}

        [[providers]]
        name = "second"
        kind = "openai-responses"
        base_url = "{}"
        models = ["other"]
        context_tokens = 50000
        "#,
        down.base_url(),
        up.base_url()
    );
    let router = Router::new(ModelsFile::parse(&file, false).unwrap(), Path::new("/"), &|_| None).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(&dir.path().join("covey.db")).unwrap();
    let org = db.ensure_default_org().await.unwrap();
    let new = NewSession {
        agent: db.create_agent(org, "a", &json!({"model": "big"})).await.unwrap().id,
        agent_version: None,
        agent_snapshot: None,
        environment: db.create_environment(org, "e", &json!({})).await.unwrap().id,
        title: None,
        metadata: json!({}),
        extra: json!({}),
    };
    let session = db.create_session(org, &new, vec![says("begin")]).await.unwrap().id;
    let server = Server::start(db.clone(), Arc::new(router), None).await.unwrap();
    let records = idle(&db, org, session, 0).await;

    let failures: Vec<(Option<&str>, Option<&str>)> = records
        .iter()
        .filter_map(|record| match &record.body {
            Body::ModelFailed { provider, next_provider, .. } => {
                Some((provider.as_deref(), next_provider.as_deref()))
            }
            _ => None,
        })
        .collect();
    let first = Some("first");
    assert_eq!(failures, [(first, None), (first, None), (first, Some("second"))]);
    let public: Vec<Value> = records.iter().filter_map(Record::public).collect();
    let told: Vec<&Value> = public.iter().filter(|event| event["type"] == "model.failed_over").collect();
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0]["failures"], json!(FAILURES_BEFORE_FAILOVER));
    assert_eq!((&told[0]["from"], &told[0]["to"]), (&json!("first"), &json!("second")));
    let rescheduled = public.iter().filter(|e| e["type"] == "session.status_rescheduled").count();
    assert_eq!(rescheduled, failures.len());
    let answered = |records: &[Record]| -> Vec<(Option<String>, String)> {
        let done = records.iter().filter_map(|record| match &record.body {
            Body::ModelDone { provider, model, .. } => Some((provider.clone(), model.clone())),
            _ => None,
        });
        done.collect()
    };
    let second = (Some("second".to_owned()), "other".to_owned());
    assert_eq!(answered(&records), std::slice::from_ref(&second));

    // The next turn asks the first one again; what the second one thought goes back to the second one only.
    let asked = down.requests();
    let head = records.last().unwrap().seq;
    db.append_user_events(org, session, vec![says("and again")]).await.unwrap();
    let records = idle(&db, org, session, head).await;
    assert_eq!(answered(&records), [second.clone(), second]);
    assert_eq!(down.requests() - asked, u64::from(FAILURES_BEFORE_FAILOVER));
    assert_eq!((down.violations(), up.violations()), (vec![], vec![]));
    server.shutdown().await;
}
