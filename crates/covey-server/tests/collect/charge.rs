//! Who may collect a store, and how its epoch and the database's floor find together again.

use std::sync::Arc;

use covey_home::{PackStore, claim, meet_floor, owner};
use covey_server::collect::{CollectConfig, CollectorError};
use covey_server::model::scripted::ScriptedModel;
use covey_server::{Homes, SERVED, Server, StartError};
use covey_types::Fault;

use super::world::World;

async fn start(world: &World) -> Result<(), StartError> {
    let script = serde_json::json!({"scripts": [{"seed": 1, "turns": [{"text": "done"}]}]});
    let model = ScriptedModel::new(serde_json::from_value(script).unwrap());
    let homes = Homes { stores: world.stores.clone(), collect: CollectConfig::default() };
    Server::start(world.db.clone(), Arc::new(model), Some(homes)).await?.shutdown().await;
    Ok(())
}

fn backend(store: &PackStore) -> &dyn covey_home::backend::Backend {
    store.backend().as_ref()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_says_that_a_store_is_its_own_and_leaves_those_of_others_alone() {
    let world = World::new().await;
    start(&world).await.unwrap();
    assert_eq!(owner(backend(&world.store())).unwrap().as_deref(), Some(SERVED));
    start(&world).await.unwrap();
    let foreign = World::new().await;
    claim(backend(&foreign.store()), "the backups beside it").unwrap();
    let refused = start(&foreign).await.unwrap_err().to_string();
    assert!(refused.contains("the backups beside it") && refused.contains("gc/owner"), "{refused}");
    for dry_run in [true, false] {
        let refused = foreign.try_run(dry_run).await.unwrap_err();
        assert!(matches!(refused, CollectorError::Foreign { .. }), "{refused}");
        assert_eq!(refused.fault(), Fault::Conflict);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collection_says_it_too_for_a_store_that_could_not_be_reached_at_the_start() {
    let world = World::new().await;
    world.run(true).await;
    assert_eq!(owner(backend(&world.store())).unwrap(), None, "a dry run writes nothing");
    world.run(false).await;
    assert_eq!(owner(backend(&world.store())).unwrap().as_deref(), Some(SERVED));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_floor_above_the_stores_epoch_does_not_refuse_every_publish_for_ever() {
    let world = World::new().await;
    let (worker, org) = (world.worker("one").await, world.org);
    std::fs::write(worker.dir.join("a"), b"a").unwrap();
    // As after a restore: the database counts on, and its new store begins at zero.
    world.db.raise_collect_floor(org, 7).await.unwrap();
    let report = world.secure(&worker, &world.store());
    assert!(matches!(
        world.offer(&worker, &report).await,
        covey_server::db::snapshots::Published::Collected { floor: 7 }
    ));
    start(&world).await.unwrap();
    let root = world.publish(&worker).await;
    world.comes_back(&worker, root);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_floor_below_the_stores_epoch_is_raised_before_anything_is_published() {
    let world = World::new().await;
    let (worker, org) = (world.worker("one").await, world.org);
    std::fs::write(worker.dir.join("a"), b"a").unwrap();
    let late = world.secure(&worker, &world.store());
    // As with an older database on the same store: collections have passed that it does not know of.
    meet_floor(backend(&world.store()), 3).unwrap();
    start(&world).await.unwrap();
    let floor = world.db.collect_floor(org).await.unwrap();
    assert_eq!(floor, 3);
    assert!(matches!(
        world.offer(&worker, &late).await,
        covey_server::db::snapshots::Published::Collected { floor: 3 }
    ));
    let root = world.publish(&worker).await;
    world.comes_back(&worker, root);
}
