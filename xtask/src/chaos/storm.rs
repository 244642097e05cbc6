//! Many sessions at once on one server or several, while servers, runner, sandboxes, the way to the database and the database
//! itself fail at random moments.
//!
//! The sessions are given work for as long as something fails. Every call appends its id to the witness file of its home, and
//! the model of the script applies the strict verifier to the whole history in every request, so a last message proves the
//! last history. What the servers once showed is acknowledged: it must be there in the end, in the same order. What does not
//! belong here: starting and ending processes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::fleet::{Backend, Client, Fleet, LEASE_SECONDS};
use super::relay::Cut;
use super::session::{Acknowledged, Verdict, is_idle, judge_calls};
use super::{Dice, FAILURES_SHOWN_MAX};

/// Calls in one turn.
const STEPS: usize = 8;
/// After the last failure, every session ends within this time, or is stuck.
const CALM_MAX: Duration = Duration::from_secs(180);
/// Preparing is tried so often; nothing fails on purpose meanwhile.
const PREPARE_TRIES: usize = 20;
/// Events that are looked at once more in every look, at most.
const PAGE_EVENTS: usize = 200;
const POLL: Duration = Duration::from_millis(50);

/// What to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Storm {
    pub(crate) backend: Backend,
    pub(crate) servers: u32,
    pub(crate) sessions: u32,
    pub(crate) kills: u32,
    pub(crate) seed: u64,
}

/// What fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// SIGKILL of a server, which is started again.
    Server,
    /// SIGSTOP, and SIGCONT when its lease may have ended.
    Pause,
    Runner,
    Sandboxes,
    /// The way from one server to the database.
    Link,
    /// The database ends as in a crash, and recovers.
    Database,
}

impl Fault {
    /// Each as often as it stands here.
    const WITHOUT_DATABASE: [Self; 6] =
        [Self::Server, Self::Server, Self::Server, Self::Pause, Self::Runner, Self::Sandboxes];
    const WITH_DATABASE: [Self; 10] = [
        Self::Server,
        Self::Server,
        Self::Server,
        Self::Pause,
        Self::Pause,
        Self::Runner,
        Self::Sandboxes,
        Self::Link,
        Self::Link,
        Self::Database,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Pause => "pause",
            Self::Runner => "runner",
            Self::Sandboxes => "sandboxes",
            Self::Link => "database_link",
            Self::Database => "database",
        }
    }
}

/// Calls that take a moment, again for each message; and one short answer for the last.
fn script() -> Value {
    let turn = json!({
        "think_ms": 30,
        "calls": [{
            "name": "bash",
            "input": {"command": "echo {{call_id}} >> ~/witness; sleep 0.05; echo done {{call_id}}"},
        }],
        "on_interrupted": {"again_when": ""},
    });
    let mut turns = vec![turn; STEPS];
    turns.push(json!({"text": "All steps are done."}));
    json!({"scripts": [{
        "when": "", "seed": 11, "turns": turns.clone(),
        "chapters": [{"when": "again", "turns": turns}, {"when": "finish", "turns": [{"text": "Finished."}]}],
    }]})
}

/// One session as it is seen from outside.
struct Watched {
    id: String,
    home: String,
    acknowledged: Acknowledged,
    /// Behind the last whole page that was seen: journals grow long, and most of one was looked at before.
    cursor: String,
    /// Messages in the whole pages.
    messages_before: usize,
    /// The last whole page, and what is behind it.
    last: [Vec<Value>; 2],
    /// Messages that were sent, the last one perhaps not accepted yet.
    messages: u32,
    is_accepted: bool,
}

impl Watched {
    /// Sends the message that is not accepted yet; again and again, it is taken once.
    fn send(&mut self, client: &mut Client, text: &str) {
        let body = super::cluster::user_message(text);
        let key = format!("{}-{}", self.id, self.messages);
        self.is_accepted =
            client.post(&format!("/v1/sessions/{}/events", self.id), &body, Some(&key)).is_ok();
    }

