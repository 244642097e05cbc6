//! Several servers on one database: who has which session when one of them dies, is cut off, or ends.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use covey_db::leases::{Instance, InstanceId, Rest, ServerPlace, Standing};
use covey_db::postgres::{LOOK_EVERY, Location, Postgres};
use covey_db::{Db, DbError};
use covey_harness::record::Body;
use covey_types::{OrgId, SessionId};
use tokio::sync::watch;

use crate::place::Place;
use crate::proxy::{Cut, Proxy};
use crate::suite::{message, new_session};

/// Longer than anything here takes; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

async fn until<T: Clone>(mut watched: watch::Receiver<T>, is_so: impl FnMut(&T) -> bool) -> T {
    let reached = tokio::time::timeout(PATIENCE, watched.wait_for(is_so)).await;
    reached.expect("it never came to that").unwrap().clone()
}

fn member(db: &Db) -> InstanceId {
    match *db.standing().borrow() {
        Standing::Member(id) => id,
        other => panic!("{other:?}"),
    }
}

async fn join(db: Db, name: &str) -> Db {
    let place = ServerPlace { address: format!("http://{name}"), version: "1".to_owned() };
    db.join(&place).await.unwrap();
    member(&db);
    db
}

async fn server(place: &Place, name: &str) -> Db {
    join(place.connect().await.into(), name).await
}

/// A server behind a relay, with a short lease.
async fn distant_server(place: &Place, proxy: &Proxy, name: &str) -> Db {
    let url = format!("{}?lease_seconds=2", place.url(Some(proxy.port)));
    join(Postgres::connect(&Location::parse(&url).unwrap()).await.unwrap().into(), name).await
}

async fn default_org(db: &Db) -> OrgId {
    db.ensure_default_org().await.unwrap()
}

async fn claimed(db: &Db, org: OrgId, count: usize) -> Vec<(SessionId, u64)> {
    let mut claimed = Vec::new();
    for _ in 0..count {
        let id = new_session(db, org).await.unwrap().id;
        claimed.push((id, db.claim_session(org, id).await.unwrap().epoch));
    }
    claimed
}

async fn take_all(db: &Db) -> Vec<(SessionId, u64)> {
    let mut taken = Vec::new();
    loop {
        let some = db.take_left_behind().await.unwrap();
        if some.is_empty() {
            return taken;
        }
        taken.extend(some.into_iter().map(|(_, session)| (session.id, session.epoch)));
    }
}

