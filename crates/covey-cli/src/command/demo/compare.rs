//! Whether a run with losses gave the same as the run without.
//!
//! The one allowed difference is the call that ran when the sandbox died: in the lossy history it stands with
//! an error result that says it was interrupted, followed by whatever the model then did about it (the script
//! looks, then makes the call again). Cutting that out must leave the reference history, event by event.

use serde_json::{Value, json};

/// What of an event must be the same in both runs: everything but ids, times and what the API counts.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shown {
    kind: String,
    content: Value,
}

/// Reduces an event log to what must be the same: the conversation, the calls and their results. What Covey says
/// about its own work (requests to the model, sandboxes that are ready, snapshots) follows the losses.
pub(super) fn shown(events: &[Value]) -> Vec<Shown> {
    in_call_order(events)
        .into_iter()
        .filter_map(|event| {
            let kind = event["type"].as_str()?;
            if ["span.", "sandbox.", "home."].iter().any(|own| kind.starts_with(own)) {
                return None;
            }
            let content = json!({
                "content": event.get("content"),
                "name": event.get("name"),
                "input": event.get("input"),
                "is_error": event.get("is_error"),
                "stop_reason": event.get("stop_reason").map(|reason| &reason["type"]),
            });
            Some(Shown { kind: kind.to_owned(), content })
        })
        .collect()
}

/// Results of parallel calls come as they finish, which no two runs share; the model gets them in the order of
/// its calls, and so do we.
fn in_call_order(events: &[Value]) -> Vec<&Value> {
    let is_result = |event: &Value| event["type"] == "agent.tool_result";
    let position = |result: &Value| events.iter().position(|event| event["id"] == result["tool_use_id"]);
    let mut ordered: Vec<&Value> = events.iter().collect();
    for run in ordered.chunk_by_mut(|a, b| is_result(a) == is_result(b)) {
        if run.first().is_some_and(|event| is_result(event)) {
            run.sort_by_key(|result| position(result));
        }
    }
    ordered
}

/// The position of the interrupted call's result in the log, if there is one.
fn interrupted_result(events: &[Shown]) -> Option<usize> {
    events.iter().position(|event| event.kind == "agent.tool_result" && was_interrupted(&event.content))
}

/// Whether a tool result tells the model that its call was interrupted.
pub(super) fn was_interrupted(event: &Value) -> bool {
    event["is_error"] == json!(true) && event["content"].to_string().contains("interrupted")
}

/// Cuts the interrupted call, its result and the model's look out of a lossy history, so that the call that was
/// made again stands where the interrupted one stood.
pub(super) fn without_interrupted_call(events: &[Shown]) -> Result<Vec<Shown>, String> {
    let Some(result) = interrupted_result(events) else {
        return Err("no call was told to have been interrupted".to_owned());
    };
    let is_call = |event: &Shown| event.kind == "agent.tool_use";
    let Some(call) = events[..result].iter().rposition(is_call) else {
        return Err("an interrupted result without a call".to_owned());
    };
    let again = events[result..]
        .iter()
        .position(|event| is_call(event) && event.content["input"] == events[call].content["input"])
        .map(|offset| result + offset);
    let Some(again) = again else {
        return Err("the interrupted call was not made again".to_owned());
    };
    // Text and thinking that came before the call stand before it in both runs.
    Ok(events[..call].iter().chain(&events[again..]).cloned().collect())
}

/// The first difference between two histories, in words.
pub(super) fn first_difference(reference: &[Shown], lossy: &[Shown]) -> Option<String> {
    let at = reference.iter().zip(lossy).position(|(a, b)| a != b);
    match at {
        Some(at) => Some(format!(
            "event {at}: {} {} in the run without losses, {} {} in the other",
            reference[at].kind, reference[at].content, lossy[at].kind, lossy[at].content
        )),
        None if reference.len() != lossy.len() => Some(format!(
            "{} events in the run without losses, {} in the other",
            reference.len(),
            lossy.len()
        )),
        None => None,
    }
}

/// Calls that have no result, or more than one.
pub(super) fn unpaired_calls(events: &[Value]) -> Vec<String> {
    let ids = |kind: &str, field: &str| -> Vec<String> {
        events
            .iter()
            .filter(|event| event["type"] == kind)
            .filter_map(|event| event[field].as_str().map(str::to_owned))
            .collect()
    };
    let (calls, results) = (ids("agent.tool_use", "id"), ids("agent.tool_result", "tool_use_id"));
    let mut unpaired: Vec<String> =
        calls.iter().filter(|call| results.iter().filter(|r| r == call).count() != 1).cloned().collect();
    unpaired.extend(results.iter().filter(|result| !calls.contains(result)).cloned());
    unpaired
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, command: &str) -> Value {
        json!({"type": "agent.tool_use", "id": id, "name": "bash", "input": {"command": command}})
    }

    fn result(id: &str, text: &str, is_error: bool) -> Value {
        json!({"type": "agent.tool_result", "id": format!("r{id}"), "tool_use_id": id, "is_error": is_error,
               "content": [{"type": "text", "text": text}]})
    }

    #[test]
    fn the_interrupted_call_is_the_only_allowed_difference() {
        let reference =
            shown(&[call("1", "a"), result("1", "A", false), call("2", "b"), result("2", "B", false)]);
        let lossy = |last: &str| {
            shown(&[
                call("x", "a"),
                result("x", "A", false),
                call("y", "b"),
                result("y", "the call was interrupted and may have had effects", true),
                call("z", "look"),
                result("z", "seen", false),
                call("w", "b"),
                result("w", last, false),
            ])
        };
        let cut = without_interrupted_call(&lossy("B")).unwrap();
        assert_eq!(first_difference(&reference, &cut), None);
        let cut = without_interrupted_call(&lossy("C")).unwrap();
        assert!(first_difference(&reference, &cut).unwrap().starts_with("event 3:"));
        assert!(without_interrupted_call(&reference).is_err());
    }

    #[test]
    fn results_of_parallel_calls_are_compared_in_the_order_of_the_calls() {
        let (one, two) = (call("1", "a"), call("2", "b"));
        let first = shown(&[one.clone(), two.clone(), result("1", "A", false), result("2", "B", false)]);
        let second = shown(&[one.clone(), two.clone(), result("2", "B", false), result("1", "A", false)]);
        assert_eq!(first_difference(&first, &second), None);
        let swapped = shown(&[one, two, result("1", "B", false), result("2", "A", false)]);
        assert!(first_difference(&first, &swapped).is_some());
    }

    #[test]
    fn a_call_with_two_results_or_none_is_named() {
        let events = [call("1", "a"), call("2", "b"), result("2", "B", false), result("2", "B", false)];
        assert_eq!(unpaired_calls(&events), ["1", "2"]);
    }
}
