//! `covey token`: who may ask the server.

use clap::Subcommand;
use serde_json::{Value, json};

use crate::client::{Client, id_path};
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::output::{self, card, field};

/// What to do with API tokens.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Make a token; its secret is printed once and stored nowhere.
    Create {
        /// Who or what will use it, for people.
        name: String,
    },
    /// List tokens, newest first, revoked ones included.
    List,
    /// Revoke a token, for good.
    Revoke {
        /// The token's id. Not called `token`: that is the global option for the one that is used.
        #[arg(value_name = "TOKEN_ID")]
        id: String,
    },
}

pub(crate) async fn run(global: &Global, command: &TokenCommand) -> anyhow::Result<ExitCode> {
    let client = Client::new(global)?;
    match command {
        TokenCommand::Create { name } => {
            show(global, &client.post("/v1/covey/tokens", &json!({ "name": name })).await?)?;
        }
        TokenCommand::List => {
            let tokens = client.list("/v1/covey/tokens", None).await?;
            output::value(global.json, &json!({ "data": tokens }), |_| table(&tokens))?;
        }
        TokenCommand::Revoke { id } => {
            let path = format!("{}/revoke", id_path("covey/tokens", id)?);
            show(global, &client.post(&path, &json!({})).await?)?;
        }
    }
    Ok(ExitCode::Success)
}

fn show(global: &Global, token: &Value) -> anyhow::Result<()> {
    output::value(global.json, token, |token| {
        let mut rows = vec![("id", field(token, "/id")), ("name", field(token, "/name"))];
        if token["secret"].is_string() {
            rows.push(("secret", field(token, "/secret")));
        }
        rows.extend([
            ("created", field(token, "/created_at")),
            ("last used", field(token, "/last_used_at")),
            ("revoked", field(token, "/revoked_at")),
        ]);
        card(&rows)
    })?;
    Ok(())
}

fn table(tokens: &[Value]) -> String {
    let row = |token: &Value| {
        ["/id", "/name", "/created_at", "/last_used_at", "/revoked_at"].map(|pointer| field(token, pointer))
    };
    let rows: Vec<_> = tokens.iter().map(row).collect();
    output::table(["ID", "NAME", "CREATED", "LAST USED", "REVOKED"], &rows)
}
