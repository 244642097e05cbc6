//! Stages that use the release binary as a person would.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;

use super::{Ground, Outcome, passed};
use crate::metadata::Metadata;
use crate::process;

const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
const CHAOS_RUNS: u32 = 10;
const CHAOS_LIMIT: Duration = Duration::from_secs(10 * 60);
/// The demo's own promise is 60 s after the build on a quiet machine; this one may be busy.
const DEMO_LIMIT: Duration = Duration::from_secs(5 * 60);

/// Where the release binary is, built or not.
pub(super) fn covey(ground: &Ground<'_>) -> anyhow::Result<PathBuf> {
    Ok(Metadata::read(ground.root)?.target_directory.join("release/covey"))
}

/// As [`covey`], but it must be there.
pub(super) fn built_covey(ground: &Ground<'_>) -> anyhow::Result<PathBuf> {
    build(ground)?;
    covey(ground)
}

pub(super) fn build(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    let mut command = process::cargo(ground.root);
    passed(process::run(command.args(["build", "--locked", "--release"]), BUILD_LIMIT))
}

pub(super) fn chaos(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    built_covey(ground)?;
    let runs = CHAOS_RUNS.to_string();
    let mut command = process::cargo(ground.root);
    command.args(["xtask", "chaos", "--runs", &runs, "--seed", "1", "--json"]);
    let report = last_object(&process::output_of_success(&mut command, CHAOS_LIMIT)?)?;
    println!("{report}");
    check_chaos(&report)?;
    Ok(Outcome::Passed)
}

fn check_chaos(report: &Value) -> anyhow::Result<()> {
    if report["runs"].as_u64() != Some(u64::from(CHAOS_RUNS)) {
        bail!("not all {CHAOS_RUNS} runs took place: {report}");
    }
    for field in ["lost", "doubled", "stuck"] {
        if report[field].as_u64() != Some(0) {
            bail!("`{field}` is not 0: {report}");
        }
    }
    Ok(())
}

pub(super) fn demo(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    let mut command = process::cargo(ground.root);
    command.args(["run", "--locked", "--quiet", "--release", "--", "demo", "--json"]);
    let (status, text) = process::output(&mut command, BUILD_LIMIT.max(DEMO_LIMIT))?;
    println!("{text}");
    if !status.success() {
        bail!("the demo ended with {status}");
    }
    let report = last_object(&text)?;
    if report["ok"] != Value::Bool(true) {
        bail!("the demo's report does not say `\"ok\":true`");
    }
    if report["losses"].as_array().is_none_or(Vec::is_empty) {
        bail!("the demo's report lists no loss");
    }
    Ok(Outcome::Passed)
}

fn last_object(text: &str) -> anyhow::Result<Value> {
    let line = text.lines().rfind(|line| !line.trim().is_empty()).context("nothing was printed")?;
    serde_json::from_str(line).with_context(|| format!("the last line is not JSON: {line}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chaos_report_passes_only_with_all_runs_and_nothing_lost() {
        let report =
            |runs: u32, lost: u32| serde_json::json!({"runs": runs, "lost": lost, "doubled": 0, "stuck": 0});
        assert!(check_chaos(&report(CHAOS_RUNS, 0)).is_ok());
        assert!(check_chaos(&report(CHAOS_RUNS - 1, 0)).is_err());
        assert!(check_chaos(&report(CHAOS_RUNS, 1)).is_err());
        assert!(check_chaos(&serde_json::json!({"runs": CHAOS_RUNS})).is_err());
    }

    #[test]
    fn the_report_is_the_last_line() {
        assert_eq!(last_object("talk\n{\"ok\":true}\n\n").unwrap()["ok"], true);
        assert!(last_object("{\"ok\":true}\ntalk\n").is_err());
    }
}
