//! Agents, environments, sessions, rules, tokens, runners, orgs, stores.

use std::collections::BTreeSet;
use std::time::Duration;

use covey_db::agents::Agent;
use covey_db::homes::Claim;
use covey_db::rules::{HomeRulesEdit, OrgRulesEdit};
use covey_db::sessions::{NewSession, SessionEdit, SessionFilter, SessionText};
use covey_db::{DbError, Order, Page};
use covey_harness::record::{Body, StopReason};
use covey_types::{AgentId, Fault, SessionId, SessionStatus, Timestamp};
use covey_wire::api::history::HomeRules;
use serde_json::json;
use tokio::task::JoinSet;

use super::{World, message, new_session, no_such_org};

pub(crate) async fn an_agent_has_versions_and_an_update_names_the_one_it_was_made_on(f: &World) {
    let config = json!({"z": 1, "a": [null, "\u{0}"]});
    let made = f.db.create_agent(f.org, "n", &config).await.unwrap();
    assert_eq!(f.other.agent(f.org, made.id).await.unwrap(), made);
    assert_eq!(made.config.to_string(), config.to_string(), "the order of keys is kept");
    let changed = f.db.update_agent(f.org, made.id, Some(1), "m", &json!({})).await.unwrap();
    assert_eq!((changed.version, changed.name.as_str()), (2, "m"));
    let same = f.db.update_agent(f.org, made.id, None, "m", &json!({})).await.unwrap();
    assert_eq!(same.version, 2, "nothing has changed");
    let late = f.other.update_agent(f.org, made.id, Some(1), "x", &json!({})).await;
    assert!(matches!(late, Err(DbError::Conflict(_))), "{late:?}");
    let (agent, first) = f.other.agent_version(f.org, made.id, Some(1)).await.unwrap();
    assert_eq!((agent, first.name, first.config), (changed.clone(), "n".to_owned(), config));
    let (_, current) = f.db.agent_version(f.org, made.id, None).await.unwrap();
    assert_eq!(current.version, 2);
    let missing = f.db.agent_version(f.org, made.id, Some(3)).await.unwrap_err();
    assert!(matches!(missing, DbError::NotFound { what: "agent version", .. }), "{missing:?}");
    let (_, versions) = f.db.list_agent_versions(f.org, made.id, None, 10).await.unwrap();
    assert_eq!(versions.iter().map(|v| v.version).collect::<Vec<_>>(), [2, 1]);
    let (_, versions) = f.db.list_agent_versions(f.org, made.id, Some(2), 10).await.unwrap();
    assert_eq!(versions.iter().map(|v| v.version).collect::<Vec<_>>(), [1]);
    let archived = f.db.archive_agent(f.org, made.id).await.unwrap();
    assert_eq!(f.db.archive_agent(f.org, made.id).await.unwrap(), archived, "again is no error");
    let late = f.db.update_agent(f.org, made.id, None, "x", &json!({})).await;
    assert!(matches!(late, Err(DbError::Conflict(_))), "{late:?}");
}

pub(crate) async fn of_two_updates_of_one_version_one_is_refused(f: &World) {
    let id = f.session.agent;
    for version in 1..=20 {
        let (one, two) = (json!({"one": version}), json!({"two": version}));
        let (one, two) = tokio::join!(
            f.db.update_agent(f.org, id, Some(version), "a", &one),
            f.other.update_agent(f.org, id, Some(version), "a", &two),
        );
        let refused = [&one, &two].into_iter().filter(|r| matches!(r, Err(DbError::Conflict(_)))).count();
        let taken = [&one, &two].into_iter().filter(|r| r.is_ok()).count();
        assert_eq!((taken, refused), (1, 1), "{one:?} {two:?}");
    }
    let (agent, versions) = f.db.list_agent_versions(f.org, id, None, 100).await.unwrap();
    assert_eq!((agent.version, versions.len()), (21, 21));
}

