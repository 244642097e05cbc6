//! How long the sessions of a server that is gone wait for another one: `bench-takeover kill|partition SESSIONS DATABASE_URL`.
//!
//! A server in a process of its own gives each session a turn, in which the model never answers. Then it is killed, or the
//! way to its database is cut without either side being told. A session acts again when the other server, in this process,
//! calls the model for it: claimed, folded and asked what comes next. The last line is one JSON object. `cargo xtask bench
//! takeover` starts the database. What does not belong here: judging the numbers.

use std::collections::HashMap;
use std::error::Error;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use covey_harness::record::Body;
use covey_server::Server;
use covey_server::db::journal::UserEvent;
use covey_server::db::leases::ServerPlace;
use covey_server::db::sessions::NewSession;
use covey_server::db::{DatabaseUrl, Db};
use covey_server::model::{Model, ModelCall, ModelDelta, ModelRequest};
use serde_json::{Value, json};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinSet;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Everything is over within this time, or hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// Sessions that are made at the same time.
const MAKERS: usize = 8;

/// A model that never answers, and remembers when it was first asked for which session.
#[derive(Debug)]
struct Silent {
    asked: Mutex<HashMap<String, Instant>>,
    count: watch::Sender<usize>,
}

impl Silent {
    fn new() -> Arc<Self> {
        Arc::new(Self { asked: Mutex::default(), count: watch::Sender::new(0) })
    }

    async fn asked_for(&self, sessions: usize) -> Outcome<()> {
        let mut count = self.count.subscribe();
        tokio::time::timeout(PATIENCE, count.wait_for(|count| *count >= sessions)).await??;
        Ok(())
    }
}

impl Model for Silent {
    fn call<'a>(
        &'a self,
        request: &'a ModelRequest,
        _: &'a (dyn Fn(ModelDelta) + Send + Sync),
    ) -> ModelCall<'a> {
        // Each session's first message names it.
        let said = request.body.get("messages").and_then(|messages| messages.get(0)).map(Value::to_string);
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.entry(said.unwrap_or_default()).or_insert_with(Instant::now);
        self.count.send_replace(asked.len());
        drop(asked);
        Box::pin(std::future::pending())
    }
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [how, sessions, url] = arguments.as_slice() else {
        return Err("usage: bench-takeover kill|partition SESSIONS DATABASE_URL".into());
    };
    let count: usize = sessions.parse()?;
    match how.as_str() {
        "victim" => victim(count, url).await,
        "kill" | "partition" => measure(how == "partition", count, url).await,
        other => Err(format!("`{other}`: expected kill or partition").into()),
    }
}

async fn join(url: &str, name: &str, model: Arc<Silent>) -> Outcome<Server> {
    let db = Db::connect(&DatabaseUrl::parse(url, std::path::Path::new("unused"))?).await?;
    let place = ServerPlace { address: format!("http://{name}"), version: "bench".to_owned() };
    Ok(Server::start_among(db, model, None, &place).await?)
}

/// The server that will be gone: says `ready` when every session waits for the model.
async fn victim(count: usize, url: &str) -> Outcome<()> {
    let model = Silent::new();
    let server = join(url, "victim", Arc::clone(&model)).await?;
    let (db, org) = (server.db().clone(), server.default_org());
    let new = NewSession {
        agent: db.create_agent(org, "bench", &json!({"model": "silent"})).await?.id,
        agent_version: None,
        agent_snapshot: None,
        environment: db.create_environment(org, "bench", &json!({})).await?.id,
        title: None,
        metadata: json!({}),
        extra: json!({}),
    };
    let mut makers = JoinSet::new();
    for maker in 0..MAKERS {
        let (db, new) = (db.clone(), new.clone());
        makers.spawn(async move {
            for number in (maker..count).step_by(MAKERS) {
                let content = vec![json!({"type": "text", "text": format!("session {number}")})];
                let event = UserEvent { body: Body::UserMessage { content }, dedup: None };
                db.create_session(org, &new, vec![event]).await?;
            }
            Ok::<_, covey_server::db::DbError>(())
        });
    }
    while let Some(made) = makers.join_next().await {
        made??;
    }
    model.asked_for(count).await?;
    println!("ready");
    std::future::pending().await
}

async fn measure(by_partition: bool, count: usize, url: &str) -> Outcome<()> {
    let relay = Relay::start(url).await?;
    // The other one alone at first, or each would drive some of the sessions.
    let mut victim = start_victim(count, &relay.url).await?;
    let model = Silent::new();
    let server = join(url, "survivor", Arc::clone(&model)).await?;
    let mut servers = server.db().servers();
    tokio::time::timeout(PATIENCE, servers.wait_for(|servers| servers.len() == 2)).await??;
    let gone_at = Instant::now();
    if by_partition {
        relay.held.send_replace(true);
    } else {
        victim.start_kill()?;
    }
    model.asked_for(count).await?;
    let asked = model.asked.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut waits: Vec<Duration> = asked.values().map(|at| at.duration_since(gone_at)).collect();
    waits.sort_unstable();
    victim.kill().await?;
    drop(server);
    let at = |permille: usize| waits[(waits.len() - 1) * permille / 1000].as_millis() as u64;
    let how = if by_partition { "partition" } else { "kill" };
    println!(
        "{}",
        json!({"how": how, "sessions": waits.len(), "first_ms": at(0), "p50_ms": at(500), "p99_ms": at(990), "last_ms": at(1000)})
    );
    Ok(())
}

async fn start_victim(count: usize, url: &str) -> Outcome<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["victim", &count.to_string(), url]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut victim = command.kill_on_drop(true).spawn()?;
    let output = victim.stdout.take().ok_or("its output is captured")?;
    let line = tokio::time::timeout(PATIENCE, BufReader::new(output).lines().next_line()).await??;
    match line.as_deref() {
        Some("ready") => Ok(victim),
        other => Err(format!("the other server is not ready: {other:?}").into()),
    }
}

/// The way from the other server to the database.
struct Relay {
    url: String,
    held: watch::Sender<bool>,
    _task: JoinSet<()>,
}

impl Relay {
    async fn start(url: &str) -> Outcome<Self> {
        let (before, rest) = url.rsplit_once('@').ok_or("the URL names no user")?;
        let (address, after) = rest.split_once('/').ok_or("the URL names no database")?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("{before}@{}/{after}", listener.local_addr()?);
        let held = watch::Sender::new(false);
        let (watched, to) = (held.subscribe(), address.to_owned());
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut streams = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&to).await else { continue };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                streams.spawn(pass(from_client, to_server, watched.clone()));
                streams.spawn(pass(from_server, to_client, watched.clone()));
            }
        });
        Ok(Self { url, held, _task: task })
    }
}

async fn pass(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut held: watch::Receiver<bool>,
) {
    let mut piece = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = from.read(&mut piece).await {
        let goes_on = held.wait_for(|held| !held).await.is_ok();
        if !goes_on || to.write_all(&piece[..count]).await.is_err() {
            return;
        }
    }
}
