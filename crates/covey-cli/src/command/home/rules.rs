//! `covey home rules`: what is kept of homes, and how large they may be.

use clap::Args;
use covey_types::{ByteCount, Fault};
use serde_json::{Map, Value};

use super::source::{Place, Source};
use crate::client::Client;
use crate::exit_code::Refusal;
use crate::global::Global;
use crate::output::{self, card};
use crate::units::{self, Amount};

/// Rules to set; without one they are shown.
#[derive(Debug, Args)]
pub(crate) struct RulesArgs {
    /// The home: its id, or its agent's id or name.
    #[arg(required_unless_present = "org_wide", conflicts_with = "org_wide")]
    home: Option<String>,
    /// The org's rules, which hold for homes that have none of their own.
    #[arg(long = "org")]
    org_wide: bool,
    /// Keep so many of the newest snapshots; `none` leaves it to the org.
    #[arg(long, value_name = "NUMBER", value_parser = units::number)]
    keep_newest: Option<Amount>,
    /// Keep snapshots for so long, such as 12h, 7d or 4w; `none` leaves it to the org.
    #[arg(long, value_name = "TIME", value_parser = units::seconds)]
    keep_for: Option<Amount>,
    /// Bytes of the files in a home at most, such as 500MiB or 20GB; `none` leaves it to the org.
    #[arg(long, value_name = "BYTES", value_parser = units::bytes)]
    bytes_max: Option<Amount>,
    /// Files in a home at most; `none` leaves it to the org.
    #[arg(long, value_name = "NUMBER", value_parser = units::number)]
    files_max: Option<Amount>,
    /// Bytes of the files in all homes of the org at most.
    #[arg(long, value_name = "BYTES", value_parser = units::bytes, requires = "org_wide")]
    org_bytes_max: Option<Amount>,
}

impl RulesArgs {
    fn body(&self) -> Value {
        let given = [
            ("keep_newest", self.keep_newest),
            ("keep_for_s", self.keep_for),
            ("bytes_max", self.bytes_max),
            ("files_max", self.files_max),
            ("org_bytes_max", self.org_bytes_max),
        ];
        let value = |rule| match rule {
            Amount::Set(number) => Value::from(number),
            Amount::Unset => Value::Null,
        };
        let given = given.into_iter().filter_map(|(name, rule)| Some((name.to_owned(), value(rule?))));
        Value::Object(given.collect::<Map<_, _>>())
    }
}

pub(super) async fn rules(global: &Global, args: &RulesArgs) -> anyhow::Result<()> {
    let (client, path) = match &args.home {
        None => (Client::new(global)?, "/v1/covey/rules".to_owned()),
        Some(home) => match Source::open(global, &Place::of_server(home)).await? {
            Source::Server(server) => (server.client, format!("{}/rules", server.path)),
            Source::Store(_) => {
                return Err(Refusal::new(Fault::Bug, "a store has no rules").into());
            }
        },
    };
    let body = args.body();
    let rules = match body.as_object().is_some_and(|rules| rules.is_empty()) {
        true => client.get(&path).await?,
        false => client.put(&path, &body).await?,
    };
    output::value(global.json, &rules, |rules| shown(rules, args.org_wide))?;
    Ok(())
}

fn shown(rules: &Value, org_wide: bool) -> String {
    let effective = if org_wide { rules } else { &rules["effective"] };
    let rule = |name: &str, show: &dyn Fn(u64) -> String, none: &str| {
        let own = if org_wide || rules[name].is_u64() { "" } else { ", from the org" };
        effective[name].as_u64().map_or_else(|| none.to_owned(), |number| format!("{}{own}", show(number)))
    };
    let plain = |number: u64| number.to_string();
    let size = |number: u64| ByteCount(number).to_string();
    let mut pairs = vec![
        ("newest kept", rule("keep_newest", &plain, "only the current one")),
        ("kept for", rule("keep_for_s", &units::duration, "no time")),
        ("also kept", "what sessions that are not archived began from or left".to_owned()),
        ("bytes at most", rule("bytes_max", &size, "no limit")),
        ("files at most", rule("files_max", &plain, "no limit")),
    ];
    if org_wide {
        let used = rules["org_bytes"].as_u64().map_or_else(|| "-".to_owned(), size);
        pairs
            .push(("all homes at most", format!("{}, now {used}", rule("org_bytes_max", &size, "no limit"))));
    }
    card(&pairs)
}
