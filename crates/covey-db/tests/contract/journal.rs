//! The journal: dedup, numbering, following, pages.

use covey_db::journal::{USER_EVENTS_MAX, UserEvent};
use covey_db::{DbError, Order};
use covey_harness::record::{Body, Confirmation, ModelUsage, Permission, StopReason, span_id, step_event};
use covey_types::{EventId, SessionStatus, StepId};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{World, fresh_step, message, new_session};

pub(crate) async fn the_same_dedup_key_appends_once(f: &World) {
    let event = UserEvent { dedup: Some("k".into()), ..message("hi") };
    let first = f.say(vec![event.clone()]).await.unwrap();
    let second = f.say(vec![event.clone(), message("more")]).await.unwrap();
    assert_eq!(first[0], second[0]);
    // Also within one request.
    let third = f.say(vec![event.clone(), event]).await.unwrap();
    assert_eq!((&third[0], &third[1]), (&first[0], &first[0]));
    assert_eq!(f.all().await.len(), 2);
}

pub(crate) async fn the_same_dedup_key_from_two_servers_at_once_appends_once(f: &World) {
    for round in 0..10 {
        let event = UserEvent { dedup: Some(format!("k{round}")), ..message("hi") };
        let (one, two) = tokio::join!(
            f.db.append_user_events(f.org, f.session.id, vec![event.clone()]),
            f.other.append_user_events(f.org, f.session.id, vec![event]),
        );
        assert_eq!(one.unwrap(), two.unwrap());
    }
    assert_eq!(f.all().await.len(), 10);
}

pub(crate) async fn a_message_is_processed_when_a_request_takes_account_of_it(f: &World) {
    let epoch = f.claim().await;
    f.say(vec![message("one")]).await.unwrap();
    f.say(vec![message("two"), UserEvent { body: Body::UserInterrupt {}, dedup: None }]).await.unwrap();
    let taken = Body::ModelIntended { step: fresh_step(), upto: 1, attempt: 1, compact: false };
    f.append(epoch, vec![taken]).await.unwrap();
    let records = f.all().await;
    let processed: Vec<bool> = records.iter().map(|record| record.processed_at.is_some()).collect();
    assert_eq!(processed, [true, false, false, true]);
    let needing = f.other.sessions_needing_driver(None).await.unwrap();
    assert_eq!(needing, [(f.org, f.session.id)]);
    assert_eq!(f.db.sessions_needing_driver(Some(super::no_such_session())).await.unwrap(), []);
    let all = Body::ModelIntended { step: fresh_step(), upto: 4, attempt: 1, compact: false };
    f.append(epoch, vec![Body::InterruptHandled { upto: 4 }, all]).await.unwrap();
    assert!(f.all().await.iter().all(|record| record.processed_at.is_some()));
    assert_eq!(f.other.sessions_needing_driver(Some(f.session.id)).await.unwrap(), []);
}

fn asking(step: StepId) -> Body {
    Body::ToolUse {
        step,
        model_step: fresh_step(),
        index: 0,
        call_id: "c".into(),
        name: "bash".into(),
        input: serde_json::Map::new(),
        evaluated_permission: Permission::Ask,
        refusal: None,
    }
}

fn confirm(call: EventId) -> UserEvent {
    let body =
        Body::UserToolConfirmation { tool_use_id: call, result: Confirmation::Allow, deny_message: None };
    UserEvent { body, dedup: None }
}

