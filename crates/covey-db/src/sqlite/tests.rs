//! What is SQLite's own: group commit, and the file's version. The rest is in the contract (`tests/contract`).

use covey_harness::record::Body;
use serde_json::json;

use super::*;
use crate::agents::Agents as _;
use crate::environments::Environments as _;
use crate::journal::Journal as _;
use crate::orgs::Orgs as _;
use crate::sessions::{NewSession, Sessions as _};

#[tokio::test]
async fn a_failing_closure_takes_nothing_of_its_neighbours_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let db = Sqlite::open(&dir.path().join("covey.db")).unwrap();
    let org = db.ensure_default_org().await.unwrap();
    let new = NewSession {
        agent: db.create_agent(org, "a", &json!({})).await.unwrap().id,
        agent_version: None,
        agent_snapshot: None,
        environment: db.create_environment(org, "e", &json!({})).await.unwrap().id,
        title: None,
        metadata: json!({}),
        extra: json!({}),
    };
    let id = db.create_session(org, &new, vec![]).await.unwrap().id;
    let epoch = db.claim_session(org, id).await.unwrap().epoch;
    let failing = db.write("fails late", move |tx| {
        journal::append_fenced_elsewhere(tx, org, id, Body::StatusRunning {})?;
        Err::<(), _>(DbError::Invalid("on purpose".into()))
    });
    let panicking = db.write("panics", |_| -> Result<()> { panic!("on purpose") });
    let good = db.append(org, id, epoch, vec![Body::AgentThinking {}]);
    let (failing, panicking, good) = tokio::join!(failing, panicking, good);
    assert!(matches!(failing, Err(DbError::Invalid(_))));
    assert!(matches!(panicking, Err(DbError::Panicked("panics"))));
    assert_eq!(good.unwrap()[0].seq, 1);
    assert_eq!(db.records(org, id, 0, 10).await.unwrap().len(), 1);
}

#[test]
fn a_newer_schema_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("newer.db");
    Connection::open(&path).unwrap().pragma_update(None, "user_version", 99).unwrap();
    let refused = Sqlite::open(&path).unwrap_err().to_string();
    assert!(refused.contains("schema 99") && refused.contains("newer covey"), "{refused}");
}
