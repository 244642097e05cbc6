//! The tests that mount homes for real, where the host can.

use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;

use super::{Ground, Outcome, passed};
use crate::process;

const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
const TESTS_LIMIT: Duration = Duration::from_secs(30 * 60);

pub(super) fn run(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    // The whole workspace, so that the features and so the built dependencies are those of the other stages.
    let mut build = process::cargo(ground.root);
    process::run(build.args(["build", "--locked", "--workspace", "--examples"]), BUILD_LIMIT)?;
    let mut probe = process::cargo(ground.root);
    probe.args(["run", "--locked", "--quiet", "-p", "covey-mount", "--example", "probe-mount"]);
    let answer = process::output_of_success(&mut probe, BUILD_LIMIT)?;
    if let Some(why) = reason(&answer)? {
        return Ok(Outcome::NotNeeded(why));
    }
    let mut command = process::cargo(ground.root);
    command.args([
        "test",
        "--locked",
        "--workspace",
        "--features",
        "covey-mount/mounts",
        "--test",
        "mounted",
    ]);
    passed(process::run(&mut command, TESTS_LIMIT))
}

/// Why homes cannot be mounted here; none: they can.
fn reason(answer: &str) -> anyhow::Result<Option<String>> {
    let answer: Value = serde_json::from_str(answer.trim()).context("the probe printed something else")?;
    if answer["ok"] == Value::Bool(true) {
        return Ok(None);
    }
    let text = |field: &str| answer[field].as_str().context("the probe says neither yes nor why not");
    Ok(Some(format!("homes cannot be mounted here: {}; {}", text("missing")?, text("remedy")?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_yes_runs_the_tests_and_only_a_reason_passes_without_them() {
        assert!(reason("{\"ok\":true}\n").unwrap().is_none());
        let why = reason(r#"{"ok":false,"missing":"root","remedy":"be root"}"#).unwrap().unwrap();
        assert!(why.contains("root; be root"), "{why}");
        assert!(reason(r#"{"ok":false}"#).is_err());
        assert!(reason("").is_err());
    }
}
