//! One run of the demo's session, with losses at the moments when they hurt, or without any.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Value, json};

use super::compare::was_interrupted;
use super::world::World;

/// What the agent is asked; the script answers to the word "invoice".
const TASK: &str = "The checks of the program in ~/invoice fail (run `sh test.sh` there). Find the fault in \
                    invoice.sh, fix it, make the checks pass, and write what was wrong to ~/invoice/NOTES.md. \
                    Leave everything else as it is.";
/// Between two looks at the session; far below what is measured.
const POLL_PAUSE: Duration = Duration::from_millis(15);
/// A scripted session takes seconds; a real model gets minutes.
const SCRIPTED_TERM: Duration = Duration::from_secs(60);
const MODEL_TERM: Duration = Duration::from_secs(20 * 60);

/// What is taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Loss {
    /// The sandbox's first process gets SIGKILL while a tool call runs.
    SandboxKilled,
    /// Server and runner get SIGKILL while a tool call runs, and are started again.
    ServerKilled,
    /// Server, runner and sandboxes get SIGKILL; working copy, stat cache and records are deleted.
    HostLost,
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::SandboxKilled => "sandbox killed",
            Self::ServerKilled => "server killed",
            Self::HostLost => "host lost",
        })
    }
}

/// One loss, as it went.
#[derive(Debug, Clone, Serialize)]
pub(super) struct LossReport {
    pub(super) loss: Loss,
    /// When it came, in the session's terms.
    pub(super) moment: String,
    /// What was gone with it.
    pub(super) lost: String,
    /// What the agent went on with.
    pub(super) recovered: String,
    /// From the loss to the next finished step.
    pub(super) to_next_step_ms: u64,
}

/// What a run left behind.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) events: Vec<Value>,
    pub(super) losses: Vec<LossReport>,
    pub(super) session_ms: u64,
    pub(super) org: String,
    pub(super) home: String,
    pub(super) root: String,
    pub(super) generation: u64,
}

/// When the next loss comes.
struct Plan {
    pending: Vec<Loss>,
    scripted: bool,
}

impl Plan {
    /// Whether this is the moment: scripted runs wait for a trace of the call in the home, so that the loss comes
    /// in its middle; with a real model it is as soon as a call is out.
    fn is_due(&self, loss: Loss, seen: &Seen, world: &World) -> Result<bool> {
        let witness = |word: &str| -> bool {
            std::fs::read_to_string(world.working_copy(&seen.home).join("witness"))
                .is_ok_and(|text| text.lines().any(|line| line == word))
        };
        Ok(match (loss, self.scripted) {
            (Loss::SandboxKilled, true) => seen.open_calls() > 0 && witness("baseline"),
            (Loss::ServerKilled, true) => seen.open_calls() > 0 && witness("after-fix"),
            (Loss::SandboxKilled | Loss::ServerKilled, false) => seen.open_calls() > 0 && seen.results() > 0,
            (Loss::HostLost, _) => {
                let enough = if self.scripted { witness("noted") } else { seen.results() > 1 };
                enough && seen.open_calls() == 0 && !seen.is_idle() && seen.last_step_is_secured(world)?
            }
        })
    }
}

/// What is known of the session now.
struct Seen {
    session: String,
    home: String,
    events: Vec<Value>,
}

impl Seen {
    fn refresh(&mut self, world: &World) -> Result<()> {
        self.events = world.api.list(&format!("/v1/sessions/{}/events", self.session))?;
        Ok(())
    }

    fn count(&self, kind: &str) -> usize {
        self.events.iter().filter(|event| event["type"] == kind).count()
    }

    fn results(&self) -> usize {
        self.count("agent.tool_result")
    }

    fn open_calls(&self) -> usize {
        self.count("agent.tool_use").saturating_sub(self.results())
    }

    fn is_idle(&self) -> bool {
        let is_status =
            |event: &&Value| event["type"].as_str().is_some_and(|t| t.starts_with("session.status_"));
        self.events.iter().rfind(is_status).is_some_and(|event| event["type"] == "session.status_idle")
    }

    /// Whether the newest record of a secured home came after the newest tool result.
    fn last_step_is_secured(&self, world: &World) -> Result<bool> {
        let records = world.api.list(&format!("/v1/covey/sessions/{}/records", self.session))?;
        let last = |kind: &str| records.iter().rposition(|record| record["body"]["type"] == kind);
        Ok(last("home.secured").is_some_and(|secured| Some(secured) > last("agent.tool_result")))
    }
}