    /// Looks; whether the answer to the last message has ended.
    fn look(&mut self, client: &mut Client) -> bool {
        loop {
            let path = format!("/v1/sessions/{}/events?limit={PAGE_EVENTS}{}", self.id, self.cursor);
            // While servers fail, one may not answer; that it can be seen in the end is what counts.
            let Ok(page) = client.get(&path) else { return false };
            let events = page["data"].as_array().cloned().unwrap_or_default();
            self.acknowledged.note(&events);
            match page["next_page"].as_str() {
                Some(next) => {
                    self.cursor = format!("&page={next}");
                    self.messages_before += messages_in(&events);
                    self.last = [events, Vec::new()];
                }
                None => {
                    self.last[1] = events;
                    break;
                }
            }
        }
        let messages = self.messages_before + messages_in(&self.last[1]);
        let seen = self.last.concat();
        // Behind the last message: the turn before it has ended as well.
        let since = seen.iter().rposition(is_message).map_or(0, |at| at + 1);
        self.is_accepted && messages == self.messages as usize && is_idle(&seen[since..])
    }
}

fn is_message(event: &Value) -> bool {
    event["type"] == "user.message"
}

fn messages_in(events: &[Value]) -> usize {
    events.iter().filter(|event| is_message(event)).count()
}

pub(crate) fn run(root: &Path, storm: &Storm, covey: Option<&Path>, as_json: bool) -> Result<()> {
    let began = Instant::now();
    let mut fleet = Fleet::start(root, covey, storm.backend, storm.servers, &script(), true)?;
    let mut client = fleet.client();
    let sessions = (0..storm.sessions)
        .map(|number| prepare(&mut client, number))
        .collect::<Result<Vec<_>>>()
        .context("preparing the sessions")?;
    eprintln!(
        "{} sessions on {} servers are ready after {} s",
        sessions.len(),
        fleet.servers(),
        began.elapsed().as_secs()
    );
    let (is_over, shared) = (AtomicBool::new(false), Mutex::new(sessions));
    let mut struck = BTreeMap::<&'static str, usize>::new();
    thread::scope(|scope| -> Result<()> {
        let watcher = scope.spawn(|| watch(&shared, client.clone(), &is_over));
        let mut dice = Dice::new(storm.seed);
        let mut outcome = Ok(());
        for number in 0..storm.kills {
            match strike(&mut fleet, &mut dice) {
                Ok(fault) => *struck.entry(fault.name()).or_default() += 1,
                Err(error) => {
                    outcome = Err(error.context(format!("failure {number}")));
                    break;
                }
            }
            if (number + 1) % 10 == 0 {
                eprintln!("{} of {} failures", number + 1, storm.kills);
            }
        }
        is_over.store(true, Ordering::SeqCst);
        if watcher.join().is_err() {
            anyhow::bail!("the watcher panicked");
        }
        outcome
    })?;
    let mut sessions = shared.into_inner().context("the sessions")?;
    let calm = settle(&mut sessions, &mut client);
    let mut totals = Totals::default();
    for session in &sessions {
        totals.add(session, &judge(session, &mut client, &fleet));
    }
    let report = json!({
        "backend": match storm.backend { Backend::Sqlite => "sqlite", Backend::Postgres => "postgres" },
        "servers": storm.servers,
        "sessions": storm.sessions,
        "kills": storm.kills,
        "seed": storm.seed,
        "lost": totals.lost,
        "doubled": totals.doubled,
        "stuck": totals.stuck,
        "two_writers": totals.two_writers,
        "refused_histories": totals.refused,
        "interrupted": totals.interrupted,
        "rolled_back": totals.rolled_back,
        "turns": totals.turns,
        "calls": totals.calls,
        "claims": totals.claims,
        "struck": struck,
        "calm_ms": calm.as_millis() as u64,
        "elapsed_ms": began.elapsed().as_millis() as u64,
        "failures": totals.failures,
    });
    if as_json {
        println!("{report}");
    } else {
        println!("{report:#}");
    }
    let bad = [totals.lost, totals.doubled, totals.stuck, totals.two_writers, totals.refused];
    if bad != [0; 5] {
        let kept = fleet.keep();
        anyhow::bail!(
            "something was lost, run twice, stuck, written by two, or refused; logs are in {}, run again with --seed {}",
            kept.display(),
            storm.seed
        );
    }
    Ok(())
}

