//! The drivers against a world that dies: a fake runner whose state outlives links and servers, a fake model
//! that checks every request, and a crash at any await. No call runs twice, nothing acknowledged is lost, and
//! every session comes to rest.

#![expect(clippy::unwrap_used, reason = "the whole file is a test")]

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use covey_harness::record::{Body, Confirmation, Record, StopReason};
use covey_harness::verify::{check_answer_kept, check_prefix, check_request};
use covey_server::db::Db;
use covey_server::db::journal::UserEvent;
use covey_server::db::sessions::NewSession;
use covey_server::drive::{Context, supervise};
use covey_server::link::{Links, Trust, serve};
use covey_server::model::{Model, ModelAnswer, ModelCall, ModelDelta, ModelFailure, ModelRequest};
use covey_types::{
    ByteCount, FencingToken, Generation, HomeId, OrgId, RootHash, SandboxId, SandboxState, SessionId,
    SessionStatus, SnapshotKind, StepId,
};
use covey_wire::frame::{Decoder, encode};
use covey_wire::runner::{HomeSource, PublishOutcome, RunnerToServer, ServerToRunner, ToolLoss};
use covey_wire::tool::ToolResult;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Model answers with calls before the model ends its turn.
const ROUNDS: usize = 6;
/// A run that takes longer is stuck; an undisturbed one takes a few milliseconds.
const STUCK_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kill {
    Server,
    Link,
    Sandbox,
    Host,
}

/// Counts what happens and says when something dies.
struct Fate {
    ticks: u64,
    plan: VecDeque<(u64, Kill)>,
    deaths: mpsc::UnboundedSender<Kill>,
    random: u64,
}

impl Fate {
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    /// One event; true when something dies at it.
    fn tick(&mut self) -> bool {
        self.ticks += 1;
        let due = self.plan.front().is_some_and(|(at, _)| *at <= self.ticks);
        if due && let Some((_, kill)) = self.plan.pop_front() {
            self.deaths.send(kill).unwrap();
        }
        due
    }
}

#[derive(Default)]
struct Host {
    sandbox: Option<SandboxId>,
    token: FencingToken,
    source: Option<HomeSource>,
    running: VecDeque<StepId>,
    results: HashMap<StepId, ToolResult>,
    started: HashMap<StepId, SandboxId>,
    /// How often each call ran: the witness.
    runs: HashMap<StepId, u32>,
    /// The home: which calls left their mark.
    home: Vec<StepId>,
    generation: Generation,
    /// The store: what each offered root holds.
    store: HashMap<RootHash, Vec<StepId>>,
    offer: Option<RunnerToServer>,
    last: Option<StepId>,
}

struct World {
    fate: Mutex<Fate>,
    host: Mutex<Host>,
    home: HomeId,
    /// Tells the runner's current link that a sandbox died; replaced to break the link.
    notices: Mutex<mpsc::UnboundedSender<SandboxId>>,
}

fn fresh_sandbox() -> SandboxId {
    SandboxId::from_uuid(Uuid::now_v7())
}

