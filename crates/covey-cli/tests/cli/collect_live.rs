//! Agents at work, forks, restores, imports, deletions and downloads on a real server with a real runner while its store
//! is collected without a pause; only the sandboxes are the fake ones, which write files.
//!
//! Every file says which bytes it must have, and for every state that was seen the test knows which files it must have.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use covey_home::{
    Excludes, MaterializeRequest, NoProgress, PackStore, SecureReport, SecureRequest, materialize,
};
use covey_runner::sandbox::fake::{FakeBackend, FakeReply};
use covey_runner::{Dial, DialFuture, LinkStream, Runner, RunnerConfig};
use covey_server::collect::CollectConfig;
use covey_server::db::Db;
use covey_server::http::serve;
use covey_server::link::Trust;
use covey_server::model::scripted::ScriptedModel;
use covey_server::stores::Stores;
use covey_server::{Homes, RunnerGate, Server};
use covey_types::{HomeId, OrgId, RootHash, SessionId};
use covey_wire::tool::ToolResult;
use reqwest::Method;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::covey::Place;

/// Longer than anything here takes; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(120);
const WORKERS: u64 = 3;
const ROUNDS: u64 = 24;
/// Things that the model can be told to do; few, so that what was garbage comes back again and again.
const DEEDS: u64 = 12;
const SLOTS: u64 = 4;

/// Which bytes stand in which file: from slot to seed.
type Files = BTreeMap<u64, u64>;

/// Numbers that look random and are the same each time.
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % sides
    }
}

/// Bytes that do not compress, begin with their seed, and are up to 300 KB.
fn body(seed: u64) -> Vec<u8> {
    let mut dice = Dice(seed);
    let words = 2_000 + dice.throw(35_000);
    let noise = (0..words).flat_map(|_| dice.throw(u64::MAX).to_le_bytes());
    seed.to_le_bytes().into_iter().chain(noise).collect()
}

fn put(dir: &Path, slot: u64, seed: u64) {
    fs::write(dir.join(format!("f{slot}")), body(seed)).unwrap();
}

/// What a deed writes: two files, one after the other.
fn writes(deed: u64) -> [(u64, u64); 2] {
    [(deed % SLOTS, deed), (deed / SLOTS % SLOTS, deed % 5 + 100)]
}

fn script() -> ScriptedModel {
    let chapters: Vec<Value> = (0..DEEDS)
        .map(|deed| {
            let call = |(slot, seed): (u64, u64)| {
                json!({"calls": [{"name": "bash", "input": {"command": format!("{slot} {seed}")}}]})
            };
            let [first, second] = writes(deed);
            json!({"when": format!("deed {deed}."), "turns": [call(first), call(second), {"text": "done"}]})
        })
        .collect();
    let script = json!({"scripts": [{"seed": 1, "turns": [{"text": "what?"}], "chapters": chapters}]});
    ScriptedModel::new(serde_json::from_value(script).unwrap())
}

fn sandboxes() -> FakeBackend {
    FakeBackend::new(|spec, call| {
        let input: Value = serde_json::from_str(&call.input).unwrap();
        let numbers: Vec<u64> =
            input["command"].as_str().unwrap().split(' ').map(|number| number.parse().unwrap()).collect();
        put(&spec.home_dir, numbers[0], numbers[1]);
        FakeReply::Result(ToolResult::text("written", false))
    })
}

#[derive(Debug)]
struct InProcess(RunnerGate);

impl Dial for InProcess {
    fn dial(&self) -> DialFuture<'_> {
        let (ours, theirs) = tokio::io::duplex(256 * 1024);
        self.0.accept(theirs);
        Box::pin(std::future::ready(Ok(Box::new(ours) as Box<dyn LinkStream>)))
    }
}

struct World {
    dir: PathBuf,
    db: Db,
    org: OrgId,
    stores: Stores,
    http: reqwest::Client,
    url: String,
    token: String,
    /// What the states that were seen consist of.
    states: Mutex<HashMap<RootHash, Files>>,
    /// Homes that exist, for forks of what somebody else works on.
    homes: Mutex<Vec<String>>,
    /// Homes that were deleted.
    deleted: Mutex<Vec<String>>,
    environment: String,
    /// Which of the deeds succeeded, by name.
    tally: Mutex<BTreeMap<&'static str, u64>>,
}

