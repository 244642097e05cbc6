//! What goes with an agent.

use std::fs;

use covey_home::verify;

use super::world::{World, noise};

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_had_goes_with_it_and_what_others_need_stays() {
    let world = World::new().await;
    let (one, two) = (world.worker("one").await, world.worker("two").await);
    let shared = noise(1, 3 << 20);
    for (worker, seed) in [(&one, 2), (&two, 3)] {
        fs::write(worker.dir.join("shared"), &shared).unwrap();
        fs::write(worker.dir.join("own"), noise(seed, 5 << 20)).unwrap();
    }
    let first = world.publish(&one).await;
    let second = world.publish(&two).await;
    assert_eq!(world.collect().await.packs.packs_removed, 0, "everything is needed");
    let (org, agent, home, session) = (world.org, one.agent, one.home, one.session);
    let busy = world.db.delete_agent(org, agent).await.unwrap_err().to_string();
    assert!(busy.contains("at work"), "{busy}");
    world.db.release_home(org, home, session).await.unwrap();
    let deleted = world.db.delete_agent(org, agent).await.unwrap();
    assert_eq!((deleted.sessions, deleted.snapshots), (1, 1));
    let done = world.collect().await;
    let freed = done.packs.freed_bytes;
    assert!((5 << 20..6 << 20).contains(&freed), "its own five megabytes, and not the shared three: {freed}");
    world.comes_back(&two, second);
    let store = world.store();
    assert!(!verify(&store, &first).unwrap().problems.is_empty(), "what nobody names is gone");
    assert_eq!(world.collect().await.packs.freed_bytes, 0, "there is nothing left to do");
    let last = world.db.last_collection(org).await.unwrap().unwrap();
    assert_eq!(last.report["freed_bytes"], 0);
}