pub(crate) async fn an_agent_goes_with_all_that_it_has_but_not_while_it_is_at_work(f: &World) {
    let (agent, home) = (f.session.agent, f.session.home);
    f.publish_many(2).await;
    let busy = f.other.delete_agent(f.org, agent).await.unwrap_err().to_string();
    assert!(busy.contains("at work") && busy.contains(&f.session.id.to_string()), "{busy}");
    f.release().await;
    let epoch = f.claim().await;
    f.append(epoch, vec![Body::StatusRunning {}]).await.unwrap();
    assert!(matches!(f.other.delete_agent(f.org, agent).await, Err(DbError::Conflict(_))));
    f.append(epoch, vec![Body::StatusIdle { stop_reason: StopReason::EndTurn }]).await.unwrap();
    let mut follower = f.db.follow(f.org, f.session.id, u64::from(u32::MAX));
    let (gone, told) = tokio::join!(f.other.delete_agent(f.org, agent), follower.next());
    let gone = gone.unwrap();
    assert_eq!((gone.sessions, gone.snapshots, gone.home), (1, 2, home));
    assert_eq!(f.db.deleted_homes(f.org).await.unwrap(), [home]);
    // Listed before it was deleted: there is nothing to forget, and nothing wrong.
    assert_eq!(f.db.forget_snapshots(f.org, &[home]).await.unwrap(), 0);
    assert!(matches!(told, Err(DbError::NotFound { .. })), "{told:?}");
    assert!(matches!(f.db.agent(f.org, agent).await, Err(DbError::NotFound { .. })));
    assert!(matches!(f.db.home(f.org, home).await, Err(DbError::NotFound { .. })));
    assert_eq!(f.all().await, []);
    assert_eq!(f.db.snapshot_roots(f.org, None, None).await.unwrap(), []);
}

pub(crate) async fn an_environment_that_sessions_name_is_not_deleted(f: &World) {
    let used = f.session.environment;
    let refused = f.db.delete_environment(f.org, used).await.unwrap_err().to_string();
    assert!(refused.contains("1 sessions"), "{refused}");
    let made = f.db.create_environment(f.org, "n", &json!({"b": 1, "a": 2})).await.unwrap();
    let changed = f.other.update_environment(f.org, made.id, "m", &json!({})).await.unwrap();
    assert_eq!((changed.name.as_str(), changed.created_at), ("m", made.created_at));
    let archived = f.db.archive_environment(f.org, made.id).await.unwrap();
    assert!(archived.archived_at.is_some());
    assert!(matches!(
        f.db.update_environment(f.org, made.id, "x", &json!({})).await,
        Err(DbError::Conflict(_))
    ));
    let listed = f.db.list_environments(f.org, &Page::default(), false).await.unwrap();
    assert_eq!(listed.iter().map(|e| e.id).collect::<Vec<_>>(), [used]);
    assert_eq!(f.db.list_environments(f.org, &Page::default(), true).await.unwrap().len(), 2);
    f.other.delete_environment(f.org, made.id).await.unwrap();
    assert!(matches!(f.db.environment(f.org, made.id).await, Err(DbError::NotFound { .. })));
    let gone = NewSession {
        agent: f.session.agent,
        agent_version: None,
        agent_snapshot: None,
        environment: made.id,
        title: None,
        metadata: json!({}),
        extra: json!({}),
    };
    assert!(matches!(f.db.create_session(f.org, &gone, vec![]).await, Err(DbError::NotFound { .. })));
}

