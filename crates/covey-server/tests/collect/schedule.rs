//! When and how hard it is collected, and what a client sees of it.

use std::fs;
use std::time::Duration;

use covey_home::verify;
use covey_server::collect::CollectConfig;
use covey_server::db::orgs::LastCollection;
use covey_server::http::{Api, serve};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::world::{World, noise};

/// Longer than anything here takes; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Speaks to servers of this process.
pub(crate) fn client() -> reqwest::Client {
    rustls::crypto::ring::default_provider().install_default().unwrap_or_default();
    let config = rustls::ClientConfig::builder()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    reqwest::Client::builder().tls_backend_preconfigured(config).build().unwrap()
}

/// A token of the world's org.
pub(crate) async fn token(world: &World) -> String {
    let org = world.org;
    world.db.create_token(org, "test").await.unwrap().1
}

/// A pack of which less than half is live: two megabytes of six.
async fn mostly_garbage() -> World {
    let world = World::new().await;
    let worker = world.worker("one").await;
    fs::write(worker.dir.join("a"), noise(1, 2 << 20)).unwrap();
    fs::write(worker.dir.join("b"), noise(2, 4 << 20)).unwrap();
    world.publish(&worker).await;
    fs::remove_file(worker.dir.join("b")).unwrap();
    world.publish(&worker).await;
    world
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_is_read_and_written_in_a_second_than_is_said() {
    let mut world = mostly_garbage().await;
    world.bytes_per_second = 2 << 20;
    let done = world.run(false).await;
    assert_eq!(done.packs.packs_rewritten, 1);
    // A lower bound of what six megabytes take at two in a second; however slow the machine is, it is not less.
    assert!(done.packs.elapsed_ms >= 1000, "{done:?}");
}

fn every(interval: Duration) -> CollectConfig {
    CollectConfig { interval, bytes_per_second: 0, recompress_bytes: 0 }
}

/// The report of the first collection, when there is one.
async fn first_collection(world: &World) -> LastCollection {
    let waited = tokio::time::timeout(PATIENCE, async {
        loop {
            if let Some(last) = world.db.last_collection(world.org).await.unwrap() {
                break last;
            }
            tokio::task::yield_now().await;
        }
    });
    waited.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_secures_have_written_in_haste_is_compressed_harder_as_far_as_the_limit_goes() {
    for (limit, improved) in [(1 << 30, 1), (1, 0)] {
        let world = World::new().await;
        let worker = world.worker("one").await;
        // Words of a small alphabet: what a harder search finds more of.
        let text: Vec<u8> = noise(3, 2 << 20).iter().map(|byte| b"covey"[usize::from(byte % 5)]).collect();
        fs::write(worker.dir.join("text"), text).unwrap();
        let root = world.publish(&worker).await;
        let stop = CancellationToken::new();
        let config = CollectConfig { recompress_bytes: limit, ..every(Duration::from_secs(1)) };
        let keeps = tokio::spawn(world.collector_with(config).keep_collecting(stop.clone()));
        let collected = first_collection(&world).await;
        stop.cancel();
        tokio::time::timeout(PATIENCE, keeps).await.unwrap().unwrap();
        assert_eq!(collected.report["packs_improved"], json!(improved), "{collected:?}");
        let found = verify(&world.store(), &root).unwrap();
        assert!(found.problems.is_empty(), "{found:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_due_is_collected_until_the_server_stops() {
    let world = mostly_garbage().await;
    let stop = CancellationToken::new();
    // Never when it is turned off: this returns at once.
    world.collector_with(every(Duration::ZERO)).keep_collecting(CancellationToken::new()).await;
    let often = world.collector_with(every(Duration::from_millis(1)));
    let keeps = tokio::spawn(often.keep_collecting(stop.clone()));
    let collected = first_collection(&world).await;
    assert!(collected.report["freed_bytes"].as_i64().unwrap() > 3 << 20, "{collected:?}");
    stop.cancel();
    tokio::time::timeout(PATIENCE, keeps).await.unwrap().unwrap();
    // One that has just been is not due again for a day.
    let day = Duration::from_secs(24 * 60 * 60);
    let due = world.db.orgs_to_collect(covey_server::db::now(), day).await.unwrap();
    assert_eq!(due, Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_sees_how_far_it_is_and_one_that_goes_away_ends_it() {
    let world = mostly_garbage().await;
    let stop = CancellationToken::new();
    let token = token(&world).await;
    let api = Api::new(world.db.clone(), Some(world.homes()), None, stop.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/covey/store", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move { serve(listener, api.router(), &api).await });
    let http = client();
    let ask = |method: Method, path: &str, body: Value| {
        http.request(method, format!("{url}{path}")).bearer_auth(&token).json(&body)
    };
    let before: Value = ask(Method::GET, "", json!({})).send().await.unwrap().json().await.unwrap();
    assert_eq!((&before["collected"], &before["epoch_floor"]), (&Value::Null, &json!(0)));

    // Slow enough that it could not end by itself; left after its first sign of life.
    let slow = json!({"bytes_per_second": 1 << 10});
    let mut left = ask(Method::POST, "/collect", slow).send().await.unwrap();
    let first = left.chunk().await.unwrap().unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&first).unwrap()["type"], "progress");
    let busy = ask(Method::POST, "/collect", json!({})).send().await.unwrap().text().await.unwrap();
    assert!(busy.contains("under way") && busy.contains("conflict"), "{busy}");
    drop(left);
    let lines = tokio::time::timeout(PATIENCE, async {
        loop {
            let answer = ask(Method::POST, "/collect", json!({"bytes_per_second": 3 << 20}));
            let text = answer.send().await.unwrap().text().await.unwrap();
            if !text.contains("under way") {
                break text;
            }
            tokio::task::yield_now().await;
        }
    });
    let lines: Vec<Value> =
        lines.await.unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (last, progress) = lines.split_last().unwrap();
    assert!(last["type"] == "done" && last["freed_bytes"].as_i64().unwrap() > 3 << 20, "{last}");
    assert!(!progress.is_empty() && progress.iter().all(|line| line["type"] == "progress"), "{lines:?}");
    let after: Value = ask(Method::GET, "", json!({})).send().await.unwrap().json().await.unwrap();
    assert_eq!(after["collected"]["report"]["freed_bytes"], last["freed_bytes"]);
    assert_eq!(after["epoch_floor"], 1);
    stop.cancel();
    serving.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_homes_are_remembered_for_runners_that_have_a_copy() {
    let world = World::new().await;
    let (one, two) = (world.worker("one").await, world.worker("two").await);
    let org = world.org;
    let deleted = || world.db.deleted_homes(org);
    assert_eq!(deleted().await.unwrap(), Vec::new());
    let (agent, home, session) = (one.agent, one.home, one.session);
    world.db.release_home(org, home, session).await.unwrap();
    world.db.delete_agent(org, agent).await.unwrap();
    assert_eq!(deleted().await.unwrap(), vec![home]);
    assert_ne!(home, two.home);
    // A server has noted which store the org's blocks are in.
    world.db.note_store(org, "identity").await.unwrap();
    assert!(world.db.delete_org(org).await.unwrap().was_there);
    assert_eq!(world.db.deleted_homes(org).await.unwrap(), Vec::new());
}
