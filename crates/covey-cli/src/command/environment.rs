//! `covey environment`: what a session's sandbox is made from.

use clap::Subcommand;
use serde_json::{Value, json};

use crate::client::{Client, id_path};
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::output::{self, card, field};

/// What to do with environments.
#[derive(Debug, Subcommand)]
pub(crate) enum EnvironmentCommand {
    /// Make an environment.
    Create {
        /// Its name, for people.
        name: String,
        /// What it is for.
        #[arg(long)]
        description: Option<String>,
    },
    /// List environments that are not archived, newest first.
    List,
    /// Show one environment.
    Show {
        /// The environment's id.
        environment: String,
    },
    /// Archive an environment: new sessions cannot use it; those that do go on.
    Archive {
        /// The environment's id.
        environment: String,
    },
    /// Delete an environment that no session uses.
    Delete {
        /// The environment's id.
        environment: String,
    },
}

pub(crate) async fn run(global: &Global, command: &EnvironmentCommand) -> anyhow::Result<ExitCode> {
    let client = Client::new(global)?;
    match command {
        EnvironmentCommand::Create { name, description } => {
            let mut body = json!({ "name": name });
            if let Some(description) = description {
                body["description"] = description.as_str().into();
            }
            show(global, &client.post("/v1/environments", &body).await?)?;
        }
        EnvironmentCommand::List => {
            let environments = client.list("/v1/environments", None).await?;
            output::value(global.json, &json!({ "data": environments }), |_| table(&environments))?;
        }
        EnvironmentCommand::Show { environment } => {
            show(global, &client.get(&id_path("environments", environment)?).await?)?;
        }
        EnvironmentCommand::Archive { environment } => {
            let path = format!("{}/archive", id_path("environments", environment)?);
            show(global, &client.post(&path, &json!({})).await?)?;
        }
        EnvironmentCommand::Delete { environment } => {
            let deleted = client.delete(&id_path("environments", environment)?).await?;
            output::value(global.json, &deleted, |_| format!("deleted {environment}"))?;
        }
    }
    Ok(ExitCode::Success)
}

fn show(global: &Global, environment: &Value) -> anyhow::Result<()> {
    output::value(global.json, environment, |environment| {
        card(&[
            ("id", field(environment, "/id")),
            ("name", field(environment, "/name")),
            ("description", field(environment, "/description")),
            ("type", field(environment, "/config/type")),
            ("created", field(environment, "/created_at")),
            ("archived", field(environment, "/archived_at")),
        ])
    })?;
    Ok(())
}

fn table(environments: &[Value]) -> String {
    let row = |environment: &Value| {
        ["/id", "/name", "/config/type", "/created_at"].map(|pointer| field(environment, pointer))
    };
    output::table(["ID", "NAME", "TYPE", "CREATED"], &environments.iter().map(row).collect::<Vec<_>>())
}
