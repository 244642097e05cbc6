//! `covey agent`: versioned configurations with one home each.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use covey_types::Fault;
use serde_json::{Map, Value, json};

use crate::client::{Client, id_path};
use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::output::{self, card, field};

/// The tools that every agent of the command line has: bash, read, write, edit, glob, grep.
const TOOLSET: &str = "agent_toolset_20260401";

/// What to do with agents.
#[derive(Debug, Subcommand)]
pub(crate) enum AgentCommand {
    /// Delete an agent with its sessions, its home and every snapshot of it, for good.
    Delete {
        /// Its id or name.
        agent: String,
        /// Do it without being asked again.
        #[arg(long)]
        yes: bool,
    },
    /// Make an agent.
    Create {
        /// Its name, for people.
        #[arg(long)]
        name: String,
        /// The model's name, as its provider spells it.
        #[arg(long)]
        model: String,
        /// Tools whose calls wait until somebody allows them: `bash`, `write`, …, or `all`.
        #[arg(long, value_name = "TOOLS", value_delimiter = ',')]
        ask: Vec<String>,
        #[command(flatten)]
        prompt: Prompt,
    },
    /// List agents.
    List,
    /// Show one agent.
    Show {
        /// The agent's id or name.
        agent: String,
    },
    /// Change an agent; running sessions keep the version that they began with.
    Update {
        /// The agent's id or name.
        agent: String,
        /// Another name.
        #[arg(long)]
        name: Option<String>,
        /// Another model.
        #[arg(long)]
        model: Option<String>,
        #[command(flatten)]
        prompt: Prompt,
    },
    /// Archive an agent: it starts no more sessions; its home stays.
    Archive {
        /// The agent's id or name.
        agent: String,
    },
}

/// The system prompt and what people read about the agent.
#[derive(Debug, Args)]
pub(crate) struct Prompt {
    /// The system prompt.
    #[arg(long, conflicts_with = "system_file")]
    system: Option<String>,
    /// A file with the system prompt.
    #[arg(long, value_name = "FILE")]
    system_file: Option<PathBuf>,
    /// What the agent is for.
    #[arg(long)]
    description: Option<String>,
}

impl Prompt {
    fn add_to(&self, body: &mut Map<String, Value>) -> anyhow::Result<()> {
        let system = match &self.system_file {
            None => self.system.clone(),
            Some(file) => {
                let text = std::fs::read_to_string(file);
                Some(text.with_context(|| format!("{} cannot be read", file.display()))?)
            }
        };
        let given = [("system", system), ("description", self.description.clone())];
        body.extend(given.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text?.into()))));
        Ok(())
    }
}

pub(crate) async fn run(global: &Global, command: &AgentCommand) -> anyhow::Result<ExitCode> {
    let client = Client::new(global)?;
    match command {
        AgentCommand::Create { name, model, ask, prompt } => {
            let mut body = new_agent(name, model, ask);
            prompt.add_to(&mut body)?;
            show(global, &client.post("/v1/agents", &body.into()).await?)?;
        }
        AgentCommand::List => {
            let agents = client.list("/v1/agents", None).await?;
            output::value(global.json, &json!({ "data": agents }), |_| table(&agents))?;
        }
        AgentCommand::Show { agent } => show(global, &find(&client, agent).await?)?,
        AgentCommand::Update { agent, name, model, prompt } => {
            let current = find(&client, agent).await?;
            let mut body = Map::new();
            for (field, text) in [("name", name), ("model", model)] {
                body.extend(text.as_ref().map(|text| (field.to_owned(), text.as_str().into())));
            }
            prompt.add_to(&mut body)?;
            if body.is_empty() {
                return Err(Refusal::new(Fault::Invalid, "nothing to change: give --name, --model, …").into());
            }
            // The version that was read: somebody else's change meanwhile is a conflict, not overwritten.
            body.insert("version".to_owned(), current["version"].clone());
            show(global, &client.post(&path_of(&current)?, &body.into()).await?)?;
        }
        AgentCommand::Delete { agent, yes } => {
            let agent = find(&client, agent).await?;
            if !yes {
                let text = format!(
                    "this deletes the agent {} with its sessions, its home {} and every snapshot of it, for good; give \
                     --yes to do it",
                    output::one_line(&field(&agent, "/name")),
                    field(&agent, "/covey_home_id")
                );
                return Err(Refusal::new(Fault::Conflict, text).into());
            }
            let deleted = client.delete(&path_of(&agent)?).await?;
            output::value(global.json, &deleted, |deleted| {
                let (sessions, snapshots) =
                    (field(deleted, "/covey_sessions"), field(deleted, "/covey_snapshots"));
                format!(
                    "deleted, with {sessions} sessions and {snapshots} snapshots; `covey store gc` frees the blocks now"
                )
            })?;
        }
        AgentCommand::Archive { agent } => {
            let path = path_of(&find(&client, agent).await?)?;
            show(global, &client.post(&format!("{path}/archive"), &json!({})).await?)?;
        }
    }
    Ok(ExitCode::Success)
}