impl World {
    fn host(&self) -> MutexGuard<'_, Host> {
        self.host.lock().unwrap()
    }

    fn tick(&self) -> bool {
        self.fate.lock().unwrap().tick()
    }

    fn kill(&self, kill: Kill) {
        let mut host = self.host();
        match kill {
            Kill::Server | Kill::Link => {}
            Kill::Sandbox | Kill::Host => {
                host.running.clear();
                host.sandbox = None;
                host.source = Some(HomeSource::Kept);
                if kill == Kill::Host {
                    host.results.clear();
                    host.offer = None;
                    host.started.clear();
                    host.source = Some(HomeSource::Materialized);
                }
            }
        }
    }

    /// What the runner answers.
    fn answer(&self, message: ServerToRunner) -> Vec<RunnerToServer> {
        let mut host = self.host();
        let home = self.home;
        match message {
            ServerToRunner::WakeHome { token, generation, root, .. } => {
                host.token = host.token.max(token);
                if host.sandbox.is_none() && host.source == Some(HomeSource::Materialized) {
                    host.home = root.map_or_else(Vec::new, |root| host.store[&root].clone());
                }
                host.generation = generation;
                let source = if host.sandbox.is_some() {
                    HomeSource::Adopted
                } else {
                    host.source.unwrap_or(HomeSource::Empty)
                };
                let sandbox = *host.sandbox.get_or_insert_with(fresh_sandbox);
                vec![RunnerToServer::HomeReady {
                    home,
                    token,
                    sandbox,
                    generation,
                    source,
                    set_aside: None,
                    gaps: Default::default(),
                    elapsed_ms: 1,
                }]
            }
            ServerToRunner::RunTool { token, sandbox, call, .. } => {
                assert!(token <= host.token, "a call under a token that was never announced");
                let step = call.step;
                if host.started.contains_key(&step) {
                    return report(&host, home, step, sandbox);
                }
                if host.sandbox != Some(sandbox) {
                    return vec![lost(home, step, ToolLoss::NeverStarted)];
                }
                host.started.insert(step, sandbox);
                *host.runs.entry(step).or_default() += 1;
                host.home.push(step);
                host.running.push_back(step);
                vec![RunnerToServer::ToolStarted { home, step }]
            }
            ServerToRunner::QueryTool { step, sandbox, .. } => report(&host, home, step, sandbox),
            ServerToRunner::InterruptTool { step, .. } => {
                host.running.retain(|s| *s != step);
                let result = ToolResult::text("killed", true);
                host.results.insert(step, result.clone());
                done(home, step, host.sandbox, result)
            }
            ServerToRunner::AcknowledgeTool { step, .. } => {
                host.results.remove(&step);
                vec![]
            }
            ServerToRunner::PublishAnswer { root, outcome, .. } => {
                if let Some(RunnerToServer::Publish { root: offered, .. }) = &host.offer
                    && *offered == root
                {
                    host.offer = None;
                    // There is one runner, so nobody else can be in the way of a snapshot.
                    match outcome {
                        PublishOutcome::Published { generation } => host.generation = generation,
                        other => panic!("a snapshot was not published: {other:?}"),
                    }
                }
                vec![]
            }
            ServerToRunner::Welcome { .. }
            | ServerToRunner::Heartbeat
            | ServerToRunner::SecureHome { .. }
            | ServerToRunner::StopSandbox { .. }
            | ServerToRunner::ForgetHomes { .. }
            | ServerToRunner::Servers { .. } => vec![],
            ServerToRunner::Refused { reason } => panic!("{reason}"),
        }
    }

    /// One running call ends, and the home is secured when it was the last.
    fn finish_one(&self) -> Vec<RunnerToServer> {
        let mut host = self.host();
        let Some(step) = host.running.pop_front() else { return vec![] };
        let result = ToolResult::text("ok", false);
        host.results.insert(step, result.clone());
        host.last = Some(step);
        let mut said = done(self.home, step, host.sandbox, result);
        if host.running.is_empty() {
            let text: String = host.home.iter().map(ToString::to_string).collect();
            let root = RootHash::of(text.as_bytes());
            let home = host.home.clone();
            host.store.insert(root, home);
            let offer = RunnerToServer::Publish {
                home: self.home,
                token: host.token,
                base: host.generation,
                root,
                kind: SnapshotKind::Frozen,
                step: host.last,
                files: 1,
                bytes: ByteCount(1),
                stored_bytes_new: ByteCount(1),
                elapsed_ms: 1,
                epoch: 0,
            };
            host.offer = Some(offer.clone());
            said.push(offer);
        }
        said
    }

    /// A runner's whole life on one link.
    async fn run(&self, mut stream: DuplexStream, mut ended: mpsc::UnboundedReceiver<SandboxId>) {
        let hello =
            RunnerToServer::Hello { versions: (1, 1), name: "fake".into(), credential: None, homes: vec![] };
        let mut said = vec![hello];
        let mut decoder = Decoder::default();
        let mut buffer = [0; 4096];
        {
            // What was not answered on the last link is repeated.
            let host = self.host();
            for (step, result) in &host.results {
                said.extend(done(self.home, *step, host.started.get(step).copied(), result.clone()));
            }
            said.extend(host.offer.clone());
        }
        loop {
            for message in said.drain(..) {
                if stream.write_all(&encode(&message).unwrap()).await.is_err() {
                    return;
                }
            }
            let busy = !self.host().running.is_empty();
            tokio::select! {
                read = stream.read(&mut buffer) => match read {
                    Ok(n) if n > 0 => {
                        decoder.push(&buffer[..n]);
                        while let Some(message) = decoder.next().unwrap() {
                            let answers = self.answer(message);
                            self.tick();
                            said.extend(answers);
                        }
                    }
                    _ => return,
                },
                gone = ended.recv() => match gone {
                    Some(sandbox) => said.push(RunnerToServer::SandboxChanged {
                        home: self.home, sandbox, state: SandboxState::Lost, reason: "killed".into(),
                    }),
                    None => return,
                },
                () = tokio::task::yield_now(), if busy => {
                    if self.fate.lock().unwrap().random(4) == 0 {
                        self.tick();
                        said.extend(self.finish_one());
                    }
                }
            }
        }
    }
}

