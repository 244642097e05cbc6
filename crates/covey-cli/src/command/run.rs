//! `covey run`: a task in a directory of this machine.
//!
//! The directory becomes the agent's home, the session is shown as it happens, and the home becomes the
//! directory again. Nobody's work is overwritten: the directory is written only if it is still what it was when
//! it was taken; otherwise the command says how to get the result. What does not belong here: starting a server.

use std::collections::HashSet;
use std::io::IsTerminal as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use covey_types::{BlockHash, Fault, RootHash};
use serde_json::{Value, json};

use super::home::local::{self, LocalStore, ServerStore};
use super::session::answer::{self, Word};
use super::{agent, session};
use crate::client::{Client, Follow, Heard, id_path, user_message};
use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::output::{self, one_line};
use crate::progress::Progress;
use crate::view;

/// After the session: stopping the sandbox and securing the home for the last time.
const SETTLE_LIMIT: Duration = Duration::from_secs(180);
const SETTLE_PAUSE: Duration = Duration::from_millis(200);
const TITLE_CHARS_MAX: usize = 80;
const DEFAULT_MODEL: &str = "claude-sonnet-4-5";

/// Options of `covey run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// What to do.
    task: String,
    /// The directory to work in; it becomes the agent's home.
    #[arg(long, value_name = "DIR")]
    home: PathBuf,
    /// Name of the agent; made when it is missing [default: the directory's name and a hash of its path].
    #[arg(long)]
    agent: Option<String>,
    /// The model of an agent that is made now [default: claude-sonnet-4-5].
    #[arg(long, env = "COVEY_MODEL")]
    model: Option<String>,
    /// Tools of an agent that is made now whose calls wait until somebody allows them: `bash`, `write`, …, or `all`.
    #[arg(long, value_name = "TOOLS", value_delimiter = ',')]
    ask: Vec<String>,
    /// Leave the directory as it is; the result stays in the home.
    #[arg(long)]
    no_write_back: bool,
    /// Go on although the home holds work that the directory lacks; it stays among the home's earlier snapshots.
    #[arg(long)]
    replace_home: bool,
}

pub(crate) async fn run(global: &Global, args: &RunArgs) -> anyhow::Result<ExitCode> {
    let dir = args.home.canonicalize().map_err(|error| {
        Refusal::new(Fault::NotFound, format!("the directory {}: {error}", args.home.display()))
    })?;
    if !dir.is_dir() {
        let text = format!("{} is not a directory; give the one to work in", dir.display());
        return Err(Refusal::new(Fault::Invalid, text).into());
    }
    if args.task.trim().is_empty() {
        return Err(Refusal::new(Fault::Invalid, "the task is empty; say what to do").into());
    }
    let client = Client::new(global)?;
    let place = ServerStore::of(global, &client)?;
    let store = place.local()?;
    let agent = agent_for(&client, args, &dir).await?;
    let home = agent["covey_home_id"].as_str().context("the server sent an agent without a home")?;
    let taken = take(&client, &place, &store, &dir, home, args.replace_home).await?;

    let environment = session::default_environment(&client).await?;
    let title: String = args.task.chars().take(TITLE_CHARS_MAX).collect();
    let session = session::create(&client, &agent, &environment, Some(&title)).await?;
    let session = session::id_of(&session)?;
    eprintln!("session {session}, agent {}, home {home}", one_line(&output::field(&agent, "/name")));
    client.send(session, json!([user_message(&args.task)])).await?;
    let code = match show(global, &client, session).await? {
        Shown::Ended(code) => code,
        Shown::Left => {
            eprintln!("the session goes on: `covey session events {session} --follow`");
            return Ok(ExitCode::Interrupted);
        }
    };

    let result = settle(&client, session, home).await?;
    let changed = result != Some(taken);
    let written = match result.filter(|_| changed && !args.no_write_back) {
        None => false,
        Some(root) => write_back(&store, &place, &dir, home, taken, root).map(|()| true)?,
    };
    if let Some(root) = result.filter(|_| written || !changed) {
        store.remember(&dir, home, root)?;
    }
    if global.json {
        let end = json!({
            "type": "covey.run", "session": session, "home": home, "root": result,
            "changed": changed, "written_back": written,
        });
        output::line(&end.to_string())?;
    } else if written {
        eprintln!("{} is now what the agent left", dir.display());
    } else if !changed {
        eprintln!("the agent changed nothing in {}", dir.display());
    }
    if !global.json {
        eprintln!("the session is archived; its log: covey session events {session}");
    }
    Ok(code)
}

