//! `covey session`: conversations with an agent.

pub(crate) mod answer;

use std::collections::HashSet;

use anyhow::Context as _;
use clap::Subcommand;
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use self::answer::Word;
use super::agent;
use crate::client::{Client, Follow, Heard, id_path, user_message};
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::output::{self, card, field};
use crate::view;

/// The environment that commands use when none is named.
const DEFAULT_ENVIRONMENT: &str = "default";

/// What to do with sessions.
#[derive(Debug, Subcommand)]
pub(crate) enum SessionCommand {
    /// Begin a session.
    Create {
        /// The agent's id or name.
        agent: String,
        /// The environment's id [default: the one named `default`, made when it is missing].
        #[arg(long, value_name = "ID")]
        environment: Option<String>,
        /// What the session is about, for people.
        #[arg(long)]
        title: Option<String>,
        /// The first message.
        #[arg(long)]
        message: Option<String>,
    },
    /// List sessions, newest first.
    List {
        /// At most so many.
        #[arg(long, default_value_t = 50)]
        limit: usize,
        /// Also those that are archived, as `covey run` leaves its own.
        #[arg(long)]
        archived: bool,
    },
    /// Show one session.
    Show {
        /// The session's id.
        session: String,
    },
    /// Send a message; with --follow, show what follows until the session is idle.
    Send {
        /// The session's id.
        session: String,
        /// What to say.
        text: String,
        /// Show the events until the session is idle.
        #[arg(long)]
        follow: bool,
    },
    /// Ask the agent to stop what it does.
    Interrupt {
        /// The session's id.
        session: String,
    },
    /// Let calls run that wait for somebody's word.
    Allow {
        /// The session's id.
        session: String,
        /// Ids of the calls' events [default: all that wait].
        calls: Vec<String>,
    },
    /// Refuse calls that wait for somebody's word; the agent is told and goes on.
    Deny {
        /// The session's id.
        session: String,
        /// Ids of the calls' events [default: all that wait].
        calls: Vec<String>,
        /// Why, for the agent.
        #[arg(long)]
        message: Option<String>,
    },
    /// Print the events; with --follow, also those to come, until the session is terminated or archived, or Ctrl-C.
    Events {
        /// The session's id.
        session: String,
        /// Go on with the events to come.
        #[arg(long)]
        follow: bool,
    },
    /// Archive a session: it takes no more messages; its log stays.
    Archive {
        /// The session's id.
        session: String,
    },
    /// Delete a session with its log; the agent's home stays as it is.
    Delete {
        /// The session's id.
        session: String,
    },
}

pub(crate) async fn run(global: &Global, command: &SessionCommand) -> anyhow::Result<ExitCode> {
    let client = Client::new(global)?;
    match command {
        SessionCommand::Create { agent, environment, title, message } => {
            let agent = agent::find(&client, agent).await?;
            let environment = match environment {
                Some(id) => id.clone(),
                None => default_environment(&client).await?,
            };
            let session = create(&client, &agent, &environment, title.as_deref()).await?;
            if let Some(text) = message {
                client.send(id_of(&session)?, json!([user_message(text)])).await?;
            }
            show(global, &session)?;
        }
        SessionCommand::List { limit, archived } => {
            let path = format!("/v1/sessions?include_archived={archived}");
            let sessions = client.list(&path, Some(*limit)).await?;
            output::value(global.json, &json!({ "data": sessions }), |_| table(&sessions))?;
        }
        SessionCommand::Show { session } => show(global, &client.get(&id_path("sessions", session)?).await?)?,
        SessionCommand::Send { session, text, follow } => {
            // What was there before is not shown again.
            let before = if *follow { heard_so_far(&client, session).await? } else { HashSet::new() };
            let sent = client.send(session, json!([user_message(text)])).await?;
            if *follow {
                let mut events = Follow::new(&client, session, before)?;
                return follow_until(global, &mut events, |kind| kind == "session.status_idle").await;
            }
            output::value(global.json, &sent, |_| "sent".to_owned())?;
        }
        SessionCommand::Interrupt { session } => {
            let sent = client.send(session, json!([{ "type": "user.interrupt" }])).await?;
            output::value(global.json, &sent, |_| "interrupt sent".to_owned())?;
        }
        SessionCommand::Allow { session, calls } => {
            let sent = answer::say(&client, session, calls, &Word::Allow).await?;
            output::value(global.json, &sent, |_| "allowed".to_owned())?;
        }
        SessionCommand::Deny { session, calls, message } => {
            let word = Word::Deny { message: message.clone() };
            let sent = answer::say(&client, session, calls, &word).await?;
            output::value(global.json, &sent, |_| "denied".to_owned())?;
        }
        SessionCommand::Events { session, follow: true } => {
            let mut events = Follow::new(&client, session, HashSet::new())?;
            return follow_until(global, &mut events, |_| false).await;
        }
        SessionCommand::Events { session, follow: false } => {
            let path = format!("{}/events", id_path("sessions", session)?);
            for event in client.list(&path, None).await? {
                print(global, &event)?;
            }
        }
        SessionCommand::Archive { session } => {
            let path = format!("{}/archive", id_path("sessions", session)?);
            show(global, &client.post(&path, &json!({})).await?)?;
        }
        SessionCommand::Delete { session } => {
            let deleted = client.delete(&id_path("sessions", session)?).await?;
            output::value(global.json, &deleted, |_| format!("deleted {session}"))?;
        }
    }
    Ok(ExitCode::Success)
}