fn done(home: HomeId, step: StepId, sandbox: Option<SandboxId>, result: ToolResult) -> Vec<RunnerToServer> {
    let sandbox = sandbox.unwrap_or_else(fresh_sandbox);
    vec![RunnerToServer::ToolDone { home, sandbox, step, result }]
}

fn lost(home: HomeId, step: StepId, loss: ToolLoss) -> RunnerToServer {
    RunnerToServer::ToolLost { home, step, loss, reason: "the sandbox is gone".into() }
}

fn report(host: &Host, home: HomeId, step: StepId, sandbox: SandboxId) -> Vec<RunnerToServer> {
    if let Some(result) = host.results.get(&step) {
        return done(home, step, host.sandbox, result.clone());
    }
    if host.running.contains(&step) {
        return vec![RunnerToServer::ToolStarted { home, step }];
    }
    let same = host.sandbox == Some(sandbox);
    let never = same && !host.started.contains_key(&step);
    vec![lost(home, step, if never { ToolLoss::NeverStarted } else { ToolLoss::Interrupted })]
}

/// Asks for calls until the history has [`ROUNDS`] answers, and checks every request on the way.
struct FakeModel {
    world: Arc<World>,
    /// The last request of each conversation, by its first words.
    previous: Mutex<HashMap<String, Map<String, Value>>>,
    violations: Mutex<Vec<String>>,
}

impl FakeModel {
    fn check(&self, body: &Map<String, Value>) {
        let mut previous = self.previous.lock().unwrap();
        let mut violations = self.violations.lock().unwrap();
        violations.extend(check_request(body).err().map(|v| v.to_string()));
        let conversation = body["messages"][0]["content"][0]["text"].as_str().unwrap().to_owned();
        if let Some(previous) = previous.get(&conversation) {
            violations.extend(check_prefix(previous, body).err().map(|v| v.to_string()));
        }
        let rounds = rounds(body);
        if rounds > 0 {
            violations.extend(check_answer_kept(&content(rounds - 1), body).err().map(|v| v.to_string()));
        }
        previous.insert(conversation, body.clone());
    }
}

fn rounds(body: &Map<String, Value>) -> usize {
    body["messages"].as_array().unwrap().iter().filter(|m| m["role"] == "assistant").count()
}

fn content(round: usize) -> Vec<Value> {
    if round % (ROUNDS + 1) == ROUNDS {
        return vec![json!({"type": "text", "text": format!("done {round}")})];
    }
    let mut blocks = vec![json!({"type": "thinking", "thinking": "hm", "signature": format!("s{round}")})];
    let call = |n: usize| json!({"type": "tool_use", "id": format!("toolu_{round}_{n}"), "name": "bash", "input": {"command": "x"}});
    blocks.extend((0..1 + round % 3).map(call));
    blocks
}

