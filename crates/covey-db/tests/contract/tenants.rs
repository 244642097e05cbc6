//! The border of an org.

use covey_db::DbError;
use covey_db::rules::HomeRulesEdit;
use covey_db::sessions::{SessionEdit, SessionText};
use covey_db::snapshots::{Origin, Replacement};
use covey_db::{Order, Page, Result};
use covey_harness::record::Body;
use covey_types::{Generation, OrgId, RootHash};
use covey_wire::api::history::GenerationName;
use serde_json::json;

use super::homes::runner;
use super::{World, message, new_session};

fn is_not_there<T: std::fmt::Debug>(what: &str, result: Result<T>) {
    assert!(matches!(result, Err(DbError::NotFound { .. })), "{what}: {result:?}");
}

pub(crate) async fn nothing_crosses_the_border_of_an_org(f: &World) {
    let stranger = f.db.create_org("stranger").await.unwrap();
    f.publish_many(1).await;
    f.release().await;
    f.say(vec![message("secret")]).await.unwrap();
    let (session, home, agent, environment) =
        (f.session.id, f.session.home, f.session.agent, f.session.environment);
    let db = &f.other;
    is_not_there("agent", db.agent(stranger, agent).await);
    is_not_there("version", db.agent_version(stranger, agent, Some(1)).await);
    is_not_there("versions", db.list_agent_versions(stranger, agent, None, 10).await);
    is_not_there("update agent", db.update_agent(stranger, agent, None, "x", &json!({})).await);
    is_not_there("archive agent", db.archive_agent(stranger, agent).await);
    is_not_there("delete agent", db.delete_agent(stranger, agent).await);
    is_not_there("environment", db.environment(stranger, environment).await);
    is_not_there("update environment", db.update_environment(stranger, environment, "x", &json!({})).await);
    is_not_there("archive environment", db.archive_environment(stranger, environment).await);
    is_not_there("delete environment", db.delete_environment(stranger, environment).await);
    is_not_there("session", db.session(stranger, session).await);
    let edit = SessionEdit(Box::new(|_| Ok(SessionText { title: None, metadata: json!({}) })));
    is_not_there("edit session", db.edit_session(stranger, session, edit).await);
    is_not_there("archive session", db.archive_session(stranger, session).await);
    is_not_there("delete session", db.delete_session(stranger, session).await);
    is_not_there("claim session", db.claim_session(stranger, session).await);
    is_not_there("span", db.home_span(stranger, session).await);
    is_not_there("say", db.append_user_events(stranger, session, vec![message("x")]).await);
    is_not_there("events", db.public_events(stranger, session, 0, 10, Order::Ascending).await);
    assert_eq!(db.records(stranger, session, 0, 10).await.unwrap(), []);
    let forged = db.append(stranger, session, f.session.epoch, vec![Body::StatusRunning {}]).await;
    assert!(matches!(forged, Err(DbError::Fenced { .. })), "{forged:?}");
    is_not_there("home", db.home(stranger, home).await);
    is_not_there("claim home", db.claim_home(stranger, home, session, None, runner(1)).await);
    is_not_there("snapshot", db.snapshot(stranger, home, GenerationName::Current).await);
    is_not_there("snapshots", db.list_snapshots(stranger, home, None, 10).await);
    is_not_there("kept", db.kept_snapshots(stranger, home, covey_db::now()).await);
    is_not_there("restore", db.restore_home(stranger, home, GenerationName::Current, None, true).await);
    assert_eq!(db.homes_of_org(stranger).await.unwrap(), []);
    assert_eq!(db.deleted_homes(stranger).await.unwrap(), []);
    assert_eq!(db.forget_snapshots(stranger, &[home]).await.unwrap(), 0);
    is_not_there("rules", db.home_rules(stranger, home).await);
    let edit = HomeRulesEdit(Box::new(|rules| rules));
    is_not_there("edit rules", db.edit_home_rules(stranger, home, edit).await);
    let with = Replacement {
        base: None,
        root: RootHash::of(b"forged"),
        files: 0,
        bytes: 0,
        epoch: None,
        origin: Origin::Imported,
        from: None,
        over_unsecured: true,
    };
    is_not_there("replace", db.replace_home(stranger, home, &with).await);
    // What answers with nothing does nothing either.
    db.release_home(stranger, home, session).await.unwrap();
    db.mark_home_unsecured(stranger, home, "forged").await.unwrap();
    assert_eq!(db.snapshot_roots(stranger, None, None).await.unwrap(), []);
    assert_eq!(db.count_snapshots(stranger, home).await.unwrap(), 0);
    assert_eq!(db.list_agents(stranger, &Page::default(), true).await.unwrap(), []);
    assert_eq!(db.list_environments(stranger, &Page::default(), true).await.unwrap(), []);
    assert_eq!(db.list_homes(stranger, &Page::default()).await.unwrap(), []);
    let all = covey_db::sessions::SessionFilter { include_archived: true, ..Default::default() };
    assert_eq!(db.list_sessions(stranger, &all, &Page::default()).await.unwrap(), []);
    assert_eq!(db.list_tokens(stranger).await.unwrap(), []);
    assert_eq!(db.list_runners(stranger).await.unwrap(), []);
    let own = db.home(f.org, home).await.unwrap();
    assert_eq!((own.generation, own.unsecured), (Generation(1), None));
    assert_eq!(f.all().await.len(), 2);
}

pub(crate) async fn an_org_goes_with_all_that_it_has_and_nothing_else(f: &World) {
    let kept = f.db.create_org("kept").await.unwrap();
    let neighbour = new_session(&f.db, kept).await.unwrap();
    f.publish_many(2).await;
    f.say(vec![message("a")]).await.unwrap();
    f.db.create_token(f.org, "t").await.unwrap();
    f.db.runner_connected(f.org, "r").await.unwrap();
    f.db.note_store(f.org, "name").await.unwrap();
    let gone = f.other.delete_org(f.org).await.unwrap();
    assert!(gone.was_there);
    assert_eq!((gone.agents, gone.sessions, gone.snapshots), (1, 1, 2));
    assert_eq!(gone.homes, [f.session.home]);
    let orgs: Vec<OrgId> = f.db.all_orgs().await.unwrap();
    assert_eq!(orgs, [kept]);
    assert_eq!(f.db.session(kept, neighbour.id).await.unwrap(), neighbour);
    assert!(!f.db.delete_org(f.org).await.unwrap().was_there);
}