pub(crate) async fn a_call_that_waits_takes_one_answer_and_a_session_that_waits_needs_no_driver(f: &World) {
    let epoch = f.claim().await;
    let (step, other) = (fresh_step(), fresh_step());
    let call = step_event(step);
    let wait = || Body::StatusIdle { stop_reason: StopReason::RequiresAction { event_ids: vec![call] } };
    f.append(epoch, vec![Body::StatusRunning {}, asking(step), asking(other), wait()]).await.unwrap();
    let needs = async || !f.other.sessions_needing_driver(None).await.unwrap().is_empty();
    assert!(!needs().await);
    // What is said meanwhile waits with the calls; an interrupt does not.
    f.say(vec![message("hurry")]).await.unwrap();
    assert!(!needs().await);
    f.say(vec![UserEvent { body: Body::UserInterrupt {}, dedup: None }]).await.unwrap();
    assert!(needs().await);
    f.append(epoch, vec![Body::InterruptHandled { upto: 6 }]).await.unwrap();
    assert!(!needs().await);
    for wrong in [step_event(fresh_step()), f.all().await[4].event.unwrap()] {
        assert!(matches!(f.say(vec![confirm(wrong)]).await, Err(DbError::Invalid(_))), "{wrong}");
    }
    let result = Body::UserCustomToolResult { custom_tool_use_id: call, content: vec![], is_error: false };
    let result = f.say(vec![UserEvent { body: result, dedup: None }]).await;
    assert!(matches!(result, Err(DbError::Invalid(_))), "it is no tool of a client");
    // Of two at once, on two servers, one is taken.
    let ours = f.db.append_user_events(f.org, f.session.id, vec![confirm(call)]);
    let theirs = f.other.append_user_events(f.org, f.session.id, vec![confirm(call)]);
    let (ours, theirs) = tokio::join!(ours, theirs);
    let refused = [&ours, &theirs].into_iter().filter(|r| matches!(r, Err(DbError::Conflict(_)))).count();
    assert_eq!((refused, ours.is_ok() || theirs.is_ok()), (1, true), "{ours:?} {theirs:?}");
    assert!(needs().await);
    let upto = f.all().await.last().unwrap().seq;
    f.append(epoch, vec![Body::AnswersHandled { upto }, wait()]).await.unwrap();
    assert!(!needs().await);
    let waiting = f.all().await.into_iter().filter(|record| record.processed_at.is_none());
    assert_eq!(waiting.map(|record| record.body.kind()).collect::<Vec<_>>(), ["user.message"]);
    // One that has ended takes no answer.
    let ended = Body::ToolResult {
        step: other,
        tool_use_id: step_event(other),
        content: vec![],
        is_error: true,
        substitute: true,
    };
    f.append(epoch, vec![Body::StatusRunning {}, ended]).await.unwrap();
    assert!(needs().await, "it runs");
    assert!(matches!(f.say(vec![confirm(step_event(other))]).await, Err(DbError::Conflict(_))));
}

pub(crate) async fn a_follower_sees_every_public_event_once_and_in_order(f: &World) {
    // The follower is on one server, the writer on the other.
    let mut follower = f.other.follow(f.org, f.session.id, 0);
    let (db, org, id) = (f.db.clone(), f.org, f.session.id);
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        for n in 0..50 {
            db.append_user_events(org, id, vec![message(&n.to_string())]).await.unwrap();
        }
    });
    let mut seen = Vec::new();
    while seen.len() < 50 {
        seen.extend(follower.next().await.unwrap());
    }
    tasks.join_all().await;
    for (n, (seq, event)) in seen.iter().enumerate() {
        assert_eq!(*seq, n as u64 + 1);
        assert_eq!(event["content"][0]["text"], n.to_string());
    }
}

pub(crate) async fn a_follower_learns_of_the_end(f: &World) {
    let mut follower = f.other.follow(f.org, f.session.id, 0);
    let epoch = f.claim().await;
    f.append(epoch, vec![Body::StatusIdle { stop_reason: StopReason::EndTurn }]).await.unwrap();
    assert_eq!(follower.next().await.unwrap().len(), 1);
    let (end, archived) = tokio::join!(follower.next(), f.db.archive_session(f.org, f.session.id));
    archived.unwrap();
    assert_eq!(end.unwrap(), []);
    let gone = new_session(&f.db, f.org).await.unwrap().id;
    let mut follower = f.other.follow(f.org, gone, 0);
    let (end, deleted) = tokio::join!(follower.next(), f.db.delete_session(f.org, gone));
    deleted.unwrap();
    assert!(matches!(end, Err(DbError::NotFound { .. })), "{end:?}");
}