impl Model for FakeModel {
    fn call<'a>(
        &'a self,
        request: &'a ModelRequest,
        on_delta: &'a (dyn Fn(ModelDelta) + Send + Sync),
    ) -> ModelCall<'a> {
        Box::pin(async move {
            self.check(&request.body);
            on_delta(ModelDelta::Text("…".into()));
            self.world.tick();
            tokio::task::yield_now().await;
            if self.world.fate.lock().unwrap().random(40) == 0 {
                let detail = "overloaded".to_owned();
                return Err(ModelFailure::Transient {
                    status: Some(529),
                    retry_after: None,
                    detail,
                    request_id: None,
                });
            }
            self.world.tick();
            let round = rounds(&request.body);
            let content = content(round);
            let stop_reason = if content[0]["type"] == "text" { "end_turn" } else { "tool_use" };
            Ok(ModelAnswer {
                content,
                stop_reason: stop_reason.into(),
                usage: json!({"input_tokens": 1, "output_tokens": 1}),
                model: "fake".into(),
                request_id: None,
            })
        })
    }
}

struct Run {
    _dir: tempfile::TempDir,
    db: Db,
    org: OrgId,
    session: SessionId,
    /// A second session of the same agent, on the same home.
    other: SessionId,
    world: Arc<World>,
    model: Arc<FakeModel>,
    deaths: mpsc::UnboundedReceiver<Kill>,
    /// The server with its link; aborted to crash it at whatever await it is.
    server: JoinSet<()>,
}

impl Run {
    async fn new(seed: u64, plan: Vec<(u64, Kill)>) -> Self {
        Self::with_tools(seed, plan, json!({"type": "agent_toolset_20260401"})).await
    }

