//! `covey demo`: the product's main job on real input, and the proof that nothing was lost.
//!
//! An agent repairs a small program in a home of more than ten thousand files, twice: once undisturbed, once
//! while the sandbox, the server and at last the whole host are taken away from it. Both must give the same.

mod checks;
mod compare;
mod run;
mod template;
mod tree;
mod world;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use covey_home::{Excludes, MaterializeRequest, NoProgress, PackStore};
use covey_server::model::scripted::{self, ScriptFile, ServeOptions};
use serde_json::{Value, json};

use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::store_key;

use self::compare::{first_difference, shown, unpaired_calls, was_interrupted, without_interrupted_call};
use self::run::{Loss, Outcome};
use self::world::World;

const SCRIPT: &str = include_str!("../../../../demo/script.json");
const ALL_LOSSES: [Loss; 3] = [Loss::SandboxKilled, Loss::ServerKilled, Loss::HostLost];

/// Shows that an agent's work survives whatever happens to its compute.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// A directory or checkout to use as the agent's repository, in place of Covey's own.
    #[arg(long, value_name = "PATH")]
    repo: Option<PathBuf>,
    /// Base URL of a Messages-compatible endpoint to use in place of the script; its key is taken from
    /// COVEY_MODEL_KEY or ANTHROPIC_API_KEY.
    #[arg(long, value_name = "URL")]
    model: Option<String>,
    /// Which model to ask for with --model.
    #[arg(long, value_name = "NAME", default_value = "claude-sonnet-4-5", requires = "model")]
    model_name: String,
    /// Keep the demo's directory and say where it is.
    #[arg(long)]
    keep: bool,
}

/// What was found wrong; empty means that nothing was lost.
type Findings = Vec<String>;

/// Runs the demo; the answer's last line on standard output is one JSON object with `--json`.
pub(crate) fn run(global: &Global, args: &DemoArgs) -> Result<ExitCode> {
    let began = Instant::now();
    let directory =
        tempfile::Builder::new().prefix("covey-demo-").tempdir().context("cannot make a directory")?;
    let result = demonstrate(args, directory.path());
    let kept = directory.keep();
    let ok = result.as_ref().is_ok_and(|report| report["ok"] == json!(true));
    if args.keep || !ok {
        // Also unasked when something went wrong: the logs in it say what.
        eprintln!("kept {}", kept.display());
    } else {
        world::remove_trees(&kept)?;
    }
    let mut report = result?;
    // Deleting some ten thousand files is part of what a person waits for.
    report["timings_ms"]["total"] = json!(began.elapsed().as_millis() as u64);
    crate::output::value(global.json, &report, report_text)?;
    if !ok {
        bail!("the demo found differences");
    }
    Ok(ExitCode::Success)
}

fn demonstrate(args: &DemoArgs, directory: &Path) -> Result<Value> {
    let began = Instant::now();
    let say = |text: &str| eprintln!("[{:6.2} s] {text}", began.elapsed().as_secs_f64());
    say("building a home from a repository and package sources of this machine");
    let template = template::build(&directory.join("template"), args.repo.as_deref())?;
    let template_ms = began.elapsed().as_millis() as u64;
    say(&format!("{} files, {} bytes, {} hard links", template.files, template.bytes, template.hard_links));

    let runtime = tokio::runtime::Runtime::new().context("the runtime does not start")?;
    let handle = runtime.handle();
    let scripted_model = match &args.model {
        Some(_) => None,
        None => Some(runtime.block_on(serve_script())?),
    };
    let model_url = match (&args.model, &scripted_model) {
        (Some(url), _) => url.clone(),
        (None, Some(model)) => model.base_url(),
        (None, None) => bail!("no model"),
    };
    let scripted = scripted_model.is_some();
    let model_name = if scripted { "scripted" } else { args.model_name.as_str() };
    let place =
        Place { directory, template: &template.dir, model_url: &model_url, model_name, scripted, handle };
    let mut findings = Findings::new();

    let mut reference = None;
    if scripted {
        say("the session without losses");
        reference = Some(one_run(&place, "reference", &[])?);
    }
    say("the same session, and what can die dies");
    let lossy = one_run(&place, "lossy", &ALL_LOSSES)?;
    for loss in &lossy.outcome.losses {
        say(&format!("{} {}: next step after {} ms", loss.loss, loss.moment, loss.to_next_step_ms));
    }

    say("comparing");
    let comparing = Instant::now();
    let began_with = tree::read(&template.dir)?;
    let left = tree::read(&lossy.restored)?;
    let compared_with = match &reference {
        Some(reference) => tree::read(&reference.restored)?,
        // With a real model there is no second run to compare with: everything it was not asked to touch must be
        // as it was, and the rest is judged by the checks.
        None => left.clone(),
    };
    findings.extend(tree::differences(&began_with, &compared_with, &left));
    if reference.is_none() {
        findings.extend(
            tree::differences(&began_with, &began_with, &left).into_iter().filter(|difference| {
                !difference.starts_with("invoice") && !difference.starts_with("witness")
            }),
        );
    }
    check_history(reference.as_ref().map(|r| &r.outcome), &lossy.outcome, &mut findings);
    if let Some(model) = &scripted_model {
        findings
            .extend(model.violations().iter().map(|v| format!("a request broke the wire's rules: {v:?}")));
    }
    for run in reference.iter().chain([&lossy]) {
        if (run.red_before, run.green_after) != (true, true) {
            findings.push(format!("checks: red before {}, green after {}", run.red_before, run.green_after));
        }
    }
    let compare_ms = comparing.elapsed().as_millis() as u64;
    findings.sort();
    findings.dedup();
    let differences: Vec<&String> = findings.iter().take(20).collect();
    Ok(json!({
        "ok": findings.is_empty(),
        "losses": lossy.outcome.losses,
        "home": {
            "files": template.files,
            "bytes": template.bytes,
            "hard_links": template.hard_links,
            "sources": template.sources,
            "generation": lossy.outcome.generation,
            "root": lossy.outcome.root,
            "entries_compared": left.len(),
        },
        "model": model_name,
        "differences": differences,
        "differences_count": findings.len(),
        "timings_ms": {
            "template": template_ms,
            "session_without_losses": reference.as_ref().map(|r| r.outcome.session_ms),
            "session_with_losses": lossy.outcome.session_ms,
            "compare": compare_ms,
        },
    }))
}

