//! One session of the chaos run: twelve calls, one kill, and the verdict.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::STEPS;
use super::cluster::{Cluster, Victim, user_message, wait_for};

/// A session that takes longer than this after its last event is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);

/// What one session showed.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    /// Acknowledged events that are not there any more, or in another order; successful calls without a trace.
    pub(super) lost: Vec<String>,
    /// Calls that ran more than once.
    pub(super) doubled: Vec<String>,
    /// Why the session did not come to its end.
    pub(super) stuck: Option<String>,
    /// Calls whose result says that they were interrupted.
    pub(super) interrupted: usize,
    pub(super) rolled_back: usize,
    /// Whether there was something to kill.
    pub(super) killed: bool,
    /// From the kill to the next finished step.
    pub(super) recovery_ms: Option<u64>,
}

impl Verdict {
    pub(super) fn is_clean(&self) -> bool {
        self.lost.is_empty() && self.doubled.is_empty() && self.stuck.is_none()
    }
}

/// Twelve turns of one call each; an interrupted call is made again under a new id.
pub(super) fn script() -> Value {
    let turn = json!({
        "think_ms": 15,
        "calls": [{
            "name": "bash",
            "input": {"command": "echo {{call_id}} >> ~/witness; sleep 0.03; echo done {{call_id}}"},
        }],
        "on_interrupted": {"again_when": ""},
    });
    let mut turns = vec![turn; STEPS];
    turns.push(json!({"text": "All steps are done."}));
    json!({"scripts": [{"when": "", "seed": 7, "turns": turns}]})
}

/// Events by id in the order in which they were first seen.
#[derive(Default)]
pub(super) struct Acknowledged {
    ids: Vec<String>,
    known: BTreeMap<String, ()>,
}

impl Acknowledged {
    pub(super) fn note(&mut self, events: &[Value]) {
        for event in events {
            let id = event["id"].as_str().unwrap_or_default();
            if self.known.insert(id.to_owned(), ()).is_none() {
                self.ids.push(id.to_owned());
            }
        }
    }

    /// What of it is missing or out of order in the final log.
    pub(super) fn missing(&self, events: &[Value]) -> Vec<String> {
        let mut rest = events.iter().map(|event| event["id"].as_str().unwrap_or_default());
        self.ids.iter().filter(|id| !rest.any(|there| there == id.as_str())).cloned().collect()
    }
}

/// Runs a session; the kill comes `delay` after its message was accepted.
pub(super) fn run(
    cluster: &mut Cluster,
    steps: usize,
    kill: Option<(Victim, Duration, Duration)>,
) -> Result<Verdict> {
    let (session, home) = create(cluster)?;
    cluster.post(&format!("/v1/sessions/{session}/events"), &user_message("run the steps"))?;
    let began = Instant::now();
    let mut verdict = Verdict::default();
    let mut acknowledged = Acknowledged::default();
    let mut pending = kill;
    let mut killed_at: Option<(Instant, usize)> = None;
    let ended = wait_for(STUCK_AFTER, || {
        // While the server is down there is nothing to see; that it comes back is what the limit checks.
        let events = list(cluster, &session).unwrap_or_default();
        acknowledged.note(&events);
        if let Some((victim, delay, downtime)) = pending
            && began.elapsed() >= delay
        {
            pending = None;
            match strike(cluster, victim, downtime) {
                Ok(killed) => {
                    verdict.killed = killed;
                    killed_at = Some((Instant::now(), results(&events)));
                }
                Err(error) => return Some(Err(error)),
            }
        }
        if let Some((at, before)) = killed_at
            && verdict.recovery_ms.is_none()
            && results(&events) > before
        {
            verdict.recovery_ms = Some(at.elapsed().as_millis() as u64);
        }
        is_idle(&events).then_some(Ok(events))
    });
    let events = match ended {
        Some(events) => events?,
        None => {
            let events = list(cluster, &session).unwrap_or_default();
            verdict.stuck = Some(format!("session {session}, last event {:?}", events.last()));
            events
        }
    };
    verdict.lost = acknowledged.missing(&events);
    judge_calls(&events, &cluster.witness(&home), steps, &mut verdict);
    Ok(verdict)
}

fn create(cluster: &Cluster) -> Result<(String, String)> {
    let id = |answer: &Value, field: &str| {
        answer[field].as_str().map(str::to_owned).with_context(|| format!("no `{field}` in {answer}"))
    };
    let agent = cluster.post(
        "/v1/agents",
        &json!({"name": "chaos", "model": "scripted", "tools": [{"type": "agent_toolset_20260401"}]}),
    )?;
    let agent = id(&agent, "id")?;
    let environment = id(&cluster.post("/v1/environments", &json!({"name": "chaos"}))?, "id")?;
    let session = cluster.post("/v1/sessions", &json!({"agent": agent, "environment_id": environment}))?;
    let homes = cluster.get("/v1/covey/homes")?;
    let home = homes["data"]
        .as_array()
        .and_then(|homes| homes.iter().find(|home| home["agent_id"] == agent.as_str()))
        .with_context(|| format!("no home of {agent}"))?;
    Ok((id(&session, "id")?, id(home, "id")?))
}

