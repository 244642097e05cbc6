//! Connecting, migrating, and what is said when it does not go.

use covey_db::postgres::{Location, Postgres, migrate};
use covey_db::{Db, DbError, Migrated};
use covey_types::Fault;

use crate::place::Place;

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_start_together_migrate_once() {
    let place = Place::fresh().await;
    let location = place.location();
    let all = tokio::join!(migrate(&location), migrate(&location), migrate(&location), migrate(&location));
    let all = [all.0, all.1, all.2, all.3].map(Result::unwrap);
    let known = all[0].to;
    let first = all.iter().filter(|migrated| migrated.from == 0).count();
    assert_eq!(first, 1, "{all:?}");
    assert!(all.iter().all(|migrated| migrated.to == known && (0..=known).contains(&migrated.from)));
    assert_eq!(migrate(&location).await.unwrap(), Migrated { from: known, to: known });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_schema_is_refused_in_words() {
    let place = Place::fresh().await;
    migrate(&place.location()).await.unwrap();
    place.raw().await.client.batch_execute("UPDATE schema_version SET number = 99").await.unwrap();
    let refused = Postgres::connect(&place.location()).await.unwrap_err();
    assert!(matches!(refused, DbError::Newer { found: 99, .. }));
    let text = refused.to_string();
    assert!(text.contains("schema 99") && text.contains("newer covey"), "{text}");
}

async fn refused(url: &str) -> (Fault, String) {
    let error = Postgres::connect(&Location::parse(url).unwrap()).await.unwrap_err();
    (error.fault(), error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_url_is_named_with_the_next_step() {
    let place = Place::fresh().await;
    let (url, port) = (place.url(None), place.port());
    let secret = url.split(':').nth(2).unwrap().split('@').next().unwrap().to_owned();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    for (wrong, fault, told) in [
        (
            url.replace(&secret, "wrong"),
            Fault::Denied,
            ["password of user `postgres` is wrong", "COVEY_DATABASE_URL"],
        ),
        (url.replace(&format!(":{secret}"), ""), Fault::Denied, ["password missing", "COVEY_DATABASE_URL"]),
        (url.replace(&place.name, "elsewhere"), Fault::Denied, ["no database `elsewhere`", "createdb"]),
        (url.replace(&port.to_string(), &free.to_string()), Fault::Retry, ["refused", "host and port"]),
        (format!("{url}?sslmode=require"), Fault::Denied, ["TLS", "sslmode"]),
    ] {
        let (class, text) = refused(&wrong).await;
        assert_eq!(class, fault, "{text}");
        assert!(told.iter().all(|part| text.contains(part)), "{text}");
        assert!(!text.contains(&secret) && !text.contains("wrong@"), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn somebody_elses_tables_are_left_alone() {
    let place = Place::fresh().await;
    let raw = place.raw().await;
    raw.client.batch_execute("CREATE TABLE session (theirs TEXT)").await.unwrap();
    let refused = migrate(&place.location()).await.unwrap_err().to_string();
    assert!(refused.contains("one of its own"), "{refused}");
    let left = "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'";
    assert_eq!(raw.client.query_one(left, &[]).await.unwrap().get::<_, i64>(0), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_is_there_for_the_next_server() {
    let place = Place::fresh().await;
    let db: Db = place.connect().await.into();
    let org = db.take_over().await.unwrap();
    let (token, secret) = db.create_token(org, "t").await.unwrap();
    drop(db);
    let db: Db = place.connect().await.into();
    assert_eq!(db.verify_token(&secret).await.unwrap(), Some((org, token.id)));
    let raw = place.raw().await;
    let stored = raw.client.query_one("SELECT token::text FROM token", &[]).await.unwrap();
    assert!(!stored.get::<_, String>(0).contains(&secret), "the secret is stored nowhere");
}