/// The agent of this directory; a second run in the same directory finds it, and the same home, again.
async fn agent_for(client: &Client, args: &RunArgs, dir: &Path) -> anyhow::Result<Value> {
    let name = args.agent.clone().unwrap_or_else(|| agent_name(dir));
    let model = args.model.as_deref().unwrap_or(DEFAULT_MODEL);
    match agent::by_name(client, &name).await? {
        Some(agent) => {
            let has = agent::model(&agent);
            if let Some(asked) = args.model.as_deref().filter(|asked| *asked != has) {
                let (has, asked) = (one_line(&has), one_line(asked));
                eprintln!(
                    "warning: the agent {name} exists and uses {has}, not {asked}; give --agent NEW_NAME for another"
                );
            }
            Ok(agent)
        }
        None => Ok(client.post("/v1/agents", &agent::new_agent(&name, model, &args.ask).into()).await?),
    }
}

fn agent_name(dir: &Path) -> String {
    let name = dir.file_name().map_or("root".into(), |name| name.to_string_lossy());
    let hash = BlockHash::of(dir.as_os_str().as_bytes()).to_string();
    format!("{}-{}", one_line(&name), &hash[..8])
}

/// Makes the directory the home's current state; returns its root. Refused when the home holds what an agent left
/// and this directory never got: a terminal that was closed in the middle must not cost the result.
async fn take(
    client: &Client,
    place: &ServerStore,
    store: &LocalStore,
    dir: &Path,
    home: &str,
    replace_home: bool,
) -> anyhow::Result<RootHash> {
    let current = client.get(&id_path("covey/homes", home)?).await?;
    if let Some(session) = current["session_id"].as_str() {
        let text = format!(
            "the agent works in session {session}; wait, or interrupt it: `covey session interrupt {session}`"
        );
        return Err(Refusal::new(Fault::Conflict, text).into());
    }
    let root = root_of(&current)?;
    let secure = || local::secured(store, dir, home, root);
    let mut report = secure()?;
    let lacks = root.filter(|root| *root != report.root && store.remembered(dir, home) != Some(*root));
    if let Some(root) = lacks.filter(|_| !replace_home) {
        let text = format!(
            "the home {home} holds work that {} never got (generation {}); get it with\n  \
             covey home materialize NEW_DIR --store {} --org {} --home {home} --root {root}\n\
             or give --replace-home to go on with the directory as it is",
            dir.display(),
            current["generation"],
            place.location,
            place.org,
        );
        return Err(Refusal::new(Fault::Conflict, text).into());
    }
    if report.changed {
        report = local::import(client, &current, report, &secure).await?.1;
    }
    store.remember(dir, home, report.root)?;
    eprintln!("{} files of {} are the agent's home", report.files, dir.display());
    Ok(report.root)
}

fn root_of(home: &Value) -> anyhow::Result<Option<RootHash>> {
    home["root"].as_str().map(|root| root.parse().context("the server sent a bad root")).transpose()
}

enum Shown {
    /// The turn ended.
    Ended(ExitCode),
    /// The person left it.
    Left,
}

/// Prints the session's events until the turn ends. The first Ctrl-C interrupts the agent, the second leaves.
async fn show(global: &Global, client: &Client, session: &str) -> anyhow::Result<Shown> {
    let mut events = Follow::new(client, session, HashSet::new())?;
    let mut presses = session::ctrl_c()?;
    let mut interrupted = false;
    loop {
        let heard = tokio::select! {
            heard = events.next() => heard?,
            _ = presses.recv() => {
                if interrupted {
                    return Ok(Shown::Left);
                }
                interrupted = true;
                eprintln!("interrupting the agent; Ctrl-C again leaves it alone");
                client.send(session, json!([{ "type": "user.interrupt" }])).await?;
                continue;
            }
        };
        let event = match heard {
            Heard::Event(event) => event,
            Heard::Broken(why) => {
                eprintln!("{}; trying again", one_line(&why));
                continue;
            }
            // Somebody archived the session before its turn came to an end that was seen here.
            Heard::Over => return Ok(Shown::Ended(ExitCode::Unfinished)),
        };
        session::print(global, &event)?;
        match event["type"].as_str() {
            Some("session.status_idle") if interrupted => return Ok(Shown::Ended(ExitCode::Interrupted)),
            Some("session.status_idle") if view::stop_reason(&event) == "requires_action" => {
                ask(global, client, session, &event).await?;
            }
            Some("session.status_idle") => return Ok(Shown::Ended(session::end_code(&event))),
            Some("session.status_terminated") => return Ok(Shown::Ended(ExitCode::Unfinished)),
            _ => {}
        }
    }
}