fn prepare(client: &mut Client, number: u32) -> Result<Watched> {
    let mut tries = 0;
    // The first requests may come before every server has seen the others.
    let mut ask = |path: &str, body: &Value| loop {
        match client.post(path, body, None) {
            Ok(answer) => return Ok(answer),
            Err(error) if tries >= PREPARE_TRIES => return Err(error),
            Err(_) => {
                tries += 1;
                thread::sleep(POLL);
            }
        }
    };
    let id = |answer: &Value| answer["id"].as_str().map(str::to_owned).context("no id");
    let tools = json!([{"type": "agent_toolset_20260401"}]);
    let agent = id(&ask(
        "/v1/agents",
        &json!({"name": format!("storm-{number}"), "model": "scripted", "tools": tools}),
    )?)?;
    let environment = id(&ask("/v1/environments", &json!({"name": format!("storm-{number}")}))?)?;
    let session = id(&ask("/v1/sessions", &json!({"agent": agent, "environment_id": environment}))?)?;
    let homes = client.all("/v1/covey/homes")?;
    let home = homes.iter().find(|home| home["agent_id"] == agent.as_str()).context("no home")?;
    let mut watched = Watched {
        home: id(home)?,
        id: session,
        acknowledged: Acknowledged::default(),
        cursor: String::new(),
        messages_before: 0,
        last: [Vec::new(), Vec::new()],
        messages: 1,
        is_accepted: false,
    };
    watched.send(client, &first_message(number));
    Ok(watched)
}

fn first_message(number: u32) -> String {
    format!("run the steps of session {number}")
}

/// Gives every session something to do for as long as things fail.
fn watch(sessions: &Mutex<Vec<Watched>>, mut client: Client, is_over: &AtomicBool) {
    while !is_over.load(Ordering::SeqCst) {
        let Ok(mut sessions) = sessions.lock() else { return };
        for (number, session) in (0..).zip(sessions.iter_mut()) {
            if is_over.load(Ordering::SeqCst) {
                return;
            }
            if !session.is_accepted {
                let text = if session.messages == 1 { first_message(number) } else { "again".to_owned() };
                session.send(&mut client, &text);
            } else if session.look(&mut client) {
                session.messages += 1;
                session.send(&mut client, "again");
            }
        }
        drop(sessions);
        thread::sleep(POLL);
    }
}

/// Waits until every session has ended, then lets each say one last word; how long that took.
fn settle(sessions: &mut [Watched], client: &mut Client) -> Duration {
    let began = Instant::now();
    for last in ["again", "finish"] {
        let mut is_done = vec![false; sessions.len()];
        if last == "finish" {
            for session in sessions.iter_mut() {
                session.messages += 1;
                session.is_accepted = false;
            }
        }
        while began.elapsed() < CALM_MAX && is_done.contains(&false) {
            for (number, session) in (0..).zip(sessions.iter_mut()) {
                if is_done[number as usize] {
                    continue;
                }
                if !session.is_accepted {
                    let text = if session.messages == 1 { first_message(number) } else { last.to_owned() };
                    session.send(client, &text);
                }
                is_done[number as usize] = session.look(client);
            }
            thread::sleep(POLL);
        }
    }
    began.elapsed()
}

/// One failure and its mending.
fn strike(fleet: &mut Fleet, dice: &mut Dice) -> Result<Fault> {
    let choice: &[Fault] =
        if fleet.has_database() { &Fault::WITH_DATABASE } else { &Fault::WITHOUT_DATABASE };
    let fault = choice[dice.below(choice.len() as u64) as usize];
    let server = dice.below(fleet.servers() as u64) as usize;
    // Part of the scenario, not synchronisation: moments and durations are random, too.
    let pause = |dice: &mut Dice, most: u64| thread::sleep(Duration::from_millis(dice.below(most)));
    let beyond_lease = (LEASE_SECONDS + 2) * 1000;
    pause(dice, 500);
    match fault {
        Fault::Server => {
            fleet.kill_server(server)?;
            pause(dice, 500);
            fleet.restart_server(server)?;
        }
        Fault::Pause => {
            fleet.signal_server(server, Signal::STOP)?;
            pause(dice, beyond_lease);
            fleet.signal_server(server, Signal::CONT)?;
        }
        Fault::Runner => {
            fleet.kill_runner()?;
            pause(dice, 300);
            fleet.start_runner()?;
        }
        Fault::Sandboxes => {
            fleet.kill_sandboxes()?;
        }
        Fault::Link => {
            let is_held = dice.below(2) == 0;
            if let Some(relay) = fleet.relay(server) {
                relay.cut(if is_held { Cut::Hold } else { Cut::Close });
                if is_held {
                    pause(dice, beyond_lease);
                    relay.mend(dice.below(2) == 0);
                }
            }
        }
        Fault::Database => fleet.restart_database()?,
    }
    Ok(fault)
}

