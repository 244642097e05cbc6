//! As root: the tests whose subject depends on who runs them, once more as an ordinary user.
//!
//! The test programs are copied to where that user can read them; it gets a home and a directory for
//! temporary files of its own, and nothing else. Run by an ordinary user, the stage `tests` has done it all.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;

use super::{Ground, Outcome, installed};
use crate::process;

/// Crates that behave differently for root: ownership, namespaces, cgroups.
const PACKAGES: [&str; 4] = ["covey-home", "covey-mount", "covey-runner", "covey-sandboxd"];
/// In no account list, so nothing on the machine is readable or owned by accident; not the overflow id.
const UID: u32 = 23_456;
const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
const PROGRAM_LIMIT: Duration = Duration::from_secs(15 * 60);

pub(super) fn run(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    if !ground.is_root {
        return Ok(Outcome::NotNeeded("everything ran as an ordinary user already".to_owned()));
    }
    installed::require("setpriv", "util-linux")?;
    let programs = test_programs(ground)?;
    if programs.is_empty() {
        bail!("no test program found for {}", PACKAGES.join(", "));
    }
    let place = tempfile::Builder::new().prefix("covey-unprivileged-").tempdir()?;
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755))?;
    let mut failed = Vec::new();
    for (index, program) in programs.iter().enumerate() {
        let name = program.file_name().context("a test program without a name")?.to_string_lossy();
        let dir = place.path().join(index.to_string());
        println!("--- {name} as uid {UID}");
        if let Err(error) = run_one(program, &dir) {
            eprintln!("{error:#}");
            failed.push(name.into_owned());
        }
    }
    if !failed.is_empty() {
        bail!("failed as an ordinary user: {}", failed.join(", "));
    }
    Ok(Outcome::Passed)
}

fn run_one(program: &Path, dir: &Path) -> anyhow::Result<()> {
    let (home, temporary) = (dir.join("home"), dir.join("tmp"));
    for own in [dir, &home, &temporary] {
        fs::create_dir(own)?;
        chown(own, Some(UID), Some(UID))?;
    }
    let copy = dir.join("test");
    fs::copy(program, &copy)?;
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755))?;
    let mut command = Command::new("setpriv");
    let id = UID.to_string();
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all"]).arg(&copy);
    command.current_dir(&home).env("HOME", &home).env("TMPDIR", &temporary);
    // A directory of root's, which the tests must not write to by accident.
    command.env_remove("XDG_RUNTIME_DIR").env_remove("CARGO_HOME").env_remove("CARGO_TARGET_DIR");
    process::run(&mut command, PROGRAM_LIMIT)
}

/// Builds the test programs as the stage `tests` does, and returns those of [`PACKAGES`].
fn test_programs(ground: &Ground<'_>) -> anyhow::Result<Vec<PathBuf>> {
    let mut command = process::cargo(ground.root);
    command.args(["test", "--locked", "--workspace", "--no-run", "--lib", "--bins", "--tests"]);
    command.arg("--message-format=json-render-diagnostics");
    let messages = process::output_of_success(&mut command, BUILD_LIMIT)?;
    let mut programs = Vec::new();
    for line in messages.lines() {
        let message: Value =
            serde_json::from_str(line).context("cargo printed something that is not JSON")?;
        if let Some(program) = test_program(&message) {
            programs.push(program);
        }
    }
    Ok(programs)
}

fn test_program(message: &Value) -> Option<PathBuf> {
    let is_test = message["profile"]["test"].as_bool()?;
    let id = message["package_id"].as_str()?;
    // `path+file:///somewhere/crates/covey-home#0.1.0`
    let wanted = PACKAGES.iter().any(|name| id.contains(&format!("/{name}#")));
    (is_test && wanted).then(|| message["executable"].as_str().map(PathBuf::from))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_test_programs_of_the_chosen_crates_are_taken() {
        let message = |package: &str, test: bool| {
            serde_json::json!({
                "package_id": format!("path+file:///x/crates/{package}#0.1.0"),
                "profile": {"test": test}, "executable": "/x/t",
            })
        };
        assert_eq!(test_program(&message("covey-home", true)), Some(PathBuf::from("/x/t")));
        assert_eq!(test_program(&message("covey-home", false)), None);
        assert_eq!(test_program(&message("covey-server", true)), None);
        assert_eq!(test_program(&serde_json::json!({"reason": "build-finished"})), None);
    }
}
