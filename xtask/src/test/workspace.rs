//! Stages that cargo itself knows how to run.
//!
//! All of them build the whole workspace with the same features and, but for the release binary, the same
//! profile: another combination would compile every dependency once more.

use std::process::Command;
use std::time::Duration;

use super::{Ground, Outcome, passed};
use crate::process;

const FORMAT_LIMIT: Duration = Duration::from_secs(2 * 60);
/// Building everything from nothing on two cores, with other builds beside it.
const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
const TESTS_LIMIT: Duration = Duration::from_secs(45 * 60);

pub(super) fn format(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    passed(process::run(process::cargo(ground.root).args(["fmt", "--all", "--check"]), FORMAT_LIMIT))
}

pub(super) fn clippy(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    let mut command = process::cargo(ground.root);
    command.args(["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    passed(process::run(&mut command, BUILD_LIMIT))
}

pub(super) fn docs(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    let mut command = process::cargo(ground.root);
    command.args(["doc", "--locked", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings");
    passed(process::run(&mut command, BUILD_LIMIT))
}

pub(super) fn tests(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    let mut command = process::cargo(ground.root);
    if has_nextest(ground) {
        command.args(["nextest", "run", "--locked", "--workspace", "--no-fail-fast"]);
    } else {
        command.args(["test", "--locked", "--workspace", "--no-fail-fast", "--lib", "--bins", "--tests"]);
    }
    passed(process::run(&mut command, TESTS_LIMIT))
}

fn has_nextest(ground: &Ground<'_>) -> bool {
    // Asked through cargo's own search, which also looks where PATH does not point.
    let mut command: Command = process::cargo(ground.root);
    command.args(["nextest", "--version"]).stderr(std::process::Stdio::null());
    process::output_of_success(&mut command, FORMAT_LIMIT).is_ok()
}

pub(super) fn doctests(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    let mut command = process::cargo(ground.root);
    passed(process::run(command.args(["test", "--locked", "--workspace", "--doc"]), TESTS_LIMIT))
}