pub(crate) async fn events_from_many_writers_are_all_there_and_numbered_without_a_gap(f: &World) {
    let mut tasks = JoinSet::new();
    for writer in 0..8 {
        let db = if writer % 2 == 0 { f.db.clone() } else { f.other.clone() };
        let (org, id) = (f.org, f.session.id);
        tasks.spawn(async move {
            for n in 0..25 {
                let text = format!("{writer}.{n}");
                db.append_user_events(org, id, vec![message(&text)]).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let records = f.all().await;
    assert!(records.iter().zip(1..).all(|(record, n)| record.seq == n));
    let mut texts: Vec<String> = records
        .iter()
        .map(|record| match &record.body {
            Body::UserMessage { content } => content[0]["text"].as_str().unwrap().to_owned(),
            other => panic!("{other:?}"),
        })
        .collect();
    texts.sort();
    texts.dedup();
    assert_eq!((records.len(), texts.len()), (200, 200));
    assert_eq!(f.other.session(f.org, f.session.id).await.unwrap().head, 200);
}

pub(crate) async fn events_come_in_pages_in_both_directions(f: &World) {
    let epoch = f.claim().await;
    for n in 0..5 {
        f.say(vec![message(&n.to_string())]).await.unwrap();
        f.append(epoch, vec![Body::DriverClaimed { epoch }]).await.unwrap();
    }
    let page = async |after, limit, order| {
        let found = f.other.public_events(f.org, f.session.id, after, limit, order).await.unwrap();
        found.into_iter().map(|(seq, _)| seq).collect::<Vec<_>>()
    };
    assert_eq!(page(0, 3, Order::Ascending).await, [1, 3, 5]);
    assert_eq!(page(5, 3, Order::Ascending).await, [7, 9]);
    assert_eq!(page(9, 3, Order::Ascending).await, Vec::<u64>::new());
    assert_eq!(page(0, 2, Order::Descending).await, [9, 7]);
    assert_eq!(page(7, 9, Order::Descending).await, [5, 3, 1]);
    let records = f.other.records(f.org, f.session.id, 8, 1).await.unwrap();
    assert_eq!(records.iter().map(|record| record.seq).collect::<Vec<_>>(), [9]);
    let event = records[0].event.unwrap();
    assert_eq!(f.db.seq_of_event(f.org, f.session.id, event).await.unwrap(), Some(9));
    let other = new_session(&f.db, f.org).await.unwrap().id;
    assert_eq!(f.db.seq_of_event(f.org, other, event).await.unwrap(), None);
}

pub(crate) async fn what_clients_may_not_append_is_refused_and_changes_nothing(f: &World) {
    let refused = f.say(vec![message("a"), UserEvent { body: Body::StatusRunning {}, dedup: None }]).await;
    assert!(matches!(refused, Err(DbError::Invalid(_))), "{refused:?}");
    let refused = f.say(vec![message("a"); USER_EVENTS_MAX + 1]).await;
    assert!(matches!(refused, Err(DbError::TooLarge(_))), "{refused:?}");
    for _ in 0..10 {
        f.say(vec![message("a"); USER_EVENTS_MAX]).await.unwrap();
    }
    let refused = f.say(vec![message("one too many")]).await;
    assert!(matches!(refused, Err(DbError::Limit(_))), "{refused:?}");
    assert_eq!(f.all().await.len(), 1000);
    f.db.archive_session(f.org, f.session.id).await.unwrap();
    let refused = f.say(vec![message("late")]).await;
    assert!(matches!(refused, Err(DbError::Conflict(_))), "{refused:?}");
}

pub(crate) async fn usage_and_status_move_with_the_append(f: &World) {
    let epoch = f.claim().await;
    let step = fresh_step();
    let used = ModelUsage { input_tokens: 1, output_tokens: 2, ..ModelUsage::default() };
    let end = |model_usage| Body::SpanEnd {
        model_request_start_id: span_id(step, 1),
        is_error: false,
        model_usage,
    };
    f.append(epoch, vec![Body::StatusRunning {}, end(used), end(used)]).await.unwrap();
    let row = f.other.session(f.org, f.session.id).await.unwrap();
    assert_eq!(row.status, SessionStatus::Running);
    assert_eq!((row.usage.input_tokens, row.usage.output_tokens), (2, 4));
    let cached = ModelUsage { cache_read_input_tokens: 5, cache_creation_input_tokens: 7, ..used };
    f.append(epoch, vec![end(cached)]).await.unwrap();
    let row = f.other.session(f.org, f.session.id).await.unwrap();
    assert_eq!((row.usage.input_tokens, row.usage.cache_read_input_tokens), (3, 5));
    assert_eq!((row.usage.cache_creation_input_tokens, row.status), (7, SessionStatus::Running));
    assert!(row.updated_at >= row.created_at);
}

pub(crate) async fn large_and_strange_texts_come_back_as_they_went(f: &World) {
    let texts = ["\u{0}", "\u{1F980} \"quoted\" \\ \u{7f}", &"long ".repeat(400_000), ""];
    for text in texts {
        // The order of keys is the client's, and numbers keep their form.
        let block: Value =
            serde_json::from_str(&format!(r#"{{"z":1.50,"a":1e3,"text":{},"n":null}}"#, json!(text)))
                .unwrap();
        let body = Body::UserMessage { content: vec![block.clone()] };
        f.say(vec![UserEvent { body, dedup: None }]).await.unwrap();
        let stored = f.all().await.pop().unwrap();
        let Body::UserMessage { content } = stored.body else { panic!("another kind") };
        assert_eq!(content[0].to_string(), block.to_string());
    }
}