/// The turn waits for somebody's word: asks at the terminal, or says how to answer from elsewhere. The session goes on
/// by whoever answers first.
async fn ask(global: &Global, client: &Client, session: &str, idle: &Value) -> anyhow::Result<()> {
    let elsewhere = format!("`covey session allow {session}` or `covey session deny {session}`");
    if global.json || !std::io::stdin().is_terminal() {
        eprintln!("the agent waits for an answer: {elsewhere}");
        return Ok(());
    }
    for call in answer::asked(idle) {
        eprint!("allow the call {call}? [y/N, or why not] ");
        let line = tokio::task::spawn_blocking(|| {
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).map(|_| line)
        });
        let word = Word::typed(&line.await??);
        match answer::say(client, session, &[call], &word).await {
            Ok(_) => {}
            // A call of another program's tool, or somebody else was faster.
            Err(error) => eprintln!("{error:#}; {elsewhere} answers what still waits"),
        }
    }
    Ok(())
}

/// Ends the session and waits until its home is secured for the last time; returns the home's root.
async fn settle(client: &Client, session: &str, home: &str) -> anyhow::Result<Option<RootHash>> {
    let _progress = Progress::start("securing the home");
    client.post(&format!("{}/archive", id_path("sessions", session)?), &json!({})).await?;
    let path = id_path("covey/homes", home)?;
    let started = tokio::time::Instant::now();
    loop {
        let current = client.get(&path).await?;
        // The order matters: what is published when the last step is known to be secured contains that step.
        if current["session_id"].is_null() && is_secured(client, session).await? {
            return root_of(&client.get(&path).await?);
        }
        if started.elapsed() > SETTLE_LIMIT {
            let text = format!(
                "the home {home} is in use or not secured after {} s; nothing was written back",
                SETTLE_LIMIT.as_secs()
            );
            return Err(Refusal::new(Fault::Retry, text).into());
        }
        tokio::time::sleep(SETTLE_PAUSE).await;
    }
}

/// Whether the published state contains the agent's last step: the session is idle before its home is secured.
/// An error when the last secure failed, for then it never will.
async fn is_secured(client: &Client, session: &str) -> anyhow::Result<bool> {
    let events = client.list(&format!("{}/events", id_path("sessions", session)?), None).await?;
    let last = |kind: &str| events.iter().rposition(|event| event["type"] == kind);
    let (secured, failed) = (last("home.secured"), last("home.secure_failed"));
    match failed.filter(|failed| Some(*failed) > secured).map(|failed| &events[failed]) {
        Some(event) => {
            let why = one_line(&output::field(event, "/detail"));
            let text =
                format!("the agent's last files could not be secured ({why}); nothing was written back");
            Err(Refusal::new(Fault::Retry, text).into())
        }
        None => Ok(last("agent.tool_result").is_none_or(|result| secured > Some(result))),
    }
}

/// Makes the directory what the agent left, if it is still what the agent was given.
fn write_back(
    store: &LocalStore,
    place: &ServerStore,
    dir: &Path,
    home: &str,
    taken: RootHash,
    result: RootHash,
) -> anyhow::Result<()> {
    let now = store.secure(dir, home, Some(taken))?;
    if now.changed || now.partial {
        let text = format!(
            "{} changed while the agent worked, so nothing was written back; get the result with\n  \
             covey home materialize NEW_DIR --store {} --org {} --home {home} --root {result}",
            dir.display(),
            place.location,
            place.org,
        );
        return Err(Refusal::new(Fault::Conflict, text).into());
    }
    store.materialize(dir, home, result)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_the_same_name_have_different_agents() {
        let (a, b) = (agent_name(Path::new("/a/project")), agent_name(Path::new("/b/project")));
        assert!(a.starts_with("project-") && b.starts_with("project-") && a != b, "{a} {b}");
    }
}