async fn serve_script() -> Result<scripted::Handle> {
    let script: ScriptFile = serde_json::from_str(SCRIPT).context("the demo's script")?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.context("cannot listen on loopback")?;
    scripted::serve(script, listener, ServeOptions::default()).context("cannot serve the scripted model")
}

/// A run and what was taken from its store afterwards.
struct Run {
    outcome: Outcome,
    /// The home in the end: for the run with losses put back from the store on an empty directory.
    restored: PathBuf,
    red_before: bool,
    green_after: bool,
}

/// What both runs share.
struct Place<'a> {
    directory: &'a Path,
    template: &'a Path,
    model_url: &'a str,
    model_name: &'a str,
    scripted: bool,
    handle: &'a tokio::runtime::Handle,
}

fn one_run(place: &Place<'_>, name: &str, losses: &[Loss]) -> Result<Run> {
    let mut world = World::start(&place.directory.join(name), place.model_url, place.handle)?;
    let outcome = run::run(&mut world, place.template, losses, place.scripted, place.model_name)?;
    world.stop()?;
    let restored = match losses {
        // Nothing was taken away: the working copy is what the session made.
        [] => world.working_copy(&outcome.home),
        _ => {
            let target = place.directory.join(format!("{name}-restored"));
            put_back(&world, &outcome, &target)?;
            target
        }
    };
    let red_before = !checks::pass(&place.template.join("invoice"), place.directory)?;
    let green_after = checks::pass(&restored.join("invoice"), place.directory)?;
    Ok(Run { outcome, restored, red_before, green_after })
}

/// Puts a run's published home on an empty directory, from its store and nothing else.
fn put_back(world: &World, outcome: &Outcome, target: &Path) -> Result<()> {
    let store = PackStore::open_directory_with(
        &world.store_dir(),
        &outcome.org,
        store_key::from_setting()?.as_ref(),
    )?;
    covey_home::materialize(&MaterializeRequest {
        root: outcome.root.parse().context("the published root")?,
        dir: target,
        store: &store,
        stat_cache: None,
        excludes: &Excludes::none(),
        owner: None,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 0,
    })?;
    Ok(())
}

fn check_history(reference: Option<&Outcome>, lossy: &Outcome, findings: &mut Findings) {
    for call in unpaired_calls(&lossy.events) {
        findings.push(format!("call {call} does not have exactly one result"));
    }
    let interrupted =
        lossy.events.iter().filter(|e| e["type"] == "agent.tool_result" && was_interrupted(e)).count();
    if interrupted > 1 {
        findings.push(format!(
            "{interrupted} calls were interrupted; only the one that ran when the sandbox died may be"
        ));
    }
    if lossy.events.iter().any(|event| event["type"] == "home_rolled_back") {
        findings.push("the home was rolled back although its last step was secured".to_owned());
    }
    let Some(reference) = reference else { return };
    match without_interrupted_call(&shown(&lossy.events)) {
        Ok(lossy) => findings.extend(first_difference(&shown(&reference.events), &lossy)),
        Err(finding) => findings.push(finding),
    }
}

fn report_text(report: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut lines =
        vec![format!("home: {} files, {} bytes", report["home"]["files"], report["home"]["bytes"])];
    for loss in report["losses"].as_array().into_iter().flatten() {
        lines.push(format!("{} {}", text(&loss["loss"]).replace('_', " "), text(&loss["moment"])));
        lines.push(format!("    lost:      {}", text(&loss["lost"])));
        lines.push(format!("    recovered: {}", text(&loss["recovered"])));
        lines.push(format!("    next finished step after {} ms", loss["to_next_step_ms"]));
    }
    for difference in report["differences"].as_array().into_iter().flatten() {
        lines.push(format!("DIFFERENT {}", text(difference)));
    }
    let verdict = if report["ok"] == json!(true) { "nothing was lost" } else { "something was lost" };
    lines.push(format!("{verdict}, in {} ms", report["timings_ms"]["total"]));
    lines.join("\n")
}
