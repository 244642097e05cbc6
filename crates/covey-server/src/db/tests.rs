//! Contract tests of the database: fencing, group commit, migration, paging.

use covey_harness::record::Body;
use covey_types::{FencingToken, Generation, OrgId, RootHash, RunnerId, SessionId, SnapshotKind};
use serde_json::json;

use super::homes::Claim;
use super::journal::UserEvent;
use super::sessions::NewSession;
use super::snapshots::{Origin, Publish, Published, Replacement};
use super::*;

mod history;

struct Fixture {
    _dir: tempfile::TempDir,
    db: Db,
    org: OrgId,
    session: sessions::Session,
}

async fn fixture() -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(&dir.path().join("covey.db")).unwrap();
    let org = db.write("org", orgs::ensure_default).await.unwrap();
    let session = db.write("session", move |tx| new_session(tx, org)).await.unwrap();
    Fixture { _dir: dir, db, org, session }
}

fn new_session(tx: &Tx<'_>, org: OrgId) -> Result<sessions::Session> {
    let agent = agents::insert(tx, org, "a", &json!({"model": "m"}))?;
    let environment = environments::insert(tx, org, "e", &json!({}))?;
    let new = NewSession {
        agent: agent.id,
        agent_version: None,
        agent_snapshot: None,
        environment: environment.id,
        title: None,
        metadata: json!({}),
        extra: json!({}),
    };
    sessions::insert(tx, org, &new)
}

fn message(text: &str) -> UserEvent {
    let content = vec![json!({"type": "text", "text": text})];
    UserEvent { body: Body::UserMessage { content }, dedup: None }
}

impl Fixture {
    async fn claim(&self) -> u64 {
        let (org, id) = (self.org, self.session.id);
        self.db.write("claim", move |tx| sessions::claim(tx, org, id)).await.unwrap().epoch
    }

    async fn append(&self, epoch: u64, bodies: Vec<Body>) -> Result<Vec<covey_harness::Record>> {
        let (org, id) = (self.org, self.session.id);
        self.db.write("append", move |tx| journal::append(tx, org, id, epoch, bodies)).await
    }

    async fn say(&self, events: Vec<UserEvent>) -> Result<Vec<covey_harness::Record>> {
        let (org, id) = (self.org, self.session.id);
        self.db.write("say", move |tx| journal::append_user_events(tx, org, id, &events)).await
    }

    async fn all(&self) -> Vec<covey_harness::Record> {
        let (org, id) = (self.org, self.session.id);
        self.db.read("all", move |read| journal::since(read, org, id, 0, 1000)).await.unwrap()
    }
}

#[tokio::test]
async fn a_driver_that_was_overtaken_appends_nothing() {
    let f = fixture().await;
    let (old, new) = (f.claim().await, f.claim().await);
    assert!(new > old);
    let refused = f.append(old, vec![Body::StatusRunning {}]).await.unwrap_err();
    assert!(matches!(refused, DbError::Fenced { .. }), "{refused}");
    f.append(new, vec![Body::StatusRunning {}]).await.unwrap();
    let records = f.all().await;
    assert_eq!(records.iter().map(|r| r.seq).collect::<Vec<_>>(), [1]);
}