fn addresses(servers: &[Instance]) -> Vec<&str> {
    servers.iter().map(|server| server.address.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_share_and_one_that_does_not_refuse_each_other() {
    let place = Place::fresh().await;
    let one = server(&place, "one").await;
    let alone: Db = place.connect().await.into();
    assert!(matches!(alone.take_over().await, Err(DbError::Served { .. })));
    let two = server(&place, "two").await;
    let known = until(one.servers(), |servers| servers.len() == 2).await;
    let mut names = addresses(&known);
    names.sort_unstable();
    assert_eq!(names, ["http://one", "http://two"]);
    drop((one, two));
    alone.take_over().await.unwrap();
    let late: Db = place.connect().await.into();
    let place = ServerPlace { address: "http://late".to_owned(), version: "1".to_owned() };
    assert!(matches!(late.join(&place).await, Err(DbError::Served { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_living_server_drives_is_left_to_it() {
    let place = Place::fresh().await;
    let (one, two) = (server(&place, "one").await, server(&place, "two").await);
    let org = default_org(&one).await;
    let (id, epoch) = claimed(&one, org, 1).await[0];
    two.append_user_events(org, id, vec![message("a")]).await.unwrap();
    let refused = two.claim_session(org, id).await.unwrap_err();
    assert!(matches!(refused, DbError::Leased { server, .. } if server == member(&one)), "{refused}");
    assert_eq!(two.sessions_needing_driver(None).await.unwrap(), []);
    assert_eq!(one.sessions_needing_driver(None).await.unwrap(), [(org, id)]);
    assert!(two.take_left_behind().await.unwrap().is_empty());
    assert!(two.feed().touched().await.contains(&id), "its own append");
    one.release_session(org, id, epoch, Rest::HandedOver).await.unwrap();
    // Told beside the commit: the other server looks at that session.
    let touched = tokio::time::timeout(PATIENCE, two.feed().touched()).await.unwrap();
    assert!(touched.contains(&id));
    assert!(two.claim_session(org, id).await.unwrap().epoch > epoch);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sessions_of_a_server_that_died_are_taken_at_once_and_each_by_one() {
    let place = Place::fresh().await;
    let (one, two, three) =
        (server(&place, "one").await, server(&place, "two").await, server(&place, "three").await);
    let org = default_org(&one).await;
    let lost = claimed(&one, org, 300).await;
    until(two.servers(), |servers| servers.len() == 3).await;
    until(three.servers(), |servers| servers.len() == 3).await;
    let (second, third) = (two.left_behind(), three.left_behind());
    let (before_two, before_three) = (*second.borrow(), *third.borrow());
    drop(one);
    let died = Instant::now();
    tokio::join!(until(second, |n| *n > before_two), until(third, |n| *n > before_three));
    // Ten looks would be a second; the term is ten.
    assert!(died.elapsed() < LOOK_EVERY * 50, "noticed after {:?}", died.elapsed());
    let (by_two, by_three) = tokio::join!(take_all(&two), take_all(&three));
    let taken: HashSet<SessionId> = by_two.iter().chain(&by_three).map(|(id, _)| *id).collect();
    assert_eq!(taken.len(), by_two.len() + by_three.len(), "one was taken twice");
    assert_eq!(taken, lost.iter().map(|(id, _)| *id).collect());
    let old = lost[0];
    let new = by_two.iter().chain(&by_three).find(|(id, _)| *id == old.0).unwrap().1;
    assert_eq!(new, old.1 + 1);
    let records = two.records(org, old.0, 0, 10).await.unwrap();
    assert_eq!(records.last().unwrap().body, Body::DriverClaimed { epoch: new });
    let refused = two.append(org, old.0, old.1, vec![Body::StatusRunning {}]).await.unwrap_err();
    assert!(matches!(refused, DbError::Fenced { .. }), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_cut_off_is_silent_before_its_sessions_are_taken_and_comes_back_as_another() {
    let place = Place::fresh().await;
    let proxy = Proxy::start(place.port(), Cut::Before).await;
    let (near, far) = (server(&place, "near").await, distant_server(&place, &proxy, "far").await);
    let org = default_org(&near).await;
    let (id, epoch) = claimed(&far, org, 1).await[0];
    let before = member(&far);
    until(near.servers(), |servers| servers.len() == 2).await;
    proxy.hold(true);
    let cut = Instant::now();
    let (standing, left) = (far.standing(), near.left_behind());
    let count = *left.borrow();
    let (silent_at, taken_at) = tokio::join!(
        async {
            until(standing, |standing| matches!(standing, Standing::Silent(_))).await;
            cut.elapsed()
        },
        async {
            until(left, |n| *n > count).await;
            cut.elapsed()
        }
    );
    assert!(silent_at < taken_at, "silent after {silent_at:?}, taken after {taken_at:?}");
    assert!(taken_at < Duration::from_secs(2 + 1), "taken after {taken_at:?}");
    assert_eq!(take_all(&near).await, [(id, epoch + 1)]);
    let refused = far.claim_session(org, id).await.unwrap_err();
    assert!(matches!(refused, DbError::LeaseEnded), "{refused}");
    proxy.hold(false);
    let again = until(far.standing(), |standing| {
        standing.instance().is_some_and(|id| id != before) && standing.may_claim()
    });
    again.await;
    let refused = far.append(org, id, epoch, vec![Body::StatusRunning {}]).await.unwrap_err();
    assert!(matches!(refused, DbError::Fenced { .. }), "{refused}");
    assert!(matches!(far.claim_session(org, id).await, Err(DbError::Leased { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_database_drops_every_connection_nobody_loses_a_session() {
    let place = Place::fresh().await;
    let (one, two) = (server(&place, "one").await, server(&place, "two").await);
    let org = default_org(&one).await;
    let mine = claimed(&one, org, 3).await;
    until(two.servers(), |servers| servers.len() == 2).await;
    let before = (member(&one), member(&two));
    let raw = place.raw().await;
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()";
    for _ in 0..3 {
        raw.client.execute(kill, &[]).await.unwrap();
    }
    for (id, epoch) in &mine {
        one.append(org, *id, *epoch, vec![Body::StatusRunning {}]).await.unwrap();
    }
    // Each has its lock again: one more death is noticed at once.
    let locked = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted";
    let deadline = Instant::now() + PATIENCE;
    while raw.client.query_one(locked, &[]).await.unwrap().get::<_, i64>(0) < 2 {
        assert!(Instant::now() < deadline, "a lock was not taken again");
    }
    assert_eq!((member(&one), member(&two)), before);
    assert!(two.take_left_behind().await.unwrap().is_empty());
    let left = two.left_behind();
    let count = *left.borrow();
    drop(one);
    until(left, |n| *n > count).await;
    assert_eq!(take_all(&two).await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_drains_claims_nothing_and_what_it_keeps_is_taken_when_it_leaves() {
    let place = Place::fresh().await;
    let (one, two) = (server(&place, "one").await, server(&place, "two").await);
    let org = default_org(&one).await;
    let kept = claimed(&one, org, 1).await[0];
    let free = new_session(&one, org).await.unwrap().id;
    one.drain().await.unwrap();
    let known = until(two.servers(), |servers| servers.iter().any(|server| server.draining)).await;
    assert_eq!(known.len(), 2);
    assert!(matches!(one.claim_session(org, free).await, Err(DbError::LeaseEnded)));
    assert!(one.take_left_behind().await.unwrap().is_empty());
    one.append(org, kept.0, kept.1, vec![Body::StatusRunning {}]).await.unwrap();
    let left = two.left_behind();
    let count = *left.borrow();
    one.leave().await.unwrap();
    until(left, |n| *n > count).await;
    assert_eq!(take_all(&two).await, [(kept.0, kept.1 + 1)]);
    assert_eq!(*one.standing().borrow(), Standing::Outside);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runner_is_connected_while_any_living_server_has_its_link() {
    let place = Place::fresh().await;
    let (one, two) = (server(&place, "one").await, server(&place, "two").await);
    let org = default_org(&one).await;
    let runner = one.runner_connected(org, "r").await.unwrap();
    assert_eq!(two.runner_connected(org, "r").await.unwrap(), runner);
    let is_connected = async || two.list_runners(org).await.unwrap()[0].connected;
    two.runner_disconnected(org, runner).await.unwrap();
    assert!(is_connected().await, "the other server still has it");
    let left = two.left_behind();
    let count = *left.borrow();
    drop(one);
    until(left, |n| *n > count).await;
    assert!(!is_connected().await, "its server died and could not say so");
}
