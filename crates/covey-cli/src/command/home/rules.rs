//! `covey home rules`: what is kept of homes, and how large they may be.

use clap::Args;
use covey_types::{ByteCount, Fault};
use serde_json::{Map, Value};

use super::source::{Place, Source};
use crate::client::Client;
use crate::exit_code::Refusal;
use crate::global::Global;
use crate::output::{self, card};

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
    #[arg(long, value_name = "NUMBER", value_parser = number)]
    keep_newest: Option<Rule>,
    /// Keep snapshots for so long, such as 12h, 7d or 4w; `none` leaves it to the org.
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    keep_for: Option<Rule>,
    /// Bytes of the files in a home at most, such as 500MiB or 20GB; `none` leaves it to the org.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    bytes_max: Option<Rule>,
    /// Files in a home at most; `none` leaves it to the org.
    #[arg(long, value_name = "NUMBER", value_parser = number)]
    files_max: Option<Rule>,
    /// Bytes of the files in all homes of the org at most.
    #[arg(long, value_name = "BYTES", value_parser = bytes, requires = "org_wide")]
    org_bytes_max: Option<Rule>,
}

/// A rule's new value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    /// This one.
    Set(u64),
    /// None.
    Unset,
}

impl From<Rule> for Value {
    fn from(rule: Rule) -> Self {
        match rule {
            Rule::Set(number) => number.into(),
            Rule::Unset => Self::Null,
        }
    }
}

fn number(text: &str) -> Result<Rule, String> {
    with_unit(text, &[("", 1)], "a whole number or `none`")
}

fn seconds(text: &str) -> Result<Rule, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400), ("w", 604_800)];
    with_unit(text, &units, "a number with s, m, h, d or w behind it, or `none`")
}

fn bytes(text: &str) -> Result<Rule, String> {
    let units = [
        ("", 1),
        ("B", 1),
        ("kB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
    ];
    with_unit(text, &units, "a number of bytes, with MB, GiB and the like behind it, or `none`")
}

fn with_unit(text: &str, units: &[(&str, u64)], expected: &str) -> Result<Rule, String> {
    if text == "none" {
        return Ok(Rule::Unset);
    }
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(at);
    let factor = units.iter().find(|(name, _)| *name == unit.trim_start()).map(|(_, factor)| *factor);
    let number =
        digits.parse::<u64>().ok().zip(factor).and_then(|(number, factor)| number.checked_mul(factor));
    number.map(Rule::Set).ok_or_else(|| format!("expected {expected}"))
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
        let given = given.into_iter().filter_map(|(name, rule)| Some((name.to_owned(), rule?.into())));
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
        ("kept for", rule("keep_for_s", &duration, "no time")),
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

fn duration(seconds: u64) -> String {
    let units = [(604_800, "w"), (86_400, "d"), (3600, "h"), (60, "m")];
    let exact = units.iter().find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit));
    exact.map_or_else(|| format!("{seconds}s"), |(unit, name)| format!("{}{name}", seconds / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_read_with_their_units_and_nothing_is_guessed() {
        assert_eq!(bytes("10GiB"), Ok(Rule::Set(10 << 30)));
        assert_eq!(bytes("1 MB"), Ok(Rule::Set(1_000_000)));
        assert_eq!(bytes("7"), Ok(Rule::Set(7)));
        assert_eq!(bytes("none"), Ok(Rule::Unset));
        assert_eq!(seconds("7d"), Ok(Rule::Set(604_800)));
        for bad in ["", "GiB", "-1", "1.5GiB", "10gib", "99999999999999TiB", "10 G"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
        // A bare number of seconds would be taken for days by half of all people.
        assert!(seconds("7").is_err() && seconds("7y").is_err() && number("7d").is_err());
        assert_eq!([duration(1_209_600), duration(86_400), duration(90)], ["2w", "1d", "90s"]);
    }
}