#[tokio::test]
async fn two_racing_drivers_never_interleave_and_the_numbers_have_no_gap() {
    let f = std::sync::Arc::new(fixture().await);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let f = std::sync::Arc::clone(&f);
        tasks.spawn(async move {
            let mut mine = Vec::new();
            for _ in 0..20 {
                let epoch = f.claim().await;
                while mine.len() < 200 {
                    match f.append(epoch, vec![Body::DriverClaimed { epoch }]).await {
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

#[tokio::test]
async fn a_failing_closure_takes_nothing_of_its_neighbours_with_it() {
    let f = fixture().await;
    let epoch = f.claim().await;
    let (org, id) = (f.org, f.session.id);
    let failing = f.db.write("fails late", move |tx| {
        journal::append(tx, org, id, epoch, vec![Body::StatusRunning {}])?;
        Err::<(), _>(DbError::Invalid("on purpose".into()))
    });
    let panicking = f.db.write("panics", |_| -> Result<()> { panic!("on purpose") });
    let good = f.append(epoch, vec![Body::AgentThinking {}]);
    let (failing, panicking, good) = tokio::join!(failing, panicking, good);
    assert!(matches!(failing, Err(DbError::Invalid(_))));
    assert!(matches!(panicking, Err(DbError::Panicked("panics"))));
    assert_eq!(good.unwrap()[0].seq, 1);
    assert_eq!(f.all().await.len(), 1);
}

#[tokio::test]
async fn the_same_dedup_key_appends_once() {
    let f = fixture().await;
    let event = UserEvent { dedup: Some("k".into()), ..message("hi") };
    let first = f.say(vec![event.clone()]).await.unwrap();
    let second = f.say(vec![event, message("more")]).await.unwrap();
    assert_eq!(first[0], second[0]);
    assert_eq!(f.all().await.len(), 2);
}

#[tokio::test]
async fn a_message_is_processed_when_a_request_takes_account_of_it() {
    let f = fixture().await;
    let epoch = f.claim().await;
    f.say(vec![message("one")]).await.unwrap();
    f.say(vec![message("two")]).await.unwrap();
    let step = covey_types::StepId::from_uuid(Uuid::now_v7());
    f.append(epoch, vec![Body::ModelIntended { step, upto: 1, attempt: 1 }]).await.unwrap();
    let records = f.all().await;
    assert!(records[0].processed_at.is_some() && records[1].processed_at.is_none());
    let open = f.db.read("open", |read| sessions::needing_driver(read, None)).await.unwrap();
    assert_eq!(open, [(f.org, f.session.id)]);
}

fn offer(token: FencingToken, base: u64, of: &[u8]) -> Publish {
    Publish {
        token,
        base: Generation(base),
        root: RootHash::of(of),
        kind: SnapshotKind::Frozen,
        step: None,
        files: 1,
        bytes: 2,
        epoch: 0,
    }
}

impl Fixture {
    async fn claim_home(&self, session: SessionId, runner: u128) -> Claim {
        let (org, home) = (self.org, self.session.home);
        let runner = RunnerId::from_uuid(Uuid::from_u128(runner));
        self.db.write("claim", move |tx| homes::claim(tx, org, home, session, runner)).await.unwrap()
    }

    async fn token(&self, runner: u128) -> FencingToken {
        match self.claim_home(self.session.id, runner).await {
            Claim::Granted(token) => token,
            held => panic!("{held:?}"),
        }
    }

    async fn offer(&self, publish: Publish) -> Result<Published> {
        let (org, home) = (self.org, self.session.home);
        self.db.write("publish", move |tx| snapshots::publish(tx, org, home, &publish)).await
    }

    async fn publish(&self, publish: Publish) -> Result<Generation> {
        self.offer(publish).await.map(|published| match published {
            Published::Current(generation) => generation,
            other => panic!("{other:?}"),
        })
    }

    async fn import(&self, base: u64) -> Result<Generation> {
        let (org, home) = (self.org, self.session.home);
        let with = Replacement {
            base: Generation(base),
            root: RootHash::of(b"9"),
            files: 0,
            bytes: 0,
            epoch: Some(0),
            origin: Origin::Imported,
            from: None,
            over_unsecured: false,
        };
        self.db.write("import", move |tx| snapshots::replace(tx, org, home, &with)).await
    }
}

#[tokio::test]
async fn publish_checks_token_and_base_and_moves_the_pointer_with_the_journal() {
    let f = fixture().await;
    let (org, home, session) = (f.org, f.session.home, f.session.id);
    let token = f.token(1).await;
    assert_eq!(f.publish(offer(token, 0, b"1")).await.unwrap(), Generation(1));
    // The same again: the answer was lost.
    assert_eq!(f.publish(offer(token, 0, b"1")).await.unwrap(), Generation(1));
    assert!(matches!(f.publish(offer(token, 7, b"2")).await, Err(DbError::Conflict(_))));
    assert!(matches!(f.publish(offer(token.next(), 1, b"2")).await, Err(DbError::Fenced { .. })));
    let other = f.db.write("other", move |tx| new_session(tx, org)).await.unwrap().id;
    assert_eq!(f.claim_home(other, 1).await, Claim::HeldBy(session));
    assert!(matches!(f.import(1).await, Err(DbError::Conflict(_))), "the lease is held");
    f.db.write("release", move |tx| homes::release(tx, org, home, session)).await.unwrap();
    assert_eq!(f.publish(offer(token, 1, b"2")).await.unwrap(), Generation(2), "late, but nobody claimed");
    assert!(matches!(f.import(1).await, Err(DbError::Conflict(_))), "the base is old");
    assert_eq!(f.import(2).await.unwrap(), Generation(3));
    assert!(matches!(f.publish(offer(token, 3, b"3")).await, Err(DbError::Fenced { .. })));
    let secured: Vec<bool> = f
        .all()
        .await
        .iter()
        .filter_map(|r| if let Body::HomeSecured { changed, .. } = r.body { Some(changed) } else { None })
        .collect();
    assert_eq!(secured, [true, false, true]);
    let rows = f.db.read("s", move |read| snapshots::list(read, org, home, None, 10)).await.unwrap();
    assert_eq!(rows.iter().map(|s| s.snapshot.generation.0).collect::<Vec<_>>(), [3, 2, 1]);
}

#[tokio::test]
async fn a_runner_may_publish_late_for_as_long_as_the_home_has_not_gone_to_another_one() {
    let f = fixture().await;
    let first = f.token(1).await;
    let second = f.token(1).await;
    assert!(second > first);
    // The last turn's snapshot, while the next turn has its token already.
    assert_eq!(f.publish(offer(first, 0, b"1")).await.unwrap(), Generation(1));
    // Offered before the answer to the one before it had arrived.
    assert_eq!(f.publish(offer(second, 0, b"2")).await.unwrap(), Generation(2));
    let elsewhere = f.token(2).await;
    for late in [offer(first, 2, b"3"), offer(second, 2, b"3")] {
        assert!(matches!(f.publish(late).await, Err(DbError::Fenced { .. })), "the home has gone elsewhere");
    }
    let too_old = f.publish(offer(elsewhere, 1, b"3")).await;
    assert!(matches!(too_old, Err(DbError::Conflict(_))), "a base from before it came there");
    assert_eq!(f.publish(offer(elsewhere, 2, b"3")).await.unwrap(), Generation(3));
    let back = f.token(1).await;
    assert!(matches!(f.publish(offer(second, 3, b"4")).await, Err(DbError::Fenced { .. })));
    assert_eq!(f.publish(offer(back, 3, b"4")).await.unwrap(), Generation(4));
}

#[tokio::test]
async fn a_follower_sees_every_public_event_once_and_in_order() {
    let f = std::sync::Arc::new(fixture().await);
    let mut follower = f.db.follow(f.org, f.session.id, 0);
    let writer = std::sync::Arc::clone(&f);
    let task = tokio::spawn(async move {
        for n in 0..50 {
            writer.say(vec![message(&n.to_string())]).await.unwrap();
        }
    });
    let mut seen = Vec::new();
    while seen.len() < 50 {
        seen.extend(follower.next().await.unwrap());
    }
    task.await.unwrap();
    for (n, (seq, event)) in seen.iter().enumerate() {
        assert_eq!(*seq, n as u64 + 1);
        assert_eq!(event["content"][0]["text"], n.to_string());
    }
}

#[tokio::test]
async fn a_second_covey_on_the_same_file_and_a_newer_schema_are_refused_in_words() {
    let f = fixture().await;
    let path = f._dir.path().join("covey.db");
    let refused = Db::open(&path).unwrap_err().to_string();
    assert!(refused.contains("in use"), "{refused}");
    let other = f._dir.path().join("newer.db");
    Connection::open(&other).unwrap().pragma_update(None, "user_version", 99).unwrap();
    let refused = Db::open(&other).unwrap_err().to_string();
    assert!(refused.contains("schema 99") && refused.contains("newer covey"), "{refused}");
}

#[tokio::test]
async fn what_was_acknowledged_is_there_after_reopening() {
    let f = fixture().await;
    f.say(vec![message("kept")]).await.unwrap();
    let Fixture { _dir: dir, db, org, session } = f;
    let path = dir.path().join("covey.db");
    drop(db);
    // The writer thread ends on its own; the lock is released with the last handle.
    let db = Db::open(&path).unwrap();
    let records = db.read("r", move |read| journal::since(read, org, session.id, 0, 10)).await.unwrap();
    assert_eq!(records.len(), 1);
}

#[tokio::test]
async fn nothing_crosses_the_border_of_an_org() {
    let f = fixture().await;
    let (stranger, id, home) = (OrgId::from_uuid(Uuid::now_v7()), f.session.id, f.session.home);
    let foreign = f.db.read("g", move |read| sessions::get(read, stranger, id)).await;
    assert!(matches!(foreign, Err(DbError::NotFound { .. })));
    let foreign = f.db.read("h", move |read| homes::get(read, stranger, home)).await;
    assert!(matches!(foreign, Err(DbError::NotFound { .. })));
    let foreign =
        f.db.write("s", move |tx| journal::append_user_events(tx, stranger, id, &[message("x")])).await;
    assert!(matches!(foreign, Err(DbError::NotFound { .. })));
    assert!(f.all().await.is_empty());
}

#[tokio::test]
async fn a_token_opens_its_org_until_it_is_revoked_and_its_secret_is_stored_nowhere() {
    let f = fixture().await;
    let org = f.org;
    let (token, secret) = f.db.write("t", move |tx| tokens::create(tx, org, "ci")).await.unwrap();
    let verify = async |secret: String| f.db.read("v", move |r| tokens::verify(r, &secret)).await.unwrap();
    assert_eq!(verify(secret.clone()).await, Some((org, token.id)));
    assert_eq!(verify(format!("{secret}0")).await, None);
    let file = std::fs::read(f._dir.path().join("covey.db-wal")).unwrap();
    assert!(!file.windows(secret.len()).any(|w| w == secret.as_bytes()));
    f.db.write("r", move |tx| tokens::revoke(tx, org, token.id)).await.unwrap();
    assert_eq!(verify(secret).await, None);
}

#[tokio::test]
async fn lists_come_in_pages_and_filters_hold() {
    let f = fixture().await;
    let org = f.org;
    for _ in 0..4 {
        f.db.write("n", move |tx| new_session(tx, org)).await.unwrap();
    }
    let list = async |after: Option<SessionId>, statuses: Vec<covey_types::SessionStatus>| {
        let filter = sessions::SessionFilter { statuses, ..Default::default() };
        let page = Page { after, limit: 2, order: Order::Ascending };
        f.db.read("l", move |r| sessions::list(r, org, &filter, &page)).await.unwrap()
    };
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        let page = list(after, vec![]).await;
        let Some(last) = page.last() else { break };
        after = Some(last.id);
        seen.extend(page.into_iter().map(|s| s.id));
    }
    assert_eq!(seen.len(), 5);
    assert!(seen.is_sorted());
    assert_eq!(list(None, vec![covey_types::SessionStatus::Running]).await, []);
}
