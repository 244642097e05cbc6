//! `cargo xtask test`: the stages of CI, one after another, each with a verdict.
//!
//! A stage that cannot run because a tool is missing fails and says what to install; nothing is passed over
//! in silence. Later stages run even when earlier ones failed, so that one run shows everything.

mod buckets;
mod disk;
mod installed;
mod mounts;
mod postgres;
mod product;
mod sdk;
mod store;
mod unprivileged;
mod workspace;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;

use crate::{graph, licences, tidy};

/// Which stages to run.
#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Run only this stage; may be given several times.
    #[arg(long = "stage", value_name = "NAME")]
    stages: Vec<String>,
    /// Print the names of the stages and what they do.
    #[arg(long)]
    list: bool,
}

/// What every stage may use.
struct Ground<'a> {
    root: &'a Path,
    /// Tools that are installed once and kept: virtual environments and node modules.
    tools: PathBuf,
    is_root: bool,
}

/// What a stage found out when it did not fail.
enum Outcome {
    Passed,
    /// It has nothing to check here; the reason is shown and it counts as passed.
    NotNeeded(String),
}

type Run = fn(&Ground<'_>) -> anyhow::Result<Outcome>;

struct Stage {
    name: &'static str,
    about: &'static str,
    run: Run,
}

const STAGES: [Stage; 19] = [
    Stage { name: "format", about: "cargo fmt --check", run: workspace::format },
    Stage { name: "graph", about: "which crate may know which", run: |g| passed(graph::check(g.root)) },
    Stage { name: "tidy", about: "rules of CONTRIBUTING.md", run: |g| passed(tidy::check(g.root)) },
    Stage { name: "licences", about: "deny.toml", run: |g| passed(licences::check(g.root)) },
    Stage { name: "clippy", about: "lints, as errors", run: workspace::clippy },
    Stage { name: "docs", about: "the documentation builds without a warning", run: workspace::docs },
    Stage { name: "tests", about: "unit and integration tests of every crate", run: workspace::tests },
    Stage { name: "doctests", about: "examples in the documentation", run: workspace::doctests },
    Stage {
        name: "postgres",
        about: "the state on a real PostgreSQL: the contract, lost connections and servers, `covey server`, chaos over three",
        run: postgres::run,
    },
    Stage {
        name: "unprivileged",
        about: "as root: the tests of home, runner and sandboxd again as an ordinary user",
        run: unprivileged::run,
    },
    Stage {
        name: "mounts",
        about: "as root: homes are mounted for real, where the kernel can",
        run: mounts::run,
    },
    Stage {
        name: "store-kills",
        about: "thirty SIGKILLs of processes that work on one store",
        run: store::kills,
    },
    Stage {
        name: "store-power",
        about: "as root: the power goes while processes work on a store",
        run: store::cuts,
    },
    Stage {
        name: "buckets",
        about: "the home store on two servers that speak S3, with faults between",
        run: buckets::run,
    },
    Stage { name: "build", about: "the release binary, which the stages below use", run: product::build },
    Stage {
        name: "sdk-python",
        about: "the official Python SDKs against `covey up` and the scripted model",
        run: sdk::python,
    },
    Stage {
        name: "sdk-typescript",
        about: "the official TypeScript SDK against `covey up`",
        run: sdk::typescript,
    },
    Stage { name: "chaos", about: "ten sessions under random SIGKILL", run: product::chaos },
    Stage { name: "demo", about: "the demo, with every loss in it", run: product::demo },
];

fn passed(result: anyhow::Result<()>) -> anyhow::Result<Outcome> {
    result.map(|()| Outcome::Passed)
}

pub(crate) fn run(root: &Path, args: &TestArgs) -> anyhow::Result<ExitCode> {
    if args.list {
        for stage in &STAGES {
            println!("{:15} {}", stage.name, stage.about);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = chosen(&args.stages)?;
    if args.stages.is_empty() {
        disk::warn_before_a_whole_run(root)?;
    }
    let ground =
        Ground { root, tools: root.join(".test-env"), is_root: rustix::process::geteuid().is_root() };
    let mut lines = Vec::new();
    let (mut passed_count, mut failed_count) = (0, 0);
    for stage in chosen {
        println!("=== {}: {}", stage.name, stage.about);
        let started = Instant::now();
        let (verdict, remark) = match (stage.run)(&ground) {
            Ok(Outcome::Passed) => ("ok", String::new()),
            Ok(Outcome::NotNeeded(why)) => ("ok", format!("  (not needed: {why})")),
            Err(error) => {
                eprintln!("{error:#}");
                disk::blame_if_full(root);
                ("FAILED", String::new())
            }
        };
        if verdict == "ok" {
            passed_count += 1;
        } else {
            failed_count += 1;
        }
        let line = format!("{verdict:7}{:15} {}{remark}", stage.name, seconds(started.elapsed()));
        println!("{line}");
        lines.push(line);
    }
    println!("=== summary");
    for line in lines {
        println!("{line}");
    }
    println!("{passed_count} passed, {failed_count} failed");
    Ok(if failed_count == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn chosen(names: &[String]) -> anyhow::Result<Vec<&'static Stage>> {
    if let Some(unknown) = names.iter().find(|name| !STAGES.iter().any(|stage| stage.name == **name)) {
        bail!("there is no stage `{unknown}`; `cargo xtask test --list` shows them");
    }
    if names.is_empty() {
        return Ok(STAGES.iter().collect());
    }
    Ok(STAGES.iter().filter(|stage| names.iter().any(|name| name == stage.name)).collect())
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_found_by_name_and_run_in_their_own_order() {
        let names = ["tests", "format"].map(String::from);
        let order: Vec<&str> = chosen(&names).unwrap().iter().map(|stage| stage.name).collect();
        assert_eq!(order, ["format", "tests"]);
        assert_eq!(chosen(&[]).unwrap().len(), STAGES.len());
        assert!(chosen(&["nonsense".to_owned()]).is_err());
    }
}