fn strike(cluster: &mut Cluster, victim: Victim, downtime: Duration) -> Result<bool> {
    let killed = cluster.kill(victim)?;
    // Part of the scenario, not synchronisation: how long a dead process stays dead is random, too.
    std::thread::sleep(downtime);
    cluster.restart(victim)?;
    Ok(killed)
}

fn list(cluster: &Cluster, session: &str) -> Result<Vec<Value>> {
    let page = cluster.get(&format!("/v1/sessions/{session}/events?limit=1000"))?;
    Ok(page["data"].as_array().cloned().unwrap_or_default())
}

pub(super) fn is_idle(events: &[Value]) -> bool {
    let is_status = |event: &&Value| event["type"].as_str().is_some_and(|t| t.starts_with("session.status_"));
    events.iter().rfind(is_status).is_some_and(|event| event["type"] == "session.status_idle")
}

fn results(events: &[Value]) -> usize {
    events.iter().filter(|event| event["type"] == "agent.tool_result").count()
}

/// Compares what the history says was run with what the witness saw.
pub(super) fn judge_calls(events: &[Value], witness: &[String], steps: usize, verdict: &mut Verdict) {
    let mut succeeded = 0;
    for result in events.iter().filter(|event| event["type"] == "agent.tool_result") {
        let call = events.iter().find(|event| event["id"] == result["tool_use_id"]);
        let command = call.and_then(|c| c["input"]["command"].as_str()).unwrap_or_default();
        let id = command.split_whitespace().nth(1).unwrap_or_default();
        let runs = witness.iter().filter(|line| line.as_str() == id).count();
        if result["is_error"] == json!(true) {
            verdict.interrupted += usize::from(result["content"].to_string().contains("interrupted"));
        } else {
            succeeded += 1;
            if runs == 0 {
                verdict.lost.push(format!("the witness never saw {id}"));
            }
        }
        if runs > 1 {
            verdict.doubled.push(id.to_owned());
        }
    }
    let calls = events.iter().filter(|event| event["type"] == "agent.tool_use").count();
    if verdict.stuck.is_none() && (succeeded != steps || results(events) != calls) {
        let found =
            format!("{succeeded} of {steps} steps succeeded, {calls} calls, {} results", results(events));
        verdict.stuck = Some(found);
    }
    verdict.rolled_back = events.iter().filter(|event| event["type"] == "home_rolled_back").count();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, word: &str) -> Value {
        json!({"type": "agent.tool_use", "id": id, "input": {"command": format!("echo {word} >> ~/witness")}})
    }

    fn result(of: &str, is_error: bool) -> Value {
        json!({"type": "agent.tool_result", "id": format!("r-{of}"), "tool_use_id": of, "is_error": is_error,
               "content": [{"type": "text", "text": if is_error { "interrupted" } else { "done" }}]})
    }

    #[test]
    fn a_call_that_ran_twice_or_left_no_trace_is_found() {
        let events = [call("1", "a"), result("1", false), call("2", "b"), result("2", false)];
        let mut verdict = Verdict::default();
        judge_calls(&events, &["a".to_owned(), "a".to_owned()], 2, &mut verdict);
        assert_eq!((verdict.doubled.as_slice(), verdict.lost.len()), (&["a".to_owned()][..], 1));
    }

    #[test]
    fn an_interrupted_call_may_have_run_or_not_but_not_twice() {
        let events = [call("1", "a"), result("1", true), call("2", "b"), result("2", false)];
        for (witness, doubled) in [(vec!["b"], 0), (vec!["a", "b"], 0), (vec!["a", "a", "b"], 1)] {
            let witness: Vec<String> = witness.into_iter().map(str::to_owned).collect();
            let mut verdict = Verdict::default();
            judge_calls(&events, &witness, 1, &mut verdict);
            assert_eq!((verdict.doubled.len(), verdict.interrupted), (doubled, 1), "{witness:?}");
        }
    }

    #[test]
    fn an_acknowledged_event_that_vanished_or_moved_is_lost() {
        let event = |id: &str| json!({"id": id});
        let mut acknowledged = Acknowledged::default();
        acknowledged.note(&[event("1"), event("2")]);
        assert!(acknowledged.missing(&[event("1"), event("2"), event("3")]).is_empty());
        assert_eq!(acknowledged.missing(&[event("1"), event("3")]), ["2"]);
        assert_eq!(acknowledged.missing(&[event("2"), event("1")]).len(), 1);
    }
}