/// What the final history, the journal and the witness say.
fn judge(session: &Watched, client: &mut Client, fleet: &Fleet) -> Judged {
    let mut verdict = Verdict::default();
    let path = format!("/v1/sessions/{}/events", session.id);
    let events = &client.all(&path).unwrap_or_default();
    verdict.lost = session.acknowledged.missing(events);
    if !is_idle(events) || !events.iter().any(|event| event.to_string().contains("Finished.")) {
        verdict.stuck = Some(format!("session {}, last event {:?}", session.id, events.last()));
    }
    // The last message makes no call.
    let steps = (session.messages as usize - 1) * STEPS;
    judge_calls(events, &fleet.witness(&session.home), steps, &mut verdict);
    let mut writers = Vec::new();
    let mut claims = 0;
    match client.all(&format!("/v1/covey/sessions/{}/records", session.id)) {
        Ok(records) => {
            claims = records.iter().filter(|record| record["body"]["type"] == "driver.claimed").count();
            writers = two_writers(&records);
        }
        Err(error) => verdict.stuck = Some(format!("session {}: no journal: {error:#}", session.id)),
    }
    let of_kind =
        |kind: &str| events.iter().filter(|event| event["type"] == kind).cloned().collect::<Vec<_>>();
    let (errors, calls) = (of_kind("session.error"), of_kind("agent.tool_use").len());
    Judged { verdict, writers, errors, claims, calls }
}

/// See [`judge`].
struct Judged {
    verdict: Verdict,
    writers: Vec<String>,
    /// The script never fails: an error of a session is the verifier's word on its history.
    errors: Vec<Value>,
    claims: usize,
    calls: usize,
}

/// Where an earlier driver wrote behind a later one, a claim was made twice, or a position is missing.
fn two_writers(records: &[Value]) -> Vec<String> {
    let mut found = Vec::new();
    let (mut epoch, mut claimed) = (0, 0);
    for (at, record) in (1..).zip(records) {
        if record["seq"].as_u64() != Some(at) {
            found.push(format!("position {at} is {}", record["seq"]));
        }
        let under = record["epoch"].as_u64().unwrap_or(0);
        if under < epoch {
            found.push(format!("position {at} was written under epoch {under} behind {epoch}"));
        }
        epoch = epoch.max(under);
        if record["body"]["type"] == "driver.claimed" {
            let claim = record["body"]["epoch"].as_u64().unwrap_or(0);
            if claim <= claimed || claim != under {
                found.push(format!("position {at} claims {claim} under {under} behind {claimed}"));
            }
            claimed = claim;
        }
    }
    found
}

#[derive(Debug, Default)]
struct Totals {
    lost: usize,
    doubled: usize,
    stuck: usize,
    two_writers: usize,
    refused: usize,
    interrupted: usize,
    rolled_back: usize,
    turns: usize,
    calls: usize,
    claims: usize,
    failures: Vec<String>,
}

impl Totals {
    fn add(&mut self, session: &Watched, judged: &Judged) {
        let Judged { verdict, writers, errors, claims, calls } = judged;
        self.lost += verdict.lost.len();
        self.doubled += verdict.doubled.len();
        self.stuck += usize::from(verdict.stuck.is_some());
        self.two_writers += writers.len();
        self.refused += errors.len();
        self.interrupted += verdict.interrupted;
        self.rolled_back += verdict.rolled_back;
        self.turns += session.messages as usize;
        self.calls += calls;
        self.claims += claims;
        let is_clean = verdict.is_clean() && writers.is_empty() && errors.is_empty();
        if !is_clean && self.failures.len() < FAILURES_SHOWN_MAX {
            self.failures.push(format!("session {}: {verdict:?} {writers:?} {errors:?}", session.id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(seq: u64, epoch: u64, claims: bool) -> Value {
        let kind = if claims { "driver.claimed" } else { "model.intended" };
        json!({"seq": seq, "epoch": epoch, "body": {"type": kind, "epoch": epoch}})
    }

    #[test]
    fn a_driver_that_writes_behind_a_later_one_is_found() {
        let clean = [record(1, 1, true), record(2, 1, false), record(3, 2, true), record(4, 2, false)];
        assert!(two_writers(&clean).is_empty());
        let overtaken = [record(1, 1, true), record(2, 2, true), record(3, 1, false)];
        assert_eq!(two_writers(&overtaken).len(), 1);
        let twice = [record(1, 1, true), record(2, 1, true)];
        assert_eq!(two_writers(&twice).len(), 1);
        let gap = [record(1, 1, true), record(3, 1, false)];
        assert_eq!(two_writers(&gap).len(), 1);
    }
}
