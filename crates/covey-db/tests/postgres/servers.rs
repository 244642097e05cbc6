//! Several servers on one database.

use std::time::Duration;

use covey_db::{Db, DbError};

use crate::place::Place;
use crate::suite::{World, message};

#[tokio::test(flavor = "multi_thread")]
async fn a_second_server_is_refused_in_words_until_the_first_one_is_gone() {
    let place = Place::fresh().await;
    let first: Db = place.connect().await.into();
    let second: Db = place.connect().await.into();
    let org = first.take_over().await.unwrap();
    assert_eq!(first.take_over().await.unwrap(), org, "it may take over again");
    let refused = second.take_over().await.unwrap_err();
    assert!(matches!(refused, DbError::Served { .. }));
    let text = refused.to_string();
    assert!(text.contains("another covey server") && !text.contains(&place.url(None)), "{text}");
    drop(first);
    assert_eq!(second.take_over().await.unwrap(), org);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_did_not_tell_before_it_died_is_seen_by_who_follows() {
    let place = Place::fresh().await;
    let world = World::new(place.connect().await.into(), place.connect().await.into()).await;
    world.say(vec![message("one")]).await.unwrap();
    let mut follower = world.other.follow(world.org, world.session.id, 0);
    assert_eq!(follower.next().await.unwrap().len(), 1);
    let (id, raw) = (world.session.id.to_string(), place.raw().await);
    // As the commit of a server that dies before its notice: nobody is told.
    let silent = async {
        raw.client
            .batch_execute(&format!(
                "BEGIN;
                 UPDATE session SET head = head + 1 WHERE id = '{id}';
                 INSERT INTO journal (org, session, seq, epoch, kind, event, body, at)
                     SELECT org, session, 2, epoch, kind, event || 'x', body, at FROM journal WHERE session = '{id}';
                 COMMIT"
            ))
            .await
            .unwrap();
    };
    let (next, ()) = tokio::join!(tokio::time::timeout(Duration::from_secs(30), follower.next()), silent);
    // The event's id is no id of ours, so it cannot be read: what counts is that somebody looked.
    assert!(matches!(next.expect("nobody looked"), Err(DbError::Corrupt { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn followers_go_on_when_the_connection_for_notices_is_killed() {
    let place = Place::fresh().await;
    let world = World::new(place.connect().await.into(), place.connect().await.into()).await;
    let mut follower = world.other.follow(world.org, world.session.id, 0);
    let raw = place.raw().await;
    for n in 0..5 {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE datname = current_database() AND pid <> pg_backend_pid()";
        raw.client.query(sql, &[]).await.unwrap();
        world.say(vec![message(&n.to_string())]).await.unwrap();
        let next = tokio::time::timeout(Duration::from_secs(30), follower.next()).await;
        assert_eq!(next.expect("nobody looked").unwrap().len(), 1);
    }
}