    async fn with_tools(seed: u64, plan: Vec<(u64, Kill)>, toolset: Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("covey.db")).unwrap();
        let org = db.ensure_default_org().await.unwrap();
        let config = json!({"model": "fake", "tools": [toolset]});
        let new = NewSession {
            agent: db.create_agent(org, "a", &config).await.unwrap().id,
            agent_version: None,
            agent_snapshot: None,
            environment: db.create_environment(org, "e", &json!({})).await.unwrap().id,
            title: None,
            metadata: json!({}),
            extra: json!({}),
        };
        let session = db.create_session(org, &new, vec![]).await.unwrap();
        let other = db.create_session(org, &new, vec![]).await.unwrap().id;
        let (deaths_in, deaths) = mpsc::unbounded_channel();
        let fate = Fate { ticks: 0, plan: plan.into(), deaths: deaths_in, random: seed * 2 + 1 };
        let world = Arc::new(World {
            fate: Mutex::new(fate),
            host: Mutex::default(),
            home: session.home,
            notices: Mutex::new(mpsc::unbounded_channel().0),
        });
        let model = Arc::new(FakeModel {
            world: Arc::clone(&world),
            previous: Mutex::default(),
            violations: Mutex::default(),
        });
        let server = JoinSet::new();
        Self { _dir: dir, db, org, session: session.id, other, world, model, deaths, server }
    }

    async fn start_server(&mut self) {
        self.db.take_over().await.unwrap();
        let links = Links::new(self.db.clone());
        let model: Arc<dyn Model> = Arc::clone(&self.model) as _;
        let context = Context::new(self.db.clone(), model, links.clone());
        self.server.spawn(async move { supervise(context, CancellationToken::new()).await.unwrap() });
        self.connect(links);
    }

    fn connect(&mut self, links: Links) {
        let (world, org) = (Arc::clone(&self.world), self.org);
        self.server.spawn(async move {
            loop {
                let (ours, theirs) = tokio::io::duplex(512);
                let (notices, noticed) = mpsc::unbounded_channel();
                *world.notices.lock().unwrap() = notices;
                let stop = CancellationToken::new();
                let link = serve(theirs, &links, Trust::InProcess(org), &stop);
                // Both sides to their end: each sees that the other one is gone.
                tokio::join!(link, world.run(ours, noticed));
            }
        });
    }

    async fn crash_server(&mut self) {
        self.server.abort_all();
        while self.server.join_next().await.is_some() {}
    }

    async fn say(&self, text: &str) {
        self.say_to(self.session, text).await;
    }

    async fn say_to(&self, id: SessionId, text: &str) {
        let org = self.org;
        let content = vec![json!({"type": "text", "text": text})];
        let event = UserEvent { body: Body::UserMessage { content }, dedup: Some(text.into()) };
        self.db.append_user_events(org, id, vec![event]).await.unwrap();
    }

    /// Answers what the session waits for, every fifth with a no; false when it waits for nothing.
    async fn answer(&self, answered: &mut u64) -> bool {
        let records = self.records().await;
        let last = records.iter().rev().find(|record| record.body.status().is_some());
        let Some(Body::StatusIdle { stop_reason: StopReason::RequiresAction { event_ids } }) =
            last.map(|record| &record.body)
        else {
            return false;
        };
        for call in event_ids {
            *answered += 1;
            let result = if answered.is_multiple_of(5) { Confirmation::Deny } else { Confirmation::Allow };
            let body = Body::UserToolConfirmation { tool_use_id: *call, result, deny_message: None };
            let event = UserEvent { body, dedup: None };
            self.db.append_user_events(self.org, self.session, vec![event]).await.unwrap();
        }
        true
    }

    async fn records(&self) -> Vec<Record> {
        self.records_of(self.session).await
    }

    async fn records_of(&self, id: SessionId) -> Vec<Record> {
        let org = self.org;
        self.db.records(org, id, 0, 100_000).await.unwrap()
    }

    /// Lets everything happen until the session is idle, with nothing waiting.
    async fn until_idle(&mut self) {
        let mut grown = self.db.feed().watch(self.session);
        loop {
            grown.mark_unchanged();
            let id = self.session;
            let open = self.db.sessions_needing_driver(Some(id)).await.unwrap();
            if open.is_empty() {
                return;
            }
            tokio::select! {
                changed = grown.changed() => changed.unwrap(),
                Some(kill) = self.deaths.recv() => self.die(kill).await,
            }
        }
    }

    async fn die(&mut self, kill: Kill) {
        let sandbox = self.world.host().sandbox;
        self.world.kill(kill);
        match kill {
            Kill::Sandbox => {
                if let Some(sandbox) = sandbox {
                    // Not told when the link has just ended; on the next one the server asks.
                    self.world.notices.lock().unwrap().send(sandbox).unwrap_or_default();
                }
            }
            // The runner's half of the link ends when nobody can tell it anything any more.
            Kill::Link => *self.world.notices.lock().unwrap() = mpsc::unbounded_channel().0,
            Kill::Server | Kill::Host => {
                self.crash_server().await;
                self.start_server().await;
            }
        }
    }
}

/// What must hold whatever died.
fn check(records: &[Record], world: &World, violations: &[String], seed: u64) {
    let host = world.host();
    assert_eq!(violations, &[] as &[String], "seed {seed}");
    assert!(records.iter().zip(1..).all(|(r, n)| r.seq == n), "seed {seed}: the journal has a gap");
    let mut results: HashMap<StepId, (bool, &Vec<Value>)> = HashMap::new();
    let mut calls = Vec::new();
    for record in records {
        match &record.body {
            Body::ToolUse { step, .. } => calls.push(*step),
            Body::ToolResult { step, substitute, content, .. } => {
                assert!(results.insert(*step, (*substitute, content)).is_none(), "seed {seed}: two results");
            }
            Body::UserMessage { .. } => assert!(record.processed_at.is_some(), "seed {seed}: a lost message"),
            _ => {}
        }
    }
    for step in calls {
        let runs = host.runs.get(&step).copied().unwrap_or(0);
        let (substitute, _) = results.get(&step).unwrap_or_else(|| panic!("seed {seed}: no result"));
        assert!(runs <= 1, "seed {seed}: {step} ran {runs} times");
        assert!(runs == 1 || *substitute, "seed {seed}: a result without a run");
    }
}

