//! How many steps a second a journal takes, beside bare inserts of the same bytes: `bench-loop DIRECTORY [DATABASE_URL]`.
//!
//! For one session and for a hundred at once, each appends one record of 20 kB after another, on SQLite and, with a URL, on
//! PostgreSQL. In turns with it, so that both see the same load, as many tasks put the same bytes into a table without
//! anything, through the same driver: one `INSERT` and its commit each. The last line is one JSON object. `cargo xtask
//! bench loop` starts the database. What does not belong here: judging the numbers.

use std::error::Error;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use covey_db::postgres::POOL_CONNECTIONS_DEFAULT;
use covey_db::sessions::NewSession;
use covey_db::{DatabaseUrl, Db};
use covey_harness::record::Body;
use covey_types::{OrgId, SessionId};
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
use serde_json::{Value, json};
use tokio::task::JoinSet;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// One piece of one measurement; there are several of each, in turns.
const PIECE: Duration = Duration::from_secs(2);
const PIECES: usize = 3;
const PAYLOAD_BYTES: usize = 20_000;

#[tokio::main]
async fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(arguments.next().ok_or("usage: bench-loop DIRECTORY [DATABASE_URL]")?);
    let url = arguments.next();
    let mut rows = Vec::new();
    for sessions in [1, 100] {
        rows.push(on_sqlite(&dir, sessions).await?);
        if let Some(url) = &url {
            rows.push(on_postgres(url, sessions).await?);
        }
    }
    println!("{}", json!({"payload_bytes": PAYLOAD_BYTES, "rows": rows}));
    Ok(())
}

/// Word-like text, which compresses as conversations do.
fn payload(seed: u64) -> String {
    const WORDS: [&str; 16] = [
        "session", "model", "result", "return", "the", "file", "of", "step", "fn", "home", "let", "error",
        "and", "test", "value", "with",
    ];
    let (mut text, mut state) =
        (String::with_capacity(PAYLOAD_BYTES + 32), seed.wrapping_mul(2).wrapping_add(1));
    while text.len() < PAYLOAD_BYTES {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(WORDS[(state >> 60) as usize]);
        text.push_str(&format!(" {:x} ", (state >> 40) & 0xfff));
    }
    text.truncate(PAYLOAD_BYTES);
    text
}

async fn on_sqlite(dir: &Path, sessions: usize) -> Outcome<Value> {
    let db = Db::open(&dir.join(format!("loop{sessions}.db")))?;
    let ids = sessions_in(&db, sessions).await?;
    let bare = rusqlite::Connection::open(dir.join(format!("bare{sessions}.db")))?;
    bare.execute_batch(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; CREATE TABLE bare (id INTEGER PRIMARY KEY, body TEXT NOT NULL)",
    )?;
    let bare = Arc::new(Mutex::new(bare));
    let insert = move |_: usize, text: String| {
        let bare = Arc::clone(&bare);
        async move {
            let insert = move || {
                let connection = bare.lock().unwrap_or_else(PoisonError::into_inner);
                connection.prepare_cached("INSERT INTO bare (body) VALUES (?1)")?.execute([&text]).map(drop)
            };
            Ok(tokio::task::spawn_blocking(insert).await??)
        }
    };
    in_turns("sqlite", sessions, append_to(&db, ids), insert).await
}

async fn on_postgres(url: &str, sessions: usize) -> Outcome<Value> {
    let db = Db::connect(&DatabaseUrl::parse(url, Path::new("unused"))?).await?;
    let ids = sessions_in(&db, sessions).await?;
    let config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_config(url.parse()?, tokio_postgres::NoTls, config);
    let pool = Pool::builder(manager).max_size(POOL_CONNECTIONS_DEFAULT).runtime(Runtime::Tokio1).build()?;
    let make = "CREATE TABLE IF NOT EXISTS bare (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body TEXT NOT NULL)";
    let client = pool.get().await?;
    client.batch_execute(make).await?;
    // As the journal's column: the same bytes are compressed the same way.
    if let Err(error) = client.batch_execute("ALTER TABLE bare ALTER COLUMN body SET COMPRESSION lz4").await {
        eprintln!("without lz4: {error}");
    }
    drop(client);
    let insert = move |_: usize, text: String| {
        let pool = pool.clone();
        async move {
            let client = pool.get().await?;
            let statement = client.prepare_cached("INSERT INTO bare (body) VALUES ($1)").await?;
            client.execute(&statement, &[&text]).await?;
            Ok(())
        }
    };
    in_turns("postgres", sessions, append_to(&db, ids), insert).await
}