/// An agent that its worker knows all about.
struct Agent {
    id: String,
    home: HomeId,
    session: SessionId,
    files: Files,
    history: Vec<(u64, Files)>,
}

impl World {
    async fn call(&self, method: Method, path: &str, body: Value) -> (u16, Value) {
        let request = self.http.request(method, format!("{}{path}", self.url)).bearer_auth(&self.token);
        let response = request.json(&body).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    async fn done(&self, method: Method, path: &str, body: Value) -> Value {
        let (status, answer) = self.call(method, path, body).await;
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    fn count(&self, deed: &'static str) {
        *self.tally.lock().unwrap().entry(deed).or_default() += 1;
    }

    fn store(&self) -> PackStore {
        PackStore::open_directory(&self.dir.join("store"), &self.org.to_string()).unwrap()
    }

    async fn new_session(&self, agent: &str) -> SessionId {
        let body = json!({"agent": agent, "environment_id": self.environment});
        self.done(Method::POST, "/v1/sessions", body).await["id"].as_str().unwrap().parse().unwrap()
    }

    async fn agent_of(&self, made: &Value, home: &str, files: Files) -> Agent {
        let id = made.as_str().unwrap().to_owned();
        self.homes.lock().unwrap().push(home.to_owned());
        let session = self.new_session(&id).await;
        Agent { id, home: home.parse().unwrap(), session, files, history: Vec::new() }
    }

    async fn new_agent(&self, name: &str) -> Agent {
        let tools = json!([{"type": "agent_toolset_20260401"}]);
        let made =
            self.done(Method::POST, "/v1/agents", json!({"name": name, "model": "m", "tools": tools})).await;
        self.agent_of(&made["id"], made["covey_home_id"].as_str().unwrap(), Files::new()).await
    }

    /// The home as it is, which its worker alone changes.
    async fn note(&self, agent: &mut Agent) {
        let (org, home) = (self.org, agent.home);
        let row = self.db.home(org, home).await.unwrap();
        let Some(root) = row.root else { return };
        self.states.lock().unwrap().insert(root, agent.files.clone());
        agent.history.push((row.generation.0, agent.files.clone()));
    }

    /// Waits until the turn that begins behind `after` is over and the home is secured.
    async fn secured(&self, session: SessionId, after: u64) {
        let (org, mut changed) = (self.org, self.db.feed().watch(session));
        let waits = async {
            loop {
                changed.borrow_and_update();
                let read = self.db.records(org, session, after, 1000);
                let records: Vec<Value> =
                    read.await.unwrap().iter().map(|record| serde_json::to_value(record).unwrap()).collect();
                let last = |wanted: &str| {
                    records.iter().enumerate().rfind(|(_, record)| record["body"]["type"] == wanted)
                };
                assert!(last("session.error").is_none(), "{records:?}");
                // Of the last call, and not a late one of an earlier one.
                if let (Some((done, result)), Some((idle, _)), Some((_, secured))) =
                    (last("agent.tool_result"), last("session.status_idle"), last("home.secured"))
                    && idle > done
                    && secured["body"]["step"] == result["body"]["step"]
                {
                    return;
                }
                changed.changed().await.unwrap();
            }
        };
        tokio::time::timeout(PATIENCE, waits).await.expect("the turn does not end in a secured home");
    }

    async fn work(&self, agent: &mut Agent, deed: u64) {
        let (org, session) = (self.org, agent.session);
        let before = self.db.records(org, session, 0, 100_000).await.unwrap();
        let after = before.last().map_or(0, |record| record.seq);
        let content = json!([{"type": "text", "text": format!("deed {deed}.")}]);
        let events = json!({"events": [{"type": "user.message", "content": content}]});
        self.done(Method::POST, &format!("/v1/sessions/{session}/events"), events).await;
        self.secured(session, after).await;
        agent.files.extend(writes(deed));
        self.note(agent).await;
        self.count("work");
    }

    /// Puts the home, or one file of it, back to an earlier state, if that is still kept.
    async fn restore(&self, agent: &mut Agent, dice: &mut Dice) {
        if agent.history.is_empty() {
            return;
        }
        let at = agent.history.len() - 1 - dice.throw(agent.history.len().min(4) as u64) as usize;
        let (generation, files) = agent.history[at].clone();
        let mut body = json!({"generation": generation});
        let slot = dice.throw(2 * SLOTS);
        if slot < SLOTS {
            body["path"] = format!("f{slot}").into();
        }
        let (status, answer) =
            self.call(Method::POST, &format!("/v1/covey/homes/{}/restore", agent.home), body).await;
        match status {
            200 if slot < SLOTS => agent.files.extend([(slot, files[&slot])]),
            200 => agent.files = files,
            // Forgotten, not in that state, or a late secure is on its way.
            404 | 409 => return,
            _ => panic!("{status}: {answer}"),
        }
        self.note(agent).await;
        self.count("restore");
    }

    fn secure(&self, name: &str, files: &Files) -> SecureReport {
        let dir = self.dir.join(name);
        fs::create_dir_all(&dir).unwrap();
        files.iter().for_each(|(slot, seed)| put(&dir, *slot, *seed));
        covey_home::secure(&SecureRequest {
            dir: &dir,
            store: &self.store(),
            stat_cache: None,
            excludes: &Excludes::none(),
            previous: None,
            cancel: &AtomicBool::new(false),
            progress: &NoProgress,
            threads: 1,
        })
        .unwrap()
    }

    async fn import(&self, agent: &mut Agent, dice: &mut Dice) {
        let files: Files = (0..SLOTS).map(|slot| (slot, dice.throw(5) + 100)).collect();
        let name = format!("import-{}", agent.home);
        let (org, home) = (self.org, agent.home);
        for _ in 0..20 {
            let row = self.db.home(org, home).await.unwrap();
            let report = tokio::task::block_in_place(|| self.secure(&name, &files));
            let body = json!({"root": report.root, "base_generation": row.generation, "epoch": report.epoch});
            let path = format!("/v1/covey/homes/{}/import", agent.home);
            let (status, answer) = self.call(Method::POST, &path, body).await;
            match status {
                200 => {
                    agent.files = files;
                    self.note(agent).await;
                    return self.count("import");
                }
                409 => self.count("import refused"),
                _ => panic!("{status}: {answer}"),
            }
        }
    }

    async fn fork(&self, home: &str, files: Files) -> Option<Agent> {
        let (status, answer) =
            self.call(Method::POST, &format!("/v1/covey/homes/{home}/fork"), json!({})).await;
        match status {
            200 => {
                self.count("fork");
                Some(self.agent_of(&answer["agent_id"], answer["id"].as_str().unwrap(), files).await)
            }
            404 | 409 => None,
            _ => panic!("{status}: {answer}"),
        }
    }

    async fn delete(&self, agent: Agent) -> Option<Agent> {
        let (status, answer) =
            self.call(Method::DELETE, &format!("/v1/agents/{}", agent.id), json!({})).await;
        match status {
            200 => {
                let home = agent.home.to_string();
                self.homes.lock().unwrap().retain(|known| *known != home);
                self.deleted.lock().unwrap().push(home);
                self.count("delete");
                None
            }
            409 => Some(agent),
            _ => panic!("{status}: {answer}"),
        }
    }

    /// An archive of what is current comes whole, whatever is collected meanwhile.
    async fn download(&self, agent: &Agent) {
        if agent.history.is_empty() {
            return;
        }
        let url = format!("{}/v1/covey/homes/{}/archive", self.url, agent.home);
        let response = self.http.get(url).bearer_auth(&self.token).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 200);
        let bytes = response.bytes().await.expect("the archive breaks off");
        let expected: usize = agent.files.values().map(|seed| body(*seed).len()).sum();
        assert!(bytes.len() > expected, "{} bytes of {expected}", bytes.len());
        self.count("download");
    }

    async fn worker(&self, number: u64) {
        let mut dice = Dice(number);
        let mut agents =
            vec![self.new_agent(&format!("{number}-a")).await, self.new_agent(&format!("{number}-b")).await];
        for round in 0..ROUNDS {
            let at = dice.throw(agents.len() as u64) as usize;
            match dice.throw(10) {
                0..4 => self.work(&mut agents[at], dice.throw(DEEDS)).await,
                4 => self.restore(&mut agents[at], &mut dice).await,
                5 => self.import(&mut agents[at], &mut dice).await,
                6 => {
                    let (home, files) = (agents[at].home.to_string(), agents[at].files.clone());
                    if let Some(mut forked) = self.fork(&home, files).await {
                        self.note(&mut forked).await;
                        // The origin goes at once: what both name must stay.
                        let origin = agents.swap_remove(at);
                        agents.extend(self.delete(origin).await);
                        agents.push(forked);
                    }
                }
                7 => {
                    // What somebody else is at work on, or is just deleting.
                    let known = self.homes.lock().unwrap().clone();
                    let home = known[dice.throw(known.len() as u64) as usize].clone();
                    if let Some(forked) = self.fork(&home, Files::new()).await
                        && round % 2 == 0
                    {
                        drop(self.delete(forked).await);
                    }
                }
                8 => {
                    let agent = &mut agents[at];
                    self.call(Method::POST, &format!("/v1/sessions/{}/archive", agent.session), json!({}))
                        .await;
                    agent.session = self.new_session(&agent.id.clone()).await;
                }
                _ => self.download(&agents[at]).await,
            }
        }
        for agent in &mut agents {
            self.work(agent, number).await;
        }
    }

    /// Collects until the work is done; tells how many packs went.
    async fn collect(&self, is_done: &AtomicBool, collections: &AtomicU64) -> u64 {
        let mut removed = 0;
        while !is_done.load(Ordering::SeqCst) {
            removed += self.collect_once().await["packs_removed"].as_u64().unwrap();
            collections.fetch_add(1, Ordering::SeqCst);
        }
        removed
    }

    async fn collect_once(&self) -> Value {
        let request = self.http.post(format!("{}/v1/covey/store/collect", self.url)).bearer_auth(&self.token);
        let lines = request.json(&json!({"bytes_per_second": 0})).send().await.unwrap().text().await.unwrap();
        let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
        assert_eq!(last["type"], "done", "{lines}");
        last
    }

    /// Every snapshot that the database names is put back on an empty host and is what it was.
    async fn check_every_snapshot(&self) -> usize {
        let org = self.org;
        let mut found = Vec::new();
        for home in self.db.homes_of_org(org).await.unwrap() {
            let rows = self.db.list_snapshots(org, home, None, 1000).await.unwrap();
            found.extend(rows.into_iter().map(|row| (home, row)));
        }
        let (store, target) = (self.store(), self.dir.join("target"));
        let mut known = 0;
        for (home, row) in &found {
            let root = row.snapshot.root;
            materialize(&MaterializeRequest {
                root,
                dir: &target,
                store: &store,
                stat_cache: None,
                excludes: &Excludes::none(),
                owner: None,
                cancel: &AtomicBool::new(false),
                progress: &NoProgress,
                threads: 1,
            })
            .unwrap_or_else(|error| panic!("{home} generation {}: {error}", row.snapshot.generation));
            let mut files = Files::new();
            for entry in fs::read_dir(&target).unwrap() {
                let entry = entry.unwrap();
                let (name, bytes) =
                    (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
                let seed = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                assert!(bytes == body(seed), "{home} generation {}: {name}", row.snapshot.generation);
                files.insert(name[1..].parse().unwrap(), seed);
            }
            assert_eq!(files.len() as u64, row.files);
            if let Some(expected) = self.states.lock().unwrap().get(&root) {
                assert_eq!(&files, expected, "{home} generation {}", row.snapshot.generation);
                known += 1;
            }
            fs::remove_dir_all(&target).unwrap();
        }
        assert!(known > 0 && found.len() >= known);
        found.len()
    }

    /// Runners drop their copies of what was deleted.
    async fn copies_of_the_deleted_are_gone(&self) {
        let copies = self.dir.join("runner/homes");
        let deleted = self.deleted.lock().unwrap().clone();
        assert!(!deleted.is_empty());
        let waits = async {
            while deleted.iter().any(|home| copies.join(home).exists()) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, waits).await.expect("a copy of a deleted home stays");
    }
}

#[test]
fn nothing_that_a_snapshot_names_is_lost_while_everything_happens_at_once() {
    let mut place = Place::alone();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let dir = place.path().to_owned();
    let (server, url, token, org) = runtime.block_on(async {
        let stores = Stores::in_directory(dir.join("store"), None);
        let homes = Homes {
            stores: stores.clone(),
            collect: CollectConfig { interval: Duration::ZERO, bytes_per_second: 0, recompress_bytes: 0 },
        };
        let db = Db::open(&dir.join("covey.db")).unwrap();
        let server = Server::start(db.clone(), Arc::new(script()), Some(homes)).await.unwrap();
        let org = server.default_org();
        let token = db.create_token(org, "test").await.unwrap().1;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let api = server.api().clone();
        tokio::spawn(async move { serve(listener, api.router(), &api).await });
        let config = RunnerConfig::new(dir.join("runner"), Some(dir.join("store")));
        let (runner, stop) = (Runner::new(config, Arc::new(sandboxes())).unwrap(), CancellationToken::new());
        let dial = Arc::new(InProcess(server.runner_gate(Trust::InProcess(org))));
        let running = tokio::spawn(runner.run(dial, stop.clone()));
        let roots = rustls::RootCertStore::empty();
        let tls = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let world = Arc::new(World {
            dir: dir.clone(),
            db,
            org,
            stores,
            http: reqwest::Client::builder().tls_backend_preconfigured(tls).build().unwrap(),
            url: url.clone(),
            token: token.clone(),
            states: Mutex::default(),
            homes: Mutex::default(),
            deleted: Mutex::default(),
            environment: String::new(),
            tally: Mutex::default(),
        });
        let environment = world.done(Method::POST, "/v1/environments", json!({"name": "e"})).await;
        let mut world = Arc::into_inner(world).unwrap();
        world.environment = environment["id"].as_str().unwrap().to_owned();
        let world = Arc::new(world);
        world.done(Method::PUT, "/v1/covey/rules", json!({"keep_newest": 3})).await;

        let is_done = Arc::new(AtomicBool::new(false));
        let collections = Arc::new(AtomicU64::new(0));
        let collecting = tokio::spawn({
            let (world, is_done, collections) =
                (Arc::clone(&world), Arc::clone(&is_done), Arc::clone(&collections));
            async move { world.collect(&is_done, &collections).await }
        });
        let workers: Vec<_> = (0..WORKERS)
            .map(|number| {
                let world = Arc::clone(&world);
                tokio::spawn(async move { world.worker(number).await })
            })
            .collect();
        for worker in workers {
            worker.await.unwrap();
        }
        is_done.store(true, Ordering::SeqCst);
        let removed = collecting.await.unwrap();
        let snapshots = tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(world.check_every_snapshot())
        });
        world.collect_once().await;
        let again = tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(world.check_every_snapshot())
        });
        assert!(again <= snapshots);
        world.copies_of_the_deleted_are_gone().await;
        let packs = world.stores.of(org).unwrap().verify_packs().unwrap();
        assert_eq!(packs.problems, Vec::<String>::new());
        let tally = world.tally.lock().unwrap().clone();
        let collections = collections.load(Ordering::SeqCst);
        eprintln!("{collections} collections removed {removed} packs; {snapshots} snapshots; {tally:?}");
        for deed in ["work", "restore", "import", "fork", "delete", "download"] {
            assert!(tally.get(deed).is_some_and(|count| *count > 0), "{deed}: {tally:?}");
        }
        assert!(collections > 5 && removed > 5, "{collections} collections removed {removed} packs");
        stop.cancel();
        running.await.unwrap().unwrap();
        (server, url, token, org.to_string())
    });
    // And as an operator would look.
    let store = dir.join("store");
    place.know(&url, &token, &store, &org);
    let verified = place.json(&["store", "verify", "--json"]);
    assert_eq!(verified["ok"], true, "{verified}");
    runtime.block_on(server.shutdown());
}
