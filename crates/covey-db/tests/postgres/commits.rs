//! What becomes of a transaction whose connection goes, or that somebody is in the way of.

use std::time::Duration;

use covey_db::Db;
use covey_db::postgres::{Location, Postgres};
use covey_harness::record::Body;
use tokio::task::JoinSet;

use crate::place::Place;
use crate::proxy::{CUT_HERE, Cut, Proxy};
use crate::suite::homes::{offer, runner};
use crate::suite::{World, message};

async fn behind(proxy: &Proxy, place: &Place) -> World {
    let location = Location::parse(&place.url(Some(proxy.port))).unwrap();
    let db: Db = Postgres::connect(&location).await.unwrap().into();
    World::new(db, place.connect().await.into()).await
}

fn texts(records: &[covey_harness::Record]) -> Vec<String> {
    let text = |record: &covey_harness::Record| match &record.body {
        Body::UserMessage { content } => content[0]["text"].as_str().unwrap().to_owned(),
        other => panic!("{other:?}"),
    };
    records.iter().map(text).collect()
}

/// Each transaction is there once, whichever side of the commit the cut falls on.
async fn cut_commits_are_neither_lost_nor_doubled(cut: Cut) {
    let place = Place::fresh().await;
    let proxy = Proxy::start(place.port(), cut).await;
    let world = behind(&proxy, &place).await;
    let mut acknowledged = Vec::new();
    // A commit that was carried out is not sent again, so only one of them can be cut.
    let most = if cut == Cut::Before { 2 } else { 1 };
    for n in 0..10 {
        proxy.cut_next(n % (most + 1));
        let answer = world.say(vec![message(&n.to_string())]).await.unwrap();
        assert_eq!(proxy.left(), 0, "the commits were cut");
        acknowledged.extend(answer);
    }
    let stored = world.other.records(world.org, world.session.id, 0, 100).await.unwrap();
    assert_eq!(stored, acknowledged);
    assert_eq!(texts(&stored), (0..10).map(|n: i32| n.to_string()).collect::<Vec<_>>());
    // Not only appends: what a retry would do again is seen in the numbers.
    proxy.cut_next(most);
    let before = world.session.epoch;
    assert_eq!(world.claim().await, before + 1);
    proxy.cut_next(1);
    let token = world.token(1).await;
    proxy.cut_next(1);
    assert_eq!(world.publish(offer(token, 0, b"1")).await.unwrap().0, 1);
    assert_eq!(world.other.count_snapshots(world.org, world.session.home).await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_never_arrived_is_made_again_once() {
    cut_commits_are_neither_lost_nor_doubled(Cut::Before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_answer_was_lost_is_found_out_and_not_made_again() {
    cut_commits_are_neither_lost_nor_doubled(Cut::After).await;
}

/// A driver's append is one statement, with no commit behind it.
async fn cut_appends_are_neither_lost_nor_doubled(cut: Cut) {
    let place = Place::fresh().await;
    let proxy = Proxy::start(place.port(), cut).await;
    let world = behind(&proxy, &place).await;
    let epoch = world.claim().await;
    let most = if cut == Cut::Before { 2 } else { 1 };
    let mut acknowledged = Vec::new();
    for n in 0..10 {
        proxy.cut_next(n % (most + 1));
        let noted = Body::SandboxWaiting { reason: format!("{n} {CUT_HERE}") };
        let bodies = vec![Body::StatusRunning {}, noted, Body::AgentThinking {}];
        acknowledged.extend(world.append(epoch, bodies).await.unwrap());
        assert_eq!(proxy.left(), 0, "the appends were cut");
    }
    let stored = world.other.records(world.org, world.session.id, 0, 100).await.unwrap();
    assert_eq!(stored, acknowledged);
    assert_eq!(world.other.session(world.org, world.session.id).await.unwrap().head, 30);
    // One that is refused stays refused, whatever became of its answer.
    world.other.claim_session(world.org, world.session.id).await.unwrap();
    proxy.cut_next(most);
    let noted = Body::SandboxWaiting { reason: CUT_HERE.to_owned() };
    let refused = world.append(epoch, vec![noted]).await.unwrap_err();
    assert!(matches!(refused, covey_db::DbError::Fenced { .. }), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_that_never_arrived_is_made_again_once() {
    cut_appends_are_neither_lost_nor_doubled(Cut::Before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_whose_answer_was_lost_is_found_out_and_not_made_again() {
    cut_appends_are_neither_lost_nor_doubled(Cut::After).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_connections_lose_and_double_nothing() {
    let place = Place::fresh().await;
    let world = World::new(place.connect().await.into(), place.connect().await.into()).await;
    let mut writers = JoinSet::new();
    for writer in 0..6 {
        let db = if writer % 2 == 0 { world.db.clone() } else { world.other.clone() };
        let (org, id) = (world.org, world.session.id);
        writers.spawn(async move {
            for n in 0..60 {
                db.append_user_events(org, id, vec![message(&format!("{writer}.{n}"))]).await.unwrap();
            }
        });
    }
    let killer = place.raw().await;
    let mut killed = 0;
    // Somebody is killed at every moment of the others' work.
    let kill = async {
        loop {
            let sql = "SELECT count(pg_terminate_backend(pid)) FROM
                           (SELECT pid FROM pg_stat_activity WHERE datname = current_database()
                            AND pid <> pg_backend_pid() AND state <> 'idle' ORDER BY random() LIMIT 1) AS busy";
            killed += killer.client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0);
            // A new connection takes as long; faster, and nobody would get through in ten tries.
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
    };
    tokio::select! {
        () = kill => {}
        () = async { while let Some(done) = writers.join_next().await { done.unwrap() } } => {}
    }
    assert!(killed >= 10, "only {killed} connections were killed");
    let records = world.all().await;
    assert!(records.iter().zip(1..).all(|(record, n)| record.seq == n));
    let mut found = texts(&records);
    found.sort();
    let mut said: Vec<String> = (0..6).flat_map(|w| (0..60).map(move |n| format!("{w}.{n}"))).collect();
    said.sort();
    assert_eq!(found, said);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_chosen_in_a_deadlock_is_run_again() {
    let place = Place::fresh().await;
    let world = World::new(place.connect().await.into(), place.connect().await.into()).await;
    let token = world.token(1).await;
    let (mut raw, watch) = (place.raw().await, place.raw().await);
    // The other side never gives in, so it is ours that PostgreSQL ends.
    raw.client.batch_execute("SET deadlock_timeout = '60s'").await.unwrap();
    let tx = raw.client.transaction().await.unwrap();
    let session = world.session.id.to_string();
    tx.execute("UPDATE session SET title = 'held' WHERE id = $1", &[&session]).await.unwrap();
    // Holds the home, waits for the session.
    let publish = world.publish(offer(token, 0, b"1"));
    let cross = async {
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                         AND wait_event_type = 'Lock'";
        while watch.client.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) == 0 {
            tokio::task::yield_now().await;
        }
        let home = world.session.home.to_string();
        tx.execute("UPDATE home SET unsecured_at = 1, unsecured_reason = 'x' WHERE id = $1", &[&home])
            .await
            .unwrap();
        tx.commit().await.unwrap();
    };
    let (published, ()) = tokio::join!(publish, cross);
    assert_eq!(published.unwrap().0, 1);
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    let mut seen = 0;
    // Counters are written when their backend is idle.
    for _ in 0..200 {
        seen = watch.client.query_one(deadlocks, &[]).await.unwrap().get::<_, i64>(0);
        if seen > 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(seen > 0, "there was no deadlock");
    assert_eq!(world.kinds().await, ["home.secured"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_whose_caller_went_away_holds_nothing() {
    let place = Place::fresh().await;
    let world = World::new(place.connect().await.into(), place.connect().await.into()).await;
    let mut raw = place.raw().await;
    let tx = raw.client.transaction().await.unwrap();
    let session = world.session.id.to_string();
    tx.execute("UPDATE session SET title = 'held' WHERE id = $1", &[&session]).await.unwrap();
    let home = world.session.home;
    // It holds the home's row and waits for the session's.
    let claim = world.db.claim_home(world.org, home, world.session.id, None, runner(1));
    assert!(tokio::time::timeout(Duration::from_millis(500), claim).await.is_err());
    // While the session is still held, the home is free again, and the handle works.
    let released = tokio::time::timeout(Duration::from_secs(20), async {
        world.other.mark_home_unsecured(world.org, home, "free").await.unwrap();
        world.db.home(world.org, home).await.unwrap()
    });
    let row = released.await.expect("the home's row is free");
    assert_eq!((row.lease_held, row.unsecured.unwrap().reason.as_str()), (false, "free"));
    tx.rollback().await.unwrap();
    assert!(matches!(world.claim_home(world.session.id, 1).await, covey_db::homes::Claim::Granted(_)));
}
