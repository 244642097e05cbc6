//! Fencing of drivers (I5), one intention and one result per step (I4), groups.

use covey_db::DbError;
use covey_harness::record::{Body, Permission, StopReason};
use covey_types::Fault;
use serde_json::{Map, json};

use super::{World, fresh_step, message, new_session, result_of};

pub(crate) async fn a_driver_that_was_overtaken_appends_nothing(f: &World) {
    let old = f.claim().await;
    let new = f.other.claim_session(f.org, f.session.id).await.unwrap().epoch;
    assert!(new > old);
    let refused = f.append(old, vec![Body::StatusRunning {}]).await.unwrap_err();
    assert!(matches!(refused, DbError::Fenced { .. }), "{refused}");
    f.append(new, vec![Body::StatusRunning {}]).await.unwrap();
    let records = f.all().await;
    assert_eq!(records.iter().map(|r| r.seq).collect::<Vec<_>>(), [1]);
}

pub(crate) async fn two_racing_drivers_never_interleave_and_the_numbers_have_no_gap(f: &World) {
    let mut tasks = tokio::task::JoinSet::new();
    for db in [f.db.clone(), f.other.clone()] {
        let (org, id) = (f.org, f.session.id);
        tasks.spawn(async move {
            let mut mine = Vec::new();
            for _ in 0..20 {
                let epoch = db.claim_session(org, id).await.unwrap().epoch;
                while mine.len() < 100 {
                    match db.append(org, id, epoch, vec![Body::DriverClaimed { epoch }]).await {
                        Ok(records) => mine.extend(records),
                        Err(DbError::Fenced { .. }) => break,
                        Err(other) => panic!("{other}"),
                    }
                }
            }
            mine
        });
    }
    let mut acknowledged: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    acknowledged.sort_by_key(|r| r.seq);
    let stored = f.all().await;
    assert_eq!(acknowledged, stored);
    let epochs: Vec<u64> = stored
        .iter()
        .map(|r| if let Body::DriverClaimed { epoch } = r.body { epoch } else { unreachable!() })
        .collect();
    assert!(epochs.is_sorted(), "an older driver appended after a newer one");
    assert!(stored.iter().zip(1..).all(|(r, n)| r.seq == n));
}

pub(crate) async fn a_step_has_one_intention_and_one_result_whoever_appends(f: &World) {
    let epoch = f.claim().await;
    let step = fresh_step();
    let intention = || {
        vec![Body::ToolUse {
            step,
            model_step: step,
            index: 0,
            call_id: "c".into(),
            name: "bash".into(),
            input: Map::new(),
            evaluated_permission: Permission::Allow,
            refusal: None,
        }]
    };
    f.append(epoch, intention()).await.unwrap();
    let again = f.append(epoch, intention()).await.unwrap_err();
    assert_eq!(again.fault(), Fault::Conflict, "{again:?}");
    f.append(epoch, vec![result_of(step)]).await.unwrap();
    let later = f.other.claim_session(f.org, f.session.id).await.unwrap().epoch;
    let again = f.other.append(f.org, f.session.id, later, vec![result_of(step)]).await.unwrap_err();
    assert_eq!(again.fault(), Fault::Conflict, "{again:?}");
    assert_eq!(f.kinds().await, ["agent.tool_use", "agent.tool_result"]);
    assert_eq!(f.db.session(f.org, f.session.id).await.unwrap().head, 2, "a refused append moves nothing");
}

pub(crate) async fn a_group_of_records_is_appended_whole_or_not_at_all(f: &World) {
    let epoch = f.claim().await;
    let step = fresh_step();
    f.append(epoch, vec![Body::StatusRunning {}, result_of(step), Body::AgentThinking {}]).await.unwrap();
    let refused =
        f.append(epoch, vec![Body::StatusIdle { stop_reason: StopReason::EndTurn }, result_of(step)]).await;
    assert!(refused.is_err());
    let row = f.db.session(f.org, f.session.id).await.unwrap();
    assert_eq!((row.head, row.status.as_str()), (3, "running"));
    let content = vec![json!({"type": "text", "text": "x".repeat(covey_db::journal::USER_EVENT_BYTES_MAX)})];
    let too_large = covey_db::journal::UserEvent { body: Body::UserMessage { content }, dedup: None };
    let refused = f.say(vec![message("first"), too_large]).await.unwrap_err();
    assert!(matches!(refused, DbError::TooLarge(_)), "{refused:?}");
    assert_eq!(f.all().await.len(), 3);
}

pub(crate) async fn a_session_that_is_gone_fences_its_driver(f: &World) {
    let session = new_session(&f.db, f.org).await.unwrap().id;
    let epoch = f.db.claim_session(f.org, session).await.unwrap().epoch;
    f.other.delete_session(f.org, session).await.unwrap();
    let refused = f.db.append(f.org, session, epoch, vec![Body::StatusRunning {}]).await.unwrap_err();
    assert!(matches!(refused, DbError::Fenced { .. }), "{refused:?}");
    let refused = f.db.append_user_events(f.org, session, vec![message("x")]).await.unwrap_err();
    assert!(matches!(refused, DbError::NotFound { .. }), "{refused:?}");
    assert!(matches!(f.db.claim_session(f.org, session).await, Err(DbError::NotFound { .. })));
}