pub(crate) async fn lists_come_in_pages_and_filters_hold(f: &World) {
    for _ in 0..4 {
        new_session(&f.db, f.org).await.unwrap();
    }
    let list = async |after: Option<SessionId>, filter: &SessionFilter| {
        let page = Page { after, limit: 2, order: Order::Ascending };
        f.other.list_sessions(f.org, filter, &page).await.unwrap()
    };
    let all = SessionFilter::default();
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        let page = list(after, &all).await;
        let Some(last) = page.last() else { break };
        after = Some(last.id);
        seen.extend(page.into_iter().map(|s| s.id));
    }
    assert_eq!(seen.len(), 5);
    assert!(seen.is_sorted());
    let newest = Page { after: Some(seen[3]), limit: 2, order: Order::Descending };
    let newest = f.db.list_sessions(f.org, &all, &newest).await.unwrap();
    assert_eq!(newest.iter().map(|s| s.id).collect::<Vec<_>>(), [seen[2], seen[1]]);
    let running = SessionFilter { statuses: vec![SessionStatus::Running], ..SessionFilter::default() };
    assert_eq!(list(None, &running).await, []);
    let epoch = f.claim().await;
    f.append(epoch, vec![Body::StatusRunning {}]).await.unwrap();
    let both = SessionFilter {
        statuses: vec![SessionStatus::Running, SessionStatus::Terminated],
        ..SessionFilter::default()
    };
    assert_eq!(list(None, &both).await.iter().map(|s| s.id).collect::<Vec<_>>(), [f.session.id]);
    let agent = SessionFilter { agent: Some(f.session.agent), ..SessionFilter::default() };
    assert_eq!(list(None, &agent).await.len(), 1);
    let version = SessionFilter { agent_version: Some(2), ..SessionFilter::default() };
    assert_eq!(list(None, &version).await, []);
    let later = Timestamp::from_unix_ms(f.session.created_at.unix_ms() + 3_600_000);
    let future = SessionFilter { created_from: Some(later), ..SessionFilter::default() };
    assert_eq!(list(None, &future).await, []);
    let past = SessionFilter { created_until: Some(later), ..SessionFilter::default() };
    assert_eq!(list(None, &past).await.len(), 2);
    f.db.archive_session(f.org, seen[4]).await.unwrap();
    assert_eq!(list(Some(seen[3]), &all).await, []);
    let archived = SessionFilter { include_archived: true, ..SessionFilter::default() };
    assert_eq!(list(Some(seen[3]), &archived).await.len(), 1);
    let agents = f.db.list_agents(f.org, &Page { limit: 3, ..Page::default() }, false).await.unwrap();
    let ids: Vec<AgentId> = agents.iter().map(|agent: &Agent| agent.id).collect();
    assert!(ids.len() == 3 && ids.is_sorted_by(|a, b| a > b));
    let homes = f.db.list_homes(f.org, &Page { limit: 9, ..Page::default() }).await.unwrap();
    assert_eq!(homes.len(), 5);
}

