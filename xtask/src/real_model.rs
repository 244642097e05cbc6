//! `cargo xtask real-model`: a real, very small model drives a turn with a tool call through the JSON dialect.
//!
//! Optional and no stage of CI: the server of the model is built from source. It shows that a server of somebody else's
//! understands Covey's requests and enforces the schema, and that a model which cannot call tools can use them. What it
//! does not show: skill; the model has 135 million parameters.

mod llama;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::{metadata::Metadata, process};

/// Options of `cargo xtask real-model`.
#[derive(Debug, Args)]
pub(crate) struct RealModelArgs {
    /// A `covey` that is there already, instead of building one.
    #[arg(long, value_name = "PROGRAM")]
    covey: Option<PathBuf>,
    /// A `llama-server` that is there already, instead of building one.
    #[arg(long, value_name = "PROGRAM")]
    server: Option<PathBuf>,
    /// Another model in GGUF.
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Sessions that are tried until one has called its tool and come to an end.
    #[arg(long, default_value_t = 5)]
    tries: u32,
    /// Print the report as one JSON line.
    #[arg(long)]
    json: bool,
}

const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// One session: a small model on a busy machine writes some ten tokens a second.
const SESSION_LIMIT: Duration = Duration::from_secs(5 * 60);
const POLL: Duration = Duration::from_millis(200);
/// A model that calls its tool again and again is stopped here; the session has shown what it can.
const CALLS_ENOUGH: usize = 6;
/// What the model is called in the models file and by the agent.
const MODEL: &str = "smollm2-135m";

pub(crate) fn run(root: &Path, args: &RealModelArgs) -> Result<()> {
    let covey = args.covey.clone().map_or_else(|| built_covey(root), Ok)?;
    let tools = root.join(".test-env");
    let data = tempfile::Builder::new().prefix("covey-real-model-").tempdir()?;
    let model =
        llama::Server::start(root, &tools, args.server.as_deref(), args.model.as_deref(), data.path())?;
    let up = Up::start(&covey, data.path(), &model.url())?;
    let mut tried = Vec::new();
    for number in 0..args.tries.max(1) {
        let seen = up.session(number)?;
        eprintln!("{}", seen.told());
        let passed = seen.has_used_its_tool();
        tried.push(seen);
        if passed {
            break;
        }
    }
    let last = tried.last().context("no session was tried")?;
    let report = json!({
        "model": MODEL,
        "tries": tried.len(),
        "ok": last.has_used_its_tool(),
        "calls": last.calls.len(),
        "results": last.results,
        "stop_reason": last.stop_reason,
        "answer": last.answer,
        "elapsed_ms": u64::try_from(last.elapsed.as_millis()).unwrap_or(u64::MAX),
        "output_tokens": last.output_tokens,
    });
    up.stop()?;
    model.stop()?;
    if args.json {
        println!("{report}");
    } else {
        println!("{}", serde_json::to_string_pretty(&report)?);
    }
    if report["ok"] != true {
        bail!("in {} sessions the model called no tool with success and came to an end", tried.len());
    }
    Ok(())
}

fn built_covey(root: &Path) -> Result<PathBuf> {
    let mut build = process::cargo(root);
    process::run(build.args(["build", "--locked", "--release"]), BUILD_LIMIT)?;
    Ok(Metadata::read(root)?.target_directory.join("release/covey"))
}

/// What a session showed.
#[derive(Debug, Default)]
struct Seen {
    calls: Vec<String>,
    /// Results that are no errors.
    results: usize,
    stop_reason: String,
    answer: String,
    output_tokens: u64,
    elapsed: Duration,
}

impl Seen {
    fn has_used_its_tool(&self) -> bool {
        self.results > 0 && self.stop_reason == "end_turn"
    }

    fn told(&self) -> String {
        let Self { calls, results, stop_reason, answer, elapsed, .. } = self;
        let seconds = elapsed.as_secs_f64();
        format!("{calls:?}: {results} results, then {stop_reason} after {seconds:.1} s: {answer}")
    }
}

/// A running `covey up`; killed when dropped.
#[derive(Debug)]
struct Up {
    child: Child,
    url: String,
    token: String,
}

impl Up {
    fn start(covey: &Path, data: &Path, model_url: &str) -> Result<Self> {
        let file = data.join("models.toml");
        let provider = format!(
            "[[providers]]\nname = \"llama-server\"\nkind = \"openai-chat\"\nbase_url = \"{model_url}\"\n\
             dialect = \"json\"\ncontext_tokens = {}\nmodels = [\"{MODEL}\"]\n",
            llama::CONTEXT_TOKENS
        );
        std::fs::write(&file, provider)?;
        let mut command = Command::new(covey);
        command.args(["up", "--json", "--listen", "127.0.0.1:0", "--data-dir"]).arg(data.join("data"));
        command.arg("--models-file").arg(&file).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("`covey up` does not start")?;
        let stdout = child.stdout.take().context("stdout is not a pipe")?;
        let mut line = String::new();
        // It comes when the server listens; an end before that is an empty line.
        BufReader::new(stdout).read_line(&mut line)?;
        let ready: Value = serde_json::from_str(&line).unwrap_or_default();
        let field = |name: &str| ready[name].as_str().map(str::to_owned);
        match field("url").zip(field("token")) {
            Some((url, token)) => Ok(Self { child, url, token }),
            None => {
                process::stop(&mut child, STOP_LIMIT)?;
                bail!("`covey up` did not say where it listens but {line:?}")
            }
        }
    }

    fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let request = ureq::post(format!("{}{path}", self.url)).header("x-api-key", &self.token);
        let mut answer = request.send_json(body).with_context(|| format!("POST {path}"))?;
        Ok(answer.body_mut().read_json()?)
    }

    fn events(&self, session: &str) -> Result<Vec<Value>> {
        let path = format!("/v1/sessions/{session}/events?limit=1000");
        let request = ureq::get(format!("{}{path}", self.url)).header("x-api-key", &self.token);
        let page: Value = request.call().with_context(|| format!("GET {path}"))?.body_mut().read_json()?;
        page["data"].as_array().cloned().context("events have `data`")
    }

    /// One session from its message to its end.
    fn session(&self, number: u32) -> Result<Seen> {
        let bash = json!({"type": "agent_toolset_20260401", "default_config": {"enabled": false},
            "configs": [{"name": "bash", "enabled": true}]});
        let agent = self.post(
            "/v1/agents",
            &json!({
                "name": format!("real-model-{number}"),
                "model": {"id": MODEL, "max_tokens": 256},
                "system": "You use the tool bash to look, and then you answer in one short sentence.",
                "tools": [bash],
            }),
        )?;
        let environment = self.post(
            "/v1/environments",
            &json!({"name": format!("e{number}"), "config": {"type": "self_hosted"}}),
        )?;
        // Other words each time: the model's choice hangs on them.
        let texts = [
            "Run the command `echo hello from covey` with bash, then tell me what it printed.",
            "Use bash to run `ls -la`. Then answer.",
            "Which user am I? Use bash with the command `whoami`, then answer with the name.",
        ];
        let text = texts[number as usize % texts.len()];
        let message = json!({"type": "user.message", "content": [{"type": "text", "text": text}]});
        let began = Instant::now();
        let session = self.post(
            "/v1/sessions",
            &json!({"agent": agent["id"], "environment_id": environment["id"], "initial_events": [message]}),
        )?;
        let id = session["id"].as_str().context("a session has an id")?;
        let mut is_interrupted = false;
        loop {
            let events = self.events(id)?;
            let mut seen = Seen::of(&events);
            if !seen.stop_reason.is_empty() {
                seen.elapsed = began.elapsed();
                return Ok(seen);
            }
            if began.elapsed() > SESSION_LIMIT {
                bail!("the session did not come to an end within {} s: {events:?}", SESSION_LIMIT.as_secs());
            }
            if seen.calls.len() > CALLS_ENOUGH && !is_interrupted {
                self.post(
                    &format!("/v1/sessions/{id}/events"),
                    &json!({"events": [{"type": "user.interrupt"}]}),
                )?;
                is_interrupted = true;
            }
            std::thread::sleep(POLL);
        }
    }

    fn stop(mut self) -> Result<()> {
        let status = process::stop(&mut self.child, STOP_LIMIT).context("`covey up` does not stop")?;
        if !status.success() {
            bail!("`covey up` ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            process::stop(&mut self.child, STOP_LIMIT).ok();
        }
    }
}

impl Seen {
    fn of(events: &[Value]) -> Self {
        let mut seen = Self::default();
        for event in events {
            match event["type"].as_str().unwrap_or_default() {
                "agent.tool_use" => seen.calls.push(event["input"].to_string()),
                "agent.tool_result" if event["is_error"] != true => seen.results += 1,
                "agent.message" => {
                    event["content"][0]["text"].as_str().unwrap_or_default().clone_into(&mut seen.answer)
                }
                "span.model_request_end" => {
                    seen.output_tokens += event["model_usage"]["output_tokens"].as_u64().unwrap_or(0);
                }
                "session.status_idle" => {
                    event["stop_reason"]["type"]
                        .as_str()
                        .unwrap_or_default()
                        .clone_into(&mut seen.stop_reason);
                }
                _ => {}
            }
        }
        seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_session_with_a_result_and_an_end_has_used_its_tool() {
        let call = json!({"type": "agent.tool_use", "input": {"command": "ls"}});
        let result = |is_error: bool| json!({"type": "agent.tool_result", "is_error": is_error});
        let idle = |reason: &str| json!({"type": "session.status_idle", "stop_reason": {"type": reason}});
        let passed = |events: &[Value]| Seen::of(events).has_used_its_tool();
        assert!(passed(&[call.clone(), result(false), idle("end_turn")]));
        assert!(!passed(&[call.clone(), result(true), idle("end_turn")]));
        assert!(!passed(&[call.clone(), result(false), idle("retries_exhausted")]));
        assert!(!passed(&[call, result(false)]));
        assert!(!passed(&[idle("end_turn")]));
    }
}
