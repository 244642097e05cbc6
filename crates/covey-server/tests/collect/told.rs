//! Runners are told which homes were deleted.

use covey_server::http::{Api, serve};
use covey_server::link::{self, Links, Trust};
use covey_types::{HomeId, OrgId, StepId};
use covey_wire::frame;
use covey_wire::runner::{RunnerToServer, ServerToRunner};
use reqwest::Method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::schedule::{client, token};
use super::world::{Worker, World};

async fn hear(stream: &mut DuplexStream) -> ServerToRunner {
    loop {
        let mut length = [0; 4];
        stream.read_exact(&mut length).await.unwrap();
        let mut body = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut body).await.unwrap();
        let message = frame::decode(&body).unwrap();
        if message != ServerToRunner::Heartbeat {
            return message;
        }
    }
}

/// A runner that speaks up to `version`, welcomed.
async fn dial(links: &Links, org: OrgId, version: u32) -> DuplexStream {
    let (mut ours, theirs) = tokio::io::duplex(64 * 1024);
    let links = links.clone();
    tokio::spawn(async move {
        link::serve(theirs, &links, Trust::InProcess(org), &CancellationToken::new()).await
    });
    let name = format!("runner {version}");
    let hello = RunnerToServer::Hello { versions: (1, version), name, credential: None, homes: vec![] };
    ours.write_all(&frame::encode(&hello).unwrap()).await.unwrap();
    assert!(matches!(hear(&mut ours).await, ServerToRunner::Welcome { .. }));
    ours
}

async fn released(world: &World, worker: &Worker) {
    let (org, home, session) = (world.org, worker.home, worker.session);
    world.db.release_home(org, home, session).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn at_once_when_they_are_there_and_else_when_they_dial_in() {
    let world = World::new().await;
    let (one, two) = (world.worker("one").await, world.worker("two").await);
    let (org, links) = (world.org, Links::new(world.db.clone()));
    released(&world, &one).await;
    released(&world, &two).await;
    let agent = one.agent;
    world.db.delete_agent(org, agent).await.unwrap();
    let mut runner = dial(&links, org, 3).await;
    assert_eq!(hear(&mut runner).await, ServerToRunner::ForgetHomes { homes: vec![one.home] });

    let stop = CancellationToken::new();
    let api = Api::new(world.db.clone(), None, Some(links.clone()), stop.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/agents/{}", listener.local_addr().unwrap(), two.agent);
    let serving = tokio::spawn(async move { serve(listener, api.router(), &api).await });
    let deleted =
        client().request(Method::DELETE, url).bearer_auth(token(&world).await).send().await.unwrap();
    assert_eq!(deleted.status().as_u16(), 200);
    assert_eq!(hear(&mut runner).await, ServerToRunner::ForgetHomes { homes: vec![two.home] });
    drop(runner);

    // One that would not understand it is not told; it hears what comes after.
    let mut old = dial(&links, org, 2).await;
    let home = HomeId::from_uuid(Uuid::from_u128(1));
    let outbox = loop {
        match links.place(org, home, None).filter(|outbox| outbox.version() == 2) {
            Some(outbox) => break outbox,
            None => tokio::task::yield_now().await,
        }
    };
    links.forget(org, &[one.home]);
    let after = ServerToRunner::AcknowledgeTool { home, step: StepId::from_uuid(Uuid::from_u128(2)) };
    outbox.send(after.clone()).unwrap();
    assert_eq!(hear(&mut old).await, after);
    stop.cancel();
    serving.await.unwrap().unwrap();
}
