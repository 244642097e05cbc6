//! What becomes of homes that were deleted.

use std::path::{Path, PathBuf};

use covey_types::HomeId;
use covey_wire::runner::{RunnerToServer, ServerToRunner};
use uuid::Uuid;

use super::promises::{World, step, witness};

fn copy(dir: &Path, home: HomeId) -> PathBuf {
    dir.join("runner/homes").join(home.to_string())
}

/// What the runner answers to nothing else shows that it has come so far: another home's wake.
async fn another_home_is_ready(world: &mut World) {
    world.home = HomeId::from_uuid(Uuid::from_u128(8));
    world.wake(0, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_home_loses_its_sandbox_its_copy_and_what_was_set_aside_and_no_other_does() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::start(dir.path(), &witness(vec![])).await;
    let home = world.home;
    another_home_is_ready(&mut world).await;
    let other = std::mem::replace(&mut world.home, home);
    let (sandbox, ..) = world.wake(0, None).await;
    world.run(sandbox, step(1)).await;
    // The offer is not answered: it must not keep anything.
    world.offer().await;
    std::fs::create_dir(copy(dir.path(), home).join("aside-1")).unwrap();
    world.send(ServerToRunner::ForgetHomes { homes: vec![home] }).await;
    let gone = world.until(|message| match message {
        RunnerToServer::SandboxChanged { sandbox, reason, .. } if reason.contains("deleted") => Some(sandbox),
        _ => None,
    });
    assert_eq!(gone.await, sandbox);
    let waits = async {
        while copy(dir.path(), home).exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(super::promises::PATIENCE, waits).await.unwrap();
    assert!(copy(dir.path(), other).exists());
    // Nothing of it is offered or repeated any more.
    world.reconnect().await;
    world.home = other;
    world.token = covey_types::FencingToken(2);
    world.send(ServerToRunner::ForgetHomes { homes: vec![home] }).await;
    let wake = world.wake(0, None).await;
    assert!(wake.2.is_none());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_nobody_serves_goes_when_the_runner_dials_in() {
    let dir = tempfile::tempdir().unwrap();
    let backend = witness(vec![]);
    let mut world = World::start(dir.path(), &backend).await;
    let home = world.home;
    world.wake(0, None).await;
    world.end().await;
    assert!(copy(dir.path(), home).exists());
    let mut world = World::start(dir.path(), &backend).await;
    let unknown = HomeId::from_uuid(Uuid::from_u128(9));
    world.send(ServerToRunner::ForgetHomes { homes: vec![unknown, home] }).await;
    let waits = async {
        while copy(dir.path(), home).exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(super::promises::PATIENCE, waits).await.unwrap();
    assert!(!copy(dir.path(), unknown).exists(), "nothing is made for a home that was never here");
    let left = std::fs::read_dir(dir.path().join("runner/homes")).unwrap().count();
    assert!(left <= 1, "at most what is just being deleted");
    world.end().await;
}
