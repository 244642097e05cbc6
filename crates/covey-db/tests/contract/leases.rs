//! Leases on sessions: whose driver gives back what.

use std::time::Duration;

use covey_db::DbError;
use covey_db::homes::Claim;
use covey_db::leases::Rest;
use covey_harness::record::Body;

use super::homes::runner;
use super::{World, message, new_session};

/// Longer than anything here takes; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) async fn a_session_and_its_home_are_given_back_by_the_current_driver_alone(f: &World) {
    let (org, id, home) = (f.org, f.session.id, f.session.home);
    let old = f.claim().await;
    let new = f.other.claim_session(org, id).await.unwrap().epoch;
    assert!(matches!(f.other.claim_home(org, home, id, None, runner(1)).await.unwrap(), Claim::Granted(_)));
    let rival = new_session(&f.db, org).await.unwrap().id;
    f.db.release_session(org, id, old, Rest::Idle).await.unwrap();
    let held = f.db.claim_home(org, home, rival, None, runner(1)).await.unwrap();
    assert_eq!(held, Claim::HeldBy(id), "an overtaken driver gives nothing back");
    let refused = f.db.claim_home(org, home, id, Some(old), runner(1)).await.unwrap_err();
    assert!(matches!(refused, DbError::Fenced { .. }), "nor does it take the home: {refused}");
    assert!(matches!(f.db.claim_home(org, home, id, Some(new), runner(1)).await.unwrap(), Claim::Granted(_)));
    f.other.append(org, id, new, vec![Body::StatusRunning {}]).await.unwrap();
    f.other.release_session(org, id, new, Rest::Idle).await.unwrap();
    assert!(matches!(f.db.claim_home(org, home, rival, None, runner(1)).await.unwrap(), Claim::Granted(_)));
    f.other.release_session(org, super::no_such_session(), 1, Rest::HandedOver).await.unwrap();
}

pub(crate) async fn who_waits_for_a_home_hears_that_it_was_given_back(f: &World) {
    let mut freed = f.other.feed().freed();
    let epoch = f.claim().await;
    f.db.release_session(f.org, f.session.id, epoch, Rest::Idle).await.unwrap();
    tokio::time::timeout(PATIENCE, freed.changed()).await.expect("nobody said so").unwrap();
}

pub(crate) async fn a_session_that_was_claimed_again_needs_its_driver_until_it_rests(f: &World) {
    f.say(vec![message("a")]).await.unwrap();
    let epoch = f.claim().await;
    let needing = f.db.sessions_needing_driver(None).await.unwrap();
    assert_eq!(needing, [(f.org, f.session.id)], "its own driver may have failed");
    f.db.release_session(f.org, f.session.id, epoch, Rest::HandedOver).await.unwrap();
    assert_eq!(f.other.sessions_needing_driver(Some(f.session.id)).await.unwrap().len(), 1);
    let later = f.other.claim_session(f.org, f.session.id).await.unwrap().epoch;
    assert!(later > epoch);
    let refused = f.append(epoch, vec![Body::StatusRunning {}]).await.unwrap_err();
    assert!(matches!(refused, DbError::Fenced { .. }), "{refused}");
}

pub(crate) async fn each_record_bears_the_epoch_that_it_was_written_under(f: &World) {
    f.say(vec![message("a")]).await.unwrap();
    let first = f.claim().await;
    f.append(first, vec![Body::StatusRunning {}, Body::AgentThinking {}]).await.unwrap();
    let second = f.other.claim_session(f.org, f.session.id).await.unwrap().epoch;
    f.say(vec![message("b")]).await.unwrap();
    let epochs = f.other.epochs(f.org, f.session.id, 0, 10).await.unwrap();
    assert_eq!(epochs, [(1, 0), (2, first), (3, first), (4, second)]);
    assert_eq!(f.db.epochs(f.org, f.session.id, 2, 1).await.unwrap(), [(3, first)]);
    assert_eq!(f.db.epochs(super::no_such_org(), f.session.id, 0, 10).await.unwrap(), []);
}