async fn sessions_in(db: &Db, count: usize) -> Outcome<(OrgId, Vec<(SessionId, u64)>)> {
    let org = db.take_over().await?;
    let new = NewSession {
        agent: db.create_agent(org, "bench", &json!({"model": "none"})).await?.id,
        agent_version: None,
        agent_snapshot: None,
        environment: db.create_environment(org, "bench", &json!({})).await?.id,
        title: None,
        metadata: json!({}),
        extra: json!({}),
    };
    let mut ids = Vec::new();
    for _ in 0..count {
        let id = db.create_session(org, &new, vec![]).await?.id;
        ids.push((id, db.claim_session(org, id).await?.epoch));
    }
    Ok((org, ids))
}

/// A write under way.
type Writing = Pin<Box<dyn Future<Output = Outcome<()>> + Send>>;

fn append_to(
    db: &Db,
    (org, ids): (OrgId, Vec<(SessionId, u64)>),
) -> impl Fn(usize, String) -> Writing + Clone + Send + 'static {
    let (db, ids) = (db.clone(), Arc::new(ids));
    move |task, reason| {
        let (db, (id, epoch)) = (db.clone(), ids[task % ids.len()]);
        Box::pin(async move {
            db.append(org, id, epoch, vec![Body::SandboxWaiting { reason }]).await?;
            Ok(())
        })
    }
}

/// What one way of writing gave.
#[derive(Debug, Default)]
struct Times {
    waits: Vec<Duration>,
    spent: Duration,
}

impl Times {
    fn json(mut self) -> (f64, Value) {
        self.waits.sort_unstable();
        let at = |permille: usize| {
            let wait = self.waits.get(self.waits.len().saturating_sub(1) * permille / 1000);
            wait.map_or(0.0, |wait| (wait.as_secs_f64() * 1e6).round() / 1e3)
        };
        let rate = self.waits.len() as f64 / self.spent.as_secs_f64();
        (
            rate,
            json!({"per_s": rate.round(), "p50_ms": at(500), "p99_ms": at(990), "count": self.waits.len()}),
        )
    }
}

async fn in_turns<A, B, FA, FB>(database: &str, tasks: usize, ours: A, bare: B) -> Outcome<Value>
where
    A: Fn(usize, String) -> FA + Clone + Send + 'static,
    B: Fn(usize, String) -> FB + Clone + Send + 'static,
    FA: Future<Output = Outcome<()>> + Send,
    FB: Future<Output = Outcome<()>> + Send,
{
    let (mut by_us, mut by_bare) = (Times::default(), Times::default());
    for _ in 0..PIECES {
        piece(tasks, ours.clone(), &mut by_us).await?;
        piece(tasks, bare.clone(), &mut by_bare).await?;
    }
    let ((rate, ours), (bare_rate, bare)) = (by_us.json(), by_bare.json());
    let ratio = (rate / bare_rate * 100.0).round() / 100.0;
    eprintln!("{database}, {tasks} sessions: {rate:.0}/s beside {bare_rate:.0}/s bare");
    Ok(json!({"database": database, "sessions": tasks, "append": ours, "bare": bare, "ratio": ratio}))
}

async fn piece<W, F>(tasks: usize, write: W, times: &mut Times) -> Outcome<()>
where
    W: Fn(usize, String) -> F + Clone + Send + 'static,
    F: Future<Output = Outcome<()>> + Send,
{
    let (began, mut writers) = (Instant::now(), JoinSet::new());
    for task in 0..tasks {
        let (write, text) = (write.clone(), payload(task as u64));
        writers.spawn(async move {
            let mut waits = Vec::new();
            while began.elapsed() < PIECE {
                let sent = Instant::now();
                write(task, text.clone()).await?;
                waits.push(sent.elapsed());
            }
            Ok::<_, Box<dyn Error + Send + Sync>>(waits)
        });
    }
    while let Some(written) = writers.join_next().await {
        times.waits.extend(written??);
    }
    times.spent += began.elapsed();
    Ok(())
}
