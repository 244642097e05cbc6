//! Homes: leases, the pointer, what a runner reports.

use covey_db::homes::Claim;
use covey_db::leases::Rest;
use covey_db::snapshots::{Origin, Publish, Published, Replacement};
use covey_db::{DbError, Result};
use covey_harness::record::Body;
use covey_types::{Fault, FencingToken, Generation, HomeId, RootHash, RunnerId, SessionId, SnapshotKind};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{World, fresh_step, new_session, result_of};

pub(crate) fn offer(token: FencingToken, base: u64, of: &[u8]) -> Publish {
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

pub(crate) fn runner(number: u128) -> RunnerId {
    RunnerId::from_uuid(Uuid::from_u128(number))
}

impl World {
    pub(crate) async fn claim_home(&self, session: SessionId, by: u128) -> Claim {
        self.db.claim_home(self.org, self.session.home, session, None, runner(by)).await.unwrap()
    }

    pub(crate) async fn token(&self, by: u128) -> FencingToken {
        match self.claim_home(self.session.id, by).await {
            Claim::Granted(token) => token,
            held => panic!("{held:?}"),
        }
    }

    pub(crate) async fn release(&self) {
        self.other.release_home(self.org, self.session.home, self.session.id).await.unwrap();
    }

    pub(crate) async fn offer(&self, publish: Publish) -> Result<Published> {
        self.db.publish(self.session.home, &publish).await
    }

    pub(crate) async fn publish(&self, publish: Publish) -> Result<Generation> {
        self.offer(publish).await.map(|published| match published {
            Published::Current(generation) => generation,
            other => panic!("{other:?}"),
        })
    }

    pub(crate) async fn import(&self, base: u64) -> Result<Generation> {
        self.import_into(self.session.home, base).await
    }

    pub(crate) async fn import_into(&self, home: HomeId, base: u64) -> Result<Generation> {
        let with = Replacement {
            base: Some(Generation(base)),
            root: RootHash::of(b"imported"),
            files: 0,
            bytes: 0,
            epoch: Some(0),
            origin: Origin::Imported,
            from: None,
            over_unsecured: false,
        };
        self.db.replace_home(self.org, home, &with).await
    }
}

pub(crate) async fn publish_checks_token_and_base_and_moves_the_pointer_with_the_journal(f: &World) {
    let (org, home, session) = (f.org, f.session.home, f.session.id);
    let token = f.token(1).await;
    assert_eq!(f.publish(offer(token, 0, b"1")).await.unwrap(), Generation(1));
    // The same again: the answer was lost.
    assert_eq!(f.publish(offer(token, 0, b"1")).await.unwrap(), Generation(1));
    assert!(matches!(f.publish(offer(token, 7, b"2")).await, Err(DbError::Conflict(_))));
    assert!(matches!(f.publish(offer(token.next(), 1, b"2")).await, Err(DbError::Fenced { .. })));
    let other = new_session(&f.db, org).await.unwrap().id;
    assert_eq!(f.claim_home(other, 1).await, Claim::HeldBy(session));
    assert!(matches!(f.import(1).await, Err(DbError::Conflict(_))), "the lease is held");
    f.release().await;
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
    let rows = f.other.list_snapshots(org, home, None, 10).await.unwrap();
    assert_eq!(rows.iter().map(|s| s.snapshot.generation.0).collect::<Vec<_>>(), [3, 2, 1]);
    assert_eq!(rows[1].session, Some(session));
    let rows = f.db.list_snapshots(org, home, Some(Generation(3)), 1).await.unwrap();
    assert_eq!(rows.iter().map(|s| s.snapshot.generation.0).collect::<Vec<_>>(), [2]);
    let nowhere = f.db.publish(HomeId::from_uuid(Uuid::now_v7()), &offer(token, 0, b"1")).await;
    assert!(matches!(nowhere, Err(DbError::NotFound { .. })));
}

pub(crate) async fn a_runner_may_publish_late_for_as_long_as_the_home_has_not_gone_to_another_one(f: &World) {
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

pub(crate) async fn of_two_sessions_that_claim_one_home_at_once_one_gets_it(f: &World) {
    let rival = new_session(&f.db, f.org).await.unwrap().id;
    for _ in 0..20 {
        let (one, two) = tokio::join!(
            f.db.claim_home(f.org, f.session.home, f.session.id, None, runner(1)),
            f.other.claim_home(f.org, f.session.home, rival, None, runner(1)),
        );
        let winner = match (one.unwrap(), two.unwrap()) {
            (Claim::Granted(_), Claim::HeldBy(holder)) if holder == f.session.id => f.session.id,
            (Claim::HeldBy(holder), Claim::Granted(_)) if holder == rival => rival,
            both => panic!("{both:?}"),
        };
        let home = f.db.home(f.org, f.session.home).await.unwrap();
        assert_eq!((home.lease_session, home.lease_held), (Some(winner), true));
        f.other.release_session(f.org, winner, 0, Rest::Idle).await.unwrap();
    }
    assert_eq!(f.db.home(f.org, f.session.home).await.unwrap().lease_token, FencingToken(20));
    let span = f.db.home_span(f.org, f.session.id).await.unwrap();
    assert_eq!((span.0, span.2), (f.session.home, None));
}

pub(crate) async fn two_publishes_at_once_never_share_a_generation(f: &World) {
    let token = f.token(1).await;
    let mut tasks = JoinSet::new();
    for writer in 0..4_u8 {
        let db = if writer % 2 == 0 { f.db.clone() } else { f.other.clone() };
        let home = f.session.home;
        tasks.spawn(async move {
            let mut taken = Vec::new();
            for n in 0..10_u8 {
                match db.publish(home, &offer(token, 0, &[writer, n])).await.unwrap() {
                    Published::Current(generation) => taken.push(generation.0),
                    other => panic!("{other:?}"),
                }
            }
            taken
        });
    }
    let mut taken: Vec<u64> = tasks.join_all().await.into_iter().flatten().collect();
    taken.sort_unstable();
    assert_eq!(taken, (1..=40).collect::<Vec<_>>());
    let home = f.db.home(f.org, f.session.home).await.unwrap();
    let newest = f.db.list_snapshots(f.org, home.id, None, 1).await.unwrap();
    assert_eq!((home.generation, home.root), (Generation(40), Some(newest[0].snapshot.root)));
    assert_eq!(f.all().await.len(), 40, "each is in the journal");
}

pub(crate) async fn a_secure_that_failed_is_told_and_remembered(f: &World) {
    f.token(1).await;
    f.db.note_secure_failed(f.session.home, Fault::Retry, "the disk is away").await.unwrap();
    f.other.mark_home_unsecured(f.org, f.session.home, "still away").await.unwrap();
    let unsecured = f.db.home(f.org, f.session.home).await.unwrap().unsecured.unwrap();
    assert_eq!(unsecured.reason, "still away");
    let session = f.other.session(f.org, f.session.id).await.unwrap();
    assert_eq!(session.unsecured, Some(unsecured));
    assert_eq!(f.kinds().await, ["home.secure_failed"]);
    let nowhere = f.db.note_secure_failed(HomeId::from_uuid(Uuid::now_v7()), Fault::Retry, "x").await;
    assert!(matches!(nowhere, Err(DbError::NotFound { .. })));
}

pub(crate) async fn a_result_is_known_once_it_is_in_the_journal(f: &World) {
    let (home, step) = (f.session.home, fresh_step());
    assert!(f.db.is_result_known(home, step).await.unwrap(), "nobody waits for it");
    f.token(1).await;
    assert!(!f.other.is_result_known(home, step).await.unwrap());
    let epoch = f.claim().await;
    f.append(epoch, vec![result_of(step)]).await.unwrap();
    assert!(f.other.is_result_known(home, step).await.unwrap());
    assert!(!f.other.is_result_known(home, fresh_step()).await.unwrap());
}