/// Runs the session once, with these losses in this order.
pub(super) fn run(
    world: &mut World,
    template: &Path,
    losses: &[Loss],
    scripted: bool,
    model: &str,
) -> Result<Outcome> {
    let (session, home) = create_session(world, template, model)?;
    let began = Instant::now();
    let term = if scripted { SCRIPTED_TERM } else { MODEL_TERM };
    world.api.post(
        &format!("/v1/sessions/{session}/events"),
        &json!({"events": [{"type": "user.message", "content": [{"type": "text", "text": TASK}]}]}),
    )?;
    let mut plan = Plan { pending: losses.iter().rev().copied().collect(), scripted };
    let mut seen = Seen { session, home, events: Vec::new() };
    let mut reports = Vec::new();
    loop {
        seen.refresh(world)?;
        if seen.is_idle() {
            break;
        }
        if began.elapsed() > term {
            bail!(
                "the session did not end within {} s; last event: {:?}",
                term.as_secs(),
                seen.events.last()
            );
        }
        if let Some(loss) = plan.pending.last().copied()
            && plan.is_due(loss, &seen, world)?
        {
            plan.pending.pop();
            reports.push(suffer(loss, &mut seen, world, began + term)?);
            continue;
        }
        std::thread::sleep(POLL_PAUSE);
    }
    if let Some(loss) = plan.pending.last() {
        bail!("the session ended before its moment for `{loss}` came");
    }
    let session_ms = began.elapsed().as_millis() as u64;
    let home = await_secured(&seen, world)?;
    let text =
        |name: &str| home[name].as_str().map(str::to_owned).with_context(|| format!("a home has `{name}`"));
    Ok(Outcome {
        events: seen.events,
        losses: reports,
        session_ms,
        org: text("org_id")?,
        home: seen.home,
        root: text("root")?,
        generation: home["generation"].as_u64().context("a home has a generation")?,
    })
}

fn create_session(world: &World, template: &Path, model: &str) -> Result<(String, String)> {
    let api = &world.api;
    let id = |answer: &Value| answer["id"].as_str().map(str::to_owned).context("the answer has an `id`");
    let agent = api.post(
        "/v1/agents",
        &json!({"name": "demo", "model": model, "tools": [{"type": "agent_toolset_20260401"}]}),
    )?;
    let environment = api.post("/v1/environments", &json!({"name": "demo"}))?;
    let agent = id(&agent)?;
    let home = api.import(&world.store_dir(), &agent, template)?;
    let session = api.post("/v1/sessions", &json!({"agent": agent, "environment_id": id(&environment)?}))?;
    Ok((id(&session)?, home))
}

/// Takes something away and waits until the session has finished another step.
fn suffer(loss: Loss, seen: &mut Seen, world: &mut World, deadline: Instant) -> Result<LossReport> {
    let before = seen.results();
    let moment = match seen.events.iter().rev().find(|event| event["type"] == "agent.tool_use") {
        Some(call) if seen.open_calls() > 0 => format!("while `{}` ran", brief(call)),
        Some(call) => format!("after `{}`, while the model was thinking", brief(call)),
        None => "before the first call".to_owned(),
    };
    let began = Instant::now();
    match loss {
        Loss::SandboxKilled => {
            if world.kill_sandboxes()? == 0 {
                bail!("there was no sandbox to kill");
            }
        }
        Loss::ServerKilled => {
            world.kill_server()?;
            world.start_again()?;
        }
        Loss::HostLost => {
            world.kill_server()?;
            world.kill_sandboxes()?;
            world.lose_host()?;
            world.start_again()?;
        }
    }
    while seen.results() <= before {
        if Instant::now() > deadline {
            bail!("no step finished after `{loss}` {moment}; last event: {:?}", seen.events.last());
        }
        std::thread::sleep(POLL_PAUSE);
        seen.refresh(world)?;
    }
    let to_next_step_ms = began.elapsed().as_millis() as u64;
    let interrupted = seen.events.iter().any(|e| e["type"] == "agent.tool_result" && was_interrupted(e));
    let (lost, recovered) = match loss {
        Loss::SandboxKilled if interrupted => (
            "every process of the sandbox; the running call's result",
            "the working copy as it was, partial effects included; the model was told that the call was interrupted",
        ),
        Loss::SandboxKilled => {
            ("every process of the sandbox", "the call had just ended; its result was kept")
        }
        Loss::ServerKilled => (
            "server and runner; nothing of the session",
            "the running call was reattached and its result taken",
        ),
        Loss::HostLost => (
            "working copy, stat cache, sandbox and runner",
            "the home from the store, as of the last finished step",
        ),
    };
    Ok(LossReport { loss, moment, lost: lost.to_owned(), recovered: recovered.to_owned(), to_next_step_ms })
}

fn brief(call: &Value) -> String {
    let input = &call["input"];
    let shown =
        ["command", "file_path", "pattern"].iter().find_map(|key| input[key].as_str()).unwrap_or_default();
    let name = call["name"].as_str().unwrap_or("?");
    format!("{name} {}", shown.chars().take(60).collect::<String>())
}

/// The home, once its published state contains everything that the session did.
fn await_secured(seen: &Seen, world: &World) -> Result<Value> {
    let deadline = Instant::now() + SCRIPTED_TERM;
    while !seen.last_step_is_secured(world)? {
        if Instant::now() > deadline {
            bail!("the home was not secured after the session's last step");
        }
        std::thread::sleep(POLL_PAUSE);
    }
    Ok(world.api.get(&format!("/v1/covey/homes/{}", seen.home))?)
}