/// The body that makes an agent with the six tools; calls of those in `ask` (or of `all`) wait until somebody allows them.
pub(crate) fn new_agent(name: &str, model: &str, ask: &[String]) -> Map<String, Value> {
    let policy = json!({"type": "always_ask"});
    let mut toolset = json!({ "type": TOOLSET });
    let named = ask.iter().filter(|tool| *tool != "all");
    let configs: Vec<Value> =
        named.clone().map(|tool| json!({"name": tool, "permission_policy": policy})).collect();
    if !configs.is_empty() {
        toolset["configs"] = configs.into();
    }
    if named.count() < ask.len() {
        toolset["default_config"] = json!({"permission_policy": policy});
    }
    let body = [("name", json!(name)), ("model", json!(model)), ("tools", json!([toolset]))];
    body.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The agent with this id, or the one that is not archived and has this name.
pub(crate) async fn find(client: &Client, id_or_name: &str) -> anyhow::Result<Value> {
    if id_or_name.starts_with("agent_") {
        return Ok(client.get(&id_path("agents", id_or_name)?).await?);
    }
    by_name(client, id_or_name).await?.ok_or_else(|| {
        let text = format!("no agent has the name `{id_or_name}`; `covey agent list` shows them");
        Refusal::new(Fault::NotFound, text).into()
    })
}

/// The agent that is not archived and has this name, if there is exactly one.
pub(crate) async fn by_name(client: &Client, name: &str) -> anyhow::Result<Option<Value>> {
    let agents = client.list("/v1/agents", None).await?;
    let mut found =
        agents.into_iter().filter(|agent| agent["name"] == name && agent["archived_at"].is_null());
    let first = found.next();
    if found.next().is_some() {
        let text = format!("more than one agent has the name `{name}`; give the id");
        return Err(Refusal::new(Fault::Conflict, text).into());
    }
    Ok(first)
}

fn path_of(agent: &Value) -> anyhow::Result<String> {
    Ok(id_path("agents", agent["id"].as_str().context("the server sent an agent without id")?)?)
}

fn show(global: &Global, agent: &Value) -> anyhow::Result<()> {
    output::value(global.json, agent, |agent| {
        card(&[
            ("id", field(agent, "/id")),
            ("name", field(agent, "/name")),
            ("version", field(agent, "/version")),
            ("model", model(agent)),
            ("home", field(agent, "/covey_home_id")),
            ("description", field(agent, "/description")),
            ("created", field(agent, "/created_at")),
            ("archived", field(agent, "/archived_at")),
        ])
    })?;
    Ok(())
}

/// The model's name; the API gives it bare or in an object.
pub(crate) fn model(agent: &Value) -> String {
    if agent["model"].is_object() { field(agent, "/model/id") } else { field(agent, "/model") }
}

fn table(agents: &[Value]) -> String {
    let row = |agent: &Value| {
        let archived = if agent["archived_at"].is_null() { "-" } else { "archived" };
        [
            field(agent, "/id"),
            field(agent, "/name"),
            field(agent, "/version"),
            model(agent),
            archived.to_owned(),
        ]
    };
    output::table(["ID", "NAME", "VERSION", "MODEL", "STATE"], &agents.iter().map(row).collect::<Vec<_>>())
}