/// Begins a session of `agent` in its newest version.
pub(crate) async fn create(
    client: &Client,
    agent: &Value,
    environment: &str,
    title: Option<&str>,
) -> anyhow::Result<Value> {
    let mut body = json!({ "agent": agent["id"], "environment_id": environment });
    if let Some(title) = title {
        body["title"] = title.into();
    }
    Ok(client.post("/v1/sessions", &body).await?)
}

/// The id of the environment that commands use when none is named; made when it is missing.
pub(crate) async fn default_environment(client: &Client) -> anyhow::Result<String> {
    let environments = client.list("/v1/environments", None).await?;
    let known = environments.iter().find(|environment| {
        environment["name"] == DEFAULT_ENVIRONMENT && environment["archived_at"].is_null()
    });
    let environment = match known {
        Some(environment) => environment.clone(),
        None => client.post("/v1/environments", &json!({ "name": DEFAULT_ENVIRONMENT })).await?,
    };
    Ok(id_of(&environment)?.to_owned())
}

/// Ids of the events that the session has already.
async fn heard_so_far(client: &Client, session: &str) -> anyhow::Result<HashSet<String>> {
    let events = client.list(&format!("{}/events", id_path("sessions", session)?), None).await?;
    Ok(events.iter().filter_map(|event| event["id"].as_str().map(String::from)).collect())
}

/// Prints events until the session is terminated, Ctrl-C, or an event whose type is the wanted end.
async fn follow_until(
    global: &Global,
    events: &mut Follow,
    is_end: impl Fn(&str) -> bool,
) -> anyhow::Result<ExitCode> {
    let mut presses = ctrl_c()?;
    loop {
        let heard = tokio::select! {
            heard = events.next() => heard?,
            _ = presses.recv() => {
                return Ok(ExitCode::Interrupted);
            }
        };
        match heard {
            Heard::Broken(why) => eprintln!("{}; trying again", output::one_line(&why)),
            Heard::Over => {
                eprintln!("the session is archived; no more events will come");
                return Ok(ExitCode::Success);
            }
            Heard::Event(event) => {
                print(global, &event)?;
                let kind = event["type"].as_str().unwrap_or_default();
                if kind == "session.status_terminated" {
                    return Ok(ExitCode::Unfinished);
                }
                if is_end(kind) {
                    return Ok(end_code(&event));
                }
            }
        }
    }
}

/// Every Ctrl-C from now on, also one that comes while something else is waited for.
pub(crate) fn ctrl_c() -> anyhow::Result<Signal> {
    signal(SignalKind::interrupt()).context("Ctrl-C cannot be watched")
}

/// What a script learns from how a turn ended.
pub(crate) fn end_code(idle: &Value) -> ExitCode {
    if view::stop_reason(idle) == "end_turn" { ExitCode::Success } else { ExitCode::Unfinished }
}

/// Prints one event as a JSON line or as text.
pub(crate) fn print(global: &Global, event: &Value) -> std::io::Result<()> {
    if global.json {
        return output::line(&event.to_string());
    }
    view::event(event).map_or(Ok(()), |text| output::line(&text))
}

pub(crate) fn id_of(value: &Value) -> anyhow::Result<&str> {
    value["id"].as_str().context("the server sent something without an id")
}

fn show(global: &Global, session: &Value) -> anyhow::Result<()> {
    output::value(global.json, session, |session| {
        card(&[
            ("id", field(session, "/id")),
            ("status", field(session, "/status")),
            ("title", field(session, "/title")),
            ("agent", field(session, "/agent/id")),
            ("environment", field(session, "/environment_id")),
            ("home", field(session, "/covey_home_id")),
            ("created", field(session, "/created_at")),
            ("archived", field(session, "/archived_at")),
        ])
    })?;
    Ok(())
}

fn table(sessions: &[Value]) -> String {
    let row = |session: &Value| {
        ["/id", "/status", "/agent/name", "/title", "/created_at"].map(|pointer| field(session, pointer))
    };
    output::table(
        ["ID", "STATUS", "AGENT", "TITLE", "CREATED"],
        &sessions.iter().map(row).collect::<Vec<_>>(),
    )
}