pub(crate) async fn a_session_is_edited_archived_and_deleted(f: &World) {
    let rename = || {
        SessionEdit(Box::new(|session| {
            let title = format!("{}!", session.title.clone().unwrap_or_default());
            Ok(SessionText { title: Some(title), metadata: json!({"b": "1", "a": "2"}) })
        }))
    };
    f.db.edit_session(f.org, f.session.id, rename()).await.unwrap();
    let edited = f.other.edit_session(f.org, f.session.id, rename()).await.unwrap();
    assert_eq!(edited.title.as_deref(), Some("!!"));
    assert_eq!(edited.metadata.to_string(), r#"{"b":"1","a":"2"}"#);
    let refusing = SessionEdit(Box::new(|_| Err(DbError::Invalid("no".into()))));
    assert!(matches!(f.db.edit_session(f.org, f.session.id, refusing).await, Err(DbError::Invalid(_))));
    assert_eq!(f.db.session(f.org, f.session.id).await.unwrap(), edited);
    let epoch = f.claim().await;
    f.append(epoch, vec![Body::StatusRunning {}]).await.unwrap();
    for refused in [
        f.other.archive_session(f.org, f.session.id).await.map(|_| ()),
        f.other.delete_session(f.org, f.session.id).await,
    ] {
        let refused = refused.unwrap_err();
        assert!(matches!(&refused, DbError::Conflict(why) if why.contains("interrupt it")), "{refused:?}");
    }
    f.append(epoch, vec![Body::StatusIdle { stop_reason: StopReason::EndTurn }]).await.unwrap();
    let archived = f.other.archive_session(f.org, f.session.id).await.unwrap();
    let again = f.db.archive_session(f.org, f.session.id).await.unwrap();
    assert_eq!(archived.archived_at, again.archived_at);
    f.token(1).await;
    f.db.delete_session(f.org, f.session.id).await.unwrap();
    let home = f.other.home(f.org, f.session.home).await.unwrap();
    assert_eq!((home.lease_held, home.lease_session), (false, None));
    assert_eq!(f.all().await, []);
}

pub(crate) async fn edits_of_one_session_at_once_are_all_kept(f: &World) {
    let mut tasks = JoinSet::new();
    for n in 0..20 {
        let db = if n % 2 == 0 { f.db.clone() } else { f.other.clone() };
        let (org, id) = (f.org, f.session.id);
        tasks.spawn(async move {
            let edit = SessionEdit(Box::new(move |session| {
                let mut metadata = session.metadata.clone();
                metadata[format!("k{n}")] = json!("v");
                Ok(SessionText { title: None, metadata })
            }));
            db.edit_session(org, id, edit).await.unwrap();
        });
    }
    tasks.join_all().await;
    let metadata = f.db.session(f.org, f.session.id).await.unwrap().metadata;
    assert_eq!(metadata.as_object().unwrap().len(), 20);
}

pub(crate) async fn rules_are_edited_and_a_home_inherits(f: &World) {
    let home = f.session.home;
    let edit = OrgRulesEdit(Box::new(|now| {
        (HomeRules { keep_newest: Some(7), bytes_max: Some(1 << 40), ..now.homes }, now.org_bytes_max)
    }));
    let org = f.db.edit_org_rules(f.org, edit).await.unwrap();
    assert_eq!((org.homes.keep_newest, org.org_bytes_max, org.org_bytes), (Some(7), None, 0));
    let edit = HomeRulesEdit(Box::new(|own| HomeRules { keep_newest: Some(0), ..own }));
    let (own, effective) = f.other.edit_home_rules(f.org, home, edit).await.unwrap();
    assert_eq!((own.keep_newest, own.bytes_max), (Some(0), None));
    assert_eq!((effective.keep_newest, effective.bytes_max), (Some(0), Some(1 << 40)));
    assert_eq!(f.db.home_rules(f.org, home).await.unwrap(), (own, effective));
    let edit = HomeRulesEdit(Box::new(|own| HomeRules { files_max: Some(u64::MAX), ..own }));
    let refused = f.db.edit_home_rules(f.org, home, edit).await.unwrap_err();
    assert!(matches!(&refused, DbError::Invalid(why) if why.contains("files_max")), "{refused:?}");
    assert!(matches!(f.db.org_rules(no_such_org()).await, Err(DbError::NotFound { .. })));
}

pub(crate) async fn a_token_opens_its_org_until_it_is_revoked(f: &World) {
    let (token, secret) = f.db.create_token(f.org, "t").await.unwrap();
    let (second, other) = f.db.create_token(f.org, "u").await.unwrap();
    assert_ne!(secret, other);
    assert_eq!(f.other.verify_token(&secret).await.unwrap(), Some((f.org, token.id)));
    assert_eq!(f.db.verify_token(&format!("{secret}0")).await.unwrap(), None);
    f.db.touch_token(f.org, token.id).await.unwrap();
    f.db.touch_token(no_such_org(), second.id).await.unwrap();
    let listed = f.other.list_tokens(f.org).await.unwrap();
    assert_eq!(listed.iter().map(|t| t.id).collect::<Vec<_>>(), [second.id, token.id]);
    assert_eq!((listed[0].last_used_at, listed[1].last_used_at.is_some()), (None, true));
    let revoked = f.db.revoke_token(f.org, token.id).await.unwrap();
    assert_eq!(f.db.revoke_token(f.org, token.id).await.unwrap(), revoked);
    assert_eq!(f.other.verify_token(&secret).await.unwrap(), None);
    assert!(matches!(f.db.revoke_token(no_such_org(), second.id).await, Err(DbError::NotFound { .. })));
}

pub(crate) async fn one_name_is_one_runner_and_one_org(f: &World) {
    let (one, two) = tokio::join!(f.db.runner_connected(f.org, "r"), f.other.runner_connected(f.org, "r"));
    let id = one.unwrap();
    assert_eq!(id, two.unwrap());
    assert_ne!(f.db.runner_connected(f.org, "s").await.unwrap(), id);
    f.db.runner_disconnected(f.org, id).await.unwrap();
    let listed = f.other.list_runners(f.org).await.unwrap();
    let connected: Vec<_> = listed.iter().map(|r| (r.name.as_str(), r.connected)).collect();
    assert_eq!(BTreeSet::from_iter(connected), BTreeSet::from([("r", false), ("s", true)]));
    let other = f.db.create_org("acme").await.unwrap();
    assert_eq!(f.other.org_by_name("acme").await.unwrap(), Some(other));
    assert_eq!(f.other.org_by_name("nobody").await.unwrap(), None);
    let refused = f.other.create_org("acme").await.unwrap_err();
    assert_eq!(refused.fault(), Fault::Conflict, "{refused:?}");
    let (one, two) = tokio::join!(f.db.ensure_default_org(), f.other.ensure_default_org());
    assert_eq!((one.unwrap(), two.unwrap()), (f.org, f.org));
    assert_eq!(f.db.all_orgs().await.unwrap().len(), 2);
}

pub(crate) async fn an_org_is_due_for_collection_and_remembers_the_last_one(f: &World) {
    let hour = Duration::from_secs(3600);
    let now = covey_db::now();
    let in_two_hours = Timestamp::from_unix_ms(now.unix_ms() + 7_200_000);
    assert_eq!(f.db.orgs_to_collect(now, hour).await.unwrap(), []);
    assert_eq!(f.db.orgs_to_collect(in_two_hours, hour).await.unwrap(), [f.org]);
    assert_eq!(f.db.last_collection(f.org).await.unwrap(), None);
    f.db.note_collected(f.org, r#"{"freed":1}"#).await.unwrap();
    let last = f.other.last_collection(f.org).await.unwrap().unwrap();
    assert_eq!(last.report["freed"], 1);
    assert!(last.at >= now);
    assert!(matches!(f.db.collect_floor(no_such_org()).await, Err(DbError::NotFound { .. })));
}

pub(crate) async fn the_store_of_an_org_is_noted(f: &World) {
    assert_eq!(f.db.store_identity(f.org).await.unwrap(), None);
    f.db.note_store(f.org, "one").await.unwrap();
    f.other.note_store(f.org, "two").await.unwrap();
    assert_eq!(f.db.store_identity(f.org).await.unwrap().as_deref(), Some("two"));
    f.publish_many(2).await;
    let stores = f.other.org_stores().await.unwrap();
    assert_eq!(stores.len(), 1);
    assert_eq!((stores[0].org, stores[0].snapshots), (f.org, 2));
    assert_eq!(stores[0].identity.as_deref(), Some("two"));
}

pub(crate) async fn what_the_last_server_held_is_given_back(f: &World) {
    f.token(1).await;
    f.db.runner_connected(f.org, "r").await.unwrap();
    f.say(vec![message("a")]).await.unwrap();
    assert_eq!(f.db.take_over().await.unwrap(), f.org);
    assert!(!f.db.home(f.org, f.session.home).await.unwrap().lease_held);
    assert!(!f.db.list_runners(f.org).await.unwrap()[0].connected);
    let rival = new_session(&f.db, f.org).await.unwrap().id;
    let claimed = f.claim_home(rival, 1).await;
    assert!(matches!(claimed, Claim::Granted(_)), "{claimed:?}");
    assert_eq!(f.db.sessions_needing_driver(None).await.unwrap(), [(f.org, f.session.id)]);
}