fn count(records: &[Record], kind: &str) -> usize {
    records.iter().filter(|r| r.body.kind() == kind).count()
}

async fn run_with(seed: u64, plan: Vec<(u64, Kill)>) -> (Vec<Record>, usize) {
    let mut run = Run::new(seed, plan).await;
    let going = async {
        run.say("first").await;
        run.start_server().await;
        run.until_idle().await;
        run.say("second").await;
        run.until_idle().await;
    };
    if tokio::time::timeout(STUCK_AFTER, going).await.is_err() {
        let kinds: Vec<_> = run.records().await.iter().map(|r| r.body.kind()).collect();
        panic!("seed {seed}: stuck after {kinds:?}");
    }
    run.crash_server().await;
    let records = run.records().await;
    check(&records, &run.world, &run.model.violations.lock().unwrap(), seed);
    let ends = records
        .iter()
        .filter(|r| matches!(r.body, Body::StatusIdle { stop_reason: StopReason::EndTurn }))
        .count();
    assert_eq!(ends, 2, "seed {seed}: {:?}", records.iter().map(|r| r.body.kind()).collect::<Vec<_>>());
    let substitutes =
        records.iter().filter(|r| matches!(r.body, Body::ToolResult { substitute: true, .. })).count();
    (records, substitutes)
}

#[tokio::test]
async fn without_losses_every_call_has_its_own_result_and_every_state_is_secured() {
    let (records, substitutes) = run_with(1, vec![]).await;
    assert_eq!(substitutes, 0);
    let secured = records.iter().any(|r| matches!(r.body, Body::HomeSecured { changed: true, .. }));
    assert!(secured);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_dies_and_whenever_no_call_runs_twice_and_every_session_comes_to_rest() {
    let kinds = [Kill::Server, Kill::Sandbox, Kill::Link, Kill::Host];
    let (mut interrupted, mut rolled_back, mut unlinked) = (0, 0, 0);
    for seed in 1..=60_u64 {
        let mut random = Fate {
            ticks: 0,
            plan: VecDeque::new(),
            deaths: mpsc::unbounded_channel().0,
            random: seed * 77 + 5,
        };
        let mut at = 0;
        let plan = (0..1 + seed % 5)
            .map(|_| {
                at += 1 + random.random(25);
                (at, kinds[random.random(4) as usize])
            })
            .collect();
        let (records, substitutes) = run_with(seed, plan).await;
        interrupted += substitutes;
        rolled_back += count(&records, "home_rolled_back");
        unlinked += count(&records, "runner.lost");
    }
    // Otherwise no kill hit when it hurts, and the test tests nothing.
    assert!(interrupted > 0 && rolled_back > 0 && unlinked > 0, "{interrupted} {rolled_back} {unlinked}");
}

#[tokio::test]
async fn with_no_runner_calls_wait_visibly_and_run_when_one_comes() {
    let mut run = Run::new(3, vec![]).await;
    run.say("first").await;
    let links = Links::new(run.db.clone());
    let context = Context::new(run.db.clone(), Arc::clone(&run.model) as Arc<dyn Model>, links.clone());
    run.server.spawn(async move { supervise(context, CancellationToken::new()).await.unwrap() });
    let mut follower = run.db.follow(run.org, run.session, 0);
    let waited = async {
        loop {
            let events = follower.next().await.unwrap();
            if events.iter().any(|(_, e)| e["type"] == "sandbox.waiting") {
                return;
            }
        }
    };
    tokio::time::timeout(STUCK_AFTER, waited).await.expect("the wait is visible");
    run.connect(links);
    tokio::time::timeout(STUCK_AFTER, run.until_idle()).await.expect("runs when a runner comes");
    check(&run.records().await, &run.world, &run.model.violations.lock().unwrap(), 3);
}

#[tokio::test]
async fn an_interrupt_ends_the_turn_and_kills_what_runs() {
    let mut run = Run::new(5, vec![]).await;
    run.say("first").await;
    run.start_server().await;
    let mut follower = run.db.follow(run.org, run.session, 0);
    let called =
        async { while !follower.next().await.unwrap().iter().any(|(_, e)| e["type"] == "agent.tool_use") {} };
    tokio::time::timeout(STUCK_AFTER, called).await.expect("a call");
    let (org, id) = (run.org, run.session);
    let event = UserEvent { body: Body::UserInterrupt {}, dedup: None };
    run.db.append_user_events(org, id, vec![event]).await.unwrap();
    tokio::time::timeout(STUCK_AFTER, run.until_idle()).await.expect("comes to rest");
    let row = run.db.session(org, id).await.unwrap();
    assert_eq!(row.status, SessionStatus::Idle);
    run.say("go on").await;
    tokio::time::timeout(STUCK_AFTER, run.until_idle()).await.expect("goes on");
    check(&run.records().await, &run.world, &run.model.violations.lock().unwrap(), 5);
}

#[tokio::test]
async fn two_sessions_of_one_agent_take_turns_on_its_home() {
    let mut run = Run::new(9, vec![]).await;
    run.say_to(run.session, "first").await;
    run.say_to(run.other, "other").await;
    run.start_server().await;
    let idle = async |id| {
        let mut follower = run.db.follow(run.org, id, 0);
        while !follower.next().await.unwrap().iter().any(|(_, e)| e["type"] == "session.status_idle") {}
    };
    let both = async { tokio::join!(idle(run.session), idle(run.other)) };
    tokio::time::timeout(STUCK_AFTER, both).await.expect("both come to rest");
    let violations = run.model.violations.lock().unwrap().clone();
    let mut waited = 0;
    for id in [run.session, run.other] {
        let records = run.records_of(id).await;
        check(&records, &run.world, &violations, 9);
        waited += count(&records, "sandbox.waiting");
    }
    assert!(waited > 0, "neither waited: they acted on one home at the same time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_ask_run_once_after_the_answer_whatever_dies_in_between() {
    let toolset = || json!({"type": "agent_toolset_20260401", "default_config": {"permission_policy": {"type": "always_ask"}}});
    let kinds = [Kill::Server, Kill::Sandbox, Kill::Link, Kill::Host];
    let (mut ran, mut denied) = (0, 0);
    for seed in 1..=20_u64 {
        let plan =
            (0..1 + seed % 4).map(|n| (3 + n * (5 + seed % 7), kinds[(seed + n) as usize % 4])).collect();
        let mut run = Run::with_tools(seed, plan, toolset()).await;
        let mut answered = 0;
        let going = async {
            run.say("first").await;
            run.start_server().await;
            loop {
                run.until_idle().await;
                // What rests has no driver that could act meanwhile: the server may as well be another one.
                run.crash_server().await;
                run.start_server().await;
                run.until_idle().await;
                if !run.answer(&mut answered).await {
                    return;
                }
            }
        };
        let going = tokio::time::timeout(STUCK_AFTER, going).await;
        let records = run.records().await;
        let kinds: Vec<_> = records.iter().map(|record| record.body.kind()).collect();
        assert!(going.is_ok(), "seed {seed}: stuck after {kinds:?}");
        run.crash_server().await;
        check(&records, &run.world, &run.model.violations.lock().unwrap(), seed);
        assert_eq!(
            count(&records, "agent.tool_use") as u64,
            answered,
            "seed {seed}: each asked once: {kinds:?}"
        );
        ran += run.world.host().runs.values().sum::<u32>();
        let was_denied = |record: &&Record| matches!(&record.body, Body::ToolResult { content, .. } if content[0]["text"].as_str().unwrap_or_default().contains("denied"));
        denied += records.iter().filter(was_denied).count();
    }
    assert!(ran > 20 && denied > 0, "{ran} {denied}");
}
